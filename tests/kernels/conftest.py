"""In Numba's simulator, threads of a block take turns instead of being polled."""

import os

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":  # set before Numba is imported, as `test_cuda.py` does
    from numba.cuda.simulator import kernel

    from tests.kernels.simulator import Block

    kernel.BlockManager = Block
