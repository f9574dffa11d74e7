"""The cluster: N workers, N channel adapters and the acceptor.

`WorkerCluster.start` only spawns; everything runs on the given system, or below the given actor,
and stops with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec

from actors.channel_adapter import AdapterStatistics, ChannelAdapter, InspectAdapter
from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import PersistClient
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.compute import (
    Command,
    CopyToExport,
    CreateInstance,
    DataflowDescription,
    Hello,
    Response,
)
from actors.model.protocol.internal import Half
from actors.replica.cluster.client import REPLICA_MAGIC, REPLICA_VERSION, LocalClient
from actors.replica.cluster.connection import (
    AcceptorMessage,
    ClientConversation,
    ComputeConversation,
    ConnectionAcceptor,
    Converse,
    RunListener,
)
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.cluster.serving import ConversationServer
from actors.replica.cluster.storage_connection import StorageConversation, listen_storage
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.live import ActorFactory
from actors.replica.dataflow.copying import CopyTask
from actors.replica.dataflow.dataflow import DataflowActor
from actors.replica.sequencer import Sequencer
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import Actor, ActorAddress, ActorClock, FlowWindow
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import TransportListener
from actors.runtime.transport.security import for_listener
from actors.worker import InspectWorker, Worker, WorkerStatistics


class ClusterStatistics(msgspec.Struct, frozen=True):
    """Statistics of a cluster at one moment; one entry for each worker."""

    workers: tuple[WorkerStatistics, ...]
    adapters: tuple[AdapterStatistics, ...]


class ActorSpawner(Protocol):
    """Runs a cluster's actors: a system, or the context of the actor with which the cluster
    ends."""

    @property
    def clock(self) -> ActorClock:
        """Return the system's clock."""
        ...

    def spawn(self, factory: Callable[[], Actor[Any]], name: str, /) -> ActorAddress[Any]:
        """Start an actor."""
        ...


def cast_of(
    persist: PersistClient,
    executor: ActorAddress[ExecutorMessage],
    settings: Settings,
    state_dir: Path,
    replica: str = "",
) -> ActorFactory:
    """Return the factories of the real actors below a worker. All dataflows share one registry of
    arrangements. `replica`: its name, if there are others."""
    arrangements = SharedArrangements(
        state_dir / "scratch" / "shared",
        lag_bytes_max=settings.arrangement_lag_bytes_max,
        slack=settings.arrangement_slack_ms,
    )
    persist.ledger.add(arrangements.memory)

    def dataflow(
        description: DataflowDescription, workers: tuple[ActorAddress[Any], ...], scratch: Path
    ) -> Actor[Any]:
        if isinstance(description.export, CopyToExport):
            return CopyTask(description, workers, persist, settings, scratch)
        return DataflowActor(
            description,
            workers,
            executor,
            persist,
            settings,
            scratch,
            arrangements=arrangements,
            replica=replica,
        )

    return ActorFactory(
        dataflow=dataflow,
        listen=lambda source, dataflow, incarnation, number, consumer, wanted: ListenTask(
            persist,
            source,
            dataflow,
            incarnation,
            number,
            consumer,
            settings,
            persist.trail,
            wanted if settings.filter_parts else None,
        ),
        fetch=lambda schema, dataflow, incarnation, number, consumer: FetchTask(
            persist, schema, dataflow, incarnation, number, consumer, settings
        ),
        shared=arrangements.statistics,
    )


class HalfEntrance(msgspec.Struct, frozen=True):
    """The way into one half: its acceptor, and what a client in this process needs."""

    acceptor: ActorAddress[AcceptorMessage]
    adapters: Sequence[ActorAddress[Any]]
    """Addresses of the adapters for connections."""
    converse: Converse
    half: Half

    def connect(self) -> LocalClient:
        """Return a client in this process; its Hello displaces the active client."""
        return LocalClient(self.acceptor, self.adapters, self.converse, self.half)


class WorkerCluster:
    """A running cluster; `start` makes it."""

    def __init__(
        self,
        settings: Settings,
        workers: tuple[ActorAddress[Any], ...],
        adapters: tuple[ActorAddress[Any], ...],
        partitions: ClusterPartitions,
        compute: HalfEntrance,
        storage: HalfEntrance | None = None,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._adapters = adapters
        self._partitions = partitions
        self._compute = compute
        self._storage = storage

    @classmethod
    async def start(
        cls,
        system: ActorSpawner,
        settings: Settings,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        state_dir: Path,
        *,
        cast: ActorFactory | None = None,
        reach: Callable[[ActorAddress[Any]], ActorAddress[Any]] = lambda adapter: adapter,
        replica: str = "r1",
        life: int = 0,
        connectors: StorageConnectors | None = None,
    ) -> WorkerCluster:
        """Spawn all actors on an entered system. `cast` replaces the actors below the workers,
        `reach` wraps the adapters' addresses for the connections. `replica` is a name for people;
        no cluster of the process had this `life`. Without `connectors` there is no storage half."""
        count = settings.workers
        await system.clock.run_blocking(lambda: _remove_caches(state_dir))
        below = cast or cast_of(persist, executor, settings, state_dir)
        partitions = ClusterPartitions(count)
        # The lists are complete before any of these actors runs: spawning does not yield.
        workers: list[ActorAddress[Any]] = []
        adapters: list[ActorAddress[Any]] = []
        storage_adapters: list[ActorAddress[Any]] = []
        lanes: list[FlowWindow[Any]] = []  # flow control of commands to the workers, for each half
        storage_lanes: list[FlowWindow[Any]] = []
        sequencer = Sequencer(workers)

        def worker(index: int) -> Worker:
            return Worker(
                index,
                count,
                sequencer.propose,
                workers,
                adapters,
                below,
                persist,
                settings,
                state_dir,
                partitions,
                replica,
                life,
                storage_adapters,
                connectors,
                lanes,
                storage_lanes,
            )

        def adapter(half: Half, ways: list[FlowWindow[Any]], index: int) -> ChannelAdapter:
            stash_max = settings.stash_responses_max
            return ChannelAdapter(index, workers[index], stash_max, ways[index], half)

        workers += (system.spawn(partial(worker, i), f"worker-{i}") for i in range(count))
        for ways in (lanes, storage_lanes):
            ways.extend(FlowWindow(each, settings.commands_in_flight_max) for each in workers)
        nearest = partial(adapter, "compute", lanes)
        near = [system.spawn(partial(nearest, i), f"adapter-{i}") for i in range(count)]
        adapters.extend(map(reach, near))
        converse = _compute_conversations(settings, partitions)
        compute = _entrance(system, adapters, settings, converse, "compute", persist)
        storage: HalfEntrance | None = None
        if connectors is not None:
            stored = partial(adapter, "storage", storage_lanes)
            storage_adapters.extend(
                reach(system.spawn(partial(stored, index), f"storage-adapter-{index}"))
                for index in range(count)
            )
            converse = _storage_conversations(settings)
            storage = _entrance(system, storage_adapters, settings, converse, "storage", persist)
        return cls(settings, tuple(workers), tuple(near), partitions, compute, storage)

    @property
    def partitions(self) -> ClusterPartitions:
        """Return the workers' partitions of all indexes."""
        return self._partitions

    async def connect(self) -> LocalClient:
        """Return a client in this process; its Hello displaces the active client."""
        return self._compute.connect()

    async def connect_storage(self) -> LocalClient:
        """Return a client of the storage half. Raises `InvalidUsage` if there is none."""
        if self._storage is None:
            raise InvalidUsage("this cluster has no storage half")
        return self._storage.connect()

    async def listen(self, address: Place | str) -> TransportListener:
        """Serve the replica protocol on that address until the cluster stops or
        `TransportListener.aclose`. Raises as `bind_listener`."""
        listener = await bind_listener(address, self._settings)
        await self.serve(listener)
        return listener

    async def serve(self, listener: TransportListener) -> None:
        """Serve the replica protocol on a listener of `bind_listener`."""
        server = ConversationServer(self._compute.acceptor, self._settings)
        await self._compute.acceptor.send(RunListener(lambda: listener.serve(server.converse)))

    async def listen_storage(self, address: Place | str) -> TransportListener:
        """Serve the storage half as `listen` does. Raises `InvalidUsage` if there is none."""
        if self._storage is None:
            raise InvalidUsage("this cluster has no storage half")
        return await listen_storage(address, self._storage.acceptor, self._settings)

    async def statistics(self) -> ClusterStatistics:
        """Return the statistics of every worker and adapter."""
        workers: dict[int, WorkerStatistics] = {}
        adapters: dict[int, AdapterStatistics] = {}

        async def ask_worker(index: int) -> None:
            workers[index] = await self._workers[index].ask(InspectWorker)

        async def ask_adapter(index: int) -> None:
            adapters[index] = await self._adapters[index].ask(InspectAdapter)

        async with anyio.create_task_group() as group:
            for index in range(len(self._workers)):
                group.start_soon(ask_worker, index)
                group.start_soon(ask_adapter, index)
        order = range(len(self._workers))
        return ClusterStatistics(
            tuple(workers[index] for index in order), tuple(adapters[index] for index in order)
        )


async def bind_listener(address: Place | str, settings: Settings) -> TransportListener:
    """Return a listener for the replica protocol on that address (port 0: a free one, see
    `TransportListener.address`), which nobody serves yet. Raises `AddressInUse`, and `BadSettings`
    for an address that needs TLS and tokens and has none."""
    place = Place.parse(address, "cluster_listen") if isinstance(address, str) else address
    return await TransportListener.bind(
        place,
        Response,
        Command,
        settings,
        REPLICA_MAGIC,
        REPLICA_VERSION,
        identity=settings.identity,
        security=for_listener("cluster_listen", place, settings, "cluster_token_file"),
    )


def _entrance(
    system: ActorSpawner,
    adapters: Sequence[ActorAddress[Any]],
    settings: Settings,
    converse: Converse,
    half: Half,
    persist: PersistClient,
) -> HalfEntrance:
    fence = persist.commanded
    acceptor = system.spawn(
        # Its own acceptor: a client of one half must not displace one of the other.
        lambda: ConnectionAcceptor(
            adapters, settings, converse, None if fence is None else fence.follow_owner
        ),
        "acceptor" if half == "compute" else "storage-acceptor",
    )
    return HalfEntrance(acceptor, adapters, converse, half)


def _compute_conversations(settings: Settings, partitions: ClusterPartitions) -> Converse:
    """Return a function that makes conversations with the compute half."""
    # One for all connections: a configuration outlives the connection that brought it.
    limits = ConnectionLimits(settings.result_bytes_max, settings.inline_bytes_max)

    def converse(hello: Hello, instance: CreateInstance | None) -> ClientConversation:
        assert instance is not None, "compute's clients say CreateInstance"
        return ComputeConversation(hello, instance, settings.workers, limits, partitions, settings)

    return converse


def _storage_conversations(settings: Settings) -> Converse:
    """Return a function that makes conversations with the storage half."""
    return lambda hello, _: StorageConversation(hello, settings.workers, settings)


def _remove_caches(state_dir: Path) -> None:
    for cache in ("arrangements", "scratch"):
        # Partitions of indexes and scratch files of an earlier run: no durable state.
        shutil.rmtree(state_dir / cache, ignore_errors=True)
        (state_dir / cache).mkdir(parents=True)
