"""Sparsity-driven offloading of large language models: models, formats, kernels and their measurements."""

import os

# torch's threads wait for each other by spinning, which takes most of the speed away beside another busy process. So
# they sleep, unless the variable is set already. torch reads it once, when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
