"""Sources that make their changes up: deterministic, at a rate, resumable at any event.

Theory of operation. A *series* is pure: it tells the changes of the events from one number to
another, and the whole contents after so many events; both are functions of the configuration and
those numbers alone. `Generator` makes a source of it: it decides by the clock how many events
are due, gives their changes in pieces, then a mark. Its position is the number of events, and
which exports were filled; so opening it costs nothing, however far it had come.

Rules:
- an export that the position does not name is filled with the contents at the position; the very
  first contents are that too (`contents(0)`, empty for most series);
- at `rate` r, event n (from 0) is due ``(n - at + 1) / r`` seconds after the opening at event
  `at`: time during which nobody ran is not made up for, a slow reader is. Rate 0: as fast as
  asked;
- what is due is given at most every `every_ms`, and at most `Series.events_at_once` before a mark;
- after `up_to` events it is idle for ever.

A `next` that was cancelled may have lost a piece: such a source is closed, and opened again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import anyio
import msgspec
import numpy as np
import pyarrow as pa

from actors.errors import InvalidUsage
from actors.kernel import Clock
from actors.plan.schema import DIFF, Schema
from actors.sources.source import Export, Given, Idle, Lag, Mark, Rows
from actors.threshold_probes import GENERATED_EVENTS


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all generators have."""

    seed: int = 0
    rate: float = 0.0
    """Events a second; 0: as fast as they are taken."""
    up_to: int | None = None
    """Ends after so many events; None: never."""
    every_ms: int = 100
    """What is due is given, as one transaction or a few, at most so often."""

    def check(self) -> None:
        """Raises `InvalidUsage` naming the option that is out of range."""
        at_least(self, rate=0, every_ms=1, seed=0)
        if self.up_to is not None:
            at_least(self, up_to=0)
        if not self.rate < 1e9:
            raise InvalidUsage(f"rate = {self.rate}: must be less than a billion a second")


def at_least(config: msgspec.Struct, **least: float) -> None:
    """Raises `InvalidUsage` when a field is less than it may be."""
    for name, bound in least.items():
        value = getattr(config, name)
        if not value >= bound:
            raise InvalidUsage(f"{name} = {value}: must be at least {bound}")


class Series(Protocol):
    """What is made up. Pure, but for `prepare` and `release`; tables have all columns of their
    export and `DIFF`. What is not wanted need not be told, and is left out."""

    @property
    def exports(self) -> tuple[Export, ...]:
        """All there are."""
        ...

    events_at_once: int
    """So many make pieces of a few MiB."""
    turns: float
    """Events for each that counts for the rate: more than 1 where some change nothing."""
    light: bool
    """Whether an event makes a row or two."""

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """Before anything is asked for, of events from `at` on. Raises `InvalidUsage`,
        `Unreachable`."""
        ...

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[Rows]:
        """All rows after `at` events, of some exports, in bounded pieces. May block."""
        ...

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[Rows]:
        """The changes of events `start` to ``stop - 1``. May block."""
        ...

    async def release(self) -> None:
        """Frees what `prepare` made; twice is fine."""
        ...


class Prepared:
    """A series that needs no preparation."""

    turns = 1.0
    light = True

    async def prepare(self, at: int, wanted: AbstractSet[str]) -> None:
        """See `Series`."""

    async def release(self) -> None:
        """See `Series`."""


class Position(msgspec.Struct, frozen=True):
    """Where a generator stands: so many events are in the exports named."""

    events: int
    exports: tuple[str, ...]


class Generator:
    """A series as a source; see the module's text and `sources.source.Source`."""

    def __init__(self, series: Series, config: GeneratorConfig, clock: Clock) -> None:
        self._series = series
        self._config = config
        self._clock = clock
        self._exports: dict[str, Export] = {}
        self._at = 0
        self._opened_at = 0
        self._opened_ms = 0.0
        self._marked_ms = -float("inf")
        self._pieces: Iterator[Rows] | None = None
        self._filling = False
        self._new: frozenset[str] = frozenset()
        """To be filled with the next mark."""
        self._inline = True
        self._stop = 0
        self._told = False

    async def describe(self, wanted: Mapping[str, Sequence[str]] | None) -> tuple[Export, ...]:
        """See `Source.describe`."""
        self._config.check()
        return choose(self._series.exports, wanted)

    async def open(self, exports: Sequence[Export], position: str | None) -> None:
        """See `Source.open`."""
        self._config.check()
        known = {export.name: export for export in self._series.exports}
        for export in exports:
            if export.name not in known:
                raise InvalidUsage(f"this generator has no {export.name!r}: {', '.join(known)}")
            lacking = set(export.schema.names) - set(known[export.name].schema.names)
            if lacking:
                raise InvalidUsage(f"{export.name} has no column {', '.join(sorted(lacking))}")
        came = Position(0, ()) if position is None else _position(position)
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
                # A few light events are made on the loop: a thread costs more.
                inline = self._series.light and not GENERATED_EVENTS.exceeded_by(stop - self._at)
                pieces = self._series.changes(self._at, stop, self._exports.keys())
                self._begin(pieces, stop, inline=inline)
            elif self._at == self._config.up_to:
                if not self._told:
                    self._told = True
                    return Idle()
                await anyio.sleep_forever()
            else:
                await anyio.sleep(self._wait_ms() / 1000)

    async def taken(self, position: str) -> None:
        """See `Source.taken`: nobody outside keeps anything for it."""

    def lag(self) -> Lag:
        """See `Source.lag`: what is known is how many events are due by now."""
        return Lag(known=str(self._at if self._config.rate == 0 else self._due()))

    async def close(self) -> None:
        """See `Source.close`."""
        self._pieces = None
        await self._series.release()

    async def forget(self) -> None:
        """See `Source.forget`."""

    # -- pieces -----------------------------------------------------------------------------------

    def _begin(
        self, pieces: Iterator[Rows], stop: int, *, filling: bool = False, inline: bool = False
    ) -> None:
        self._pieces, self._filling, self._inline = pieces, filling, inline
        self._stop = stop

    async def _piece(self, pieces: Iterator[Rows]) -> Given:
        while True:
            if self._inline:
                rows = next(pieces, None)
            else:
                rows = await self._clock.run_blocking(lambda: next(pieces, None))
            if rows is None:
                break
            export = self._exports.get(rows.export)
            if export is not None and rows.updates.num_rows:
                names = [*export.schema.names, DIFF]
                return Rows(rows.export, rows.updates.select(names), self._filling)
        events, self._at, self._pieces = self._stop - self._at, self._stop, None
        self._marked_ms = self._clock.monotonic_ms()
        position = Position(self._at, tuple(sorted(self._exports)))
        text = msgspec.json.encode(position).decode()
        filled, self._new = tuple(sorted(self._new)), frozenset()
        return Mark(text, outside_ms=self._clock.now_ms(), messages=events, filled=filled)

    # -- pace -------------------------------------------------------------------------------------

    @property
    def _events_per_ms(self) -> float:
        return self._config.rate * self._series.turns / 1000

    def _due(self) -> int:
        """So many events should have been given by now."""
        end = self._config.up_to
        now = self._clock.monotonic_ms()
        if self._config.rate == 0:
            due = self._at + self._series.events_at_once
        elif now < self._marked_ms + self._config.every_ms:
            due = self._at
        else:
            # A little more than nothing: a timer that is due may come a rounding early.
            due = self._opened_at + int((now - self._opened_ms) * self._events_per_ms + 1e-6)
        return due if end is None else min(end, due)

    def _wait_ms(self) -> float:
        """Until the next event is due, and may be given."""
        now = self._clock.monotonic_ms()
        event_ms = self._opened_ms + (self._at + 1 - self._opened_at) / self._events_per_ms
        return max(1.0, event_ms - now, self._marked_ms + self._config.every_ms - now)


def choose(
    exports: Sequence[Export], wanted: Mapping[str, Sequence[str]] | None
) -> tuple[Export, ...]:
    """Those of the exports that are wanted, without the columns to leave out. Raises
    `InvalidUsage` for a name that is not there."""
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
        key = export.schema.key if names.issuperset(export.schema.key) else ()
        chosen.append(Export(name, Schema(kept, key)))
    return tuple(chosen)


def _position(text: str) -> Position:
    try:
        return msgspec.json.decode(text, type=Position)
    except msgspec.DecodeError as error:
        raise InvalidUsage(f"{text[:100]!r} is not a position of a generator: {error}") from None


def updates(
    schema: Schema, columns: Sequence[pa.Array | np.ndarray], diff: int | np.ndarray
) -> pa.Table:
    """A table of the schema's columns and `DIFF`."""
    shape = schema.arrow().append(pa.field(DIFF, pa.int64()))
    rows = len(columns[0])
    diffs = np.full(rows, diff, np.int64) if isinstance(diff, int) else diff
    arrays = [
        column if isinstance(column, pa.Array) and column.type == field.type
        else pa.array(column, field.type)
        for column, field in zip([*columns, diffs], shape, strict=True)
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=shape)
