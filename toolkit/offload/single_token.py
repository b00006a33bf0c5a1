"""One token through a Llama-shaped decoder, without what a framework does around each operation.

transformers runs the prompt. For a single token after it, transformers would run some sixty small operations and forty
modules per layer, which takes most of the time that is not spent on weights. The step here takes the same weights and
the same cache, has a product for each linear and eight small functions for the rest, and computes in fp32 throughout.
So its last digits differ from those of transformers, as those of packed products do.

The order of a block is that of `toolkit.offload.block_steps`. Its products and its attention are

    Siblings    linears with the same input, such as queries, keys and values
    Attention   of a block, to the keys and values that its cache holds, which move as the cache grows
    Stretch     of these and of `Task`s; an MLP that reads what it needs itself, such as neurons or experts, is called
                between two of them
"""

import ctypes
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Self, TypeAlias

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
from toolkit.kernels.single_token import NO_SINKS, add_to, append, attention, gate
from toolkit.models import decoder_blocks
from toolkit.models.cached_pass import CACHE
from toolkit.offload.block_steps import STAYING, Norm, Norms, adding, block_steps, is_called, stretches
from toolkit.offload.growing_cache import GROWING
from toolkit.offload.head import OffloadedHead
from toolkit.offload.linear import OffloadedLinear
from toolkit.offload.ways import POLICIES

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
LEAST_BYTES = 1 << 20  # that attention counts as, so that threads share it
SLOTS = max(policy.slots for policy in POLICIES.values())  # that one layer lies in, pass by pass
WITHOUT_EFFECT = {"logits_to_keep", "return_dict", "use_cache", "cache_position"}  # for one token, these values or any


class SingleToken:
    """The decoder's step. Its linears are `OffloadedLinear`s whose weights are used packed, in DRAM.

    An MLP that is no FFN of three such linears runs as a module, or by its `product`, which takes a vector and gives
    one, both fp32 [hidden].
    """

    def __init__(self, model: nn.Module):
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb  # not the model: that holds the step
        decoder = decoder_blocks(model)
        self.vectors = Vectors(decoder[0], model.config)
        bases = [_basis(model, block) for block in decoder]
        self.angles = {basis: torch.empty(2, self.vectors.head_size) for basis in bases}
        self.dtype = model.dtype
        self.blocks = [
            BlockStep(block, self.vectors, self.angles[basis], self.dtype)
            for block, basis in zip(decoder, bases, strict=True)
        ]
        self.logits = torch.empty(model.lm_head.out_features)
        self.x = torch.from_numpy(self.vectors.x)
        parts = itertools.chain.from_iterable(block_steps(block, self.vectors) for block in self.blocks)
        ending = [adding(_norm(model.model.norm), self.vectors)]
        ending += _head(model.lm_head, _flat(self.vectors.given), self.logits)
        rows = stretches([*parts, *ending], _place_of)
        self.stretches = [row[0] if is_called(row[0]) else Stretch(row) for row in rows]
        hooks = [
            (module._forward_hooks, module._forward_pre_hooks) for module in model.modules() if module is not model
        ]
        self._hooks = [*itertools.chain.from_iterable(hooks)]  # the model's own are run by its caller

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
            cache = given.pop(CACHE, given.pop("past_key_values", None))  # its former name is still taken
            if len(arguments) > 1 or not self._serves(cache, **given):
                return forward(*arguments, **named)
            return self(given["input_ids"], cache, given.get("position_ids"))

        return stepped

    def __call__(self, token: Tensor, cache: DynamicCache, position: Tensor | None = None) -> CausalLMOutputWithPast:
        """The logits [1, 1, vocabulary] after `token` [1, 1], in the head's type. The token is added to the cache."""
        self.x.copy_(self.embed(token)[0])
        self.vectors.more.fill(0)
        position = torch.tensor([[cache.get_seq_length()]]) if position is None else position
        for basis, kept in self.angles.items():
            torch.cat(self.rotary(self.x, position, *basis), dim=1, out=kept[None])
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            if type(layer) in GROWING:
                layer = cache.layers[number] = GROWING[type(layer)].of(layer)
            block.place, block.span[:] = layer.reserve()
        for stretch in self.stretches:
            stretch()
        logits = self.logits.to(self.dtype, copy=True)
        return CausalLMOutputWithPast(logits=logits.view(1, 1, -1), **{CACHE: cache})

    def close(self) -> None:
        """Release the weights."""
        self.stretches = []

    def _serves(self, cache, input_ids=None, attention_mask=None, position_ids=None, **named) -> bool:
        """Whether these arguments ask for a single token after others, and only for results that the step gives."""
        return (
            input_ids is not None
            and input_ids.shape == (1, 1)
            and type(cache) is DynamicCache
            and len(cache.layers) == len(self.blocks)
            and all(block.serves(layer) for block, layer in zip(self.blocks, cache.layers, strict=True))
            and cache.get_seq_length() > 0
            and len(cache.layers[0].keys) == 1
            and cache.layers[0].keys.dtype == self.dtype
            and (attention_mask is None or (attention_mask.ndim == 2 and bool(attention_mask.all())))
            and (position_ids is None or position_ids.shape == (1, 1))
            and all(value is None or name in WITHOUT_EFFECT for name, value in named.items())
            and named.get("return_dict") is not False
            and named.get("use_cache") is not False
            and not any(self._hooks)
        )


@dataclass(frozen=True, eq=False)
class Siblings:
    """Linears with the same input, the vector that `x` holds.

    `x` [in_features] and `outs` [out_features], one a linear, are fp32, in DRAM, and keep their place.
    """

    linears: Sequence[OffloadedLinear]
    x: Tensor
    outs: Sequence[Tensor]

    @property
    def stay(self) -> bool:
        """Whether their weights are always in memory, at the same place."""
        return all(linear.stays for linear in self.linears)

    def stages(self, weights: Iterator[Packed]) -> list[list[Task]]:
        """The products with the next weights, then the biases."""
        each = list(zip(self.linears, weights, self.outs, strict=False))
        products = [
            weight.product(self.x, out) or Product(Task(functools.partial(_matvec, weight, self.x, out), ()))
            for _, weight, out in each
        ]
        biased = [(out, linear.bias) for linear, _, out in each if linear.bias is not None]
        added = ([Task(add_to, (out[None].numpy(), bias.float().numpy()))] for out, bias in biased)
        return [*stages(products), *added]


class Stretch:
    """Parts that follow each other and whose weights are in memory at once; see the module's docstring.

    Weights are bound once for each place that they lie in: a layer that is read passes through two slots in turn. They
    are bound again where a cache has moved.
    """

    def __init__(self, parts: "Sequence[Part]"):
        self.parts = parts
        self.attentions = [part for part in parts if isinstance(part, Attention)]
        siblings = [part for part in parts if isinstance(part, Siblings)]
        self.linears = [linear for part in siblings for linear in part.linears]
        self.name = " + ".join(dict.fromkeys(linear.name for linear in self.linears))  # layers share theirs
        # of weights that stay one look is enough; it tells a streamer that what was read before is used up
        self._looked_at = self.linears[:1] if all(part.stay for part in siblings) else self.linears
        self._bound: deque[tuple[Sequence[Packed], Sequence[object], Program, int]] = deque(maxlen=SLOTS)

    def __call__(self) -> None:
        """Run all parts. They are one span, of stage `compute`."""
        weights = [linear.fetched() for linear in self._looked_at]
        places = [part.block.place for part in self.attentions]
        bound = next((it for it in self._bound if it[1] == places and all(map(is_, it[0], weights))), None)
        if bound is None:
            self._bound.append(bound := (weights, places, *self._bind(weights)))
        *_, program, nbytes = bound
        if not self.linears:
            program.run()
            return
        first = self.linears[0]
        begun_s = first.recorder.now_s()
        program.run()
        first.ended("compute", begun_s, nbytes, self.name)

    def _bind(self, looked_at: Sequence[Packed]) -> tuple[Program, int]:
        """The program with the weights of now, and the bytes that it multiplies with."""
        weights = [*looked_at, *(linear.fetched() for linear in self.linears[len(looked_at) :])]
        left = iter(weights)
        each = [[[part]] if isinstance(part, Task) else part.stages(left) for part in self.parts]
        return Program([*itertools.chain.from_iterable(each)]), sum(weight.nbytes for weight in weights)


def _place_of(part: "Part") -> int | None:
    """Where the weights of a part are, as `stretches` asks."""
    if not isinstance(part, Siblings):
        return None
    return STAYING if part.stay else part.linears[0].layer


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    """The product of a format that has nothing quicker."""
    out.copy_(weight.matvec(x))


class Vectors:
    """The vectors that a step writes to: `BlockVectors` of one token, and those of a gated FFN.

    All blocks have the same sizes and use them in turn. Their memory is torch's, which aligns it for products.
    """

    def __init__(self, block: nn.Module, config: PretrainedConfig):
        attention, hidden = block.self_attn, config.hidden_size
        self.head_size = size = attention.head_dim
        heads, key_heads = (linear.out_features // size for linear in (attention.q_proj, attention.k_proj))
        self.x, self.more = torch.zeros(1, hidden).numpy(), torch.zeros(1, hidden).numpy()
        self.given = torch.empty(1, hidden).numpy()
        self.query, self.attended = torch.empty(2, 1, heads, size).numpy()
        self.key, self.value = torch.empty(2, 1, key_heads, size).numpy()
        self.gate, self.up = torch.empty(2, config.intermediate_size).numpy()
        self.act = gate(_activation(config))


class BlockStep:
    """A `DecoderBlock`, and the `place` and `span` of its keys and values, which each token sets anew.

    `angles`, cosines and sines [2, head size], are of the token's position; `dtype` is that of keys and values.
    """

    paired = False

    def __init__(self, block: nn.Module, vectors: Vectors, angles: Tensor, dtype: torch.dtype):
        self.block, self.vectors, self.dtype = block, vectors, dtype
        self.norms, self.angles = _norms(block), [each[None].numpy() for each in angles]
        self.window = getattr(block.self_attn, "sliding_window", None)
        self.place = 0, 0, 0  # addresses of keys and of values, and for how many positions there is room
        self.span = np.zeros(2, np.int64)

    def serves(self, layer: CacheLayerMixin) -> bool:
        """Whether a layer of a cache holds what the block attends to."""
        known = type(layer) in GROWING or type(layer) in GROWING.values()
        return (
            known and getattr(layer, "sliding_window", None) == self.window and not getattr(layer, "record_past", False)
        )

    def projected(self, x: np.ndarray, outs: Mapping[str, np.ndarray]) -> "Iterator[Part]":
        """See `DecoderBlock`."""
        linears = [getattr(self.block.self_attn, f"{name}_proj") for name in outs]
        yield Siblings(linears, _flat(x), [*map(_flat, outs.values())])

    def attention(self) -> "Iterator[Part]":
        """See `DecoderBlock`."""
        yield Attention(self, np.float32(self.block.self_attn.scaling))

    def ffn(self) -> "Iterator[Part]":
        """See `DecoderBlock`. An FFN whose neurons come from disk, or a mixture, is asked as a whole."""
        mlp, vectors = self.block.mlp, self.vectors
        given, more = _flat(vectors.given), _flat(vectors.more)
        if not _offloaded(mlp, "gate", "up", "down"):
            of_module = functools.partial(_by_module, mlp, self.block.input_layernorm.weight.dtype)
            yield Task(_into, (getattr(mlp, "product", None) or of_module, given, more))
            return
        inner, up = vectors.gate, vectors.up
        yield Siblings((mlp.gate_proj, mlp.up_proj), given, (_flat(inner), _flat(up)))
        yield Task(vectors.act, (inner, up), inner.size, inner.nbytes + up.nbytes)
        yield Siblings([mlp.down_proj], _flat(inner), [more])


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a block: key and value go to its cache, and the query attends to all that is there."""

    block: BlockStep
    scale: np.float32

    def stages(self, weights: Iterator[Packed]) -> list[list[Task]]:
        """Both, at the place that the cache has now; threads share heads, however few positions there are."""
        *addresses, positions = self.block.place
        of, span, dtype = self.block.vectors, self.block.span, self.block.dtype
        _, heads, size = of.key.shape
        keys, values = (_memory(address, (heads, positions, size), dtype.itemsize) for address in addresses)
        given = of.query, keys, values, span, 0, self.scale, NO_SINKS, of.attended
        added = Task(append(dtype), (of.key, of.value, span, keys, values))
        return [[added], [Task(attention(dtype), given, heads, max(keys.nbytes, LEAST_BYTES))]]


def _memory(address: int, shape: tuple[int, ...], width: int) -> np.ndarray:
    """The bits of elements at an address. The array does not own them: a step holds no cache of an earlier text."""
    held = (ctypes.c_uint8 * (math.prod(shape) * width)).from_address(address)
    return np.frombuffer(held, f"u{width}").reshape(shape)


Part: TypeAlias = Siblings | Attention | Task


def _head(head: nn.Linear | OffloadedHead, given: Tensor, logits: Tensor) -> "Iterator[Part]":
    """The output head, whole or in parts."""
    if not isinstance(head, OffloadedHead):
        yield dense.product(head.weight, given, logits).task
        return
    outs = iter(logits.split([part.out_features for part in head.parts]))
    for parts in head.stretches():
        yield Siblings(parts, given, [*itertools.islice(outs, len(parts))])


def _flat(vectors: np.ndarray) -> Tensor:
    """The same memory as one row."""
    return torch.from_numpy(vectors.reshape(-1))


def _norms(block: nn.Module) -> Norms:
    """The norms of a block. Only Gemma has some after attention and FFN, and its name of the norm before the FFN."""
    after_attention, before_ffn, after_ffn = None, block.get_submodule("post_attention_layernorm"), None
    if hasattr(block, "pre_feedforward_layernorm"):
        after_attention = before_ffn
        before_ffn, after_ffn = (block.get_submodule(f"{name}_feedforward_layernorm") for name in ("pre", "post"))
    attention = block.self_attn
    of_heads = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    every = (block.input_layernorm, before_ffn, *of_heads, after_attention, after_ffn)
    return Norms(*(_norm(norm) if norm else None for norm in every))


def _offloaded(module: nn.Module, *names: str) -> bool:
    """Whether all these projections have their weights elsewhere; one with a single output stays a plain linear."""
    return all(isinstance(getattr(module, f"{name}_proj", None), OffloadedLinear) for name in names)


def _into(product: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> None:
    out.copy_(product(x))


def _by_module(module: nn.Module, dtype: torch.dtype, x: Tensor) -> Tensor:
    return module(x.to(dtype).view(1, 1, -1)).view(-1)


def _basis(model: nn.Module, block: nn.Module) -> tuple[str, ...]:
    """The arguments of `rotary_emb` beside a position: Gemma has a basis for each type of attention."""
    return (str(block.self_attn.layer_type),) if hasattr(model.model.rotary_emb, "layer_types") else ()


def _activation(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _norm(norm: nn.Module) -> Norm:
    """Factors and ε. Gemma stores by how much a factor differs from 1."""
    if isinstance(norm, Gemma3RMSNorm):
        return Norm((1 + norm.weight.float()).numpy(), float(norm.eps))
    return Norm(norm.weight.float().numpy(), float(norm.variance_epsilon))
