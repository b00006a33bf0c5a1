"""What the command `pack` knows of a way to pack before it imports torch, which takes seconds."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WRITTEN = "bfloat16"  # the type of packed weights unless another is asked for, whatever is quickest to prune in


@dataclass(frozen=True)
class Option:
    """An option that only some packers take: `--name`. `settings` go to `argparse.add_argument`."""

    name: str
    default: object
    help: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Packer:
    """A way to pack, chosen by `--method`.

    `check` raises `UserError` for values of its options that it cannot use, without importing torch. `pack` imports
    what it needs, writes the folder `options.out` and returns the model as it was written, and its tokenizer.
    `resumable`: after an interruption the same command goes on where it was.
    """

    name: str
    help: str
    pack: Callable[[argparse.Namespace], tuple]
    options: tuple[Option, ...] = ()
    check: Callable[[argparse.Namespace], None] = lambda options: None
    resumable: bool = False


def calibration(options: argparse.Namespace):
    """The calibration text that the options name."""
    from toolkit.pruning import Calibration

    return Calibration(options.corpus, options.windows, options.sequence_length)


def torch_dtype(name: str | None):
    """The torch type of this name; None for None."""
    import torch

    return name and getattr(torch, name)
