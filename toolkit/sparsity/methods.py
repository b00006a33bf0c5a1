"""The registry of pruning methods.

A kept model depends on the module of its own method, not on this one. So a new entry leaves all other models valid.
"""

from typing import ClassVar, Protocol

from torch import Tensor

from toolkit.pattern import Pattern
from toolkit.sparsity.magnitude import Magnitude
from toolkit.sparsity.sparsegpt import SparseGPT
from toolkit.sparsity.wanda import Wanda


class PruningMethod(Protocol):
    """Maps a weight [rows, columns] and a statistic of its inputs to the pruned weight, all float32.

    A method is registered in `METHODS`, and its slow, obvious oracle in the table of the same name in
    `tests/naive_pruning.py`. `statistic` names the statistic of the inputs X that it needs: None, "norms" (the diagonal
    of XᵀX) or "gram" (all of XᵀX). `gram` may hold more than that. A common factor of `gram` changes nothing.
    """

    statistic: ClassVar[str | None]

    def __call__(self, weight: Tensor, gram: Tensor | None, sparsity: float, pattern: Pattern | None) -> Tensor:
        """Return a new, finite weight; the arguments stay as they are.

        Without a pattern, `sparsity` of the weights become zero, rounded down in each row or in the whole layer. With
        one, `group - kept` of every `group` consecutive weights of a row do.
        """
        ...


METHODS: dict[str, PruningMethod] = {"magnitude": Magnitude(), "sparsegpt": SparseGPT(), "wanda": Wanda()}
