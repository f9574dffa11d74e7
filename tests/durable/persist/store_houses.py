"""What tests of stores share: a house gives any number of clients of one store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from hypothesis import settings
from msgspec.structs import replace

from actors.durable.object_store.bucket_store import BucketStore
from actors.durable.persist.blob_bucket import BucketBlob
from actors.durable.persist.location import BlobStore, ConsensusStore
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

CLOCK = SystemClock()
PIECE = 64 * 1024
"""Larger objects go to buckets in several requests."""
SETTINGS = replace(
    Settings(),
    store_request_timeout_ms=60_000,
    store_requests_in_flight_max=8,
    store_bytes_in_flight_max=4 * PIECE,
    retry_delay_ms_min=1,
    retry_delay_ms_max=20,
)
EXAMPLES = {"memory": 40, "sqlite": 15, "file": 15, "objects": 15, "postgres": 12}
"""Of a property, by store; others are slow. More when examples are searched for."""


class StoreHouse:
    """One store; `kind` is the name of its test parameter."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self._objects: Any = None

    @property
    def examples(self) -> int:
        """How many are drawn, by the profile that is loaded."""
        return EXAMPLES.get(self.kind, 5) * settings().max_examples // 100

    @asynccontextmanager
    async def blobs(self, **changes: Any) -> AsyncIterator[tuple[BlobStore, BlobStore]]:
        """Two clients."""
        limits = replace(SETTINGS, **changes)
        made: list[BlobStore] = []
        for _ in range(2):
            if self.kind == "objects":
                made.append(BucketBlob(self._bucket(limits), "a/blobs/", limits, CLOCK))
            else:
                made.append(await open_blob(self.url, limits, CLOCK, exclusive=False))
        yield made[0], made[1]

    @asynccontextmanager
    async def documents(
        self, **changes: Any
    ) -> AsyncIterator[tuple[ConsensusStore, ConsensusStore]]:
        """Two clients; they are closed."""
        async with AsyncExitStack() as stack:
            made: list[ConsensusStore] = []
            for number in range(2):
                made.append(await self.client(number, **changes))
                stack.push_async_callback(made[-1].close)
            yield made[0], made[1]

    async def client(self, number: int = 0, **changes: Any) -> ConsensusStore:
        """One more client, to be closed."""
        limits = replace(SETTINGS, **changes)
        return await open_consensus(self.url, limits, CLOCK, Random(number))

    def _bucket(self, limits: Settings) -> BucketStore:
        from obstore.store import MemoryStore

        if self._objects is None:
            self._objects = MemoryStore()
        return BucketStore(self._objects, self._objects, "memory", limits)
