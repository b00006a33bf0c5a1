"""The registry of readers, which bring parts of a store into memory. They use different system interfaces.

with open_reader("threads", store, "endor") as reader:
    future = reader.submit(store.layer(1, "endor").chunks, other_slot)  # while the layer before is used
    future.result()
"""

import logging

from toolkit.errors import UserError, unknown
from toolkit.storage.readers.aio import Aio
from toolkit.storage.readers.base import Reader
from toolkit.storage.readers.kvikio import KvikIO
from toolkit.storage.readers.threads import Threads
from toolkit.storage.store import Store

__all__ = ["READERS", "Reader", "open_reader", "open_scattered"]

log = logging.getLogger(__name__)

READERS: dict[str, type[Reader]] = {cls.name: cls for cls in (Threads, Aio, KvikIO)}


def open_reader(name: str, store: Store, *variants: str, **options: int) -> Reader:
    """Open a reader for the shards of these variants, or of all variants.

    `options` are those of the reader's class (`chunk_bytes`, `threads`, `depth`). Raises `UserError` for an unknown
    name, and for a reader that this machine cannot run; the message says what is missing.
    """
    if name not in READERS:
        raise unknown("reader", name, READERS)
    return READERS[name](store.files(*variants), **options)


def open_scattered(store: Store, *variants: str, depth: int) -> Reader:
    """Open a reader for many short reads, `depth` of them under way at once.

    It is "aio", or as many threads where the system refuses that: threads must be woken for each call.
    """
    try:
        return open_reader("aio", store, *variants, depth=depth)
    except UserError as error:
        log.info("%s", error)
        return open_reader("threads", store, *variants, threads=depth)
