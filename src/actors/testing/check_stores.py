"""Stores in which `check-views` keeps the shards of one script.

Documents are in memory. Blobs are where the caller says, unless the setting `blob_url` is set: then
they are there, in a folder of their own, as a service's would be, and a Spark on other machines
reads and writes them. They are deleted at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from actors.durable.persist import PersistClient
from actors.durable.persist.location import BlobStore
from actors.durable.persist.memory_stores import MemoryConsensus
from actors.durable.persist.store_urls import open_blob
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings


@asynccontextmanager
async def check_stores(
    settings: Settings, otherwise: Callable[[], BlobStore]
) -> AsyncIterator[PersistClient]:
    """Yield a client over new stores. `otherwise` makes the blob store if `blob_url` is not set.

    Raises `StorageError`, `InvalidUsage`.
    """
    clock = SystemClock()
    if not settings.blob_url:
        blob = otherwise()
    else:
        below = f"check-views-{secrets.token_hex(8)}"
        blob = await open_blob(settings.blob_url, settings, clock, below=below)
    persist = PersistClient(blob, MemoryConsensus(), settings, clock)
    try:
        yield persist
    finally:
        with anyio.CancelScope(shield=True):
            await persist.close()
            if settings.blob_url:
                for found in await blob.list_keys():
                    await blob.delete(found.key)
