"""Replicas in processes of their own, as they have registered in the stores.

They come and go by themselves: the registrations are read every `heartbeat_ms`. Sources and sinks
run on one of them, until that cannot be reached; the storage halves of the others are told to run
nothing, by a connection that is held as long as the one to their compute half.
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
    """A connection to a compute half, with one to the storage half beside it that ends with it."""

    def __init__(
        self, inner: ClusterClient, settings: Settings, beside: ReplicaClient | None
    ) -> None:
        super().__init__(inner, settings)
        self._beside = beside

    async def close(self) -> None:
        """See `ClusterClient`."""
        await super().close()
        if self._beside is not None:
            await self._beside.close()


class RegisteredReplicas:
    """A `ReplicaSupply` of the replicas that have registered in the stores which `persist` owns."""

    def __init__(self, persist: PersistClient, settings: Settings) -> None:
        self._persist = persist
        self._settings = settings
        self._found: dict[str, ReplicaRegistration] = {}
        self._some = anyio.Event()
        """Set when a replica has registered."""
        self._storage_at = ""
        """Name of the replica that runs sources and sinks."""

    @property
    def names(self) -> Sequence[str]:
        """See `ReplicaSupply`: none is there from the start, all are found."""
        return []

    @property
    def owner(self) -> str:
        """See `ReplicaSupply`."""
        return self._persist.owner

    @property
    def arrivals(self) -> Callable[[], Awaitable[Mapping[str, str]]]:
        """See `ReplicaSupply`."""
        return self._changed

    async def _changed(self) -> Mapping[str, str]:
        while True:
            try:
                found = await list_registrations(self._persist.consensus)
            except StorageError as error:
                log.warning("replicas that come or go are not seen yet: %s", error)
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
        """See `ReplicaSupply`. Raises as `cluster.client.connect`."""
        found = self._found.get(name)
        if found is None:
            raise ConnectionBroken(f"replica {name} is not registered any more")
        beside = None if name == self._storage_at else await self._connect_idle_storage(found)
        try:
            wire = await connect(found.address, self._settings)
        except BaseException:
            if beside is not None:
                await beside.close()
            raise
        return PairedClient(wire, self._settings, beside)

    async def _connect_idle_storage(self, found: ReplicaRegistration) -> ReplicaClient:
        """Return a connection to a storage half that shall run nothing, and was told so."""
        # It may run what it was given before: by a former controller, or before another replica
        # was given it.
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
        """See `ReplicaSupply`."""
        return self._connect_storage

    async def _connect_storage(self) -> ReplicaClient:
        while not self._found:
            self._some = anyio.Event()
            await self._some.wait()
        name = self._storage_at
        try:
            return await self._to_storage(self._found[name])
        except PenstockError:
            # The next attempt is made at the next one, in a circle.
            names = sorted(self._found)
            if name == self._storage_at and names:
                self._storage_at = next((each for each in names if each > name), names[0])
            raise

    async def start(self, name: str) -> None:
        """See `ReplicaSupply`."""
        raise InvalidUsage(
            f"replica {name} cannot be started from here: run penstock serve --role replica on "
            "these stores, and it is found"
        )

    async def stop(self, name: str) -> None:
        """See `ReplicaSupply`: it ends by itself once it finds its registration gone."""

    async def store_names(self, names: Sequence[str]) -> None:
        """See `ReplicaSupply`: removes the registrations of all others."""
        gone = [name for name in self._found if name not in names]
        await remove_registrations(self._persist.consensus, gone)

    async def statistics(self) -> ClusterStatistics | None:
        """See `ReplicaSupply`: they cannot be reached."""
        return None
