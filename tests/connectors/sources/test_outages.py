"""A source whose server is frozen, then gone: ages, states, the log, and the view over it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from postgres_house import Driver, House  # type: ignore[import-not-found]
from test_postgres_in_the_service import options_of, running  # type: ignore[import-not-found]

from actors.connectors.sources import postgres
from actors.connectors.sources.postgres_snapshot import TableSnapshots
from actors.connectors.sources.postgres_stream import ReplicationStream
from actors.connectors.sources.source import SourceUnreachable
from actors.doors.client.client import Client
from actors.model.protocol.api import ObjectStatus


async def shown(client: Client) -> dict[str, ObjectStatus]:
    return {each.name: each for each in (await client.status()).objects}


async def until(client: Client, holds: Callable[[dict[str, ObjectStatus]], bool]) -> None:
    while not holds(await shown(client)):
        await anyio.sleep(0.02)


QUESTIONS: dict[str, tuple[Any, str]] = {
    "what a commit changed": (postgres, "read_catalog_digest"),
    "the first rows": (TableSnapshots, "_piece"),
    "the stream": (ReplicationStream, "begin"),
    "what a table is": (postgres, "survey_now"),
}
"""What a source asks its server: module or class, and name of the function."""


@pytest.mark.parametrize("question", QUESTIONS)
async def test_no_question_to_a_frozen_server_is_waited_for_without_end(
    db: House, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    await db.run("CREATE TABLE deeds (id bigint PRIMARY KEY)")
    await db.run("INSERT INTO deeds SELECT generate_series(1, 100)")
    source, driver = await db.opened({"public.deeds": ()})
    asks, name = QUESTIONS[question]
    ask = getattr(asks, name)
    later = question in ("what a commit changed", "what a table is")
    if later:
        while driver.position is None:
            await driver.step(source)
        await db.run("ALTER TABLE deeds ADD COLUMN due date")
        await db.run("INSERT INTO deeds VALUES (101)")
    with ExitStack() as until_it_is_over:

        def ask_frozen(*arguments: Any) -> Any:
            until_it_is_over.enter_context(db.server.frozen())
            monkeypatch.setattr(asks, name, ask)
            return ask(*arguments)

        monkeypatch.setattr(asks, name, ask_frozen)
        # expires: the server is frozen
        monkeypatch.setattr(postgres, "_ANSWER_S", 1)
        with pytest.raises(SourceUnreachable, match="no answer within 1 s"):
            while True:
                await driver.step(source)
        await source.close()
    monkeypatch.undo()
    again = Driver(driver.exports.values())
    source = db.source()
    await again.open(source)
    while again.position is None:
        await again.step(source)
    assert again.contents["public.deeds"].total() == 100 + later


async def test_an_outage_is_seen_while_it_lasts(
    db: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.controller")
    # expires: the server is frozen
    monkeypatch.setattr(postgres, "_ANSWER_S", 6)
    await db.run("CREATE TABLE notes (id bigint PRIMARY KEY)")
    names = ("pg", "notes", "v")

    async def stalled(word: str) -> None:
        """Return when the service shows the source as stalled, for this reason."""
        await until(
            client, lambda found: found["pg"].state == "stalled" and word in found["pg"].text
        )
        await until(client, lambda found: min(found[name].lag_ms for name in names) > 1_500)
        found = await shown(client)
        assert found["notes"].state == "stalled"
        assert found["pg"].state_since_ms > 0
        assert (found["v"].state, found["v"].retries) == ("gathering", 0)
        assert found["v"].text == "waits for source table notes, which is stalled"
        rows = (await client.peek("penstock.errors")).to_pylist()
        assert {(row["object"], row["state"]) for row in rows} == {
            ("pg", "stalled"),
            ("notes", "stalled"),
        }
        rows = (await client.peek("penstock.objects")).to_pylist()
        known = {row["name"]: (row["state"], row["state_since_ms"]) for row in rows}
        assert known["pg"] == ("stalled", found["pg"].state_since_ms)

    async def over() -> None:
        await until(
            client,
            lambda found: (
                found["pg"].state == found["notes"].state == "running"
                and max(found[name].lag_ms for name in names) < 1_500
            ),
        )
        assert (await client.peek("penstock.errors")).num_rows == 0

    async with running(tmp_path) as client:
        await client.create_source("pg", options_of(db), {"public.notes": "notes"})
        await client.create_materialized_view("v", "SELECT count(*) AS n FROM notes")
        await until(client, lambda found: found["v"].upper > 0)
        with db.server.frozen():
            # Nothing has failed yet, and nobody knows what is there.
            await until(
                client, lambda found: found["v"].lag_ms > 1_500 and found["pg"].state == "running"
            )
            await stalled("Unreachable")
        await over()
        db.server.stop()
        await stalled("failed")
        await until(client, lambda found: found["pg"].retries > 1)
        db.server.start()
        await over()
    lines = [record.getMessage() for record in caplog.records]
    for kind, name in (("source", "pg"), ("source table", "notes")):
        begun = [line for line in lines if line.startswith(f"{kind} {name} is stalled")]
        ended = [line for line in lines if line.startswith(f"{kind} {name} runs again")]
        assert len(begun) == len(ended) == 2
        # The second is libpq's own, when the server froze as the source was about to connect.
        assert "no answer within 6 s" in begun[0] or "timeout expired" in begun[0]
    await db.reconnect()
