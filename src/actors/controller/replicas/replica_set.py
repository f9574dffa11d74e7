"""The names of the replicas, as last commanded or configured: one durable document.

The setting `replicas` gives the initial number: r1, r2, …. Names that are added or dropped at run
time are kept under the consensus key `replicas`, with the setting as it was. If the service starts
with another setting than the document's, the setting counts and the names are forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from actors.errors import CorruptData, StateDirectoryError, StorageError
from actors.persist import CompareAndSet, PersistClient
from actors.settings import Settings

log = logging.getLogger("penstock.controller")

REPLICAS_KEY: Final = "replicas"
FORMAT_VERSION: Final = 1
ATTEMPTS_MAX: Final = 5


class _Format(msgspec.Struct, frozen=True):
    """The part of the document that every version can read."""

    format: int


class ReplicaSet(msgspec.Struct, frozen=True):
    """The durable document."""

    format: int
    setting: int
    """Value of `replicas` when it was written."""
    names: tuple[str, ...]


def encode(setting: int, names: Sequence[str]) -> bytes:
    """Return the durable document."""
    return msgspec.msgpack.encode(ReplicaSet(FORMAT_VERSION, setting, tuple(names)))


def decode(data: bytes) -> ReplicaSet:
    """Return the decoded document. Raises `StateDirectoryError` (another format), `CorruptData`."""
    try:
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found != FORMAT_VERSION:
            raise StateDirectoryError(
                f"the document of replicas has format {found}; this version knows "
                f"{FORMAT_VERSION}: use the version that wrote it, or another state directory"
            )
        return msgspec.msgpack.decode(data, type=ReplicaSet)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"consensus key {REPLICAS_KEY!r}: {error}", determinate=True) from None


def names_of(found: ReplicaSet | None, setting: int) -> tuple[str, ...]:
    """Return the replicas to start with. Pure."""
    if found is None or found.setting != setting or not found.names:
        return tuple(f"r{number}" for number in range(1, setting + 1))
    return found.names


async def load(persist: PersistClient, settings: Settings) -> tuple[str, ...]:
    """Return the replicas to start with, by the durable document. Raises `StateDirectoryError`,
    `StorageError`."""
    head = await persist.head(REPLICAS_KEY)
    found = None if head is None else decode(head.data)
    names = names_of(found, settings.replicas)
    if found is not None and found.names != names:
        log.info(
            "the setting replicas was %d and is %d: it counts, and replicas %s are forgotten",
            found.setting,
            settings.replicas,
            ", ".join(found.names),
        )
    return names


async def store_names(persist: PersistClient, settings: Settings, names: Sequence[str]) -> None:
    """Make the names durable. Raises `StorageError`, which is indeterminate if they may be
    durable."""
    data, unknown = encode(settings.replicas, names), False
    # Retry here is safe: a state directory has one process, and it makes one change at a time, so
    # no other writer's document is overwritten.
    for failures in range(1, ATTEMPTS_MAX + 1):
        try:
            head = await persist.head(REPLICAS_KEY)
            # An earlier attempt was carried out, though its answer was lost.
            if head is not None and head.data == data:
                return
            cas = CompareAndSet(REPLICAS_KEY, None if head is None else head.seqno, data)
            if await persist.compare_and_set([cas]):
                return
        except StorageError as error:
            if error.determinate and not unknown:
                raise
            unknown = True
        await anyio.sleep(settings.retry_delay_ms(failures) / 1000)
    raise StorageError(
        f"whether the replicas are {', '.join(names)} from the next start on is not known: the "
        "store does not say; look with `penstock replicas`, and try again",
        determinate=False,
    )
