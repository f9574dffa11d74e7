"""Queries in a separate Spark: what one of them does to it, no view sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from actors import Client, Settings
from actors.engine.spark.disk_watch import PARTS_SUFFIX, disk_refusal, running_bytes
from actors.engine.spark.engine_memory import heap_bytes, machine_memory_bytes
from actors.engine.spark.engine_start import CHILD_FOLDER, OUT_FOLDER
from actors.engine.spark.query_engine import has_query_engine, query_settings, view_settings
from actors.runtime.errors import BadSettings, JobTooLarge
from actors.service import Service
from actors.testing.check_views import for_short_lives

MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "memory_mib", "wanted"),
    [
        ({}, 2047, False),
        ({}, 2048, True),
        ({"query_engine_memory": "1g"}, 2048, False),
        ({"query_engine_memory": "1g"}, 3072, True),
        ({"query_engine": "own"}, 1, True),
        ({"query_engine": "shared"}, 1 << 20, False),
        ({"spark_master": "sc://localhost:15002"}, 1 << 20, False),
    ],
)
def test_queries_have_their_own_spark_where_memory_allows(
    changes: dict[str, Any], memory_mib: int, wanted: bool
) -> None:
    settings = Settings(**({"spark_driver_memory": "512m"} | changes))
    assert has_query_engine(settings, memory_mib * MIB) is wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_engine": "yes"}, "invalid query_engine 'yes'"),
        ({"query_engine_memory": "much"}, "invalid query_engine_memory 'much'"),
    ],
)
def test_an_invalid_setting_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSettings, match=words):
        has_query_engine(Settings(**changes), machine_memory_bytes())


def test_clients_of_spark_connect_reach_the_queries_spark_alone() -> None:
    settings = Settings(connect_listen="127.0.0.1:0", query_disk_bytes_max=7)
    own = query_settings(settings)
    assert (view_settings(settings).connect_listen, own.connect_listen) == ("", "127.0.0.1:0")
    assert (own.engine_disk_bytes_max, own.engine_attempts_max) == (7, 1)
    assert heap_bytes(own.spark_driver_memory) == heap_bytes(settings.spark_driver_memory)


def test_disk_is_counted_of_what_runs(tmp_path: Path) -> None:
    done, unfinished = tmp_path / OUT_FOLDER, tmp_path / OUT_FOLDER / f"a{PARTS_SUFFIX}" / "tasks"
    for folder in (done, unfinished, tmp_path / CHILD_FOLDER / "local" / "blocks"):
        folder.mkdir(parents=True)
        (folder / "rows").write_bytes(bytes(MIB))
    used = running_bytes(tmp_path)
    assert 2 * MIB <= used < 3 * MIB
    assert disk_refusal(used, used) == ""
    assert f"take {used} bytes of disk" in disk_refusal(used, used - 1)


async def rows(client: Client, sql: str) -> list[dict[str, Any]]:
    return [row async for batch in client.query(sql) for row in batch.to_pylist()]


async def engines(client: Client) -> dict[str, str]:
    """Return what the executors say of themselves."""
    report = await client.actors()
    return {each.path.strip("/"): each.doing for each in report.actors}


@pytest.mark.second
async def test_a_query_that_ends_its_spark_ends_alone(tmp_path: Path) -> None:
    """A heap that is full, and a disk that is full, are errors of that query, and no view's step
    meets them; nor does one wait for queries without end."""
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        spark_master="local[2]",
        spark_driver_memory="512m",
        query_engine="own",
        query_disk_bytes_max=64 * MIB,
    )
    heap = """SELECT max(length(s)) AS n FROM (
        SELECT concat_ws('', collect_list(repeat(cast(id AS string), 100000))) AS s
        FROM range(0, 1000000, 1, 1))"""
    disk = "SELECT id, uuid() AS u FROM range(200000000) ORDER BY u"
    async with (
        Service(for_short_lives(settings)) as service,
        await Client.connect(service.address) as client,
    ):
        await client.create_table("stock", {"item": "bigint", "n": "bigint"}, ["item"])
        await client.create_materialized_view("whole", "SELECT sum(n) AS n FROM stock")
        await client.insert("stock", [{"item": 0, "n": 1}])
        before = await engines(client)
        assert "not started" in before["queries"]
        for number, (text, words) in enumerate(
            ((heap, "ended the engine once"), (disk, "of disk")), 1
        ):
            with pytest.raises(JobTooLarge, match=words):
                await rows(client, text)
            time = await client.insert("stock", [{"item": number, "n": 1}])
            assert (await client.peek("whole", as_of=time)).to_pylist() == [{"n": number + 1}]
        assert await rows(
            client, "SELECT item FROM stock JOIN whole ON whole.n = 3 ORDER BY item"
        ) == [
            {"item": 0},
            {"item": 1},
            {"item": 2},
        ]
        async with anyio.create_task_group() as endless:
            ended = []

            async def run_without_end(operator: str) -> None:
                text = f"SELECT count(*) FROM range(1{'0' * 14}) WHERE hash(id) {operator} 7"
                ended.append(await rows(client, text))

            for operator in ("=", "<", ">"):
                endless.start_soon(run_without_end, operator)
            while "running 0" in (await engines(client))["queries"]:
                await anyio.sleep(0.01)
            for number in range(3, 23):
                time = await client.insert("stock", [{"item": number, "n": 1}])
                await client.wait_for("whole", time)
            assert not ended
            assert "running 0" not in (await engines(client))["queries"]
            endless.cancel_scope.cancel()
        after = await engines(client)
        assert "children lost 0" in after["spark"]
        assert "children lost 1" in after["queries"]
