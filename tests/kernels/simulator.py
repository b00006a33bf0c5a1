"""Numba's CUDA simulator without its waits and searches, which take nearly all of its time.

A thread of a block runs up to the next barrier and hands over there; Numba's own polls all threads while they run.
The threads take turns in the same order every time. Device functions and shared arrays are found without a lock, a
search through a module, and a traceback for each call.
"""

import contextlib
import random
import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi
from numba.np import numpy_support


class Thread(kernel.BlockThread):
    """A thread of a block that runs only between `resume` and its next barrier."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turn, self.pause, self.ended = threading.Lock(), threading.Lock(), False
        self.turn.acquire()
        self.pause.acquire()

    def resume(self):
        """Run up to the next barrier or to the end; raise what the thread raised."""
        if not self.is_alive():
            self.start()
        self.turn.release()
        self.pause.acquire()
        if self.exception:
            raise self.exception[0].with_traceback(self.exception[1])

    def run(self):
        self.turn.acquire()
        super().run()
        self.ended = True
        self.pause.release()

    def syncthreads(self):
        self.pause.release()
        self.turn.acquire()


class Block(kernel.BlockManager):
    """A block whose threads take turns between two barriers, in any order: a missing barrier shows."""

    def run(self, grid_point, *arguments):
        """Call the kernel in each thread of the block."""
        points, order = np.ndindex(*self._block_dim), random.Random(0)
        live = [Thread(lambda: self._f(*arguments), self, grid_point, point, self._debug) for point in points]
        while live:
            order.shuffle(live)
            for thread in live:
                thread.resume()
            live = [thread for thread in live if not thread.ended]


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
