"""The sizes of published models: layers, widths, heads and experts, and what follows from them.

shape = ARCHITECTURES["mixtral-8x7b"]
shape.matrices["down_proj"]    # (4096, 14336): outputs × inputs, of one expert
shape.parameters["experts"]    # 45.1e9

Sources: the makers' papers, and the config.json of each model on the Hugging Face hub. A test compares the totals with
those that the makers publish.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes.

    `ffn` is the width of an FFN, or of one expert. `experts` are routed, `experts_per_token` of them for each token;
    each token also uses the `shared_experts`. The first `dense_layers` have an FFN of width `dense_ffn` for experts.
    `tied`: the head is the embedding. Shapes in `ARCHITECTURES` leave out norms, biases and learned positions, less
    than 0.5 % of any of them. The shape of a loaded model counts them, and all its remaining tensors, as `other`
    weights in `others` tensors.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    key_value_heads: int
    head_size: int
    family: str = "llama"  # whose names the matrices have: "llama", "opt", or "falcon"
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    own_attention: tuple[tuple[int, int], ...] | None = None
    """Outputs × inputs of a layer's matrices outside the FFN, of a model at hand; None: they follow from the heads."""
    other: int = 0
    others: int = 0
    own_experts: bool = False
    """Whether an expert is more than `down(act(gate(x)) · up(x))`: then it is stored in 16 bits only."""

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate beside the up projection."""
        return self.family == "llama"

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """Outputs × inputs of a layer's attention matrices, under transformers' names."""
        if self.own_attention is not None:
            return {str(number): matrix for number, matrix in enumerate(self.own_attention)}
        queries, keys = self.heads * self.head_size, self.key_value_heads * self.head_size
        if self.family == "falcon":  # queries, keys and values in one matrix
            return {"query_key_value": (queries + 2 * keys, self.hidden), "dense": (self.hidden, queries)}
        inputs = {"q_proj": (queries, self.hidden), "k_proj": (keys, self.hidden), "v_proj": (keys, self.hidden)}
        return inputs | {"out_proj" if self.family == "opt" else "o_proj": (self.hidden, queries)}

    @property
    def ffn_matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs × inputs of a layer's FFN, or of one of its experts; none without a known FFN."""
        if not self.ffn:
            return {}
        *inputs, output = FFN_NAMES[self.family]
        return dict.fromkeys(inputs, (self.ffn, self.hidden)) | {output: (self.hidden, self.ffn)}

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs × inputs of a layer's matrices: attention, and the FFN or one expert."""
        return self.attention | self.ffn_matrices

    @property
    def routed_layers(self) -> int:
        """Layers with experts; none of a dense model."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def parameters(self) -> dict[str, int]:
        """Weights by part: embedding, head (0 if tied), attention, ffn, experts, router, other; of the whole model."""
        embedding, one_ffn = self.vocabulary * self.hidden, _weights(self.ffn_matrices)
        dense = one_ffn // self.ffn * self.dense_ffn * self.dense_layers if self.experts else 0
        return {
            "embedding": embedding,
            "head": 0 if self.tied else embedding,
            "attention": self.layers * _weights(self.attention),
            "ffn": dense if self.experts else self.layers * one_ffn,
            "experts": self.routed_layers * (self.experts + self.shared_experts) * one_ffn,
            "router": self.routed_layers * self.experts * self.hidden,
            "other": self.other,
        }

    def nbytes(self, element_bytes: float = 2) -> float:
        """Bytes of all weights."""
        return sum(self.parameters.values()) * element_bytes


FFN_NAMES = {
    "llama": ("gate_proj", "up_proj", "down_proj"),
    "opt": ("fc1", "fc2"),
    "falcon": ("dense_h_to_4h", "dense_4h_to_h"),
}


def _weights(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in matrices.values())


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(layers, hidden, 4 * hidden, heads, 50272, heads, hidden // heads, "opt", tied=True)


def _llama(layers: int, hidden: int, ffn: int, heads: int, key_value_heads: int, **others) -> ModelShape:
    vocabulary, head_size = others.pop("vocabulary", 32000), others.pop("head_size", hidden // heads)
    return ModelShape(layers, hidden, ffn, heads, vocabulary, key_value_heads, head_size, **others)


def _latent_attention(hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
    """The matrices of DeepSeek-V3's attention: queries and keys by way of short vectors, of 1536 and 512 numbers.

    A head has 128 numbers, and 64 more that are rotated; the keys' rotated ones are shared by all heads.
    """
    queries = (1536, hidden), (heads * (128 + 64), 1536)
    keys_and_values = (512 + 64, hidden), (heads * (128 + 128), 512)
    return (*queries, *keys_and_values, (hidden, heads * 128))


# sizes of vocabularies
LLAMA3, QWEN2, QWEN3, GPT_OSS = 128256, 152064, 151936, 201088


ARCHITECTURES = {
    "opt-1536": _opt(24, 1536, 16),  # of no released model: the smallest layer (57 MB in fp16) that hides fixed costs
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, 4),
    "llama2-7b": _llama(32, 4096, 11008, 32, 32),
    "llama2-13b": _llama(40, 5120, 13824, 40, 40),
    "llama2-70b": _llama(80, 8192, 28672, 64, 8),
    "falcon-7b": ModelShape(32, 4544, 18176, 71, 65024, 1, 64, "falcon", tied=True),
    "falcon-40b": ModelShape(60, 8192, 32768, 128, 65024, 8, 64, "falcon", tied=True),
    "persimmon-8b": ModelShape(36, 4096, 16384, 64, 262144, 64, 64, "opt"),
    "phi-2": ModelShape(32, 2560, 10240, 32, 51200, 32, 80, "opt"),
    "mixtral-8x7b": _llama(32, 4096, 14336, 32, 8, experts=8, experts_per_token=2),
    "deepseek-moe-16b": _llama(
        *(28, 2048, 1408, 16, 16),
        vocabulary=102400,
        experts=64,
        experts_per_token=6,
        shared_experts=2,
        dense_layers=1,
        dense_ffn=10944,
    ),
    # of 2024 and 2025
    "llama3.1-8b": _llama(32, 4096, 14336, 32, 8, vocabulary=LLAMA3),
    "llama3.1-70b": _llama(80, 8192, 28672, 64, 8, vocabulary=LLAMA3),
    "llama3.1-405b": _llama(126, 16384, 53248, 128, 8, vocabulary=LLAMA3),
    "qwen2.5-7b": _llama(28, 3584, 18944, 28, 4, vocabulary=QWEN2),
    "qwen2.5-32b": _llama(64, 5120, 27648, 40, 8, vocabulary=QWEN2),
    "phi-4": _llama(40, 5120, 17920, 40, 10, vocabulary=100352),
    "mistral-small-24b": _llama(40, 5120, 32768, 32, 8, head_size=128, vocabulary=131072),
    "gemma3-27b": _llama(62, 5376, 21504, 32, 16, head_size=128, vocabulary=262208, tied=True),  # its decoder alone
    "qwen3-8b": _llama(36, 4096, 12288, 32, 8, vocabulary=QWEN3),
    "qwen3-30b-a3b": _llama(48, 2048, 768, 32, 4, head_size=128, vocabulary=QWEN3, experts=128, experts_per_token=8),
    "qwen3-235b-a22b": _llama(94, 4096, 1536, 64, 4, head_size=128, vocabulary=QWEN3, experts=128, experts_per_token=8),
    "gpt-oss-20b": _llama(
        *(24, 2880, 2880, 64, 8),
        head_size=64,
        vocabulary=GPT_OSS,
        experts=32,
        experts_per_token=4,
        own_experts=True,  # they clamp their values
    ),
    "gpt-oss-120b": _llama(
        *(36, 2880, 2880, 64, 8),
        head_size=64,
        vocabulary=GPT_OSS,
        experts=128,
        experts_per_token=4,
        own_experts=True,
    ),
    "glm-4.5-air": _llama(
        *(46, 4096, 1408, 96, 8),
        head_size=128,
        vocabulary=151552,
        experts=128,
        experts_per_token=8,
        shared_experts=1,
        dense_layers=1,
        dense_ffn=10944,
    ),
    "deepseek-v3": _llama(  # R1 and V3.1 have it, too; without the layer that predicts a second token
        *(61, 7168, 2048, 128, 128),
        vocabulary=129280,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        dense_layers=3,
        dense_ffn=18432,
        own_attention=_latent_attention(7168, 128),
    ),
    "kimi-k2": _llama(
        *(61, 7168, 2048, 64, 64),
        vocabulary=163840,
        experts=384,
        experts_per_token=8,
        shared_experts=1,
        dense_layers=1,
        dense_ffn=18432,
        own_attention=_latent_attention(7168, 64),
    ),
}
