"""cuFile by way of KvikIO: from the disk into GPU memory. Needs a GPU and the package `kvikio-cu12` or `kvikio-cu13`.

KvikIO reads by POSIX calls and copies when it does not find cuFile. cuFile does the same when the kernel module
nvidia-fs is not loaded and, while its option `allow_compat_mode` is on, for any file whose file system or disk is not
supported, without a word (KvikIO's runtime settings; cuFile API reference, compatibility mode). So `mode` is "gds" only
if none of the three can be, else "compat"; `CUFILE_ALLOW_COMPAT_MODE=false` in the environment turns the option off.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from toolkit.errors import UserError
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers.base import Range, Reader, Target, at_least_one

CHUNK_BYTES = 4 << 20
THREADS = 4


class KvikIO(Reader):
    """KvikIO's own pool of threads. `target` is a byte tensor on a CUDA device.

    Raises `UserError` if the package is not installed or there is no GPU.
    """

    name = "kvikio"
    into = "device"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, threads: int = THREADS):
        self.threads = at_least_one("threads", threads)
        super().__init__(files, chunk_bytes)

    def _open(self, stack: ExitStack) -> str:
        kvikio = _module()
        # what is shorter than the threshold goes by way of the host, whatever the mode
        stack.enter_context(kvikio.defaults.set({"num_threads": self.threads, "gds_threshold": 0}))
        mode = "gds" if _straight(kvikio, stack) else "compat"
        self._files = {shard: stack.enter_context(kvikio.CuFile(file.path, "r")) for shard, file in self.files.items()}
        for shard, file in self.files.items():
            file.check(self._descriptor(shard))
        return mode

    def _descriptor(self, shard: str) -> int:
        return self._files[shard].fileno()

    def _check(self, ranges: Sequence[Range], target: Target) -> None:
        if not getattr(target, "is_cuda", False):
            raise UserError("reader 'kvikio' reads into GPU memory: expected a CUDA tensor; use 'threads' for the host")
        super()._check(ranges, target)

    def _transfer(self, shard: str, ranges: Sequence[Range], place: int, target: Target) -> None:
        for range_ in ranges:
            part = target[place : place + range_.nbytes]
            done = self._files[shard].pread(part, range_.nbytes, range_.offset, self.chunk_bytes).get()
            if done != range_.nbytes:
                raise OSError(f"short read: {done} of {range_.nbytes} bytes at offset {range_.offset}")
            place += range_.nbytes


def _straight(kvikio, stack: ExitStack) -> bool:
    """Whether every byte is sure to go from the disk to the GPU without the host's memory between."""
    if kvikio.defaults.is_compat_mode_preferred():
        return False
    kvikio.cufile_driver.driver_open()  # before, cuFile tells defaults, not what is
    stack.callback(kvikio.cufile_driver.driver_close)
    return kvikio.cufile_driver.get("is_gds_available") and not kvikio.cufile_driver.get("allow_compat_mode")


def _module():
    import torch

    if not torch.cuda.is_available():
        raise UserError("reader 'kvikio' needs a CUDA device: use reader 'threads'")
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        raise UserError(
            "reader 'kvikio' needs the package kvikio-cu12 or kvikio-cu13, as your CUDA is: install it, "
            "or use reader 'threads'"
        ) from error
    return kvikio
