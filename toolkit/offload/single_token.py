"""One token through a Llama-shaped decoder, without what a framework does around each operation.

transformers runs a prompt; it would also run each token after it, some sixty small operations and forty modules a
layer. For one token of one sequence this is most of the time that is not spent on weights. The step here takes the same
weights and the same cache, calls a product for each linear and six small functions for the rest, and computes in fp32
throughout. So its last digits differ from those of transformers, as those of packed products do.
"""

import functools
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from toolkit.kernels import dense
from toolkit.kernels.single_token import add_and_normalise, attend, normalise, rotate
from toolkit.models import decoder_blocks
from toolkit.offload.growing_cache import GrowingLayer

# RMSNorm, rotary embeddings, attention with grouped heads, SwiGLU; some with biases or norms of queries and keys
CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
WITHOUT_EFFECT = {"logits_to_keep", "return_dict", "use_cache", "cache_position"}  # for one token, these values or any


class SingleToken:
    """The decoder's step.

    Its linears, or its whole FFNs, have a method `product` for one fp32 vector: `OffloadedLinear`s whose weights are
    used packed, in DRAM; `ResidentLinear`s and `NeuronFFN`s.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.blocks = [_Block(block) for block in decoder_blocks(model)]
        self.norm, self.head = _Norm(model.model.norm), model.lm_head.weight
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ][2:]  # not the model's own, which its caller runs

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """The step of this model, or None for a model of another shape."""
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        whole = set(kinds) == {"full_attention"} and (
            type(model) is not MistralForCausalLM or not config.sliding_window
        )
        plain = type(model) in CLASSES and config.hidden_act == "silu"
        return cls(model) if plain and whole and model.lm_head.bias is None else None

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
            if type(layer) is not GrowingLayer:
                cache.layers[number] = GrowingLayer.of(layer)
        x = self.model.model.embed_tokens(token)[0].float()
        position = torch.tensor([[cache.get_seq_length()]]) if position is None else position
        angles = tuple(each[0, 0].numpy() for each in self.model.model.rotary_emb(x, position))
        more = torch.zeros_like(x)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            more = block(x, more, angles, layer)
        logits = dense.matvec(self.head, self.norm.of_sum(x, more)).to(self.head.dtype)
        return CausalLMOutputWithPast(logits=logits.view(1, 1, -1), past_key_values=cache)

    def _serves(self, input_ids=None, past_key_values=None, attention_mask=None, position_ids=None, **named) -> bool:
        """Whether these arguments ask for a single token after others, and for nothing that the step does not give."""
        return (
            input_ids is not None
            and input_ids.shape == (1, 1)
            and type(past_key_values) is DynamicCache
            and all(type(layer) in (DynamicLayer, GrowingLayer) for layer in past_key_values.layers)
            and past_key_values.get_seq_length() > 0
            and len(past_key_values.layers) == len(self.blocks)
            and (attention_mask is None or (attention_mask.ndim == 2 and bool(attention_mask.all())))
            and (position_ids is None or position_ids.shape == (1, 1))
            and all(value is None or name in WITHOUT_EFFECT for name, value in named.items())
            and named.get("return_dict") is not False
            and named.get("use_cache") is not False
            and not any(self._hooks)
        )


class _Block:
    """A decoder block, with the arrays that its step writes to."""

    def __init__(self, block: nn.Module):
        attention, mlp = block.self_attn, block.mlp
        self.before, self.between = _Norm(block.input_layernorm), _Norm(block.post_attention_layernorm)
        self.q, self.k, self.v, self.o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.ffn = mlp.product if hasattr(mlp, "product") else functools.partial(_swiglu, mlp)
        self.size, self.scale = attention.head_dim, attention.scaling
        self.norms = [_Norm(norm) for norm in (getattr(attention, f"{name}_norm", None) for name in "qk") if norm]
        self.attended = torch.empty(self.q.out_features)
        self.out = self.attended.view(-1, self.size).numpy()

    def __call__(self, x: Tensor, more: Tensor, angles: tuple, layer: GrowingLayer) -> Tensor:
        """Add `more` [1, hidden] and the attention to `x` in place, and return what the MLP would add."""
        given = self.before.of_sum(x, more)
        q, k, v = (linear.product(given) for linear in (self.q, self.k, self.v))
        heads = [each.view(-1, self.size).numpy() for each in (q, k)]
        for norm, each in zip(self.norms, heads, strict=False):
            norm.of_rows(each)
        for each in heads:
            rotate(each, *angles)
        keys, values, length = layer.append(k.view(-1, self.size), v.view(-1, self.size))
        attend(heads[0], keys, values, length, self.scale, self.out)
        return self.ffn(self.between.of_sum(x, self.o.product(self.attended))).view(1, -1)


def _swiglu(mlp: nn.Module, given: Tensor) -> Tensor:
    gate, up = mlp.gate_proj.product(given), mlp.up_proj.product(given)
    return mlp.down_proj.product(functional.silu(gate, inplace=True).mul_(up))


class _Norm:
    """An RMSNorm, with the vector that it writes to."""

    def __init__(self, norm: nn.Module):
        self.weight, self.epsilon = norm.weight.float().numpy(), float(norm.variance_epsilon)
        self.given = torch.empty(len(self.weight))
        self.out = self.given.view(1, -1).numpy()

    def of_sum(self, x: Tensor, more: Tensor) -> Tensor:
        """Add `more` to `x`, both [1, size], and return the norm of the sum, [size]."""
        add_and_normalise(x.numpy(), more.view(1, -1).numpy(), self.weight, self.epsilon, self.out)
        return self.given

    def of_rows(self, x) -> None:
        """Normalise the rows of an array in place."""
        normalise(x, self.weight, self.epsilon, x)
