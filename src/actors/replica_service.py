"""A replica in a process of its own: workers, engine, and listeners for a controller.

It opens the stores without taking them over (`replica_fence`), serves both halves of the replica
protocol, and registers its address, by which a controller finds it. A crash of one of its actors
ends the process, for whoever restarts it: the other replicas and the controller see only a lost
connection.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import anyio
from msgspec.structs import replace

from actors.cluster.cluster import WorkerCluster, cast_of
from actors.controller.maintenance import FollowTask
from actors.controller.readiness import ReadinessCheck, look_for_owner
from actors.dataflow.rivals import HydrationLock, ReplicaStandby
from actors.errors import BadSettings, StorageError
from actors.persist import PersistClient
from actors.persist.registrations import (
    describe_replica,
    register_replica,
    remove_registrations,
    watch_registration,
)
from actors.service import Service
from actors.settings import Settings
from actors.transport.address import NetworkAddress as Place
from actors.transport.connection import TransportListener

_WILDCARDS: Final = ("0.0.0.0", "::")
_REMOVAL_SECONDS: Final = 2.0
"""Time for the removal of the registration; what stays is tried in vain, and may be dropped."""


def service_of(settings: Settings, **given: Any) -> Service:
    """Return the service of the role that the settings name; `given` as `Service` takes it."""
    kind = ReplicaService if settings.role == "replica" else Service
    return kind(settings, **given)


def advertised(bound: Place, settings: Settings) -> str:
    """Return the address by which controllers reach a listener. Raises `BadSettings` for one that
    listens everywhere and does not say where it is.

    >>> advertised(Place("10.0.0.2", 6875), Settings())
    '10.0.0.2:6875'
    >>> advertised(Place("0.0.0.0", 6875), Settings(cluster_advertise="b.example"))
    'b.example:6875'
    """
    host = settings.cluster_advertise or bound.host
    if not bound.is_unix and host in _WILDCARDS:
        raise BadSettings(
            f"cluster_listen = {bound}: controllers cannot dial {host}; set cluster_advertise to"
            " the name or address of this machine"
        )
    return str(bound if bound.is_unix else replace(bound, host=host))


def storage_place(settings: Settings) -> Place:
    """Return where the storage half listens: as the settings say, else beside the compute half."""
    if settings.storage_listen:
        return Place.parse(settings.storage_listen, "storage_listen")
    compute = Place.parse(settings.cluster_listen, "cluster_listen")
    if compute.is_unix:
        return replace(compute, path=f"{compute.path}.storage")
    return replace(compute, port=0)


class ReplicaService(Service):
    """One replica; it is used as a `Service` is."""

    @property
    def address(self) -> str:
        """Return the address of the compute half's listener: host:port or unix:/path."""
        return self.cluster_address

    async def _start_role(
        self, stack: AsyncExitStack, persist: PersistClient, scratch: Path
    ) -> None:
        settings, clock = self.settings, self._clock
        fence = persist.commanded
        assert fence is not None, "the settings name the role"
        # Before anything is bound: an address that nobody can dial fails at once.
        advertised(Place.parse(settings.cluster_listen, "cluster_listen"), settings)
        system, executor = await self._run_engine(stack, persist, scratch)
        self._connectors = self._reach_out(system, executor, scratch / "outside")
        place = scratch / "cluster"
        # Rivals are in other processes, where no lock reaches: they race (`dataflow.rivals`).
        rivals = ReplicaStandby("", HydrationLock())
        cluster = self._clusters = await WorkerCluster.start(
            system,
            settings,
            persist,
            executor,
            place,
            cast=cast_of(persist, executor, settings, place, rivals),
            reach=self._reach,
            connectors=self._half(persist),
        )
        compute = self._cluster_listener = await cluster.listen(settings.cluster_listen)
        stack.push_async_callback(compute.aclose)
        storage = await cluster.listen_storage(storage_place(settings))
        stack.push_async_callback(storage.aclose)
        await self._register(stack, persist, compute, storage)
        look = look_for_owner(fence)
        self._readiness = ReadinessCheck(persist, look, executor, clock, settings)
        # First of all when it stops: no set waits for a controller any more.
        stack.callback(fence.leave)

    async def _register(
        self,
        stack: AsyncExitStack,
        persist: PersistClient,
        compute: TransportListener,
        storage: TransportListener,
    ) -> None:
        settings, fence, system = self.settings, persist.commanded, self._system
        assert fence is not None
        assert system is not None
        store = fence.inner
        own = describe_replica(
            advertised(compute.address, settings),
            advertised(storage.address, settings),
            persist.process,
            self._clock,
        )
        await register_replica(store, own, settings)

        async def remove() -> None:
            with (
                anyio.move_on_after(_REMOVAL_SECONDS, shield=True),
                suppress(StorageError),
            ):
                await remove_registrations(store, [own.address], own.process)

        stack.push_async_callback(remove)
        system.spawn(
            lambda: FollowTask(lambda: watch_registration(store, own, settings), self._halt),
            "registration",
        )
