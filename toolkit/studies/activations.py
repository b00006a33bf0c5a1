"""Which neurons fire (LLM in a flash, sections 3.1, D and F): tables of traces, and of models in fewer bits."""

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import pandas as pd
import torch

from toolkit.activations import Trace, record
from toolkit.activations.statistics import aggregated_usage, friends, sparsity
from toolkit.activations.synthetic import UsageLaw
from toolkit.cache import kept
from toolkit.policies.sliding_window import SlidingWindow
from toolkit.studies.forms import store
from toolkit.studies.thresholded import LOADING, ThresholdedModel, loaded, thresholds, tokens_of, trace, weights_key

DENSE = "16 bits"
OPT = "opt-6.7b, drawn"
OPT_LAW = {"active": 0.10, "exponent": 1.0, "new": 0.024, "tokens": 5}  # predicted and loaded neurons of C.1
OPT_SHARES = {"embeddings": 0.03, "attention": 0.323, "predictors": 0.0125, "ffn": 0.6462}  # of the model (C.1)
HOT = 0.01  # of the neurons: the most used


def usage_table(found: Trace, tokens: int) -> pd.DataFrame:
    """Neurons that k tokens in a row use: measured on a trace, and modelled by the law of OPT 6.7B.

    Columns: model, layer (NaN where modelled), tokens (k), used, new (what the k-th token brings), evidence. The law
    has as many neurons predicted a token and loaded with a window of 4 as the paper says (C.1); all else follows.
    """
    law = UsageLaw.fit(**OPT_LAW)
    rows = [{"tokens": k, "used": law.aggregated(k), "new": law.new(k) if k > 1 else law.active} for k in _upto(tokens)]
    modelled = pd.DataFrame(rows).assign(model=OPT, evidence="modelled")
    measured = aggregated_usage(found, tokens).assign(model=found.model, evidence="measured")
    table = pd.concat([measured, modelled], ignore_index=True)
    return table.assign(used_percent=100 * table["used"], new_percent=100 * table["new"])


def _upto(tokens: int) -> range:
    return range(1, tokens + 1)


def friends_table(found: Trace, layer: int, ranks: Sequence[int], window: int) -> pd.DataFrame:
    """Co-activation of one layer: its friends by rank, and what bundles of friends read.

    Rows "friend" hold what `friends` gives; rows "quantity" a quantity, its value, unit and, of friends, `chance`:

    - friend n: the mean share of a neuron's tokens that its n-th closest friend shares;
    - by chance: what that of the closest friend would be if neurons knew nothing of each other;
    - hot friends: neurons whose closest friend is among the most used hundredth;
    - read over needed: neurons read, each with its closest friend, over those that a window lacks; once as the paper
      does it, and once without those that came as a friend already.
    """
    pairs = friends(found, layer, ranks).assign(row="friend")
    rows = []
    for rank, group in pairs.groupby("rank"):
        rows.append((f"friend {rank}", 100 * group["together"].mean(), "percent", 100 * group["usage"].mean()))
    closest = pairs[pairs["rank"] == 1]
    rows.append(("by chance", 100 * closest["usage"].mean(), "percent", None))
    rows.append(("hot friends", 100 * _hot_share(found, layer, closest), "percent", None))
    every, fewer = friend_reads(found.active(layer).numpy(), _friend_of(found, layer, closest), window)
    rows += [("read over needed", every, "ratio", None)]
    rows += [("read over needed, friends not read twice", fewer, "ratio", None)]
    quantities = pd.DataFrame(rows, columns=["quantity", "value", "unit", "chance"]).assign(row="quantity", layer=layer)
    return pd.concat([pairs, quantities], ignore_index=True).assign(model=found.model, evidence="measured")


def friend_reads(active: np.ndarray, friend: np.ndarray, window: int) -> tuple[float, float]:
    """Neurons read over those lacking, where each comes with its friend: always, and unless it came as a friend.

    `active` [sequences, tokens, neurons] tells what each token needs; `friend` [neurons] the closest friend of each.
    The window holds what the last tokens needed. Neurons come in the order of their numbers.
    """
    needed = every = fewer = 0
    for sequence in active:
        residency = SlidingWindow(sequence.shape[1], window)
        for token in sequence:
            lacking = residency.step(np.flatnonzero(token)).loaded
            here: set[int] = set()
            for neuron in lacking.tolist():
                if neuron not in here:
                    here |= {neuron, int(friend[neuron])}
                    fewer += 2
            needed, every = needed + len(lacking), every + 2 * len(lacking)
    return every / needed, fewer / needed


def _friend_of(found: Trace, layer: int, closest: pd.DataFrame) -> np.ndarray:
    friend = np.arange(found.units[layer])  # a neuron that never fired is its own
    friend[closest["neuron"]] = closest["friend"]
    return friend


def _hot_share(found: Trace, layer: int, closest: pd.DataFrame) -> float:
    usage = found.active(layer).flatten(0, 1).float().mean(0)
    hot = usage.topk(max(1, round(HOT * len(usage)))).indices.numpy()
    return float(closest["friend"].isin(hot).mean())


def quantised_table(setting: ThresholdedModel, forms: Sequence[str], windows: int) -> pd.DataFrame:
    """Share of neurons that fire in each layer, with the weights in 16 bits and in fewer; kept, a form by itself.

    Thresholds are those of the 16-bit model. Columns: model, form, layer, fired_percent, same (of the neurons that fire
    in either model, those that fire in both), evidence.
    """
    tables = [sparsity(trace(setting, windows)).assign(form=DENSE, same=1.0)]
    tables += [_quantised(setting, form, windows) for form in forms]
    table = pd.concat(tables, ignore_index=True)
    return table.assign(fired_percent=100 * (1 - table["sparsity"]), model=setting.model, evidence="measured")


@kept("quantised_activations", without=LOADING, key=weights_key)
def _quantised(setting: ThresholdedModel, form: str, windows: int) -> pd.DataFrame:
    model, tokens = deepcopy(loaded(setting.model)[0]), tokens_of(setting, "evaluation")
    store(model, form)
    fewer = record(model, setting.model, tokens, setting.corpus, thresholds(setting), windows, setting.sequence_length)
    same = [_same(one, other) for one, other in zip(trace(setting, windows).bits, fewer.bits, strict=True)]
    return sparsity(fewer).assign(form=form, same=same)


def _same(one: torch.Tensor, other: torch.Tensor) -> float:
    both, either = (int(np.bitwise_count(bits.numpy()).sum(dtype=np.int64)) for bits in (one & other, one | other))
    return both / either if either else float("nan")


def small_device(bits: int = 4, weights: float = 7e9) -> pd.DataFrame:
    """Memory of a model in few bits, all of it and with all techniques of the paper (appendix F): an estimate.

    Shares of the model are those of OPT 6.7B (C.1), and its FFN holds what the law of its usage says of 5 tokens.
    """
    whole_gb = weights * bits / 8 / 1e9
    shares = OPT_SHARES | {"ffn": OPT_SHARES["ffn"] * UsageLaw.fit(**OPT_LAW).aggregated(OPT_LAW["tokens"])}
    rows = [("memory, whole", whole_gb), ("memory, all techniques", whole_gb * sum(shares.values()))]
    return pd.DataFrame(rows, columns=["quantity", "value"]).assign(unit="GB", model="7b", evidence="modelled")
