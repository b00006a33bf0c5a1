"""`python -m toolkit plan`: the best ways for this model on this machine, before anything is packed.

It measures the machine once, which takes one to two minutes, and predicts the speed of every way of running the model
within the given memory. A price in quality is measured with this model; that of another model is marked as a guess.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.run import bytes_of
from toolkit.commands.trial import check_trial, trial
from toolkit.errors import UserError, whole
from toolkit.offload.variant import check_not_packed

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.planner.plan import Recommendation

ROWS = 8


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser("plan", help="what helps here, with this model", description=__doc__, **style)
    parser.set_defaults(command=plan)
    parser.add_argument("model", help="an embedded model, a shape such as llama2-70b, a folder, a .gguf file, a hub id")
    parser.add_argument("--dram", help="memory for weights and buffers, such as 6GB (default: most of what is free)")
    parser.add_argument("--machine", help="plan for a machine of data/hardware instead, by bytes alone")
    parser.add_argument("--device-memory", help="limit for the GPU's memory, such as 8GB (default: most of it)")
    parser.add_argument("--loss", default="5%", help="by which perplexity may grow (default: 5%%)")
    parser.add_argument("--measure", action="store_true", help="evaluate this model's ways now, on few windows of text")
    parser.add_argument("--text", default="wiki-slice", help="to evaluate on (default: wiki-slice)")
    parser.add_argument("--prompt-tokens", type=whole, default=64, help="before the first token (default: 64)")
    parser.add_argument("--fresh", action="store_true", help="measure this machine again, in one to two minutes")
    parser.add_argument("--all", action="store_true", help=f"show every way, not only the best {ROWS}")
    tried = "then pack the first N ways, run each within the limit, and print what it reached"
    parser.add_argument("--try", dest="tries", type=whole, metavar="N", help=tried)
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="with --try: a GGUF file that llama.cpp runs beside them"
    )
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")


def plan(options: argparse.Namespace) -> None:
    """Print the ways, the best first, and what to do."""
    dram_bytes, loss = bytes_of("--dram", options.dram), _share(options.loss)
    check_not_packed(Path(options.model))
    device_bytes = bytes_of("--device-memory", options.device_memory)
    for option, nbytes in {"--dram": dram_bytes, "--device-memory": device_bytes}.items():
        if nbytes == 0:
            raise UserError(f"{option} 0: expected more than nothing, such as 2GB")
    if options.tries and (options.machine or options.json):
        raise UserError("--try: runs ways on this machine and prints a table; leave out --machine and --json")
    if options.gguf and not options.tries:
        raise UserError(f"--gguf {options.gguf}: a rival of the ways that are tried; add --try 3, or leave it out")
    if options.machine:
        for option in [name for name in ("measure", "fresh") if getattr(options, name)]:
            raise UserError(f"--{option}: plans for {options.machine} are by bytes alone; leave it out, or --machine")
        _elsewhere(options, dram_bytes, device_bytes, loss)
        return
    print("looking at the model and the machine", file=sys.stderr)
    from toolkit.planner.plan import plan as plan_for
    from toolkit.planner.target import open_target

    target = open_target(options.model)
    if options.tries:
        check_trial(target, options.gguf)
    settings = {"measure": options.measure, "text": options.text, "prompt_tokens": options.prompt_tokens}
    settings |= {"fresh": options.fresh, "device_bytes": device_bytes, "measuring": _show_bounds}
    found = plan_for(target, dram_bytes, loss, **settings)
    if options.json:
        print(json.dumps(_plain(found), indent=1))
    else:
        _show(found, None if options.all else ROWS)
    if options.tries:
        trial(found, options)


def _elsewhere(options: argparse.Namespace, dram_bytes: int | None, device_bytes: int | None, loss: float) -> None:
    """Print what another machine can reach at most."""
    from toolkit.commands.plan_table import plan_table, wrapped
    from toolkit.costs.hardware import profile
    from toolkit.planner.by_bytes import best_elsewhere, resized
    from toolkit.planner.choices import price_text
    from toolkit.planner.target import open_target

    machine = resized(profile(options.machine), dram_bytes, device_bytes)
    table = best_elsewhere(open_target(options.model), machine, loss, options.text)
    if table.empty:
        raise UserError(
            f"{options.model}: no way fits on {options.machine}; give it more memory, or a machine with a disk"
        )
    if options.json:
        print(table.to_json(orient="records", indent=1))
        return
    print(f"{options.model} on {options.machine}: limits by bytes, modelled; nothing was measured there")
    named = table["way"][0] if table["within"][0] else None  # the fastest within the loss
    table = table.sort_values("tokens_s", ascending=False, kind="stable").assign(at_best=True)
    print(plan_table(table, [named], "device", "dram", "storage"))
    if named:
        row = table[table["way"] == named].iloc[0]
        print(f"\n{wrapped(f'Within a loss of {loss:.0%}: {named}. {price_text(row)}')}")


def _show_bounds(bounds: "pd.DataFrame") -> None:
    """Print what each way moves, before the machine is measured."""
    names = {"read_mb": "MB read a token", "token_mb": "MB multiplied a token", "needed_mb": "MB of DRAM at least"}
    shown = bounds.head(ROWS).rename(columns=names).to_string(index=False, float_format="{:,.0f}".format)
    print(f"by bytes alone:\n{shown}", file=sys.stderr)
    print("measuring this machine, once for all plans: one to two minutes", file=sys.stderr, flush=True)


def _share(text: str) -> float:
    """5% or 0.05. Raises `UserError` for anything else."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise UserError(f"--loss {text}: expected a share such as 5% or 0.05")
    return share


def _show(found: "Recommendation", rows: int | None) -> None:
    """Print the table, the ways to take, and the advice; the fastest so many ways and those to take, or all."""
    from toolkit.commands.plan_table import plan_table, wrapped

    target, table = found.target, found.table
    size = f"{target.nbytes / 1e9:.2f} GB in {8 * target.dtype_bytes:.0f} bits"
    print(f"{target.name}: {size}; {found.dram_bytes / 1e9:.2f} GB of DRAM. Speeds are modelled.")
    named = [choice.way for choice in found.choices]
    shown = table if rows is None else table[(table.index < rows) | table["way"].isin(named)]
    print(plan_table(shown, named, "range", "first", "read", "in DRAM", "limit"))
    if len(shown) < len(table):
        print(f"{len(table) - len(shown)} of {len(table)} ways are left out: --all shows them")
    for choice in found.choices:
        print(f"\n{wrapped(choice.why)}")
        for command in choice.commands:
            print(f"    {command}")
    print()
    for line in found.advice:
        print(wrapped(line))
    for line in found.left_out[:rows]:
        print(f"left out: {line}")


def _plain(found: "Recommendation") -> dict[str, object]:
    """The plan as JSON has it; numbers that are not known are null."""
    rows = found.table.astype(object).where(found.table.notna(), None).to_dict("records")
    about = {"model": found.target.name, "model_bytes": found.target.nbytes, "dram_bytes": found.dram_bytes}
    choices = [{"way": it.way, "why": it.why, "commands": list(it.commands)} for it in found.choices]
    return about | {"ways": rows, "left_out": list(found.left_out), "choices": choices, "advice": list(found.advice)}
