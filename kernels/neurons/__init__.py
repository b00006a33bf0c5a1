"""The FFN of some of a layer's neurons, whose weights lie in bundles: no gather, and each weight is read once.

A bundle is one row: the neuron's gate row, if the FFN has a gate, its up row and its down column (LLM in a flash,
section 3.2). With `bits`, rows are the records of quantised neurons (`records`; `toolkit.quantization.neuron_records`
writes them). The door is `ffn`; `backend="auto"` takes the first backend that the CPU can run, on a GPU the CUDA
kernels.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from toolkit.errors import unknown
from toolkit.kernels.engine.activations import ACTIVATIONS
from toolkit.kernels.engine.backends import AVX2, CUDA, Backend, Backends
from toolkit.kernels.engine.parallel import over_rows
from toolkit.kernels.engine.tensors import CPU, expect, operands
from toolkit.kernels.neurons import cpu, cpu_records_simd, cpu_simd
from toolkit.kernels.neurons.records import SECTIONS, record_bytes
from toolkit.kernels.neurons.shared import NUMBERS, add_up

__all__ = ["ACTIVATIONS", "BACKENDS", "RECORD_BACKENDS", "add_listed", "ffn", "parts_of"]

DENSE = {torch.float32: torch.uint32, torch.float16: torch.uint16, torch.bfloat16: torch.uint16}
STORED = DENSE | {torch.uint8: torch.uint8}  # the unsigned integers that kernels take, by the type of the rows
PART_BYTES, MOST_PARTS = 128 * 1024, 16  # sums that are added up at the end: a power of two, whatever the threads
NO_BIAS, ALL = np.empty(0, np.float32), np.empty((0, 0), bool)


# LLVM writes the first with wider registers where the CPU has them
BACKENDS = Backends({"avx2": Backend(AVX2, cpu_simd.ffn), "portable": Backend(frozenset(), cpu.ffn)})
RECORD_BACKENDS = Backends(  # of quantised neurons
    {
        "avx512": Backend(frozenset({"avx512f"}), partial(cpu_records_simd.ffn, True)),
        "avx2": Backend(AVX2, partial(cpu_records_simd.ffn, False)),
        "portable": Backend(frozenset(), cpu.ffn_of_records),
    }
)


def ffn(
    bundles: Float[Tensor, "rows width"] | UInt8[Tensor, "rows stride"],
    x: Float[Tensor, "*batch hidden"],
    activation: str,
    bias: Float[Tensor, " rows"] | None = None,
    threshold: float = 0.0,
    out: Float32[Tensor, "*batch hidden"] | None = None,
    backend: str = "auto",
    bits: int | None = None,
    wanted: Bool[Tensor, "vectors rows"] | None = None,
) -> Float32[Tensor, "*batch hidden"]:
    """Σ over the rows of act(gate · x) · (up · x) · down, or of act(up · x + bias) · down, for `x` [hidden] or a batch.

    Args:
        bundles: contiguous, of fp32, fp16 or bf16; 3 · hidden wide with a gate, 2 · hidden without. Or, with `bits`,
            records of quantised neurons, with a gate.
        x: real, of any strides, taken as fp32; it may share memory with `out`.
        activation: a name in `ACTIVATIONS`.
        bias: of the up projection of each row, for bundles without a gate. The down projection's is the caller's.
        threshold: outputs of neurons that do not exceed it in magnitude count as zero, and their down columns are not
            read. At 0, neurons that a ReLU stops cost no second half.
        out: where the sums go.
        backend: a name in `BACKENDS`, with `bits` in `RECORD_BACKENDS`, or "auto".
        bits: of the codes in records, 4 or 2; None for dense bundles.
        wanted: which vector counts which row; None: each all.

    All sums are fp32. They depend on the backend and the number of rows, not on the number of threads. They depend on
    the batch only if a weight is infinite or NaN: a down column that any vector needs is added for all vectors, times
    zero where it does not count. There is no gradient. Weights are read from memory once for all vectors, while these
    fit the caches.

    Raises `UserError` for an activation or backend that is unknown, or that this CPU cannot run, for bits other than 4
    and 2 or a `hidden` that 64 does not divide, and `ValueError` for
    tensors of the wrong shape, type or device or that require a gradient, or a threshold below 0.
    """
    hidden, device = x.shape[-1], bundles.device
    gated = _check(bundles, hidden, activation, bias, threshold, bits)
    given, shifts = bundles.detach(), None if bias is None else bias.detach().to(torch.float32)
    chosen = (BACKENDS if bits is None else RECORD_BACKENDS).choose(backend, device)
    if wanted is not None:
        wanted = wanted.contiguous()
        expect("wanted", wanted, torch.bool, (x.numel() // max(1, hidden), len(bundles)), device)
    with operands(x, out, (hidden, hidden), device) as (each_x, each_out, result):
        vectors = each_x.to(torch.float32)
        if chosen == CUDA:
            from toolkit.kernels.neurons import cuda

            cuda.ffn(given, shifts, vectors, activation, threshold, bits, wanted, each_out)
        else:
            run = chosen.product(given.dtype if bits is None else bits)
            biases = NO_BIAS if shifts is None else shifts.numpy()
            counted = ALL if wanted is None else wanted.numpy()
            maths = NUMBERS[activation], int(gated), biases, vectors.numpy(), np.float32(threshold)
            _ffn(run, given, counted, maths, each_out.numpy())
    return result


def parts_of(nbytes: int) -> int:
    """In how many parts neurons of so many bytes are summed: a power of two, whatever the threads."""
    return 1 << min(MOST_PARTS, nbytes // PART_BYTES or 1).bit_length() - 1


def add_listed(
    partials: Float32[Tensor, "parts vectors hidden"],
    bundles: Float[Tensor, "rows width"],
    listed: Int64[np.ndarray, " listed"],
    starts: Int64[np.ndarray, " parts+1"],
    x: Float[Tensor, "vectors hidden"],
    activation: str,
    bias: Float[Tensor, " rows"] | None = None,
    threshold: float = 0.0,
    wanted: Bool[np.ndarray, "vectors listed"] | None = None,
    backend: str = "auto",
) -> None:
    """Add to `partials[p]` the FFN of the rows `listed[starts[p]]` to `listed[starts[p + 1] - 1]`, on a CPU.

    It is `ffn` of these rows alone. Rows are added in the order of the list, so that several calls, each with some of a
    part's neurons, give the same bits as one call, wherever the rows lie. Beside each other four rows are read, for
    which it does not matter where they lie.

    Args:
        partials: sums to add to, contiguous.
        bundles: dense rows, as for `ffn`.
        listed: numbers of rows.
        starts: where in the list each part begins, rising, and its end.
        wanted: which vector counts which listed row; None: each all.

    `x`, `activation`, `bias`, `threshold` and `backend` are those of `ffn`. Raises what `ffn` raises, and `ValueError`
    for rows that are not there, `starts` that do not rise from 0 to the end of the list, or another number of parts.
    """
    gated = _check(bundles, x.shape[-1], activation, bias, threshold, None)
    expect("partials", partials, torch.float32, (len(starts) - 1, *x.shape), CPU)
    if len(listed) and not 0 <= listed.min() <= listed.max() < len(bundles):
        raise ValueError(f"rows {listed.min()} to {listed.max()} are listed; expected 0 to {len(bundles) - 1}")
    if starts[0] != 0 or starts[-1] != len(listed) or (np.diff(starts) < 0).any():
        raise ValueError(f"parts start at {starts}; expected numbers that rise from 0 to {len(listed)}")
    if wanted is not None and wanted.shape != (len(x), len(listed)):
        raise ValueError(f"wanted is {list(wanted.shape)}; expected {[len(x), len(listed)]}")
    run = BACKENDS.choose(backend, bundles.device).product(bundles.dtype)
    with operands(x, partials[0], (x.shape[1], x.shape[1]), CPU) as (vectors, _, _):
        biases = NO_BIAS if bias is None else bias.to(torch.float32).numpy()
        counted = ALL if wanted is None else np.ascontiguousarray(wanted)
        maths = NUMBERS[activation], int(gated), biases, vectors.to(torch.float32).numpy(), np.float32(threshold)
        _over_parts(run, bundles, listed, starts, counted, *maths, partials.numpy())


def _ffn(run: Callable, bundles: Tensor, wanted: np.ndarray, maths: tuple, sums: np.ndarray) -> None:
    """The FFN of all rows."""
    rows, parts = len(bundles), parts_of(bundles.nbytes)
    sums.fill(0)
    partials = sums[None] if parts == 1 else np.zeros((parts, *sums.shape), np.float32)
    starts = np.arange(parts + 1) * rows // parts
    _over_parts(run, bundles, np.arange(rows), starts, wanted, *maths, partials)
    if parts > 1:
        add_up(partials, sums)


def _over_parts(run: Callable, bundles: Tensor, listed: np.ndarray, starts: np.ndarray, *arguments) -> None:
    """Share the parts out among threads."""
    nbytes = len(listed) * bundles.shape[1] * bundles.itemsize
    rows = bundles.detach().view(STORED[bundles.dtype]).numpy()
    over_rows(run, len(starts) - 1, nbytes, rows, np.ascontiguousarray(listed), starts, *arguments)


def _check(
    bundles: Tensor, hidden: int, activation: str, bias: Tensor | None, threshold: float, bits: int | None
) -> bool:
    """Whether there is a gate. Raises what `ffn` raises."""
    parts = bundles.shape[1] // hidden if hidden else 2
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if bits is not None:
        parts, width, dtype = SECTIONS, record_bytes(hidden, bits), torch.uint8
        if bias is not None:
            raise ValueError("records of quantised neurons have a gate, and no bias")
    elif bundles.dtype not in DENSE or parts not in (2, 3) or (bias is not None and parts == 3):
        raise ValueError(
            f"bundles are {bundles.dtype} {list(bundles.shape)}; expected fp32, fp16 or bf16, [rows, {3 * hidden}] "
            f"with a gate or, with or without a bias, [rows, {2 * hidden}] for x of {hidden}"
        )
    else:
        width, dtype = parts * hidden, bundles.dtype
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; expected 0 or more")
    rows, device = bundles.shape[0], bundles.device
    expect("bundles", bundles, dtype, (rows, width), device)
    if bias is not None:
        expect("bias", bias, bias.dtype, (rows,), device)
    return parts == 3
