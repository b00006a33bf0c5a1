"""Every matrix of a decoder as an `nn.Linear`: transformers keeps some in other forms.

    plain(model)                       # in place
    tensors = dict(as_stored(model))   # by the names and in the forms of transformers

Mixtures hold the matrices of all their experts in one 3-D parameter, and GPT-2 transposed ones. Both are replaced right
after transformers has made a model, so that whatever prunes, packs or streams linears needs no other way. The linears
of experts share the memory of the fused parameter. A mixture of another form stays as it is.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"  # the names of transformers' fused parameters
TOKENS, HIDDEN, NEURONS = 5, 8, 6  # of the small experts that a class is tried with
CLOSE = 1e-5  # of the norm of their output


class Inner(nn.Module):
    """The arithmetic between the two linears of an expert: `act(gate) · up`."""

    def __init__(self, act_fn: nn.Module):
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate_up: Float[Tensor, "tokens gate_and_up"]) -> Float[Tensor, "tokens neurons"]:
        """The inputs of the down projection."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class OwnInner(nn.Module):
    """The same as a class of transformers has it: with clamps, interleaved gates or no gate."""

    def __init__(self, fused: nn.Module):
        super().__init__()
        self.fused, self.gated = fused, getattr(fused, "has_gate", True)

    def forward(self, up: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens neurons"]:
        """The inputs of the down projection."""
        return self.fused._apply_gate(up) if self.gated else self.fused.act_fn(up)


class Expert(nn.Module):
    """The two linears of an expert. The rows of a gate, if there is one, are part of `up`."""

    def __init__(self, up: nn.Linear, down: nn.Linear):
        super().__init__()
        self.up, self.down = up, down


class FusedForm(NamedTuple):
    """How transformers stores experts."""

    up: str = UP[0]
    transposed: bool = False


class RoutedExperts(nn.Module):
    """The experts of a mixture, called with the router's choice as transformers' fused ones are."""

    def __init__(self, experts: Sequence[Expert], inner: nn.Module, fused: FusedForm | None = None):
        super().__init__()
        self.count, self.fused = len(experts), fused or FusedForm()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.inner = inner

    def __len__(self) -> int:
        """The experts."""
        return self.count

    def __getitem__(self, number: int) -> Expert:
        """One of them."""
        return cast(Expert, self._modules[str(number)])

    def __iter__(self) -> Iterator[Expert]:
        """All of them, by number."""
        return (self[number] for number in range(self.count))

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"],
        ids: Int64[Tensor, "tokens k"],
        weights: Float[Tensor, "tokens k"],
    ) -> Float[Tensor, "tokens hidden"]:
        """The weighted sum of each token's experts, added in the order of their numbers."""
        total = torch.zeros_like(x)
        for number in ids.unique().tolist():
            token, rank = torch.where(ids == number)
            output = self[number].down(self.inner(self[number].up(x[token])))
            total.index_add_(0, token, (output * weights[token, rank, None]).to(x.dtype))
        return total


class TransposedLinear(nn.Linear):
    """A linear whose weight transformers stores as inputs × outputs."""


def plain(model: nn.Module) -> nn.Module:
    """Replace fused experts and transposed linears in place; return the model, which may be on the device "meta"."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            made = linear(module.weight.data.T.contiguous(), module.bias.data, TransposedLinear)
            model.set_submodule(name, made.requires_grad_(module.weight.requires_grad))
        elif (form := _form(module)) and _understood(type(module), form, module):
            trained = module.down_proj.requires_grad
            model.set_submodule(name, _routed(module, form).requires_grad_(trained))
    return model


def as_stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that is plain, by transformers' names and in its forms. A shared one comes once.

    Experts of one mixture are copied into one tensor at a time.
    """
    modules, seen = dict(model.named_modules()), set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, kind = name.rpartition(".")
        mixture = next((it for it in _parents(path) if isinstance(modules[it], RoutedExperts)), None)
        if mixture is not None and mixture not in seen:
            yield from ((f"{mixture}.{own}", stacked) for own, stacked in _stacked(modules[mixture]))
        elif mixture is None and id(tensor) not in seen:
            transposed = kind == "weight" and isinstance(modules[path], TransposedLinear)
            yield name, tensor.T if transposed else tensor
        seen |= {mixture, id(tensor)}


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(len(parts) + 1))


def _stacked(experts: RoutedExperts) -> Iterator[tuple[str, Tensor]]:
    for name, linears in {experts.fused.up: [it.up for it in experts], DOWN: [it.down for it in experts]}.items():
        stacked = torch.stack([each.weight.detach() for each in linears])
        yield name, stacked.mT.contiguous() if experts.fused.transposed else stacked
        if linears[0].bias is not None:
            yield f"{name}_bias", torch.stack([each.bias.detach() for each in linears])


def _form(module: nn.Module) -> FusedForm | None:
    """The form of fused experts; None for any other module."""
    own = dict(module.named_parameters(recurse=False))
    up = next((name for name in UP if name in own), None)
    if up is None or DOWN not in own or not own[up].ndim == own[DOWN].ndim == 3:
        return None
    if len(own[up]) != len(own[DOWN]):  # some experts have no matrices, such as those that give their input
        return None
    names = {up, DOWN, f"{up}_bias", f"{DOWN}_bias"}
    return FusedForm(up, getattr(module, "is_transposed", False)) if own.keys() <= names else None


def _routed(fused: nn.Module, form: FusedForm) -> RoutedExperts:
    """The linears of fused experts, which lose their parameters."""
    parameters = {name: parameter.data for name, parameter in fused.named_parameters(recurse=False)}
    fused._parameters.clear()
    each = zip(*(_linears(parameters, name, form.transposed) for name in (form.up, DOWN)), strict=True)
    usual = hasattr(fused, "act_fn") and getattr(fused, "has_gate", True)
    inner = OwnInner(fused)
    if usual and _usual(inner, fused.act_fn):
        inner = Inner(fused.act_fn)
    return RoutedExperts([Expert(*pair) for pair in each], inner, form)


def _linears(parameters: dict[str, Tensor], name: str, transposed: bool) -> list[nn.Linear]:
    weights = parameters[name].mT if transposed else parameters[name]
    biases = parameters.get(f"{name}_bias", [None] * len(weights))
    return [linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def linear(weight: Tensor, bias: Tensor | None = None, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
    """A linear of a given weight, without a copy and without gradients."""
    made = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _usual(inner: OwnInner, act_fn: nn.Module) -> bool:
    """Whether a class computes `act(gate) · up`, for small and for large values."""
    values = 10 * _random(TOKENS, 2 * NEURONS)
    return not hasattr(inner.fused, "_apply_gate") or torch.equal(inner(values), Inner(act_fn)(values))


_TRIED: dict[tuple[type, FusedForm], bool] = {}


def _understood(kind: type, form: FusedForm, fused: nn.Module) -> bool:
    """Whether `RoutedExperts` gives what a class of fused experts gives, tried with small ones. They are kept."""
    if (kind, form) not in _TRIED:
        _TRIED[kind, form] = _agrees(fused, form)
    return _TRIED[kind, form]


def _agrees(fused: nn.Module, form: FusedForm) -> bool:
    small, count = copy.copy(fused), len(fused.down_proj)
    wide = NEURONS * (2 if form.up == UP[0] else 1)
    sizes = {form.up: (count, wide, HIDDEN), DOWN: (count, HIDDEN, NEURONS)}
    matrices = {name: _random(*size).mT if form.transposed else _random(*size) for name, size in sizes.items()}
    biases = {
        f"{name}_bias": _random(count, size[1])
        for name, size in sizes.items()
        if f"{name}_bias" in dict(fused.named_parameters(recurse=False))
    }
    small._parameters = {name: nn.Parameter(it) for name, it in {**matrices, **biases}.items()}
    x, weights = _random(TOKENS, HIDDEN), _random(TOKENS, min(2, count)).abs()
    ids = _random(TOKENS, count).topk(weights.shape[1]).indices
    try:
        with torch.no_grad():
            expected = inspect.unwrap(type(fused).forward)(small, x, ids, weights)
            return bool((_routed(small, form)(x, ids, weights) - expected).norm() <= CLOSE * expected.norm())
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # it is called otherwise


def _random(*shape: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=made, dtype=torch.float32, device="cpu")
