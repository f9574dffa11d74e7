"""Sources that generate their changes: deterministic, at a configured rate, resumable at any event.

Theory of operation. A *series* is pure. It computes the changes of a range of events, and the
complete contents after a number of events, from the configuration and those numbers alone.
`GeneratorSource` turns it into a source: it determines by the clock how many events are due,
returns their changes in pieces, and then a mark. The position is the number of events and the
exports that are filled, so a restart costs the same however many events there were.

Rules:
- An export that the position does not name is filled with the contents at the position.
- At `rate` r, event n (from 0) is due ``(n - at + 1) / r`` seconds after the source was opened at
  event `at`. So the source catches up after a slow reader, but not after downtime. Rate 0: as fast
  as possible.
- Due events are returned at most every `every_ms`, at most `EventSeries.events_at_once` before a
  mark.
- After `up_to` events the source stays idle.

Cancelling `next` may lose a piece; then the source must be closed and opened again.
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
    """Number of events after which the generator stops; None: never."""
    every_ms: int = 100
    """Minimum interval between transactions, in ms."""

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is out of range, and name the option."""
        at_least(self, rate=0, every_ms=1, seed=0)
        if self.up_to is not None:
            at_least(self, up_to=0)
        if not self.rate < 1e9:
            raise InvalidUsage(f"invalid rate {self.rate}: expected less than a billion per second")


def at_least(config: msgspec.Struct, **least: float) -> None:
    """Raise `InvalidUsage` if a field is below its minimum."""
    for name, bound in least.items():
        value = getattr(config, name)
        if not value >= bound:
            raise InvalidUsage(f"invalid {name} {value}: expected at least {bound}")


class EventSeries(Protocol):
    """A generator's changes as a function of the event number. Pure, except for `prepare` and
    `release`.

    Tables have all columns of their export and `DIFF`. Exports that are not wanted may be left out.
    """

    @property
    def exports(self) -> tuple[SourceExport, ...]:
        """Return all exports of the series."""
        ...

    events_at_once: int
    """Number of events whose changes make up a few MiB."""
    turns: float
    """Number of events per event that counts towards the rate; above 1 if some events change
    nothing."""

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """Prepare for events from `at` on; called before anything is read. Raises `InvalidUsage`
        and `SourceUnreachable`."""
        ...

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield all rows of the wanted exports after `at` events, in bounded pieces. May block."""
        ...

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the changes of events `start` to ``stop - 1``. May block."""
        ...

    async def release(self) -> None:
        """Release what `prepare` has made. May be called twice."""
        ...


class PreparedSeries:
    """A series that needs no preparation."""

    turns = 1.0

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""


class GeneratorPosition(msgspec.Struct, frozen=True):
    """Position of a generator: the named exports contain the changes of `events` events."""

    events: int
    exports: tuple[str, ...]


class GeneratorSource:
    """A source that reads a series; implements `connectors.sources.source.SourceConnector`."""

    def __init__(self, series: EventSeries, config: GeneratorConfig, clock: ActorClock) -> None:
        self._series = series
        self._config = config
        self._clock = clock
        self._exports: dict[str, SourceExport] = {}
        # Number of events returned, with their mark.
        self._at = 0
        # That number, and the monotonic time, when the source was opened.
        self._opened_at = 0
        self._opened_ms = 0.0
        # Monotonic time of the last mark.
        self._marked_ms = -float("inf")
        # Changes or contents being returned; None between marks.
        self._pieces: Iterator[SourceRows] | None = None
        # True while first contents are returned.
        self._filling = False
        self._new: frozenset[str] = frozenset()
        """Exports that the next mark fills."""
        # Number of events at the end of `_pieces`.
        self._stop = 0
        # True once `SourceIdle` was returned after the last event.
        self._idle_reported = False

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Return the requested exports of the series. Raises `InvalidUsage`."""
        self._config.check()
        return select_exports(self._series.exports, wanted)

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Raise `InvalidUsage`: a generated table has all its columns from the start."""
        raise InvalidUsage(
            f"{export.name} is generated with all its columns: drop the table and add it again, "
            "without leaving any out"
        )

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Start after a position; None starts at event 0. Raises `InvalidUsage` and
        `SourceUnreachable`."""
        self._config.check()
        known = {export.name: export for export in self._series.exports}
        for export in exports:
            if export.name not in known:
                raise InvalidUsage(
                    f"this generator has no table {export.name!r} (available: {', '.join(known)})"
                )
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
        """Return the next rows or event."""
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
        """Do nothing: there is nothing to acknowledge."""

    def lag(self) -> SourceLag:
        """Return the lag. `known` is the number of events due by now."""
        return SourceLag(known=str(self._at if self._config.rate == 0 else self._due()))

    async def close(self) -> None:
        """Stop generating, and release what the series has prepared."""
        self._pieces = None
        await self._series.release()

    async def forget(self) -> None:
        """Do nothing: there are no external resources."""

    # -- pieces -----------------------------------------------------------------------------------

    def _begin(self, pieces: Iterator[SourceRows], stop: int, *, filling: bool = False) -> None:
        self._pieces, self._filling, self._stop = pieces, filling, stop

    async def _piece(self, pieces: Iterator[SourceRows]) -> Given:
        while True:
            rows = await self._clock.run_blocking(lambda: next(pieces, None))
            if rows is None:
                break
            export = self._exports.get(rows.export)
            # The series may return more exports and columns than are wanted.
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
        """Return the number of events that should have been returned by now."""
        end = self._config.up_to
        now = self._clock.monotonic_ms()
        if self._config.rate == 0:
            due = self._at + self._series.events_at_once
        elif now < self._marked_ms + self._config.every_ms:
            due = self._at
        else:
            # Rounded up slightly, because a timer may fire early by a rounding error.
            due = self._opened_at + int((now - self._opened_ms) * self._events_per_ms + 1e-6)
        return due if end is None else min(end, due)

    def _wait_ms(self) -> float:
        """Return the time in ms until the next event is due and may be returned."""
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
            raise InvalidUsage(f"no table {name!r} (available: {', '.join(known)})")
        absent = [column for column in without if column not in export.schema.names]
        if absent:
            raise InvalidUsage(f"{name} has no column {', '.join(absent)} to leave out")
        kept = tuple(c for c in export.schema.columns if c.name not in without)
        if not kept:
            raise InvalidUsage(f"{name}: all its columns are left out")
        names = {column.name for column in kept}
        # A key without all its columns identifies no row.
        key = export.schema.key if names.issuperset(export.schema.key) else ()
        chosen.append(SourceExport(name, TableSchema(kept, key)))
    return tuple(chosen)


def _position(text: str) -> GeneratorPosition:
    try:
        return msgspec.json.decode(text, type=GeneratorPosition)
    except msgspec.DecodeError as error:
        raise InvalidUsage(f"invalid position of a generator {text[:100]!r}: {error}") from None


def updates(
    schema: TableSchema, columns: Sequence[pa.Array | np.ndarray], diff: int | np.ndarray
) -> pa.Table:
    """Return a table with the schema's columns and `DIFF`."""
    shape = schema.arrow().append(pa.field(DIFF, pa.int64()))
    rows = len(columns[0])
    diffs = np.full(rows, diff, np.int64) if isinstance(diff, int) else diff
    arrays = [
        column if isinstance(column, pa.Array) and column.type == field.type
        else pa.array(column, field.type)
        for column, field in zip([*columns, diffs], shape, strict=True)
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=shape)
