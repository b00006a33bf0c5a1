"""A workload: the shapes of a model, its data type and its share of zeros."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.errors import unknown
from toolkit.models.shapes import twin_shapes


@dataclass(frozen=True)
class Workload:
    """A model of `toolkit.models.shapes` or a part of it ("opt-66b/8"), its dense data type and share of zeros.

    Raises `UserError` for an unknown model.
    """

    model: str
    dtype: str = "float16"
    sparsity: float = 0.5

    def __post_init__(self):
        """Refuse an unknown model."""
        twin_shapes(self.model)

    def shapes(self, ops: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
        """Outputs × inputs of the named operations (default: all of a layer). Raises `UserError` for an unknown one."""
        known = twin_shapes(self.model)
        for op in ops:
            if op not in known:
                raise unknown(f"layer of {self.model}", op, known)
        return {op: known[op] for op in ops or known}
