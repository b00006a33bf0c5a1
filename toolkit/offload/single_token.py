"""One token through a Llama-shaped decoder, without what a framework does around each operation.

transformers runs the prompt. For a single token after it, transformers would run some sixty small operations and forty
modules per layer, which takes most of the time that is not spent on weights. The step here takes the same weights and
the same cache, has a product for each linear and eight small functions for the rest, and computes in fp32 throughout.
So its last digits differ from those of transformers, as those of packed products do.

A token is a row of parts, and it is cut where the weights of the next part are not there yet:

    Siblings    linears with the same input, such as queries, keys and values
    Attention   of a block, to the keys and values that its cache holds
    Task        what runs between them on the same vectors: norms, rotation, gates
    Stretch     parts whose weights are in memory at once: all layers that stay, or one layer that passes through.
                They are bound to a `Program`, and a single call runs it.

        layers 0 to 11 stay                              layer 12 passes        layer 13 passes
        [norm, q k v, rotate, attend, o, ..., down]      [norm, ..., down]      [norm, ..., down, norm, head]
        a stretch                                        a stretch              a stretch

An MLP that reads what it needs itself, such as neurons or experts, is called between two stretches.

The order of a block's parts stands here and, for GGUF files, in `toolkit.offload.decoder.steps`: there matrices have
names and the cache stays in its place, here each linear brings its own product and its weights, and a cache moves as it
grows.
"""

import ctypes
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Self, TypeAlias

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher
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
from toolkit.kernels.single_token import (
    NO_SINKS,
    add_and_normalise,
    add_to,
    append,
    attention,
    gate,
    normalise,
    rotate,
)
from toolkit.models import decoder_blocks
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
STAYING = -1  # instead of the number of a layer that passes
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
        parts = itertools.chain.from_iterable(block.parts() for block in self.blocks)
        ending = [_adding(model.model.norm, self.vectors), *_head(model.lm_head, self.vectors.given, self.logits)]
        self.stretches = [*_stretches([*parts, *ending])]
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
            if len(arguments) > 1 or not self._serves(**given):
                return forward(*arguments, **named)
            return self(given["input_ids"], given["past_key_values"], given.get("position_ids"))

        return stepped

    def __call__(self, token: Tensor, cache: DynamicCache, position: Tensor | None = None) -> CausalLMOutputWithPast:
        """The logits [1, 1, vocabulary] after `token` [1, 1], in the head's type. The token is added to the cache."""
        vectors = self.vectors
        vectors.x.copy_(self.embed(token)[0])
        vectors.more.zero_()
        position = torch.tensor([[cache.get_seq_length()]]) if position is None else position
        for basis, kept in self.angles.items():
            torch.cat(self.rotary(vectors.x, position, *basis), dim=1, out=kept[None])
        for number, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            if type(layer) in GROWING:
                layer = cache.layers[number] = GROWING[type(layer)].of(layer)
            block.place, block.span[:] = layer.reserve()
        for stretch in self.stretches:
            stretch()
        logits = self.logits.to(self.dtype, copy=True)
        return CausalLMOutputWithPast(logits=logits.view(1, 1, -1), past_key_values=cache)

    def close(self) -> None:
        """Release the weights."""
        self.stretches = []

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
            and past_key_values.layers[0].keys.dtype == self.dtype
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


def _stretches(parts: "Iterable[Part]") -> Iterator[Stretch | Task]:
    """The stretches of a token; parts that are no compiled functions stand between them."""
    some: "list[Part]" = []
    layer = None  # of the weights in `some`: a number that passes, or STAYING
    for part in parts:
        needed = layer
        if isinstance(part, Siblings):
            needed = STAYING if part.stay else part.linears[0].layer
        alone = isinstance(part, Task) and not isinstance(part.function, Dispatcher)
        if some and (alone or (layer is not None and needed != layer)):
            yield Stretch(some)
            some, needed = [], None if alone else needed
        if alone:
            yield part
        else:
            some.append(part)
        layer = needed
    if some:
        yield Stretch(some)


def _matvec(weight: Packed, x: Tensor, out: Tensor) -> None:
    """The product of a format that has nothing quicker."""
    out.copy_(weight.matvec(x))


class Vectors:
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


class BlockStep:
    """A decoder block: its parts, and the `place` and `span` of its keys and values, which each token sets anew.

    `angles`, cosines and sines [2, head size], are of the token's position; `dtype` is that of keys and values.
    """

    def __init__(self, block: nn.Module, vectors: Vectors, angles: Tensor, dtype: torch.dtype):
        self.block, self.vectors, self.dtype = block, vectors, dtype
        self.angles = [each[None].numpy() for each in angles]
        self.window = getattr(block.self_attn, "sliding_window", None)
        self.place = 0, 0, 0  # addresses of keys and of values, and for how many positions there is room
        self.span = np.zeros(2, np.int64)

    def parts(self) -> "Iterator[Part]":
        """Adds `more` and the attention to `x`, and leaves in `more` what the MLP would add."""
        attention, vectors = self.block.self_attn, self.vectors
        after_attention, before_ffn, after_ffn = _norms(self.block)
        yield _adding(self.block.input_layernorm, vectors)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        yield Siblings(projections, vectors.given, (vectors.q, vectors.k, vectors.v))
        yield from self._attention()
        yield Siblings([attention.o_proj], vectors.attended, [vectors.more[0]])
        yield from _after(after_attention, vectors)
        yield _adding(before_ffn, vectors)
        yield from self._mlp()
        yield from _after(after_ffn, vectors)

    def serves(self, layer: CacheLayerMixin) -> bool:
        """Whether a layer of a cache holds what the block attends to."""
        known = type(layer) in GROWING or type(layer) in GROWING.values()
        return (
            known and getattr(layer, "sliding_window", None) == self.window and not getattr(layer, "record_past", False)
        )

    def _attention(self) -> "Iterator[Part]":
        attention, vectors = self.block.self_attn, self.vectors
        query, key, value, out = (
            vector.view(1, -1, attention.head_dim).numpy()
            for vector in (vectors.q, vectors.k, vectors.v, vectors.attended)
        )
        for name, heads in (("q_norm", query), ("k_norm", key)):
            if norm := getattr(attention, name, None):
                yield _normalising(norm, heads[0])
        for heads in (query, key):
            yield Task(rotate, (heads, *self.angles))
        yield Attention(self, query, key, value, out, np.float32(attention.scaling))

    def _mlp(self) -> "Iterator[Part]":
        """The FFN; one whose neurons come from disk, or a mixture, is asked as a whole."""
        mlp, vectors = self.block.mlp, self.vectors
        if not _offloaded(mlp, "gate", "up", "down"):
            of_module = functools.partial(_by_module, mlp, self.block.input_layernorm.weight.dtype)
            yield Task(_into, (getattr(mlp, "product", None) or of_module, vectors.given, vectors.more[0]))
            return
        inner, up = vectors.gate.numpy(), vectors.up.numpy()
        yield Siblings((mlp.gate_proj, mlp.up_proj), vectors.given, (vectors.gate, vectors.up))
        yield Task(vectors.act, (inner, up), inner.size, inner.nbytes + up.nbytes)
        yield Siblings([mlp.down_proj], vectors.gate, [vectors.more[0]])


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a block: key and value go to its cache, and the query attends to all that is there.

    The vectors are fp32, [1, heads, size].
    """

    block: BlockStep
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    scale: np.float32

    def stages(self, weights: Iterator[Packed]) -> list[list[Task]]:
        """Both, at the place that the cache has now; threads share heads, however few positions there are."""
        *addresses, positions = self.block.place
        span, dtype, (_, heads, size) = self.block.span, self.block.dtype, self.key.shape
        keys, values = (_memory(address, (heads, positions, size), dtype.itemsize) for address in addresses)
        given = self.query, keys, values, span, 0, self.scale, NO_SINKS, self.out
        added = Task(append(dtype), (self.key, self.value, span, keys, values))
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


def _into(product: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> None:
    out.copy_(product(x))


def _by_module(module: nn.Module, dtype: torch.dtype, x: Tensor) -> Tensor:
    return module(x.to(dtype).view(1, 1, -1)).view(-1)


def _basis(model: nn.Module, block: nn.Module) -> tuple[str, ...]:
    """The arguments of `rotary_emb` beside a position: Gemma has a basis for each type of attention."""
    return (str(block.self_attn.layer_type),) if hasattr(model.model.rotary_emb, "layer_types") else ()


def _activation(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _after(norm: nn.Module | None, vectors: Vectors) -> list[Task]:
    """The norm of the added term, if there is one."""
    return [_normalising(norm, vectors.more.numpy())] if norm else []


def _adding(norm: nn.Module, vectors: Vectors) -> Task:
    """Add `more` to `x` and put the RMSNorm of the sum into `given`."""
    x, more, given = vectors.x.numpy(), vectors.more.numpy(), vectors.given[None].numpy()
    return Task(add_and_normalise, (x, more, *_settings(norm), given))


def _normalising(norm: nn.Module, rows: np.ndarray) -> Task:
    """The RMSNorm of each row, in place."""
    return Task(normalise, (rows, *_settings(norm), rows))


def _settings(norm: nn.Module) -> tuple[np.ndarray, float]:
    """Factors and ε. Gemma stores by how much a factor differs from 1."""
    if isinstance(norm, Gemma3RMSNorm):
        return (1 + norm.weight.float()).numpy(), float(norm.eps)
    return norm.weight.float().numpy(), float(norm.variance_epsilon)
