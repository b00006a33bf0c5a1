"""The feed-forward network (FFN) of each decoder block, found by what it computes.

A module with two or three linears is an FFN if it gives `down(act(up(x)))` or `down(act(gate(x)) · up(x))`. A small
copy of it, with random weights, is tried: names of classes and linears do not matter. A block that holds the linears
itself, as OPT's does, runs without memory, and the tensors between them are followed.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.models.activation import ACTIVATIONS, Function, name_of
from toolkit.models.blocks import decoder_blocks, replace_module
from toolkit.models.on_demand import own_forward
from toolkit.models.plain import RoutedExperts
from toolkit.models.plain import linear as linear_of

TOKENS, HIDDEN, NEURONS = 4, 8, 6  # of the small copy
SCALES = (1.0, 1.0, 4.0, 16.0)  # of the values of its tokens; clamps show at large ones


class Form(NamedTuple):
    """The linears of an FFN by their names in its module."""

    up: str
    down: str
    gate: str | None
    """The name of `up` if one linear has the rows of both."""
    gate_first: bool = True
    """Whether the gate's rows come first in such a linear."""
    activation: str | None = None
    """A name in `ACTIVATIONS`; None for another one."""
    alone: bool = True
    """Whether the module takes its input alone, and gives the FFN's output alone."""


@dataclass(frozen=True)
class FFN:
    """`down(act(up(x)))`, or `down(act(gate(x)) · up(x))` with a gate (SwiGLU). Neuron i is column i of `down`."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None
    activation: str | None
    """A name in `ACTIVATIONS`; None for another one."""
    module: nn.Module
    """It holds the linears, and may hold more."""
    linears: tuple[nn.Linear, ...]
    """The model's own: where one linear has the rows of gate and up, these two are views of it."""
    alone: bool
    """Whether `module` maps the FFN's input to its output, and does nothing else."""

    @classmethod
    def of(cls, up: nn.Linear, down: nn.Linear, gate: nn.Linear | None = None, activation: str | None = None) -> Self:
        """An FFN of no model."""
        linears = tuple(each for each in (gate, up, down) if each is not None)
        return cls(up, down, gate, activation, nn.Identity(), linears, False)

    @property
    def neurons(self) -> int:
        """Intermediate neurons: the inputs of the down projection."""
        return self.down.in_features


def decoder_ffns(model: nn.Module) -> list[FFN]:
    """The FFN of each decoder block, in order.

    Raises `UserError` for a block that has no FFN, or a mixture of experts, and as `decoder_blocks` does.
    """
    return [ffn_of(block, number) for number, block in enumerate(decoder_blocks(model))]


def ffn_of(block: nn.Module, number: int) -> FFN:
    """The FFN of one decoder block. Raises `UserError`, with the block's number, as `decoder_ffns` does."""
    experts = sum(len(it) for it in block.modules() if isinstance(it, RoutedExperts))
    if experts:
        raise UserError(
            f"block {number} has {experts} experts; store each by itself (`pack --method experts`), or choose a method "
            "of all linears, such as spqr"
        )
    found = [_made(module, form) for module in block.modules() if (form := _form(module, module is block))]
    found.sort(key=lambda ffn: (ffn.module is not block, ffn.neurons))
    if not found:
        raise UserError(
            f"block {number} ({type(block).__name__}) has no FFN of the form down(act(up(x))) or down(act(gate(x)) · "
            "up(x)) and no more; choose a method of packing that takes any linears, such as spqr"
        )
    return found[-1]


def known_activation(ffn: FFN) -> str:
    """The activation's name. Raises `UserError` for one that has no name here, and so no kernel."""
    if ffn.activation is None:
        raise UserError(
            f"{type(ffn.module).__name__} has another activation than {', '.join(ACTIVATIONS)}: its neurons cannot be "
            "computed one by one; choose another method of packing, such as spqr"
        )
    return ffn.activation


def replace_ffn(block: nn.Module, ffn: FFN, ours: nn.Module) -> None:
    """Put a module in the place of a block's FFN. If the FFN's module has other parts, only its linears are
    replaced."""
    if ffn.alone:
        replace_module(block, ffn.module, ours)
        return
    act = _own_activations(ffn.module)[0]
    for module, other in {ffn.up: ours, act: nn.Identity(), ffn.down: nn.Identity()}.items():
        replace_module(block, module, other)


def _made(module: nn.Module, form: Form) -> FFN:
    own = dict(module.named_children())
    up, down = own[form.up], own[form.down]
    gate = own[form.gate] if form.gate else None
    linears = tuple(dict.fromkeys(it for it in (gate, up, down) if it is not None))
    if gate is up:
        gate, up = (_rows(gate, part) for part in ((0, 1) if form.gate_first else (1, 0)))
    return FFN(up, down, gate, form.activation, module, linears, form.alone)


def _rows(linear: nn.Linear, half: int) -> nn.Linear:
    """A half of a linear's rows, as a view."""
    bias = None if linear.bias is None else linear.bias.data.chunk(2)[half]
    return linear_of(linear.weight.data.chunk(2)[half], bias)


_TRIED: dict[object, Form] = {}  # the forms found, by all that they depend on


def _form(module: nn.Module, is_block: bool) -> Form | None:
    """The form of a module that is an FFN, or of a block that holds the parts of one; None for any other."""
    linears = {name: it for name, it in module.named_children() if isinstance(it, nn.Linear)}
    shapes = [form for form in _shapes(linears) if not (is_block and form.gate)]
    if not shapes:
        return None
    settings = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    own = own_forward(module)
    key = type(module), is_block, own, tuple(sorted(settings.items())), repr(module)
    if key not in _TRIED:
        acts = _own_activations(module)[:1] if is_block else [*_own_activations(module), *ACTIVATIONS.values()]
        tried = _followed if is_block else _tried
        found = next(filter(None, (tried(module, form, act) for form in shapes for act in acts)), None)
        if found is None:  # not kept: a trial may fail for a reason that passes
            return None
        _TRIED[key] = found
    return _TRIED[key]


def _shapes(linears: Mapping[str, nn.Linear]) -> Iterator[Form]:
    """Each way in which two or three linears could be up, down and gate by their shapes."""
    sizes = {name: (it.in_features, it.out_features) for name, it in linears.items()}
    if len(sizes) == 2:
        for up, down in permutations(sizes):
            (hidden, wide), (neurons, out) = sizes[up], sizes[down]
            if hidden == out and wide == neurons:
                yield Form(up, down, None)
            elif hidden == out and wide == 2 * neurons:
                yield from (Form(up, down, up, first) for first in (True, False))
    elif len(sizes) == 3:
        for gate, up, down in permutations(sizes):
            if sizes[gate] == sizes[up] == sizes[down][::-1]:
                yield Form(up, down, gate)


def _own_activations(module: nn.Module) -> list[nn.Module]:
    """The children that can be a module's activation: those without parameters."""
    others = (child for child in module.children() if not isinstance(child, nn.Linear | nn.Dropout))
    return [child for child in others if next(child.parameters(), None) is None]


@torch.no_grad()
def _followed(block: nn.Module, form: Form, act: nn.Module) -> Form | None:
    """The form of a block that gives `up`'s very output to its activation, and that one's to `down`, once; else None.

    The block runs on the device "meta": a copy with small matrices would not fit its attention.
    """
    tensors = (*block.parameters(), *block.buffers())
    hooks_of = [hooks for it in block.modules() for hooks in (it._forward_pre_hooks, it._forward_hooks)]
    without: dict[int, object] = {id(it): torch.empty_like(it, device="meta") for it in tensors}
    one = copy.deepcopy(block, without | {id(hooks): OrderedDict() for hooks in hooks_of}).eval()
    names = {id(it): name for name, it in block.named_children()}
    own, passed = dict(one.named_children()), []
    up, act_of_copy, down = own[form.up], own[names[id(act)]], own[form.down]
    hooks = [each.register_forward_hook(lambda *call: passed.append(call)) for each in (up, act_of_copy, down)]
    x = torch.empty(1, TOKENS, up.in_features, dtype=up.weight.dtype, device="meta")
    try:
        one(x)
    except Exception:  # a block that does not run by itself
        return None
    finally:
        for hook in hooks:
            hook.remove()
    if [module for module, *_ in passed] != [up, act_of_copy, down]:
        return None
    (_, _, raised), (_, (before,), after), (_, (lowered,), _) = passed
    same = before is raised and lowered is after
    return form._replace(activation=name_of(act), alone=False) if same else None


@torch.no_grad()
def _tried(module: nn.Module, form: Form, act: Function) -> Form | None:
    """The form of a module whose small copy computes by it, with the activation's name; None if it does not."""
    small = copy.copy(module)
    small._modules = {name: copy.copy(it) for name, it in module._modules.items() if it is not None}
    sizes = {form.down: (NEURONS, HIDDEN), form.up: (HIDDEN, NEURONS)}
    sizes |= {form.gate: (HIDDEN, NEURONS if form.gate != form.up else 2 * NEURONS)} if form.gate else {}
    for number, (name, size) in enumerate(sizes.items()):
        small._modules[name] = _random_linear(*size, module._modules[name].bias is not None, number)
    x = _random(TOKENS, HIDDEN, 9) * torch.tensor(SCALES, dtype=torch.float32, device="cpu")[:, None]
    for each in (small, *small._modules.values()):
        each.training = False  # no dropout
    try:
        ffn = _made(small, form)
        expected = ffn.down(act(ffn.up(x)) if ffn.gate is None else act(ffn.gate(x)) * ffn.up(x))
        for arguments in ((x[None],), (x[None], torch.zeros_like(x[None]))):  # some add what they are given
            alone = len(arguments) == 1
            if (given := _output(small, arguments)) is None or not (alone or form.gate is None):
                continue
            if given.shape == x[None].shape and torch.allclose(given[0], expected, rtol=1e-4, atol=1e-4):
                return form._replace(activation=name_of(act), alone=alone)
    except Exception:  # whatever a module does that is no FFN
        return None
    return None


def _output(module: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor | None:
    """A module's output; None if it takes other arguments or gives more than a tensor."""
    try:
        output = module(*arguments)
    except TypeError:
        return None
    return output if isinstance(output, Tensor) else None


def _random_linear(inputs: int, outputs: int, bias: bool, seed: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias, device="meta")
    weights = {"weight": _random(outputs, inputs, seed) / inputs**0.5, "bias": _random(1, outputs, seed)[0]}
    for name in [*linear._parameters] if bias else ["weight"]:
        # past `register_parameter`, which has a model that is made without weights forget them
        linear._parameters[name] = nn.Parameter(weights[name], requires_grad=False)
    return linear


def _random(rows: int, columns: int, seed: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, columns, generator=made, dtype=torch.float32, device="cpu")
