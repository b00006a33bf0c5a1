"""Compiles kernels, keeps them, chooses among them and runs them on threads.

Numba compiles each kernel. Three things around it are ours, each for a reason:

- `parallel`: kernels run on torch's own team of threads, and many can run by one call.
- `compiled`: Numba's cache (`cache=True`) sees changes of one source file only, does not find closures over compiled
  functions again, and mixes up entries that two processes write at once. Here a file's name is a digest of everything
  that the machine code depends on, including the contents of every kernel's file.
- `backends`, `tuning`: which implementation this machine can run, and which way is fastest, measured once and kept.

The other modules are device code that the families share: SIMD, elements, dense rows, products, GPU helpers.

`parallel` and `compiled` use parts of Numba that are not its public interface, so `pyproject.toml` sets an upper bound
on its version. Before raising it, run `tests/kernels`.
"""
