"""Treatments change a model's decoder blocks, one after the other, before they are written."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from toolkit.sparsity.layerwise import Matrix


class Treatment:
    """Changes a model block by block. This one leaves it as it is.

    `begin` comes first, then `treat` for each block from `number` on, in order. A block is in memory while it is
    treated. `state` holds what a later process needs to go on behind the last treated block, which it gives to
    `restore` between `begin` and `treat`. `finding` holds what it needs to know of that block in the end: `recall` gets
    it when it lies on the disk, of each written block.
    """

    def begin(self, model: nn.Module) -> None:
        """Prepare for a model. Raises `UserError` for one that cannot be treated."""

    def treat(self, number: int, block: nn.Module) -> "Mapping[str, Matrix]":
        """Change a block in place; return the matrices that stand for its linears in another form, by their names."""
        return {}

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs."""
        return {}

    @property
    def finding(self) -> dict[str, Tensor]:
        """The tensors that `recall` needs of the last treated block."""
        return {}

    def restore(self, state: Mapping[str, Tensor], number: int) -> None:
        """Go on before block `number`."""

    def recall(self, number: int, finding: Mapping[str, Tensor]) -> None:
        """Take the finding of a block, whose tensors are views of a file, in place of those in memory."""

    def close(self) -> None:
        """Let go of what it holds."""


def joined(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several states, each under a name, as one."""
    return {f"{which}.{name}": tensor for which, state in states.items() for name, tensor in state.items()}


def part_of(state: Mapping[str, Tensor], which: str) -> dict[str, Tensor]:
    """One of the joined states."""
    prefix = f"{which}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
