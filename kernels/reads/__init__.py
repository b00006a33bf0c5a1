"""System calls that read many ranges of a file in one compiled call. `toolkit.storage` checks ranges and errors.

They are kernels, since what Numba compiled is kept for the sources of this folder only (`toolkit.kernels.runtime`).
"""
