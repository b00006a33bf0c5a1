"""Numba kernels, one folder or file a family.

In a folder: `__init__` is the door with contracts and dispatch, `layout` the packed form, `shared` scalar maths, `cpu`
the kernels for any CPU, `cpu_simd` those with SIMD, `cuda` those for GPUs. `engine` holds what families share.
"""

from toolkit.errors import UserError

try:
    import numba  # noqa: F401
except ValueError as error:
    raise UserError(f"Numba refuses a setting in the environment ({error}): unset NUMBA_NUM_THREADS") from error

from toolkit.kernels.engine import compiled  # noqa: F401 - the first of all: it notes how the files are now
