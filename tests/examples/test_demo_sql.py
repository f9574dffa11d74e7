"""The demo's SQL: its statements, its session, and its feed, on the in-memory engine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from actors import Client
from actors.runtime.errors import ConnectionBroken
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine
from penstock_flights import flights, run
from penstock_flights import statements as texts
from penstock_flights.door import DoorConnection, StatementRefused
from penstock_flights.feeds import SqlFeed
from penstock_flights.flights import FlightDelta, FlightTransaction, arrow_schema
from penstock_flights.play import VIEWS
from penstock_flights.proof import differences
from penstock_flights.script import DemoScript


@contextlib.asynccontextmanager
async def door_of_a_service(folder: Path) -> AsyncIterator[tuple[Service, DoorConnection]]:
    settings = Settings(
        state_dir=str(folder), listen="127.0.0.1:0", pg_listen="127.0.0.1:0", group_commit_ms=1
    )
    async with Service(settings, engine=in_memory_engine()) as service:
        door = await DoorConnection.connect(service.pg_address)
        yield service, door
        await door.aclose()


def rows(table: str, *found: tuple[Any, ...], columns: tuple[str, ...] | None = None) -> pa.Table:
    schema = arrow_schema(table, columns)
    return pa.Table.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in found], schema
    )


def test_a_transaction_in_sql() -> None:
    state = ("id", "status", "dep_delay", "arr_delay")
    deltas = (
        FlightDelta(
            "weather", insert=rows("weather", ("O'Hare", 3_600_000_001, 1e-7, None, -0.5, 10.0))
        ),
        FlightDelta("flights", update=rows("flights", (7, "departed", -3, None), columns=state)),
        FlightDelta(
            "carriers",
            update=rows("carriers", ("US", "Us")),
        ),
    )
    assert texts.transaction_statements(FlightTransaction(60, deltas)) == [
        "BEGIN",
        "MERGE INTO flights AS f USING (SELECT * FROM (VALUES (7, 'departed', -3, NULL)) AS v "
        "(id, status, dep_delay, arr_delay)) AS new ON f.id = new.id WHEN MATCHED THEN UPDATE SET "
        "status = new.status, dep_delay = new.dep_delay, arr_delay = new.arr_delay",
        "UPDATE carriers SET name = 'Us' WHERE carrier = 'US'",
        "INSERT INTO weather VALUES "
        "('O''Hare', '1970-01-01 01:00:00.000001+00:00', 0.0000001, NULL, -0.5, 10.0)",
        "COMMIT",
    ]


def test_long_statements_are_shortened() -> None:
    many = rows("flights", *((n, "late", 1, 2) for n in range(99)), columns=flights.STATE)
    (merge,) = texts.transaction_statements(
        FlightTransaction(0, (FlightDelta("flights", update=many),))
    )[1:-1]
    shown = texts.shorten(merge)
    assert len(shown) < texts.SHOWN_CHARACTERS + 100
    assert shown.startswith(
        "MERGE INTO flights AS f USING (SELECT * FROM (VALUES (0, 'late', 1, 2)"
    )
    assert shown.endswith("arr_delay = new.arr_delay")
    assert texts.shorten(texts.create_view(VIEWS[1])) == texts.create_view(VIEWS[1])


async def test_the_door_tells_what_the_service_answers(tmp_path: Path) -> None:
    async with door_of_a_service(tmp_path) as (service, door):
        made, copied = await door.query("CREATE TABLE t (a BIGINT, b STRING); SHOW TABLES")
        assert (made.tag, made.columns) == ("CREATE TABLE", ())
        assert copied.rows[0][1] == "t"
        assert (await door.copy_in("COPY t FROM STDIN", b"1\tx\\ty\n2\t\\N\n")).tag == "COPY 2"
        (found,) = await door.query("SELECT a, b FROM t ORDER BY a")
        assert found.columns == ("a", "b")
        assert found.rows == [("1", "x\ty"), ("2", None)]
        with pytest.raises(StatementRefused, match="SQLSTATE 42P01"):
            await door.query("SELECT * FROM nowhere")
        with pytest.raises(StatementRefused, match="SQLSTATE"):
            await door.copy_in("COPY t FROM STDIN", b"no number\tx\n")
        (found,) = await door.query("SELECT a FROM t WHERE a = 1")
        assert found.rows == [("1",)]
    with pytest.raises(ConnectionBroken):
        await DoorConnection.connect(service.pg_address)


async def test_flights_that_are_written_by_sql_are_those_of_the_log(tmp_path: Path) -> None:
    """The whole demo, on Spark: `make demo`."""
    stream = flights.history(flights.read(), date(2013, 2, 1), 1, 240)
    printed = io.StringIO()
    async with (
        door_of_a_service(tmp_path) as (service, door),
        await Client.in_process(service) as client,
    ):
        script, feed = DemoScript(door, Console(file=printed, width=200)), SqlFeed()
        await feed.begin(script, client, stream[0])
        for view in VIEWS:
            await script.run(texts.create_view(view))
        await feed.play(stream[1:], None, lambda done: None)
        await feed.settle()
        assert len(feed.log.times) == len(stream)
        for time in (feed.log.times[0], feed.log.times[3], feed.log.times[-1]):
            for name, right in feed.log.contents(time).items():
                assert differences(right, await client.peek(name, as_of=time)) == []
        await run._read(script, Console(file=printed), feed.log)
    told = printed.getvalue()
    assert "penstock=> CREATE TABLE carriers (carrier STRING" in told
    assert "penstock=> COPY airports FROM STDIN;\nCOPY 1458\n" in told
    assert "penstock=> CREATE MATERIALIZED VIEW late_now AS\nSELECT f.id" in told
    assert "penstock=> SUBSCRIBE (SELECT carrier, flight" in told
    assert " carrier " in told
