"""One token through a Llama-shaped decoder, without what a framework does around each operation.

transformers runs the prompt. For a single token after it, transformers would run some sixty small operations and forty
modules per layer, which takes most of the time that is not spent on weights. The step here takes the same weights and
the same cache, calls a product for each linear and six small functions for the rest, and computes in fp32 throughout.
So its last digits differ from those of transformers, as those of packed products do.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import CacheLayerMixin, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from toolkit.formats import Packed
from toolkit.kernels import dense
from toolkit.kernels.engine.parallel import Product, Program, Task, stages
from toolkit.kernels.single_token import add_and_normalise, add_to, attend, gate, normalise, rotate
from toolkit.models import decoder_blocks
from toolkit.offload.growing_cache import GROWING, GrowingLayer
from toolkit.offload.head import OffloadedHead
from toolkit.offload.linear import OffloadedLinear
from toolkit.policies.ways import POLICIES

# RMSNorm, rotary embeddings, attention with grouped heads, gated FFNs; some with biases or norms of queries and
# keys, layers that attend to a window, or norms after attention and FFN
CLASSES = (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
WINDOWED = (MistralForCausalLM, MixtralForCausalLM)  # their layers do not say so
GATES = ("silu", "gelu_pytorch_tanh")
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")  # Gemma's options
PLACES = max(policy.slots for policy in POLICIES.values())  # that one layer lies in, pass by pass
WITHOUT_EFFECT = {"logits_to_keep", "return_dict", "use_cache", "cache_position"}  # for one token, these values or any


class SingleToken:
    """The decoder's step. Its linears are `OffloadedLinear`s whose weights are used packed, in DRAM.

    An MLP that is no FFN of three such linears runs as a module, or by its `product`, which takes a vector and gives
    one, both fp32 [hidden].
    """

    def __init__(self, model: nn.Module):
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb  # not the model: that holds the step
        blocks = decoder_blocks(model)
        self.vectors = _Vectors(blocks[0], model.config)
        bases = [_basis(model, block) for block in blocks]
        self.angles = {basis: torch.empty(2, self.vectors.head_size) for basis in bases}
        self.blocks = [
            _Block(block, self.vectors, *self.angles[basis]) for block, basis in zip(blocks, bases, strict=True)
        ]
        self.norm, self.head = _adding(model.model.norm, self.vectors), _Head(model.lm_head, self.vectors.given)
        self.dtype = model.dtype
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ][2:]  # not the model's own, which its caller runs

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The step of this model, or None for a model of another shape."""
        config = model.config
        if type(model) not in CLASSES or model.lm_head.bias is not None:
            return None
        if not all(_offloaded(block.self_attn, "q", "k", "v", "o") for block in decoder_blocks(model)):
            return None
        whole = type(model) not in WINDOWED or not config.sliding_window
        plain = whole and not any(getattr(config, name, None) for name in UNSUPPORTED)
        return cls(model) if plain and _activation(config) in GATES else None

    def guard(self, forward: Callable) -> Callable:
        """The model's `forward`, by this step for a single token that follows others."""

        @functools.wraps(forward)
        def stepped(*arguments, **named):
            given = dict(zip(["input_ids"], arguments, strict=False)) | named
            if len(arguments) > 1 or not self._serves(**given):
                return forward(*arguments, **named)
            return self(given["input_ids"], given["past_key_values"], given.get("position_ids"))

        return stepped

    def __call__(self, token: Tensor, cache: DynamicCache, position: Tensor | None = None) -> CausalLMOutputWithPast:
        """The logits [1, 1, vocabulary] after `token` [1, 1], in the head's type. The token is added to the cache."""
        for number, layer in enumerate(cache.layers):
            if type(layer) in GROWING:
                cache.layers[number] = GROWING[type(layer)].of(layer)
        of = self.vectors
        of.x.copy_(self.embed(token)[0])
        of.more.zero_()
        position = torch.tensor([[cache.get_seq_length()]]) if position is None else position
        for basis, kept in self.angles.items():
            torch.cat(self.rotary(of.x, position, *basis), dim=1, out=kept[None])
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            block(layer)
        self.norm()
        logits = self.head().to(self.dtype, copy=True)
        return CausalLMOutputWithPast(logits=logits.view(1, 1, -1), past_key_values=cache)

    def close(self) -> None:
        """Release the weights."""
        for group in [group for block in self.blocks for group in block.groups] + self.head.groups:
            group.close()

    def _serves(self, input_ids=None, past_key_values=None, attention_mask=None, position_ids=None, **named) -> bool:
        """Whether these arguments ask for a single token after others, and only for results that the step gives."""
        return (
            input_ids is not None
            and input_ids.shape == (1, 1)
            and type(past_key_values) is DynamicCache
            and len(past_key_values.layers) == len(self.blocks)
            and all(block.serves(layer) for block, layer in zip(self.blocks, past_key_values.layers, strict=True))
            and past_key_values.get_seq_length() > 0
            and len(past_key_values.layers[0].keys) == 1
            and (attention_mask is None or (attention_mask.ndim == 2 and bool(attention_mask.all())))
            and (position_ids is None or position_ids.shape == (1, 1))
            and all(value is None or name in WITHOUT_EFFECT for name, value in named.items())
            and named.get("return_dict") is not False
            and named.get("use_cache") is not False
            and not any(self._hooks)
        )


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
        products = [
            weight.product(self.x, out) or Product(Task(functools.partial(_matvec, weight, self.x, out), ()))
            for _, weight, out in each
        ]
        biased = [(out.numpy(), linear.bias.float().numpy()) for linear, _, out in each if linear.bias is not None]
        return [*stages(products), *([Task(add_to, arrays)] for arrays in biased)]


class Group:
    """Steps of one layer that follow each other: linears, whose weights are used packed, and tasks.

    Weights are bound once for each place that they lie in: a layer that is read passes through two slots in turn.
    """

    def __init__(self, *steps: Siblings | Task):
        self.steps = steps
        self.linears = [linear for step in steps if isinstance(step, Siblings) for linear in step.linears]
        self.name = " + ".join(dict.fromkeys(linear.name for linear in self.linears))  # a head's parts share theirs
        self.close()

    def __call__(self) -> None:
        """Do all steps. They are one span, of stage `compute`."""
        weights = [linear.fetched() for linear in self.linears]
        bound = next((bound for bound in self._bound if all(map(is_, bound.weights, weights))), None)
        if bound is None:
            self._bound.append(bound := self._bind(weights))
        first = self.linears[0]
        begun_s = first.recorder.now_s()
        bound.program.run()
        first.ended("compute", begun_s, bound.nbytes, self.name)

    def close(self) -> None:
        """Release the weights."""
        self._bound: deque[_Bound] = deque(maxlen=PLACES)

    def _bind(self, weights: Sequence[Packed]) -> "_Bound":
        left = iter(weights)
        each = [step.stages(left) if isinstance(step, Siblings) else [[step]] for step in self.steps]
        program = Program([stage for some in each for stage in some])
        return _Bound(weights, program, sum(weight.nbytes for weight in weights))


class _Bound(NamedTuple):
    """A program, and the weights that it multiplies with."""

    weights: Sequence[Packed]
    program: Program
    nbytes: int


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    """The product of a format that has nothing quicker."""
    out.copy_(weight.matvec(x))


class _Vectors:
    """The vectors that a step writes to, fp32. All blocks have the same sizes and use them in turn.

    `x` is the hidden state between blocks, and `more` is the term that the last part of a block adds to it; both [1,
    hidden].
    """

    def __init__(self, block: nn.Module, config: PretrainedConfig):
        attention, hidden = block.self_attn, config.hidden_size
        self.x, self.more = torch.zeros(1, hidden), torch.zeros(1, hidden)
        self.given, self.head_size = torch.empty(hidden), attention.head_dim
        self.q, self.attended = torch.empty(2, attention.q_proj.out_features)
        self.key_value = torch.empty(2, attention.k_proj.out_features)
        self.k, self.v = self.key_value
        self.gate, self.up = torch.empty(2, config.intermediate_size)
        self.act = gate(_activation(config))


class _Block:
    """A decoder block: attention between two groups of products, then the FFN.

    `cosine` and `sine` [head size] are of the token's position.
    """

    def __init__(self, block: nn.Module, of: _Vectors, cosine: Tensor, sine: Tensor):
        attention = block.self_attn
        self.of, size, self.scale = of, attention.head_dim, attention.scaling
        self.window = getattr(attention, "sliding_window", None)
        self.query, key, self.out = (each.view(-1, size).numpy() for each in (of.q, of.k, of.attended))
        self.key_value = of.key_value.view(2, -1, size)
        heads = (self.query, key)
        of_heads = [getattr(attention, f"{name}_norm", None) for name in "qk"]
        after = [_normalising(norm, each) for norm, each in zip(of_heads, heads, strict=True) if norm]
        after += [Task(rotate, (each, cosine.numpy(), sine.numpy())) for each in heads]
        projections = Siblings((attention.q_proj, attention.k_proj, attention.v_proj), of.given, (of.q, of.k, of.v))
        self.projections = Group(_adding(block.input_layernorm, of), projections, *after)
        after_attention, before_ffn, after_ffn = _norms(block)
        output = Siblings([attention.o_proj], of.attended, [of.more[0]])
        steps = [output, *_after(after_attention, of), _adding(before_ffn, of)]
        self.mlp, self.after = None, _after(after_ffn, of)
        if _offloaded(block.mlp, "gate", "up", "down"):
            self.rest = Group(*steps, *_gated(block.mlp, of), *self.after)
        else:  # neurons that come from disk, or a mixture: it is asked as a whole
            dtype = block.input_layernorm.weight.dtype
            self.mlp = getattr(block.mlp, "product", None) or functools.partial(_by_module, block.mlp, dtype)
            self.rest = Group(*steps)
        self.groups = self.projections, self.rest

    def __call__(self, layer: GrowingLayer) -> None:
        """Add `more` and the attention to `x`, and leave in `more` what the MLP would add."""
        self.projections()
        span = layer.append(self.key_value)
        attend(layer.keys.dtype, self.query, *layer.stored, span, self.scale, self.out)
        self.rest()
        if self.mlp:
            self.of.more[0].copy_(self.mlp(self.of.given))
            for task in self.after:
                task()

    def serves(self, layer: CacheLayerMixin) -> bool:
        """Whether a layer of a cache holds what the block attends to."""
        known = type(layer) in GROWING or type(layer) in GROWING.values()
        return (
            known and getattr(layer, "sliding_window", None) == self.window and not getattr(layer, "record_past", False)
        )


class _Head:
    """The output head: one product, or the parts of a packed head in few, since each call takes as long as a part."""

    def __init__(self, head: nn.Linear | OffloadedHead, given: Tensor):
        self.groups: list[Group] = []
        if not isinstance(head, OffloadedHead):
            self._product = functools.partial(dense.matvec, head.weight, given)
            return
        self._logits = torch.empty(head.out_features)
        outs = iter(self._logits.split([part.out_features for part in head.parts]))
        self.groups = [Group(Siblings(parts, given, list(islice(outs, len(parts))))) for parts in head.stretches()]

    def __call__(self) -> Tensor:
        """The logits of `given`, good until the next call."""
        if not self.groups:
            return self._product()
        for group in self.groups:
            group()
        return self._logits


def _gated(mlp: nn.Module, of: _Vectors) -> list[Siblings | Task]:
    """An FFN of three linears."""
    gating = Task(of.act, (of.gate.numpy(), of.up.numpy()), of.gate.numel(), of.gate.nbytes + of.up.nbytes)
    gates = Siblings((mlp.gate_proj, mlp.up_proj), of.given, (of.gate, of.up))
    return [gates, gating, Siblings([mlp.down_proj], of.gate, [of.more[0]])]


def _norms(block: nn.Module) -> tuple[nn.Module | None, nn.Module, nn.Module | None]:
    """The norms after attention, before the FFN and after it; only Gemma has the first and the last."""
    after_attention = block.get_submodule("post_attention_layernorm")
    if not hasattr(block, "pre_feedforward_layernorm"):
        return None, after_attention, None
    before_ffn, after_ffn = (block.get_submodule(f"{name}_feedforward_layernorm") for name in ("pre", "post"))
    return after_attention, before_ffn, after_ffn


def _offloaded(module: nn.Module, *names: str) -> bool:
    """Whether all these projections have their weights elsewhere; one with a single output stays a plain linear."""
    return all(isinstance(getattr(module, f"{name}_proj", None), OffloadedLinear) for name in names)


def _by_module(module: nn.Module, dtype: torch.dtype, x: Tensor) -> Tensor:
    return module(x.to(dtype).view(1, 1, -1)).view(-1)


def _basis(model: nn.Module, block: nn.Module) -> tuple[str, ...]:
    """The arguments of `rotary_emb` beside a position: Gemma has a basis for each type of attention."""
    return (str(block.self_attn.layer_type),) if hasattr(model.model.rotary_emb, "layer_types") else ()


def _activation(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _after(norm: nn.Module | None, of: _Vectors) -> list[Task]:
    """The norm of the added term, if there is one."""
    return [_normalising(norm, of.more.numpy())] if norm else []


def _adding(norm: nn.Module, of: _Vectors) -> Task:
    """Add `more` to `x` and put the RMSNorm of the sum into `given`."""
    x, more, given = of.x.numpy(), of.more.numpy(), of.given[None].numpy()
    return Task(add_and_normalise, (x, more, *_settings(norm), given))


def _normalising(norm: nn.Module, rows: np.ndarray) -> Task:
    """The RMSNorm of each row, in place."""
    return Task(normalise, (rows, *_settings(norm), rows))


def _settings(norm: nn.Module) -> tuple[np.ndarray, float]:
    """Factors and ε. Gemma stores by how much a factor differs from 1."""
    if isinstance(norm, Gemma3RMSNorm):
        return (1 + norm.weight.float()).numpy(), float(norm.eps)
    return norm.weight.float().numpy(), float(norm.variance_epsilon)
