"""How many warps the CUDA kernels get: from the shape, and for `matvec` the GPU's size."""

from toolkit.kernels.bitmap.layout import block_count
from toolkit.kernels.common.launch import LANES, WARPS, Launch

ROWS = 4  # that a warp multiplies at once, sharing what it reads of x; more would take more registers than there are
BUSY_WARPS = 12  # that keep a multiprocessor busy; twice as many have room, but a second round would be half empty
MAX_GRID_Y = 65_535


def decompress(rows: int, columns: int) -> Launch:
    """A warp for each block of each row; rows along x, where there is room for 2³¹ thread blocks.

    Raises `ValueError` beyond 268 million columns, for which there is no room along y.
    """
    blocks, warps = block_count(columns), min(WARPS, rows)
    if blocks > MAX_GRID_Y:
        raise ValueError(f"{columns} columns are more than a GPU's grid has room for")
    return Launch((-(-rows // warps), blocks), (LANES, warps, 1))


def matvec(rows: int, columns: int, multiprocessors: int) -> Launch:
    """A warp for each four rows, or several (along y) where that would leave the GPU idle.

    These, a power of two, take the rows' blocks in turn and add up their sums at the end in a fixed order, so that the
    result depends on the shape and the GPU, not on the run.
    """
    groups = -(-rows // ROWS)
    split = 1
    while 2 * split <= min(block_count(columns), WARPS) and groups * split < BUSY_WARPS * multiprocessors:
        split *= 2
    side_by_side = min(WARPS // split, groups)
    return Launch((-(-groups // side_by_side), 1), (LANES, split, side_by_side))
