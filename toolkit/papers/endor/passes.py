"""ENDOR's passes through whole models: on the paper's machine modelled, on this one measured and modelled.

pass_table(profile("endor-rtx4080"), Workload("opt-66b"), MAPS["opt-66b"])    # of toolkit.costs.tables
race = Race(Workload("opt-1536"), layers=10, ways=[(Way("dense", device="cpu"), "storage")])
pass_measurements(race)
pairs_table(race_spans(race), PAIRS)
"""

from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from toolkit.costs.cost_model import predict
from toolkit.costs.stage_tables import beside_dense, beside_measured
from toolkit.costs.tables import layer_of
from toolkit.measure.race import PLACED, Race, race_spans
from toolkit.measure.rates import this_machine
from toolkit.measure.summary import by_turn, stage_summary, summary
from toolkit.policies.methods import ACCELERATE, METHODS, RIVALS
from toolkit.policies.placement import LayerMap
from toolkit.policies.ways import Way

WAY = ["method", "policy"]  # the labels of a way with all layers on disk
Pairs = Sequence[tuple[tuple[str, str], tuple[str, str]]]

# Sections 3.3 and 5.1, C.1 and C.3. The 20 remapped layers of Llama2-70B take more than the 10 dense ones did: 17 fit
MAPS = {
    "opt-66b": {"published": LayerMap(5, 8, 51), "remapped": LayerMap(5, 14, 45)},
    "llama2-70b": {"published": LayerMap(6, 10, 64), "remapped": LayerMap(6, 20, 54)},
}

# ours and other, each a method and policy with all layers on disk
PAIRS = (
    (("endor", "pipelined"), ("dense", "pipelined")),
    (("endor_packed", "pipelined"), ("dense", "pipelined")),
    (("endor", "pipelined"), (ACCELERATE, "sequential")),
    (("endor_packed", "pipelined"), ("llama.cpp F16", "sequential")),
)


def pass_measurements(race: Race, fresh: bool = False) -> pd.DataFrame:
    """One token as `toolkit.costs.tables.pass_table` has it, measured, and for our own runtime modelled; more columns
    as in `operation_measurements`. The race has no limit of memory, since a pass under one is not modelled.

    Stages are those of a window over several tokens, divided by their number; `tokens` is that number and
    `stored_bytes` what one token must read. `mapping` is `storage` with every layer on disk; `published`, the paper's
    share of layers in memory; or `refilled` (`LayerMap.refilled`). Time in which no weight is read, decoded or
    multiplied is stage `other`, which the model leaves out. Raises what `race_spans` raises.
    """
    workload, spans = race.workload, race_spans(race, fresh=fresh)
    machine = this_machine(workload.dtype, workload.sparsity, fresh)
    tables, of_window = [], ["seconds", "seconds_low", "seconds_high", "nbytes"]
    for (method, policy, mapping), rows in spans.groupby(PLACED, sort=False):
        way, first = Way(method, policy=policy, device="cpu"), rows.iloc[0]
        where = LayerMap(0, int(first["dram_layers"]), int(first["storage_layers"]))
        labels = {"profile": machine.id, **asdict(workload), "op": "pass", **asdict(way)}
        labels |= {"mapping": mapping, "dram_layers": where.dram, "storage_layers": where.storage}
        stages = stage_summary(rows)
        a_token = {name: stages[name] / stages["tokens"] for name in of_window}
        tables.append(stages.assign(**a_token, **labels))
        if method not in RIVALS:
            layers = [layer_of(workload, machine, method, tier) for tier in where.tiers]
            tables.append(predict(machine, layers, way).stages().assign(**labels))
    table = pd.concat(tables, ignore_index=True)
    mapped = table["mapping"] != "storage"
    compared = [beside_dense(table[~mapped])]
    if mapped.any():
        compared.append(beside_dense(table[mapped], mapping="published"))
    return beside_measured(pd.concat(compared, ignore_index=True))


def pairs_table(spans: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """How many times as fast ours was in the same turn: `ratio`, with its range (`summary`).

    `spans` are those of `race_spans`. `pairs` are of (method, policy), ours and the other, with all layers on disk;
    pairs that are not among the spans are left out.

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
    for ours, other in pairs:
        if not {ours, other} <= set(counts.index):
            continue
        over = {"ratio": dict(zip(WAY, other, strict=True))}
        ways = summary(turns, WAY, over=over).set_index(WAY).join(counts)
        mine, theirs = ways.loc[ours], ways.loc[other]
        comparable = {ours[0], other[0]} <= set(METHODS) and ours[1] == other[1]
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
