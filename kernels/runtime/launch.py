"""How a CUDA kernel is launched; needs no CUDA."""

from dataclasses import dataclass

LANES = 32  # threads of a warp
WARPS = 4  # of a thread block, at most: small blocks use more of a multiprocessor's registers


@dataclass(frozen=True)
class Launch:
    """Thread blocks along x and y, and threads of one: the lanes of a warp along x, warps along y and z."""

    grid: tuple[int, int]
    threads: tuple[int, int, int]
