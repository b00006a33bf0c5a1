"""Ways to bring runs of a store into memory, in a registry: one interface, several interfaces of the system's.

with open_reader("threads", store, "endor") as reader:
    future = reader.submit([store.layer(1, "endor")], other_slot)  # while the layer before is used
    future.result()
"""

from toolkit.errors import unknown
from toolkit.storage.readers.base import Reader
from toolkit.storage.readers.io_uring import IoUring
from toolkit.storage.readers.kvikio import KvikIO
from toolkit.storage.readers.threads import Threads
from toolkit.storage.store import Store

__all__ = ["READERS", "Reader", "open_reader"]

READERS: dict[str, type[Reader]] = {cls.name: cls for cls in (Threads, IoUring, KvikIO)}


def open_reader(name: str, store: Store, *variants: str, **options: int) -> Reader:
    """A reader of a store's shards: of these variants, or of all.

    `options` are the reader's own (`chunk_bytes`, `threads`, `depth`). Raises `UserError` for an unknown name, or a
    reader that this machine cannot run: the message says what is missing.
    """
    if name not in READERS:
        raise unknown("reader", name, READERS)
    return READERS[name](store.files(*variants), **options)
