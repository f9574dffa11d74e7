"""Stores that outlive the process, and its faulty connections to them.

A `SimulatedDisk` holds the durable state: all that survives a crash. `FaultyBlob` and
`FaultyConsensus` are one process's connections to it. An operation takes a little time, takes
effect at one instant in between, and answers later: so a crash may fall on either side of the
instant, and a fault may lose the answer. `DurableObserver.committed` is called with every change of
documents at its instant, before any process can act on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, Protocol

from actors.durable.persist import PersistClient
from actors.durable.persist.location import BlobInfo, CompareAndSet, VersionedData
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.durable.persist.shard import ShardState
from actors.runtime.errors import StorageError
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import ShardId
from tests.simulators.service.faults import (
    CRASH,
    CRASH_AFTER,
    DELAY,
    FAIL,
    HANG,
    LOST,
    LOST_ANSWER,
    FaultInjector,
    InjectedFault,
)

READ_S: Final = 0.0002
WRITE_S: Final = 0.001


class DurableObserver(Protocol):
    """Observer of durable changes."""

    def committed(self, ops: Sequence[CompareAndSet], /) -> None:
        """Observe documents that changed, all at once."""
        ...

    def missing(self, key: str, /) -> None:
        """Observe a request for a blob that is missing."""
        ...


class SimulatedDisk:
    """State that survives a crash."""

    def __init__(self, clock: ActorClock) -> None:
        self.blobs = MemoryBlob(clock)
        self.documents = MemoryConsensus()


class _Way:
    """One process's operations on a store and their faults; the base of both stores."""

    def __init__(
        self,
        disk: SimulatedDisk,
        injector: FaultInjector,
        crash: Callable[[], None],
        observer: DurableObserver,
    ) -> None:
        self._blobs = disk.blobs
        self._documents = disk.documents
        self._injector = injector
        self._crash = crash
        self._observer = observer

    async def _begin(self, site: str, key: str, latency_s: float) -> InjectedFault | None:
        """Run the part of an operation before the instant at which it takes effect."""
        fault = self._injector.draw(site)
        self._injector.trace.note(site, key)
        await asyncio.sleep(latency_s)
        if fault is None:
            return None
        if fault.kind in (HANG, DELAY):
            await asyncio.sleep(fault.delay_ms / 1000)
        elif fault.kind == FAIL:
            raise StorageError(f"{site} {key}: failed on purpose", determinate=True)
        elif fault.kind == LOST:
            await asyncio.sleep(fault.delay_ms / 1000)
            self._timeout(site, key)
        elif fault.kind == CRASH:
            await self._die()
        return fault

    async def _end(self, fault: InjectedFault | None, site: str, key: str) -> None:
        """Run the part of an operation after that instant."""
        if fault is not None and fault.kind == CRASH_AFTER:
            await self._die()
        if fault is not None and fault.kind == LOST_ANSWER:
            await asyncio.sleep(fault.delay_ms / 1000)
            self._timeout(site, key)
        await asyncio.sleep(0)

    async def _die(self) -> None:
        self._crash()
        await asyncio.Event().wait()

    def _timeout(self, site: str, key: str) -> NoReturn:
        raise StorageError(f"{site} {key}: timed out on purpose", determinate=False)


class FaultyBlob(_Way):
    """A `BlobStore` over a disk."""

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None."""
        await self._begin("blob.get", key, READ_S)
        found = await self._blobs.get(key)
        if found is None:
            self._observer.missing(key)
        return found

    async def set(self, key: str, data: bytes) -> None:
        """Store a new object."""
        fault = await self._begin("blob.set", key, WRITE_S)
        await self._blobs.set(key, data)
        await self._end(fault, "blob.set", key)

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Take a file over."""
        fault = await self._begin("blob.set", key, WRITE_S)
        found = await self._blobs.adopt(key, path)
        await self._end(fault, "blob.set", key)
        return found

    async def delete(self, key: str) -> bool:
        """Delete an object."""
        fault = await self._begin("blob.delete", key, WRITE_S)
        found = await self._blobs.delete(key)
        await self._end(fault, "blob.delete", key)
        return found

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return the objects whose key starts with `prefix`."""
        await self._begin("blob.list", prefix, READ_S)
        return await self._blobs.list_keys(prefix)

    def path(self, key: str) -> None:
        """Return None: memory has no paths."""
        return

    def place(self, key: str) -> None:
        """Return None: memory is in no bucket."""
        return


class FaultyConsensus(_Way):
    """A `ConsensusStore` over a disk."""

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None."""
        await self._begin("consensus.head", key, READ_S)
        return await self._documents.head(key)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Set all documents or none."""
        keys = ",".join(op.key for op in ops)
        fault = await self._begin("consensus.set", keys, WRITE_S)
        done = await self._documents.compare_and_set(ops)
        self._injector.trace.note("set", keys, done)
        if done:
            self._observer.committed([op for op in ops if not op.kept])
        await self._end(fault, "consensus.set", keys)
        return done

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`."""
        await self._begin("consensus.list", prefix, READ_S)
        return await self._documents.list_keys(prefix)

    async def close(self) -> None:
        """Do nothing: the disk stays."""


class LatePersist(PersistClient):
    """A `PersistClient` that may return a shard's state late, at the site ``persist.state``, so
    that a source's look-up may answer after its object was dropped."""

    injector: FaultInjector

    async def state(self, shard: ShardId) -> ShardState:
        """Return the shard's state, perhaps late; see `PersistClient`."""
        fault = self.injector.draw("persist.state")
        if fault is not None:
            await asyncio.sleep(fault.delay_ms / 1000)
        return await super().state(shard)
