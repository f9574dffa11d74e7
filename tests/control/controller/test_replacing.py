"""CREATE OR REPLACE and ALTER of views that are read, followed and built upon meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from actors.doors.client.client import Client
from actors.model.plan.jobs import Answer, Job
from actors.model.plan.schema import DIFF, TIME
from actors.model.protocol.api import AlterObject
from actors.runtime.errors import (
    EngineLost,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    OperationCanceled,
    QueryRejected,
    ReadBelowSince,
    UnknownObject,
    ViewInError,
)
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import InMemoryExecutor

SUMS = "select k, count(*) as n, sum(v) as s from t group by k"
EVEN = "select k, count(*) as n, sum(v) as s from t where v > 10 group by k"
Rows = list[tuple[int, int]]


class LosingExecutor(InMemoryExecutor):
    """An engine that is lost in each job of one dataflow's."""

    lost = ""

    def answer(self, job: Job) -> Answer:
        if self.lost and job.job_id.startswith(f"{self.lost}/"):
            raise EngineLost("lost on purpose")
        return super().answer(job)


@asynccontextmanager
async def running(
    tmp_path: Path, executor: InMemoryExecutor | None = None, **changed: Any
) -> AsyncIterator[Client]:
    given = {"state_dir": str(tmp_path / "state"), "listen": "127.0.0.1:0", **changed}
    with anyio.fail_after(300):
        service = Service(
            draw_for_test(Settings(**given), given),
            engine=lambda system, settings, scratch: system.spawn(
                lambda: executor or InMemoryExecutor(), "engine"
            ),
        )
        async with service, await Client.in_process(service) as client:
            yield client


def sums(rows: Rows, *, above: int = -1) -> Counter[tuple[int, int, int]]:
    """What `SUMS` and `EVEN` hold of these rows."""
    found: dict[int, list[int]] = {}
    for k, v in rows:
        if v > above:
            found.setdefault(k, []).append(v)
    return Counter((k, len(values), sum(values)) for k, values in found.items())


def counted(table: pa.Table) -> Counter[tuple[Any, ...]]:
    names = [name for name in table.column_names if not name.startswith("__")]
    return Counter(zip(*(table[name].to_pylist() for name in names), strict=True))


class Writer:
    """Rows of `t`, and what it held at each time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rows: Rows = []
        self.at: dict[int, Rows] = {}
        self.done = False
        self._lock = anyio.Lock()

    async def write(self, *rows: tuple[int, int]) -> int:
        # One after the other: what the table holds at each time is known then.
        async with self._lock:
            columns = {"k": [k for k, _ in rows], "v": [v for _, v in rows]}
            time = await self._client.insert("t", pa.table(columns))
            self.rows += rows
            self.at[time] = list(self.rows)
            return time

    async def keep_writing(self) -> None:
        number = 0
        # Until it is told so: a write that is canceled may be there or not.
        while not self.done:
            number += 1
            await self.write((number % 3, number))


async def started(client: Client) -> Writer:
    await client.create_table("t", {"k": "bigint", "v": "bigint"})
    writer = Writer(client)
    await writer.write((1, 5), (1, 50), (2, 7))
    return writer


async def test_readers_and_followers_move_at_one_time(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        writer = await started(client)
        await client.create_materialized_view("v", SUMS)
        await client.create_materialized_view("above", "select n, count(*) as m from v group by n")
        await client.create_index("i", "v", ["k"])
        held: Counter[tuple[Any, ...]] = Counter()
        seen: dict[int, Counter[tuple[Any, ...]]] = {}

        async def follow() -> None:
            async with aclosing(client.subscribe("v")) as changes:
                async for change in changes:
                    if change.table is not None:
                        for row in sorted(change.table.to_pylist(), key=lambda row: row[TIME]):
                            time, diff = row.pop(TIME), row.pop(DIFF)
                            held[tuple(row.values())] += diff
                            assert held[tuple(row.values())] >= 0, (time, row)
                    seen[change.upper] = +held

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            group.start_soon(writer.keep_writing)
            await client.create_materialized_view("v", EVEN, replace=True, comment="of large ones")
            last = await writer.write((2, 99))
            await client.wait_for("v", last)
            writer.done = True
            while max(seen, default=0) <= last:
                await anyio.sleep(0.01)
            await writer.write((0, 0))
            group.cancel_scope.cancel()
        switched = False
        for time, rows in sorted(writer.at.items()):
            if time > last:
                continue
            await client.wait_for("above", time)
            found = counted(await client.peek("v", as_of=time))
            old, new = sums(rows), sums(rows, above=10)
            switched = switched or (found == new and found != old)
            assert found == (new if switched else old), time
            by_number = Counter(n for _, n, _ in found)
            assert counted(await client.peek("above", as_of=time)) == Counter(by_number.items())
        assert switched
        for upper, contents in seen.items():
            behind = max((time for time in writer.at if time < upper), default=None)
            if behind is not None:
                assert contents == counted(await client.peek("v", as_of=behind)), upper
        found = counted(await client.peek("v", key={"k": 2}))
        assert found == Counter(row for row in sums(writer.rows, above=10) if row[0] == 2)
        (view,) = [each for each in (await client.status()).objects if each.name == "v"]
        assert (view.sql, view.comment) == (EVEN, "of large ones")
    # Everything is durable, and goes on.
    async with running(tmp_path) as client:
        await client.insert("t", [{"k": 1, "v": 1000}])
        found = counted(await client.peek("v"))
        assert found == sums([*writer.rows, (1, 1000)], above=10)
        names = {each.name for each in (await client.status()).objects}
        assert names == {"t", "v", "above", "i"}


@pytest.mark.parametrize("begun", [False, True])
async def test_a_view_that_stands_still_is_replaced(tmp_path: Path, begun: bool) -> None:
    """Before it had contents, or after: what it would have held meanwhile cannot be known."""
    executor = LosingExecutor()
    async with running(tmp_path, executor, hydrations_max=4) as client:
        writer = await started(client)
        executor.lost = "" if begun else "u2"
        await client.create_materialized_view("v", SUMS)
        if begun:
            assert counted(await client.peek("v")) == sums(writer.rows)
            executor.lost = "u2"
        for number in range(3):
            last = await writer.write((1, number))
        await client.create_materialized_view("v", EVEN, replace=True)
        assert counted(await client.peek("v")) == sums(writer.rows, above=10)
        with pytest.raises((ViewInError, ReadBelowSince)):
            await client.peek("v", as_of=last - 1)
        await writer.write((2, 99))
        assert counted(await client.peek("v")) == sums(writer.rows, above=10)
    async with running(tmp_path) as client:
        await client.insert("t", [{"k": 1, "v": 1000}])
        assert counted(await client.peek("v")) == sums([*writer.rows, (1, 1000)], above=10)


async def test_other_columns_take_the_name_if_nothing_depends(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await started(client)
        await client.create_materialized_view("v", SUMS)
        await client.create_materialized_view("above", "select n, count(*) as m from v group by n")
        with pytest.raises(ObjectInUse, match="above"):
            await client.create_materialized_view("v", "select v from t", replace=True)
        await client.drop("above")
        await client.create_materialized_view("v", "select v from t", replace=True)
        assert counted(await client.peek("v")) == Counter([(5,), (50,), (7,)])
        with pytest.raises(ObjectExists, match="table"):
            await client.create_materialized_view("t", SUMS, replace=True)
        with pytest.raises(InvalidUsage, match="depend on itself"):
            await client.create_materialized_view("v", "select v from v", replace=True)
        with pytest.raises(QueryRejected):
            await client.create_materialized_view("v", "select nothing from t", replace=True)
        await client.create_materialized_view("fresh", SUMS, replace=True)
        assert counted(await client.peek("fresh")) == sums([(1, 5), (1, 50), (2, 7)])


async def test_a_replacement_that_is_given_up_leaves_the_old_one(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        writer = await started(client)
        await client.create_materialized_view("v", SUMS)
        for _ in range(5):
            with anyio.move_on_after(0.002):  # expires: at any moment of it
                await client.create_materialized_view("v", EVEN, replace=True)
            await writer.write((3, 3))
            found = counted(await client.peek("v"))
            assert found in (sums(writer.rows), sums(writer.rows, above=10))
            await client.create_materialized_view("v", SUMS, replace=True)
            assert counted(await client.peek("v")) == sums(writer.rows)
        names = {each.name for each in (await client.status()).objects}
        assert names <= {"t", "v"}


async def test_a_view_that_is_replaced_cannot_be_dropped_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        await started(client)
        await client.create_materialized_view("v", SUMS)
        failed: list[Exception] = []

        async def replace() -> None:
            try:
                await client.create_materialized_view("v", EVEN, replace=True)
            except (OperationCanceled, UnknownObject) as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(replace)
            await client.drop("t", cascade=True)
        # Before the replacement had begun, after it was done, or in between.
        assert len(failed) <= 1
        assert (await client.status()).objects == ()


@pytest.mark.parametrize("policy", ["full", "incremental", "incremental strict"])
async def test_a_policy_changes_while_a_view_is_kept_up(tmp_path: Path, policy: str) -> None:
    async with running(tmp_path) as client:
        writer = await started(client)
        await client.create_materialized_view("v", SUMS)
        async with anyio.create_task_group() as group:
            group.start_soon(writer.keep_writing)
            await client.submit(AlterObject(0, "v", refresh_policy=policy))
            await client.submit(AlterObject(0, "v", target_lag_ms=20))
            await client.submit(AlterObject(0, "v", refresh_policy="auto", target_lag_ms=0))
            last = await writer.write((2, 1))
            writer.done = True
        for time, rows in sorted(writer.at.items()):
            if time <= last:
                await client.wait_for("v", time)
                assert counted(await client.peek("v", as_of=time)) == sums(rows), time
    async with running(tmp_path) as client:
        await client.insert("t", [{"k": 1, "v": 1000}])
        assert counted(await client.peek("v")) == sums([*writer.rows, (1, 1000)])


async def test_names_comments_and_what_depends_on_them(tmp_path: Path) -> None:
    async with running(tmp_path) as client:
        writer = await started(client)
        await client.create_materialized_view("v", SUMS)
        await client.create_index("i", "v", ["k"])
        with pytest.raises(ObjectInUse, match="query of view v"):
            await client.submit(AlterObject(0, "t", rename="u"))
        with pytest.raises(ObjectExists):
            await client.submit(AlterObject(0, "v", rename="t"))
        await client.submit(AlterObject(0, "v", rename="w"))
        await client.submit(AlterObject(0, "w", comment="by k", retain_history_ms=60_000))
        await client.submit(AlterObject(0, "w", comment="how many", column="N"))
        with pytest.raises(InvalidUsage, match="no column"):
            await client.submit(AlterObject(0, "w", comment="x", column="nothing"))
        with pytest.raises(UnknownObject):
            await client.peek("v")
        with pytest.raises(InvalidUsage, match="only materialized views"):
            await client.submit(AlterObject(0, "t", target_lag_ms=5))
    async with running(tmp_path) as client:
        assert counted(await client.peek("w", key={"k": 1})) == Counter([(1, 2, 55)])
        (view,) = [each for each in (await client.status()).objects if each.name == "w"]
        assert (view.comment, view.column_comments) == ("by k", {"n": "how many"})
        with pytest.raises(ObjectInUse):
            await client.drop("t")
        await client.drop("t", cascade=True)
        assert (await client.status()).objects == ()
        assert writer.rows
