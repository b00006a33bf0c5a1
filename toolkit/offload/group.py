"""Linears with the same input, multiplied in one call."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from toolkit.formats import Packed
from toolkit.kernels.runtime.program import Product, Program, Task, stages
from toolkit.kernels.single_token import add_to
from toolkit.offload.linear import OffloadedLinear


class Group:
    """Products of a layer's linears, whose weights are used packed, with the vector that `x` holds.

    `x` [in_features] and `outs` [out_features], one a linear, are fp32, in DRAM, and keep their place. `before` and
    `after` are run with the products. Weights that stay in memory are bound to them once, others whenever they come.
    """

    def __init__(
        self,
        linears: Sequence[OffloadedLinear],
        x: Tensor,
        outs: Sequence[Tensor],
        before: Sequence[Task] = (),
        after: Sequence[Task] = (),
    ):
        self.linears, self.x, self.outs, self.before, self.after = linears, x, outs, before, after
        self.name = " + ".join(linear.name for linear in linears)
        self.close()

    def __call__(self) -> None:
        """Fill `outs` with the products and their biases. It is one span, of stage `compute`."""
        weights = [linear.weight() for linear in self.linears]
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
        each = zip(weights, self.outs, strict=True)
        products = [weight.product(self.x, out) or _plain(weight, self.x, out) for weight, out in each]
        biases = [
            Task(add_to, (out.numpy(), linear.bias.float().numpy()))
            for linear, out in zip(self.linears, self.outs, strict=True)
            if linear.bias is not None
        ]
        around = [[[task] for task in tasks] for tasks in (self.before, [*biases, *self.after])]
        self._program = Program([*around[0], *stages(products), *around[1]])
        self._weights, self._nbytes = list(weights), sum(weight.nbytes for weight in weights)


def _plain(weight: Packed, x: Tensor, out: Tensor) -> Product:
    """The product of a format that has nothing quicker."""
    return Product(Task(partial(_matvec, weight, x, out), ()))


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    out.copy_(weight.matvec(x))
