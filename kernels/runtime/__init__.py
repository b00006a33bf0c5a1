"""Compiles kernels, keeps them, chooses among them and runs them on threads.

Numba compiles each kernel. Four things around it are ours, each for a reason:

- `region`, `threads`: torch and the kernels take turns, so they share one team of OpenMP threads. Numba's own
  threading layer would be a second team that fights for the cores, and it aborts when two Python threads enter it at
  once. Threads take the next part of the rows when they are done with one: a slow core does not hold up the others.
- `program`: a call of a compiled function from Python looks up the types of its arguments and unpacks the arrays,
  which costs more than a small product. A program does this once, and then runs many kernels by one call.
- `compiled`, `source_files`: Numba's cache files (`cache=True`) see changes of one source file only, do not find
  closures over compiled functions again, and mix up entries that two processes write at once. Here a file's name is a
  digest of all that the machine code depends on, the contents of every kernel's file among them.
- `tuning`, `backends`: which implementation this machine should use, measured once and kept.

`region`, `program` and `compiled` use parts of Numba that are not its public interface, so `pyproject.toml` sets an
upper bound on its version. Before raising it, run `tests/kernels`.
"""
