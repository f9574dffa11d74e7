"""One process's connections to the stores, which may act after a request was given up.

An operation hit by `LATE` answers with a timeout, and takes effect later, as in a remote store,
whether its process still lives or not. (A process that is alone on a machine has no effects after
its death.)
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from actors.durable.persist.location import CompareAndSet
from tests.simulators.service.crash import LIFE
from tests.simulators.service.faults import LATE, FaultInjector, InjectedFault
from tests.simulators.service.stores import (
    WRITE_S,
    DurableObserver,
    FaultyBlob,
    FaultyConsensus,
    SimulatedDisk,
)


class StoreWatcher(DurableObserver, Protocol):
    """Observer of the documents and blobs that one process makes durable."""

    def deleting(self, key: str, /) -> None:
        """Observe the deletion of a blob, before it happens."""
        ...


class _Late:
    """Effects that happen after their request was given up."""

    def __init__(self, *, outlives: bool) -> None:
        self._outlives = outlives
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, fault: InjectedFault, effect: Callable[[], Awaitable[Any]]) -> None:
        async def later() -> None:
            await asyncio.sleep(2 * fault.delay_ms / 1000)
            await effect()

        context = contextvars.copy_context()
        # Life 0 is never killed: the effect happens even if the process dies first.
        if self._outlives:
            context.run(LIFE.set, 0)
        task = asyncio.get_running_loop().create_task(later(), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ShardBlob(FaultyBlob):
    """A `BlobStore` over a disk."""

    def __init__(
        self, disk: SimulatedDisk, injector: FaultInjector, crash: Callable[[], None], watcher:
        StoreWatcher, *, outlives: bool,
    ) -> None:  # fmt: skip
        super().__init__(disk, injector, crash, watcher)
        self._watcher = watcher
        self._late = _Late(outlives=outlives)

    async def set(self, key: str, data: bytes) -> None:
        """Store a new object."""
        fault = await self._begin("blob.set", key, WRITE_S)
        if fault is not None and fault.kind == LATE:
            self._late.begin(fault, lambda: self._blobs.set(key, data))
            self._timeout("blob.set", key)
        await self._blobs.set(key, data)
        await self._end(fault, "blob.set", key)

    async def delete(self, key: str) -> bool:
        """Delete an object."""
        fault = await self._begin("blob.delete", key, WRITE_S)
        if fault is not None and fault.kind == LATE:
            self._late.begin(fault, lambda: self._delete(key))
            self._timeout("blob.delete", key)
        found = await self._delete(key)
        await self._end(fault, "blob.delete", key)
        return found

    async def _delete(self, key: str) -> bool:
        self._watcher.deleting(key)
        return await self._blobs.delete(key)


class ShardConsensus(FaultyConsensus):
    """A `ConsensusStore` over a disk."""

    def __init__(
        self, disk: SimulatedDisk, injector: FaultInjector, crash: Callable[[], None], watcher:
        StoreWatcher, *, outlives: bool,
    ) -> None:  # fmt: skip
        super().__init__(disk, injector, crash, watcher)
        self._late = _Late(outlives=outlives)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Set all documents or none."""
        keys = ",".join(op.key for op in ops)
        fault = await self._begin("consensus.set", keys, WRITE_S)
        if fault is not None and fault.kind == LATE:
            self._late.begin(fault, lambda: self._set(ops))
            await asyncio.sleep(fault.delay_ms / 1000)
            self._timeout("consensus.set", keys)
        done = await self._set(ops)
        await self._end(fault, "consensus.set", keys)
        return done

    async def _set(self, ops: Sequence[CompareAndSet]) -> bool:
        done = await self._documents.compare_and_set(ops)
        self._injector.trace.note("set", ",".join(op.key for op in ops), done)
        if done:
            self._observer.committed(ops)
        return done
