"""Views that say how old they may be, through the public client: reads, status, restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from actors import Client
from actors.runtime.errors import DeadlineExceeded, InvalidUsage
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from service_house import running_service  # type: ignore[import-not-found]

LONG_MS = 3_000_000
"""Nothing comes due while a test runs."""
SHORT_MS = 300


@asynccontextmanager
async def running(place: Path) -> AsyncIterator[Client]:
    chosen: dict[str, Any] = {"workers": 2, "maintenance_ms": 20}
    settings = Settings(state_dir=str(place / "state"), listen="127.0.0.1:0", **chosen)
    settings = draw_for_test(settings, chosen)
    async with running_service(settings) as (_, client):
        yield client


async def sold(client: Client, name: str, as_of: int | None = None, **how: Any) -> int:
    (row,) = (await client.peek(name, as_of, **how)).to_pylist()
    return int(row["total"])


async def shop(client: Client, target_ms: int) -> int:
    """A view whose next step waits, and one above it that asks for no age; what they say."""
    await client.create_table("sale", {"price": "bigint"})
    written = await client.insert("sale", [{"price": 3}])
    text = "select sum(price) as total from sale"
    await client.create_materialized_view("takings", text, target_lag_ms=target_ms)
    await client.create_materialized_view("shown", "select total from takings")
    await client.wait_for("shown", written)
    await passes(client)
    return await sold(client, "shown")


async def passes(client: Client) -> None:
    """The first step of an incarnation does not wait, unless tables moved on before."""
    written = await client.insert("sale", [{"price": 4}])
    with suppress(DeadlineExceeded):
        await client.wait_for("shown", written, deadline_ms=30_000)


async def test_a_read_takes_what_is_there_while_it_is_young_enough(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        total = await shop(client, LONG_MS)
        steps = {each.name: each.steps for each in (await client.status()).objects}
        for price in range(10, 30):
            written = await client.insert("sale", [{"price": price}])
        assert [await sold(client, name) for name in ("takings", "shown")] == [total] * 2
        assert (await client.peek("sale")).num_rows == 22
        with pytest.raises(DeadlineExceeded):
            # expires: the next step is far away
            await sold(client, "takings", written, deadline_ms=50)
        with pytest.raises(DeadlineExceeded):
            # expires: the next step is far away
            await client.wait_for("shown", written, deadline_ms=50)
        found = {each.name: each for each in (await client.status()).objects}
        assert {name: each.steps for name, each in found.items()} == steps
        assert {name: each.target_lag_ms for name, each in found.items()} == {
            "sale": 0,
            "takings": LONG_MS,
            "shown": 0,
        }
        assert 0 < found["takings"].lag_ms < LONG_MS
        objects = (await client.peek("penstock.objects")).to_pylist()
        assert {each["name"]: each["target_lag_ms"] for each in objects} == {
            "sale": None,
            "takings": LONG_MS,
            "shown": None,
        }


async def test_a_read_waits_where_it_would_be_older(tmp_path: Path) -> None:
    """It holds every write that was made so long before it, while writes go on."""
    async with running(tmp_path) as client:
        await shop(client, SHORT_MS)
        written = [(0, 7)]
        for price in range(1, 60):
            written.append((await client.insert("sale", [{"price": price}]), price))
            now = await client.write({})
            old = sum(price for time, price in written if time <= now - SHORT_MS)
            assert await sold(client, "shown") >= old
        last, total = written[-1][0], sum(price for _, price in written)
        assert [await sold(client, name, last) for name in ("takings", "shown")] == [total] * 2


async def test_what_a_view_said_outlives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await shop(client, LONG_MS)
    async with running(tmp_path) as client:
        (found,) = [each for each in (await client.status()).objects if each.name == "takings"]
        assert found.target_lag_ms == LONG_MS
        await passes(client)
        total = await sold(client, "takings")
        await client.insert("sale", [{"price": 5}])
        assert await sold(client, "takings") == total


async def test_an_age_is_not_negative(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await client.create_table("sale", {"price": "bigint"})
        with pytest.raises(InvalidUsage, match="target_lag_ms = -1"):
            await client.create_materialized_view("v", "select price from sale", target_lag_ms=-1)
