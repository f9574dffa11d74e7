"""From what a source gives to rows that can be staged: upserts find their old rows, truncates take
back what stands there.

Theory of operation. What is given waits in a queue and is taken in order. Rows, marks and failures
go straight on. Upserts of an export gather until a mark, or until something else of that export
comes, and are then resolved against its contents (`ingest.contents`). A truncate forgets what is
staged of the export behind the last mark, and takes back what is durable, part by part.

Rules. Work that waits (`Work`) is done by whoever drives this, one at a time; nothing else is taken
meanwhile. Contents are loaded, and a truncate is done, only when no batch is complete or being
committed (`settled`): so durable rows and open ones are all there is.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias, assert_never

import msgspec
import pyarrow as pa

from actors.arrangement import ArrangementStatistics
from actors.errors import PenstockError
from actors.ingest.contents import KeyedContents
from actors.ingest.shards import IngestShards
from actors.ingest.staging import Staging
from actors.persist import Part
from actors.plan.schema import DIFF, ERROR
from actors.plan.updates import at_time, negate
from actors.progress import Time
from actors.sources.source import (
    ExportFailed,
    Given,
    Idle,
    Mark,
    Rows,
    Truncated,
    Upserts,
)


class Resolve(msgspec.Struct, frozen=True, gc=False):
    """Upserts of an export are to become rows."""

    export: str
    pieces: tuple[pa.Table, ...]


class Feed(msgspec.Struct, frozen=True, gc=False):
    """Rows of an export whose contents are kept."""

    rows: Rows


class Empty(msgspec.Struct, frozen=True, gc=False):
    """An export's durable rows are to be taken back, at `time`."""

    export: str
    time: Time


class Throw(msgspec.Struct, frozen=True, gc=False):
    """Parts that were written for nothing."""

    parts: tuple[Part, ...]


Work: TypeAlias = Resolve | Feed | Empty | Throw


class _Turn(enum.Enum):
    """What follows from the first in the queue, where it is no work."""

    GO_ON = "go on"
    WAIT = "wait"


class Done(msgspec.Struct, frozen=True, gc=False):
    """What work came to: rows to be staged, or parts that are written already."""

    rows: Rows | None = None
    emptied: str = ""
    parts: tuple[Part, ...] = ()


class Intake:
    """See the module's text."""

    def __init__(
        self,
        staging: Staging,
        shards: IngestShards,
        contents: Callable[[str], KeyedContents],
        buffer_bytes_max: int,
    ) -> None:
        self._staging = staging
        self._shards = shards
        self._make = contents
        self._contents: dict[str, KeyedContents] = {}
        self._queue: deque[Given] = deque()
        self._upserts: dict[str, list[pa.Table]] = {}
        self._bytes = 0
        self._bytes_max = buffer_bytes_max

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queue

    @property
    def bytes(self) -> int:
        """Of upserts that gather."""
        return self._bytes

    def give(self, given: Given) -> None:
        """One thing more."""
        self._queue.append(given)

    def take(self, *, settled: bool, time: Callable[[], Time]) -> Work | None:
        """Takes all that can be taken; work to be done before the rest can be, if there is any.
        `settled`: nothing is complete or being committed. `time` fixes one for parts."""
        while self._queue:
            given = self._queue[0]
            match given:
                case Rows():
                    work = self._rows(given, settled)
                case Upserts():
                    work = self._gather(given, settled)
                case Truncated():
                    work = self._truncate(given, settled, time)
                case Mark():
                    work = self._mark(given, settled)
                case ExportFailed():
                    work = self._fail(given)
                case Idle():
                    work = self._next()
                case _:
                    assert_never(given)
            if work is _Turn.WAIT:
                return None
            if work is not _Turn.GO_ON:
                return work
        return None

    def take_rows(self) -> None:
        """Takes rows that go straight on, while others are being spilled: as far as nothing but
        such rows comes first."""
        while self._queue:
            given = self._queue[0]
            if not isinstance(given, Rows):
                return
            if given.export in self._upserts or given.export in self._contents:
                return
            self._staging.rows(given)
            self._queue.popleft()

    def _next(self, work: Work | None = None) -> Work | _Turn:
        """The first in the queue is taken."""
        self._queue.popleft()
        return _Turn.GO_ON if work is None else work

    def _rows(self, given: Rows, settled: bool) -> Work | _Turn:
        if given.export in self._upserts:
            return self._resolve(given.export, settled)
        if given.export in self._contents:
            return self._next(Feed(given))
        self._staging.rows(given)
        return self._next()

    def _gather(self, given: Upserts, settled: bool) -> Work | _Turn:
        if given.export in self._staging.failed:
            return self._next()
        if self._bytes + given.changes.nbytes > self._bytes_max and self._upserts:
            return self._resolve(next(iter(self._upserts)), settled)
        self._upserts.setdefault(given.export, []).append(given.changes)
        self._bytes += given.changes.nbytes
        return self._next()

    def _truncate(self, given: Truncated, settled: bool, time: Callable[[], Time]) -> Work | _Turn:
        export = given.export
        if export in self._staging.failed:
            return self._next()
        if not settled:
            return _Turn.WAIT
        self._drop(export)
        parts = self._staging.forget(export)
        if parts:
            return Throw(tuple(parts))
        return self._next(Empty(export, time()))

    def _mark(self, given: Mark, settled: bool) -> Work | _Turn:
        if self._upserts:
            return self._resolve(next(iter(self._upserts)), settled)
        self._staging.mark(given)
        return self._next()

    def _fail(self, given: ExportFailed) -> Work | _Turn:
        self._drop(given.export)
        parts = self._staging.fail(given)
        return self._next(Throw(tuple(parts)) if parts else None)

    def _drop(self, export: str) -> None:
        self._bytes -= sum(piece.nbytes for piece in self._upserts.pop(export, ()))

    def _resolve(self, export: str, settled: bool) -> Work | _Turn:
        if export not in self._contents and not settled:
            return _Turn.WAIT
        pieces = tuple(self._upserts[export])
        self._drop(export)
        return Resolve(export, pieces)

    # -- work ------------------------------------------------------------------------------------

    async def do(self, work: Work) -> Done:
        """Does it. Raises `PenstockError`."""
        match work:
            case Resolve(export, pieces):
                contents = self._contents.get(export)
                if contents is None:
                    contents = self._make(export)
                    await contents.load(self._all_rows(export))
                    self._contents[export] = contents
                return Done(Rows(export, await contents.changes(pieces)))
            case Feed(rows):
                await self._contents[rows.export].feed(rows.updates)
                return Done(rows)
            case Empty(export, time):
                return await self._empty(export, time)
            case Throw(parts):
                await self._shards.discard(list(parts))
                return Done()
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

    async def _empty(self, export: str, time: Time) -> Done:
        written: list[Part] = []
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
        return Done(emptied=export, parts=tuple(written))

    def done(self, done: Done) -> None:
        """Work is done: its rows are staged."""
        if done.rows is not None:
            self._staging.rows(done.rows)
        if done.parts:
            self._staging.wrote(done.emptied, done.parts)
        self._staging.settle()

    def held(self) -> dict[str, ArrangementStatistics]:
        """Return what is kept of the contents of exports, by their names outside."""
        found = {name: contents.statistics() for name, contents in self._contents.items()}
        return {name: each for name, each in found.items() if each is not None}

    async def close(self) -> None:
        """Removes what was kept in scratch."""
        for contents in self._contents.values():
            await contents.close()


def _plain(table: pa.Table) -> pa.Table:
    return table.drop_columns([ERROR]) if ERROR in table.column_names else table
