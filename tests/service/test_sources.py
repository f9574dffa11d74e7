"""Sources and sinks in the whole service, on the in-memory engine."""

from __future__ import annotations

import logging
import sys
from collections import Counter as Bag
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import deltalake
import pytest

from actors.connectors.sources.counter import CounterSeries
from actors.connectors.sources.source import SourceRows
from actors.control.controller.catalog.ddl import CatalogStore
from actors.doors.client.client import Client
from actors.doors.commands.status import summary, take_snapshot
from actors.durable.persist import PersistClient
from actors.model.protocol.api import ObjectHealth, SourceStatus
from actors.runtime.errors import (
    DeadlineExceeded,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    UnknownObject,
)
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from service_house import running_service  # type: ignore[import-not-found]

CHURN = {"kind": "churn", "keys": 50, "rate": 2_000, "seed": 5}


def settings_of(tmp_path: Path, **changes: Any) -> Settings:
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "in").mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "source_tick_ms": 50,
        "statistics_ms": 50,
        "sink_commit_ms": 50,
        "maintenance_ms": 20,
        "sink_dir": str(tmp_path / "out"),
        "source_dirs": str(tmp_path / "in"),
    }
    given |= changes
    return draw_for_test(Settings(**given), given)


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[Client]:
    async with running_service(settings_of(tmp_path, **changes)) as (_, client):
        yield client


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Looks again and again; the test's time limit ends it."""
    while not await holds():
        await anyio.sleep(0.02)


async def source(client: Client, name: str) -> SourceStatus:
    (found,) = [each for each in await client.sources() if each.name == name]
    return found


async def rows_at(client: Client, name: str, time: int) -> Bag[tuple[Any, ...]]:
    table = await client.peek(name, as_of=time)
    return Bag(zip(*(column.to_pylist() for column in table.columns), strict=True))


async def test_a_source_is_made_read_joined_restarted_and_dropped(tmp_path: Path) -> None:
    uppers: list[int] = []
    for life in range(3):
        async with running(tmp_path) as client:
            if life == 0:
                await client.create_source("accounts", CHURN)
                await client.create_table("names", {"k": "bigint", "name": "string"})
                await client.insert("names", [{"k": 1, "name": "one"}])
                columns = (await client.peek("accounts")).column_names
                key, value = columns[0], columns[1]
                await client.create_materialized_view(
                    "sums", f"SELECT {key} % 5 AS g, count(*) AS n FROM accounts GROUP BY 1"
                )
            before = (await source(client, "accounts")).upper
            assert all(before >= upper for upper in uppers), "frontiers never go back"
            await client.wait_for("sums", before + 100)
            time = before + 100
            found = await rows_at(client, "accounts", time)
            assert set(found.values()) <= {1}
            expected = Bag(row[0] % 5 for row in found.elements())
            assert await rows_at(client, "sums", time) == Bag(expected.items())
            status = await source(client, "accounts")
            assert (status.kind, status.health.status) == ("churn", "running")
            await until(lambda: _messages(client, "accounts"))
            uppers.append(status.upper)
    assert value
    async with running(tmp_path) as client:
        with pytest.raises(ObjectInUse, match="sums"):
            await client.drop_source("accounts")
        with pytest.raises(ObjectExists):
            await client.create_source("accounts", CHURN)
        await client.drop("sums")
        await client.drop_source("accounts")
        with pytest.raises(UnknownObject):
            await client.peek("accounts")
        assert await client.sources() == ()
        await client.create_source("accounts", CHURN)
        assert (await client.peek("accounts")).num_rows >= 0


async def _messages(client: Client, name: str) -> bool:
    statistics = (await source(client, name)).statistics
    return statistics is not None and statistics.messages > 0 and statistics.rows_inserted > 0


async def test_what_is_wrong_is_refused_by_name_and_nothing_is_made(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        for config, said in (
            ({"kind": "nothing"}, "nothing"),
            ({"kind": "counter", "rate": -1}, "rate"),
            (
                {"kind": "counter", "speed": 1},
                "speed.*available: seed, rate.*; did you mean 'seed'",
            ),
            ({"kind": "files", "folder": "/etc", "format": "csv", "columns": {"k": 1}}, "columns"),
            ({"rate": 1}, "kind"),
            ({"kind": "files", "folder": "/etc", "format": "csv"}, "source_dirs"),
        ):
            with pytest.raises(InvalidUsage, match=said):
                await client.create_source("s", config)
        with pytest.raises(InvalidUsage, match="no_such"):
            await client.create_source("s", {"kind": "nexmark"}, ["no_such"])
        await client.create_table("t", {"a": "bigint"})
        with pytest.raises(ObjectExists):
            await client.create_source("s", {"kind": "nexmark"}, {"bid": "t"})
        with pytest.raises(UnknownObject):
            await client.drop_source("s")
        with pytest.raises(InvalidUsage, match="kind"):
            await client.create_sink("k", "t", "nothing")
        with pytest.raises(InvalidUsage, match="sink_dir"):
            await client.create_sink("k", "t", "delta", {"folder": "/etc/x"})
        assert await client.sources() == await client.sinks() == ()
        await client.create_source("n", {"kind": "counter"})
        with pytest.raises(InvalidUsage, match="cannot write to"):
            await client.insert("n", [{"counter": 1}])


async def test_one_table_of_a_source_goes_alone_and_comes_again(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await client.create_source("m", {"kind": "nexmark", "rate": 5_000}, ["bid", "person"])
        assert (await client.peek("person")).num_rows >= 0
        await client.drop("person")
        with pytest.raises(UnknownObject):
            await client.peek("person")
        upper = (await source(client, "m")).upper
        await client.wait_for("bid", upper + 100)
        assert [table.outside for table in (await source(client, "m")).tables] == ["bid"]


async def test_what_is_dropped_ends_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = ["bid", "person"]
    async with running(tmp_path, source_tick_ms=5) as client:
        caplog.clear()
        for _ in range(5):
            await client.create_source("s", {"kind": "nexmark", "rate": 5_000}, tables)
            for name in tables:
                await client.peek(name)  # it is at work
            await client.drop("person")
            await client.wait_for("bid", (await source(client, "s")).upper + 10)
            await client.drop_source("s")
        loud = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert loud == []


async def test_what_is_looked_up_while_it_is_dropped_ends_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards are gone, and the controller hears late that they are."""
    missed: list[str] = []
    state, drop_all = PersistClient.state, CatalogStore.drop_all

    async def noted(persist: PersistClient, shard: str) -> Any:
        try:
            return await state(persist, shard)
        except UnknownObject:
            missed.append(shard)
            raise

    async def late(store: CatalogStore, *given: Any) -> Any:
        changed = await drop_all(store, *given)

        async def is_missed() -> bool:
            return bool(missed)

        await until(is_missed)
        return changed

    async with running(tmp_path, source_tick_ms=5) as client:
        await client.create_source("s", {"kind": "counter", "rate": 1_000})
        await client.peek("s")
        caplog.clear()
        monkeypatch.setattr(PersistClient, "state", noted)
        monkeypatch.setattr(CatalogStore, "drop_all", late)
        await client.drop_source("s")
        loud = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert loud == []


@pytest.mark.long
async def test_a_sick_source_leaves_the_healthy_ones_alone(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "sick"
    async with running(tmp_path, retry_delay_ms_min=10, retry_delay_ms_max=50) as client:
        folder.mkdir()
        columns = {"a": "bigint"}
        config = {"kind": "files", "folder": str(folder), "format": "csv", "columns": columns}
        await client.create_source("sick", config | {"poll_ms": 20})
        await client.create_source("well", {"kind": "counter", "rate": 1_000})
        folder.rename(tmp_path / "in" / "gone")

        seen: list[ObjectHealth] = []

        async def stalled() -> bool:
            seen.append((await source(client, "sick")).health)
            return seen[-1].status == "stalled"

        await until(stalled)
        assert "sick" in seen[-1].error  # at another look it may be tried again

        async def told() -> bool:
            rows = (await client.peek("penstock.errors")).to_pylist()
            objects = {row["object"] for row in rows}
            return objects == {"sick"} and "sick" in str(rows[0]["text"])

        await until(told)

        async def shown() -> bool:  # between two tries the source may show no error
            told = dict(summary(await take_snapshot(client), None))
            return told["errors"] == "1" and "stalled for" in told.get("  sick", "")

        await until(shown)
        upper = (await source(client, "well")).upper
        await client.wait_for("well", upper + 300)
        assert (await source(client, "well")).health.status == "running"
        (tmp_path / "in" / "gone").rename(folder)

        async def well_again() -> bool:
            return (await source(client, "sick")).health.status == "running"

        await until(well_again)

        async def no_errors() -> bool:
            return not (await client.peek("penstock.errors")).to_pylist()

        await until(no_errors)
        failed = (await source(client, "sick")).failed
        assert failed is not None
        assert failed.status == "stalled"
        assert "sick" in failed.error
        found = await client.peek("penstock.sources", columns=["name", "failed"])
        assert {row["name"]: row["failed"] for row in found.to_pylist()} == {
            "sick": failed.error,
            "well": None,
        }


async def test_a_sink_writes_what_a_view_holds_over_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "sums"
    for life in range(2):
        async with running(tmp_path) as client:
            if life == 0:
                await client.create_source("accounts", CHURN | {"up_to": 4_000})
                key = (await client.peek("accounts")).column_names[0]
                await client.create_materialized_view(
                    "sums", f"SELECT {key} % 5 AS g, count(*) AS n FROM accounts GROUP BY 1"
                )
                await client.create_sink(
                    "lake", "sums", "delta", {"folder": str(folder), "mode": "current"}
                )
            else:

                async def all_there() -> bool:
                    statistics = (await source(client, "accounts")).statistics
                    return statistics is not None and "4000" in (
                        statistics.position_committed or ""
                    )

                await until(all_there)
                upper = (await source(client, "accounts")).upper
                time = upper - 1
                await client.wait_for("sums", time)
                expected = await rows_at(client, "sums", time)

                async def equal() -> bool:
                    if not deltalake.DeltaTable.is_deltatable(str(folder)):
                        return False  # its first commit is still to come
                    table = deltalake.DeltaTable(str(folder)).to_pyarrow_table()
                    held = zip(table["g"].to_pylist(), table["n"].to_pylist(), strict=True)
                    return Bag(held) == expected  # noqa: B023

                await until(equal)

                async def at_work() -> bool:
                    told = (await client.peek("penstock.operators")).to_pylist()
                    did = {(row["name"], row["operator"]): row for row in told}
                    wanted = ("accounts", "Append"), ("lake", "Read"), ("lake", "Write")
                    return did.keys() >= {*wanted} and all(
                        did[each]["rows"] > 0 and did[each]["ms"] > 0 for each in wanted
                    )

                await until(at_work)
                (sink,) = await client.sinks()
                assert (sink.on, sink.kind, sink.health.status) == ("sums", "delta", "running")
                with pytest.raises(ObjectInUse, match="lake"):
                    await client.drop("sums")
                await client.drop_sink("lake")
                await client.drop("sums")


async def test_the_first_read_waits_for_the_first_contents(tmp_path: Path) -> None:
    """Whoever has just named a source reads what it brings, not the emptiness before it."""
    async with running(tmp_path) as client:
        config = {"kind": "tpch", "scale": 0.001, "rate": 1}
        await client.create_source("s", config, ["nation", "region"])
        assert (await client.peek("nation")).num_rows == 25
        await client.drop_source("s")
        await client.create_source("s", config, ["nation", "region"])
        queried = [each async for each in client.query("SELECT r_name FROM region")]
        assert sum(batch.num_rows for batch in queried) == 5
        # What a query reads that is no plain read, only its analysis tells.
        await client.drop_source("s")
        await client.create_source("s", config, ["nation", "region"])
        counted = "SELECT count(*) AS n FROM region"
        assert [each.to_pylist() async for each in client.query(counted)] == [[{"n": 5}]]
        await client.drop_source("s")
        await client.create_source("s", config, ["nation", "region"])
        copied = await client.copy_to("nation", str(tmp_path / "state" / "copies" / "nation"))
        assert copied.rows == 25


async def test_a_read_of_a_source_that_brings_nothing_says_why_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents(*_: object) -> Iterator[SourceRows]:
        raise OSError("the tape is torn")

    monkeypatch.setattr(CounterSeries, "contents", contents)
    async with running(tmp_path) as client:
        await client.create_source("n", {"kind": "counter", "rate": 1})
        with pytest.raises(DeadlineExceeded, match="n received no contents within 40 ms"):
            await client.peek("n", deadline_ms=40)  # expires: no contents ever come
        with pytest.raises(DeadlineExceeded, match="n received no contents within 400 ms"):
            text = "SELECT count(*) AS n FROM n"
            async for _ in client.query(text, deadline_ms=400):  # expires: when it is analysed
                pass
        with pytest.raises(InvalidUsage, match="deadline_ms = 0"):
            await client.peek("n", deadline_ms=0)


SERVE = """
import sys, anyio
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_sources import settings_of
from actors.service import Service
from actors.testing.engine import in_memory_engine
async def main():
    async with Service(settings_of(Path(sys.argv[1])), engine=in_memory_engine()) as service:
        print(service.address, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.long
async def test_nothing_is_lost_or_taken_twice_by_kill_9(tmp_path: Path) -> None:
    """The counter gives every number once, whatever is killed when."""
    last = 0
    with anyio.fail_after(200):
        for life in range(5):
            place = [str(tmp_path), *map(str, Path(__file__).parents[:2])]
            process = await anyio.open_process([sys.executable, "-c", SERVE, *place], stderr=None)
            try:
                assert process.stdout is not None
                address = (await process.stdout.receive()).decode().strip()
                async with await Client.connect(address) as client:
                    if life == 0:
                        await client.create_source("numbers", {"kind": "counter", "rate": 300})
                    await client.peek("numbers")  # waits for the first contents
                    upper = (await source(client, "numbers")).upper
                    await client.wait_for("numbers", upper + 150 + 70 * life)
                    found = sorted((await client.peek("numbers"))["counter"].to_pylist())
                    assert found == list(range(1, len(found) + 1))
                    assert len(found) >= last
                    last = len(found)
            finally:
                process.kill()
                await process.aclose()
    assert last > 0
