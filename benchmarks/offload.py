"""Tokens through a model whose layers are on disk: packed, dense by our own reader, Accelerate, and llama.cpp.

    python benchmarks/offload.py [--folder DIR] [--layers 6] [--repetitions 7] [--markdown]

The model is a twin of TinyLlama-1.1B (hidden 2048, FFN 5632) with random bfloat16 weights, half of them zero, and fewer
layers; no layer stays in memory. Ways take turns, each a window over four tokens (`toolkit.measure.race`).
Ours must give the logits of the model in memory; those of `endor_packed`, whose sums run in another order, and of
llama.cpp's F16 may differ by rounding. Ours read past the page cache, or, without direct reads, with their
pages dropped before each token. Accelerate and llama.cpp map their files, whose pages are dropped before each token
(`mode` says which). llama.cpp gets an environment of its own under the cache; where that cannot be made, the
output says why. Ratios are medians of the turns' own, with the least and the most. `dense, pipelined` is the fair
baseline: the same reader, and the next layer is read while this one is used. A ratio above its byte limit is a fault of
the measurement. Writes results/benchmarks/offload.json.
"""

import argparse
import sys

import pandas as pd
import reports

from toolkit.measure.accelerate import RIVAL
from toolkit.measure.llama_cpp import missing
from toolkit.measure.race import PLACED, Race, run_race
from toolkit.measure.summary import by_turn, summary
from toolkit.models.workload import Workload
from toolkit.offload.ways import Way, all_ways
from toolkit.papers.endor.latency import LAYER_METHODS
from toolkit.papers.endor.passes import PAIRS, pairs_table

WORKLOAD = Workload("tinyllama-1.1b", "bfloat16")
LLAMA_CPP = ("llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_0")
# how many times faster the first of each pair should be; a pipeline should not lose
GOALS = dict(zip(PAIRS, (1.7, 1.7, 3.0, 1.7, 1.0, 1.0, 1.0), strict=True))


def main() -> int:
    """Check, time, print and save; 1 if a goal is missed or a measurement is at fault."""
    options = _options()
    ways = all_ways(["pipelined"], "cpu", ["dense_packed", *LAYER_METHODS])
    ways += all_ways(device="cpu", methods=["endor", "dense"])
    ways += [] if missing() else [Way(name, device="cpu") for name in LLAMA_CPP]
    placed = [RIVAL, *((way, "storage") for way in ways)]
    spans = run_race(Race(WORKLOAD, options.layers, placed, options.repetitions), options.folder)
    turns = by_turn(spans, PLACED)
    table = summary(turns, PLACED).sort_values("seconds")[[*PLACED, "seconds", "read_bytes", "mode"]]
    goals = _judged(pairs_table(spans))
    print(_markdown(table, goals) if options.markdown else f"{table}\n\n{goals.T.to_string()}")
    if reason := missing():
        print(f"\nllama.cpp takes no part: {reason}")
    found = {"ways": table.to_dict("records"), "goals": goals.to_dict("records"), "llama_cpp_missing": reason}
    found["seconds"] = turns[[*PLACED, "repetition", "seconds"]].to_dict("records")
    reports.save("offload", {"layers": options.layers, "load_per_core": reports.load_per_core(), **found})
    return int(not goals["met"].all() or goals["fault"].any())


def _judged(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs with what was `wanted` and whether that was `met`."""
    wanted = {tuple(", ".join(way) for way in pair): goal for pair, goal in GOALS.items()}
    goals = [wanted[pair] for pair in zip(pairs["ours"], pairs["other"], strict=True)]
    return pairs.assign(wanted=goals, met=pairs["ratio"] >= goals)


def _markdown(table: pd.DataFrame, goals: pd.DataFrame) -> str:
    lines = ["| way | seconds a token | MB read a token | reads |", "| --- | ---: | ---: | --- |"]
    lines += [
        f"| {row.method}, {row.policy} | {row.seconds:.3f} | {row.read_bytes / 1e6:.1f} | {row.mode} |"
        for row in table.itertuples()
    ]
    lines += [
        "",
        "| ours | against | ratio of times | range | byte limit | wanted | |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    lines += [
        f"| {row.ours} | {row.other} | {row.ratio:.2f} | {row.ratio_low:.2f} to {row.ratio_high:.2f} | "
        f"{'–' if pd.isna(row.byte_limit) else f'{row.byte_limit:.2f}'} | ≥ {row.wanted:.2f} | "
        f"{f'**fault:** {row.fault}' if row.fault else 'met' if row.met else 'missed'} |"
        for row in goals.itertuples()
    ]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = reports.disk_parser(__doc__, repetitions=7)
    parser.add_argument("--layers", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
