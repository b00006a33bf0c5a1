"""`sparse-offload bench`: a model's ways in whole processes within limits of memory, beside llama.cpp and the plan.

A row is printed as each turn ends: the way's median so far, with its range.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from toolkit.commands.kv_type import add_kv_type
from toolkit.commands.run import checked_prompt
from toolkit.errors import UserError, whole
from toolkit.files import make_folder, write_csv
from toolkit.memory_limits import bytes_of

EPILOG = """\
Each way is a process of its own: `run --memory` for those of the toolkit, and llama.cpp with the model's own GGUF file
in the fastest way of loading it: each way is tried on four tokens first, and ended once it is far behind. Each process
is in a memory cgroup of exactly the limit. Where no cgroup can be made (it needs root or a delegated group), llama.cpp
has no limit, and its rows say so.

--ways takes names as `plan` has them, with hyphens (as-is, int8, spqr-3-bits-head-too), or their beginnings (spqr). A
way that is not packed yet is packed once, and kept in the cache; by SpQR that takes minutes. Without --ways, those run
that `plan` names. `--ways as-is` packs nothing.

--kv-type is that of the file as it is, and of the plan. llama.cpp keeps its own type of keys and values, f16.
"""
COLUMNS = ("limit", "way", "tokens/s", "range", "plan", "MB/token", "peak MB", "first s", "price", "text")
WIDTHS = (7, 34, 9, 13, 8, 9, 8, 8, 15, 9)


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser(
        "bench", help="race ways and llama.cpp within limits of memory", description=__doc__, epilog=EPILOG, **style
    )
    parser.set_defaults(command=bench)
    parser.add_argument("model", help="a GGUF file, a packed folder, a model's name or folder, an id on the hub")
    parser.add_argument("--memory", required=True, help="limits of a process, such as 600MB,1GB")
    parser.add_argument("--ways", help="such as as-is,spqr; see below (default: those that plan names)")
    turns = "of each way and limit; as many again where other work disturbs them (default: 3)"
    parser.add_argument("--turns", type=whole, default=3, help=turns)
    tokens = "of a turn; slow ways make fewer, four at least (default: 32)"
    parser.add_argument("--tokens", type=whole, default=32, help=tokens)
    parser.add_argument("--prompt", help="what the text begins with")
    add_kv_type(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file, as each turn ends")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s over price, a panel a limit")


def bench(options: argparse.Namespace) -> None:
    """Run the race and print it."""
    limits = [bytes_of("--memory", size) for size in options.memory.split(",")]
    if 0 in limits:
        raise UserError("--memory 0: expected more than nothing, such as 700MB")
    more = {} if options.prompt is None else {"prompt": checked_prompt(options.prompt)}
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {options.plot}: expected a name that ends in .png or .svg")
    ways = options.ways.split(",") if options.ways else []
    if options.kv_type:
        more["kv_type"] = options.kv_type
    for file in filter(None, (options.csv, options.plot)):
        make_folder(file.parent)
    print("looking at the model and the machine", file=sys.stderr, flush=True)
    from toolkit.evidence.limits import draw
    from toolkit.planner.bench import bench as race

    table = race(options.model, limits, ways, options.turns, options.tokens, done=_shower(options.csv), **more)
    print("\nmedians of all turns")
    _print(table)
    for row in table[table["rival"]].itertuples():
        print(f"{row.way} within {row.limit_mb:g} MB: {row.note}")
    if options.csv:
        write_csv(options.csv, table)
    if options.plot:
        draw(table, options.plot)


def _shower(csv: Path | None) -> Callable:
    """A function that prints a way's row as its turn ends, and writes all rows so far: a race may be interrupted."""
    import pandas as pd

    rows: dict[tuple[float, str], pd.DataFrame] = {}

    def show(row: pd.DataFrame) -> None:
        if not rows:
            print(_line(COLUMNS), flush=True)
        rows[row["limit_mb"].item(), row["way"].item()] = row
        _print(row)
        if csv:
            write_csv(csv, pd.concat(rows.values(), ignore_index=True))

    return show


def _print(table) -> None:
    for _, row in table.iterrows():
        print(_line(_cells(row)), flush=True)
        if row.verdict != "ran":
            print(f"{'':9}{row.verdict}: {row.note}", flush=True)


def _cells(row) -> list[str]:
    """The words of a row, in the order of `COLUMNS`."""
    from toolkit.measure.disturbance import STAR, is_disturbed
    from toolkit.planner.choices import digits, size_text

    def number(value: float, count: int = 3) -> str:
        return "–" if value != value else digits(value, count)

    ran = row.verdict == "ran"
    spread = f"{number(row.tokens_per_s_low)}–{number(row.tokens_per_s_high)}" if ran else "–"
    plan = ("≤ " if row.at_best == 1 else "") + number(row.predicted_per_s)
    limit = size_text(1e6 * row.limit_mb) if row.limited else "none"
    speed = number(row.tokens_per_s) + STAR.strip() * is_disturbed(row)
    numbers = [number(value) for value in (row.read_mb, row.peak_mb, row.first_s)]
    return [limit, row.way, speed, spread, plan, *numbers, price_text(row), row.text_hash or "–"]


def price_text(row) -> str:
    """The price of a way: "lossless", a ratio with its error, "~" before a guess, or "–"."""
    if row.relative != row.relative:
        return "–"
    if row.relative == 1 and not row.guess:
        return "lossless"
    error = (row.relative_high - row.relative_low) / 2
    return f"{'~' * bool(row.guess)}{row.relative:.3f}" + (f" ± {error:.3f}" if error == error and error > 0 else "")


def _line(cells) -> str:
    first, second, *others = zip(cells, WIDTHS, strict=True)
    return " ".join(
        [f"{first[0]:>{first[1]}}", f"{second[0]:{second[1]}}", *(f"{cell:>{size}}" for cell, size in others)]
    )
