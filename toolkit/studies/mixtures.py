"""llama.cpp's mixtures of few bits as forms of a model: the type that its tool gives each matrix.

`ggml_quantize_chunk` is what llama.cpp's tool `llama-quantize` calls for every matrix. It runs here on the decoder
linears, and the package `gguf` decodes what it gives. Weights alone are compared: the model computes as it always does.
Rows are quantised one by one, and so llama.cpp's order of the rows of query and key matrices changes nothing.

With an importance matrix, errors of columns count by the mean squares of their inputs, as its tool `llama-imatrix`
records them: of the model in 16 bits, over a calibration text, for decoder linears alone. llama.cpp has none for
embedding and head by default.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from toolkit.errors import UserError, unknown
from toolkit.interchange.gguf import LINEARS
from toolkit.measure.llama_cpp import PACKAGE, VERSION
from toolkit.measure.llama_cpp_quantiser import GgufMatrix
from toolkit.models import decoder_blocks, decoder_linears
from toolkit.models.gguf_header import LAYERS
from toolkit.models.streams import inference
from toolkit.progress import progress
from toolkit.sparsity.calibration import checked_windows
from toolkit.sparsity.grams import walk

# mixtures of types by the names of `llama-quantize`, and the type that most matrices get
MIXTURES = {
    "Q8_0": "Q8_0",
    "Q4_K_M": "Q4_K",
    "Q4_0": "Q4_0",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "Q2_K": "Q2_K",
    "IQ4_XS": "IQ4_XS",
    "IQ3_S": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "IQ2_XXS": "IQ2_XXS",
}
ONLY_WEIGHTED = ("IQ3_XXS", "IQ2_XXS")  # the tool makes these only with an importance matrix
LONG_BLOCK = 256
SHORT_BLOCK = 32
MANY_SHARING = 4  # heads of queries to one of keys and values: the latter are small, and get more bits
SHORT_BLOCKED = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0", "Q2_K": "Q4_0"}  # 256 divides no row
SHORT_BLOCKED |= dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XXS"), "IQ4_NL")
IMPORTANCE = " imatrix"  # behind the name of a mixture
Importance = Mapping[str, Float[Tensor, " columns"]]  # by the names of GGUF's tensors
LLAMA_CPP = {"package": PACKAGE, "version": VERSION}  # what decides the blocks beside the weights


def form_of(mixture: str, weighted: bool = False) -> str:
    """The name of a mixture among the forms of a model: "Q4_0, llama.cpp", or "Q4_0 imatrix, llama.cpp"."""
    return f"{mixture}{IMPORTANCE if weighted else ''}, llama.cpp"


@torch.no_grad()
def importance(model: nn.Module, windows: Int64[Tensor, "windows tokens"]) -> Importance:
    """The mean squares of every decoder linear's inputs, by the linear's name in GGUF ("blk.0.attn_q.weight").

    Raises `UserError` for a model with other linears than Llama's, and what `walk` raises.
    """
    blocks, names = decoder_blocks(model), _names(model)
    windows = checked_windows(model, windows)
    squares = {}
    with inference(model), progress("importance matrix", len(blocks), "blocks") as bar:
        for block, sums in walk(model, windows, norms_only=True):
            squares |= {names[linear]: sums[op] / windows.numel() for op, linear in decoder_linears(block).items()}
            bar.update()
    return squares


def encoders(
    model: nn.Module, mixture: str, weights: Importance | None = None
) -> Iterator[tuple[nn.Linear, Callable[[Tensor], GgufMatrix]]]:
    """Every decoder linear with its quantiser, by an importance matrix if there is one.

    Raises what `tensor_type` raises, and `UserError` for a model with other linears than Llama's.
    """
    names = _names(model)
    for kind, linear in _typed(model, mixture, weights is not None):
        yield linear, partial(GgufMatrix.encode, kind=kind, importance=weights and weights[names[linear]])


def tensor_type(
    mixture: str, tensor: str, layer: int, layers: int, columns: int, sharing: int = 1, weighted: bool = False
) -> str:
    """The type of a matrix in a mixture (`llama_tensor_get_type` in llama.cpp's `llama-quant.cpp`).

    `tensor` is its name in GGUF without its layer, such as "attn_v" or "output"; `sharing` are the heads of queries
    that share one of keys and values; `weighted`, whether there is an importance matrix. Types with blocks of 256
    cannot hold rows of another length; those get a type of more bits. Raises `UserError` for a mixture that is not
    there, one of `ONLY_WEIGHTED` that is not weighted, or if 32 does not divide the columns.
    """
    if mixture not in MIXTURES:
        raise unknown("mixture of llama.cpp", mixture, MIXTURES)
    if columns % SHORT_BLOCK:
        raise UserError(f"{tensor} has {columns} columns; llama.cpp quantises rows of a multiple of {SHORT_BLOCK} only")
    if mixture in ONLY_WEIGHTED and not weighted:
        raise UserError(f"mixture {mixture}: llama.cpp makes it only with an importance matrix")
    if tensor == "output" and columns % LONG_BLOCK:
        return "Q8_0"
    wanted = _wanted(mixture, tensor, layer, layers, sharing, weighted)
    return SHORT_BLOCKED.get(wanted, wanted) if columns % LONG_BLOCK else wanted


def _wanted(mixture: str, tensor: str, layer: int, layers: int, sharing: int, weighted: bool) -> str:
    first, many = layer < layers // 8, sharing >= MANY_SHARING
    more_bits = first or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    match mixture, tensor:
        case "Q8_0", _:
            return "Q8_0"
        case "IQ3_XXS" | "IQ2_XXS", "output":
            return "Q5_K"
        case _, "output":
            return "Q6_K"
        case "Q4_0", "ffn_down":
            return "Q4_1" if weighted and first else "Q4_0"
        case "Q4_K_M", "attn_v" | "ffn_down":
            return "Q6_K" if more_bits else "Q4_K"
        case "Q3_K_M", "attn_v":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K_M", "ffn_down":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "Q3_K_M", "attn_output":
            return "Q4_K"
        case "Q2_K", "attn_v":
            return "Q4_K" if many else "Q3_K"
        case "Q2_K", "ffn_down" | "attn_output":
            return "Q3_K"
        case "IQ4_XS", "attn_v":
            return "Q5_K" if many else "IQ4_XS"
        case "IQ4_XS", "ffn_down":
            return "Q5_K" if first and not weighted else "IQ4_XS"
        case "IQ3_S" | "IQ3_XXS", "attn_v":
            return "Q4_K" if many else mixture
        case "IQ3_XXS", "attn_q" | "attn_k":
            return "IQ2_S"
        case "IQ3_XXS", "attn_output" | "token_embd":
            return "IQ3_S"
        case "IQ2_XXS", "attn_v":
            return "Q4_K" if many else "Q2_K"
        case "IQ2_XXS", "token_embd":
            return "Q2_K"
        case "IQ2_XXS", "ffn_down":
            return "Q2_K" if first else "IQ2_XXS"
    return MIXTURES[mixture]


def type_shares(model: nn.Module, mixture: str, weighted: bool = False) -> str:
    """The types that a model's decoder weights get, with their shares: "Q4_0 75.0 %, Q3_K 25.0 %".

    Raises what `tensor_type` raises.
    """
    weights = Counter()
    for kind, linear in _typed(model, mixture, weighted):
        weights[kind] += linear.weight.numel()
    return ", ".join(f"{kind} {count / weights.total():.1%}" for kind, count in weights.most_common()).replace(
        "%", " %"
    )


def _typed(model: nn.Module, mixture: str, weighted: bool) -> list[tuple[str, nn.Linear]]:
    config, layers = model.config, len(decoder_blocks(model))
    sharing = config.num_attention_heads // config.num_key_value_heads
    typed = []
    for linear, name in _names(model).items():
        _, layer, tensor, _ = name.split(".")
        kind = tensor_type(mixture, tensor, int(layer), layers, linear.in_features, sharing, weighted)
        typed.append((kind, linear))
    return typed


def _names(model: nn.Module) -> dict[nn.Linear, str]:
    """Every decoder linear with the name of its tensor in GGUF."""
    blocks = decoder_blocks(model)
    if foreign := {op for block in blocks for op in decoder_linears(block)} - LINEARS.keys():
        kind = model.config.model_type
        raise UserError(f"a model of type {kind!r} has {min(foreign)}: expected {', '.join(LINEARS)}")
    return {
        linear: f"{LAYERS}{layer}.{LINEARS[op]}.weight"
        for layer, block in enumerate(blocks)
        for op, linear in decoder_linears(block).items()
    }
