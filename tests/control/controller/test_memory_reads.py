"""Reads by key of an index whose partitions are in the controller's process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from controller_world import World, change, started  # type: ignore[import-not-found]

from actors.durable.arrangement import partition
from actors.model.plan.schema import DIFF, ERROR, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc, with_time
from actors.model.protocol.api import (
    CreateIndex,
    CreateTable,
    DropObject,
    EndRequest,
    ReadContents,
    ReadObject,
    RequestDone,
    RequestFailed,
    WaitFor,
    WriteCommitted,
    WriteTables,
)
from actors.model.protocol.compute import (
    CreateDataflow,
    Frontiers,
    IndexExport,
    IndexTarget,
    Peek,
    ShardTarget,
)
from actors.model.protocol.internal import InstallUpdates
from actors.model.protocol.message_parts import ColumnComparison
from actors.replica.compute.index import ClusterPartitions, IndexInsertion, IndexPartition
from actors.testing.drawn_settings import constants_of

SCHEMA = TableSchema((TableColumn("id", "bigint"), TableColumn("n", "int")))
WORKERS = 2
ROWS = [{"id": number, "n": number % 3} for number in range(9)]


class IndexedTable:
    """A table without a key, and an index on `n`, whose partitions the test fills."""

    def __init__(self, world: World, scratch: Path) -> None:
        self.world, self._scratch = world, scratch
        self.partitions = ClusterPartitions(WORKERS)
        world.partitions = [self.partitions]
        self.sealed = 0

    async def make(self) -> None:
        world = self.world
        await world.ask(CreateTable(world.number(), "t", SCHEMA), RequestDone)
        self.written = await self.write(*ROWS)
        await world.ask(CreateIndex(world.number(), "t_n", "t", ("n",)), RequestDone)
        created: CreateDataflow = await world.created()
        self.id = created.dataflow.id
        export = created.dataflow.export
        assert isinstance(export, IndexExport)
        self._held = [
            IndexPartition(self._scratch / str(number), export) for number in range(WORKERS)
        ]
        self.install(self.written, ROWS, snapshot=True)
        self.report(self.written)
        await world.ask(WaitFor(world.number(), "t_n", self.written), RequestDone)

    async def write(self, *rows: dict[str, Any]) -> int:
        request = WriteTables(self.world.number(), (change("t", *rows),))
        return int((await self.world.ask(request, WriteCommitted)).time)

    def install(
        self, time: int, rows: list[dict[str, Any]], *, snapshot: bool = False, error: str = ""
    ) -> None:
        """Put rows into the partitions, which are sealed beyond their time then."""
        made = with_time(pa.Table.from_pylist(rows, SCHEMA.arrow()), time, 1)
        if error:
            texts = pa.array([error], pa.string())
            none = made.slice(0, 0).append_column(ERROR, texts.slice(0, 0))
            row: dict[str, Any] = dict.fromkeys(none.schema.names)
            row |= {"__time": time, DIFF: 1, ERROR: error}
            made = pa.concat_tables(
                [made, pa.Table.from_pylist([row], none.schema)], promote_options="default"
            )
        nobody: Any = None
        for number, part in enumerate(partition(made, ("n",), WORKERS)):
            held = self._held[number]
            message = InstallUpdates(self.id, 1, self.sealed, time + 1, part, snapshot)
            held.done(held.perform(IndexInsertion(message, nobody)))
            self.partitions.put(self.id, number, held)
        self.sealed = time + 1

    def report(self, time: int) -> None:
        self.world.replica.respond(Frontiers(self.id, write=time + 1))

    def by_key(self, *keys: int, as_of: int | None = None) -> ReadObject:
        data = to_ipc(pa.table({"n": pa.array(keys, pa.int32())}))
        return ReadObject(self.world.number(), "t", as_of, data, ("n",))

    async def rows(self, request: ReadObject) -> list[int]:
        answer = await self.world.ask(request, ReadContents)
        table = from_ipc(answer.arrow)
        assert set(table[DIFF].to_pylist()) <= {1}
        return sorted(table["id"].to_pylist())

    async def sent(self, request: ReadObject) -> Peek:
        """The peek that comes to the replica for a request."""
        await self.world.submit(request)
        peek: Peek = await self.world.replica.expect(Peek)
        await self.world.submit(EndRequest(self.world.number(), request.request))
        await self.world.session.expect(RequestFailed, code="OperationCanceled")
        await self.world.session.expect(RequestDone)
        return peek


@asynccontextmanager
async def indexed(tmp_path: Path, keys_on_loop: int = 256) -> AsyncIterator[IndexedTable]:
    constants = {"control.controller.reads.memory_reads.LOOP_KEYS_MAX": keys_on_loop}
    with constants_of(constants):
        async with started(tmp_path) as world:
            made = IndexedTable(world, tmp_path / "index")
            await made.make()
            yield made


async def test_rows_of_keys_are_read_without_a_worker(tmp_path: Path) -> None:
    async with indexed(tmp_path) as table:
        assert await table.rows(table.by_key(1)) == [1, 4, 7]
        assert await table.rows(table.by_key(77)) == []
        # They are in several partitions.
        assert await table.rows(table.by_key(0, 2, 77)) == [0, 2, 3, 5, 6, 8]
        equals = ColumnComparison("n", "=", to_ipc(pa.table({"value": [2]})))
        above = ColumnComparison("id", ">", to_ipc(pa.table({"value": [3]})))
        number = table.world.number()
        assert await table.rows(ReadObject(number, "t", filter=(equals, above))) == [5, 8]


async def test_other_reads_go_to_the_workers(tmp_path: Path) -> None:
    async with indexed(tmp_path) as table:
        number = table.world.number()
        assert (await table.sent(ReadObject(number, "t"))).target == IndexTarget(table.id)
        by_id = ReadObject(table.world.number(), "t", None, to_ipc(pa.table({"id": [1]})), ("id",))
        assert isinstance((await table.sent(by_id)).target, ShardTarget)
        # The index has no earlier times.
        earlier = table.by_key(1, as_of=table.written - 1)
        assert isinstance((await table.sent(earlier)).target, ShardTarget)
        table.world.partitions = []
        assert (await table.sent(table.by_key(1))).target == IndexTarget(table.id)


@pytest.mark.parametrize("on_loop", [1, 256])
async def test_an_error_in_a_partition_is_told_by_the_workers(tmp_path: Path, on_loop: int) -> None:
    async with indexed(tmp_path, on_loop) as table:
        # Many keys are looked up in a thread.
        assert await table.rows(table.by_key(0, 2, 77)) == [0, 2, 3, 5, 6, 8]
        time = await table.write({"id": 100, "n": 1})
        table.install(time, [], error="boom")
        table.report(time)
        await table.world.ask(WaitFor(table.world.number(), "t_n", time), RequestDone)
        for keys in ((1,), (0, 1)):
            assert (await table.sent(table.by_key(*keys))).target == IndexTarget(table.id)


async def test_a_read_waits_for_an_index_that_is_behind(tmp_path: Path) -> None:
    async with indexed(tmp_path) as table:
        world = table.world
        time = await table.write({"id": 100, "n": 1})
        await world.submit(table.by_key(1))
        # Another session's read, of what is there, is answered meanwhile.
        assert await table.rows(table.by_key(1, as_of=table.written)) == [1, 4, 7]
        table.install(time, [{"id": 100, "n": 1}])
        table.report(time)
        answer = await world.session.expect(ReadContents)
        assert sorted(from_ipc(answer.arrow)["id"].to_pylist()) == [1, 4, 7, 100]


@pytest.mark.parametrize("ended", ["index", "request", "deadline"])
async def test_what_ends_the_wait_for_an_index(tmp_path: Path, ended: str) -> None:
    async with indexed(tmp_path) as table:
        world = table.world
        await table.write({"id": 100, "n": 1})
        waiting = table.by_key(1)
        if ended == "deadline":
            # expires: nothing is installed
            await world.submit(msgspec.structs.replace(waiting, deadline_ms=1))
            failed = await world.session.expect(RequestFailed)
            assert (failed.code, "index t_n is sealed only below" in failed.text) == (
                "DeadlineExceeded",
                True,
            )
            return
        await world.submit(waiting)
        if ended == "request":
            await world.submit(EndRequest(world.number(), waiting.request))
            failed = await world.session.expect(RequestFailed)
            assert (failed.request, failed.code) == (waiting.request, "OperationCanceled")
            return
        await world.submit(DropObject(world.number(), "t_n"))
        assert isinstance((await world.replica.expect(Peek)).target, ShardTarget)
