"""Copies from files in a run: all rows at one time, or none; once per uuid, however often
requested.

A copy is on record as a write is, so `WritesChecker` checks that its rows are there, once, at the
acknowledged time. Checked here besides: a repeated request under its uuid gets the same rows and
time.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from actors.runtime.errors import ConnectionBroken, PenstockError, ResourceClosed
from tests.simulators.service.checkers import WriteRecord
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.queries import Row

if TYPE_CHECKING:
    from tests.simulators.service.run import SimulatedClient

COLUMNS = ("id", "k", "v")


async def copy(worker: SimulatedClient, table: str, rows: list[Row], asked: int) -> None:
    """Copy rows, with up to `asked` requests until one is answered. Raises the client's errors; the
    copy is on record in any case."""
    world = worker.world
    number = len(world.writes.records)
    path = world.directory / f"copy-{number}.parquet"
    columns = [pa.array([row[index] for row in rows], pa.int64()) for index in range(3)]
    pq.write_table(pa.table(columns, names=list(COLUMNS)), path)
    os.utime(path, ns=(number + 1, number + 1))
    record = WriteRecord({table: [(row, 1) for row in rows]})
    world.writes.records.append(record)
    open_ = False
    """True if an earlier request's outcome is indeterminate."""
    for attempt in range(asked):
        client = await worker.connected()
        try:
            done = await client.copy_from(table, str(path), "parquet", uuid=f"copy {number}")
        except PenstockError as error:
            world.trace.note("copy", number, type(error).__name__)
            if error.determinate and not open_:
                record.refused = f"{type(error).__name__}: {error}"
                raise
            open_ = True
            if attempt + 1 == asked:
                raise
            if isinstance(error, ConnectionBroken | ResourceClosed):
                await worker.leave()
            await asyncio.sleep(0.05)
            continue
        _note(worker, record, done.rows, done.time)
        break
    if asked > 1 and rows:
        client = await worker.connected()
        again = await client.copy_from(table, str(path), "parquet", uuid=f"copy {number}")
        if (again.rows, again.time, again.repeated) != (len(rows), record.time, True):
            raise CheckerViolation(f"copies: asked again, {record.time} became {again}")
    worker.mine[table] += rows


def _note(worker: SimulatedClient, record: WriteRecord, rows: int, time: int) -> None:
    (changes,) = record.changes.values()
    if rows != len(changes):
        raise CheckerViolation(f"copies: {len(changes)} rows were copied, {rows} were told")
    record.time = time
    worker.shared.times.append(time)
