"""Operations and bytes of each step of decoding one token, and the rate that a memory's bandwidth allows them.

    operations = decode_operations(hidden=4096, ffn=11008, heads=32, context=2048)
    roofline(operations, {"A6000": profile("spqr-a6000").device})

The counts are those of Yuan et al. (2024), "LLM Inference Unveiled", as in SpQR's table 1.1. A multiply-add is two
operations. What an operation reads and writes goes through memory once; nothing stays on the chip in between.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from toolkit.errors import UserError
from toolkit.machines.machine import Memory

SOFTMAX_OPS = 5  # a score: maximum, subtraction, exponential, sum, division
NORM_OPS = 7  # a value: RMS norm with its square, sum, scaling and weight, as counted by Yuan et al.


@dataclass(frozen=True)
class Operation:
    """One step of one decoder layer: `ops` operations on `moved_bytes` bytes read or written."""

    name: str
    ops: int
    moved_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.ops / self.moved_bytes


def linear(name: str, inputs: int, outputs: int, weight_bits: float = 16, value_bytes: int = 2) -> Operation:
    """A mat-vec with a weight of `outputs` × `inputs`: every weight is read once, for one multiply-add."""
    weight_bytes = inputs * outputs * weight_bits / 8
    return Operation(name, 2 * inputs * outputs, weight_bytes + value_bytes * (inputs + outputs))


def attention(hidden: int, heads: int, context: int, value_bytes: int = 2) -> list[Operation]:
    """Scores, softmax and the sum of values over a cache of `context` tokens, every head with its own keys and values.

    `qk` reads the query and the cached keys and writes heads × context scores; `sv` is its mirror image.
    """
    scores, cached = heads * context, hidden * context
    product_bytes = value_bytes * (cached + hidden + scores)
    return [
        Operation("qk", 2 * cached, product_bytes),
        Operation("softmax", SOFTMAX_OPS * scores, 2 * value_bytes * scores),
        Operation("sv", 2 * cached, product_bytes),
    ]


def decode_operations(
    hidden: int, ffn: int, heads: int, context: int, weight_bits: float = 16, value_bytes: int = 2
) -> list[Operation]:
    """Every operation of one decoder layer with a gated FFN (Llama) for one token, in SpQR's table 1.1's order.

    Args:
        hidden: width of the residual stream.
        ffn: width of the gated FFN.
        heads: attention heads, each with its own keys and values.
        context: tokens in the cache, this one included.
        weight_bits: bits a weight takes in memory; activations take `value_bytes` bytes a value.
        value_bytes: bytes of an activation, score or cached value.

    `norm` and `add` count the vector read and the vector written. The other operand of an addition is still in
    registers, as in the table. Raises `UserError` for a size below one.
    """
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "context": context}
    sizes |= {"weight_bits": weight_bits, "value_bytes": value_bytes}
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size}: expected 1 or more")
    shapes = dict.fromkeys("qkvo", (hidden, hidden))
    shapes |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
    vector_bytes = 2 * value_bytes * hidden
    return [
        *(linear(name, *shape, weight_bits, value_bytes) for name, shape in shapes.items()),
        *attention(hidden, heads, context, value_bytes),
        Operation("norm", NORM_OPS * hidden, vector_bytes),
        Operation("add", hidden, vector_bytes),
    ]


def roofline(operations: Iterable[Operation], memories: Mapping[str, Memory]) -> pd.DataFrame:
    """The most that each memory allows each operation: the smaller of its processor's peak and intensity × bandwidth.

    The peak is that of fp16, or of fp32 where there is none: a CPU widens 16-bit weights as it loads them.
    Columns: machine, operation, ops, moved_bytes, intensity (ops/byte), dtype, attainable_ops_s, limit (memory,
    compute), seconds, evidence (modelled). Raises `UserError` for a memory without either peak.
    """
    return pd.DataFrame(
        _row(operation, machine, memory) for operation in operations for machine, memory in memories.items()
    )


def _row(operation: Operation, machine: str, memory: Memory) -> dict[str, object]:
    dtype = "fp16" if "fp16" in memory.tflop_s else "fp32"
    attainable_tflop_s = memory.attainable_tflop_s(operation.intensity, dtype)
    return {
        "machine": machine,
        "operation": operation.name,
        "ops": operation.ops,
        "moved_bytes": operation.moved_bytes,
        "intensity": operation.intensity,
        "dtype": dtype,
        "attainable_ops_s": attainable_tflop_s * 1e12,
        "limit": "memory" if attainable_tflop_s < memory.tflop_s[dtype] else "compute",
        "seconds": operation.ops / (attainable_tflop_s * 1e12),
        "evidence": "modelled",
    }
