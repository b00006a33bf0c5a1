"""Helpers of the CUDA kernels: exchanges within a warp, conversions, pairs of fp16 numbers, addresses, launches.

A thread block is (32, y, z) threads: `threadIdx.x` is the lane, each y and z a warp. In Numba's simulator
(NUMBA_ENABLE_CUDASIM=1), which has neither shuffles nor addresses, the same is done through shared memory and slices.
Import this only where CUDA kernels are used.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import cuda, float64, int32, types
from numba.cuda.core import config
from numba.extending import intrinsic
from torch import Tensor

from toolkit.kernels.engine import elements
from toolkit.timeline import compiled_since

LANES = 32  # threads of a warp
WARPS = 4  # of a thread block, at most: small blocks use more of a multiprocessor's registers
SIMULATED = bool(config.ENABLE_CUDASIM)
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # Numba warns of small grids; a small matrix is no mistake
ALL = 0xFFFFFFFF
MAX_WARPS = 32  # of any thread block
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # by width in bytes


def complete_numpy() -> None:
    """Give NumPy the alias that it lost in 2.5: numba-cuda 0.30 names it, and compiles nothing without."""
    vars(np).setdefault("row_stack", np.vstack)


complete_numpy()


@dataclass(frozen=True)
class Launch:
    """Thread blocks along x and y, and threads of one: the lanes of a warp along x, warps along y and z."""

    grid: tuple[int, int]
    threads: tuple[int, int, int]


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


@cuda.jit(device=True, inline="always")
def _exchange(value, distance):
    return cuda.shfl_xor_sync(ALL, value, distance)


def _pair_instruction(name):
    """An instruction for two fp16 numbers in 32 bits. NVVM itself would take two, one a number."""

    @intrinsic
    def instruction(typing_context, first, second):
        def generate(context, builder, signature, arguments):
            code = ir.FunctionType(ir.IntType(32), [ir.IntType(32)] * 2)
            return builder.call(ir.InlineAsm(code, f"{name}.rn.f16x2 $0, $1, $2;", "=r,r,r"), arguments)

        return types.uint32(types.uint32, types.uint32), generate

    return instruction


@intrinsic
def _float32_from_float16(typing_context, bits):
    """fp16 bits to fp32, which GPUs do in one instruction."""
    return types.float32(types.uint16), lambda context, builder, signature, values: builder.fpext(
        builder.bitcast(values[0], ir.HalfType()), ir.FloatType()
    )


@intrinsic
def _float16_from_float32(typing_context, value):
    """The bits of the nearest fp16 number."""
    return types.uint16(types.float32), lambda context, builder, signature, values: builder.bitcast(
        builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16)
    )


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
def _values_of_warp(value):
    """The numbers of all lanes of the warp."""
    room = cuda.shared.array((MAX_WARPS, LANES), float64)  # holds 32-bit integers and fp32 alike
    warp = cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y
    cuda.syncthreads()
    room[warp, cuda.threadIdx.x] = value
    cuda.syncthreads()
    return room[warp]


@cuda.jit(device=True)
def _simulated_sum_before(value):
    return int(_values_of_warp(value)[: cuda.threadIdx.x].sum())


@cuda.jit(device=True)
def _simulated_sum_all(value):
    return _values_of_warp(value).astype(np.float32).sum()


@cuda.jit(device=True)
def _simulated_exchange(value, distance):
    return type(value)(_values_of_warp(value)[cuda.threadIdx.x ^ distance])


def _simulated_pair(operation):
    def on_pairs(first, second):
        with np.errstate(all="ignore"):
            found = operation(*(np.array([bits], np.uint32).view(np.float16) for bits in (first, second)))
        return found.view(np.uint32)[0]

    return on_pairs


def _simulated_float16_from_float32(value):
    with np.errstate(all="ignore"):
        return np.float32(value).astype(np.float16).view(np.uint16)


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
# exchange(value, distance): the int32 or float32 of lane `lane ^ distance`
exchange = _simulated_exchange if SIMULATED else _exchange
# subtract_pairs(a, b), multiply_pairs(a, b): of two fp16 numbers in 32 bits each, every result rounded to fp16
subtract_pairs = _simulated_pair(np.subtract) if SIMULATED else _pair_instruction("sub")
multiply_pairs = _simulated_pair(np.multiply) if SIMULATED else _pair_instruction("mul")
# address(array, place): where array.flat[place] is
address = _simulated_address if SIMULATED else _address
# item(array, address, distance): the element so many further on; prefetch(...): have the L2 cache fetch it
item = _simulated_item if SIMULATED else _item
prefetch = _simulated_prefetch if SIMULATED else _prefetch


TO_FLOAT32 = {
    torch.float32: elements.float32_from_float32,
    torch.float16: elements.float32_from_float16 if SIMULATED else _float32_from_float16,
    torch.bfloat16: elements.float32_from_bfloat16,
    torch.int8: elements.float32_from_int8,
}
FROM_FLOAT32 = {
    torch.float32: elements.float32_bits,
    torch.float16: _simulated_float16_from_float32 if SIMULATED else _float16_from_float32,
    torch.bfloat16: elements.bfloat16_bits,
}


def run(kernel, launch: Launch, device: torch.device, *arguments) -> None:
    """Launch a kernel on torch's current stream of the GPU. Arguments are numbers, tensors or arrays of `as_array`."""
    arguments = [as_array(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
    if SIMULATED:
        kernel[launch.grid, launch.threads](*arguments)
        return
    with cuda.gpus[device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        begun, known = time.perf_counter(), len(kernel.overloads)
        kernel[launch.grid, launch.threads, stream](*arguments)
        if len(kernel.overloads) > known:
            compiled_since(begun)


def as_array(tensor: Tensor):
    """The tensor's memory as kernels take it. In the simulator tensors are on the CPU."""
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor)


def as_unsigned(tensor: Tensor) -> Tensor:
    """The elements' bits as unsigned integers of their width."""
    return tensor.view(UNSIGNED[tensor.itemsize])


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU has."""
    return 1 if SIMULATED else torch.cuda.get_device_properties(device).multi_processor_count
