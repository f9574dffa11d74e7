"""A view that compares rows with the clock, on a whole service in real time: nobody writes, and
its rows come and go."""

from __future__ import annotations

import datetime
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.doors.client.client import Client
from actors.runtime.errors import QueryRejected
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives

pytestmark = pytest.mark.spark
LASTS = datetime.timedelta(seconds=20)
"""How long a row is shown: longer than a step of a busy machine takes."""


async def wait_for_rows(client: Client, view: str, wanted: list[tuple[Any, ...]]) -> None:
    """Follow a view until it has just these rows."""
    held: Counter[tuple[Any, ...]] = Counter()
    async with aclosing(client.subscribe(view)) as changes:
        async for change in changes:
            for row in [] if change.table is None else change.table.to_pylist():
                *values, _, diff = row.values()
                held[tuple(values)] += diff
            if not change.partial and sorted(held.elements()) == wanted:
                return
    raise AssertionError(f"{view} ended with {held}")


@pytest.mark.long
@pytest.mark.anyio
async def test_rows_come_and_go_while_nobody_writes(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path / "state"), clock_tick_ms=100)
    started = datetime.datetime.now(datetime.UTC)
    with anyio.fail_after(800):
        async with (
            Service(for_short_lives(settings)) as service,
            await Client.connect(service.address) as client,
        ):
            await client.create_table("Orders In", {"id": "int", "when": "timestamp"})
            await client.create_materialized_view(
                "latest", "SELECT id FROM `Orders In` WHERE `when` > now() - INTERVAL 20 SECONDS"
            )
            await client.create_materialized_view(
                "passed", "SELECT id FROM `Orders In` WHERE `when` <= now()"
            )
            await client.create_materialized_view("how many", "SELECT count(*) AS n FROM latest")
            with pytest.raises(QueryRejected, match="supported only in a WHERE that compares it"):
                await client.create_materialized_view(
                    "seen", "SELECT id, now() AS seen FROM `Orders In`"
                )
            soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=5)
            long_ago = started - datetime.timedelta(days=4000)
            rows = [(1, long_ago), (2, soon), (3, None)]
            await client.insert("Orders In", [{"id": id_, "when": at} for id_, at in rows])
            await wait_for_rows(client, "latest", [(2,)])
            await wait_for_rows(client, "passed", [(1,), (2,)])
            assert datetime.datetime.now(datetime.UTC) >= soon
            await wait_for_rows(client, "how many", [(0,)])
            assert datetime.datetime.now(datetime.UTC) >= soon + LASTS
            await wait_for_rows(client, "latest", [])
