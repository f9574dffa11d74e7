"""Replicas in separate processes, which register themselves in the stores.

They may come and go: the registrations are read every `heartbeat_ms`. Sources and sinks run on one
of them until it cannot be reached. The storage halves of the others are told to run nothing, over a
connection that lasts as long as the one to their compute half.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from actors.control.controller.replicas.replica import Connect, ReplicaClient
from actors.durable.persist import PersistClient
from actors.durable.persist.registrations import (
    ReplicaRegistration,
    list_registrations,
    remove_registrations,
)
from actors.model.protocol.compute import Hello, InitializationComplete
from actors.replica.cluster.checked import CheckedClient
from actors.replica.cluster.client import ClusterClient, connect
from actors.replica.cluster.cluster import ClusterStatistics
from actors.runtime.errors import ConnectionBroken, InvalidUsage, PenstockError, StorageError
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.controller")


class PairedClient(CheckedClient):
    """A connection to a replica's compute half, and one to its storage half. When the first ends,
    so does the second."""

    def __init__(
        self, inner: ClusterClient, settings: Settings, beside: ReplicaClient | None
    ) -> None:
        super().__init__(inner, settings)
        self._beside = beside

    async def close(self) -> None:
        """Close both connections."""
        await super().close()
        if self._beside is not None:
            await self._beside.close()


class RegisteredReplicas:
    """A `ReplicaSupply` of the replicas that have registered in the stores owned by `persist`."""

    def __init__(self, persist: PersistClient, settings: Settings) -> None:
        self._persist = persist
        self._settings = settings
        self._found: dict[str, ReplicaRegistration] = {}
        """Registered replicas by name, as last read."""
        self._some = anyio.Event()
        """Set once a replica has registered."""
        self._storage_at = ""
        """Name of the replica that runs sources and sinks."""

    @property
    def names(self) -> Sequence[str]:
        """Return no names: all replicas are found later."""
        return []

    @property
    def owner(self) -> str:
        """Return the name by which this process owns the stores."""
        return self._persist.owner

    @property
    def arrivals(self) -> Callable[[], Awaitable[Mapping[str, str]]]:
        """Return a function that waits until the registrations have changed."""
        return self._changed

    async def _changed(self) -> Mapping[str, str]:
        while True:
            try:
                found = await list_registrations(self._persist.consensus)
            except StorageError as error:
                log.warning("cannot read the registrations of replicas: %s", error)
                found = self._found
            if found != self._found:
                self._found = found
                if self._storage_at not in found:
                    self._storage_at = min(found, default="")
                if found:
                    self._some.set()
                return {name: each.process for name, each in found.items()}
            await anyio.sleep(self._settings.heartbeat_ms / 1000)

    async def connect(self, name: str) -> ReplicaClient:
        """Return a connection to the replica's compute half. Raises as `cluster.client.connect`
        does."""
        found = self._found.get(name)
        if found is None:
            raise ConnectionBroken(f"replica {name} is no longer registered")
        beside = None if name == self._storage_at else await self._connect_idle_storage(found)
        try:
            wire = await connect(found.address, self._settings)
        except BaseException:
            if beside is not None:
                await beside.close()
            raise
        return PairedClient(wire, self._settings, beside)

    async def _connect_idle_storage(self, found: ReplicaRegistration) -> ReplicaClient:
        """Return a connection to a storage half, after telling it to run nothing."""
        # It may still run what a former controller gave it, or what it ran before another replica
        # took over.
        client = await self._to_storage(found)
        try:
            await client.send(Hello(secrets.token_hex(16), self.owner))
            await client.send(InitializationComplete())
        except BaseException:
            await client.close()
            raise
        return client

    async def _to_storage(self, found: ReplicaRegistration) -> ReplicaClient:
        wire = await connect(found.storage_address, self._settings, "storage")
        return CheckedClient(wire, self._settings, "storage")

    @property
    def storage(self) -> Connect:
        """Return a function that connects to the storage half of one registered replica."""
        return self._connect_storage

    async def _connect_storage(self) -> ReplicaClient:
        while not self._found:
            self._some = anyio.Event()
            await self._some.wait()
        name = self._storage_at
        try:
            return await self._to_storage(self._found[name])
        except PenstockError:
            # The next attempt goes to the next replica, round robin.
            names = sorted(self._found)
            if name == self._storage_at and names:
                self._storage_at = next((each for each in names if each > name), names[0])
            raise

    async def start(self, name: str) -> None:
        """Raise `InvalidUsage`: replicas of this kind start on their own."""
        raise InvalidUsage(
            f"cannot start replica {name} here: run penstock serve --role replica on these stores, "
            "and the service will find it"
        )

    async def stop(self, name: str) -> None:
        """Do nothing: the replica ends on its own once it finds its registration gone."""

    async def store_names(self, names: Sequence[str]) -> None:
        """Remove the registrations of all other replicas."""
        gone = [name for name in self._found if name not in names]
        await remove_registrations(self._persist.consensus, gone)

    async def statistics(self) -> ClusterStatistics | None:
        """Return None: the replicas cannot be reached for statistics."""
        return None
