"""One-off queries on the whole service, with the in-memory engine."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.control.controller.reads.queries import BATCH_ROWS, QueryTimedOut, _batches
from actors.doors.client.client import Client
from actors.doors.client.rows import expand
from actors.model.plan.jobs import FileDone
from actors.model.plan.schema import DIFF
from actors.replica.dataflow.engine import MadeFiles
from actors.runtime.errors import (
    DeadlineExceeded,
    DefiniteError,
    InvalidUsage,
    OperationCanceled,
    PenstockError,
    QueryRejected,
    ReadBelowSince,
    ReadTooFarAhead,
    ResourceBusy,
    UnknownObject,
    ViewInError,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing import engine
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import EngineControls
from deadlines import Deadlines  # type: ignore[import-not-found]
from query_corpus import COLUMNS, rows_of, sql_of  # type: ignore[import-not-found]
from service_house import running_service  # type: ignore[import-not-found]

JOINED = "SELECT c.name, t.k FROM t JOIN c ON t.s = c.s ORDER BY t.k DESC"


class World:
    def __init__(self, service: Service, client: Client, controls: EngineControls) -> None:
        self.service = service
        self.client = client
        self.controls = controls

    async def rows(self, sql: str, **given: Any) -> list[dict[str, Any]]:
        batches = [batch async for batch in self.client.query(sql, **given)]
        found: list[dict[str, Any]] = pa.Table.from_batches(batches).to_pylist()
        return found

    async def by_engine(self, sql: str) -> pa.Table:
        async with aclosing(self.client._queried(sql, None, None, engine=True)) as pieces:
            return expand(pa.concat_tables([piece async for piece in pieces]))

    async def by_read(self, sql: str) -> pa.Table:
        async with aclosing(self.client._queried(sql, None, None)) as pieces:
            return expand(pa.concat_tables([piece async for piece in pieces]))

    @property
    def selects(self) -> int:
        """Queries that the engine has begun."""
        return self.controls.counts["Select"]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again; every ask lets the service work."""
    while not await holds():
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[World]:
    controls = EngineControls()

    given: dict[str, Any] = {
        "state_dir": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "hold_downgrade_ms": 50,
        "maintenance_ms": 20,
    }
    settings = draw_for_test(Settings(**(given | changes)), changes)
    async with running_service(settings, controls) as (service, client):
        yield World(service, client, controls)


async def fill(client: Client) -> int:
    await client.create_table("t", COLUMNS, ["k"])
    await client.create_table("c", {"s": "string", "name": "string"})
    await client.insert("c", [{"s": "x", "name": "ex"}, {"s": "y", "name": "why"}])
    return await client.insert("t", [{"k": k, "s": "xyz"[k % 3], "n": k} for k in range(6)])


async def test_a_plain_read_needs_no_engine_and_everything_else_does(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        time = await fill(world.client)
        plain = "SELECT n AS number, k FROM t WHERE s = 'x' ORDER BY k DESC LIMIT 5"
        assert await world.rows(plain) == [{"number": 3, "k": 3}, {"number": 0, "k": 0}]
        assert world.selects == 0
        wanted = [
            {"name": name, "k": k} for name, k in [("why", 4), ("ex", 3), ("why", 1), ("ex", 0)]
        ]
        assert await world.rows(JOINED) == wanted
        assert world.selects == 1
        assert await world.rows(f"{JOINED};", as_of=time) == wanted
        assert await world.rows("SELECT 1 + 1 AS two") == [{"two": 2}]
        empty = [
            batch async for batch in world.client.query("SELECT k + 1 AS m FROM t WHERE k < 0")
        ]
        assert [(batch.num_rows, batch.schema.names) for batch in empty] == [(0, ["m"])]


async def test_the_in_memory_engine_works_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {}
    for name in ("run_select", "run_step", "analyzed"):
        noted = partial(_noted, seen.setdefault(name, set()), getattr(engine, name))
        monkeypatch.setattr(engine, name, noted)
    async with running(tmp_path) as world:
        await fill(world.client)
        await world.client.create_materialized_view(
            "v", "SELECT s, count(*) AS n FROM t GROUP BY s"
        )
        assert len(await world.rows("SELECT s FROM v JOIN c USING (s)")) == 2
    assert all(seen.values())
    assert threading.get_ident() not in set().union(*seen.values())


def _noted(threads: set[int], function: Callable[..., Any], *given: Any) -> Any:
    threads.add(threading.get_ident())
    return function(*given)


async def test_the_time_is_the_one_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        first = await fill(world.client)
        second = await world.client.insert("t", [{"k": 9, "s": "x", "n": 9}])
        for sql in ("SELECT count(*) AS n FROM t", "SELECT k FROM t"):
            before, after = await world.rows(sql, as_of=first), await world.rows(sql, as_of=second)
            assert (len(before), before == after) in [(1, False), (6, False)]
            assert await world.rows(sql) == after
        with pytest.raises(ReadTooFarAhead):
            await world.rows("SELECT count(*) AS n FROM t", as_of=second + 10**9)
        with pytest.raises(InvalidUsage):
            await world.rows("SELECT count(*) AS n FROM t", as_of=-1)


async def test_a_query_waits_until_its_time_is_sealed_and_no_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch, QueryTimedOut)
    async with running(tmp_path) as world:
        client = world.client
        await fill(client)
        await client.create_materialized_view("v", "SELECT s, count(*) AS n FROM t GROUP BY s")
        await client.wait_for("v", await client.write({}))
        sql = "SELECT sum(n) AS n FROM v"
        world.controls.hold("Step")
        time = await client.insert("t", [{"k": 9, "s": "x", "n": 9}])
        assert await world.rows(sql) == [{"n": 6}], "without a time it waits for nothing"

        async def waits() -> bool:
            wanted = [("kind", "=", "query")]
            told = await client.peek("penstock.peeks", where=wanted)
            return bool(told["state"].to_pylist() == ["waiting until sealed"])

        async with anyio.create_task_group() as group:

            async def ask_in_vain() -> None:
                with pytest.raises(DeadlineExceeded, match="100 ms: it was waiting until sealed"):
                    await world.rows(sql, as_of=time, deadline_ms=100)

            group.start_soon(ask_in_vain)
            await until(waits)
            deadlines.end(100)
        async with anyio.create_task_group() as group:
            found: list[Any] = []

            async def ask() -> None:
                found.extend(await world.rows(sql, as_of=time))

            group.start_soon(ask)
            await until(waits)
            assert found == []
            world.controls.release("Step")
        assert found == [{"n": 7}]


async def test_below_the_since_is_an_error_and_history_is_held_meanwhile(tmp_path: Path) -> None:
    async with running(tmp_path, retain_history_ms=1) as world:
        client = world.client
        first = await fill(client)
        sql = "SELECT count(*) AS n FROM t"

        async def holders() -> list[str]:
            wanted: Any = [("object", "=", "t"), ("kind", "=", "hold")]
            told = await client.peek("penstock.holds", where=wanted)
            return [name for name in told["holder"].to_pylist() if name.startswith("query/")]

        async def compacted() -> bool:
            await client.write({})
            told = await client.peek("penstock.shards", where=[("object", "=", "t")])
            since: int = told["since"][0].as_py()
            return since > first

        world.controls.hold("Select")
        async with anyio.create_task_group() as group:
            found: list[Any] = []

            async def ask() -> None:
                found.extend(await world.rows(sql))

            group.start_soon(ask)
            await world.controls.wait_started("Select")
            assert len(await holders()) == 1
            world.controls.release("Select")
        assert found == [{"n": 6}]
        assert await holders() == []
        await until(compacted)
        with pytest.raises(ReadBelowSince, match="history begins"):
            await world.rows(sql, as_of=first)
        assert await holders() == []


async def test_errors_have_names(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        client = world.client
        await fill(client)
        await client.create_materialized_view("v", "SELECT 10 / n AS x FROM t")

        async def refused(sql: str) -> PenstockError:
            with pytest.raises(PenstockError) as raised:
                await world.rows(sql)
            return raised.value

        assert isinstance(await refused("SELECT nothing FROM t"), QueryRejected)
        assert isinstance(await refused("SELEC k FROM t WHERE"), QueryRejected)
        assert isinstance(await refused("DROP TABLE t"), QueryRejected)
        assert isinstance(await refused("SELECT k FROM t; SELECT k FROM t"), QueryRejected)
        for name in ("__time", "__DIFF", "__error"):
            for column in ("k", "k + 1"):
                sql = f"SELECT {column} AS `{name}` FROM t"
                assert "reserved" in str(await refused(sql)), sql
        # Django counts so.
        assert await world.rows("SELECT count(*) AS __count FROM t WHERE k IS NULL") == [
            {"__count": 0}
        ]
        assert isinstance(await refused("SELECT count(*) AS n FROM unknown"), UnknownObject)
        assert isinstance(await refused("SELECT max(k) AS k FROM penstock.steps"), InvalidUsage)
        assert isinstance(await refused("SELECT 10 / n AS x FROM t"), DefiniteError)
        await client.wait_for("v", await client.write({}))
        for sql in ("SELECT x FROM v", "SELECT max(x) AS x FROM v"):
            assert isinstance(await refused(sql), ViewInError), sql
        world.controls.fail_next("Select", DefiniteError("as told"))
        assert "as told" in str(await refused("SELECT count(*) AS n FROM t"))
        with pytest.raises(InvalidUsage, match="deadline_ms"):
            await world.rows("SELECT count(*) AS n FROM t", deadline_ms=0)
        with pytest.raises(InvalidUsage, match="no history"):
            await world.rows("SELECT ms FROM penstock.steps", as_of=5)
        assert await world.rows("SELECT name FROM penstock.relations WHERE name = 'penstock.steps'")


async def test_a_client_that_goes_away_or_is_late_cancels_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch, QueryTimedOut)
    async with running(tmp_path) as world:
        client = world.client
        await fill(client)
        sql = "SELECT count(*) AS n FROM t"

        async def canceled(count: int) -> None:
            async def told() -> bool:
                wanted: Any = [("kind", "=", "Select"), ("state", "=", "canceled")]
                found = await client.peek("penstock.spark_jobs", where=wanted)
                return bool(found.num_rows == count)

            await until(told)

        world.controls.hold("Select")
        async with anyio.create_task_group() as group:

            async def ask_in_vain() -> None:
                with pytest.raises(DeadlineExceeded, match="200 ms: it was run by Spark"):
                    await world.rows(sql, deadline_ms=200)

            group.start_soon(ask_in_vain)
            await world.controls.wait_started("Select")
            deadlines.end(200)
        await canceled(1)
        async with anyio.create_task_group() as group:
            group.start_soon(world.rows, sql)
            await world.controls.wait_started("Select", 2)
            group.cancel_scope.cancel()
        await canceled(2)
        async with anyio.create_task_group() as group:
            other = await Client.connect(world.service.address)

            async def ask() -> None:
                with pytest.raises(PenstockError):
                    async for _ in other.query(sql):
                        pass

            begun = world.selects
            group.start_soon(ask)
            await world.controls.wait_started("Select", begun + 1)
            await other.aclose()
        await canceled(3)

        async def idle() -> bool:
            found = await client.peek("penstock.peeks", where=[("kind", "=", "query")])
            return not found.num_rows

        await until(idle)
        world.controls.release("Select")
        assert await world.rows(sql) == [{"n": 6}]


async def test_only_so_many_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines(monkeypatch, QueryTimedOut)
    async with running(tmp_path, queries_in_flight_max=1, queries_waiting_max=2) as world:

        async def queued(count: int) -> bool:
            found = await world.client.peek("penstock.peeks", where=[("kind", "=", "query")])
            states: list[str] = found["state"].to_pylist()
            return states.count("waiting for other queries") == count

        await fill(world.client)
        world.controls.hold("Select")
        sql = "SELECT count(*) AS n FROM t"
        async with anyio.create_task_group() as group:
            group.start_soon(world.rows, sql)
            await world.controls.wait_started("Select")

            async def ask_in_vain() -> None:
                with pytest.raises(DeadlineExceeded, match="it was waiting for other queries"):
                    await world.rows(sql, deadline_ms=1)

            group.start_soon(ask_in_vain)
            await until(lambda: queued(1))
            deadlines.end(1)
            await until(lambda: queued(0))
            waited: list[list[Any]] = []

            async def wait(sql: str) -> None:
                waited.append(await world.rows(sql))

            for number in range(2):
                group.start_soon(wait, f"SELECT count(*) + {number} AS n FROM t")

            await until(lambda: queued(2))
            with pytest.raises(ResourceBusy, match="queries_waiting_max"):
                await world.rows(sql)
            assert await world.rows("SELECT k FROM t WHERE k = 1") == [{"k": 1}], "a read goes on"
            world.controls.release("Select")
        assert waited == [[{"n": 6}], [{"n": 7}]]


async def test_rows_stream_in_pieces_that_wait_for_the_client(tmp_path: Path) -> None:
    limits = {"inline_bytes_max": 4_000, "requests_in_flight_max": 4, "queries_in_flight_max": 1}
    async with running(tmp_path, **limits) as world:
        client = world.client
        await client.create_table("wide", {"k": "bigint", "s": "string"})
        await client.insert("wide", [{"k": k, "s": "x" * 90} for k in range(2_000)])
        sql = "SELECT k + 1 AS k, s FROM wide ORDER BY k"
        # A socket might take all of them; this link takes four.
        async with await Client.in_process(world.service) as slow:
            async with aclosing(slow.query(sql)) as batches:
                first = await anext(batches)
                assert first.num_rows < 60
                told = await client.peek("penstock.peeks", where=[("kind", "=", "query")])
                assert told["state"].to_pylist() == ["streaming"]
                # A client that takes its time keeps no other query from running.
                counted = await world.rows("SELECT count(*) AS n FROM wide")
                assert counted == [{"n": 2_000}]
                rest = [batch async for batch in batches]
            found = [k for batch in [first, *rest] for k in batch["k"].to_pylist()]
            assert found == [*range(1, 2_001)]
            async with aclosing(slow.query(sql)) as batches:
                await anext(batches)

        async def idle() -> bool:
            found = await client.peek("penstock.peeks", where=[("kind", "=", "query")])
            return not found.num_rows

        await until(idle)


async def test_a_row_that_fits_no_message_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, result_bytes_max=9_000, inline_bytes_max=4_000) as world:
        await world.client.create_table("wide", {"s": "string"})
        await world.client.insert("wide", [{"s": "x" * 5_000}])
        with pytest.raises(InvalidUsage, match="result_bytes_max"):
            await world.rows("SELECT concat(s, s) AS s FROM wide")


async def test_a_plain_read_and_the_engine_give_the_same_answer(tmp_path: Path) -> None:
    dice = random.Random(11)
    async with running(tmp_path, workers=3) as world:
        client = world.client
        await client.create_table("t", COLUMNS, ["k"])

        rows = rows_of(dice)
        await client.insert("t", rows)
        await client.create_index("by_n", "t", ["n"])
        await client.wait_for("by_n", await client.delete("t", [{"k": k} for k in range(0, 40, 7)]))
        answered = 0
        for number in range(200):
            sql, ordered = sql_of(dice)
            begun = world.selects
            read = await world.by_read(sql)
            assert world.selects == begun, f"this is no plain read: {sql}"
            made = await world.by_engine(sql)
            assert world.selects == begun + 1
            assert read.schema.equals(made.schema), (number, sql)
            left, right = (
                [tuple(row.values()) for row in table.to_pylist()] for table in (read, made)
            )
            if ordered:
                assert left == right, (number, sql)
            else:
                assert Counter(left) == Counter(right), (number, sql)
            answered += len(left)
        assert answered > 500, "the queries find something"


async def test_a_service_that_stops_lets_go_of_its_queries(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await fill(world.client)
        world.controls.hold("Select")
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(PenstockError):
                    await world.rows("SELECT count(*) AS n FROM t")

            group.start_soon(ask)
            await world.controls.wait_started("Select")
            world.service.stop()
            await world.client.aclose()
    async with running(tmp_path) as world:
        wanted: Any = [("object", "=", "t"), ("kind", "=", "hold")]
        told = await world.client.peek("penstock.holds", where=wanted)
        assert told["holder"].to_pylist() == ["retain"]
        assert await world.rows("SELECT count(*) AS n FROM t") == [{"n": 6}]


def test_rows_in_files_come_in_order_and_in_their_types(tmp_path: Path) -> None:
    files = []
    for number in range(3):
        path = tmp_path / f"{number}.parquet"
        numbers = pa.array(range(number * 20_000, (number + 1) * 20_000), pa.int32())
        pq.write_table(pa.table({"k": numbers}), path)
        files.append(FileDone(str(path), 20_000))
    shape = pa.schema([("k", pa.int64()), (DIFF, pa.int64())])
    batches = list(_batches(MadeFiles(tuple(files)), shape))
    assert max(batch.num_rows for batch in batches) <= BATCH_ROWS
    found = pa.Table.from_batches(batches, shape)
    assert found["k"].to_pylist() == [*range(60_000)]
    assert set(found[DIFF].to_pylist()) == {1}
    assert list(_batches(MadeFiles(()), shape)) == [], "a large query without an answer"


async def test_cancel_on_request_is_named(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        await fill(world.client)
        world.controls.hold("Select")
        exchange = world.client._exchange
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(OperationCanceled):
                    await world.rows("SELECT count(*) AS n FROM t")

            group.start_soon(ask)
            await world.controls.wait_started("Select")
            (number,) = exchange._slots
            await exchange.cancel(number)
