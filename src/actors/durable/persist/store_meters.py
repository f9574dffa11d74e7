"""Meters of the two stores: how many requests they get, how long these take, and which fail.

`PersistClient` reaches its stores through these. A request is counted once, whatever a store does
to answer it; one that was cancelled is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from actors.durable.persist.location import (
    BlobInfo,
    BlobStore,
    CompareAndSet,
    ConsensusStore,
    VersionedData,
)
from actors.runtime.errors import StorageError
from actors.runtime.kernel import ActorClock
from actors.runtime.measurement import Measurement, ValueHistogram
from actors.runtime.metric_table import STORE_ERRORS, STORE_SECONDS

StoreKind: TypeAlias = Literal["blobs", "documents"]
R = TypeVar("R")


class StoreMeter:
    """Counts of one store."""

    def __init__(self, kind: StoreKind, clock: ActorClock) -> None:
        self._kind = kind
        self._clock = clock
        self._seconds: dict[str, ValueHistogram] = {}
        """Durations of requests by operation."""
        self._errors: Counter[str] = Counter()

    async def timed(self, operation: str, request: Awaitable[R]) -> R:
        """Return the answer of a request, and count it. Raises as the request does."""
        began_ms = self._clock.monotonic_ms()
        try:
            answer = await request
        except StorageError as error:
            self._errors[type(error).__name__] += 1
            raise
        took_ms = self._clock.monotonic_ms() - began_ms
        found = self._seconds.get(operation)
        if found is None:
            found = self._seconds[operation] = ValueHistogram()
        found.note(took_ms / 1000)
        return answer

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of the store."""
        for operation, seconds in self._seconds.items():
            yield Measurement(STORE_SECONDS, seconds, (self._kind, operation))
        for error, count in self._errors.items():
            yield Measurement(STORE_ERRORS, count, (self._kind, error))


class MeteredBlob:
    """A `BlobStore` whose requests are counted."""

    def __init__(self, inner: BlobStore, clock: ActorClock) -> None:
        self.meter = StoreMeter("blobs", clock)
        self._inner = inner

    async def get(self, key: str) -> bytes | None:
        """See `BlobStore`."""
        return await self.meter.timed("get", self._inner.get(key))

    async def set(self, key: str, data: bytes) -> None:
        """See `BlobStore`."""
        await self.meter.timed("set", self._inner.set(key, data))

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """See `BlobStore`."""
        return await self.meter.timed("adopt", self._inner.adopt(key, path))

    async def delete(self, key: str) -> bool:
        """See `BlobStore`."""
        return await self.meter.timed("delete", self._inner.delete(key))

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """See `BlobStore`."""
        return await self.meter.timed("list", self._inner.list_keys(prefix))

    def path(self, key: str) -> str | None:
        """See `BlobStore`."""
        return self._inner.path(key)

    def place(self, key: str) -> tuple[str, str] | None:
        """See `BlobStore`."""
        return self._inner.place(key)


class MeteredConsensus:
    """A `ConsensusStore` whose requests are counted."""

    def __init__(self, inner: ConsensusStore, clock: ActorClock) -> None:
        self.meter = StoreMeter("documents", clock)
        self._inner = inner

    async def head(self, key: str) -> VersionedData | None:
        """See `ConsensusStore`."""
        return await self.meter.timed("head", self._inner.head(key))

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """See `ConsensusStore`."""
        return await self.meter.timed("compare and set", self._inner.compare_and_set(ops))

    async def list_keys(self, prefix: str = "") -> list[str]:
        """See `ConsensusStore`."""
        return await self.meter.timed("list", self._inner.list_keys(prefix))

    async def close(self) -> None:
        """See `ConsensusStore`."""
        await self._inner.close()
