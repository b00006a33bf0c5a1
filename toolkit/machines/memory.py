"""Bandwidth of a memory, of the copies between two, and the rate of a processor, on the CPU or a CUDA device.

torch does the work on both, so the same code measures both. Every function returns one value a repetition. The first
one includes start-up, so callers keep it apart.
"""

import time
from collections.abc import Callable

ELEMENT_BYTES = 4  # fp32
TARGET_S = 0.05  # a matrix product that is long enough for the clock
SIDES = (256, 512, 1024, 2048, 4096, 8192)  # of the matrices tried


def read_gb_s(size_bytes: int, repetitions: int, device: str = "cpu") -> list[float]:
    """Read bandwidth in GB/s: the sum over a buffer of `size_bytes`, which must be far larger than the caches."""
    buffer = _buffer(size_bytes, device)
    return [size_bytes / time_s / 1e9 for time_s in _times(buffer.sum, repetitions, device)]


def transfer_gb_s(size_bytes: int, repetitions: int, source: str, target: str) -> list[float]:
    """Copy bandwidth in GB/s, bytes copied a second; DRAM is pinned if the other memory is a CUDA device's."""
    pinned = source != target
    begin, end = _buffer(size_bytes, source, pinned), _buffer(size_bytes, target, pinned)
    clocked = target if source == "cpu" else source
    copy = lambda: end.copy_(begin, non_blocking=True)  # noqa: E731 (the clock waits)
    return [size_bytes / time_s / 1e9 for time_s in _times(copy, repetitions, clocked)]


def gemm_tflop_s(dtype: str, repetitions: int, device: str = "cpu") -> list[float]:
    """Rate in TFLOP/s of square matrix products (2 n³ operations); dtype "fp32", "fp16" or "bf16".

    n doubles from 256 to 8192, until one product takes 50 ms; the last is measured.
    """
    import torch

    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for side in SIDES:
        left, right = (torch.full((side, side), 0.5, dtype=kind, device=device) for _ in range(2))
        product = torch.empty_like(left)
        multiply = lambda: torch.matmul(left, right, out=product)  # noqa: B023, E731 (called in this round)
        if _times(multiply, 2, device)[-1] >= TARGET_S:
            break
    return [2 * side**3 / time_s / 1e12 for time_s in _times(multiply, repetitions, device)]


def _buffer(size_bytes: int, device: str, pinned: bool = False):
    """A buffer of ones. Every page is written, so none is the system's shared page of zeros."""
    import torch

    return torch.ones(size_bytes // ELEMENT_BYTES, device=device, pin_memory=pinned and device == "cpu")


def _times(work: Callable[[], object], repetitions: int, device: str) -> list[float]:
    times = []
    for _ in range(repetitions):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
