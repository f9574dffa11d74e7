"""The demo's flights by way of PostgreSQL."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from actors import Client
from actors.doors.commands import cli
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing import postgres_server
from actors.testing.engine import in_memory_engine
from actors.testing.postgres_server import NotInstalled, binary
from penstock_flights import feeds, flights
from penstock_flights.door import DoorConnection
from penstock_flights.flights import FlightDelta, arrow_schema
from penstock_flights.play import LATE_NOW, VIEWS
from penstock_flights.proof import differences
from penstock_flights.script import DemoScript
from processes import wait_dead  # type: ignore[import-not-found]

ENDLESS = """
import sys, tempfile
from pathlib import Path
from actors.testing.postgres_server import PostgresServer
server = PostgresServer(Path(tempfile.mkdtemp(prefix="penstock-pg-")), {})
with server.guarded():
    server.start()
    print(server.folder, (server.folder / "data" / "postmaster.pid").read_text().split()[0])
    sys.stdout.flush()
    sys.stdin.read()
"""


@pytest.fixture
def installed() -> None:
    try:
        binary("initdb")
    except NotInstalled as missing:
        pytest.skip(str(missing))


def test_a_transaction_in_sql() -> None:
    inserted = pa.Table.from_pylist(
        [
            {"origin": "JFK", "time_hour": 3_600_000_001, "temp": 1.5},
            {"origin": "O'Hare", "time_hour": None, "temp": None},
        ],
        schema=arrow_schema("weather"),
    )
    state = ("id", "status", "dep_delay")
    updated = pa.table([[7], ["late"], [None]], schema=arrow_schema("flights", state))
    text = feeds.statements(
        3, [FlightDelta("weather", insert=inserted), FlightDelta("flights", None, updated)]
    )
    assert text.split("; ") == [
        "BEGIN",
        "INSERT INTO played VALUES (3)",
        'INSERT INTO "weather" VALUES '
        "('JFK', '1970-01-01T01:00:00.000001+00:00', '1.5', NULL, NULL, NULL), "
        "('O''Hare', NULL, NULL, NULL, NULL, NULL)",
        'UPDATE "flights" AS old SET "status" = new."status", "dep_delay" = new."dep_delay" FROM '
        '(SELECT "id"::bigint, "status"::text, "dep_delay"::bigint FROM '
        '(VALUES (7, \'late\', NULL)) AS given ("id", "status", "dep_delay")) AS new '
        'WHERE old."id" = new."id"',
        "COMMIT",
    ]


def test_only_divisions_are_written_otherwise_for_postgres() -> None:
    changed = [view for view in VIEWS if feeds.as_postgres_writes(view.sql) != view.sql]
    assert LATE_NOW not in changed
    assert all("/" in view.sql for view in changed)
    assert len(changed) == 2


async def test_flights_from_postgres_make_the_views_that_postgres_answers(
    installed: None, tmp_path: Path
) -> None:
    """The whole demo, on Spark: `make proof`."""
    stream = flights.history(flights.read(), date(2013, 2, 1), 1, 240)
    settings = Settings(state_dir=str(tmp_path), listen="127.0.0.1:0", pg_listen="127.0.0.1:0")
    async with (
        feeds.from_postgres() as feed,
        Service(settings, engine=in_memory_engine()) as service,
        await Client.in_process(service) as client,
        feed.running(),
    ):
        door = await DoorConnection.connect(service.pg_address)
        await feed.begin(DemoScript(door, Console(file=io.StringIO())), client, stream[0])
        for view in VIEWS:
            await client.create_materialized_view(view.name, view.sql)
        await feed.play(stream[1:], None, lambda done: None)
        await feed.settle()
        time = feed.log.times[-1]
        assert feed.log.transactions(time) == 7, "6 ticks and the opening"
        for view in VIEWS:
            await client.wait_for(view.name, time)
            found = await client.peek(view.name, as_of=time)
            right = await feed.answer(view, found.schema)
            assert right is not None
            assert differences(right, found) == []
            assert found.num_rows > 5 or view is not VIEWS[0]
        await door.aclose()


def test_a_server_does_not_outlive_who_was_killed(installed: None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        folder, pid = process.stdout.readline().split()
        server = os.pidfd_open(int(pid))
        guards = list(map(int, _below(process.pid)))
        try:
            process.send_signal(signal.SIGKILL)
            assert select.select([server], [], [], 60)[0], "the server goes on"
        finally:
            os.close(server)
    for guard in guards:
        wait_dead(guard)
    assert not Path(folder).exists()


def _below(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_without_postgres_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(postgres_server, "_PLACES", "/nowhere/*/bin")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["penstock", "demo", "--days", "1", "--source", "postgres"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == cli.STATUS_FAILED
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "apt-get install postgresql" in told
