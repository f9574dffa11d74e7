from __future__ import annotations

import asyncio

import anyio
import pyarrow as pa
import pytest

from actors.runtime.errors import InvalidUsage
from actors.testing.virtual_time import VirtualTimeLoop
from penstock_flights.flights import FlightDelta, FlightTransaction, arrow_schema, history, read
from penstock_flights.play import ChangeLog, changes_of, pace


def carriers(*rows: tuple[str, str]) -> pa.Table:
    codes, names = zip(*rows, strict=True)
    return pa.table([pa.array(codes), pa.array(names)], schema=arrow_schema("carriers"))


def hour(origin: str, visibility: float) -> pa.Table:
    row = {"origin": origin, "time_hour": 3_600_000_000, "visib": visibility}
    return pa.Table.from_pylist([row], schema=arrow_schema("weather"))


STREAM = [
    FlightTransaction(
        60, (FlightDelta("carriers", insert=carriers(("US", "US Airways"), ("AA", "American"))),)
    ),
    FlightTransaction(
        120,
        (
            FlightDelta(
                "carriers", insert=carriers(("B6", "JetBlue")), update=carriers(("US", "New"))
            ),
            FlightDelta("weather", insert=hour("JFK", 10.0)),
        ),
        "US becomes New",
    ),
    FlightTransaction(180, (FlightDelta("weather", insert=hour("JFK", 10.0)),)),
]


def test_changes_count_an_update_twice() -> None:
    assert [transaction.changes for transaction in STREAM] == [2, 4, 1]


def test_transactions_as_the_client_takes_them() -> None:
    made = changes_of(STREAM[1])
    deltas = {delta.table: delta for delta in STREAM[1].deltas}
    assert set(made) == {"carriers", "weather"}
    for table, change in made.items():
        assert change.insert is deltas[table].insert
        assert change.update is deltas[table].update
        assert change.delete is None


def test_no_transaction_of_the_stream_names_a_table_twice() -> None:
    for transaction in history(read(), days=20):
        assert len(changes_of(transaction)) == len(transaction.deltas)


def test_the_stream_keeps_its_pace() -> None:
    at: list[float] = []
    done: list[FlightTransaction] = []

    async def write(transaction: FlightTransaction) -> None:
        at.append(anyio.current_time())

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(pace(write, STREAM, 50.0, done.append))
    assert done == STREAM
    assert [each - at[0] for each in at] == pytest.approx([0.0, 0.02, 0.04])


def test_contents_at_a_time_come_from_the_log_alone() -> None:
    log = ChangeLog()
    for number, transaction in enumerate(STREAM):
        log.add((number + 1) * 10, transaction.deltas)
    before = log.contents(19)
    assert before["carriers"].to_pylist() == [
        {"carrier": "US", "name": "US Airways"},
        {"carrier": "AA", "name": "American"},
    ]
    assert before["weather"].num_rows == 0
    assert before["flights"].schema == arrow_schema("flights")
    after = log.contents(30)
    assert sorted(after["carriers"]["name"].to_pylist()) == ["American", "JetBlue", "New"]
    assert after["weather"].num_rows == 2, "a bag keeps equal rows"
    assert log.contents(20)["weather"].num_rows == 1


def test_times_that_do_not_ascend_are_refused() -> None:
    log = ChangeLog()
    log.add(10, STREAM[0].deltas)
    with pytest.raises(InvalidUsage, match="invalid timestamp 10 of a write"):
        log.add(10, STREAM[1].deltas)
