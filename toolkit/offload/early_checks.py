"""What the index of a packed folder tells at once: the formats it holds, and the memory that running one needs.

torch and transformers take seconds to import. These checks come before that, and raise the errors of the checks that
come later. They refuse nothing else: `Store.open` judges an index that is not as expected.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.errors import UserError, unknown
from toolkit.offload.budget import Budget
from toolkit.policies.placement import needed_bytes

POLICIES = {"pipelined": 2, "sequential": 1}  # slots, as `toolkit.policies.ways.POLICIES` has them
READERS = ("threads", "aio", "io_uring", "kvikio")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
FAVOURITE = "endor"
STRANGE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def format_to_run(folder: Path, asked: str | None = None) -> str:
    """The format that is asked for; else `endor`, or the first by name. Raises `UserError` if it was not packed."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: name one that `python -m toolkit pack` wrote")
    if not (folder / "index.json").is_file():
        raise UserError(f"{folder}: holds no index.json: name a folder that `python -m toolkit pack` wrote")
    variants: set[str] = set()
    with suppress(*STRANGE):
        variants = {run["variant"] for run in _index(folder)["ops"]}
    if asked is not None and variants and asked not in variants:
        raise unknown(f"format of {folder}", asked, variants)
    return asked or favourite(variants or {FAVOURITE})


def favourite(variants: Collection[str]) -> str:
    """The variant that is run where none is named: `endor`, or the first by name."""
    return FAVOURITE if FAVOURITE in variants else min(variants)


def check_dram(folder: Path, form: str, policy: str, dram_bytes: int) -> None:
    """Raise the `UserError` of a DRAM budget that is too small to run this format on the CPU."""
    needed: dict[str, int] = {}
    with suppress(*STRANGE):
        needed = _needed(_index(folder), form, POLICIES[policy])
    Budget("DRAM", dram_bytes).check(**needed)


def _index(folder: Path) -> Mapping:
    return json.loads((folder / "index.json").read_text(encoding="utf-8"))


def _needed(index: Mapping, form: str, slots: int) -> dict[str, int]:
    """The least bytes of each piece that `toolkit.offload.plan` takes on the CPU."""
    runs = [run for run in index["ops"] if run["variant"] == form]
    layers: dict[int, int] = {}
    for run in runs:
        layers[run["layer"]] = layers.get(run["layer"], 0) + run["nbytes"]
    sizes: Sequence[int] = [*layers.values()]
    return {
        "scratch": max(map(_scratch_bytes, runs)),
        "rest": sum(run["nbytes"] for run in index["rest"]),
        "slots": min(needed_bytes([], sizes, slots), needed_bytes(sizes, [], slots)),
    }


def _scratch_bytes(run: Mapping) -> int:
    rows, columns = run["shape"]
    widths = [ITEM_BYTES[scales["dtype"]] for scales in run["extras"].values()]
    if run["format"] != "dense":
        widths.append(ITEM_BYTES[run["dtype"]])
    return rows * columns * sum(widths)
