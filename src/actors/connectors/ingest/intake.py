"""Turns the output of a source into rows to stage: resolves upserts and truncates.

Theory of operation. The output waits in a queue and is processed in order. Rows, marks and failures
are staged immediately. Upserts of an export are collected until a mark, or until something else
arrives for that export, and are then resolved against its contents (`ingest.contents`). A truncate
drops the export's staged rows since the last mark, and retracts the durable ones, part by part.

Rules. The caller runs effects (`Work`) one at a time; nothing else is processed meanwhile.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias, assert_never

import msgspec
import pyarrow as pa

from actors.connectors.ingest.contents import KeyedContents
from actors.connectors.ingest.shards import IngestShards
from actors.connectors.ingest.staging import IngestStaging
from actors.connectors.sources.source import (
    ExportFailed,
    ExportTruncated,
    Given,
    PositionMark,
    RowsWithdrawn,
    SourceIdle,
    SourceRows,
    SourceUpserts,
)
from actors.durable.arrangement import ArrangementStatistics
from actors.durable.persist import BatchPart
from actors.model.plan.schema import DIFF, ERROR
from actors.model.plan.updates import at_time, negate
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Time


class ResolveUpserts(msgspec.Struct, frozen=True, gc=False):
    """Effect: convert an export's upserts to updates."""

    export: str
    pieces: tuple[pa.Table, ...]


class FeedContents(msgspec.Struct, frozen=True, gc=False):
    """Effect: add rows to an export's contents."""

    rows: SourceRows


class RetractExport(msgspec.Struct, frozen=True, gc=False):
    """Effect: retract an export's durable rows at `time`."""

    export: str
    time: Time


class DiscardStaged(msgspec.Struct, frozen=True, gc=False):
    """Effect: delete parts that will not be appended."""

    parts: tuple[BatchPart, ...]


Work: TypeAlias = ResolveUpserts | FeedContents | RetractExport | DiscardStaged


class _Turn(enum.Enum):
    """Next action after the first item of the queue, if that needs no effect."""

    CONTINUE = "continue"
    WAIT = "wait"


class IntakeDone(msgspec.Struct, frozen=True, gc=False):
    """Result of an effect: rows to stage, or parts that are already written for the export
    `emptied`."""

    rows: SourceRows | None = None
    emptied: str = ""
    parts: tuple[BatchPart, ...] = ()


class SourceIntake:
    """Queue of a source's output, and the contents of exports that have upserts."""

    def __init__(
        self,
        staging: IngestStaging,
        shards: IngestShards,
        contents: Callable[[str], KeyedContents],
        buffer_bytes_max: int,
    ) -> None:
        self._staging = staging
        self._shards = shards
        self._make = contents
        self._contents: dict[str, KeyedContents] = {}
        """Contents by key of the exports that have had upserts."""
        self._queue: deque[Given] = deque()
        """Output of the source that is not processed yet."""
        self._upserts: dict[str, list[pa.Table]] = {}
        """Upserts collected for each export, in order."""
        self._bytes = 0
        """Total size of `_upserts`."""
        self._bytes_max = buffer_bytes_max

    @property
    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return not self._queue

    @property
    def bytes(self) -> int:
        """Return the size of the collected upserts in bytes."""
        return self._bytes

    def give(self, given: Given) -> None:
        """Add output of the source to the queue."""
        self._queue.append(given)

    def take(self, *, settled: bool, time: Callable[[], Time]) -> Work | None:
        """Stage everything up to the first item that needs an effect, and return that effect; None
        if there is none, or it must wait.

        `settled` means that no batch is complete or being committed. `time` fixes a time for parts.
        """
        while self._queue:
            given = self._queue[0]
            match given:
                case SourceRows():
                    work = self._rows(given, settled)
                case SourceUpserts():
                    work = self._gather(given, settled)
                case ExportTruncated():
                    work = self._truncate(given, settled, time)
                case RowsWithdrawn():
                    work = self._withdraw(given)
                case PositionMark():
                    work = self._mark(given, settled)
                case ExportFailed():
                    work = self._fail(given)
                case SourceIdle():
                    work = self._next()
                case _:
                    assert_never(given)
            if work is _Turn.WAIT:
                return None
            if work is not _Turn.CONTINUE:
                return work
        return None

    def take_rows(self) -> None:
        """Stage rows from the head of the queue as long as they need no effect. Safe while other
        rows are being spilled."""
        while self._queue:
            given = self._queue[0]
            if not isinstance(given, SourceRows):
                return
            if given.export in self._upserts or given.export in self._contents:
                return
            self._staging.rows(given)
            self._queue.popleft()

    def _next(self, work: Work | None = None) -> Work | _Turn:
        """Remove the first item from the queue."""
        self._queue.popleft()
        return _Turn.CONTINUE if work is None else work

    def _rows(self, given: SourceRows, settled: bool) -> Work | _Turn:
        if given.export in self._upserts:
            return self._resolve(given.export, settled)
        if given.export in self._contents:
            return self._next(FeedContents(given))
        self._staging.rows(given)
        return self._next()

    def _gather(self, given: SourceUpserts, settled: bool) -> Work | _Turn:
        if given.export in self._staging.failed:
            return self._next()
        if self._bytes + given.changes.nbytes > self._bytes_max and self._upserts:
            # Limits memory: the next mark may be far away.
            return self._resolve(next(iter(self._upserts)), settled)
        self._upserts.setdefault(given.export, []).append(given.changes)
        self._bytes += given.changes.nbytes
        return self._next()

    def _truncate(
        self, given: ExportTruncated, settled: bool, time: Callable[[], Time]
    ) -> Work | _Turn:
        export = given.export
        if export in self._staging.failed:
            return self._next()
        # Only if no batch is complete or being committed do durable and open rows make up all rows.
        if not settled:
            return _Turn.WAIT
        # Upserts before the truncate no longer matter.
        self._drop(export)
        parts = self._staging.forget(export)
        if parts:
            # The truncate stays in the queue, and is processed again after these parts are deleted.
            return DiscardStaged(tuple(parts))
        return self._next(RetractExport(export, time()))

    def _withdraw(self, given: RowsWithdrawn) -> Work | _Turn:
        assert given.export not in self._contents, "rows cannot be removed from keyed contents"
        parts = self._staging.forget(given.export)
        return self._next(DiscardStaged(tuple(parts)) if parts else None)

    def _mark(self, given: PositionMark, settled: bool) -> Work | _Turn:
        # A mark comes after the rows of all upserts before it.
        if self._upserts:
            return self._resolve(next(iter(self._upserts)), settled)
        self._staging.mark(given)
        return self._next()

    def _fail(self, given: ExportFailed) -> Work | _Turn:
        self._drop(given.export)
        parts = self._staging.fail(given)
        return self._next(DiscardStaged(tuple(parts)) if parts else None)

    def _drop(self, export: str) -> None:
        self._bytes -= sum(piece.nbytes for piece in self._upserts.pop(export, ()))

    def _resolve(self, export: str, settled: bool) -> Work | _Turn:
        # As in `_truncate`: the contents are loaded from durable and open rows.
        if export not in self._contents and not settled:
            return _Turn.WAIT
        pieces = tuple(self._upserts[export])
        self._drop(export)
        return ResolveUpserts(export, pieces)

    # -- effects ---------------------------------------------------------------------------------

    async def do(self, work: Work) -> IntakeDone:
        """Run an effect. Raises `PenstockError`."""
        match work:
            case ResolveUpserts(export, pieces):
                contents = self._contents.get(export)
                if contents is None:
                    contents = self._make(export)
                    await contents.load(self._all_rows(export))
                    self._contents[export] = contents
                return IntakeDone(SourceRows(export, await contents.changes(pieces)))
            case FeedContents(rows):
                await self._contents[rows.export].feed(rows.updates)
                return IntakeDone(rows)
            case RetractExport(export, time):
                return await self._empty(export, time)
            case DiscardStaged(parts):
                await self._shards.discard(list(parts))
                return IntakeDone()
            case _:
                assert_never(work)

    async def _all_rows(self, export: str) -> AsyncIterator[pa.Table]:
        async for table in self._shards.rows(export):
            yield _plain(table)
        tables, parts = self._staging.open_rows(export)
        for part in parts:
            yield _plain(await self._shards.fetch(export, part))
        for table in tables:
            yield table

    async def _empty(self, export: str, time: Time) -> IntakeDone:
        written: list[BatchPart] = []
        try:
            async for table in self._shards.rows(export):
                names = [*self._shards.exports[export].schema.names, DIFF]
                gone = negate(_plain(table).select(names))
                written += await self._shards.write(export, at_time(gone, time))
        except PenstockError:
            await self._shards.discard(written)
            raise
        contents = self._contents.get(export)
        if contents is not None:
            await contents.clear()
        return IntakeDone(emptied=export, parts=tuple(written))

    def done(self, done: IntakeDone) -> None:
        """Stage the result of an effect."""
        if done.rows is not None:
            self._staging.rows(done.rows)
        if done.parts:
            self._staging.wrote(done.emptied, done.parts)
        self._staging.settle()

    def held(self) -> dict[str, ArrangementStatistics]:
        """Return the size of the contents of each export, by its external name."""
        found = {name: contents.statistics() for name, contents in self._contents.items()}
        return {name: each for name, each in found.items() if each is not None}

    async def close(self) -> None:
        """Remove the contents from scratch."""
        for contents in self._contents.values():
            await contents.close()


def _plain(table: pa.Table) -> pa.Table:
    return table.drop_columns([ERROR]) if ERROR in table.column_names else table
