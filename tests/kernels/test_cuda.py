"""The checks of all CUDA kernels: in Numba's simulator, and on a GPU if there is one.

A process of their own runs them all: the simulator is chosen as Numba is imported, and takes seconds to start.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.kernels.families import needs_numba_cuda

AT_LEAST = {  # checks
    "cuda_bitmap.py": 9,
    "cuda_spqr.py": 11,
    "test_neurons.py": 18,
    "test_products.py": 44,
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_numba_cuda
@pytest.mark.parametrize(
    "simulated", [pytest.param(True, id="simulator"), pytest.param(False, marks=needs_gpu, id="gpu")]
)
def test_every_check_passes(simulated):
    files = [Path(__file__).with_name(name) for name in AT_LEAST]
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", *map(str, files)]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": str(int(simulated))}
    done = subprocess.run(command, env=environment, cwd=files[0].parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    passed = Counter(re.findall(r"(\w+\.py)::.+ PASSED", done.stdout))
    assert passed.keys() == AT_LEAST.keys()
    assert all(passed[name] >= count for name, count in AT_LEAST.items()), passed
