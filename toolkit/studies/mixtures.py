"""llama.cpp's mixtures of few bits as forms of a model: the type that its tool gives each matrix.

`ggml_quantize_chunk` is what llama.cpp's tool `llama-quantize` calls for every matrix. It runs here on the decoder
linears, without an importance matrix, and the package `gguf` decodes what it gives. Weights alone are compared:
the model computes as it always does. Rows are quantised one by one, and so llama.cpp's order of the rows of query and
key matrices changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.interchange.gguf import LINEARS
from toolkit.measure.llama_cpp import PACKAGE, VERSION
from toolkit.measure.llama_cpp_quantiser import GgufMatrix
from toolkit.models import decoder_blocks, decoder_linears

# mixtures of types by the names of `llama-quantize`, and the type that most matrices get
MIXTURES = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "Q4_0": "Q4_0", "Q3_K_M": "Q3_K", "Q3_K_S": "Q3_K", "Q2_K": "Q2_K"}
LONG_BLOCK = 256
SHORT_BLOCK = 32
MANY_SHARING = 4  # heads of queries to one of keys and values: the latter are small, and get more bits
SHORT_BLOCKED = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0", "Q2_K": "Q4_0"}  # 256 divides no row
LLAMA_CPP = {"package": PACKAGE, "version": VERSION}  # what decides the blocks beside the weights


def form_of(mixture: str) -> str:
    """The name of a mixture among the forms of a model: "Q4_0, llama.cpp"."""
    return f"{mixture}, llama.cpp"


def encoders(model: nn.Module, mixture: str) -> Iterator[tuple[nn.Linear, Callable[[Tensor], GgufMatrix]]]:
    """Every decoder linear with its quantiser.

    Raises what `tensor_type` raises, and `UserError` for a model with other linears than Llama's.
    """
    return ((linear, partial(GgufMatrix.encode, kind=kind)) for kind, linear in _typed(model, mixture))


def tensor_type(mixture: str, tensor: str, layer: int, layers: int, columns: int, sharing: int = 1) -> str:
    """The type of a matrix in a mixture (`llama_tensor_get_type` in llama.cpp's `llama-quant.cpp`).

    `tensor` is its name in GGUF without its layer, such as "attn_v" or "output"; `sharing` are the heads of queries
    that share one of keys and values. Types with blocks of 256 cannot hold rows of another length; those get a type of
    more bits. Raises `UserError` for a mixture that is not there, or if 32 does not divide the columns.
    """
    if mixture not in MIXTURES:
        raise unknown("mixture of llama.cpp", mixture, MIXTURES)
    if columns % SHORT_BLOCK:
        raise UserError(f"{tensor} has {columns} columns; llama.cpp quantises rows of a multiple of {SHORT_BLOCK} only")
    wanted = _wanted(mixture, tensor, layer, layers, sharing)
    return SHORT_BLOCKED.get(wanted, wanted) if columns % LONG_BLOCK else wanted


def _wanted(mixture: str, tensor: str, layer: int, layers: int, sharing: int) -> str:
    more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    match mixture, tensor:
        case "Q8_0", _:
            return "Q8_0"
        case _, "output":
            return "Q6_K"
        case "Q4_K_M", "attn_v" | "ffn_down":
            return "Q6_K" if more_bits else "Q4_K"
        case "Q3_K_M", "attn_v":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K_M", "ffn_down":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "Q3_K_M", "attn_output":
            return "Q4_K"
        case "Q2_K", "attn_v":
            return "Q4_K" if sharing >= MANY_SHARING else "Q3_K"
        case "Q2_K", "ffn_down" | "attn_output":
            return "Q3_K"
    return MIXTURES[mixture]


def type_shares(model: nn.Module, mixture: str) -> str:
    """The types that a model's decoder weights get, with their shares: "Q4_0 75.0 %, Q3_K 25.0 %".

    Raises what `tensor_type` raises.
    """
    weights = Counter()
    for kind, linear in _typed(model, mixture):
        weights[kind] += linear.weight.numel()
    return ", ".join(f"{kind} {count / weights.total():.1%}" for kind, count in weights.most_common()).replace(
        "%", " %"
    )


def _typed(model: nn.Module, mixture: str) -> list[tuple[str, nn.Linear]]:
    config, blocks = model.config, decoder_blocks(model)
    if foreign := {op for block in blocks for op in decoder_linears(block)} - LINEARS.keys():
        raise UserError(f"a model of type {config.model_type!r} has {min(foreign)}: expected {', '.join(LINEARS)}")
    sharing = config.num_attention_heads // config.num_key_value_heads
    return [
        (tensor_type(mixture, LINEARS[op], layer, len(blocks), linear.in_features, sharing), linear)
        for layer, block in enumerate(blocks)
        for op, linear in decoder_linears(block).items()
    ]
