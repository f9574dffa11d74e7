"""The fault-free end of a run: all objects come to rest, are readable and right, and are dropped.

First without a write, then after one: every object is waited for and read, every subscription and
sink catches up, the source has emitted its events. Then all objects are dropped, the latest first,
and no trace of them may be left (`rest`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from actors.runtime.errors import (
    ConnectionBroken,
    DeadlineExceeded,
    EngineError,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    OperationCanceled,
    PenstockError,
    ReadBelowSince,
    ResourceBusy,
    ResourceClosed,
    StorageError,
    UnknownObject,
)
from tests.simulators.service.history import CheckerViolation, ShardHistory
from tests.simulators.service.rest import check_rest
from tests.simulators.service.schedule import SOURCE_EVENTS, TABLES
from tests.simulators.service.storage_checkers import upper_of

if TYPE_CHECKING:
    from tests.simulators.service.cluster import SimulatedCluster
    from tests.simulators.service.run import SimulatedClient, SimulatedClients

CALM_S: Final = 60.0
"""Virtual time within which all objects come to rest once faults have stopped."""
UNREAD: Final = ("index", "source", "sink")
"""Kinds of objects that have no contents of their own."""

EXCUSED: Final = (
    ConnectionBroken,
    ResourceBusy,
    OperationCanceled,
    ResourceClosed,
    DeadlineExceeded,
    EngineError,
    ObjectExists,
    ObjectInUse,
    ReadBelowSince,
    StorageError,
    UnknownObject,
)
"""Errors that are no violation while faults strike; `InvalidUsage` of other kinds always is."""


def doing(world: SimulatedCluster) -> str:
    """Return the state of every actor, for people."""
    return "; ".join(f"{actor.path}: {actor.doing}" for actor in world.actors())


async def calm_down(
    world: SimulatedCluster, shared: SimulatedClients, worker: SimulatedClient
) -> None:
    """Check that all objects can be written and read, and are right."""
    await worker.leave()
    # First without a write: an object must not need a later write to become readable.
    for entry in world.history.catalog.objects:
        if entry.kind not in UNREAD and not await _readable(world, worker, entry.name):
            return
    # Requests under way when the faults stopped may still fail by them, but only once.
    time = 0
    for attempt in range(20):
        client = await worker.connected()
        try:
            time = await worker.write({table: [shared.fresh_row(1)] for table in TABLES}, {})
            break
        except EXCUSED as error:
            if attempt == 19:
                world.fail(CheckerViolation(f"liveness: no write in the calm: {error!r}"))
                return
            await worker.leave()
            await asyncio.sleep(0.5)
    try:
        client = await worker.connected()
        catalog = world.history.catalog
        names = [each.name for each in catalog.objects if each.kind not in UNREAD]
        for name in names:
            await client.wait_for(name, time, deadline_ms=int(CALM_S * 1000))
            await client.peek(name)
    except PenstockError as error:
        world.fail(
            CheckerViolation(
                f"liveness: in the calm: {type(error).__name__}: {error}; {doing(world)}"
            )
        )
        return
    for made in shared.subscriptions:
        assert made.task is not None
        while not made.task.done() and made.upper <= time:
            await asyncio.sleep(0.05)
    await _flowing(world, time)
    try:
        world.writes.check()
    except CheckerViolation as violation:
        world.fail(violation)


async def _flowing(world: SimulatedCluster, time: int) -> None:
    """Wait until the source has emitted its events, and every sink has written them."""
    rate = world.schedule.setting.source_rate
    catalog = world.history.catalog
    for entry in (each for each in catalog.objects if each.kind == "source table"):
        held = world.history.shards[entry.shard or ""]
        # A slow source need not have reached its end: one more number proves that it goes on.
        most = SOURCE_EVENTS if rate >= 200 else min(SOURCE_EVENTS, len(_numbers(held)) + 1)
        while len(_numbers(held)) < most:
            await asyncio.sleep(0.05)
        # Columns that it was given have their values.
        while any(len(row) < len(entry.schema.columns) for row in held.at(held.state.upper)):
            await asyncio.sleep(0.05)
    sinks = [entry.id for entry in catalog.objects if entry.kind == "sink"]
    while any(upper_of(id_, world.sinks) <= time for id_ in sinks):
        await asyncio.sleep(0.05)


def _numbers(held: ShardHistory) -> set[object]:
    return {row[0] for row, _, _ in held.updates}


async def _readable(world: SimulatedCluster, worker: SimulatedClient, name: str) -> bool:
    """Return whether it can be read; requests under way when the faults stopped may fail once
    more."""
    failed: PenstockError | None = None
    for _ in range(20):
        client = await worker.connected()
        try:
            await client.peek(name, deadline_ms=20_000)
            return True
        except EXCUSED as error:
            failed = error
            if isinstance(error, DeadlineExceeded):
                break
            await worker.leave()
            await asyncio.sleep(0.5)
    world.fail(
        CheckerViolation(f"liveness: no read of {name} in the calm: {failed!r}; {doing(world)}")
    )
    return False


async def drop_all(world: SimulatedCluster, worker: SimulatedClient) -> None:
    """Drop all objects, the latest first, and wait until no trace of them is left."""
    shared = worker.shared
    for made in shared.subscriptions:
        if made.task is not None:
            made.task.cancel()
            await asyncio.wait([made.task])
    seen: set[str] = set()
    while left := [e for e in world.history.catalog.objects if e.kind != "source table"]:
        entry = left[-1]
        seen |= {each.id for each in left}
        try:
            client = await worker.connected()
            if entry.kind == "source":
                await client.drop_source(entry.name)
            elif entry.kind == "sink":
                await client.drop_sink(entry.name)
            else:
                await client.drop(entry.name)
        except (PenstockError, InvalidUsage) as error:
            if {each.id for each in world.history.catalog.objects} <= seen:
                world.fail(CheckerViolation(f"liveness: drop {entry.name} in the calm: {error!r}"))
                return
            # Retry: a statement whose client is gone has created an object meanwhile.
    await worker.leave()
    await check_rest(world)
