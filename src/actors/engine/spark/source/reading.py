"""Runs one task of Spark: reads its parts in order, under the lease that it was given.

Between parts the lease is renewed once half of its time has passed. If it is lost, the task
acquires it again or raises `LeaseLost`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark.sql.datasource import InputPartition

from actors.durable.persist.attach import open_blobs
from actors.durable.persist.shard import BatchPart
from actors.engine.spark.source.planning import PlannedRead, open_stores, read_part
from actors.engine.spark.source.read_tasks import ReadTask, SuspectHashes
from actors.engine.spark.source.rows import (
    UpdateSum,
    batches,
    drop_suspects,
    select_suspects,
    updates_of,
)
from actors.model.plan.schema import DIFF, TIME
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import SystemClock

log = logging.getLogger("penstock.spark")


class ShardPartition(InputPartition):  # type: ignore[misc]
    """One task, in the form in which Spark sends it to an executor."""

    def __init__(self, number: int, task: ReadTask, planned: PlannedRead) -> None:
        self.number = number
        self.task = task
        self.planned = planned


def read(
    planned: PlannedRead, task: ReadTask, number: int, shape: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a task. Raises `LeaseLost`, `CorruptData`, `StorageError`."""
    with start_blocking_portal("asyncio") as portal:
        try:
            yield from _read(portal, planned, task, shape)
        except GeneratorExit:  # Spark needs no more rows, because of a LIMIT.
            _report_done(portal, planned, number)
            raise
        _report_done(portal, planned, number)


def _report_done(portal: BlockingPortal, planned: PlannedRead, number: int) -> None:
    try:
        portal.call(_done, planned, number)
    except PenstockError as error:  # The lease expires.
        log.warning(
            "cannot drop a lease on shard %s, which stays until it expires: %s",
            planned.loaded.shard,
            error,
        )


def _read(
    portal: BlockingPortal, planned: PlannedRead, task: ReadTask, shape: pa.Schema
) -> Iterator[pa.RecordBatch]:
    loaded, window = planned.loaded, planned.window
    suspects = None if task.suspects is None else SuspectHashes.unpacked(task.suspects)
    names = [*loaded.schema.names, *((TIME, DIFF) if window.changes else (DIFF,))]
    sums = UpdateSum(loaded.options.sum_rows_max)
    for part, data in _fetched(portal, planned, task):
        found = updates_of(part, data, planned.schemas, loaded.schema, window, planned.checks)
        updates = found.select(names)
        if task.share is None:
            yield from batches(drop_suspects(updates, suspects), window, shape)
        else:
            sums.add(select_suspects(updates, suspects, task.share))
    rest = sums.sums()
    if rest is not None:
        yield from batches(rest, window, shape)


def _fetched(
    portal: BlockingPortal, planned: PlannedRead, task: ReadTask
) -> Iterator[tuple[BatchPart, bytes]]:
    """Yield parts with their bytes."""
    loaded = planned.loaded
    keys = [part.key for part in task.parts if part.key]
    if keys:
        portal.call(_keep, planned, keys)
    blob = portal.call(open_blobs, loaded.options.place, loaded.settings, SystemClock())
    clock = SystemClock()
    kept_ms = clock.monotonic_ms()
    following: Future[bytes] | None = None
    for index, part in enumerate(task.parts):
        # Tested before half of the lease has passed, since a part may take long.
        if keys and clock.monotonic_ms() - kept_ms > loaded.settings.reader_lease_ms / 4:
            portal.call(_keep, planned, keys)
            kept_ms = clock.monotonic_ms()
        current = following or portal.start_task_soon(read_part, blob, part)
        following = None
        data = current.result()
        if index + 1 < len(task.parts):
            # The next part is fetched while Spark processes the rows of this one.
            following = portal.start_task_soon(read_part, blob, task.parts[index + 1])
        yield part, data


async def _keep(planned: PlannedRead, keys: list[str]) -> None:
    loaded = planned.loaded
    if planned.handed is not None:
        async with open_stores(loaded.options, loaded.settings) as stores:
            await stores.leases.keep(planned.handed, keys)


async def _done(planned: PlannedRead, number: int) -> None:
    loaded = planned.loaded
    if planned.handed is not None:
        async with open_stores(loaded.options, loaded.settings) as stores:
            await stores.leases.done(planned.handed, number)
