"""Maps objects to shards, using the catalog's document.

The catalog belongs to the controller. Other processes read only what all its known formats have in
common: names, kinds and shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from actors.durable.persist.attach import suggest_names
from actors.durable.persist.location import VersionedData
from actors.runtime.errors import CorruptData, InvalidUsage, UnknownObject
from actors.runtime.progress import ShardId

CATALOG: Final = "catalog"
"""Consensus key of the catalog."""
FORMATS: Final = (2, 3)
_READ: Final = ("table", "source table", "view")
"""Kinds of objects whose shard contains rows of a user's schema."""


class NamedShards(msgspec.Struct, frozen=True):
    """An object of the catalog, and its shards."""

    name: str
    kind: str
    shard: ShardId | None = None
    hidden_shards: tuple[ShardId, ...] = ()


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Document(msgspec.Struct, frozen=True):
    objects: tuple[NamedShards, ...]


def objects_of(head: VersionedData | None) -> tuple[NamedShards, ...]:
    """Return all objects; none without a catalog. Raises `CorruptData`, and `InvalidUsage` for an
    unknown format."""
    if head is None:
        return ()
    try:
        found = msgspec.msgpack.decode(head.data, type=_Format).format
        if found not in FORMATS:
            raise InvalidUsage(
                f"the catalog has format {found}, this version supports up to {FORMATS[-1]}: name "
                "shards instead of objects, or use the version of the service"
            )
        return msgspec.msgpack.decode(head.data, type=_Document).objects
    except msgspec.MsgspecError as error:
        raise CorruptData(f"cannot decode the catalog: {error}", determinate=True) from None


def owners(objects: Sequence[NamedShards]) -> dict[ShardId, str]:
    """Map each shard to a description of its owner, such as ``view by_carrier`` or ``view
    by_carrier, hidden``."""
    owned_by: dict[ShardId, str] = {}
    for found in objects:
        if found.shard is not None:
            owned_by[found.shard] = f"{found.kind} {found.name}"
        for shard in found.hidden_shards:
            owned_by[shard] = f"{found.kind} {found.name}, hidden"
    return owned_by


def shard_of(objects: Sequence[NamedShards], name: str) -> ShardId:
    """Return the shard with an object's rows. Names are case-insensitive, as in the catalog.

    Raises `UnknownObject` with similar names, and `InvalidUsage` for an object without rows.
    """
    for found in objects:
        if found.name.lower() == name.lower() and found.kind in _READ and found.shard is not None:
            return found.shard
    for found in objects:
        if found.name.lower() == name.lower():
            raise InvalidUsage(f"{name} is a {found.kind}, which has no rows of its own")
    names = [found.name for found in objects if found.kind in _READ]
    raise UnknownObject(
        f"table or view {name!r} does not exist; {suggest_names(name, names, 'tables and views')}"
    )
