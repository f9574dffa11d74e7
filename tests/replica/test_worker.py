"""A worker alone, between probes and fakes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from actors.channel_adapter import ClientGone, ResponsesForwarded
from actors.durable.persist import NewShard, PersistClient, ShardAppend
from actors.listen_task import ListenTask
from actors.model.plan.updates import to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CommandBatch,
    CreateDataflow,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekError,
    PeekResponse,
    Response,
    ScheduleDataflow,
    ShardImport,
    StatusResponse,
    SubscribeBatch,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.model.protocol.internal import (
    AnyResponse,
    BatchEmitted,
    CompactionAllowed,
    DataflowProgress,
    DataflowScheduled,
    EmitBatch,
    GrantDescriptions,
    InputStarted,
    InstallUpdates,
    ListenFailed,
    PartsDescribed,
    ProposeCommand,
    SequencedCommand,
    StartInputs,
    StartListen,
    StopInputs,
    TaggedCommand,
    TaggedResponse,
    TaggedResponses,
    UpdatesInstalled,
    WritesAllowed,
)
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.index_installer import IndexInstaller
from actors.replica.compute.rendering import ActorFactory, DataflowStopped, FromDataflow
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe
from actors.worker import InspectWorker, Worker, WorkerStatistics
from cluster_house import (  # type: ignore[import-not-found]
    SCHEMA,
    index,
    rows_of,
    subscribe,
    updates,
)


class House:
    """One worker; the sequencer, its adapter, the other workers and its children are probes."""

    def __init__(self, stage: ActorIsolation, name: str) -> None:
        self.stage = stage
        self.sequencer = stage.probe(f"{name}-sequencer")
        self.adapter = stage.probe(f"{name}-adapter")
        self.other = stage.probe(f"{name}-other")
        self.dataflows = stage.casting("dataflow")
        self.listens = stage.casting("listen")
        self.fetches = stage.casting("fetch")
        self.persist: PersistClient
        self.worker: SubjectActor[Any]
        self.workers: list[ActorAddress[Any]] = []
        self.next = 0
        self.nonce = ""
        self.came: deque[tuple[int, AnyResponse]] = deque()
        """The rest of a lot of responses."""

    async def do(self, *commands: Command | CommandBatch) -> None:
        for command in commands:
            await self.worker.send(SequencedCommand(self.next, 1, command))
            self.next += 1

    async def connect(self, nonce: str, *commands: Command) -> None:
        self.nonce = nonce
        start = (Hello(nonce), CreateInstance(len(self.workers)))
        await self.do(*start, *commands, InitializationComplete())

    async def with_index(self) -> PeerProbe:
        """Connect a client with one index, and return the dataflow of it."""
        await self.connect("a", CreateDataflow(index()))
        return await self.dataflows.expect()

    async def response(self, kind: type[Response] | Any) -> Any:
        """The next response; its window is opened again."""
        if not self.came:
            tagged: Any = await self.adapter.expect(object, nonce=self.nonce)
            if isinstance(tagged, TaggedResponse):
                self.came.append((tagged.serial, tagged.response))
            else:
                assert isinstance(tagged, TaggedResponses)
                self.came.extend(tagged.responses)
        serial, response = self.came.popleft()
        assert isinstance(response, kind), response
        await self.worker.send(ResponsesForwarded(self.nonce, (serial,)))
        return response

    async def statistics(self) -> WorkerStatistics:
        statistics: WorkerStatistics = await self.worker.ask(InspectWorker)
        return statistics


def tell_workers(dataflow: PeerProbe, *messages: Any) -> None:
    """A dataflow speaks: one message for each worker (one given: the same for all)."""
    for number, worker in enumerate(dataflow.args[1]):
        worker.reply(messages[number] if len(messages) > 1 else messages[0])


@asynccontextmanager
async def house(
    stage: ActorIsolation,
    tmp_path: Path,
    own: int = 0,
    count: int = 1,
    settings: Settings | None = None,
    listening: bool = False,
) -> AsyncIterator[House]:
    """`listening`: by real listen tasks."""
    settings = settings or Settings(retry_delay_ms_min=1, maintenance_ms=5)
    persist = await PersistClient.in_memory(settings, stage.clock)
    made = House(stage, f"worker-{own}")
    made.persist = persist

    def listen(
        imported: ShardImport, id: str, incarnation: int, index: int, consumer: Any, wanted: Any
    ) -> ListenTask:
        return ListenTask(
            persist, imported, id, incarnation, index, consumer, settings, wanted=wanted
        )

    factory = ActorFactory(
        dataflow=made.dataflows, listen=listen if listening else made.listens, fetch=made.fetches
    )
    adapters = [made.adapter.address] * count
    made.worker = stage.start(
        lambda: Worker(
            own,
            count,
            made.sequencer.address.send,
            made.workers,
            {"compute": adapters},
            factory,
            persist,
            settings,
            tmp_path,
            ClusterPartitions(count),
        ),
        f"worker-{own}",
    )
    made.workers.extend(
        made.worker.address if n == own else made.other.address for n in range(count)
    )
    yield made
    await made.worker.stop()
    await persist.close()


@pytest.fixture
async def h(stage: ActorIsolation, tmp_path: Path) -> AsyncIterator[House]:
    """Worker 0 of one."""
    async with house(stage, tmp_path) as made:
        yield made


def install(
    incarnation: int, lower: int, upper: int, rows: pa.Table, snapshot: bool
) -> InstallUpdates:
    return InstallUpdates("i1", incarnation, lower, upper, rows, snapshot)


FIRST = updates((1, "a", 5, 1), (2, "b", 5, 2))
SECOND = updates((1, "a", 7, -1), (1, "c", 7, 1))


async def test_commands_go_to_the_sequencer_and_render_in_its_order(h: House) -> None:
    await h.worker.send(TaggedCommand("a", Hello("a")))
    await h.worker.send(TaggedCommand("a", ScheduleDataflow("i1")))
    await h.sequencer.expect(ProposeCommand, generation=1, command=Hello("a"))
    await h.sequencer.expect(ProposeCommand, generation=1, command=ScheduleDataflow("i1"))
    await h.connect("a", CreateDataflow(index()), ScheduleDataflow("i1"), AllowCompaction("i1", 3))
    dataflow = await h.dataflows.expect()
    assert dataflow.args[0] == index(as_of=3)
    await h.do(AllowWrites(), AllowCompaction("i1", 4))
    for command in (DataflowScheduled(), WritesAllowed(), CompactionAllowed(4)):
        assert await dataflow.expect(type(command)) == command


async def test_sources_start_and_those_of_earlier_incarnations_stop(h: House) -> None:
    dataflow = await h.with_index()
    for incarnation in (1, 2):
        tell_workers(dataflow, StartInputs("i1", incarnation))
        started = await dataflow.expect(InputStarted)
        assert (started.incarnation, started.worker, started.input_index) == (incarnation, 0, 0)
        (fetch,) = h.fetches.running
        (listen,) = h.listens.running
        assert (started.fetch, started.listen) == (fetch.address, listen.address)
        assert listen.args[1:4] == ("i1", incarnation, 0)
        assert fetch.args[1:4] == ("i1", incarnation, 0)
        assert listen.args[4].path == fetch.args[4].path == dataflow.ctx.path


async def test_sources_stop_when_the_dataflow_has_come_to_its_end(
    stage: ActorIsolation, h: House
) -> None:
    dataflow = await h.with_index()
    tell_workers(dataflow, StartInputs("i1", 1))
    await dataflow.expect(InputStarted)
    tell_workers(dataflow, StopInputs("i1", 1))
    await stage.idle()
    assert not h.fetches.running
    assert not h.listens.running
    await dataflow.expect_nothing()


async def test_a_task_that_crashes_freezes_its_source(h: House) -> None:
    dataflow = await h.with_index()
    tell_workers(dataflow, StartInputs("i1", 7))
    await dataflow.expect(InputStarted)
    (fetch,) = h.fetches.running
    await fetch.crash()
    failed = await dataflow.expect(ListenFailed, incarnation=7, input_index=0)
    assert str(failed.error) == f"{fetch.address.path} crashed; see the log"


async def test_a_source_that_is_caught_up_ends_with_its_dataflow(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    """Nothing comes any more that could wake it."""
    async with house(stage, tmp_path, listening=True) as h:
        await h.persist.create_shards([NewShard("s1", SCHEMA)])
        await h.persist.append([ShardAppend("s1", 0, 5, ())])

        async def caught_up(dataflow: PeerProbe) -> str:
            """Says by which reader."""
            tell_workers(dataflow, StartInputs("i1", 1))
            started = await dataflow.expect(InputStarted)
            assert started.listen is not None
            await started.listen.send(StartListen(4, True))
            await dataflow.expect(PartsDescribed, upper=5)
            await started.listen.send(GrantDescriptions(0))
            await dataflow.expect_nothing()
            (reader_id,) = await readers()
            return reader_id

        async def readers() -> list[str]:
            await stage.idle()
            return list(h.persist._book.own("s1"))

        await h.connect("a", CreateDataflow(index()))
        first = await h.dataflows.expect()
        held = await caught_up(first)
        await h.connect("b", CreateDataflow(index()))
        assert await readers() == [held]  # as it was: it goes on
        await h.connect("c", CreateDataflow(index(key=("v",))))
        second = await h.dataflows.expect()
        assert await readers() == []
        assert await caught_up(second) != held
        await h.do(AllowCompaction("i1", EMPTY))
        assert await h.response(Frontiers) == Frontiers("i1", EMPTY, EMPTY, EMPTY)
        assert await readers() == []
        assert stage.now_ms() == 0


async def test_an_index_is_installed_read_compacted_and_dropped(h: House, tmp_path: Path) -> None:
    dataflow = await h.with_index()
    await h.do(Peek("p1", IndexTarget("i1"), 6), Peek("p2", IndexTarget("i1"), 9))
    tell_workers(dataflow, install(1, 0, 6, FIRST, True))
    assert await h.response(Frontiers) == Frontiers("i1", write=6, output=6)
    await dataflow.expect(UpdatesInstalled, incarnation=1, worker=0, upper=6)
    tell_workers(dataflow, install(1, 6, 8, SECOND, False))
    answers = [await h.response(Frontiers | PeekResponse) for _ in range(2)]
    (rows,) = [answer for answer in answers if isinstance(answer, PeekResponse)]
    assert rows_of(rows) == [(1, "a", 1), (2, "b", 2)]
    await dataflow.expect(UpdatesInstalled, incarnation=1, worker=0, upper=8)
    key = Peek("p3", IndexTarget("i1"), 7, ("k",), _ipc(k=[1]))
    await h.do(key)
    assert rows_of(await h.response(PeekResponse)) == [(1, "c", 1)]
    tell_workers(dataflow, DataflowProgress("i1", 8, 8, 8))
    assert await h.response(Frontiers) == Frontiers("i1", input=8)
    await h.do(CancelPeek("p2"), AllowCompaction("i1", 7), Peek("p4", IndexTarget("i1"), 6))
    assert (await h.response(PeekResponse)).result == PeekCanceled()
    refused = await h.response(PeekResponse)
    assert isinstance(refused.result, PeekError)
    assert refused.result.code == "ReadBelowSince"
    await h.do(AllowCompaction("i1", EMPTY))
    assert await h.response(Frontiers) == Frontiers("i1", EMPTY, EMPTY, EMPTY)
    assert dataflow.stopped
    assert not list((tmp_path / "arrangements").rglob("d*"))


def _ipc(**columns: Any) -> bytes:
    return to_ipc(pa.table(columns))


async def test_a_fresh_incarnation_replaces_the_index(h: House) -> None:
    dataflow = await h.with_index()
    tell_workers(dataflow, install(1, 0, 6, FIRST, True))
    await h.response(Frontiers)
    tell_workers(dataflow, install(2, 0, 6, updates((3, "x", 5, 1)), True))
    await dataflow.expect(UpdatesInstalled, incarnation=1)
    await dataflow.expect(UpdatesInstalled, incarnation=2)
    await h.do(Peek("p1", IndexTarget("i1"), 5))
    assert rows_of(await h.response(PeekResponse)) == [(3, "x", 1)]
    await h.do(Peek("p2", IndexTarget("i1"), 4))  # the snapshot does not know it any more
    assert (await h.response(PeekResponse)).result.code == "ReadBelowSince"


async def test_commands_of_a_lot_take_effect_one_after_the_other(
    stage: ActorIsolation, h: House
) -> None:
    dataflow = await h.with_index()
    tell_workers(dataflow, install(1, 0, 6, FIRST, True))
    await h.response(Frontiers)
    peeks = [Peek(uuid, IndexTarget("i1"), 5, ("k",), _ipc(k=[1])) for uuid in ("p1", "p2")]
    await h.do(CommandBatch((peeks[0], AllowCompaction("i1", EMPTY), peeks[1])))
    await stage.idle()
    assert isinstance(h.adapter.received[0], TaggedResponses)
    early, late = [await h.response(PeekResponse) for _ in peeks]
    assert (early.uuid, late.uuid) == ("p1", "p2")
    # The first peek had begun when the index was dropped, and the other one had not.
    assert "was dropped before a pending read could run" in early.result.text
    assert "index i1 does not exist" in late.result.text


async def test_an_install_that_fails_is_tried_again_and_says_so(
    stage: ActorIsolation, h: House
) -> None:
    dataflow = await h.with_index()
    tell_workers(dataflow, install(1, 0, 6, FIRST, True))
    await h.response(Frontiers)
    # Times outside of the interval: the arrangement refuses them.
    tell_workers(dataflow, install(1, 6, 8, updates((1, "a", 3, 1)), False))
    status = await h.response(StatusResponse)
    assert status.state == "stalled"
    assert "cannot install" in status.text
    tell_workers(dataflow, install(2, 0, 9, updates((1, "a", 8, 1)), True))
    while not isinstance(await h.response(StatusResponse | Frontiers), Frontiers):
        await stage.advance(1)
    await dataflow.expect(UpdatesInstalled, incarnation=1)
    await dataflow.expect(UpdatesInstalled, incarnation=2)


async def test_worker_1_parks_what_comes_before_it_has_rendered(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with house(stage, tmp_path, own=0, count=2) as h0:
        # Worker 0 renders first; its dataflow speaks to worker 1 through the probe.
        await h0.connect("a", CreateDataflow(index()))
        dataflow = await h0.dataflows.expect()
        tell_workers(dataflow, StartInputs("i1", 1))
        signed = await h0.other.expect(FromDataflow)
        async with house(stage, tmp_path / "1", own=1, count=2) as h1:
            await h1.worker.send(signed)
            await stage.idle()
            await h1.fetches.expect_none()
            await h1.connect("a", CreateDataflow(index()))
            await h1.fetches.expect()
            await h1.dataflows.expect_none()
            started = [await dataflow.expect(InputStarted) for _ in range(2)]
            assert sorted(message.worker for message in started) == [0, 1]
            # exactly one of them has the listen task
            assert sorted(message.listen is None for message in started) == [False, True]


async def test_drop_takes_down_worker_1_only_after_the_dataflow_has_stopped(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with house(stage, tmp_path, own=1, count=2) as h:
        speaker = stage.probe("speaker")
        await h.connect("a", CreateDataflow(index()))
        await h.worker.send(FromDataflow(1, speaker.address, StartInputs("i1", 1)))
        await speaker.expect(InputStarted)
        await h.do(AllowCompaction("i1", EMPTY))
        await stage.idle()
        assert h.fetches.running
        await h.worker.send(DataflowStopped(1))
        assert await h.response(Frontiers) == Frontiers("i1", EMPTY, EMPTY, EMPTY)
        assert not h.fetches.running
        # And the other way round: worker 0 was faster.
        await h.do(CreateDataflow(index("i2")))
        await h.worker.send(DataflowStopped(2))
        await h.do(AllowCompaction("i2", EMPTY))
        assert await h.response(Frontiers) == Frontiers("i2", EMPTY, EMPTY, EMPTY)


async def test_a_crashed_dataflow_starts_afresh(stage: ActorIsolation, h: House) -> None:
    await h.connect("a", CreateDataflow(index()), ScheduleDataflow("i1"), AllowWrites())
    await h.do(AllowCompaction("i1", 4))
    first = await h.dataflows.expect()
    await first.pick(CompactionAllowed)
    await first.crash()
    assert (await h.response(StatusResponse)).state == "stalled"
    await h.dataflows.expect_none()
    await stage.advance(2)  # a crash has a delay
    second = await h.dataflows.expect()
    for command in (WritesAllowed(), CompactionAllowed(4), DataflowScheduled()):
        assert await second.expect(type(command)) == command
    assert second.args[2] != first.args[2]  # a scratch folder of its own
    tell_workers(first, DataflowProgress("i1", 99, 99, 99))  # late words of the dead
    tell_workers(second, DataflowProgress("i1", 8, 8, 8))
    assert await h.response(Frontiers) == Frontiers("i1", input=8)


async def test_a_replaced_dataflow_starts_when_its_predecessor_has_stopped(h: House) -> None:
    await h.connect("a", CreateDataflow(index()), ScheduleDataflow("i1"))
    first = await h.dataflows.expect()
    await h.connect("b", CreateDataflow(index(key=("v",))), ScheduleDataflow("i1"))
    second = await h.dataflows.expect()
    assert first.stopped
    await second.expect(DataflowScheduled)
    tell_workers(first, DataflowProgress("i1", 99, 99, 99))
    tell_workers(second, DataflowProgress("i1", 7, 7, 7))
    assert await h.response(Frontiers) == Frontiers("i1", input=7)


async def test_a_reconnection_keeps_an_unchanged_dataflow(h: House) -> None:
    history = (CreateDataflow(index()), ScheduleDataflow("i1"))
    await h.connect("a", *history)
    dataflow = await h.dataflows.expect()
    tell_workers(dataflow, StartInputs("i1", 1))
    await dataflow.pick(InputStarted)
    tell_workers(dataflow, install(1, 0, 6, FIRST, True))
    await h.response(Frontiers)
    await h.worker.send(ClientGone("a"))
    tell_workers(dataflow, install(1, 6, 8, SECOND, False))
    await dataflow.pick(UpdatesInstalled, upper=8)
    await h.adapter.expect_nothing()
    await h.connect("b", *history)
    assert await h.response(Frontiers) == Frontiers("i1", write=8, output=8)
    for casting in (h.dataflows, h.listens, h.fetches):
        assert len(casting.made) == len(casting.running) == 1
    assert dataflow.received.count(DataflowScheduled()) == 1


async def test_receipts_of_a_subscribe_wait_for_the_client(h: House) -> None:
    await h.connect("a", CreateDataflow(subscribe()))
    dataflow = await h.dataflows.expect()

    def emit(lower: int, upper: int) -> EmitBatch:
        return EmitBatch("t1", 1, SubscribeBatch(lower, upper, b"x"))

    tell_workers(dataflow, emit(0, 5))
    tagged = await h.adapter.expect(TaggedResponse, nonce="a")
    assert tagged.response == SubscribeResponse("t1", emit(0, 5).batch)
    await dataflow.expect_nothing()  # the client is slow
    await h.worker.send(ResponsesForwarded("a", (tagged.serial,)))
    await dataflow.expect(BatchEmitted, upper=5)
    tell_workers(dataflow, emit(5, 6))
    await h.adapter.expect(TaggedResponse)
    await h.worker.send(ClientGone("a"))  # what nobody will read is off our hands
    await dataflow.expect(BatchEmitted, dataflow="t1", incarnation=1, upper=6)
    tell_workers(dataflow, emit(6, 7))
    await dataflow.expect(BatchEmitted, dataflow="t1", incarnation=1, upper=7)
    await h.adapter.expect_nothing()


async def test_nothing_piles_up_while_the_client_is_slow_or_gone(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    settings = Settings(responses_in_flight_max=4, maintenance_ms=5)
    async with house(stage, tmp_path, settings=settings) as h:
        dataflow = await h.with_index()
        for time in range(1, 2000):
            tell_workers(dataflow, DataflowProgress("i1", time, time, time))
            tell_workers(dataflow, StatusResponse("i1", "gathering", steps=time))
        await stage.idle()
        assert len(h.adapter.received) == 4
        assert (await h.statistics()).responses_waiting == 2
        await h.worker.send(ClientGone("a"))
        tell_workers(dataflow, DataflowProgress("i1", 5000, 5000, 5000))
        assert (await h.statistics()).responses_waiting == 0
        h.adapter.received.clear()
        await h.connect("b", CreateDataflow(index()))
        assert await h.response(Frontiers) == Frontiers("i1", input=5000)
        assert await h.response(StatusResponse) == StatusResponse("i1", "gathering", steps=1999)


async def test_frontiers_do_not_wait_for_maintenance(stage: ActorIsolation, tmp_path: Path) -> None:
    async with house(stage, tmp_path, settings=Settings(maintenance_ms=3_600_000)) as h:
        began_ms = stage.now_ms()
        dataflow = await h.with_index()
        tell_workers(dataflow, DataflowProgress("i1", 1, 1, 1))
        assert await h.response(Frontiers) == Frontiers("i1", input=1)
        assert stage.now_ms() - began_ms < 1_000


async def test_an_interval_of_maintenance_that_a_client_configures_counts_at_once(
    stage: ActorIsolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_ms: list[float] = []
    loop = asyncio.get_running_loop()

    def maintain(_: IndexInstaller) -> None:
        # A service that other tests of this process share may run in a thread of its own.
        if asyncio.get_running_loop() is loop:
            turns_ms.append(stage.now_ms())

    monkeypatch.setattr(IndexInstaller, "maintain", maintain)
    async with house(stage, tmp_path, settings=Settings(maintenance_ms=3_600_000)) as h:
        await h.connect("a", UpdateConfiguration(maintenance_ms=1_000))
        began_ms = stage.now_ms()
        await stage.advance(2_500)
        assert [at - began_ms for at in turns_ms] == [1_000, 2_000]
        await h.do(UpdateConfiguration(maintenance_ms=100))
        await stage.advance(650)
        later_ms = [round(at - began_ms) for at in turns_ms[2:]]
        assert later_ms == list(range(2_600, 3_101, 100))


@pytest.mark.parametrize("own", [0, 1])
async def test_many_runs_are_merged_by_maintenance(
    stage: ActorIsolation, tmp_path: Path, own: int
) -> None:
    async with house(stage, tmp_path, own=own, count=2) as h:
        speaker = stage.probe("speaker")
        await h.connect("a", CreateDataflow(index()))
        if own == 0:
            dataflow = await h.dataflows.expect()
            send = dataflow.args[1][0].reply
        else:
            send = lambda message: h.worker.reply(FromDataflow(1, speaker.address, message))  # noqa: E731
        send(install(1, 0, 1, updates(), True))
        for time in range(1, 60):
            send(
                msgspec.structs.replace(
                    install(1, time, time + 1, updates((time, "x", time, 1)), False)
                )
            )
        await stage.advance(50)  # ten turns of maintenance
        await h.do(Peek("p", IndexTarget("i1"), 59))
        while not isinstance(answer := await h.response(Frontiers | PeekResponse), PeekResponse):
            pass
        assert len(rows_of(answer)) == 59
