"""Registrations of replicas in other processes, where a controller finds them.

A replica writes one document, `replica/NAME`, when it starts listening, and removes it when it
stops in an orderly way. NAME is the address of its compute half. The document of a crashed replica
stays, and the controller keeps trying its address until the replica is back or its registration is
removed (`remove_registrations`). Clocks and heartbeats never decide that a replica is gone: an
unreachable replica only costs retries, but forgetting one by mistake would cost its indexes.

These documents are not fenced. Each is written only by its own replica, and any owner may remove
it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection
from typing import Final

import anyio
import msgspec

from actors.durable.persist.location import CompareAndSet, ConsensusStore
from actors.runtime.errors import CorruptData, InvalidUsage, ResourceClosed, StorageError
from actors.runtime.kernel import ActorClock, RetryLoop
from actors.runtime.settings import Settings

REGISTRATION_PREFIX: Final = "replica/"
VERSION: Final = 1
REGISTRATIONS_MAX: Final = 32
"""Maximum number of replicas on one pair of stores."""
_ATTEMPTS_MAX: Final = 5

log = logging.getLogger("penstock.persist")


class ReplicaRegistration(msgspec.Struct, frozen=True):
    """The registration document of one replica."""

    version: int
    address: str
    storage_address: str
    """Addresses of both halves, for a controller to connect to."""
    process: str
    """Unique name of its process. Another name means that the replica was restarted."""
    host: str
    pid: int
    started_ms: int
    """Wall clock at its start; for display only."""


def describe_replica(
    address: str, storage_address: str, process: str, clock: ActorClock
) -> ReplicaRegistration:
    """Return the registration of a replica in this process."""
    return ReplicaRegistration(
        VERSION,
        address,
        storage_address,
        process,
        socket.gethostname(),
        os.getpid(),
        clock.now_ms(),
    )


async def register_replica(
    store: ConsensusStore, own: ReplicaRegistration, settings: Settings
) -> None:
    """Write the registration, replacing one of an earlier run. Raises `InvalidUsage` if there are
    too many replicas, and `StorageError`."""
    key, retry = REGISTRATION_PREFIX + own.address, RetryLoop(settings, failures_max=_ATTEMPTS_MAX)
    others = [each for each in await store.list_keys(REGISTRATION_PREFIX) if each != key]
    if len(others) >= REGISTRATIONS_MAX:
        raise InvalidUsage(
            f"too many replicas in these stores: {len(others)} are registered (limit "
            f"{REGISTRATIONS_MAX}); remove a dead one with penstock replicas --drop NAME"
        )
    data = msgspec.msgpack.encode(own)
    while True:
        try:
            head = await store.head(key)
            # An earlier attempt has landed, and its answer was lost.
            if head is not None and head.data == data:
                return
            cas = CompareAndSet(key, None if head is None else head.seqno, data)
            if await store.compare_and_set([cas]):
                return
            error = StorageError(
                f"another replica is registering as {own.address}", determinate=True
            )
        except StorageError as failure:
            error = failure
        if not await retry.pause():
            raise error


async def is_registered(store: ConsensusStore, own: ReplicaRegistration) -> bool:
    """Return whether the stored document is still this one. Raises `StorageError`."""
    head = await store.head(REGISTRATION_PREFIX + own.address)
    return head is not None and head.data == msgspec.msgpack.encode(own)


async def watch_registration(
    store: ConsensusStore, own: ReplicaRegistration, settings: Settings
) -> None:
    """Never return. Raises `ResourceClosed` when the document is removed or belongs to another
    process."""
    while True:
        await anyio.sleep(settings.heartbeat_ms / 1000)
        try:
            if await is_registered(store, own):
                continue
        except StorageError as error:
            log.warning("cannot determine whether %s is still registered: %s", own.address, error)
            continue
        raise ResourceClosed(
            f"the registration of replica {own.address} was removed (penstock replicas --drop), or "
            "another process registered under this address: restart the replica if it should keep "
            "serving"
        )


async def list_registrations(store: ConsensusStore) -> dict[str, ReplicaRegistration]:
    """Return all registered replicas by name. Raises `StorageError` and `CorruptData`."""
    found: dict[str, ReplicaRegistration] = {}
    for key in await store.list_keys(REGISTRATION_PREFIX):
        head = await store.head(key)
        # It may be removed between the listing and the read.
        if head is not None:
            found[key.removeprefix(REGISTRATION_PREFIX)] = _decoded(key, head.data)
    return found


async def remove_registrations(
    store: ConsensusStore, names: Collection[str], process: str | None = None
) -> None:
    """Remove registrations; with `process`, only those of that process. Raises `StorageError`."""
    for name in names:
        key = REGISTRATION_PREFIX + name
        head = await store.head(key)
        if head is None or (process is not None and _decoded(key, head.data).process != process):
            continue
        # On a mismatch, the replica has registered again, as a new run.
        await store.compare_and_set([CompareAndSet(key, head.seqno, None)])


def _decoded(key: str, data: bytes) -> ReplicaRegistration:
    try:
        found = msgspec.msgpack.decode(data, type=ReplicaRegistration)
    except msgspec.DecodeError as error:
        raise CorruptData(f"cannot decode document {key}: {error}", determinate=True) from None
    if found.version > VERSION:
        raise StorageError(
            f"document {key} has version {found.version}, this release supports up to {VERSION}: "
            "use the newer release in all processes",
            determinate=True,
        )
    return found
