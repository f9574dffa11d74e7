"""The controller with a fake replica: statements, reads, waits, subscribes, restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from controller_world import KEYED, World, change, started  # type: ignore[import-not-found]

from actors.control.controller.catalog.boot import load
from actors.control.controller.holds import RETAIN
from actors.control.controller.messages import BytesDelivered
from actors.control.controller.reads.reads import DeadlinePassed
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import (
    CreateIndex,
    CreateTable,
    CreateView,
    DropObject,
    EndRequest,
    ExplainView,
    ReadContents,
    ReadObject,
    ReadStatus,
    RequestDone,
    RequestFailed,
    StatusReport,
    SubscribeChanges,
    SubscribeObject,
    TableChange,
    WaitFor,
    WriteCommitted,
    WriteTables,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    CreateDataflow,
    Frontiers,
    IndexExport,
    IndexTarget,
    Peek,
    PeekError,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardTarget,
    StatusResponse,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
    ViewExport,
)
from actors.model.protocol.message_parts import ColumnComparison
from actors.runtime.errors import StorageError, StoreFull, ViewInError
from actors.runtime.progress import EMPTY
from actors.testing.drawn_settings import constants_of
from deadlines import Deadlines  # type: ignore[import-not-found]

COUNT = "SELECT n, count(*) AS c FROM t GROUP BY n"


async def _table(world: World, name: str = "t") -> None:
    await world.ask(CreateTable(world.number(), name, KEYED), RequestDone)


@asynccontextmanager
async def with_table(tmp_path: Path) -> AsyncIterator[World]:
    """As `started`, with table t."""
    async with started(tmp_path) as world:
        await _table(world)
        yield world


async def _view(world: World, name: str = "v", sql: str = COUNT) -> CreateDataflow:
    await world.ask(CreateView(world.number(), name, sql), RequestDone)
    made: CreateDataflow = await world.created()
    return made


async def _write(world: World, *rows: dict[str, Any]) -> int:
    written: WriteCommitted = await world.ask(
        WriteTables(world.number(), (change("t", *rows),)), WriteCommitted
    )
    return written.time


async def test_bad_statements_are_named_and_change_nothing(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        n = world.number
        assert await world.refused(CreateTable(n(), "T", KEYED)) == "ObjectExists"
        assert await world.refused(CreateTable(n(), "__t", KEYED)) == "InvalidUsage"
        assert await world.refused(CreateView(n(), "v", "SELECT zz FROM t")) == "QueryRejected"
        assert await world.refused(CreateView(n(), "v", "SELECT * FROM nope")) == "UnknownObject"
        assert await world.refused(CreateIndex(n(), "i", "t", ("zz",))) == "InvalidUsage"
        assert await world.refused(CreateIndex(n(), "i", "t", ())) == "InvalidUsage"
        assert await world.refused(DropObject(n(), "nope")) == "UnknownObject"
        assert await world.refused(ExplainView(n(), "t")) == "InvalidUsage"
        assert (
            await world.refused(WriteTables(n(), (change("nope", {"id": 1}),))) == "UnknownObject"
        )
        assert await world.refused(WriteTables(n(), (change("t", {"id": "x"}),))) == "TypeMismatch"
        assert [e.name for e in (await load(world.persist)).catalog.objects] == ["t"]


async def test_a_change_of_unknown_outcome_is_settled_by_reading_back(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        create = world.persist.create_shards
        lost = StorageError("no answer", determinate=False)

        async def done_and_lost(*args: Any, **extra: Any) -> bool:
            await create(*args, **extra)
            raise lost

        async def not_done(*args: Any, **extra: Any) -> bool:
            raise lost

        world.persist.create_shards = not_done
        view = CreateView(world.number(), "v", COUNT)
        assert await world.refused(view) == "StorageError"
        world.persist.create_shards = done_and_lost
        await _view(world)
        world.persist.create_shards = create
        assert await world.refused(CreateView(world.number(), "v", COUNT)) == "ObjectExists"
        await world.ask(CreateTable(world.number(), "t2", KEYED), RequestDone)
        assert [e.id for e in (await load(world.persist)).catalog.objects] == ["u1", "u2", "u3"]


async def test_a_change_that_fails_leaves_nothing(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:

        async def full(*args: Any, **extra: Any) -> bool:
            raise StoreFull("no space left", determinate=True)

        create, world.persist.create_shards = world.persist.create_shards, full
        assert await world.refused(CreateView(world.number(), "v", COUNT)) == "StoreFull"
        world.persist.create_shards = create
        assert set((await world.persist.state("u1")).holds) == {RETAIN}
        assert (await _view(world)).dataflow.id == "u2"


async def test_a_crash_between_hold_and_catalog_leaves_nothing(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        await world.persist.set_hold("u1", "dataflow/u2", 0)
        await world.start("again")
        assert set((await world.persist.state("u1")).holds) == {RETAIN}


async def test_a_view_is_durable_with_its_shards_and_holds(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        dataflow = (await _view(world)).dataflow
        assert await world.replica.expect(ScheduleDataflow) == ScheduleDataflow("u2")
        assert (dataflow.id, dataflow.as_of) == ("u2", time)
        assert isinstance(dataflow.export, ViewExport)
        assert dataflow.imports[0].tables_upper
        state = await world.persist.state("u2")
        assert (state.since, state.upper) == (time, 0)
        assert state.holds == {RETAIN: time, "dataflow/u2": time}
        assert (await world.persist.state("u1")).holds["dataflow/u2"] == time
        entry = (await load(world.persist)).catalog.find("V")
        assert (entry.sql, entry.hidden_shards, bool(entry.fingerprint)) == (
            COUNT,
            ("u2-hidden0",),
            True,
        )
        assert "input 0: t" in (await world.ask(ExplainView(world.number(), "v"), RequestDone)).text
        assert await world.refused(DropObject(world.number(), "t")) == "ObjectInUse"
        assert (
            await world.refused(WriteTables(world.number(), (change("v", {"n": 1}),)))
            == "InvalidUsage"
        )


async def test_a_refused_view_leaves_no_hold(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        wrong = CreateView(world.number(), "v", "select id from t", target_lag_ms=-1)
        assert await world.refused(wrong) == "InvalidUsage"
        wrong = CreateView(world.number(), "v", "select id from t", retain_history_ms=0)
        assert await world.refused(wrong) == "InvalidUsage"
        assert set((await world.persist.state("u1")).holds) == {RETAIN}


async def test_a_drop_takes_shards_dataflow_and_holds(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        await _view(world)
        await world.submit(WaitFor(world.number(), "v", 1))
        await world.ask(DropObject(world.number(), "v"), RequestDone)
        assert (await world.session.expect(RequestFailed)).code == "UnknownObject"
        assert await world.replica.expect(AllowCompaction) == AllowCompaction("u2", EMPTY)
        await world.ask(DropObject(world.number(), "t"), RequestDone)
        boot = await load(world.persist)
        assert (boot.catalog.objects, boot.catalog.new_id) == ((), "u3")
        assert await world.persist.list_shards() == []


async def test_a_read_waits_until_sealed_and_peeks_once(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        await _view(world)
        time = await _write(world, {"id": 1, "n": 2})
        await world.submit(ReadObject(world.number(), "v"))
        await world.submit(WaitFor(world.number(), "v", time))
        world.replica.respond(Frontiers("u2", write=time))
        world.replica.respond(Frontiers("u2", write=time + 1))
        peek = await world.replica.expect(Peek)
        assert (peek.time, peek.target.id) == (time, "u2")
        assert isinstance(peek.target, ShardTarget)
        assert isinstance(await world.answer(), RequestDone)
        world.replica.respond(PeekResponse(peek.uuid, PeekRows(b"rows")))
        contents = await world.session.expect(ReadContents)
        assert (contents.as_of, contents.arrow) == (time, b"rows")
        await world.submit(ReadObject(world.number(), "v"))
        peek = await world.replica.expect(Peek)
        world.replica.respond(PeekResponse(peek.uuid, PeekError("ViewInError", "1/0")))
        failed = await world.session.expect(RequestFailed)
        assert (failed.code, failed.text) == (ViewInError.__name__, "1/0")


async def test_reads_that_are_refused_or_late(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        await _view(world)
        n = world.number
        assert await world.refused(ReadObject(n(), "v", time + 10_000_000)) == "ReadTooFarAhead"
        assert await world.refused(WaitFor(n(), "v", time + 10_000_000)) == "ReadTooFarAhead"
        assert await world.refused(ReadObject(n(), "v", time - 1)) == "ReadBelowSince"
        assert await world.refused(ReadObject(n(), "v", -1)) == "InvalidUsage"
        assert await world.refused(ReadObject(n(), "nope")) == "UnknownObject"
        assert await world.refused(ReadObject(n(), "v", key_columns=("n",))) == "InvalidUsage"
        key = to_ipc(pa.table({"n": ["x"]}))
        assert await world.refused(ReadObject(n(), "v", None, key, ("n",))) == "TypeMismatch"
        world.replica.respond(StatusResponse("u2", "hydrating", "waiting for the engine"))
        while (await world.ask(ReadStatus(n()), StatusReport)).objects[-1].state != "hydrating":
            pass
        # expires: v is never ready
        late = await world.ask(ReadObject(n(), "v", deadline_ms=30), RequestFailed)
        assert late.code == "DeadlineExceeded"
        assert "it is hydrating waiting for the engine" in late.text


async def test_a_canceled_or_late_peek_is_canceled_at_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch, DeadlinePassed)
    async with with_table(tmp_path) as world:
        await _write(world, {"id": 1, "n": 2})
        read = world.number()
        await world.submit(ReadObject(read, "t"))
        peek = await world.replica.expect(Peek)
        await world.submit(EndRequest(world.number(), read))
        failed = await world.session.expect(RequestFailed)
        assert (failed.request, failed.code) == (read, "OperationCanceled")
        await world.session.expect(RequestDone)
        assert (await world.replica.expect(CancelPeek)).uuid == peek.uuid
        world.replica.respond(PeekResponse(peek.uuid, PeekRows(b"late")))
        await world.submit(ReadObject(world.number(), "t", deadline_ms=20))
        peek = await world.replica.expect(Peek)
        deadlines.end(20)
        assert (await world.session.expect(RequestFailed)).code == "DeadlineExceeded"
        assert (await world.replica.expect(CancelPeek)).uuid == peek.uuid


async def test_an_index_serves_reads_by_its_key_when_it_is_ready(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        await world.ask(CreateIndex(world.number(), "t_n", "t", ("N",)), RequestDone)
        export = (await world.created()).dataflow.export
        assert isinstance(export, IndexExport)
        assert export.key == ("n",)
        key = to_ipc(pa.table({"n": [2]}))
        keyed = ("n",)
        await world.submit(ReadObject(world.number(), "t", None, key, keyed))
        assert isinstance((await world.replica.expect(Peek)).target, ShardTarget)
        world.replica.respond(Frontiers("u2", write=time + 1))
        await world.ask(WaitFor(world.number(), "t_n", time), RequestDone)
        await world.submit(ReadObject(world.number(), "t", None, key, keyed))
        peek = await world.replica.expect(Peek)
        assert peek.target == IndexTarget("u2")
        assert from_ipc(peek.keys or b"").schema.field("n").type == pa.int32()
        await world.submit(ReadObject(world.number(), "t", time - 1))
        assert isinstance((await world.replica.expect(Peek)).target, ShardTarget)
        assert await world.refused(DropObject(world.number(), "t")) == "ObjectInUse"


def _by_id(world: World, *ids: int, as_of: int | None = None, **more: Any) -> ReadObject:
    keys = to_ipc(pa.table({"id": pa.array(ids, pa.int64())}))
    return ReadObject(world.number(), "t", as_of, keys, ("id",), **more)


async def test_a_table_is_read_by_its_primary_key_without_a_replica(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        first = await _write(world, {"id": 1, "n": 2})
        await _write(world, {"id": 2, "n": 5})
        update = TableChange("t", update=to_ipc(pa.table({"id": [1], "n": [3]})))
        written = await world.ask(WriteTables(world.number(), (update,)), WriteCommitted)
        last = written.time

        async def rows(request: ReadObject) -> list[dict[str, Any]]:
            answer = await world.ask(request, ReadContents)
            found: list[dict[str, Any]] = from_ipc(answer.arrow).drop_columns([DIFF]).to_pylist()
            return found

        assert await rows(_by_id(world, 1)) == [{"id": 1, "n": 3}]
        # A transaction reads at its own time, which others' writes have passed.
        assert await rows(_by_id(world, 1, as_of=first)) == [{"id": 1, "n": 2}]
        assert await rows(_by_id(world, 2, as_of=first)) == []
        assert await rows(_by_id(world, 7)) == []
        several = await rows(_by_id(world, 2, 1, 7, project=("n",)))
        assert sorted(row["n"] for row in several) == [3, 5]
        equals = ColumnComparison("id", "=", to_ipc(pa.table({"value": [1]})))
        narrow = ColumnComparison("n", ">", to_ipc(pa.table({"value": [3]})))
        assert await rows(ReadObject(world.number(), "t", filter=(equals,))) == [{"id": 1, "n": 3}]
        assert await rows(ReadObject(world.number(), "t", filter=(equals, narrow))) == []
        # Without a key it is a scan.
        await world.submit(ReadObject(world.number(), "t", last))
        assert (await world.replica.expect(Peek)).time == last


async def test_a_read_by_key_before_the_kept_history_goes_to_the_replica(tmp_path: Path) -> None:
    async with started(tmp_path, index_history_ms=1) as world:
        await _table(world)
        first = await _write(world, {"id": 1, "n": 2})
        await world.ask(_by_id(world, 1), ReadContents)
        last, number = first, 1
        while last < first + 10:
            number += 1
            last = await _write(world, {"id": number, "n": 0})
        await world.ask(_by_id(world, 1, as_of=last), ReadContents)
        await world.submit(_by_id(world, 1, as_of=first))
        assert (await world.replica.expect(Peek)).time == first


async def test_many_keys_are_looked_up_in_a_thread(tmp_path: Path) -> None:
    with constants_of({"control.controller.reads.memory_reads.LOOP_KEYS_MAX": 1}):
        async with started(tmp_path) as world:
            await _table(world)
            await _write(world, *({"id": i, "n": i} for i in range(5)))
            answer = await world.ask(_by_id(world, 3, 1, 9), ReadContents)
            assert sorted(from_ipc(answer.arrow)["id"].to_pylist()) == [1, 3]


async def test_the_first_read_by_key_after_a_start_arranges_the_table(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        await _write(world, {"id": 1, "n": 2})
        await world.start("again")
        await world.submit(_by_id(world, 1))
        assert isinstance((await world.replica.expect(Peek)).target, ShardTarget)
        # The write goes through the same queue, behind the arranging.
        await _write(world, {"id": 2, "n": 2})
        answer = await world.ask(_by_id(world, 1), ReadContents)
        assert from_ipc(answer.arrow)["n"].to_pylist() == [2]


def _batch(lower: int, upper: int, *rows: tuple[int, int, int]) -> SubscribeBatch:
    table = pa.table(
        {
            "id": pa.array([r[0] for r in rows], pa.int64()),
            "n": pa.array([0 for _ in rows], pa.int32()),
            TIME: pa.array([r[1] for r in rows], pa.int64()),
            DIFF: pa.array([r[2] for r in rows], pa.int64()),
        }
    )
    return SubscribeBatch(lower, upper, to_ipc(table) if rows else None)


def _ids(changes: SubscribeChanges) -> list[int]:
    return [] if changes.arrow is None else from_ipc(changes.arrow)["id"].to_pylist()


async def test_subscribe_holds_its_shard_and_repeats_nothing(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        number = world.number()
        await world.submit(SubscribeObject(number, "t"))
        dataflow = (await world.created()).dataflow
        assert (dataflow.as_of, dataflow.export) == (time, SubscribeExport(KEYED_STORED, True))
        holder = f"subscribe/{dataflow.id}"
        assert (await world.persist.state("u1")).holds[holder] == time
        respond = world.replica.respond
        respond(SubscribeResponse(dataflow.id, _batch(0, time + 1, (1, time, 1))))
        changes = await world.session.expect(SubscribeChanges)
        assert (changes.lower, changes.upper, _ids(changes)) == (time, time + 1, [1])
        # The replica starts over: what was delivered is cut off.
        respond(SubscribeResponse(dataflow.id, _batch(0, time + 1, (1, time, 1))))
        respond(SubscribeResponse(dataflow.id, _batch(0, time + 9, (1, time, 1), (2, time + 5, 1))))
        changes = await world.session.expect(SubscribeChanges)
        assert (changes.lower, changes.upper, _ids(changes)) == (time + 1, time + 9, [2])
        compacted = await world.replica.expect(AllowCompaction)
        assert compacted == AllowCompaction(dataflow.id, time + 8)
        await world.submit(EndRequest(world.number(), number))
        assert (await world.session.expect(RequestFailed)).code == "OperationCanceled"
        await world.session.expect(RequestDone)
        assert await world.replica.expect(AllowCompaction) == AllowCompaction(dataflow.id, EMPTY)


KEYED_STORED = KEYED.__class__(
    (KEYED.columns[0].__class__("id", "bigint", False), KEYED.columns[1]), ("id",)
)


async def test_subscribe_resumes_by_frontier_and_refuses_what_is_gone(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        await world.submit(SubscribeObject(world.number(), "t", from_=time))
        dataflow = (await world.created()).dataflow
        assert (dataflow.as_of, dataflow.export) == (time - 1, SubscribeExport(KEYED_STORED, False))
        respond = world.replica.respond
        respond(SubscribeResponse(dataflow.id, _batch(0, time + 1, (1, time, 1))))
        changes = await world.session.expect(SubscribeChanges)
        assert (changes.lower, changes.upper, _ids(changes)) == (time, time + 1, [1])
        respond(SubscribeResponse(dataflow.id, _batch(time + 1, EMPTY)))
        assert (await world.session.expect(SubscribeChanges)).upper == EMPTY
        await world.session.expect(RequestDone)
        await _view(world)
        n = world.number
        assert await world.refused(SubscribeObject(n(), "v", from_=time)) == "ReadBelowSince"
        assert await world.refused(SubscribeObject(n(), "v", from_=1, as_of=1)) == "InvalidUsage"
        assert (
            await world.refused(SubscribeObject(n(), "v", from_=time + 10**7)) == "ReadTooFarAhead"
        )
        await world.submit(SubscribeObject(n(), "v", from_=time + 1))
        resumed = (await world.created()).dataflow
        failed = SubscribeBatch(0, time + 2, None, ("ViewInError", "1/0"))
        respond(SubscribeResponse(resumed.id, failed))
        assert (await world.session.expect(RequestFailed)).code == "ViewInError"


async def test_a_slow_subscriber_pauses_its_dataflow_alone(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        number = world.number()
        await world.submit(SubscribeObject(number, "t"))
        first = (await world.created()).dataflow
        sizes = []
        for n in range(3):
            batch = _batch(time + n, time + n + 1, (n, time + n, 1))
            world.replica.respond(SubscribeResponse(first.id, batch))
            changes = await world.session.expect(SubscribeChanges)
            sizes.append(len(changes.arrow or b""))
        late = _batch(time + 3, time + 4, (3, time + 3, 1))
        world.replica.respond(SubscribeResponse(first.id, late))
        dropped = await world.replica.expect(AllowCompaction)
        while dropped.frontier != EMPTY:
            dropped = await world.replica.expect(AllowCompaction)
        assert dropped.id == first.id
        await world.session.expect_nothing()
        for size in sizes:
            await world.controller.send(BytesDelivered(world.session.address.path, number, size))
        again = (await world.created()).dataflow
        assert again.id != first.id
        assert (again.as_of, again.export) == (time + 2, SubscribeExport(KEYED_STORED, False))
        batch = _batch(time + 3, time + 9, (3, time + 3, 1))
        world.replica.respond(SubscribeResponse(again.id, batch))
        changes = await world.session.expect(SubscribeChanges)
        assert (changes.lower, changes.upper, _ids(changes)) == (time + 3, time + 9, [3])
        assert f"subscribe/{first.id}" in (await world.persist.state("u1")).holds


async def test_a_restart_builds_everything_from_the_catalog(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        first = (await _view(world)).dataflow
        await world.ask(CreateIndex(world.number(), "v_n", "v", ("n",)), RequestDone)
        await world.submit(SubscribeObject(world.number(), "t"))
        subscribe = (await world.created()).dataflow
        subscribe = (await world.created()).dataflow if subscribe.id == "u3" else subscribe
        later = await _write(world, {"id": 2, "n": 2})
        await world.start("again")
        assert f"subscribe/{subscribe.id}" not in (await world.persist.state("u1")).holds
        world.replica.break_connection()
        again = [(await world.created()).dataflow for _ in range(2)]
        assert world.replica.connections == 2, "the history is replayed"
        assert [d.id for d in again] == ["u2", "u3"]
        assert again[0] == first
        assert isinstance(again[1].export, IndexExport)
        assert again[1].as_of == time
        assert await _write(world, {"id": 3, "n": 0}) > later
        assert (
            await world.refused(WriteTables(world.number(), (change("t", {"id": 3}),)))
            == "DuplicateKey"
        )


async def test_status_shows_all(tmp_path: Path) -> None:
    async with with_table(tmp_path) as world:
        time = await _write(world, {"id": 1, "n": 2})
        await _view(world)
        world.replica.respond(StatusResponse("u2", "gathering", steps=3, step_ms=1.5))
        world.replica.respond(Frontiers("u2", write=time + 1))
        await world.ask(WaitFor(world.number(), "v", time), RequestDone)
        later = await _write(world, {"id": 2, "n": 2})
        report = await world.ask(ReadStatus(world.number()), StatusReport)
        assert report.tables_upper == later + 1 <= report.time + 1
        table, view = report.objects
        assert (table.name, table.kind, table.upper, table.lag_ms) == ("t", "table", later + 1, 0)
        assert (view.since, view.upper, view.lag_ms) == (time, time + 1, report.time - later)
        assert (view.state, view.steps, view.mode) == ("gathering", 3, "incremental")
        far: dict[str, Any] = {
            "parts_read": 3,
            "parts_total": 8,
            "bytes_read": 30,
            "bytes_total": 80,
        }
        world.replica.respond(StatusResponse("u2", "hydrating", **far))
        world.replica.respond(Frontiers("u2", write=later + 1))
        await world.ask(WaitFor(world.number(), "v", later), RequestDone)
        _, view = (await world.ask(ReadStatus(world.number()), StatusReport)).objects
        assert {name: getattr(view, name) for name in far} == far


async def test_holds_follow_the_retained_history(tmp_path: Path) -> None:
    async with started(tmp_path) as world:
        request = CreateTable(world.number(), "t", KEYED, retain_history_ms=1)
        await world.ask(request, RequestDone)
        while (await world.persist.state("u1")).since == 0:
            await _write(world, {"id": world.numbers, "n": 2})
        state = await world.persist.state("u1")
        assert state.since < await world.persist.tables_upper()
