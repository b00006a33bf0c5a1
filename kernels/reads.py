"""System calls that read many ranges of a file in one compiled call, which holds no lock of the interpreter.

`toolkit.storage` checks ranges and errors. They stand among the kernels because compiled code is kept for the sources
of this folder only (`toolkit.kernels.engine`).

`read` has many threads take ranges in turn and read them. `read_many` has many reads under way from a single thread, by
Linux's native asynchronous I/O (`io_submit`), whose system calls have no functions in the C library: requests and
events lie in arrays of 64-bit words, little-endian, as `linux/aio_abi.h` has them.
"""

import platform

import numpy as np
from numba import types

from toolkit.kernels.engine.compiled import compiled
from toolkit.kernels.engine.parallel import add

REQUEST_WORDS, EVENT_WORDS = 8, 4
NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}  # io_setup, io_destroy, io_submit, io_getevents
SETUP, DESTROY, SUBMIT, WAIT = NUMBERS.get(platform.machine(), (-1, -1, -1, -1))

syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 6))
pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uint64, types.int64))


@compiled
def read(descriptor, offsets, sizes, places, target, taken):
    """Take free ranges and read them. Returns the index of one that failed or fell short, else the number of ranges."""
    start = target.ctypes.data
    index = add(taken.ctypes.data, 0, 1)
    while index < len(offsets):
        if pread(descriptor, start + places[index], sizes[index], offsets[index]) != sizes[index]:
            return index
        index = add(taken.ctypes.data, 0, 1)
    return len(offsets)


@compiled
def read_many(context, depth, descriptor, offsets, sizes, places, target, results, requests):
    """Read ranges with up to `depth` of them under way. `results[i]` is the number of bytes read, or below 0.

    `requests` is zeroed room of `REQUEST_WORDS` for each. It is the caller's: the system has its address only, and
    Numba frees an array of its own behind the last line that names it, which is before the system reads it.
    After a failure no more reads are started. Ranges that were not started keep their result. No read is under way at
    the end.
    """
    count, start = len(offsets), np.int64(target.ctypes.data)
    addresses = np.int64(requests.ctypes.data) + np.arange(count) * (8 * REQUEST_WORDS)
    events = np.empty((depth, EVENT_WORDS), np.int64)
    for index in range(count):
        requests[index, 0] = index  # comes back with the event; the operation is 0, a read
        requests[index, 2] = descriptor << 32
        requests[index, 3] = start + places[index]
        requests[index, 4] = sizes[index]
        requests[index, 5] = offsets[index]
    started, ended, failed = 0, 0, False
    while True:
        room = min(count - started, depth - (started - ended))
        if room > 0 and not failed:
            taken = syscall(SUBMIT, context, room, addresses.ctypes.data + 8 * started, 0, 0)
            failed = taken <= 0 and started == ended  # else the system takes more when some have ended
            started += max(0, taken)
        if started == ended:
            return
        found = syscall(WAIT, context, 1, depth, events.ctypes.data, 0)
        for number in range(found):  # below 0 if a signal interrupted it: wait again
            index = events[number, 0]
            results[index] = events[number, 2]
            failed = failed or results[index] != sizes[index]
        ended += max(0, found)
