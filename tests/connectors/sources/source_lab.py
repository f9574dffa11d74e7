"""Sources driven as the ingest task drives them, on a loop of virtual time."""

from __future__ import annotations

from collections import Counter as Bag
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pyarrow as pa

from actors.connectors.sources.source import (
    ConnectorContext,
    PositionMark,
    RowsWithdrawn,
    RunJob,
    SourceConnector,
    SourceExport,
    SourceIdle,
    SourceRows,
    no_engine,
)
from actors.model.plan.schema import DIFF
from actors.runtime.settings import Settings
from actors.testing.virtual_time import VirtualClock, VirtualTimeLoop

R = TypeVar("R")


def on_virtual_time(main: Callable[[], Awaitable[R]]) -> R:
    """Runs to the end; a wait for ever is a `VirtualDeadlock`."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def around(
    scratch: Path = Path("/nowhere"), run_job: RunJob = no_engine, **settings: Any
) -> ConnectorContext:
    """Surroundings with a virtual clock."""
    return ConnectorContext(VirtualClock(), Settings(**settings), scratch, run_job)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decimals as text: many times faster to take out."""
    return column.cast(pa.string()) if pa.types.is_decimal(column.type) else column


class Contents:
    """What a source's exports hold, as bags of rows; also between marks."""

    def __init__(self) -> None:
        self.bags: dict[str, Bag[tuple[Any, ...]]] = {}
        self.waiting: list[SourceRows] = []
        self.columns: dict[str, list[str]] = {}
        self.marks: list[PositionMark] = []
        self.given: list[SourceRows] = []

    def take(self, given: Any) -> None:
        """Rows wait for their mark; at a mark no row may be there less than never."""
        if isinstance(given, SourceRows):
            assert given.updates.column_names[-1] == DIFF
            assert given.updates.schema.field(DIFF).type == pa.int64()
            assert given.updates.num_rows > 0
            self.columns[given.export] = given.updates.column_names[:-1]
            self.waiting.append(given)
        elif isinstance(given, RowsWithdrawn):
            self.waiting = [rows for rows in self.waiting if rows.export != given.export]
        elif isinstance(given, PositionMark):
            self.marks.append(given)
            touched: set[tuple[str, tuple[Any, ...]]] = set()
            for rows in self.waiting:
                bag = self.bags.setdefault(rows.export, Bag())
                columns = [_plain(column).to_pylist() for column in rows.updates.columns]
                for *row, diff in zip(*columns, strict=True):
                    assert diff != 0
                    bag[tuple(row)] += diff
                    if bag[tuple(row)] <= 0:
                        touched.add((rows.export, tuple(row)))
            for export, found in touched:
                assert self.bags[export][found] >= 0
                if not self.bags[export][found]:
                    del self.bags[export][found]
            self.given += self.waiting
            self.waiting = []

    @staticmethod
    def wait_for_tick(folder: Path) -> None:
        """Until what changes next has a later time than all that is there: file systems tell the
        time of a change in ticks, of some ms at times."""
        before = max(path.stat().st_ctime_ns for path in folder.iterdir())
        probe = folder.with_name("tick")
        probe.touch()
        while probe.stat().st_ctime_ns <= before:
            probe.touch()
        probe.unlink()

    @property
    def position(self) -> str | None:
        """Of the last mark."""
        return self.marks[-1].position if self.marks else None


async def drive(
    source: SourceConnector,
    exports: Sequence[SourceExport],
    contents: Contents,
    *,
    marks: int | None = None,
    ms: float | None = None,
) -> None:
    """Opens the source after the last mark and takes what it gives: so many marks, or until it is
    idle, or for so long. What came after the last mark is lost, as in a crash."""
    contents.waiting = []
    await source.open(exports, contents.position)
    try:
        with anyio.move_on_after(None if ms is None else ms / 1000):
            while marks is None or marks > 0:
                given = await source.next()
                if isinstance(given, SourceIdle):
                    if ms is None:
                        break
                    continue
                contents.take(given)
                if isinstance(given, PositionMark):
                    await source.taken(given.position)
                    marks = None if marks is None else marks - 1
    finally:
        await source.close()
