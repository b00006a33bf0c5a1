"""The registry of readers, which bring parts of a store into memory. They use different system interfaces.

with open_reader(None, store, "endor") as reader:
    future = reader.submit(store.layer(1, "endor").chunks, other_slot)  # while the layer before is used
    future.result()
"""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from toolkit.errors import UserError, unknown
from toolkit.storage.readers.aio import Aio
from toolkit.storage.readers.base import Reader
from toolkit.storage.readers.kvikio import KvikIO
from toolkit.storage.readers.threads import Threads

if TYPE_CHECKING:
    from toolkit.storage.store import Store

__all__ = ["READERS", "Reader", "open_reader"]

log = logging.getLogger(__name__)

READERS: dict[str, type[Reader]] = {cls.name: cls for cls in (Threads, Aio, KvikIO)}


def open_reader(
    name: str | None, store: "Store", *variants: str, shards: Collection[str] | None = None, **options: int
) -> Reader:
    """Open a reader for the shards of these variants, or of all variants; of them for those of `shards`, if given.

    `options` are `chunk_bytes` and `depth`, the reads that are under way at once. None takes the quickest reader of
    host memory: "aio"; or "threads" where the system refuses that, or reads only through the page cache, in which
    asynchronous reads wait for each other.

    Raises `UserError` for an unknown name, and for a reader that this machine cannot run; the message says what is
    missing.
    """
    if name is not None:
        if name not in READERS:
            raise unknown("reader", name, READERS)
        files = store.files(*variants)
        return READERS[name]({shard: files[shard] for shard in files if shards is None or shard in shards}, **options)
    try:
        reader = open_reader(Aio.name, store, *variants, shards=shards, **options)
    except UserError as error:
        log.info("%s", error)
    else:
        if reader.mode == "direct":
            return reader
        reader.close()
    return open_reader(Threads.name, store, *variants, shards=shards, **options)
