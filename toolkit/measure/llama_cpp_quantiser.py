"""How good a Llama model is in llama.cpp's own types of few bits, measured as that of any other form.

`ggml_quantize_chunk` is what llama.cpp's tool `llama-quantize` calls for every matrix. It runs here on the decoder
linears, without an importance matrix, and the package `gguf` decodes what it gives. Weights alone are compared:
the model computes as it always does. Rows are quantised one by one, and so llama.cpp's order of the rows of query and
key matrices changes nothing.
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from toolkit import sources
from toolkit.cache import cached_table
from toolkit.errors import UserError, unknown
from toolkit.formats.quality import Settings, Variant, measured, size_of, tables
from toolkit.interchange.gguf import LINEARS
from toolkit.measure import llama_cpp
from toolkit.models import decoder_blocks, decoder_linears, fast_dtype, load_model
from toolkit.progress import progress
from toolkit.pruning.pruned import weights_sha256
from toolkit.text import load_tokens

# mixtures of types by the names of `llama-quantize`, and the type that most matrices get
MIXTURES = {"Q8_0": "Q8_0", "Q4_K_M": "Q4_K", "Q4_0": "Q4_0", "Q3_K_M": "Q3_K", "Q3_K_S": "Q3_K"}
LONG_BLOCK = 256
REPEATED_ROWS = 64
SHORT_BLOCK = 32
SHORT_BLOCKED = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0"}  # taken where 256 divides no row


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix in a type of GGUF, as the file would hold it."""

    kind: str
    data: UInt8[np.ndarray, "rows bytes"]

    @classmethod
    def encode(cls, weight: Float[Tensor, "rows columns"], kind: str) -> "Blocks":
        """Quantise a matrix by llama.cpp. Raises `UserError` if llama.cpp cannot be installed."""
        import gguf

        number, (rows, columns) = gguf.GGMLQuantizationType[kind], weight.shape
        block, nbytes = gguf.GGML_QUANT_SIZES[number]
        values = np.ascontiguousarray(weight.float().numpy())
        data = np.zeros((rows, columns // block * nbytes), np.uint8)
        written = _quantize_chunk()(number, values.ctypes.data, data.ctypes.data, 0, rows, columns, None)
        assert written == data.nbytes, f"llama.cpp wrote {written} bytes of {kind}, and {data.nbytes} were expected"
        return cls(kind, data)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def decode(self) -> Float[Tensor, "rows columns"]:
        """The dense weight, float32."""
        import gguf

        return torch.from_numpy(gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType[self.kind]))


def repeated(values: Float[np.ndarray, "rows columns"], kind: str) -> UInt8[np.ndarray, "rows bytes"]:
    """Blocks for a matrix of which only time is measured: its first rows, quantised, again and again.

    Quantising all of a large model takes minutes, and no product takes longer or shorter for other values.
    """
    some = Blocks.encode(torch.from_numpy(values[:REPEATED_ROWS]), kind).data
    return np.tile(some, (-(-len(values) // len(some)), 1))[: len(values)]


def tensor_type(mixture: str, op: str, layer: int, layers: int, columns: int) -> str:
    """The type of a matrix of a Llama decoder in a mixture (`llama_tensor_get_type` in llama.cpp's `llama-quant.cpp`).

    `op` is the linear's dotted name in its block. Types with blocks of 256 cannot hold rows of another length; those
    get a type of more bits. Raises `UserError` for a mixture or linear that is not there, or if 32 divides no row.
    """
    if mixture not in MIXTURES:
        raise unknown("mixture of llama.cpp", mixture, MIXTURES)
    if op not in LINEARS:
        raise unknown("linear of a Llama decoder", op, LINEARS)
    if columns % SHORT_BLOCK:
        raise UserError(f"{op} has {columns} columns; llama.cpp quantises rows of a multiple of {SHORT_BLOCK} only")
    wanted = _wanted(mixture, LINEARS[op], layer, layers)
    return SHORT_BLOCKED.get(wanted, wanted) if columns % LONG_BLOCK else wanted


def _wanted(mixture: str, op: str, layer: int, layers: int) -> str:
    more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    match mixture, op:
        case "Q4_K_M", "attn_v" | "ffn_down":
            return "Q6_K" if more_bits else "Q4_K"
        case "Q3_K_M", "attn_v":
            return "Q5_K" if layer < 2 else "Q4_K"
        case "Q3_K_M", "ffn_down":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "Q3_K_M", "attn_output":
            return "Q4_K"
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


@torch.no_grad()
def store(model: nn.Module, mixture: str) -> dict[str, float]:
    """Give every decoder linear what its type decodes to, in place; return what `toolkit.formats.quality.store` does.

    Raises what `tensor_type` and `Blocks.encode` raise, before a weight changes.
    """
    typed, nbytes = _typed(model, mixture), 0
    _quantize_chunk()
    with progress(f"storing as {mixture}", len(typed), "matrices") as bar:
        for kind, linear in typed:
            blocks = Blocks.encode(linear.weight, kind)
            linear.weight.copy_(blocks.decode())
            nbytes += blocks.nbytes
            bar.update()
    return size_of(model, nbytes)


def compare_mixtures(mixtures: Sequence[str], settings: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables of `toolkit.formats.quality.compare_variants`, with mixtures of llama.cpp for forms.

    The model is dense. Kept, as those are. The first table has a column more: `types`, as `type_shares` gives them.
    Raises what `store`, `load_model` and `evaluate` raise.
    """
    model, tokenizer = load_model(settings.model, fast_dtype())
    tokens = load_tokens(settings.corpus, tokenizer, "evaluation")
    key = {"settings": asdict(settings), "weights_sha256": weights_sha256(model), "dtype": str(fast_dtype())}
    key |= {"package": llama_cpp.PACKAGE, "version": llama_cpp.VERSION}
    code = sources.dependencies(__name__, without=("toolkit.models.loading", "toolkit.pruning.methods"))
    found = []
    for mixture in mixtures:
        measure = partial(_measure, mixture, settings, tokenizer, tokens)
        rows = cached_table("quality", key | {"mixture": mixture}, code, measure)
        labels = asdict(Variant()) | {"form": f"{mixture}, llama.cpp", "pattern": "none"}
        found.append(rows.assign(**labels, types=type_shares(model, mixture)))
    return tables(found, settings)


def _measure(mixture: str, settings: Settings, tokenizer, tokens: Tensor) -> pd.DataFrame:
    model, _ = load_model(settings.model, fast_dtype())
    return measured(model, store(model, mixture), settings, tokenizer, tokens)


def _typed(model: nn.Module, mixture: str) -> list[tuple[str, nn.Linear]]:
    if model.config.model_type != "llama":
        raise UserError(f"a model of type {model.config.model_type!r}: expected 'llama'")
    blocks = decoder_blocks(model)
    return [
        (tensor_type(mixture, op, layer, len(blocks), linear.in_features), linear)
        for layer, block in enumerate(blocks)
        for op, linear in decoder_linears(block).items()
    ]


@functools.cache
def _quantize_chunk():
    """ggml's function: type, values, result, first value, rows, columns, importance of columns -> bytes written."""
    function = ctypes.CDLL(str(llama_cpp.library())).ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    return function
