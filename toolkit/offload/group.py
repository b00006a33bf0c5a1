"""Linears of a layer, multiplied in one call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from toolkit.formats import Packed
from toolkit.kernels.runtime.parallel import Product, Program, Task, stages
from toolkit.kernels.single_token import add_to
from toolkit.offload.linear import OffloadedLinear


@dataclass(frozen=True, eq=False)
class Projections:
    """Linears with the same input, the vector that `x` holds.

    `x` [in_features] and `outs` [out_features], one a linear, are fp32, in DRAM, and keep their place. The stages
    `before` and `after` are run with the products.
    """

    linears: Sequence[OffloadedLinear]
    x: Tensor
    outs: Sequence[Tensor]
    before: Sequence[Task] = ()
    after: Sequence[Task] = ()

    def stages(self, weights: Sequence[Packed]) -> list[list[Task]]:
        """All of it, with these weights."""
        each = zip(weights, self.outs, strict=True)
        products = [weight.product(self.x, out) or _plain(weight, self.x, out) for weight, out in each]
        biases = [
            Task(add_to, (out.numpy(), linear.bias.float().numpy()))
            for linear, out in zip(self.linears, self.outs, strict=True)
            if linear.bias is not None
        ]
        around = [[[task] for task in tasks] for tasks in (self.before, [*biases, *self.after])]
        return [*around[0], *stages(products), *around[1]]


class Group:
    """Projections of one layer that follow each other, whose weights are used packed.

    Weights that stay in memory are bound once, others whenever they come.
    """

    def __init__(self, *parts: Projections):
        self.parts, self.linears = parts, [linear for part in parts for linear in part.linears]
        self.name = " + ".join(linear.name for linear in self.linears)
        self.close()

    def __call__(self) -> None:
        """Fill the parts' `outs` with the products and their biases. It is one span, of stage `compute`."""
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
        of_parts = [[next(left) for _ in part.linears] for part in self.parts]
        chained = [part.stages(some) for part, some in zip(self.parts, of_parts, strict=True)]
        self._program = Program([stage for each in chained for stage in each])
        self._weights, self._nbytes = list(weights), sum(weight.nbytes for weight in weights)


def _plain(weight: Packed, x: Tensor, out: Tensor) -> Product:
    """The product of a format that has nothing quicker."""
    return Product(Task(partial(_matvec, weight, x, out), ()))


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    out.copy_(weight.matvec(x))
