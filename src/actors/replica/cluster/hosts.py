"""Several replicas in one process: whole clusters, each below an actor of its own.

A *host* is the actor at the top of one replica; workers, adapters and acceptors are its children. A
crash that their restart policies do not handle crashes the host, which stops the whole replica and
restarts it after a delay. Other replicas and the controller only see a lost connection. Replicas
share the stores and the engine of the process. Each has its own actors, scratch folder,
arrangements, and names of jobs and plans.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import ExecutorMessage
from actors.model.protocol.internal import Half
from actors.replica.cluster.client import LocalClient
from actors.replica.cluster.cluster import ClusterStatistics, WorkerCluster, actor_factory
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import Actor, ActorAddress, ActorContext, ActorSystem, ReplySlot
from actors.runtime.kernel.actor import restart
from actors.runtime.settings import Settings

RESTART: Final = restart(restarts_max=10, within_ms=60_000, delay_ms=100)
"""The delays of ten crashes add up to more than a minute, so the limit is never reached."""

Reach: TypeAlias = Callable[[ActorAddress[Any]], ActorAddress[Any]]


class InspectReplica(msgspec.Struct, frozen=True, gc=False):
    """Asks a host for its replica's statistics."""

    reply: ReplySlot[ClusterStatistics]


class ReplicaHost(Actor[InspectReplica]):
    """Top actor of one replica. `start` builds the cluster below it."""

    def __init__(
        self, start: Callable[[ActorContext[InspectReplica]], Awaitable[WorkerCluster]]
    ) -> None:
        self._start = start
        self._cluster: WorkerCluster | None = None
        """The cluster, once `on_start` has built it."""

    async def on_start(self) -> None:
        self._cluster = await self._start(self.ctx)

    def receive(self, message: InspectReplica) -> None:
        cluster, reply = self._cluster, message.reply
        assert cluster is not None, "on_start builds the cluster"

        def failed(error: Exception) -> None:
            reply.fail(ConnectionBroken(f"part of the replica failed: {error}"))

        # Run this in an effect: the host must not wait for a part whose crash it has to handle.
        self.ctx.effect(cluster.statistics, done=reply.set, failed=failed)


class LocalReplicas:
    """The replicas of this process, by name. A `ReplicaSupply` for the controller."""

    def __init__(
        self,
        system: ActorSystem,
        settings: Settings,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
        reach: Reach = lambda adapter: adapter,
        connectors: StorageConnectors | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._system = system
        self._settings = settings
        self._persist = persist
        self._executor = executor
        self._scratch = scratch
        self._reach = reach
        self._connectors = connectors
        self._hosts: dict[str, ActorAddress[InspectReplica]] = {}
        """Host of each replica."""
        self._clusters: dict[str, WorkerCluster] = {}
        """Current cluster of each replica, once it has been built."""
        self._lives = 0
        """Number of clusters started so far; it numbers the next one."""
        for name in names or [f"r{number}" for number in range(1, settings.replicas + 1)]:
            self._spawn(name)

    def _spawn(self, name: str) -> None:
        place, clock = self._scratch / name, self._system.clock

        async def start(ctx: ActorContext[InspectReplica]) -> WorkerCluster:
            self._lives = life = self._lives + 1
            # Each incarnation has a new folder and name: a thread of an earlier one may still be
            # writing, and its parts in the stash may still be read.
            await clock.run_blocking(lambda: shutil.rmtree(place, ignore_errors=True))
            folder = place / str(life)
            below = actor_factory(self._persist, self._executor, self._settings, folder, name)
            self._clusters[name] = cluster = await WorkerCluster.start(
                ctx,
                self._settings,
                self._persist,
                self._executor,
                folder,
                factory=below,
                reach=self._reach,
                replica=name,
                life=life,
                connectors=self._connectors,
            )
            return cluster

        self._hosts[name] = self._system.spawn(lambda: ReplicaHost(start), name, policy=RESTART)

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all running replicas."""
        return list(self._hosts)

    @property
    def partitions(self) -> list[ClusterPartitions]:
        """Return each replica's registry of index partitions."""
        return [cluster.partitions for cluster in self._clusters.values()]

    async def connect(self, name: str, half: Half = "compute") -> LocalClient:
        """Return a client of one half of a replica.

        Raise `ConnectionBroken` if the replica was never built. A replica that is being rebuilt
        raises it at the client's first commands.
        """
        cluster = self._clusters.get(name)
        if cluster is None:
            raise ConnectionBroken(f"replica {name} is not running")
        return await cluster.connect(half)

    @property
    def stores(self) -> bool:
        """Return whether the replicas have storage halves."""
        return self._connectors is not None

    async def start(self, name: str) -> None:
        """Start another replica. Raises nothing: failures are retried."""
        self._spawn(name)

    async def stop(self, name: str) -> None:
        """Stop a replica and remove its scratch folder."""
        host = self._hosts.pop(name)
        await self._system.stop_root(host)
        self._clusters.pop(name, None)
        folder = self._scratch / name
        await self._system.clock.run_blocking(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def statistics(self) -> ClusterStatistics:
        """Return the combined statistics of all replicas, without those being rebuilt."""
        workers: list[Any] = []
        adapters: list[Any] = []
        for name, host in list(self._hosts.items()):
            try:
                found = await host.ask(InspectReplica)
            except (ConnectionBroken, ResourceClosed):
                continue
            workers += (msgspec.structs.replace(each, replica=name) for each in found.workers)
            adapters += found.adapters
        return ClusterStatistics(tuple(workers), tuple(adapters))
