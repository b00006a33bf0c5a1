"""ENDOR's passes through whole models: where the paper puts layers, and speed-ups in a race."""

import pandas as pd

from toolkit.measure.summary import by_turn, summary
from toolkit.offload.methods import ACCELERATE, RIVALS
from toolkit.offload.placement import LayerMap

WAY = ["method", "policy"]  # the labels of a way with all layers on disk

# Sections 3.3 and 5.1, C.1 and C.3. The 20 remapped layers of Llama2-70B take more than the 10 dense ones did: 17 fit
MAPS = {
    "opt-66b": {"published": LayerMap(5, 8, 51), "remapped": LayerMap(5, 14, 45)},
    "llama2-70b": {"published": LayerMap(6, 10, 64), "remapped": LayerMap(6, 20, 54)},
}

# ours and other, each a method and policy with all layers on disk
PAIRS = (
    (("endor", "pipelined"), ("dense", "pipelined")),
    (("endor_packed", "pipelined"), ("dense_packed", "pipelined")),  # with the same product
    (("endor", "pipelined"), (ACCELERATE, "sequential")),
    (("endor_packed", "pipelined"), ("llama.cpp F16", "sequential")),
    # the gain by overlap (section 3.4)
    *(((method, "pipelined"), (method, "sequential")) for method in ("dense", "endor", "endor_packed")),
)


def pairs_table(spans: pd.DataFrame) -> pd.DataFrame:
    """How many times as fast ours was in the same turn: `ratio`, with its range (`summary`).

    `spans` are those of `race_spans`. A row each of `PAIRS` that is among them.

    `byte_limit`, for two ways of our own with one policy, is the bytes that the other reads for a token over the bytes
    that ours reads: what moves weights from the same disk with the same reader cannot gain more. It is NaN beside
    other software, which is slower for more reasons. `read_share_ours` and `read_share_other` are the bytes read in the
    window over those that its tokens need. `fault` says what is wrong with a measurement, or is empty: a ratio above
    `byte_limit` in every turn, or reads in the window that differ by more than one layer from what the tokens need.
    """
    on_disk, rows = spans[spans["mapping"] == "storage"], []
    turns = by_turn(on_disk, WAY)
    turns["read_share"] = turns["read_bytes"] / turns["stored_bytes"]
    counts = on_disk.groupby(WAY)[["storage_layers", "tokens"]].first()
    for ours, other in PAIRS:
        if not {ours, other} <= set(counts.index):
            continue
        over = {"ratio": dict(zip(WAY, other, strict=True))}
        ways = summary(turns, WAY, over=over).set_index(WAY).join(counts)
        mine, theirs = ways.loc[ours], ways.loc[other]
        comparable = other[0] not in RIVALS and ours[1] == other[1]
        limit = theirs["stored_bytes"] / mine["stored_bytes"] if comparable else float("nan")
        row = {"ours": ", ".join(ours), "other": ", ".join(other)} | mine[
            ["ratio", "ratio_low", "ratio_high"]
        ].to_dict()
        row |= {"byte_limit": limit, "read_share_ours": mine["read_share"], "read_share_other": theirs["read_share"]}
        faults = [f"above the byte limit {limit:.2f}"] if row["ratio_low"] > limit else []
        faults += [
            f"{', '.join(name)} read {way['read_share']:.0%} of its bytes in the window"
            for name, way in ((ours, mine), (other, theirs))
            if abs(way["read_share"] - 1) > 1 / (way["storage_layers"] * way["tokens"])  # a layer
        ]
        rows.append(row | {"fault": "; ".join(faults)})
    return pd.DataFrame(rows)
