"""Registrations of replicas in other processes: where a controller finds them.

A replica writes one document, `replica/NAME`, when it listens, and removes it when it stops in
order; NAME is the address of its compute half. That of a killed replica stays, and its controller
goes on trying the address, until the replica is back or its registration is removed
(`remove_registrations`). No clock and no heartbeat decides that a replica is gone: one that cannot
be reached costs a retry, and one that is forgotten by mistake would cost its indexes.

These documents are not fenced: each is written by its own replica alone, and removed by any owner.
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
"""Replicas of one pair of stores."""
_ATTEMPTS_MAX: Final = 5

log = logging.getLogger("penstock.persist")


class ReplicaRegistration(msgspec.Struct, frozen=True):
    """The document of one replica."""

    version: int
    address: str
    storage_address: str
    """Addresses of both halves, as a controller dials them."""
    process: str
    """Unique name of its process: another one is another life of the replica."""
    host: str
    pid: int
    started_ms: int
    """Wall clock; for display only."""


def describe_replica(
    address: str, storage_address: str, process: str, clock: ActorClock
) -> ReplicaRegistration:
    """Return the document of a replica of this process."""
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
    """Write the document, in place of one of an earlier life. Raises `InvalidUsage` when there are
    too many replicas, `StorageError`."""
    key, retry = REGISTRATION_PREFIX + own.address, RetryLoop(settings, failures_max=_ATTEMPTS_MAX)
    others = [each for each in await store.list_keys(REGISTRATION_PREFIX) if each != key]
    if len(others) >= REGISTRATIONS_MAX:
        raise InvalidUsage(
            f"{len(others)} replicas are registered in these stores, and at most"
            f" {REGISTRATIONS_MAX} may be: penstock replicas --drop NAME forgets one that is gone"
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
            error = StorageError(f"another replica registers as {own.address}", determinate=True)
        except StorageError as failure:
            error = failure
        if not await retry.pause():
            raise error


async def is_registered(store: ConsensusStore, own: ReplicaRegistration) -> bool:
    """Return whether the document is still this one. Raises `StorageError`."""
    head = await store.head(REGISTRATION_PREFIX + own.address)
    return head is not None and head.data == msgspec.msgpack.encode(own)


async def watch_registration(
    store: ConsensusStore, own: ReplicaRegistration, settings: Settings
) -> None:
    """Return never. Raises `ResourceClosed` when the document is gone or another's."""
    while True:
        await anyio.sleep(settings.heartbeat_ms / 1000)
        try:
            if await is_registered(store, own):
                continue
        except StorageError as error:
            log.warning("whether %s is still registered is not known: %s", own.address, error)
            continue
        raise ResourceClosed(
            f"the registration of replica {own.address} was removed (penstock replicas --drop), or"
            " another process has registered under that address: start it again if it shall serve"
        )


async def list_registrations(store: ConsensusStore) -> dict[str, ReplicaRegistration]:
    """Return all replicas, by name. Raises `StorageError`, `CorruptData`."""
    found: dict[str, ReplicaRegistration] = {}
    for key in await store.list_keys(REGISTRATION_PREFIX):
        head = await store.head(key)
        # Removed between the listing and the read.
        if head is not None:
            found[key.removeprefix(REGISTRATION_PREFIX)] = _decoded(key, head.data)
    return found


async def remove_registrations(
    store: ConsensusStore, names: Collection[str], process: str | None = None
) -> None:
    """Remove documents; with `process` only those of that one. Raises `StorageError`."""
    for name in names:
        key = REGISTRATION_PREFIX + name
        head = await store.head(key)
        if head is None or (process is not None and _decoded(key, head.data).process != process):
            continue
        # A mismatch: the replica has registered anew meanwhile, and is another life.
        await store.compare_and_set([CompareAndSet(key, head.seqno, None)])


def _decoded(key: str, data: bytes) -> ReplicaRegistration:
    try:
        found = msgspec.msgpack.decode(data, type=ReplicaRegistration)
    except msgspec.DecodeError as error:
        raise CorruptData(f"document {key} cannot be decoded: {error}", determinate=True) from None
    if found.version > VERSION:
        raise StorageError(
            f"document {key} is of version {found.version}, this release knows {VERSION}: use the"
            " newer release in all processes",
            determinate=True,
        )
    return found
