"""Stages rows that a source has returned and that are not durable yet. Pure.

Theory of operation. Rows arrive in pieces. A mark makes all pieces before it *complete*: they
belong to one position and become durable with it. One batch is committed at a time, and later
pieces accumulate meanwhile, so batches grow if commits are slow.

A batch has one time: the current time, but never below the upper. It is chosen when the batch is
taken, or when the first rows of a long transaction are *spilled*: written as parts that are not
appended yet, so that a transaction of any size needs little memory.

Rules:
- Rows after the last mark (*open* rows) are never in a batch.
- Rows are spilled only when no rows are complete and no batch is being committed. Half of the rows
  that may be staged are spilled, so that more can arrive meanwhile; until the parts are written
  (`spill_ended`), only rows may arrive.
- An export that failed accepts no more rows, even after a restart.
- A source is asked for another piece only while there is room for it (`has_room`): backpressure.

Invariants (`validate`): ``bytes == open + complete``; a time is chosen if and only if there are
spilled parts; after a failure, no rows of that export are staged after its last mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sources.source import ExportFailed, PositionMark, SourceRows
from actors.durable.persist import BatchPart
from actors.model.plan.schema import DIFF
from actors.model.plan.updates import at_time
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Frontier, Time
from actors.runtime.threshold_probes import TRANSACTION_BYTES

GATHER_MS_MAX: Final = 100
_GATHER_SHARE: Final = 8


class SourceFault(PenstockError):
    """A source broke a rule of `sources.source`, which is a bug."""


class IngestBatch(msgspec.Struct, frozen=True):
    """The rows of one append, all at one time."""

    time: Time
    tables: dict[str, tuple[pa.Table, ...]]
    """Rows with `TIME`, by export."""
    parts: dict[str, tuple[BatchPart, ...]]
    """Spilled parts, by export."""
    position: str
    outside_ms: int | None
    messages: int
    failed: tuple[ExportFailed, ...]
    filled: frozenset[str]
    rows: int
    rows_inserted: int
    bytes: int


class _Stage:
    """Open or complete rows and parts, by export."""

    def __init__(self) -> None:
        self.tables: dict[str, list[pa.Table]] = {}
        """Rows in memory, by export."""
        self.parts: dict[str, list[BatchPart]] = {}
        """Spilled parts, by export."""
        self.inserted: dict[str, int] = {}
        """Number of insertions among the rows, by export."""
        self.rows = 0
        """Number of rows in memory and in parts."""
        self.bytes = 0
        """Size of the rows in memory."""

    def __bool__(self) -> bool:
        return bool(self.tables or self.parts)

    def add(self, export: str, updates: pa.Table) -> None:
        self.tables.setdefault(export, []).append(updates)
        self.rows += updates.num_rows
        self.bytes += updates.nbytes
        inserted = pc.sum(pc.greater(updates[DIFF], 0)).as_py() or 0
        self.inserted[export] = self.inserted.get(export, 0) + inserted

    def join(self, other: _Stage) -> None:
        for export, tables in other.tables.items():
            self.tables.setdefault(export, []).extend(tables)
        for export, parts in other.parts.items():
            self.parts.setdefault(export, []).extend(parts)
        for export, inserted in other.inserted.items():
            self.inserted[export] = self.inserted.get(export, 0) + inserted
        self.rows += other.rows
        self.bytes += other.bytes

    def without(self, export: str) -> list[BatchPart]:
        """Remove an export's rows; return its parts."""
        for table in self.tables.pop(export, ()):
            self.rows -= table.num_rows
            self.bytes -= table.nbytes
        self.inserted.pop(export, None)
        parts = self.parts.pop(export, [])
        self.rows -= sum(part.rows for part in parts)
        return parts


class IngestStaging:
    """The open and complete rows of one source. `bytes_max` limits the staged bytes; a single piece
    may exceed it."""

    def __init__(self, exports: Iterable[str], failed: Iterable[str], bytes_max: int) -> None:
        self._exports = frozenset(exports)
        self.failed = set(failed)
        """Exports that failed. They accept no more rows."""
        self.bytes_max = bytes_max
        self._open = _Stage()
        self._complete = _Stage()
        self._mark: PositionMark | None = None
        """The last mark; None if no rows are complete."""
        # External changes, filled exports, and the newest commit time, up to the last mark.
        self._messages = 0
        self._filled: frozenset[str] = frozenset()
        self._outside_ms: int | None = None
        self._failing: list[ExportFailed] = []
        """Failures since the last mark."""
        self._failing_complete: list[ExportFailed] = []
        """Failures up to the last mark, not in a batch yet."""
        self._time: Time | None = None
        """Time of the spilled parts; None if there are none."""
        self._bytes_spilling = 0
        """Bytes taken out by `spill` that are not durable yet."""
        self._gathering_since: Time | None = None
        """Time since which complete rows have been waiting for more; None if none wait."""

    # -- input ---------------------------------------------------------------------------------

    def rows(self, given: SourceRows) -> None:
        """Stage a piece of rows. Raises `SourceFault` for an unknown export."""
        self._check(given.export)
        if given.export not in self.failed and given.updates.num_rows:
            self._open.add(given.export, given.updates)

    def fail(self, given: ExportFailed) -> list[BatchPart]:
        """Mark an export as failed. Return the parts of its open rows, to be discarded."""
        self._check(given.export)
        if given.export in self.failed:
            return []
        self.failed.add(given.export)
        self._failing.append(given)
        return self.forget(given.export)

    def forget(self, export: str) -> list[BatchPart]:
        """Drop an export's open rows. Return their parts, to be discarded."""
        parts = self._open.without(export)
        self.settle()
        return parts

    def mark(self, given: PositionMark) -> None:
        """Make all open rows complete, at the mark's position."""
        self._complete.join(self._open)
        self._open = _Stage()
        self._failing_complete += self._failing
        self._failing = []
        self._mark = given
        self._messages += given.messages
        self._filled |= set(given.filled)
        if given.outside_ms is not None:
            self._outside_ms = given.outside_ms

    def _check(self, export: str) -> None:
        if export not in self._exports:
            raise SourceFault(
                f"the source returned rows of {export!r}, which is not one of its exports"
            )

    def open_rows(self, export: str) -> tuple[tuple[pa.Table, ...], tuple[BatchPart, ...]]:
        """Return the rows and parts of an export after the last mark."""
        stage = self._open
        return tuple(stage.tables.get(export, ())), tuple(stage.parts.get(export, ()))

    # -- output --------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Return the size of the rows in memory, without batches that were taken."""
        return self._open.bytes + self._complete.bytes + self._bytes_spilling

    @property
    def rows_staged(self) -> int:
        """Return the number of staged rows, without batches that were taken."""
        return self._open.rows + self._complete.rows

    @property
    def has_room(self) -> bool:
        """Return whether there is room for another piece."""
        return self.bytes < self.bytes_max

    @property
    def complete(self) -> bool:
        """Return whether a batch can be taken."""
        return self._mark is not None

    @property
    def spilled(self) -> bool:
        """Return whether there are parts at a chosen time, which the upper must not pass."""
        return self._time is not None

    @property
    def must_spill(self) -> bool:
        """Return whether rows must be spilled to make room. Only valid while no batch is being
        committed."""
        full = 2 * self._open.bytes >= self.bytes_max
        return TRANSACTION_BYTES.crossed(full) and not self.complete

    def gathers_ms(self, now: Time) -> int:
        """Return how long complete rows should wait for more before they are taken, in ms; 0 to
        take them now."""
        if self._gathering_since is None:
            self._gathering_since = now
        if self._outside_ms is None or not self.has_room or self._failing_complete or self._filled:
            return 0
        # An eighth of the rows' age: a source that catches up makes few commits, and one that is up
        # to date never waits.
        wait = min(GATHER_MS_MAX, max(0, now - self._outside_ms) // _GATHER_SHARE)
        return min(wait, max(0, self._gathering_since + wait - now))

    def spill(self, now: Time, upper: Frontier) -> dict[str, pa.Table]:
        """Take all open rows out, with their time, to be written as parts (`wrote`). Call
        `spill_ended` afterwards."""
        assert self.must_spill, "there is room, or a batch must be committed first"
        assert not self._bytes_spilling, "one spill at a time"
        # None of these rows are complete, so one time beyond everything durable is right for all of
        # them.
        stage, time = self._open, self.fix_time(now, upper)
        tables = {
            export: at_time(pa.concat_tables(tables), time)
            for export, tables in stage.tables.items()
        }
        self._bytes_spilling = stage.bytes
        stage.tables, stage.bytes = {}, 0
        stage.rows = sum(part.rows for parts in stage.parts.values() for part in parts)
        return tables

    def spill_ended(self) -> None:
        """Record that all rows taken out are durable."""
        self._bytes_spilling = 0

    def fix_time(self, now: Time, upper: Frontier) -> Time:
        """Return the time of parts that are about to be written; choose one if none is chosen."""
        assert not self.complete, "complete rows may belong to an earlier time"
        if self._time is None:
            self._time = max(now, upper)
        return self._time

    def wrote(self, export: str, parts: Sequence[BatchPart]) -> None:
        """Replace spilled rows by their durable parts, which are not appended yet."""
        self._open.parts.setdefault(export, []).extend(parts)
        self._open.rows += sum(part.rows for part in parts)

    def take(self, now: Time, upper: Frontier) -> IngestBatch:
        """Take all complete rows as a batch."""
        mark, stage = self._mark, self._complete
        assert mark is not None, "nothing is complete"
        assert not self._bytes_spilling, "parts of it are not durable yet"
        time = max(now, upper) if self._time is None else self._time
        batch = IngestBatch(
            time,
            {
                export: tuple(at_time(table, time) for table in tables)
                for export, tables in stage.tables.items()
            },
            {export: tuple(parts) for export, parts in stage.parts.items()},
            mark.position,
            self._outside_ms,
            self._messages,
            tuple(self._failing_complete),
            self._filled,
            stage.rows,
            sum(stage.inserted.values()),
            stage.bytes,
        )
        self._complete = _Stage()
        self._mark, self._messages, self._outside_ms = None, 0, None
        self._failing_complete, self._filled = [], frozenset()
        self._gathering_since = None
        self.settle()
        return batch

    def settle(self) -> None:
        """Release the chosen time if no part has it."""
        # Open rows are never spilled while others are complete, so no part is left once a batch is
        # taken.
        if not self._open.parts and not self._complete.parts:
            self._time = None

    def parts(self) -> list[BatchPart]:
        """Return all spilled parts that are not in a batch, to be discarded when the task ends."""
        stages = (self._open, self._complete)
        return [p for stage in stages for parts in stage.parts.values() for p in parts]

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for stage in (self._open, self._complete):
            tables = [table for tables in stage.tables.values() for table in tables]
            parts = [part for parts in stage.parts.values() for part in parts]
            assert stage.bytes == sum(table.nbytes for table in tables)
            assert stage.rows == sum(table.num_rows for table in tables) + sum(
                part.rows for part in parts
            )
        assert (self._time is None) == (not self.parts()), (self._time, self.parts())
        assert not (self.failed & set(self._open.tables))
        if not self.complete:
            assert not self._complete
