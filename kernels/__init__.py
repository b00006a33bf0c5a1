"""Numba kernels, one folder a family: `__init__` is the door, `cpu` and `cuda` the implementations."""
