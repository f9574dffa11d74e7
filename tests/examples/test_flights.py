from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.runtime.errors import InvalidUsage
from penstock_flights import flights

HOUR_US = 3_600_000_000


@pytest.fixture(scope="module")
def source() -> flights.FlightTables:
    return flights.read()


@pytest.fixture(scope="module")
def month(source: flights.FlightTables) -> list[flights.FlightTransaction]:
    return flights.history(source)


def flight_rows(
    stream: list[flights.FlightTransaction], kind: str
) -> list[tuple[int, dict[str, Any]]]:
    """(minute told, row) of every flight inserted or updated, in order; times as integers."""
    found = []
    for transaction in stream:
        for delta in transaction.deltas:
            rows: pa.Table | None = getattr(delta, kind)
            if delta.table == "flights" and rows is not None:
                names = rows.column_names
                columns = [
                    (rows[n].cast(pa.int64()) if pa.types.is_timestamp(rows[n].type) else rows[n])
                    for n in names
                ]
                values = zip(*(column.to_pylist() for column in columns), strict=True)
                found += [
                    (transaction.minute, dict(zip(names, row, strict=True))) for row in values
                ]
    return found


def test_default_stream_is_large_enough(month: list[flights.FlightTransaction]) -> None:
    assert sum(transaction.changes for transaction in month[1:]) >= 100_000
    assert len(month) >= 200
    minutes = [transaction.minute for transaction in month]
    assert minutes == sorted(set(minutes))


def test_opening_holds_the_dimension_tables(month: list[flights.FlightTransaction]) -> None:
    opening = {delta.table: delta for delta in month[0].deltas}
    assert set(opening) == {"carriers", "airports", "planes"}
    for name, delta in opening.items():
        assert delta.insert is not None
        keys = delta.insert[flights.TABLES[name][1][0]].to_pylist()
        assert len(set(keys)) == len(keys) > 10


def test_rows_have_the_declared_columns(month: list[flights.FlightTransaction]) -> None:
    for delta in (delta for transaction in month for delta in transaction.deltas):
        if delta.insert is not None:
            assert delta.insert.schema == flights.arrow_schema(delta.table)
        if delta.update is not None:
            key = flights.TABLES[delta.table][1]
            assert set(key) < set(delta.update.column_names)
            assert delta.update.schema == flights.arrow_schema(
                delta.table, delta.update.column_names
            )


def test_keys_never_conflict(month: list[flights.FlightTransaction]) -> None:
    born: set[int] = set()
    for transaction in month:
        named: list[int] = []
        for delta in transaction.deltas:
            if delta.table != "flights":
                continue
            inserted = [] if delta.insert is None else delta.insert["id"].to_pylist()
            updated = [] if delta.update is None else delta.update["id"].to_pylist()
            assert not born & set(inserted)
            assert set(updated) <= born
            born |= set(inserted)
            named += inserted + updated
        assert max(Counter(named).values(), default=1) == 1


def test_order_of_knowledge(month: list[flights.FlightTransaction]) -> None:
    """Nothing is told before it happened, and the statuses follow one another."""
    scheduled = {row["id"]: row for _, row in flight_rows(month, "insert")}
    follows = {
        "scheduled": {"departed", "arrived", "diverted", "cancelled"},
        "departed": {"arrived", "diverted"},
    }
    status = {id_: row["status"] for id_, row in scheduled.items()}
    for minute, row in flight_rows(month, "update"):
        leave = scheduled[row["id"]]["sched_dep"] // 60_000_000
        assert row["status"] in follows[status[row["id"]]]
        assert minute > leave + (row["dep_delay"] or 0)
        assert (row["dep_delay"] is None) == (row["status"] == "cancelled")
        assert row["arr_delay"] is None or row["status"] == "arrived"
        status[row["id"]] = row["status"]
    told = Counter(status.values())
    assert told["arrived"] > 15_000
    assert told["cancelled"] > 500


def test_the_end_of_the_story_is_the_file(
    source: flights.FlightTables, month: list[flights.FlightTransaction]
) -> None:
    delays = source.flights["dep_delay"].to_pylist()
    last = {row["id"]: row for _, row in flight_rows(month, "update")}
    assert all(row["dep_delay"] == delays[id_] for id_, row in last.items())


def test_flights_are_known_hours_ahead(month: list[flights.FlightTransaction]) -> None:
    opened = month[0].minute
    for minute, row in flight_rows(month, "insert"):
        ahead = row["sched_dep"] // 60_000_000 - minute
        assert ahead >= flights.KNOWN_AHEAD - 60 or minute <= opened + 60
        assert row["time_hour"] <= row["sched_dep"] < row["time_hour"] + HOUR_US


def test_dimensions_change_while_the_stream_runs(month: list[flights.FlightTransaction]) -> None:
    updates = {
        delta.table: index
        for index, transaction in enumerate(month)
        for delta in transaction.deltas
        if delta.update is not None and delta.table != "flights"
    }
    assert set(updates) == {"carriers", "airports"}
    assert all(len(month) // 4 < index < len(month) * 3 // 4 for index in updates.values())
    assert sum(1 for transaction in month if transaction.note) == 3


def test_a_late_flight_is_in_the_air_where_the_airport_moves(
    month: list[flights.FlightTransaction],
) -> None:
    dest = {row["id"]: row["dest"] for _, row in flight_rows(month, "insert")}
    late: set[int] = set()
    for transaction in month:
        for delta in transaction.deltas:
            if delta.table == "airports" and delta.update is not None:
                assert delta.update["faa"][0].as_py() in {dest[id_] for id_ in late}
                return
        for _, row in flight_rows([transaction], "update"):
            (late.add if row["status"] == "departed" and row["dep_delay"] > 30 else late.discard)(
                row["id"]
            )
    pytest.fail("no airport moved")


def test_long_ticks_fold_several_facts_into_one(source: flights.FlightTables) -> None:
    """A flight that is scheduled and departs within one tick is inserted as departed."""
    stream = flights.history(source, days=3, tick_minutes=24 * 60)
    assert len(stream) == 4
    assert {row["status"] for _, row in flight_rows(stream, "insert")} > {"scheduled", "arrived"}


@pytest.mark.parametrize(
    ("start", "days", "tick", "text"),
    [
        (date(2013, 2, 1), 0, 60, "invalid days 0"),
        (date(2013, 2, 1), 1, 0, "tick_minutes 0"),
        (date(2014, 2, 1), 1, 60, "expected days of 2013"),
    ],
)
def test_refuses_what_is_not_there(
    source: flights.FlightTables, start: date, days: int, tick: int, text: str
) -> None:
    with pytest.raises(InvalidUsage, match=text):
        flights.history(source, start, days, tick)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="cannot read the flights"):
        flights.read(tmp_path)
