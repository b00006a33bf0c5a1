"""KvikIO: reads by cuFile from the disk into GPU memory. Needs a GPU and the package `kvikio-cu12` or `kvikio-cu13`.

In three cases the bytes go through the host's memory instead, and no message says so: KvikIO does not find cuFile; the
kernel module nvidia-fs is not loaded; or cuFile's option `allow_compat_mode` is on and it does not support the file
system or the disk (KvikIO's runtime settings; cuFile API reference, compatibility mode). So `mode` is "gds" only if
none of the three is possible, and "compat" otherwise. `CUFILE_ALLOW_COMPAT_MODE=false` in the environment turns the
option off.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from toolkit.errors import UserError
from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers.base import Reader, Target, at_least_one

CHUNK_BYTES = 4 << 20
DEPTH = 4


class KvikIO(Reader):
    """Reads by KvikIO's own pool of threads. `target` is a byte tensor on a CUDA device.

    Raises `UserError` if the package is not installed or there is no GPU.
    """

    name = "kvikio"
    into = "device"

    def __init__(self, files: Mapping[str, StoredFile], chunk_bytes: int = CHUNK_BYTES, depth: int = DEPTH):
        self.depth = at_least_one("depth", depth)
        super().__init__(files, chunk_bytes)

    def _open(self, stack: ExitStack) -> str:
        kvikio = _module()
        # KvikIO sends reads below the threshold through the host in any mode
        stack.enter_context(kvikio.defaults.set({"num_threads": self.depth, "gds_threshold": 0}))
        mode = "gds" if _straight(kvikio, stack) else "compat"
        self._files = {shard: stack.enter_context(kvikio.CuFile(file.path, "r")) for shard, file in self.files.items()}
        for shard, file in self.files.items():
            file.check(self._descriptor(shard))
        return mode

    def _descriptor(self, shard: str) -> int:
        return self._files[shard].fileno()

    def _check(self, chunks: Sequence[Chunks], target: Target) -> None:
        if not getattr(target, "is_cuda", False):
            raise UserError("reader 'kvikio' reads into GPU memory: expected a CUDA tensor; use 'threads' for the host")
        super()._check(chunks, target)

    def _fetch(self, chunks: Chunks, target: Target) -> None:
        numbers = (each.tolist() for each in (chunks.offsets, chunks.sizes, chunks.places))
        for offset, size, place in zip(*numbers, strict=True):
            part = target[place : place + size]
            done = self._files[chunks.shard].pread(part, size, offset, self.chunk_bytes).get()
            if done != size:
                raise OSError(f"short read: {done} of {size} bytes at offset {offset}")


def _straight(kvikio, stack: ExitStack) -> bool:
    """Whether it is certain that every byte goes from the disk to the GPU past the host's memory."""
    if kvikio.defaults.is_compat_mode_preferred():
        return False
    kvikio.cufile_driver.driver_open()  # until it is open, cuFile reports defaults
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
