"""The registry of pruning methods.

A kept model hangs on the module of its own method, and not on this one: a new entry leaves all other models valid.
"""

from typing import ClassVar, Protocol

from torch import Tensor

from toolkit.pruning.magnitude import Magnitude
from toolkit.pruning.patterns import Pattern
from toolkit.pruning.sparsegpt import SparseGPT
from toolkit.pruning.wanda import Wanda


class Method(Protocol):
    """Maps a weight [rows, columns] and gram = XᵀX [columns, columns] to the pruned weight, all float32."""

    needs_calibration: ClassVar[bool]

    def __call__(self, weight: Tensor, gram: Tensor | None, sparsity: float, pattern: Pattern | None) -> Tensor:
        """Return a new weight with at least `sparsity` zeros, laid out as `pattern` asks."""
        ...


METHODS: dict[str, Method] = {"magnitude": Magnitude(), "sparsegpt": SparseGPT(), "wanda": Wanda()}
