"""The storage half over a socket: opening, merged answers, displacement, strangers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.protocol.compute import AllowCompaction, Hello, InitializationComplete
from actors.model.protocol.storage import (
    Command,
    ConnectorConfiguration,
    DroppedId,
    Response,
    RunSink,
    SinkDescription,
    StatusUpdate,
)
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.client import WIRES, connect
from actors.runtime.errors import (
    ConnectionBroken,
    ConnectionDisplaced,
    InvalidUsage,
    PenstockError,
    RemoteProtocolError,
)
from actors.runtime.kernel import ActorSystem
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.runtime.transport.connection import TransportListener, dial
from cluster_house import SOURCE, Fake, InlineClock, Stage  # type: ignore[import-not-found]

RUN = RunSink(SinkDescription("k1", "k1", SOURCE, ConnectorConfiguration("none"), 5))


@asynccontextmanager
async def served(
    tmp_path: Path, **changed: Any
) -> AsyncIterator[tuple[TransportListener, Settings]]:
    settings = Settings(workers=2, **changed)
    stage = Stage()

    def sink(*args: Any) -> Fake:
        return Fake("sink", args, stage)

    async with ActorSystem(clock=InlineClock()) as system:
        persist = await PersistClient.in_memory(settings, system.clock)
        executor = system.spawn(lambda: Fake("executor", (), stage), "executor")
        connectors = StorageConnectors(lambda *_: pytest.fail("no source is made"), sink, tmp_path)
        cluster = await WorkerCluster.start(
            system,
            settings,
            persist,
            executor,
            tmp_path,
            factory=stage.factory(),
            connectors=connectors,
        )
        yield await cluster.listen("127.0.0.1:0", "storage"), settings
        await persist.close()


async def until(client: Any, kind: type[Any]) -> Any:
    """The next response of a kind."""
    while not isinstance(found := await client.receive(), kind):
        pass
    return found


async def test_a_sink_is_run_and_dropped_over_a_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as (listener, settings):
        client: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("a"), RUN, InitializationComplete()):
            await client.send(command)
        assert (await until(client, StatusUpdate)).status == "starting"
        await client.send(AllowCompaction("k1", EMPTY))
        assert await until(client, DroppedId) == DroppedId("k1")
        await client.close()


async def test_a_newer_client_displaces_and_keeps_what_runs(tmp_path: Path) -> None:
    async with served(tmp_path) as (listener, settings):
        first: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("a"), RUN, InitializationComplete()):
            await first.send(command)
        await until(first, StatusUpdate)
        second: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("b"), RUN, InitializationComplete()):
            await second.send(command)
        with pytest.raises(ConnectionDisplaced):
            await until(first, DroppedId)
        assert (await until(second, StatusUpdate)).id == "k1"
        third: Any = await connect(listener.address, settings, "storage")
        await third.send(Hello("a"))
        with pytest.raises(RemoteProtocolError, match="used"):
            await third.receive()
        await second.send(AllowCompaction("k1", EMPTY))
        assert await until(second, DroppedId) == DroppedId("k1"), "the refused displaced nobody"
        for client in (first, second, third):
            await client.close()


@pytest.mark.usefixtures("patient_loop")
@pytest.mark.parametrize("first", [InitializationComplete(), None], ids=["other", "nothing"])
async def test_who_does_not_introduce_himself_is_sent_away(
    tmp_path: Path, first: Command | None
) -> None:
    async with served(tmp_path, connect_timeout_ms=1_000) as (listener, settings):
        client: Any = await connect(listener.address, settings, "storage")
        if first is not None:
            await client.send(first)
        with anyio.fail_after(30), pytest.raises(RemoteProtocolError, match="Hello"):
            await client.receive()
        await client.close()


async def test_a_client_of_the_other_half_is_refused_in_the_handshake(tmp_path: Path) -> None:
    async with served(tmp_path) as (listener, settings):
        with pytest.raises(PenstockError):
            await connect(listener.address, settings)
        magic, old = WIRES["storage"].magic, WIRES["storage"].version + 1
        with pytest.raises(PenstockError, match="version"):
            await dial(listener.address, Command, Response, settings, magic, old)


async def test_a_cluster_without_a_storage_half_serves_none(tmp_path: Path) -> None:
    settings = Settings(workers=1)
    stage = Stage()
    async with ActorSystem(clock=InlineClock()) as system:
        persist = await PersistClient.in_memory(settings, system.clock)
        executor = system.spawn(lambda: Fake("executor", (), stage), "executor")
        cluster = await WorkerCluster.start(
            system, settings, persist, executor, tmp_path, factory=stage.factory()
        )
        with pytest.raises(InvalidUsage, match="no storage half"):
            await cluster.listen("127.0.0.1:0", "storage")
        await persist.close()


async def test_a_cut_connection_is_told_and_another_takes_over(tmp_path: Path) -> None:
    async with served(tmp_path) as (listener, settings):
        first: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("a"), RUN, InitializationComplete()):
            await first.send(command)
        await until(first, StatusUpdate)
        await first.close()
        with pytest.raises(PenstockError) as ended:
            await first.receive()
        assert not isinstance(ended.value, ConnectionDisplaced | ConnectionBroken)
        second: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("b"), InitializationComplete()):
            await second.send(command)
        third: Any = await connect(listener.address, settings, "storage")
        for command in (Hello("c"), RUN, InitializationComplete()):
            await third.send(command)
        assert (await until(third, StatusUpdate)).status == "starting"
        for client in (second, third):
            await client.close()
