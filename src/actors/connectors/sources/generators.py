"""Sources that generate their changes: deterministic, at a rate, resumable at any event.

Theory of operation. A *series* is pure: it gives the changes of a range of events, and the whole
contents after a number of events, as functions of the configuration and those numbers alone.
`GeneratorSource` makes a source of it: by the clock it decides how many events are due, gives their
changes in pieces, then a mark. The position is the number of events, and the exports that were
filled; so a restart costs nothing, however many events there were.

Rules:
- an export that the position does not name is filled with the contents at the position;
- at `rate` r, event n (from 0) is due ``(n - at + 1) / r`` seconds after the source was opened at
  event `at`: delay by a slow reader is made up for, downtime is not. Rate 0: as fast as possible;
- due events are given at most every `every_ms`, at most `EventSeries.events_at_once` before a mark;
- after `up_to` events the source is idle for ever.

A cancelled `next` may have lost a piece: such a source must be closed, and opened again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import anyio
import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources.source import (
    Given,
    PositionMark,
    SourceConfig,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceRows,
)
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import ActorClock


class GeneratorConfig(SourceConfig, frozen=True, kw_only=True):
    """Options of all generators."""

    seed: int = 0
    rate: float = 0.0
    """Events per second; 0: as fast as they are read."""
    up_to: int | None = None
    """Number of events after which the generator ends; None: never."""
    every_ms: int = 100
    """Least interval between transactions."""

    def check(self) -> None:
        """Raise `InvalidUsage` naming the option that is out of range."""
        at_least(self, rate=0, every_ms=1, seed=0)
        if self.up_to is not None:
            at_least(self, up_to=0)
        if not self.rate < 1e9:
            raise InvalidUsage(f"rate = {self.rate}: must be less than a billion a second")


def at_least(config: msgspec.Struct, **least: float) -> None:
    """Raise `InvalidUsage` when a field is less than its bound."""
    for name, bound in least.items():
        value = getattr(config, name)
        if not value >= bound:
            raise InvalidUsage(f"{name} = {value}: must be at least {bound}")


class EventSeries(Protocol):
    """A generator's changes as a function of the event number. Pure, but for `prepare` and
    `release`. Tables have all columns of their export and `DIFF`; exports that are not wanted may
    be left out."""

    @property
    def exports(self) -> tuple[SourceExport, ...]:
        """Return all exports of the series."""
        ...

    events_at_once: int
    """Number of events that make pieces of a few MiB."""
    turns: float
    """Events for each event that counts for the rate: more than 1 where some change nothing."""

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """Prepare for events from `at` on; called before anything is read. Raises `InvalidUsage`,
        `SourceUnreachable`."""
        ...

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield all rows after `at` events, of some exports, in bounded pieces. May block."""
        ...

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the changes of events `start` to ``stop - 1``. May block."""
        ...

    async def release(self) -> None:
        """Free what `prepare` made; may be called twice."""
        ...


class PreparedSeries:
    """A series that needs no preparation."""

    turns = 1.0

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """See `EventSeries`."""

    async def release(self) -> None:
        """See `EventSeries`."""


class GeneratorPosition(msgspec.Struct, frozen=True):
    """A generator's position: the number of events that the named exports hold."""

    events: int
    exports: tuple[str, ...]


class GeneratorSource:
    """A source over a series. See `connectors.sources.source.SourceConnector`."""

    def __init__(self, series: EventSeries, config: GeneratorConfig, clock: ActorClock) -> None:
        self._series = series
        self._config = config
        self._clock = clock
        self._exports: dict[str, SourceExport] = {}
        self._at = 0
        self._opened_at = 0
        self._opened_ms = 0.0
        self._marked_ms = -float("inf")
        self._pieces: Iterator[SourceRows] | None = None
        self._filling = False
        self._new: frozenset[str] = frozenset()
        """Exports that the next mark fills."""
        self._stop = 0
        self._idle_reported = False

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """See `Source.describe`."""
        self._config.check()
        return select_exports(self._series.exports, wanted)

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """See `Source.describe_added`: a table that is made up has all of its columns at once."""
        raise InvalidUsage(
            f"{export.name} is made up by its source, with all of its columns: drop its table and"
            " add it again, without leaving any out"
        )

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """See `Source.open`."""
        self._config.check()
        known = {export.name: export for export in self._series.exports}
        for export in exports:
            if export.name not in known:
                raise InvalidUsage(f"this generator has no {export.name!r}: {', '.join(known)}")
            lacking = set(export.schema.names) - set(known[export.name].schema.names)
            if lacking:
                raise InvalidUsage(f"{export.name} has no column {', '.join(sorted(lacking))}")
        came = GeneratorPosition(0, ()) if position is None else _position(position)
        self._exports = {export.name: export for export in exports}
        self._at = self._opened_at = self._stop = came.events
        new = frozenset(self._exports) - frozenset(came.exports)
        self._new = new = new | {export.name for export in exports if export.is_new}
        await self._series.prepare(self._at, frozenset(self._exports))
        if new:
            self._begin(self._series.contents(self._at, new), self._at, filling=True)
        self._opened_ms = self._clock.monotonic_ms()

    async def next(self) -> Given:
        """See `Source.next`."""
        while True:
            if self._pieces is not None:
                return await self._piece(self._pieces)
            due = self._due()
            if due > self._at:
                stop = min(due, self._at + self._series.events_at_once)
                pieces = self._series.changes(self._at, stop, self._exports.keys())
                self._begin(pieces, stop)
            elif self._at == self._config.up_to:
                if not self._idle_reported:
                    self._idle_reported = True
                    return SourceIdle()
                await anyio.sleep_forever()
            else:
                await anyio.sleep(self._wait_ms() / 1000)

    async def taken(self, position: str) -> None:
        """See `Source.taken`: there is nothing to acknowledge."""

    def lag(self) -> SourceLag:
        """See `Source.lag`. `known` is the number of events that are due by now."""
        return SourceLag(known=str(self._at if self._config.rate == 0 else self._due()))

    async def close(self) -> None:
        """See `Source.close`."""
        self._pieces = None
        await self._series.release()

    async def forget(self) -> None:
        """See `Source.forget`."""

    # -- pieces -----------------------------------------------------------------------------------

    def _begin(self, pieces: Iterator[SourceRows], stop: int, *, filling: bool = False) -> None:
        self._pieces, self._filling, self._stop = pieces, filling, stop

    async def _piece(self, pieces: Iterator[SourceRows]) -> Given:
        while True:
            rows = await self._clock.run_blocking(lambda: next(pieces, None))
            if rows is None:
                break
            export = self._exports.get(rows.export)
            # The series may give more exports and columns than are wanted.
            if export is not None and rows.updates.num_rows:
                names = [*export.schema.names, DIFF]
                return SourceRows(rows.export, rows.updates.select(names), self._filling)
        events, self._at, self._pieces = self._stop - self._at, self._stop, None
        self._marked_ms = self._clock.monotonic_ms()
        position = GeneratorPosition(self._at, tuple(sorted(self._exports)))
        text = msgspec.json.encode(position).decode()
        filled, self._new = tuple(sorted(self._new)), frozenset()
        return PositionMark(text, outside_ms=self._clock.now_ms(), messages=events, filled=filled)

    # -- pace -------------------------------------------------------------------------------------

    @property
    def _events_per_ms(self) -> float:
        return self._config.rate * self._series.turns / 1000

    def _due(self) -> int:
        """Return the number of events that should have been given by now."""
        end = self._config.up_to
        now = self._clock.monotonic_ms()
        if self._config.rate == 0:
            due = self._at + self._series.events_at_once
        elif now < self._marked_ms + self._config.every_ms:
            due = self._at
        else:
            # Rounded up a little: a timer may fire early by a rounding error.
            due = self._opened_at + int((now - self._opened_ms) * self._events_per_ms + 1e-6)
        return due if end is None else min(end, due)

    def _wait_ms(self) -> float:
        """Return the time until the next event is due, and may be given."""
        now = self._clock.monotonic_ms()
        event_ms = self._opened_ms + (self._at + 1 - self._opened_at) / self._events_per_ms
        return max(1.0, event_ms - now, self._marked_ms + self._config.every_ms - now)


def select_exports(
    exports: Sequence[SourceExport], wanted: Mapping[str, Sequence[str]] | None
) -> tuple[SourceExport, ...]:
    """Return the wanted exports without the columns to leave out. Raises `InvalidUsage` for an
    unknown name."""
    if wanted is None:
        return tuple(exports)
    known = {export.name: export for export in exports}
    chosen = []
    for name, without in wanted.items():
        export = known.get(name)
        if export is None:
            raise InvalidUsage(f"there is no {name!r}; there are: {', '.join(known)}")
        absent = [column for column in without if column not in export.schema.names]
        if absent:
            raise InvalidUsage(f"{name} has no column {', '.join(absent)} to leave out")
        kept = tuple(c for c in export.schema.columns if c.name not in without)
        if not kept:
            raise InvalidUsage(f"{name}: all of its columns are left out")
        names = {column.name for column in kept}
        # Without all of its columns a key identifies no row.
        key = export.schema.key if names.issuperset(export.schema.key) else ()
        chosen.append(SourceExport(name, TableSchema(kept, key)))
    return tuple(chosen)


def _position(text: str) -> GeneratorPosition:
    try:
        return msgspec.json.decode(text, type=GeneratorPosition)
    except msgspec.DecodeError as error:
        raise InvalidUsage(f"{text[:100]!r} is not a position of a generator: {error}") from None


def updates(
    schema: TableSchema, columns: Sequence[pa.Array | np.ndarray], diff: int | np.ndarray
) -> pa.Table:
    """Return a table of the schema's columns and `DIFF`."""
    shape = schema.arrow().append(pa.field(DIFF, pa.int64()))
    rows = len(columns[0])
    diffs = np.full(rows, diff, np.int64) if isinstance(diff, int) else diff
    arrays = [
        column if isinstance(column, pa.Array) and column.type == field.type
        else pa.array(column, field.type)
        for column, field in zip([*columns, diffs], shape, strict=True)
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=shape)
