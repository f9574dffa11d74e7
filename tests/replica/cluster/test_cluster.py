"""A whole cluster with fakes below the workers: connections, displacement, reconnection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.durable.arrangement import partition
from actors.durable.persist import PersistClient
from actors.model.protocol import api
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Command,
    CreateDataflow,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    Response,
    ScheduleDataflow,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    DataflowProgress,
    EmitBatch,
    InputStarted,
    InstallUpdates,
    StartInputs,
    UpdatesInstalled,
)
from actors.replica.cluster import ClusterClient, WorkerCluster, connect
from actors.replica.cluster.client import WIRES
from actors.runtime.errors import (
    AddressInUse,
    ConnectionBroken,
    ConnectionDisplaced,
    FrameTooLarge,
    InvalidUsage,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    UnknownCommand,
)
from actors.runtime.kernel import ActorSystem
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from actors.testing.probe import MessageProbe, settle
from cluster_house import (  # type: ignore[import-not-found]
    InlineClock,
    Stage,
    index,
    rows_of,
    subscribe,
    updates,
)


class World:
    """A running cluster, and its fakes."""

    def __init__(self, cluster: WorkerCluster, stage: Stage, settings: Settings) -> None:
        self.cluster = cluster
        self.stage = stage
        self.settings = settings
        self.listener: TransportListener | None = None

    async def client(self, wire: bool = False) -> ClusterClient:
        if not wire:
            return await self.cluster.connect()
        if self.listener is None:
            self.listener = await self.cluster.listen("127.0.0.1:0")
        return await connect(self.listener.address, self.settings)

    async def joined(self, nonce: str, *commands: Command, wire: bool = False) -> ClusterClient:
        client = await self.client(wire)
        start = (Hello(nonce), CreateInstance(self.settings.workers))
        for command in (*start, *commands, InitializationComplete()):
            await client.send(command)
        return client


@asynccontextmanager
async def world(tmp_path: Path, workers: int = 2, **fields: Any) -> AsyncIterator[World]:
    settings = Settings(workers=workers, maintenance_ms=5, **fields)
    clock, stage = InlineClock(), Stage()
    persist = await PersistClient.in_memory(settings, clock)
    with anyio.fail_after(200):
        async with ActorSystem(clock=clock, seed=1) as system:
            executor = MessageProbe.start(system, "executor")
            cluster = await WorkerCluster.start(
                system, settings, persist, executor.address, tmp_path, factory=stage.factory()
            )
            yield World(cluster, stage, settings)
    await persist.close()


async def next_of(client: ClusterClient, kind: Any) -> Any:
    while not isinstance(response := await client.receive(), kind):
        pass
    return response


def installs(
    workers: int, lower: int, upper: int, rows: Any, snapshot: bool
) -> list[InstallUpdates]:
    return [
        InstallUpdates("i1", 1, lower, upper, part, snapshot)
        for part in partition(rows, ("k",), workers)
    ]


FIRST = updates(*[(k, "a", 5, 1) for k in range(20)])
HISTORY = (CreateDataflow(index()), ScheduleDataflow("i1"))


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_one_answer_from_all_workers(tmp_path: Path, workers: int, wire: bool) -> None:
    async with world(tmp_path, workers) as w:
        client = await w.joined("a", *HISTORY, wire=wire)
        dataflow = await w.stage.dataflow()
        dataflow.tell_workers(StartInputs("i1", 1))
        started = await w.stage.message(dataflow, InputStarted, workers)
        assert sorted(message.worker for message in started) == list(range(workers))
        assert len(w.stage.of("listen")) == 1
        assert len(w.stage.of("fetch")) == workers
        await client.send(Peek("p1", IndexTarget("i1"), 5))
        dataflow.tell_workers(*installs(workers, 0, 6, FIRST, True))
        assert await client.receive() == Frontiers("i1", write=6, output=6)
        answer = await next_of(client, PeekResponse)
        assert rows_of(answer) == sorted(((k, "a", 1) for k in range(20)), key=str)
        assert len(await w.stage.message(dataflow, UpdatesInstalled, workers)) == workers
        dataflow.tell_workers(DataflowProgress("i1", 6, 6, 6))
        assert await client.receive() == Frontiers("i1", input=6)
        dataflow.tell_workers(StatusResponse("i1", "gathering"))
        assert await client.receive() == StatusResponse("i1", "gathering")
        await client.send(AllowCompaction("i1", EMPTY))
        assert await client.receive() == Frontiers("i1", EMPTY, EMPTY, EMPTY)
        await settle()
        assert all(fake.stopped for fake in w.stage.made)
        statistics = await w.cluster.statistics()
        assert [worker.rendered for worker in statistics.workers] == [0] * workers
        assert len({worker.commands_applied for worker in statistics.workers}) == 1
        await client.close()
        await client.close()
        with pytest.raises(ResourceClosed):
            await client.receive()


@pytest.mark.parametrize("wire", [False, True])
async def test_a_subscribe_over_several_workers(tmp_path: Path, wire: bool) -> None:
    async with world(tmp_path, 3) as w:
        client = await w.joined("a", CreateDataflow(subscribe()), wire=wire)
        dataflow = await w.stage.dataflow()
        for lower, upper in ((0, 6), (6, 9)):
            batch = SubscribeBatch(lower, upper, b"x" if lower == 0 else None)
            dataflow.args[1][0].reply(EmitBatch("t1", 1, batch))
            assert await client.receive() == SubscribeResponse("t1", batch)
            await w.stage.message(dataflow, BatchEmitted, 1 if lower == 0 else 2)
        await client.send(AllowCompaction("t1", EMPTY))
        assert await client.receive() == SubscribeResponse("t1", SubscribeDropped(9))
        await client.close()


@pytest.mark.parametrize("wire", [False, True])
async def test_a_newer_connection_displaces_and_nothing_is_run_again(
    tmp_path: Path, wire: bool
) -> None:
    async with world(tmp_path, 3) as w:
        old = await w.joined("a", *HISTORY, wire=wire)
        dataflow = await w.stage.dataflow()
        dataflow.tell_workers(StartInputs("i1", 1))
        await w.stage.message(dataflow, InputStarted, 3)
        dataflow.tell_workers(*installs(3, 0, 6, FIRST, True))
        assert await old.receive() == Frontiers("i1", write=6, output=6)
        await old.send(Peek("old", IndexTarget("i1"), 50))  # waits
        made = len(w.stage.made)
        new = await w.joined("b", *HISTORY, wire=wire)
        with pytest.raises(ConnectionDisplaced):
            await next_of(old, ())
        with pytest.raises(PenstockError):
            while True:
                await old.send(AllowWrites())
        assert await new.receive() == Frontiers("i1", write=6, output=6)
        await new.send(Peek("new", IndexTarget("i1"), 50))
        dataflow.tell_workers(*installs(3, 6, 51, updates((77, "z", 7, 1)), False))
        answers = [await new.receive() for _ in range(2)]
        assert Frontiers("i1", write=51, output=51) in answers
        (answer,) = [a for a in answers if isinstance(a, PeekResponse)]
        assert answer.uuid == "new"  # the old one's peek went with its connection
        assert len(rows_of(answer)) == 21
        assert len(w.stage.made) == made  # no dataflow, no task was started
        assert not [fake for fake in w.stage.made if fake.stopped]
        await new.close()
        await old.close()


async def test_dataflows_go_on_and_nothing_piles_up_without_a_client(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        client = await w.joined("a", *HISTORY, CreateDataflow(subscribe()))
        dataflow, streaming = await w.stage.dataflow(0), await w.stage.dataflow(1)
        await client.close()
        for time in range(1, 300):
            dataflow.tell_workers(DataflowProgress("i1", time, time, time))
            streaming.args[1][0].reply(
                EmitBatch("t1", 1, SubscribeBatch(time - 1, time, bytes(100)))
            )
        await w.stage.message(streaming, BatchEmitted, 299)
        statistics = await w.cluster.statistics()
        assert [worker.responses_waiting for worker in statistics.workers] == [0, 0]
        assert [adapter.stashed + adapter.holding for adapter in statistics.adapters] == [0, 0]
        again = await w.joined("b", *HISTORY)
        assert await again.receive() == Frontiers("i1", input=299)
        await again.close()


async def test_a_slow_client_holds_back_its_subscribe_alone(tmp_path: Path) -> None:
    async with world(tmp_path, 1, responses_in_flight_max=2) as w:
        client = await w.joined("a", CreateDataflow(subscribe()), *HISTORY)
        streaming, dataflow = await w.stage.dataflow(0), await w.stage.dataflow(1)
        sent = 0
        for time in range(1, 200):
            if len([m for m in streaming.received if isinstance(m, BatchEmitted)]) == sent:
                batch = SubscribeBatch(time - 1, time)
                streaming.args[1][0].reply(EmitBatch("t1", 1, batch))
                sent += 1
            dataflow.tell_workers(DataflowProgress("i1", time, time, time))
            await settle()
        assert sent < 40  # the window, then no further
        seen = 0
        while seen < 199:
            response = await client.receive()
            if isinstance(response, Frontiers):
                assert response.input is not None
                assert response.input > seen
                seen = response.input
        await client.close()


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_the_window_of_bytes_holds_with_any_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    """A client that reads nothing gets the window's bytes, whatever else is said meanwhile."""
    fields = {"subscribe_inflight_bytes_max": 20_000}
    async with world(tmp_path, workers, **fields) as w:
        creates = [CreateDataflow(subscribe(f"t{n}")) for n in range(60)]
        client = await w.joined("a", *creates, *HISTORY)
        streams = [await w.stage.dataflow(number) for number in range(60)]
        index = await w.stage.dataflow(60)
        for number, stream in enumerate(streams):  # each has one batch of 4 kB
            batch = SubscribeBatch(0, 5, bytes(4000))
            stream.args[1][0].reply(EmitBatch(f"t{number}", 1, batch))
            index.args[1][0].reply(DataflowProgress("i1", number + 1, number + 1, number + 1))
            await settle()
        waiting = (await w.cluster.statistics()).workers[0].responses_waiting
        # The window's 5 batches.
        assert waiting >= 60 - 5 - 1
        for _ in range(60):
            await next_of(client, SubscribeResponse)
        await client.close()


@pytest.mark.parametrize("wire", [False, True])
async def test_another_instance_is_refused_and_displaces_nobody(tmp_path: Path, wire: bool) -> None:
    async with world(tmp_path, 2) as w:
        good = await w.joined("good", *HISTORY)
        for number in range(3):
            client = await w.client(wire)
            await client.send(Hello(f"bad{number}"))
            await client.send(CreateInstance(3))
            with pytest.raises(InvalidUsage, match=r"3 workers.*2 workers"):
                await client.receive()
            await client.close()
        (await w.stage.dataflow()).tell_workers(DataflowProgress("i1", 5, 5, 5))
        assert await good.receive() == Frontiers("i1", input=5)
        await good.close()


@pytest.mark.parametrize("wire", [False, True])
async def test_hello_alone_displaces_nobody(tmp_path: Path, wire: bool) -> None:
    async with world(tmp_path, 2) as w:
        good = await w.joined("good", *HISTORY)
        client = await w.client(wire)
        await client.send(Hello("shy"))
        await client.send(AllowWrites())
        with pytest.raises(RemoteProtocolError, match="got AllowWrites before CreateInstance"):
            await client.receive()
        await client.close()
        (await w.stage.dataflow()).tell_workers(DataflowProgress("i1", 5, 5, 5))
        assert await good.receive() == Frontiers("i1", input=5)
        await good.close()


@pytest.mark.usefixtures("patient_loop")
@pytest.mark.parametrize("said", [(), (Hello("slow"),)], ids=["nothing", "Hello"])
async def test_who_does_not_introduce_itself_in_time_is_sent_away(
    tmp_path: Path, said: tuple[Command, ...]
) -> None:
    async with world(tmp_path, 1, connect_timeout_ms=1_000, keepalive_ms=10) as w:
        stranger = await w.client(wire=True)  # its keepalives go on
        for command in said:
            await stranger.send(command)
        with pytest.raises(RemoteProtocolError, match="no Hello and CreateInstance within 1000 ms"):
            await stranger.receive()
        await stranger.close()


async def test_in_process_clients_are_held_to_the_order(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        client = await w.client()
        with pytest.raises(LocalProtocolError):
            await client.send(AllowWrites())
        await client.send(Hello("a"))
        await client.send(Hello("a2"))
        with pytest.raises(RemoteProtocolError):
            await client.receive()
        first = await w.joined("n")
        await first.send(Hello("a2"))
        with pytest.raises(RemoteProtocolError, match="Hello may be sent only once"):
            await first.receive()


@pytest.mark.parametrize("wire", [False, True])
async def test_who_is_not_fit_to_be_served_displaces_nobody(tmp_path: Path, wire: bool) -> None:
    """A client that is refused, or only says Hello, or brings a used nonce, changes nothing."""
    async with world(tmp_path, 2) as w:
        good = await w.joined("good", *HISTORY)
        dataflow = await w.stage.dataflow()
        silent = await w.client(wire)
        await silent.send(Hello("silent"))
        other = await w.client(wire)
        await other.send(Hello("other"))
        await other.send(CreateInstance(3))
        with pytest.raises(InvalidUsage, match=r"3 workers.*2 workers"):
            await other.receive()
        again = await w.client(wire)
        await again.send(Hello("good"))
        await again.send(CreateInstance(2))
        with pytest.raises(RemoteProtocolError, match="nonce good was already used"):
            await again.receive()
        dataflow.tell_workers(DataflowProgress("i1", 5, 5, 5))
        assert await good.receive() == Frontiers("i1", input=5)
        second = await w.joined("second", wire=wire)
        with pytest.raises(ConnectionDisplaced):
            await good.receive()
        for client in (silent, other, again, second):
            await client.close()
        late = await w.client(wire)  # the nonce of one that has long gone is no fresher
        await late.send(Hello("good"))
        await late.send(CreateInstance(2))
        with pytest.raises(RemoteProtocolError, match="nonce good was already used"):
            await late.receive()
        await late.close()


async def test_a_peek_uuid_that_has_no_answer_yet_is_refused_by_name(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        client = await w.joined("a", *HISTORY)
        peek = Peek("p", IndexTarget("i1"), 5)
        await client.send(peek)
        await client.send(peek)
        with pytest.raises(RemoteProtocolError, match="peek p is still pending"):
            await client.receive()
        client = await w.joined("b", *HISTORY)
        for _ in range(2):  # answered: free again
            await client.send(Peek("p", IndexTarget("unknown"), 5))
            answer = await next_of(client, PeekResponse)
            assert answer.result.code == "UnknownObject"
        await client.close()


async def test_an_id_is_free_again_when_its_end_was_told(tmp_path: Path) -> None:
    async with world(tmp_path, 2) as w:
        client = await w.joined("a", *HISTORY)
        await client.send(AllowCompaction("i1", EMPTY))
        await client.send(CreateDataflow(index()))
        with pytest.raises(RemoteProtocolError, match="end has not been reported yet"):
            while True:
                await client.receive()
        client = await w.joined("b", *HISTORY)
        await client.send(AllowCompaction("i1", EMPTY))
        told: set[str] = set()
        while told != {"write", "input", "output"}:
            news = await next_of(client, Frontiers)
            told |= {kind for kind in ("write", "input", "output") if getattr(news, kind) == EMPTY}
        await client.send(CreateDataflow(index()))
        await client.send(Peek("p", IndexTarget("unknown"), 5))
        assert (await next_of(client, PeekResponse)).uuid == "p"
        await client.close()


async def raw(w: World, kind: Any = Command) -> FramedConnection[Any, Any]:
    await (await w.client(wire=True)).close()
    assert w.listener is not None
    where = w.listener.address
    wire = WIRES["compute"]
    return await dial(where, kind, Response, w.settings, wire.magic, wire.version)


async def test_a_stranger_displaces_nobody_and_is_told_what_it_did_wrong(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        good = await w.joined("good", *HISTORY)
        dataflow = await w.stage.dataflow()
        early = await raw(w)
        await early.send(AllowWrites())
        assert "before Hello" in (await early.receive()).text
        unknown = await raw(w, api.Request)
        await unknown.send(api.WaitFor(1, "x", 5))
        refused = await unknown.receive()
        assert refused.code == UnknownCommand.__name__
        with pytest.raises(ConnectionBroken):
            await unknown.receive()
        large = await raw(w)
        large._stream.write(b"\xff\xff\xff\xff")
        assert (await large.receive()).code == FrameTooLarge.__name__
        for connection in (early, unknown, large):
            await connection.aclose()
        dataflow.tell_workers(DataflowProgress("i1", 5, 5, 5))
        assert await good.receive() == Frontiers("i1", input=5)
        await good.close()


async def test_a_peer_that_vanishes_is_forgotten(tmp_path: Path) -> None:
    async with world(tmp_path, 1) as w:
        client: Any = await w.joined("a", *HISTORY, wire=True)
        dataflow = await w.stage.dataflow()
        dataflow.tell_workers(DataflowProgress("i1", 5, 5, 5))
        await client.receive()
        client._connection.abort()
        again = await w.joined("b", *HISTORY, wire=True)
        assert await again.receive() == Frontiers("i1", input=5)
        assert w.listener is not None
        with pytest.raises(AddressInUse):
            await w.cluster.listen(w.listener.address)
        await again.close()
        await client.close()


async def test_the_end_of_the_cluster_ends_its_clients(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        local = await w.joined("a")
        assert await w.cluster.statistics()
    with pytest.raises(PenstockError):
        await local.receive()
    with pytest.raises(PenstockError):
        await local.send(AllowWrites())
    await local.close()


async def test_what_kept_a_dataflow_from_being_reused_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with world(tmp_path, 2) as w:
        creates = [CreateDataflow(index(f"i{number}")) for number in range(3)]
        first = await w.joined("a", *creates)
        changed = CreateDataflow(index("i0", key=("v",)))
        second = await w.joined("b", changed, *creates[1:])
        await settle()
        for statistics in (await w.cluster.statistics()).workers:
            assert statistics.dataflows_reused == 2
            assert statistics.dataflows_replaced == (("export", 1),)
        assert "2 dataflows reused, 1 created (1 of them replace a running one)" in caplog.text
        [line] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "i0 is created again: its export changed" in line
        assert '"key":["k"]' in line
        assert '"key":["v"]' in line
        await first.close()
        await second.close()
