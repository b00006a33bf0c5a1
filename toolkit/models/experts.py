"""The mixture of experts of each decoder block: its router, its experts, and the matrices of each expert.

    for experts in decoder_experts(model):
        ids, weights = experts.route(x)
        gate, up, down_transposed = experts.matrices(ids[0, 0])

The model is one of `load_model`, whose experts are linears (`toolkit.models.plain`). The model's own modules route.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn
from torch.nn import functional

from toolkit import hub
from toolkit.errors import UserError
from toolkit.models.activation import name_of
from toolkit.models.blocks import decoder_blocks
from toolkit.models.cutting import attached
from toolkit.models.plain import Expert, Inner, RoutedExperts, linear

TRIED = 16  # random tokens that tell how weights follow from scores
CLOSE = 0.02  # of a weight: the rounding of bfloat16

Routed = tuple[Int64[Tensor, "tokens k"], Float[Tensor, "tokens k"]]


class LinearRouter(NamedTuple):
    """A router that is a linear map: the experts with the highest scores are chosen."""

    weight: Float[Tensor, "experts hidden"]
    dtype: torch.dtype
    """In which the scores are computed."""
    form: str
    """A key of `FORMS`: how weights follow from scores."""
    scale: float
    """The factor of all weights."""


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "renormalised": lambda scores, ids: scores.gather(-1, ids).softmax(-1),
    "softmax": lambda scores, ids: scores.softmax(-1).gather(-1, ids),
    "ones": lambda scores, ids: torch.ones_like(ids, dtype=torch.float32),
    "sigmoid": lambda scores, ids: scores.gather(-1, ids).sigmoid(),
}


@dataclass(frozen=True, eq=False)
class Experts:
    """The mixture of one decoder block."""

    module: nn.Module
    """Takes and gives [..., hidden] in the block, and has the router."""
    routed: nn.Module
    """Gets the tokens and the router's choice: `RoutedExperts`, or what took its place."""
    linears: RoutedExperts

    @property
    def count(self) -> int:
        """Routed experts."""
        return len(self.linears)

    @property
    def neurons(self) -> int:
        """Neurons of one routed expert."""
        return self.linears[0].down.in_features

    @property
    def hidden(self) -> int:
        """Width of an expert's input and output."""
        return self.linears[0].down.out_features

    @cached_property
    def per_token(self) -> int:
        """The experts that a token uses. Raises `UserError` as `route` does."""
        weight, one = self.linears[0].down.weight, self
        if weight.is_meta:  # a mixture of an outline, whose buffers may have memory
            one = replace(self, module=copy.deepcopy(self.module, {id(self.routed): self.routed}).to("meta"))
        return one.route(torch.zeros(1, self.hidden, dtype=weight.dtype, device=weight.device))[0].shape[-1]

    @torch.no_grad()
    def route(self, x: Float[Tensor, "tokens hidden"]) -> Routed:
        """The experts of each token, and the weights of their outputs, as the model's own router gives them.

        The mixture runs until it calls its experts. Raises `UserError` for one that does not run by itself, such as
        one that routes by the ids of tokens.
        """
        alone = hub.foreign_code(f"{type(self.module).__name__} does not choose experts by its input alone")
        with alone, attached([self.routed.register_forward_pre_hook(_stop)]):
            try:
                self.module(x[None])
            except _Chosen as chosen:  # caught inside, since a mixture of the toolkit's own is foreign code, too
                return chosen.ids, chosen.weights
        raise UserError(f"{type(self.module).__name__} calls no experts")

    @cached_property
    def gate(self) -> LinearRouter:
        """The router, found by its behaviour. Raises `UserError` for one that is no linear map with a known form."""
        skipped = {id(each) for each in self.routed.parameters()}
        shape = (self.count, self.hidden)
        weights = (each for each in self.module.parameters() if each.shape == shape and id(each) not in skipped)
        if (weight := next(weights, None)) is not None:
            made = torch.Generator().manual_seed(0)
            x = torch.randn(TRIED, self.hidden, generator=made, dtype=torch.float32).to(weight)
            if found := _form(weight.data, x, *self.route(x)):
                return found
        raise UserError(
            f"{type(self.module).__name__} routes by more than a linear map and {', '.join(FORMS)}: it takes the "
            "experts that its own router chooses, no others"
        )

    def scores(self, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens experts"]:
        """The router's product with its input, as the model computes it. Raises `UserError` as `gate` does."""
        return _scores(self.gate, x)

    def weigh(
        self, scores: Float32[Tensor, "tokens experts"], ids: Int64[Tensor, "tokens k"]
    ) -> Float32[Tensor, "tokens k"]:
        """The weights of these experts' outputs, as if the router had chosen them."""
        return FORMS[self.gate.form](scores, ids) * self.gate.scale

    @cached_property
    def activation(self) -> str | None:
        """The activation's name if an expert is `down(act(gate(x)) · up(x))`: then it has neurons with three rows.

        None for biases, another activation and experts that are more than that.
        """
        biases = (self.linears[0].up.bias, self.linears[0].down.bias)
        inner = self.linears.inner
        return name_of(inner.act_fn) if isinstance(inner, Inner) and biases == (None, None) else None

    def matrices(
        self, expert: int
    ) -> tuple[Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"], Float[Tensor, "neurons hidden"]]:
        """Gate, up and the transposed down projection of one expert, as views: row i belongs to neuron i.

        Raises `UserError` for experts that have no such rows (see `activation`).
        """
        if self.activation is None:
            raise UserError(
                f"{type(self.module).__name__}: its experts are more than act(gate) · up: they have no separate neurons"
            )
        gate, up = self.linears[int(expert)].up.weight.data.split(self.neurons)
        return gate, up, self.linears[int(expert)].down.weight.data.T


class TopK(nn.Module):
    """A mixture of given matrices: the softmax of the top k scores weighs the experts, whose activation is SiLU.

    For examples by hand, whose few numbers a reader can follow.
    """

    def __init__(
        self,
        router: Float[Tensor, "experts hidden"],
        gate_up: Float[Tensor, "experts gate_and_up hidden"],
        down: Float[Tensor, "experts hidden neurons"],
        per_token: int,
    ):
        super().__init__()
        self.router, self.per_token = nn.Parameter(router, requires_grad=False), per_token
        pairs = zip(gate_up, down, strict=True)
        self.experts = RoutedExperts([Expert(linear(up), linear(each)) for up, each in pairs], Inner(nn.SiLU()))

    def forward(self, x: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places hidden"]:
        """The weighted sum of each token's experts."""
        flat = x.flatten(0, -2)
        scores, ids = functional.linear(flat, self.router).topk(self.per_token)
        return self.experts(flat, ids, scores.softmax(-1)).view(x.shape)


class _Chosen(Exception):
    """Ends a mixture where it calls its experts, and carries the router's choice."""

    def __init__(self, ids: Tensor, weights: Tensor):
        super().__init__()
        self.ids, self.weights = ids, weights


def _stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
    raise _Chosen(*args[1:])


def _scores(gate: LinearRouter, x: Float[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens experts"]:
    return functional.linear(x.to(gate.dtype), gate.weight.to(gate.dtype)).float()


def _form(weight: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> LinearRouter | None:
    """The form that explains a router's choice best; None if none does."""
    errors: dict[LinearRouter, float] = {}
    for dtype in dict.fromkeys((weight.dtype, torch.float32)):
        scores = _scores(LinearRouter(weight, dtype, "", 1.0), x)
        best = scores.topk(ids.shape[-1], dim=-1).indices
        if not torch.equal(best.sort(-1).values, ids.sort(-1).values):
            continue
        for form, function in FORMS.items():
            ratio = weights.float() / function(scores, ids)
            scale = round(float(ratio.mean()), 2)
            gate = LinearRouter(weight, dtype, form, scale)
            errors[gate] = float((ratio / scale - 1).abs().max()) if scale else torch.inf
    best_gate = min(errors, key=lambda gate: errors[gate], default=None)
    return best_gate if best_gate is not None and errors[best_gate] < CLOSE else None


def decoder_experts(model: nn.Module) -> list[Experts | None]:
    """The experts of each decoder block, in order; None for a block without experts that are linears.

    Raises `UserError` for a block with more than one mixture.
    """
    return [block_experts(block, number) for number, block in enumerate(decoder_blocks(model))]


def mixtures_by_layer(model: nn.Module) -> dict[int, Experts]:
    """The mixtures of a model by the number of their block; dense blocks have none.

    Raises `UserError` as `decoder_experts` does, and for a model without one.
    """
    found = {number: experts for number, experts in enumerate(decoder_experts(model)) if experts is not None}
    if not found:
        fused = [name for name, it in model.named_parameters() if it.ndim == 3 and "conv" not in name]
        own = f", or holds them in a form of its own ({fused[0]})" if fused else ""
        raise UserError(
            f"{type(model).__name__} is no mixture of experts{own}: choose a mixture such as Mixtral, or another method"
        )
    return found


def block_experts(block: nn.Module, number: int = 0) -> Experts | None:
    """The experts of one decoder block, or of a mixture by itself.

    Raises `UserError`, with the block's number, as `decoder_experts` does.
    """
    found = [(name, module) for name, module in block.named_modules() if isinstance(module, RoutedExperts)]
    if len(found) > 1:
        raise UserError(f"block {number} has {len(found)} mixtures of experts; expected one")
    if not found:
        return None
    ((name, routed),) = found
    return Experts(block.get_submodule(name.rpartition(".")[0]), routed, routed)


@contextmanager
def seen_routing(
    model: nn.Module, see: Callable[[int, Float[Tensor, "tokens hidden"], Tensor, Tensor], None]
) -> Iterator[None]:
    """Inside the block, `see(mixture, x, ids, weights)` gets the tokens of each mixture and the router's choice."""

    def look(number: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        see(number, *args)

    routed = (each.routed for each in mixtures_by_layer(model).values())
    with attached(module.register_forward_pre_hook(partial(look, n)) for n, module in enumerate(routed)):
        yield
