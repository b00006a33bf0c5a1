"""The bitmap kernels on CUDA GPUs: which kernel, which launch, on torch's current stream.

In Numba's simulator (NUMBA_ENABLE_CUDASIM=1), tensors are on the CPU.
"""

from weakref import WeakKeyDictionary

import torch
from numba import cuda
from torch import Tensor

from toolkit.kernels.bitmap import launches
from toolkit.kernels.bitmap.device import LANE_BYTES, decompress_kernel, matvec_kernel
from toolkit.kernels.bitmap.layout import BITS, Bitmap
from toolkit.kernels.common.gpu import SIMULATED
from toolkit.kernels.common.launch import Launch

VECTORS = 16  # that one pass over the matrix multiplies, at most
SIMULATED_MULTIPROCESSORS = 1

_STORED = WeakKeyDictionary()


def decompress(encoded: Bitmap, out: Tensor) -> None:
    """Fill `out` [rows, columns]; the door has checked the arguments."""
    rows, columns = encoded.shape
    if out.numel() == 0:
        return
    per_lane = LANE_BYTES // out.itemsize
    aligned = columns % per_lane == 0 and out.data_ptr() % LANE_BYTES == 0
    launch = launches.decompress(rows, columns)
    _run(decompress_kernel(encoded.dtype, aligned), launch, encoded, _by_eight(out) if aligned else _bits(out), columns)


def matvec(encoded: Bitmap, x: Tensor, out: Tensor) -> None:
    """Fill `out` [batch, rows] with the products with `x` [batch, columns]; the door has checked the arguments."""
    rows, columns = encoded.shape
    if encoded.values.numel() == 0:
        out.zero_()
        return
    x = _padded(x, encoded.dtype)
    launch = launches.matvec(rows, columns, _multiprocessors(encoded.device))
    for first in range(0, len(x), VECTORS):
        some, result = x[first : first + VECTORS], out[first : first + VECTORS]
        _run(matvec_kernel(encoded.dtype, x.dtype, len(some)), launch, encoded, _by_eight(some), result, columns)


def _padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with whole eight bytes for every lane, in a type that the kernel for weights of `dtype` takes."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.itemsize < dtype.itemsize:
        x = x.to(torch.float32)
    missing = -x.shape[1] % (LANE_BYTES // dtype.itemsize)
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x if x.data_ptr() % LANE_BYTES == 0 else x.clone()


def _run(kernel, launch: Launch, encoded: Bitmap, *arguments) -> None:
    """Launch on torch's current stream of the tensors' GPU."""
    if SIMULATED:
        kernel[launch.grid, launch.threads](*_stored(encoded), *map(_array, arguments))
        return
    with cuda.gpus[encoded.device.index]:
        stream = cuda.external_stream(torch.cuda.current_stream(encoded.device).cuda_stream)
        kernel[launch.grid, launch.threads, stream](*_stored(encoded), *map(_array, arguments))


def _stored(encoded: Bitmap) -> tuple:
    """What the kernels read of the packed matrix; kept as long as it, since wrapping takes longer than some kernels."""
    if encoded not in _STORED:
        words, values = encoded.bitmap.view(torch.uint32), _bits(encoded.values)
        _STORED[encoded] = tuple(map(_array, (words, encoded.row_offsets, encoded.block_offsets, values)))
    return _STORED[encoded]


def _array(argument: Tensor | int):
    if not isinstance(argument, Tensor):
        return argument
    return argument.numpy() if SIMULATED else cuda.as_cuda_array(argument)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.dtype])


def _by_eight(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint64)


def _multiprocessors(device: torch.device) -> int:
    if SIMULATED:
        return SIMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
