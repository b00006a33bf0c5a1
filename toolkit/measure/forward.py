"""Decoding one token after another with all weights in DRAM: SpQR's storages beside the same model's dense weights.

The decoder linears are those of a quantised model, read by the runtime from a store. Every way gets the same tokens, so
all do the same work. The first tokens are dropped, as in SpQR's thesis (section 4.3).
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from toolkit import paths
from toolkit.errors import UserError
from toolkit.files import make_folder, scratch_folder
from toolkit.formats import Packed, encode
from toolkit.formats.spqr import SpQRMatrix, SpQRTransposed
from toolkit.measure.repetitions import kept_spans
from toolkit.models import decoder_blocks
from toolkit.offload.model import OffloadedModel
from toolkit.policies.placement import LayerMap
from toolkit.pruning.calibration import Calibration
from toolkit.quantization.quantised import QuantisedModel, load_quantised
from toolkit.quantization.spqr import SpQR
from toolkit.storage.packing import pack_model

# with the variant they read and how it is run: all by the toolkit's kernels, in the same step for single tokens
METHODS = {
    "dense": ("dense", "dense_packed"),
    "spqr_packed": ("spqr", "spqr_packed"),
    "spqr_ptcsr_packed": ("spqr_ptcsr", "spqr_ptcsr_packed"),
}
TOKEN = 7
NEAR = 0.05  # of the largest logit: the products add in another order, and dense weights are rounded to 16 bits


def forward_measurements(
    model: str,
    quantiser: SpQR,
    calibration: Calibration,
    tokens: int = 128,
    dropped: int = 10,
    repetitions: int = 3,
    fresh: bool = False,
) -> pd.DataFrame:
    """Seconds of the forward pass of each token, kept: method (of `METHODS`), repetition, token, seconds, and bytes.

    The methods take turns; each begins with an empty cache. `linear_bytes` are those of the decoder linears, which have
    so many `weights`; `weight_bytes` counts the head as well. Raises `UserError` if `tokens` are not more than
    `dropped`, or if a method's logits are not those of the dense weights.
    """
    if not 0 <= dropped < tokens:
        raise UserError(f"tokens={tokens}, dropped={dropped}: expected more tokens than are dropped")
    key = {"forward": model, "quantiser": asdict(quantiser), **asdict(calibration), "tokens": tokens}
    key |= {"dropped": dropped, "repetitions": repetitions}

    def measure() -> pd.DataFrame:
        quantised = load_quantised(model, quantiser, calibration)
        return pd.DataFrame(_turns(quantised, tokens, dropped, repetitions))

    return kept_spans(key, ("toolkit.measure.forward",), measure, fresh)


def _turns(quantised: QuantisedModel, tokens: int, dropped: int, repetitions: int) -> Iterator[dict[str, object]]:
    layers = len(decoder_blocks(quantised.model))
    head_bytes = quantised.model.get_output_embeddings().weight.nbytes
    weights = sum(of.rows * of.columns for of in quantised.statistics)
    with scratch_folder(make_folder(paths.cache_dir())) as folder:
        pack_model(quantised.model, folder / "store", _variants(quantised))
        expected = None
        for repetition in range(1, repetitions + 1):
            for method, (variant, way) in METHODS.items():
                where = LayerMap(0, layers, 0)
                with OffloadedModel.open(folder / "store", way, placement=where, verify=False) as ours:
                    nbytes = sum(layer.nbytes for layer in ours.store.layers_of(variant))
                    seconds, logits = _decode(ours.model, tokens)
                expected = logits if expected is None else expected
                _check(method, logits, expected)
                for token in range(dropped, tokens):
                    sizes = {"weights": weights, "linear_bytes": nbytes, "weight_bytes": nbytes + head_bytes}
                    yield {
                        "method": method,
                        "repetition": repetition,
                        "token": token,
                        "seconds": seconds[token],
                        **sizes,
                    }


def _variants(quantised: QuantisedModel) -> Mapping[str, object]:
    """How each variant's matrices are packed, in the order in which the model has them."""

    def quantised_matrices(form: type, following: Iterator, weight: Tensor) -> Packed:
        return form.from_quantised(next(following), weight.dtype)

    def matrices() -> Iterator:
        for layer in range(len(quantised.folders)):
            yield from quantised.matrices(layer).values()

    forms = (SpQRMatrix, SpQRTransposed)
    packs = {form.name: partial(quantised_matrices, form, matrices()) for form in forms}
    return {"dense": partial(encode, "dense"), **packs}


@torch.no_grad()
def _decode(model: torch.nn.Module, tokens: int) -> tuple[list[float], Tensor]:
    """Seconds of each token's pass, and the logits of the last one."""
    seconds, past = [], None
    for _ in range(tokens):
        start = time.perf_counter()
        found = model(torch.tensor([[TOKEN]]), past_key_values=past, use_cache=True)
        seconds.append(time.perf_counter() - start)
        past = found.past_key_values
    return seconds, found.logits[0, -1].float()


def _check(method: str, logits: Tensor, expected: Tensor) -> None:
    if not torch.allclose(logits, expected, atol=NEAR * float(expected.abs().max())):
        raise UserError(f"{method} gives other logits than dense weights: not timed")
