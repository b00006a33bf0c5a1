"""`python -m toolkit plan`: the best ways for this model on this machine, before anything is packed.

It measures the machine once, which takes one to two minutes, and predicts the speed of every way of running the model
within the given memory. A price in quality is measured with this model; that of another model is marked as a guess.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.kv_type import add_kv_type
from toolkit.errors import UserError, whole
from toolkit.memory_limits import bytes_of
from toolkit.offload.variant import check_not_packed

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.planner.plan import Recommendation


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser("plan", help="what helps here, with this model", description=__doc__, **style)
    parser.set_defaults(command=plan)
    parser.add_argument("model", help="an embedded model, a shape such as llama2-70b, a folder, a .gguf file, a hub id")
    parser.add_argument("--memory", help="limit for all that a process takes, such as 6GB: libraries, weights, buffers")
    parser.add_argument("--dram", help="memory for weights and buffers alone (default: most of what is free)")
    parser.add_argument("--machine", help="plan for a machine of data/hardware instead, by bytes alone")
    parser.add_argument("--device-memory", help="limit for the GPU's memory, such as 8GB (default: most of it)")
    parser.add_argument("--loss", default="5%", help="by which perplexity may grow (default: 5%%)")
    parser.add_argument("--measure", action="store_true", help="evaluate this model's ways now, on few windows of text")
    parser.add_argument("--text", default="wiki-slice", help="to evaluate on (default: wiki-slice)")
    parser.add_argument("--prompt-tokens", type=whole, default=64, help="before the first token (default: 64)")
    add_kv_type(parser)
    parser.add_argument("--fresh", action="store_true", help="measure this machine again, in one to two minutes")
    parser.add_argument("--all", action="store_true", help="show every way, not only the best ones")
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")


def plan(options: argparse.Namespace) -> None:
    """Print the ways, the best first, and what to do."""
    limits = {f"--{name}": getattr(options, name.replace("-", "_")) for name in ("memory", "dram", "device-memory")}
    memory_bytes, dram_bytes, device_bytes = (bytes_of(*limit) for limit in limits.items())
    loss = _share(options.loss)
    check_not_packed(Path(options.model))
    for option, nbytes in zip(limits, (memory_bytes, dram_bytes, device_bytes), strict=True):
        if nbytes == 0:
            raise UserError(f"{option} 0: expected more than nothing, such as 2GB")
    if options.memory and options.dram:
        raise UserError(f"--dram {options.dram}: --memory limits the whole process, weights too; give one of them")
    if options.machine:
        for option in [name for name in ("measure", "fresh", "memory", "kv_type") if getattr(options, name)]:
            name = option.replace("_", "-")
            raise UserError(f"--{name}: plans for {options.machine} are by bytes alone; leave it out, or --machine")
        _elsewhere(options, dram_bytes, device_bytes, loss)
        return
    print("looking at the model and the machine", file=sys.stderr)
    with _few_imports(options):
        from toolkit.planner.plan import plan as plan_for
        from toolkit.planner.plan_table import ROWS, plan_text
        from toolkit.planner.target import open_target

        target = open_target(options.model)
    settings = {"measure": options.measure, "text": options.text, "prompt_tokens": options.prompt_tokens}
    settings |= {"fresh": options.fresh, "device_bytes": device_bytes, "measuring": _show_bounds}
    settings |= {"memory_bytes": memory_bytes, "kv_type": options.kv_type}
    found = plan_for(target, dram_bytes, loss, **settings)
    if options.json:
        print(json.dumps(_plain(found), indent=1))
    else:
        print(plan_text(found, None if options.all else ROWS))


@contextmanager
def _few_imports(options: argparse.Namespace) -> Iterator[None]:
    """Inside the block, imports leave out what a plan does not use, unless something is to be measured.

    transformers makes the outline of a folder.
    """
    from toolkit import hub
    from toolkit.commands.opening import collector_paused

    with collector_paused(), ExitStack() as stack:
        with hub.standing_in(dict.fromkeys(hub.HIDDEN)):
            from toolkit.planner.rates import are_kept
        if are_kept() and not options.measure and not options.fresh and Path(options.model).is_dir():
            stack.enter_context(hub.lean())
        yield


def _elsewhere(options: argparse.Namespace, dram_bytes: int | None, device_bytes: int | None, loss: float) -> None:
    """Print what another machine can reach at most."""
    from toolkit.machines.hardware import profile
    from toolkit.planner.by_bytes import best_elsewhere, resized
    from toolkit.planner.choices import price_text
    from toolkit.planner.plan_table import plan_table, wrapped
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
    sizes = {"--dram": options.dram, "--device-memory": options.device_memory}
    changed = " and ".join(f"{option} {size}" for option, size in sizes.items() if size)
    where = f"{options.machine} with {changed}" if changed else options.machine
    print(wrapped(f"{options.model} on {where}: limits by bytes, modelled; nothing was measured there"))
    named = table["way"][0] if table["within"][0] else None  # the fastest within the loss
    table = table.sort_values("tokens_s", ascending=False, kind="stable").assign(at_best=True)
    print(plan_table(table, [named], "device", "dram", "storage"))
    if named:
        row = table[table["way"] == named].iloc[0]
        print(f"\n{wrapped(f'Within a loss of {loss:.0%}: {named}. {price_text(row)}')}")


def _show_bounds(bounds: "pd.DataFrame") -> None:
    """Print what each way moves, before the machine is measured."""
    from toolkit.planner.plan_table import ROWS

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


def _plain(found: "Recommendation") -> dict[str, object]:
    """The plan as JSON has it; numbers that are not known are null."""
    rows = found.table.astype(object).where(found.table.notna(), None).to_dict("records")
    about = {"model": found.target.name, "model_bytes": found.target.nbytes, "dram_bytes": found.dram_bytes}
    about["memory_bytes"] = found.memory_bytes
    choices = [{"way": it.way, "why": it.why, "commands": list(it.commands)} for it in found.choices]
    return about | {"ways": rows, "left_out": list(found.left_out), "choices": choices, "advice": list(found.advice)}
