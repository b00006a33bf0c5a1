"""Siblings of a layer, and what lies between them, in one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from toolkit.formats import Packed
from toolkit.kernels.engine.parallel import Product, Program, Task, stages
from toolkit.kernels.single_token import add_to
from toolkit.offload.linear import OffloadedLinear


@dataclass(frozen=True, eq=False)
class Siblings:
    """Siblings with the same input, the vector that `x` holds.

    `x` [in_features] and `outs` [out_features], one a linear, are fp32, in DRAM, and keep their place.
    """

    linears: Sequence[OffloadedLinear]
    x: Tensor
    outs: Sequence[Tensor]

    def stages(self, weights: Iterator[Packed]) -> list[list[Task]]:
        """The products with the next weights, then the biases."""
        each = list(zip(self.linears, weights, self.outs, strict=False))
        products = [weight.product(self.x, out) or _plain(weight, self.x, out) for _, weight, out in each]
        biased = [(out.numpy(), linear.bias.float().numpy()) for linear, _, out in each if linear.bias is not None]
        return [*stages(products), *([Task(add_to, arrays)] for arrays in biased)]


class Group:
    """Steps of one layer that follow each other: linears, whose weights are used packed, and tasks.

    Weights that stay in memory are bound once, others whenever they come.
    """

    def __init__(self, *steps: Siblings | Task):
        self.steps = steps
        self.linears = [linear for step in steps if isinstance(step, Siblings) for linear in step.linears]
        self.name = " + ".join(linear.name for linear in self.linears)
        self.close()

    def __call__(self) -> None:
        """Do all steps. They are one span, of stage `compute`."""
        weights = [linear.fetched() for linear in self.linears]
        if any(now is not bound for now, bound in zip(weights, self._weights, strict=True)):
            self._bind(weights)
        first = self.linears[0]
        begun_s = first.recorder.now_s()
        self._program.run()
        first.ended("compute", begun_s, self._nbytes, self.name)

    def close(self) -> None:
        """Release the weights."""
        self._weights: list[Packed | None] = [None] * len(self.linears)
        self._program: Program | None = None

    def _bind(self, weights: Sequence[Packed]) -> None:
        left = iter(weights)
        each = [step.stages(left) if isinstance(step, Siblings) else [[step]] for step in self.steps]
        self._program = Program([stage for some in each for stage in some])
        self._weights, self._nbytes = list(weights), sum(weight.nbytes for weight in weights)


def _plain(weight: Packed, x: Tensor, out: Tensor) -> Product:
    """The product of a format that has nothing quicker."""
    return Product(Task(partial(_matvec, weight, x, out), ()))


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    out.copy_(weight.matvec(x))
