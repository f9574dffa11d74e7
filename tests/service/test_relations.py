"""The relations of the service about itself, on the whole service with the in-memory engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actors.doors.client.client import Client
from actors.model.protocol.relations import RELATIONS
from actors.runtime.errors import InvalidUsage, PenstockError, UnknownObject
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import EngineControls
from service_house import running_service  # type: ignore[import-not-found]


class World:
    def __init__(self, client: Client, controls: EngineControls) -> None:
        self.client = client
        self.controls = controls

    async def rows(self, name: str, **given: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (
            await self.client.peek(f"penstock.{name}", **given)
        ).to_pylist()
        return found


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again; every ask lets the service work."""
    while not await holds():
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def running(tmp_path: Path, **changes: Any) -> AsyncIterator[World]:
    """A service of two workers, with a table, a view and an index."""
    controls = EngineControls()

    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        hold_downgrade_ms=50,
        maintenance_ms=20,
        **changes,
    )
    settings = draw_for_test(settings, changes)
    async with running_service(settings, controls) as (_, client):
        await client.create_table("t", {"k": "bigint", "v": "bigint"}, ["k"])
        await client.create_materialized_view("w", "SELECT v, count(*) AS n FROM t GROUP BY v")
        await client.create_index("i", "w", ["v"])
        time = await client.insert("t", [{"k": k, "v": k % 3} for k in range(9)])
        await client.wait_for("w", time)
        await client.wait_for("i", time)
        yield World(client, controls)


async def test_every_relation_can_be_read_and_lists_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        for name, relation in RELATIONS.items():
            table = await world.client.peek(name)
            assert table.schema.names == list(relation.schema.names), name
            assert table.schema.types == relation.schema.arrow().types, name
        listed = await world.rows("relations", order_by=["name"])
        assert [row["name"] for row in listed] == sorted(RELATIONS)


async def test_they_tell_what_is_there(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        objects = {row["name"]: row for row in await world.rows("objects")}
        assert {n: row["kind"] for n, row in objects.items()} == {
            "t": "table",
            "w": "view",
            "i": "index",
        }
        assert (objects["t"]["key"], objects["w"]["depends"]) == ("k", "t")
        assert objects["w"]["sql"].startswith("SELECT v")
        dataflows = {row["id"]: row for row in await world.rows("dataflows")}
        assert {row["kind"] for row in dataflows.values()} == {"view", "index"}
        assert {row["replica"] for row in dataflows.values()} == {"r1"}
        frontiers = await world.rows("frontiers", columns=["worker", "name", "output"])
        index = [row for row in frontiers if row["name"] == "i"]
        assert sorted(row["worker"] for row in index) == [0, 1]
        upper = objects["i"]["upper"]
        assert min(row["output"] for row in index) >= upper - 1
        held = await world.rows("arrangements", where=[("kind", "=", "index")])
        assert sum(row["rows"] for row in held) == 3
        assert {row["key"] for row in held} == {"v"}
        operators = await world.rows("operators", where=[("name", "=", "w")])
        assert {"Aggregate", "Scan"} <= {row["operator"] for row in operators}
        assert operators[0]["depth"] == 0
        explained = await world.client.explain("w")
        assert all(row["text"] in explained for row in operators)
        [steps] = [await world.rows("steps", where=[("name", "=", "w")])]
        assert steps[-1]["rows_out"] == 3
        jobs = await world.rows("spark_jobs", where=[("state", "=", "done")])
        assert objects["w"]["id"] in {row["dataflow"] for row in jobs}
        shards = {row["object"]: row for row in await world.rows("shards")}
        assert shards["t"]["rows"] == 9
        holds = await world.rows("holds", where=[("object", "=", "t"), ("kind", "=", "hold")])
        assert f"dataflow/{objects['w']['id']}" in {row["holder"] for row in holds}
        [own] = await world.rows("sessions")
        assert own["requests"] > 10
        actors = await world.rows("actors", where=[("path", "=", "/controller")])
        assert actors[0]["received"] > 0
        counts = await world.rows("reconciliation", where=[("flag", "=", "reused")])
        assert [row["total"] for row in counts] == [0, 0]


async def test_what_waits_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        client = world.client
        world.controls.hold("Step")
        begun = world.controls.counts["Step"]
        time = await client.insert("t", [{"k": 100, "v": 7}])
        await world.controls.wait_started("Step", begun + 1)
        stream = client.subscribe("t")
        await anext(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(client.peek, "w", time, deadline_ms=400_000))

            async def waits() -> bool:
                found = await world.rows("peeks", where=[("object", "=", "w")])
                return [row["state"] for row in found] == ["waiting until sealed"]

            await until(waits)
            [waiting] = await world.rows(
                "peeks", where=[("kind", "=", "read"), ("time", "=", time)]
            )
            assert waiting["waited_ms"] > 0
            assert waiting["deadline_ms"] == 400_000
            [heard] = await world.rows("subscribes")
            assert (heard["object"], heard["told"] > 0) == ("t", True)
            [own] = await world.rows("sessions")
            assert own["subscribes"] == 1
            jobs = await world.rows("spark_jobs", where=[("state", "=", "running")])
            assert [row["kind"] for row in jobs] == ["Step"]
            sources = await world.rows("parts_in_flight")
            assert {row["shard"] for row in sources} >= {"u1"}
            world.controls.release("Step")
        await stream.aclose()
        assert await world.rows("subscribes") == []


async def test_frontiers_tell_how_far_a_view_is_behind_while_it_computes(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        client = world.client
        world.controls.hold("Step")
        begun = world.controls.counts["Step"]
        first = await client.insert("t", [{"k": 100, "v": 7}])
        await world.controls.wait_started("Step", begun + 1)
        last = await client.insert("t", [{"k": 101, "v": 7}])
        of = {"where": [("name", "=", "w"), ("worker", "=", 0)]}

        async def heard() -> bool:
            [row] = await world.rows("frontiers", **of)
            return row["input"] is not None and int(row["input"]) > last

        await until(heard)
        [row] = await world.rows("frontiers", **of)
        assert row["write"] == row["output"] <= first
        assert row["lag_ms"] == row["input"] - row["output"] > 0
        world.controls.release("Step")
        await client.wait_for("w", last)

        async def up() -> bool:
            [row] = await world.rows("frontiers", **of)
            return row["output"] is not None and int(row["output"]) > last

        await until(up)


async def test_a_copy_under_way_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        assert await world.rows("copies") == []
        client, place = world.client, "out"
        world.controls.hold("Step")
        time = await client.insert("t", [{"k": 100, "v": 7}])
        async with anyio.create_task_group() as group:

            async def copy() -> None:
                await client.copy_to("w", place, as_of=time)

            group.start_soon(copy)

            async def told() -> bool:
                found = await world.rows("dataflows", where=[("kind", "=", "copy")])
                return [row["name"] for row in found] == ["w"]

            await until(told)
            [row] = await world.rows("copies")
            assert (row["object"], row["as_of"], row["state"]) == ("w", time, "waiting")
            assert (row["destination"], row["format"]) == (place, "parquet")
            dataflow = await world.rows("dataflows", where=[("id", "=", row["dataflow"])])
            assert len(dataflow) == 1
            assert await world.rows("frontiers", where=[("id", "=", row["dataflow"])]) == []
            world.controls.release("Step")
        assert await world.rows("copies") == []


async def test_errors_are_told_with_their_time_until_they_are_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        client = world.client
        assert await world.rows("errors") == []
        await client.create_materialized_view("q", "SELECT 10 / (v - 7) AS x FROM t")
        time = await client.insert("t", [{"k": 100, "v": 7}])
        await client.wait_for("q", time)

        async def told() -> bool:
            return bool(await world.rows("errors"))

        await until(told)
        [row] = await world.rows("errors")
        assert (row["object"], row["state"]) == ("q", "errored")
        assert row["text"]
        assert row["since_ms"] > 0
        await client.wait_for("q", await client.delete("t", [{"k": 100}]))

        async def gone() -> bool:
            return not await world.rows("errors")

        await until(gone)


async def test_order_limit_offset_and_columns_go_over_all_workers(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3) as world:
        found = await world.rows(
            "frontiers",
            columns=["worker"],
            where=[("name", "=", "i")],
            order_by=["worker desc"],
            limit=1,
            offset=1,
        )
        assert found == [{"worker": 1}]
        keyed = await world.rows("frontiers", key=[{"worker": 2}, {"worker": 0}])
        assert {row["worker"] for row in keyed} == {0, 2}


async def test_what_does_not_fit_a_response_goes_by_the_stash(tmp_path: Path) -> None:
    async with running(tmp_path, inline_bytes_max=2_000) as world:
        for number in range(12):
            await world.client.create_table(f"t{number}", {"a_long_name": "bigint"})
            await world.client.create_index(f"i{number}", f"t{number}", ["a_long_name"])
        found = await world.rows("frontiers", where=[("worker", "=", 1)])
        assert len(found) == 14


async def test_what_cannot_be_done_with_a_relation_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, result_bytes_max=5_000, inline_bytes_max=1_000) as world:
        client = world.client

        async def refused(kind: type[PenstockError], made: Any) -> str:
            with pytest.raises(kind) as raised:
                await made
            return str(raised.value)

        name = "penstock.steps"
        assert "penstock.objects" in await refused(UnknownObject, client.peek("penstock.nothing"))
        for relation in (name, "penstock.objects"):
            assert relation in await refused(InvalidUsage, client.peek(relation, 5))
            assert relation in await refused(InvalidUsage, anext(client.subscribe(relation)))
            assert relation in await refused(InvalidUsage, client.wait_for(relation, 5))
            wrong = client.peek(relation, columns=["nothing"])
            assert "nothing" in await refused(InvalidUsage, wrong)
        assert name in await refused(InvalidUsage, client.insert(name, [{"a": 1}]))
        assert name in await refused(InvalidUsage, client.create_table(name, {"a": "int"}))
        assert name in await refused(
            InvalidUsage, client.create_materialized_view(name, "SELECT 1 AS a")
        )
        assert name in await refused(InvalidUsage, client.create_index("j", name, ["id"]))
        assert name in await refused(InvalidUsage, client.drop(name))
        over = client.create_materialized_view("x", f"SELECT id FROM {name}")
        assert "can only be read" in await refused(InvalidUsage, over)
        large = await refused(InvalidUsage, client.peek("penstock.actors"))
        assert "result_bytes_max" in large
        assert (await client.peek("penstock.actors", columns=["path"])).num_rows > 5


async def test_adapters_show_their_client_and_what_they_did(tmp_path: Path) -> None:
    async with running(tmp_path, workers=3) as world:
        await world.client.insert("t", [{"k": 100, "v": 7}])
        rows = await world.rows("adapters")
        found = sorted((row["half"], row["worker"]) for row in rows)
        assert found == [(half, worker) for half in ("compute", "storage") for worker in range(3)]
        of = {(row["half"], row["worker"]): row for row in rows}
        for half in ("compute", "storage"):
            clients = {of[half, worker]["client"] for worker in range(3)}
            assert len(clients) == 1
            assert None not in clients
        assert all(row["since_ms"] > 0 and row["clients_waiting"] == 0 for row in rows)
        # Worker 0 orders the commands of the compute half, and all workers answer them.
        assert of["compute", 0]["commands"] > 0
        assert of["compute", 1]["commands"] == of["compute", 2]["commands"] == 0
        assert all(of["compute", worker]["forwarded"] > 0 for worker in range(3))
        assert all(of["storage", worker]["commands"] > 0 for worker in range(3))
