"""Helpers that Numba lacks for CUDA kernels: sums over a warp, and 32-bit distances from a 64-bit address.

A thread block is (32, y, z) threads: `threadIdx.x` is the lane, each y and z a warp. In Numba's simulator
(NUMBA_ENABLE_CUDASIM=1), which has neither shuffles nor addresses, the same is done through shared memory and slices.
Import this only where CUDA kernels are used.
"""

from llvmlite import ir
from numba import cuda, float32, int32, types
from numba.cuda.core import config
from numba.extending import intrinsic

from toolkit.kernels.common.launch import LANES, WARPS

SIMULATED = bool(config.ENABLE_CUDASIM)
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # Numba warns of small grids; a small matrix is no mistake
ALL = 0xFFFFFFFF


@cuda.jit(device=True, inline="always")
def _sync():
    cuda.syncwarp()


@cuda.jit(device=True, inline="always")
def _sum_before(value):
    total = int32(value)
    distance = 1
    while distance < LANES:
        other = cuda.shfl_up_sync(ALL, total, distance)
        if cuda.threadIdx.x >= distance:
            total = int32(total + other)
        distance *= 2
    return int32(total - value)


@cuda.jit(device=True, inline="always")
def _sum_all(value):
    distance = LANES // 2
    while distance > 0:
        value += cuda.shfl_xor_sync(ALL, value, distance)
        distance //= 2
    return value


@intrinsic
def _address(typing_context, array, place):
    def generate(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(64))

    return types.uint64(array, types.uint64), generate


@intrinsic
def _item(typing_context, array, address, distance):
    def generate(context, builder, signature, arguments):
        element = context.get_value_type(array.dtype)
        nbytes = ir.Constant(ir.IntType(64), array.dtype.bitwidth // 8)
        further = builder.mul(builder.zext(arguments[2], nbytes.type), nbytes)
        place = builder.inttoptr(builder.add(arguments[1], further), element.as_pointer(1))  # 1: global memory
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return array.dtype(array, types.uint64, types.uint32), generate


@intrinsic
def _prefetch(typing_context, array, address, distance):
    def generate(context, builder, signature, arguments):
        nbytes = ir.Constant(ir.IntType(64), array.dtype.bitwidth // 8)
        place = builder.add(arguments[1], builder.mul(builder.zext(arguments[2], nbytes.type), nbytes))
        code = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(ir.InlineAsm(code, "prefetch.global.L2 [$0];", "l", side_effect=True), [place])
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint32), generate


@cuda.jit(device=True)
def _simulated_sync():
    cuda.syncthreads()


@cuda.jit(device=True)
def _simulated_sum_before(value):
    room = cuda.shared.array((WARPS, LANES), int32)
    warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
    cuda.syncthreads()
    room[warp, cuda.threadIdx.x] = value
    cuda.syncthreads()
    total = 0
    for lane in range(cuda.threadIdx.x):
        total += room[warp, lane]
    return total


@cuda.jit(device=True)
def _simulated_sum_all(value):
    room = cuda.shared.array((WARPS, LANES), float32)
    warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
    cuda.syncthreads()
    room[warp, cuda.threadIdx.x] = value
    cuda.syncthreads()
    total = float32(0)
    for lane in range(LANES):
        total += room[warp, lane]
    return total


def _simulated_address(array, place):
    return int(place)


def _simulated_item(array, address, distance):
    return array.reshape(-1)[address + int(distance)]


def _simulated_prefetch(array, address, distance):
    assert address + int(distance) < array.size, "beyond the end"


# sync(): wait for the warp's other lanes and see what they wrote (in the simulator, for the whole thread block)
sync = _simulated_sync if SIMULATED else _sync
# sum_before(value): the int32 sum over the lanes before this one
sum_before = _simulated_sum_before if SIMULATED else _sum_before
# sum_all(value): the float32 sum over all lanes, for each of them
sum_all = _simulated_sum_all if SIMULATED else _sum_all
# address(array, place): where array.flat[place] is
address = _simulated_address if SIMULATED else _address
# item(array, address, distance): the element so many further on; prefetch(...): have the L2 cache fetch it
item = _simulated_item if SIMULATED else _item
prefetch = _simulated_prefetch if SIMULATED else _prefetch
