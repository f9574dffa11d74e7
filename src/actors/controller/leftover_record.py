"""The durable record of what a dropped source has left outside; see `leftovers`."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.controller.catalog import CatalogObject
from actors.errors import Corrupt
from actors.persist import Cas, PersistClient
from actors.progress import ObjectId
from actors.protocol.storage import Configuration

PREFIX: Final = "leftover/"


class Leftover(msgspec.Struct, frozen=True):
    """A source that was dropped, and what is kept for it outside."""

    id: ObjectId
    name: str
    configuration: Configuration
    kept: str
    """What the outside calls it."""

    @property
    def key(self) -> str:
        """Where it is remembered."""
        return PREFIX + self.id


def leftover_of(entry: CatalogObject, kept: str) -> Leftover:
    """Of a source that is being dropped."""
    assert entry.configuration is not None, entry.name
    return Leftover(entry.id, entry.name, entry.configuration, kept)


def remembered(leftover: Leftover) -> Cas:
    """What a drop sets besides the catalog. Ids are never used twice: the key is a new one."""
    return Cas(leftover.key, None, msgspec.msgpack.encode(leftover))


async def load(persist: PersistClient) -> tuple[Leftover, ...]:
    """Those that are there. Raises `StorageError`, `Corrupt`."""
    found = []
    for key in await persist.list_keys(PREFIX):
        head = await persist.head(key)
        if head is None:
            continue
        try:
            found.append(msgspec.msgpack.decode(head.data, type=Leftover))
        except msgspec.MsgspecError as error:
            raise Corrupt(f"consensus key {key!r}: {error}", determinate=True) from None
    return tuple(found)


async def unremember(persist: PersistClient, leftover: Leftover) -> None:
    """It is gone, or given up. Raises `StorageError`."""
    head = await persist.head(leftover.key)
    while head is not None:
        if await persist.compare_and_set([Cas(leftover.key, head.seqno, None)]):
            return
        head = await persist.head(leftover.key)
