"""Numba's CUDA simulator without its waits and searches, which take nearly all of its time.

A thread of a block is a greenlet: it runs up to the next barrier and hands over there. Numba's own are threads of the
operating system that are polled while they run. They take turns in the same order every time. Device functions and
shared arrays are found without a lock, a search through a module, and a traceback for each call.
"""

import contextlib
import random
import sys
from types import SimpleNamespace

import greenlet
import numpy as np
from numba.cuda.simulator import kernel, kernelapi
from numba.np import numpy_support


class Thread(greenlet.greenlet):
    """A thread of a block. A kernel finds its own as `threading.current_thread()`."""

    def __init__(self, function, block_point, thread_point):
        super().__init__(function)
        self.blockIdx, self.threadIdx = kernel.Dim3(*block_point), kernel.Dim3(*thread_point)

    def syncthreads(self):
        """Hand over to the block, which goes on with this thread when all others have come as far."""
        self.parent.switch()


class Block(kernel.BlockManager):
    """A block whose threads take turns between two barriers, in any order: a missing barrier shows."""

    def run(self, grid_point, *arguments):
        """Call the kernel in each thread of the block. An error in a thread ends the block."""
        points, order = np.ndindex(*self._block_dim), random.Random(0)
        live = [Thread(lambda: self._f(*arguments), grid_point, point) for point in points]
        while live:
            order.shuffle(live)
            for thread in live:
                thread.switch()
            live = [thread for thread in live if not thread.dead]


class Launch(contextlib.ExitStack):
    """A running kernel. It knows the modules where the simulator's functions stand for `cuda`."""

    current = None

    def __enter__(self):
        Launch.current, self.modules = self, set()
        return super().__enter__()

    def __exit__(self, *raised):
        Launch.current = None
        return super().__exit__(*raised)

    def call(self, function, *arguments):
        """Call a device function. The first one of a module changes the module until the kernel has ended."""
        if (module := id(function.__globals__)) not in self.modules:
            self.enter_context(kernel.swapped_cuda_module(function, kernel._get_kernel_context()))
            self.modules.add(module)
        return function(*arguments)


def called(self, *arguments):
    """`FakeCUDAKernel.__call__`."""
    if Launch.current:
        return Launch.current.call(self.fn, *arguments)
    with Launch():
        return launched(self, *arguments)


def shared_array(self, shape, dtype):
    """`FakeCUDAShared.array`: one array for each line that asks for it."""
    frame = sys._getframe(1)
    place = frame.f_code, frame.f_lineno
    if place not in self._allocations:
        self._allocations[place] = np.empty(shape, numpy_support.as_dtype(dtype))
    return self._allocations[place]


launched = kernel.FakeCUDAKernel.__call__


def install():
    """Have the simulator work so in this process."""
    kernel.BlockManager = Block
    kernel.FakeCUDAKernel.__call__ = called
    kernelapi.FakeCUDAShared.array = shared_array
    kernelapi.threading = SimpleNamespace(current_thread=greenlet.getcurrent)
