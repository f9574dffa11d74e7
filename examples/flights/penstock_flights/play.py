"""Pacing a stream of writes, and logging the writes.

`ChangeLog` records the demo's writes with the timestamps that the service assigned. It is
independent of the service: it applies updates to its own copy of the rows. The proof compares the
service's views with queries over `ChangeLog.contents`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final

import anyio
import msgspec
import pyarrow as pa

from actors.doors.client.client import TableWrite
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import Time
from penstock_flights.flights import TABLES, FlightDelta, FlightTransaction, arrow_schema

# -- The three views of the demo, as a user would write them ---------------------------------------


class DemoView(msgspec.Struct, frozen=True):
    """A view of the demo."""

    name: str
    title: str
    """Title in the display."""
    sql: str
    """The query that defines it."""
    order: str
    """Column by which the display sorts, largest first."""


DELAY_BY_CARRIER: Final = DemoView(
    name="delay_by_carrier",
    title="Delay by carrier",
    order="flights",
    sql="""
SELECT c.name AS carrier,
       count(*) AS flights,
       avg(f.dep_delay) AS mean_delay,
       sum(CASE WHEN f.status = 'cancelled' THEN 1 ELSE 0 END) / count(*) AS share_cancelled
FROM flights AS f
JOIN carriers AS c ON f.carrier = c.carrier
GROUP BY c.name
""".strip(),
)

DELAY_BY_WEATHER: Final = DemoView(
    name="delay_by_weather",
    title="Delay by weather",
    order="mean_delay",
    sql="""
SELECT CASE WHEN w.visib >= 10 THEN 'clear'
            WHEN w.visib >= 5 THEN 'haze'
            WHEN w.visib >= 1 THEN 'mist'
            ELSE 'fog' END AS visibility,
       count(*) AS flights,
       avg(f.dep_delay) AS mean_delay,
       sum(CASE WHEN f.status = 'cancelled' THEN 1 ELSE 0 END) / count(*) AS share_cancelled
FROM flights AS f
JOIN weather AS w ON f.origin = w.origin AND f.time_hour = w.time_hour
GROUP BY CASE WHEN w.visib >= 10 THEN 'clear'
              WHEN w.visib >= 5 THEN 'haze'
              WHEN w.visib >= 1 THEN 'mist'
              ELSE 'fog' END
""".strip(),
)

LATE_NOW: Final = DemoView(
    name="late_now",
    title="Late and in the air",
    order="dep_delay",
    sql="""
SELECT f.id, f.carrier, f.flight, f.origin,
       a.name AS destination, a.lat, a.lon, f.dep_delay
FROM flights AS f
JOIN airports AS a ON f.dest = a.faa
WHERE f.status = 'departed' AND f.dep_delay > 30
""".strip(),
)

VIEWS: Final = (DELAY_BY_CARRIER, DELAY_BY_WEATHER, LATE_NOW)


class ChangeEntry(msgspec.Struct, frozen=True):
    """The changes written at one timestamp."""

    time: Time
    deltas: tuple[FlightDelta, ...]
    """The changes, in order."""
    transactions: int = 1
    """The number of their transactions."""


class ChangeLog:
    """All changes in order, with the timestamps that the service assigned."""

    def __init__(self) -> None:
        self.entries: list[ChangeEntry] = []
        self.changes = 0
        """Number of changes in all entries."""

    @property
    def times(self) -> list[Time]:
        """Return the timestamps of the writes, ascending."""
        return [entry.time for entry in self.entries]

    def transactions(self, as_of: Time) -> int:
        """Return the number of transactions at or before `as_of`."""
        return sum(entry.transactions for entry in self.entries if entry.time <= as_of)

    def add(self, time: Time, deltas: Sequence[FlightDelta], transactions: int = 1) -> None:
        """Add a write. Raises `InvalidUsage` if its timestamp is not after the previous one."""
        if self.entries and time <= self.entries[-1].time:
            raise InvalidUsage(
                f"invalid timestamp {time} of a write: expected more than {self.entries[-1].time}"
            )
        self.entries.append(ChangeEntry(time, tuple(deltas), transactions))
        self.changes += sum(delta.changes for delta in deltas)

    def contents(self, as_of: Time) -> dict[str, pa.Table]:
        """Compute the contents of all tables as of `as_of`, by applying the changes."""
        tables = {name: _Table(name) for name in TABLES}
        for entry in self.entries:
            if entry.time > as_of:
                break
            for delta in entry.deltas:
                tables[delta.table].apply(delta)
        return {name: table.rows() for name, table in tables.items()}


class _Table:
    """The rows of one table by key; without a key, by position."""

    def __init__(self, name: str) -> None:
        self.schema = arrow_schema(name)
        self.key = TABLES[name][1]
        self.found: dict[Hashable, list[Any]] = {}

    def apply(self, delta: FlightDelta) -> None:
        if delta.insert is not None:
            for row in rows_of(delta.insert):
                self.found[self._identity(row)] = list(row.values())
        if delta.update is not None:
            for row in rows_of(delta.update):
                old = self.found[self._identity(row)]
                for name, value in row.items():
                    old[self.schema.get_field_index(name)] = value

    def _identity(self, row: dict[str, Any]) -> Hashable:
        if not self.key:
            return len(self.found)
        return tuple(row[name] for name in self.key)

    def rows(self) -> pa.Table:
        columns = list(zip(*self.found.values(), strict=True)) or [()] * len(self.schema)
        arrays = [
            pa.array(values, field.type) for values, field in zip(columns, self.schema, strict=True)
        ]
        return pa.table(arrays, schema=self.schema)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as dicts, with timestamps in microseconds since the epoch."""
    columns = [
        # Converting timestamps to integers avoids the need for a time zone database.
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in table.columns
    ]
    rows: list[dict[str, Any]] = pa.table(columns, names=table.column_names).to_pylist()
    return rows


def changes_of(transaction: FlightTransaction) -> dict[str, TableWrite]:
    """Convert a transaction to an argument for `Client.write`."""
    return {
        delta.table: TableWrite(insert=delta.insert, update=delta.update)
        for delta in transaction.deltas
    }


async def pace(
    write: Callable[[FlightTransaction], Awaitable[None]],
    stream: Sequence[FlightTransaction],
    speed: float | None,
    written: Callable[[FlightTransaction], None] = lambda done: None,
) -> None:
    """Call `write` with each transaction, at `speed` transactions per second (None: as fast as
    possible), and then `written`."""
    started = anyio.current_time()
    for index, transaction in enumerate(stream):
        if speed is not None:
            await anyio.sleep_until(started + index / speed)
        # Waiting here slows the stream down if the service cannot keep the pace.
        await write(transaction)
        written(transaction)
