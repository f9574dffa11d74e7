"""The table writer alone: groups, durability, restarts, a full disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest

from actors.control.controller.messages import CloseTable, EnqueueWrite, TablesAdvanced, TickTables
from actors.control.controller.tables.commit import PlannedWrite
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.control.controller.tables.table_writer import TableWriter
from actors.durable.persist import BatchPart, NewShard, PersistClient
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import consolidate, to_ipc
from actors.model.protocol.api import RequestFailed, TableChange, WriteCommitted
from actors.runtime.errors import StoreFull
from actors.runtime.kernel import ActorAddress, ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe

KEYED = TableTarget(
    "u1",
    "flights",
    "u1",
    TableSchema((TableColumn("id", "bigint", False), TableColumn("n", "int")), ("id",)),
)
BAG = TableTarget("u2", "log", "u2", TableSchema((TableColumn("s", "string"),)))


class FillingPersist(PersistClient):
    """A store whose disk can be made full."""

    full = False

    async def write_parts(self, shard: str, updates: pa.Table) -> tuple[BatchPart, ...]:
        if self.full:
            raise StoreFull("no space left on the device", determinate=True)
        return await super().write_parts(shard, updates)


class World:
    """A store, a controller that listens, a session, and the writer."""

    def __init__(self, system: ActorSystem, persist: FillingPersist, scratch: Path) -> None:
        self.system, self.persist, self.scratch = system, persist, scratch
        self.session = MessageProbe.start(system, "session")
        self.controller = MessageProbe.start(system, "controller")
        self.writer = self.start()
        self.numbers = 0

    def start(self, name: str = "writer") -> ActorAddress[Any]:
        settings = Settings(group_commit_ms=1)
        self.contents_by_key = TableArrangements(
            self.persist, self.scratch / name, self.system.clock, settings.index_history_ms
        )
        return self.system.spawn(
            lambda: TableWriter(
                self.persist, settings, self.contents_by_key, self.controller.address
            ),
            name,
        )

    async def send(self, *changes: tuple[TableTarget, TableChange], at: int | None = None) -> int:
        self.numbers += 1
        write = PlannedWrite(tuple(changes))
        await self.writer.send(EnqueueWrite(self.session.address, self.numbers, write, at))
        return self.numbers

    async def write(self, *changes: tuple[TableTarget, TableChange], at: int | None = None) -> int:
        await self.send(*changes, at=at)
        return (await self.session.expect(WriteCommitted)).time

    async def refused(self, *changes: tuple[TableTarget, TableChange]) -> RequestFailed:
        await self.send(*changes)
        return await self.session.expect(RequestFailed)

    async def contents(self, target: TableTarget) -> list[dict[str, Any]]:
        upper = await self.persist.tables_upper()
        reader = await self.persist.open_reader(target.shard, "test")
        parts, _ = await reader.snapshot(upper - 1)
        tables = [await self.persist.fetch(part, target.schema) for part in parts]
        await reader.close()
        if not tables:
            return []
        rows = consolidate(pa.concat_tables(tables).drop_columns([TIME]))
        assert all(diff > 0 for diff in rows[DIFF].to_pylist())
        kept = rows.to_pylist()
        return sorted((r for r in kept for _ in range(r.pop(DIFF))), key=repr)


@asynccontextmanager
async def started(tmp_path: Path) -> AsyncIterator[World]:
    clock = SystemClock()
    persist = await FillingPersist.in_memory(Settings(), clock)
    assert isinstance(persist, FillingPersist)
    await persist.create_shards(
        [
            NewShard(id=t.shard, schema=t.schema, holds={"retain": 0}, tables=True)
            for t in (KEYED, BAG)
        ]
    )
    with anyio.fail_after(200):
        async with ActorSystem(clock=clock) as system:
            yield World(system, persist, tmp_path)
    await persist.close()


def _insert(target: TableTarget, *rows: dict[str, Any]) -> tuple[TableTarget, TableChange]:
    return target, TableChange(target.name, insert=to_ipc(pa.Table.from_pylist(list(rows))))


def _delete(target: TableTarget, *rows: dict[str, Any]) -> tuple[TableTarget, TableChange]:
    return target, TableChange(target.name, delete=to_ipc(pa.Table.from_pylist(list(rows))))


async def test_a_write_is_durable_at_its_time_over_all_tables(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        time = await world.write(_insert(KEYED, {"id": 1, "n": 1}), _insert(BAG, {"s": "a"}))
        assert await world.persist.tables_upper() == time + 1
        assert (await world.controller.expect(TablesAdvanced)).upper == time + 1
        assert await world.contents(KEYED) == [{"id": 1, "n": 1}]
        assert await world.contents(BAG) == [{"s": "a"}]


async def test_a_group_shares_a_time_and_its_writes_see_each_other(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await world.send(_insert(KEYED, {"id": 1, "n": 1}))
        await world.send(_insert(KEYED, {"id": 1, "n": 2}))
        await world.send(_delete(KEYED, {"id": 1}))
        await world.send(_insert(KEYED, {"id": 1, "n": 3}))
        answers = [await world.session.expect(object) for _ in range(4)]
        assert [type(a) for a in answers] == [
            WriteCommitted,
            RequestFailed,
            WriteCommitted,
            WriteCommitted,
        ]
        assert len({a.time for a in answers if isinstance(a, WriteCommitted)}) == 1
        failed = answers[1]
        assert isinstance(failed, RequestFailed)
        assert (failed.code, "id = 1" in failed.text) == ("DuplicateKey", True)
        assert await world.contents(KEYED) == [{"id": 1, "n": 3}]


async def test_writes_that_no_group_has_room_for_are_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.control.controller.tables.table_writer.GROUP_WRITES_MAX", 3)
    async with started(tmp_path) as world:
        for number in range(8):
            await world.send(_insert(BAG, {"s": str(number)}))
        times = [(await world.session.expect(WriteCommitted)).time for _ in range(8)]
        assert times == sorted(times)
        assert max(Counter(times).values()) <= 3
        assert len(await world.contents(BAG)) == 8


async def test_keys_are_known_after_a_restart(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await world.write(_insert(KEYED, {"id": 1, "n": 1}))
        await world.write(_insert(BAG, {"s": "a"}, {"s": "a"}))
        before = await world.persist.tables_upper()
        world.writer = world.start("second")
        assert (await world.refused(_insert(KEYED, {"id": 1, "n": 2}))).code == "DuplicateKey"
        assert (await world.refused(_delete(BAG, {"s": "b"}))).code == "AbsentRow"
        time = await world.write(_delete(BAG, {"s": "a"}), _delete(KEYED, {"id": 1}))
        assert time >= before
        assert await world.contents(BAG) == [{"s": "a"}]
        assert await world.contents(KEYED) == []


async def test_times_by_hand_and_ticks(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        first = await world.write(_insert(BAG, {"s": "a"}))
        assert await world.write(_insert(BAG, {"s": "b"}), at=first + 1000) == first + 1000
        assert await world.writer.ask(TickTables) > first + 1000
        await world.send(_insert(BAG, {"s": "c"}), at=first)
        failed = await world.session.expect(RequestFailed)
        assert (failed.code, await world.contents(BAG)) == (
            "InvalidUsage",
            [{"s": "a"}, {"s": "b"}],
        )


async def test_a_full_disk_is_told_and_the_service_goes_on(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await world.write(_insert(KEYED, {"id": 1, "n": 1}))
        world.persist.full = True
        failed = await world.refused(_insert(KEYED, {"id": 2, "n": 2}))
        assert (failed.code, failed.determinate) == ("StoreFull", True)
        world.persist.full = False
        await world.write(_insert(KEYED, {"id": 2, "n": 3}))
        assert await world.contents(KEYED) == [{"id": 1, "n": 1}, {"id": 2, "n": 3}]


async def test_rows_that_do_not_fit_fail_alone(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await world.send(_insert(KEYED, {"id": "x", "n": 1}))
        await world.send((KEYED, TableChange("flights", insert=b"garbage")))
        await world.send(_insert(KEYED, {"id": 1, "n": 1}))
        codes = [getattr(await world.session.expect(object), "code", "") for _ in range(3)]
        assert codes == ["TypeMismatch", "MalformedFrame", ""]


async def test_a_table_closes_after_the_writes_before_it(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        await world.send(_insert(KEYED, {"id": 1, "n": 1}))
        await world.writer.ask(lambda reply: CloseTable("u1", reply))
        await world.session.expect(WriteCommitted)
        assert await world.persist.drop_shards(["u1"])
        assert (await world.refused(_insert(KEYED, {"id": 2, "n": 1}))).code == "UnknownObject"
        await world.write(_insert(BAG, {"s": "a"}))


async def test_many_rows_in_one_write(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        rows = [{"id": i, "n": i % 7} for i in range(20_000)]
        await world.write(_insert(KEYED, *rows))
        change = TableChange("flights", update=to_ipc(pa.Table.from_pylist([{"id": 5, "n": 100}])))
        await world.write((KEYED, change))
        await world.write(_delete(KEYED, *({"id": i} for i in range(10, 20_000))))
        held = await world.contents(KEYED)
        assert len(held) == 10
        assert {"id": 5, "n": 100} in held
