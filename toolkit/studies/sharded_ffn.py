"""HERMES's division of an FFN, computed for real: hot neurons in one arena, cold ones in a shard for each DIMM.

Every shard's product is computed by the kernel that our runtime uses, one after another, and timed. A virtual clock
takes the slowest of them, as processors would that work beside each other: that time is modelled. Sums and bytes are
real.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int8
from torch import Tensor

from toolkit.cache import kept
from toolkit.kernels.neurons import ffn
from toolkit.models.activation import activation, activation_name
from toolkit.models.ffn import decoder_ffns
from toolkit.policies.dimms import imbalance, in_snake_order
from toolkit.storage.bundles import parts
from toolkit.studies.thresholded import LOADING, ThresholdedModel, few_samples, loaded, thresholds, weights_key

GPU = -1  # the place of hot neurons
REPEATED = 3  # products, of which the quickest counts


@kept("sharded_ffn", without=LOADING, key=weights_key)
def sharded_ffn(
    setting: ThresholdedModel, hot_share: float, dimm_counts: Sequence[int], layers: Sequence[int], tokens: int
) -> pd.DataFrame:
    """A row for each number of DIMMs, means over layers and tokens; kept.

    The `hot_share` of the neurons that calibration text uses most is hot; the others are dealt to DIMMs by frequency.
    Columns: dimms; error (largest difference from the undivided product, over its largest number); hot_kib, cold_kib,
    slowest_kib (bytes of active neurons: hot, cold, and of the busiest DIMM); imbalance (busiest over mean);
    in_turn_ms (all cold products), virtual_ms (hot, or the slowest cold one); evidence.
    """
    rows = [
        {"dimms": dimms, **_token(setting, layer, token, dimms, hot_share)}
        for dimms in dimm_counts
        for layer in layers
        for token in range(tokens)
    ]
    means = pd.DataFrame(rows).groupby("dimms", sort=False)
    table = means.mean().assign(error=means["error"].max())
    return table.reset_index().assign(model=setting.model, evidence="modelled")


def _token(setting: ThresholdedModel, layer: int, token: int, dimms: int, hot_share: float) -> dict[str, float]:
    model, limit = loaded(setting.model)[0], thresholds(setting)[layer].item()
    x, weights = few_samples(setting, "evaluation").inputs[layer][token].float(), parts(decoder_ffns(model)[layer])
    bundles, place = torch.cat([*weights.values()], 1), _places(setting, layer, dimms, hot_share)
    active = _active(weights, x, activation_name(model), limit)
    product = partial(ffn, x=x, activation=activation_name(model), threshold=limit)
    sums, kib, seconds = divided_product(bundles, product, active, place, dimms)
    whole = product(bundles)
    return {
        "error": float((sums - whole).abs().max() / whole.abs().max()),
        "hot_kib": kib[0],
        "cold_kib": kib[1:].sum(),
        "slowest_kib": kib[1:].max(),
        "imbalance": float(imbalance(kib[1:])),
        "in_turn_ms": 1e3 * seconds[1:].sum(),
        "virtual_ms": 1e3 * seconds.max(),
    }


def divided_product(
    bundles: Float[Tensor, "neurons width"],
    product: Callable[[Tensor], Float32[Tensor, " hidden"]],
    active: Bool[np.ndarray, " neurons"],
    place: Int8[np.ndarray, " neurons"],
    dimms: int,
) -> tuple[Float32[Tensor, " hidden"], Float64[np.ndarray, " places"], Float64[np.ndarray, " places"]]:
    """The sum over all places of the products of their active neurons; KiB and seconds of each, the GPU's first."""
    shards = [bundles[np.flatnonzero(active & (place == number))] for number in (GPU, *range(dimms))]
    sums, seconds = zip(*(_timed(product, shard) for shard in shards), strict=True)
    return torch.stack(sums).sum(0), np.array([shard.nbytes / 1024 for shard in shards]), np.array(seconds)


def _active(weights: dict[str, Tensor], x: Float32[Tensor, " hidden"], act: str, limit: float) -> np.ndarray:
    """Which neurons' outputs exceed the limit, in fp32 as the kernel computes them."""
    up = weights["up"].float() @ x
    outputs = activation(act)(weights["gate"].float() @ x) * up if "gate" in weights else activation(act)(up)
    return (outputs.abs() > limit).numpy()


def _places(setting: ThresholdedModel, layer: int, dimms: int, hot_share: float) -> np.ndarray:
    """The place of each neuron: `GPU`, or a DIMM."""
    usage = few_samples(setting, "limits").active(layer).float().mean(0).numpy()
    order = np.argsort(-usage, kind="stable")
    hot = round(hot_share * len(order))
    place = np.full(len(order), GPU, np.int8)
    place[order[hot:]] = in_snake_order(np.arange(len(order) - hot), dimms)
    return place


def _timed(product: Callable, shard: Tensor) -> tuple[Float32[Tensor, " hidden"], float]:
    """A shard's part of the sum, and the quickest of some times; an empty one takes none."""
    seconds = []
    for _ in range(REPEATED if len(shard) else 0):
        started = time.perf_counter()
        product(shard)
        seconds.append(time.perf_counter() - started)
    return product(shard), min(seconds, default=0.0)
