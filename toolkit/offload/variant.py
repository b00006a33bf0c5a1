"""The variant of a packed folder that is run, without torch: a format, "bundled" for neurons, or "experts".

A GGUF file is `GGUF`, also if it is a mixture of experts.

The index is read without checks; `Store.open` checks it.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from toolkit.downloads import of_kind
from toolkit.errors import UserError, unknown

FAVOURITE, GGUF = "endor", "gguf"
NEURONS = ("predicted", "held")  # that a token is computed with
# the types of keys and values in the cache, by llama.cpp's names: their names among the kernels
KV_TYPES = {"f32": "float32", "bf16": "bfloat16", "q8_0": "q8_0"}
STRANGE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)


def variant_to_run(folder: Path, asked: str | None = None) -> str:
    """The format that is asked for; else `endor`, or the first by name. Raises `UserError` if it was not packed."""
    if folder.is_file():
        if asked is not None:
            raise UserError(f"--format {asked}: {folder} is a file, which is run as it is; leave it out")
        return GGUF
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}: name one that `python -m toolkit pack` wrote, a GGUF file, or one of the models "
            f"{', '.join(of_kind('.gguf'))}"
        )
    if not (folder / "index.json").is_file():
        raise UserError(f"{folder}: holds no index.json: name a folder that `python -m toolkit pack` wrote")
    variants: set[str] = set()
    with suppress(*STRANGE):
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        variants = {run["variant"] for run in index["ops"]}
    if asked is not None and variants and asked not in variants:
        raise unknown(f"format of {folder}", asked, variants)
    return asked or favourite(variants or {FAVOURITE})


def no_kv_type(model: Path | str, kv_type: str) -> UserError:
    """The error about a type of keys and values of a model that transformers run."""
    return UserError(
        f"--kv-type {kv_type}: {model} runs by transformers here, whose cache has the model's own type; leave it out, "
        "or take a GGUF file of an architecture that runs without torch"
    )


def check_not_packed(folder: Path) -> None:
    """Raise `UserError` for a folder that `pack` wrote, where a model is expected."""
    if (folder / "index.json").is_file():
        raise UserError(f"{folder}: it is packed already; run it with `python -m toolkit run {folder}`")


def favourite(variants: Collection[str]) -> str:
    """The variant that is run where none is named: `endor`, or the first by name."""
    return FAVOURITE if FAVOURITE in variants else min(variants)
