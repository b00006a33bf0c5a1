"""In Numba's simulator, threads of a block take turns instead of being polled."""

import os

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":  # set before Numba is imported, as `test_cuda.py` does
    from tests.kernels import simulator

    simulator.install()
