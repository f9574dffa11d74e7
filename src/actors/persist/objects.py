"""Which shards belong to which objects, as far as the catalog's document tells.

The catalog is the controller's; who only looks at shards from outside reads of it what every
format that it knows has: names, kinds, shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.errors import Corrupt, InvalidUsage, UnknownObject
from actors.persist.attach import near
from actors.persist.location import VersionedData
from actors.progress import ShardId

CATALOG: Final = "catalog"
"""The key of its document."""
FORMATS: Final = (2, 3)
_READ: Final = ("table", "source table", "view")
"""Kinds whose shard holds rows that users know."""


class Named(msgspec.Struct, frozen=True):
    """An object of the catalog, and its shards."""

    name: str
    kind: str
    shard: ShardId | None = None
    hidden_shards: tuple[ShardId, ...] = ()


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Document(msgspec.Struct, frozen=True):
    objects: tuple[Named, ...]


def objects_of(head: VersionedData | None) -> tuple[Named, ...]:
    """All objects; none where there is no catalog. Raises `Corrupt`, `InvalidUsage` (a format that
    this version does not know)."""
    if head is None:
        return ()
    try:
        found = msgspec.msgpack.decode(head.data, type=_Format).format
        if found not in FORMATS:
            raise InvalidUsage(
                f"the catalog has format {found}, this version knows {FORMATS[-1]}: name shards"
                " instead of objects, or use the version of the service"
            )
        return msgspec.msgpack.decode(head.data, type=_Document).objects
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the catalog cannot be decoded: {error}", determinate=True) from None


def owners(objects: Sequence[Named]) -> dict[ShardId, str]:
    """Each shard with what it is of: ``view by_carrier``, ``view by_carrier, hidden``."""
    told: dict[ShardId, str] = {}
    for found in objects:
        if found.shard is not None:
            told[found.shard] = f"{found.kind} {found.name}"
        for shard in found.hidden_shards:
            told[shard] = f"{found.kind} {found.name}, hidden"
    return told


def shard_of(objects: Sequence[Named], name: str) -> ShardId:
    """The shard with an object's rows. Names are compared without regard to case, as the catalog
    does. Raises `UnknownObject` naming those with nearly that name, `InvalidUsage`."""
    for found in objects:
        if found.name.lower() == name.lower() and found.kind in _READ and found.shard is not None:
            return found.shard
    for found in objects:
        if found.name.lower() == name.lower():
            raise InvalidUsage(f"{name} is a {found.kind}: it has no rows of its own to read")
    names = [found.name for found in objects if found.kind in _READ]
    raise UnknownObject(
        f"there is no table or view {name!r}; {near(name, names, 'tables and views')}"
    )
