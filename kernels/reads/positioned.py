"""Many positioned reads in one call that holds no lock of the interpreter."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from toolkit.kernels.runtime.compiled import compiled

pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uint64, types.int64))


@intrinsic
def take_next(typing_context, address):
    """Add one to the 64-bit integer at an address, atomically, and return its old value."""

    def build(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(address), build


@compiled
def read(descriptor, offsets, sizes, places, target, taken):
    """Take ranges that nobody has taken and read them; the number of one that failed or fell short, else of ranges."""
    start = target.ctypes.data
    index = take_next(taken.ctypes.data)
    while index < len(offsets):
        if pread(descriptor, start + places[index], sizes[index], offsets[index]) != sizes[index]:
            return index
        index = take_next(taken.ctypes.data)
    return len(offsets)
