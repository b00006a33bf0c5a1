"""One token through a model whose layers are on disk: packed, dense by our own reader, and Accelerate's disk offload.

    python benchmarks/offload.py [--folder DIR] [--layers 6] [--repetitions 7] [--markdown]

The model is a twin of TinyLlama-1.1B (hidden 2048, FFN 5632) with random bfloat16 weights, half of them zero, and fewer
layers; no layer stays in memory. All ways must give the same logits, but for `endor_packed`, whose sums run in
another order. They take turns; of ours a turn's second token counts (`toolkit.measure.turns`). Ours read past the
page cache, or, where the file system has no direct reads (`modes` in the report), with their pages dropped before that
token; Accelerate maps its files, so their pages are dropped before each of its passes. With so few layers that buffers
keep them all nothing would be read: that is refused. Ratios are medians over the turns, with quartiles. `dense` is the
fair baseline: the same reader, the next layer read while this one is used.
Goals: Endor 1.7 times faster than that, 3 times faster than Accelerate. The bytes allow 1.78 times.
Writes results/benchmarks/offload.json.
"""

import argparse
import sys

import pandas as pd
import reports

from toolkit.measure.accelerate import RIVAL
from toolkit.measure.end_to_end import goals_table
from toolkit.measure.turns import PLACED, pass_spans, turn_seconds
from toolkit.models.workload import Workload
from toolkit.policies.ways import Way, all_ways

WORKLOAD = Workload("tinyllama-1.1b", "bfloat16")
WAYS = [
    *((way, "storage") for way in all_ways(["pipelined", "sequential"], "cpu", ["endor", "dense"])),
    (Way("endor_packed", policy="pipelined", device="cpu"), "storage"),
    RIVAL,
]


def main() -> int:
    """Check, time, print and save; 1 if a goal is missed."""
    options = _options()
    spans = pass_spans(WORKLOAD, options.layers, WAYS, options.repetitions, options.folder)
    turns = turn_seconds(spans)
    turns.columns = [f"{method}, {policy}" for method, policy, _ in turns]
    medians, goals = turns.median().sort_values().rename("seconds a token"), goals_table(spans)
    print(_markdown(medians, goals) if options.markdown else f"{medians}\n\n{goals.to_string(index=False)}")
    modes = spans.groupby(PLACED)["mode"].first().reset_index().to_dict("records")
    found = {"modes": modes, "goals": goals.to_dict("records"), "seconds": turns.to_dict("records")}
    reports.save("offload", {"layers": options.layers, "load_per_core": reports.load_per_core(), **found})
    return int(not goals["met"].all())


def _markdown(medians: pd.Series, goals: pd.DataFrame) -> str:
    lines = ["| way | seconds a token |", "| --- | ---: |"]
    lines += [f"| {name} | {seconds:.3f} |" for name, seconds in medians.items()]
    lines += [
        "",
        "| ours | against | ratio of times | quartiles | wanted | |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    lines += [
        f"| {row.ours} | {row.other} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} | ≥ {row.wanted:.2f} | "
        f"{'met' if row.met else 'missed'} |"
        for row in goals.itertuples()
    ]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = reports.disk_parser(__doc__, repetitions=7)
    parser.add_argument("--layers", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
