"""The cluster: N workers, N channel adapters and an acceptor for each half.

`WorkerCluster.start` only spawns actors. They run on the given system or below the given actor, and
stop with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec

from actors.channel_adapter import ChannelAdapter, InspectAdapter
from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import PersistClient
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.compute import (
    CopyToExport,
    CreateInstance,
    DataflowDescription,
    Hello,
)
from actors.model.protocol.internal import AdapterStatistics, Half
from actors.replica.cluster.client import LocalClient
from actors.replica.cluster.connection import (
    AcceptorMessage,
    ConnectionAcceptor,
    ConversationFactory,
    RunListener,
)
from actors.replica.cluster.conversations import (
    ClientConversation,
    ComputeConversation,
    StorageConversation,
)
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.cluster.sequencer import Sequencer
from actors.replica.cluster.serving import ConversationServer, bind_listener
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.rendering import ActorFactory
from actors.replica.dataflow.copying import CopyTask
from actors.replica.dataflow.dataflow import DataflowActor
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import Actor, ActorAddress, ActorClock, FlowWindow
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress as Place
from actors.runtime.transport.connection import TransportListener
from actors.worker import InspectWorker, Worker, WorkerStatistics


class ClusterStatistics(msgspec.Struct, frozen=True):
    """Statistics of a cluster at one moment, with one entry for each worker and adapter."""

    workers: tuple[WorkerStatistics, ...]
    adapters: tuple[AdapterStatistics, ...]


class ActorSpawner(Protocol):
    """Spawns a cluster's actors: either a system, or the context of the actor that the cluster
    belongs to."""

    @property
    def clock(self) -> ActorClock:
        """Return the system's clock."""
        ...

    def spawn(self, factory: Callable[[], Actor[Any]], name: str, /) -> ActorAddress[Any]:
        """Spawn an actor with this name."""
        ...


def actor_factory(
    persist: PersistClient,
    executor: ActorAddress[ExecutorMessage],
    settings: Settings,
    state_dir: Path,
    replica: str = "",
) -> ActorFactory:
    """Return the factory of the production actors below a worker.

    All dataflows share one registry of arrangements. `replica` is the replica's name, or "" if it
    is the only one.
    """
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


class HalfEndpoint(msgspec.Struct, frozen=True):
    """The endpoint of one half: its acceptor, and what a client in this process needs to
    connect."""

    acceptor: ActorAddress[AcceptorMessage]
    adapters: Sequence[ActorAddress[Any]]
    """Addresses of the adapters, as connections use them."""
    converse: ConversationFactory
    half: Half

    def connect(self) -> LocalClient:
        """Return a client in this process. Its Hello displaces the active client."""
        return LocalClient(self.acceptor, self.adapters, self.converse, self.half)


class WorkerCluster:
    """A running cluster. Create it with `start`."""

    def __init__(
        self,
        settings: Settings,
        workers: tuple[ActorAddress[Any], ...],
        adapters: tuple[ActorAddress[Any], ...],
        partitions: ClusterPartitions,
        endpoints: Mapping[Half, HalfEndpoint],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._adapters = adapters
        self._partitions = partitions
        self._endpoints = endpoints

    @classmethod
    async def start(
        cls,
        system: ActorSpawner,
        settings: Settings,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        state_dir: Path,
        *,
        factory: ActorFactory | None = None,
        reach: Callable[[ActorAddress[Any]], ActorAddress[Any]] = lambda adapter: adapter,
        replica: str = "r1",
        life: int = 0,
        connectors: StorageConnectors | None = None,
    ) -> WorkerCluster:
        """Spawn all actors on an entered system.

        Args:
            factory: Replaces the factory of the actors below the workers.
            reach: Wraps each adapter's address for the connections.
            replica: Name for display.
            life: Number that no other cluster of this process has had.
            connectors: Connectors of the storage half; without them there is no storage half.
        """
        count = settings.workers
        await system.clock.run_blocking(lambda: _remove_caches(state_dir))
        below = factory or actor_factory(persist, executor, settings, state_dir)
        partitions = ClusterPartitions(count)
        halves: tuple[Half, ...] = ("compute",) if connectors is None else ("compute", "storage")
        # The lists are complete before any of these actors runs, because spawning does not yield.
        workers: list[ActorAddress[Any]] = []
        adapters: dict[Half, list[ActorAddress[Any]]] = {half: [] for half in halves}
        # Flow control of the commands to the workers, for each half.
        windows: dict[Half, list[FlowWindow[Any]]] = {half: [] for half in halves}
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
                connectors,
                windows,
            )

        def adapter(half: Half, index: int) -> ChannelAdapter:
            way, stash_max = windows[half][index], settings.stash_responses_max
            return ChannelAdapter(index, workers[index], stash_max, way, half)

        workers += (system.spawn(partial(worker, i), f"worker-{i}") for i in range(count))
        near: dict[Half, list[ActorAddress[Any]]] = {}
        endpoints: dict[Half, HalfEndpoint] = {}
        for half in halves:
            # Actor names appear in logs; those of the compute half have no prefix.
            prefix = "" if half == "compute" else "storage-"
            windows[half].extend(
                FlowWindow(each, settings.commands_in_flight_max) for each in workers
            )
            near[half] = [
                system.spawn(partial(adapter, half, index), f"{prefix}adapter-{index}")
                for index in range(count)
            ]
            adapters[half].extend(map(reach, near[half]))
            converse = (
                _compute_conversations(settings, partitions)
                if half == "compute"
                else _storage_conversations(settings)
            )
            endpoints[half] = _endpoint(system, adapters[half], settings, converse, half, persist)
        return cls(settings, tuple(workers), tuple(near["compute"]), partitions, endpoints)

    @property
    def partitions(self) -> ClusterPartitions:
        """Return the registry of the workers' partitions of all indexes."""
        return self._partitions

    async def connect(self, half: Half = "compute") -> LocalClient:
        """Return a client in this process. Its Hello displaces the half's active client.

        Raise `InvalidUsage` if the cluster does not have this half.
        """
        return self._endpoint(half).connect()

    async def listen(self, address: Place | str, half: Half = "compute") -> TransportListener:
        """Serve a half on an address until the cluster stops or the listener is closed.

        Raise what `bind_listener` raises, and `InvalidUsage` if the cluster does not have this
        half.
        """
        self._endpoint(half)
        listener = await bind_listener(address, self._settings, half)
        await self.serve(listener, half)
        return listener

    async def serve(self, listener: TransportListener, half: Half = "compute") -> None:
        """Serve a half on a listener that `bind_listener` returned."""
        acceptor = self._endpoint(half).acceptor
        server = ConversationServer(acceptor, self._settings, half)
        await acceptor.send(RunListener(lambda: listener.serve(server.converse)))

    def _endpoint(self, half: Half) -> HalfEndpoint:
        if half not in self._endpoints:
            raise InvalidUsage(f"this cluster has no {half} half")
        return self._endpoints[half]

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


def _endpoint(
    system: ActorSpawner,
    adapters: Sequence[ActorAddress[Any]],
    settings: Settings,
    converse: ConversationFactory,
    half: Half,
    persist: PersistClient,
) -> HalfEndpoint:
    fence = persist.commanded
    acceptor = system.spawn(
        # Each half has its own acceptor: a client of one half must not displace a client of the
        # other.
        lambda: ConnectionAcceptor(
            adapters, settings, converse, None if fence is None else fence.follow_owner
        ),
        "acceptor" if half == "compute" else "storage-acceptor",
    )
    return HalfEndpoint(acceptor, adapters, converse, half)


def _compute_conversations(
    settings: Settings, partitions: ClusterPartitions
) -> ConversationFactory:
    """Return a function that creates conversations with the compute half."""
    # Shared by all connections, because a configuration outlives the connection that set it.
    limits = ConnectionLimits(settings.result_bytes_max, settings.inline_bytes_max)

    def converse(hello: Hello, instance: CreateInstance | None) -> ClientConversation:
        assert instance is not None, "clients of the compute half send CreateInstance"
        return ComputeConversation(hello, instance, settings.workers, limits, partitions, settings)

    return converse


def _storage_conversations(settings: Settings) -> ConversationFactory:
    """Return a function that creates conversations with the storage half."""
    return lambda hello, _: StorageConversation(hello, settings.workers, settings)


def _remove_caches(state_dir: Path) -> None:
    for cache in ("arrangements", "scratch"):
        # Index partitions and scratch files of an earlier run; none of this state is durable.
        shutil.rmtree(state_dir / cache, ignore_errors=True)
        (state_dir / cache).mkdir(parents=True)
