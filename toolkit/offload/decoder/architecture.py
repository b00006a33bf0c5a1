"""The sizes and constants of a Llama-shaped decoder, read off the header of a GGUF file.

architecture = architecture_of(read_header(Path("model.gguf")))    # None: another shape, which transformers runs
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from toolkit.errors import UserError, unknown
from toolkit.kernels.blocks.layout import LAYOUTS
from toolkit.kernels.eight_bit_cache import BLOCK_BYTES, NARROW, Q8_0
from toolkit.kernels.single_token import CLAMPED
from toolkit.models.gguf_config import FULL, SLIDING, fields_of
from toolkit.models.gguf_header import LAYERS, ROTARY, GgufHeader
from toolkit.offload.variant import KV_TYPES

PAIRED = ("llama", "mistral", "mixtral")  # their files have the elements of a head that rotate together side by side
GATES = {"gemma3_text": "gelu_pytorch_tanh", "gpt_oss": CLAMPED}
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
WHOLE_NORMS = ("olmoe",)  # of all heads together
DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")  # by transformers' names
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
RENORMALISED = ("mixtral", "gpt_oss")  # always; of others a field says it
OF_QUERIES = ("attn_q", "attn_k", "attn_v")
BIASED = {"qwen2": OF_QUERIES, "qwen2_moe": OF_QUERIES, "gpt_oss": (*OF_QUERIES, "attn_output")}
UNKNOWN = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")
FFN_NORM, FFN_NORMS = "ffn_norm", {"gpt_oss": "post_attention_norm"}  # Gemma has another norm of this name
EMBEDDING, HEAD, NORM = "token_embd.weight", "output.weight", "output_norm.weight"
# of a mixture: the ends of the names of matrices, the router, and the router of the shared expert alone
ROUTED, SHARED, ROUTER, SHARE = "_exps", "_shexp", "ffn_gate_inp", "ffn_gate_inp_shexp"
ALIGNMENT = 8  # bytes: the least that the format of GGUF files allows


@dataclass(frozen=True)
class Mixture:
    """The FFN of a block as a mixture: `experts` routed ones of `width` neurons, of which a token uses `used`.

    `renormalised`: the weights of a token's experts add up to 1. A `shared` expert of so many neurons, 0 for none, adds
    to all tokens. `biased`: router and experts have biases.
    """

    experts: int
    used: int
    width: int
    renormalised: bool
    shared: int
    biased: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder: RMSNorm, rotary embeddings, attention with grouped heads, gated FFNs.

    `windows` and `ropes` are those of each block: how many positions it attends to, 0 for all, and transformers'
    parameters of rotary embeddings. `scale` multiplies scores, `embedding_scale` the embedding. `paired`: elements of a
    head that rotate together are neighbours. `end` is the token that ends a text. `dtype` is that of keys and values in
    the cache: "float32", "bfloat16" or "q8_0".
    `mixture` is what FFNs are in place of gated ones of `ffn` neurons; `ffn_norm` the file's name of the norm before.
    """

    hidden: int
    heads: int
    key_heads: int
    head_size: int
    ffn: int
    blocks: int
    words: int
    positions: int
    epsilon: float
    activation: str
    scale: float
    embedding_scale: float
    windows: tuple[int, ...]
    ropes: tuple[Mapping[str, Any], ...]
    paired: bool
    end: int | None
    dtype: str
    mixture: Mixture | None = None
    ffn_norm: str = FFN_NORM

    def name_of(self, tensor: str) -> str:
        """The name of a tensor of the file, but that the norm before the FFN has the same name in all models."""
        return tensor.replace(f".{self.ffn_norm}.", f".{FFN_NORM}.")

    def with_cache(self, kv_type: str | None) -> Self:
        """The same with keys and values of this type, one of `KV_TYPES`; None leaves the file's own.

        Raises `UserError` for an unknown type, and for heads that blocks do not fill.
        """
        if kv_type is None:
            return self
        if kv_type not in KV_TYPES:
            raise unknown("type of keys and values", kv_type, KV_TYPES)
        if KV_TYPES[kv_type] == Q8_0 and self.head_size % NARROW:
            raise UserError(
                f"{kv_type} keys and values: this model's heads have {self.head_size} elements, and blocks {NARROW}: "
                f"take {' or '.join(name for name in KV_TYPES if name != kv_type)}"
            )
        return replace(self, dtype=KV_TYPES[kv_type])

    @property
    def row_bytes(self) -> int:
        """Bytes of the key of one position and head in the cache, or of the value."""
        if self.dtype == Q8_0:
            return self.head_size // NARROW * BLOCK_BYTES
        return self.head_size * (4 if self.dtype == "float32" else 2)

    def cache_bytes(self, positions: int) -> int:
        """Bytes of the keys and values of so many positions."""
        return 2 * self.blocks * self.key_heads * positions * self.row_bytes

    @property
    def vector_bytes(self) -> int:
        """Bytes of all vectors that each token of a pass has, and of those rounded to 8 bits."""
        widths = 3 * self.hidden + 2 * (self.heads + self.key_heads) * self.head_size + self.ffn
        if self.mixture:  # outputs of experts, and one of them whose vectors are apart
            widths += self.mixture.used * self.hidden + 3 * self.hidden + 2 * self.mixture.width + self.mixture.experts
        return 6 * widths


def architecture_of(header: GgufHeader) -> Architecture | None:
    """The architecture of a file's model; None for one that is not such a decoder, or that transformers refuses."""
    try:
        model, fields = fields_of(header)
    except (UserError, KeyError):
        return None
    if model not in DENSE + MIXTURES or any(fields.get(name) for name in UNKNOWN) or not _tokenizer(header):
        return None
    ropes, windows = _of_blocks(fields)
    if any(rope["rope_type"] == "longrope" and rope["short_factor"] != rope["long_factor"] for rope in ropes):
        return None
    gemma, mixture = model == "gemma3_text", _mixture(model, fields) if model in MIXTURES else None
    found = Architecture(
        hidden=fields["hidden_size"],
        heads=fields["num_attention_heads"],
        key_heads=fields["num_key_value_heads"],
        head_size=fields["head_dim"],
        ffn=mixture.shared or mixture.width if mixture else fields["intermediate_size"],
        blocks=fields["num_hidden_layers"],
        words=fields["vocab_size"],
        positions=fields["max_position_embeddings"],
        epsilon=float(fields["rms_norm_eps"]),
        activation=GATES.get(model, "silu"),
        scale=float(fields.get("query_pre_attn_scalar") or fields["head_dim"]) ** -0.5,
        embedding_scale=fields["hidden_size"] ** 0.5 if gemma else 1.0,
        windows=windows,
        ropes=ropes,
        paired=model in PAIRED,
        end=fields["eos_token_id"],
        dtype=header.dtype,
        mixture=mixture,
        ffn_norm=FFN_NORMS.get(model, FFN_NORM),
    )
    return found if _fits(header, found, model, fields) else None


def _mixture(model: str, fields: Mapping[str, Any]) -> Mixture:
    return Mixture(
        experts=fields.get("num_experts") or fields["num_local_experts"],
        used=fields["num_experts_per_tok"],
        width=fields.get("moe_intermediate_size") or fields["intermediate_size"],
        renormalised=model in RENORMALISED or fields["norm_topk_prob"],
        shared=fields.get("shared_expert_intermediate_size", 0),
        biased=model == "gpt_oss",
    )


def _tokenizer(header: GgufHeader) -> bool:
    return header.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def _of_blocks(fields: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[int, ...]]:
    """The rotary embeddings and the window of each block."""
    count, rope, window = fields["num_hidden_layers"], fields["rope_parameters"], fields.get("sliding_window") or 0
    if kinds := fields.get("layer_types"):
        ropes = tuple(rope[kind] if FULL in rope else rope for kind in kinds)
        return ropes, tuple(window if kind == SLIDING else 0 for kind in kinds)
    return (rope,) * count, (window,) * count


def _fits(header: GgufHeader, sizes: Architecture, model: str, fields: Mapping[str, Any]) -> bool:
    """Whether the file has exactly the tensors of this architecture, in types that the kernels take."""
    shapes = {EMBEDDING: (sizes.words, sizes.hidden), NORM: (sizes.hidden,)}
    if HEAD in header.tensors:
        shapes[HEAD] = shapes[EMBEDDING]
    of_block = _block_shapes(sizes, model, fields)
    shapes |= {f"{LAYERS}{n}.{name}": shape for n in range(sizes.blocks) for name, shape in of_block.items()}
    given = {name: tensor for name, tensor in header.tensors.items() if name != ROTARY}
    return (
        {name: _without_one(tensor.shape) for name, tensor in given.items()} == shapes
        and all(tensor.kind in LAYOUTS and tensor.offset % ALIGNMENT == 0 for tensor in given.values())
        and sizes.heads % sizes.key_heads == 0
        and sizes.head_size % 2 == 0
    )


def _without_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix of a single row is a vector."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _block_shapes(sizes: Architecture, model: str, fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a block's tensors by their names in the file."""
    hidden, of_keys, of_queries = sizes.hidden, sizes.key_heads * sizes.head_size, sizes.heads * sizes.head_size
    matrices: dict[str, tuple[int, ...]] = {
        "attn_q": (of_queries, hidden),
        "attn_k": (of_keys, hidden),
        "attn_v": (of_keys, hidden),
        "attn_output": (hidden, of_queries),
    }
    matrices |= _mixture_shapes(sizes.mixture, hidden) if sizes.mixture else _ffn_shapes("", sizes.ffn, hidden)
    biased = [name for name in matrices if fields.get("mlp_bias" if name.startswith("ffn") else "attention_bias")]
    biased += BIASED.get(model, ())
    biased += [name for name in matrices if name.startswith("ffn")] if sizes.mixture and sizes.mixture.biased else []
    norms = {"attn_norm": hidden, sizes.ffn_norm: hidden}
    norms |= dict.fromkeys(["attn_q_norm", "attn_k_norm"], sizes.head_size) if model in HEAD_NORMS else {}
    norms |= {"attn_q_norm": of_queries, "attn_k_norm": of_keys} if model in WHOLE_NORMS else {}
    norms |= dict.fromkeys(["post_attention_norm", "post_ffw_norm"], hidden) if model == "gemma3_text" else {}
    norms |= {"attn_sinks": sizes.heads} if model == "gpt_oss" else {}
    return {
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.bias": matrices[name][:-1] for name in biased},
        **{f"{name}.weight": (size,) for name, size in norms.items()},
    }


def _ffn_shapes(end: str, ffn: int, hidden: int, *experts: int) -> dict[str, tuple[int, ...]]:
    """The matrices of an FFN whose names have this end; those of several experts are one tensor."""
    wide = (*experts, ffn, hidden)
    return {f"ffn_gate{end}": wide, f"ffn_up{end}": wide, f"ffn_down{end}": (*experts, hidden, ffn)}


def _mixture_shapes(mixture: Mixture, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes = {ROUTER: (mixture.experts, hidden)} | _ffn_shapes(ROUTED, mixture.width, hidden, mixture.experts)
    if mixture.shared:
        shapes |= {SHARE: (hidden,)} | _ffn_shapes(SHARED, mixture.shared, hidden)
    return shapes
