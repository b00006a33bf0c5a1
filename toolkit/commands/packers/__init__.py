"""The packers of `pack --method`, in the order in which its help lists them. Nothing here imports torch."""

import argparse

from toolkit.commands.packers import experts, neurons, pruning, spqr
from toolkit.commands.packers.packer import Option, Packer
from toolkit.errors import UserError, unknown

PACKERS: dict[str, Packer] = {
    packer.name: packer for packer in (*pruning.PACKERS, spqr.PACKER, neurons.PACKER, experts.PACKER)
}


def choose(options: argparse.Namespace) -> Packer:
    """The packer that `--method` names; the defaults of its options are filled in.

    Raises `UserError` for an unknown method, and for an option that only other packers take.
    """
    if options.method not in PACKERS:
        raise unknown("method", options.method, PACKERS)
    packer = PACKERS[options.method]
    own = {option.name: option.default for option in packer.options}
    for name, owners in option_owners().items():
        value = getattr(options, name)
        if name not in own and value is not None:
            raise UserError(
                f"--{name}{_typed(value)}: an option of --method {', '.join(owners)}, not of {packer.name}; "
                f"leave --{name} out"
            )
        if name in own and value is None:
            setattr(options, name, own[name])
    return packer


def option_owners() -> dict[str, dict[str, Option]]:
    """The options that only some packers take, by name, and for each packer that takes it what it is there."""
    owners: dict[str, dict[str, Option]] = {}
    for packer in PACKERS.values():
        for option in packer.options:
            owners.setdefault(option.name, {})[packer.name] = option
    return owners


def _typed(value: object) -> str:
    """A value as it was typed; nothing for a flag."""
    return "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
