"""The catalog: every table, view, index, source and sink, and the one durable record of them.

Theory of operation. `Catalog` is immutable; a change makes a new one. It is stored whole under
one consensus key, `catalog`, so that one compare-and-set changes it together with the shards
that the change creates or removes: a crash leaves the change done or not done.

Invariants: ids are never used twice; an object's dependencies have smaller ids than its own,
so that id order is an order in which all can be built; names are unique without regard to
case, those of sources and of sinks each among themselves: neither is read. It does not know
uppers and sinces: those are the shards' own.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.controller.names import fold
from actors.errors import (
    Corrupt,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    StateDirectoryError,
    UnknownObject,
)
from actors.plan.delta import AUTO, DeltaPlan
from actors.plan.schema import Schema
from actors.progress import ObjectId, ShardId, Time
from actors.protocol.relations import refuse_relation
from actors.protocol.storage import Configuration

CATALOG_KEY: Final = "catalog"
FORMAT_VERSION: Final = 3
"""3: sources and sinks. What has format 2 has none, and is read as it is."""

TABLE: Final = "table"
VIEW: Final = "view"
INDEX: Final = "index"
SOURCE: Final = "source"
"""Reads outside; `shard` is its remap shard. It fills `SOURCE_TABLE`s, which depend on it."""
SOURCE_TABLE: Final = "source table"
SINK: Final = "sink"
"""Writes what it depends on outside."""
OUTSIDE: Final = frozenset({SOURCE, SOURCE_TABLE, SINK})
"""Kinds that the storage half maintains."""
HIDDEN_SHARD: Final = "-hidden"
"""Stands in the ids of shards of views' hidden states, behind the view's."""
APART: Final = frozenset({SOURCE, SINK})
"""Kinds with names of their own, which cannot be read."""


class CatalogObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object. `shard` is its contents' shard; an index has none of its own.

    `as_of` is the time from which a view has contents (an index: from which it was made).
    """

    id: ObjectId
    name: str
    kind: str
    schema: Schema
    shard: ShardId | None = None
    hidden_shards: tuple[ShardId, ...] = ()
    depends: tuple[ObjectId, ...] = ()
    sql: str = ""
    plan: DeltaPlan | None = None
    fingerprint: str = ""
    compiled_by: str = ""
    """Names the rules that made a view's plan, by their digest."""
    rebuilt_at: Time = 0
    """Tells from where a view whose plan became another one is computed whole: its output's upper
    then."""
    conf: dict[str, str] = {}
    spark_version: str = ""
    key: tuple[str, ...] = ()
    """An index's key columns."""
    retain_history_ms: int | None = None
    target_lag_ms: int = 0
    """Says how old a view may be; 0: it is as fresh as can be."""
    as_of: Time = 0
    configuration: Configuration | None = None
    """Of a source or sink."""
    outside: str = ""
    """Of a source's table: its name there."""

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """All shards that belong to it."""
        own = () if self.shard is None else (self.shard,)
        return own + self.hidden_shards


def _key(kind: str, name: str) -> str:
    """What a name is looked up by: sources and sinks have names of their own."""
    return f"{kind}/{fold(name)}" if kind in APART else fold(name)


class _Format(msgspec.Struct, frozen=True):
    """The part of the document that every version can read."""

    format: int


class _Document(msgspec.Struct, frozen=True):
    format: int
    next_id: int
    objects: tuple[CatalogObject, ...]


class Catalog:
    """All objects at one moment."""

    __slots__ = ("_allowed_lags", "_below", "_by_id", "_by_name", "_indexes", "next_id")

    def __init__(self, objects: tuple[CatalogObject, ...] = (), next_id: int = 1) -> None:
        self.next_id = next_id
        self._below: dict[ObjectId, frozenset[ObjectId | None]] = {}
        self._allowed_lags: dict[ObjectId, int] = {}
        self._by_id = {entry.id: entry for entry in objects}
        self._by_name = {_key(entry.kind, entry.name): entry for entry in objects}
        self._indexes: dict[ObjectId, list[CatalogObject]] = {}
        for entry in objects:
            if entry.kind == INDEX:
                self._indexes.setdefault(entry.depends[0], []).append(entry)

    @property
    def objects(self) -> tuple[CatalogObject, ...]:
        """All objects; what one depends on comes before it."""
        return tuple(self._by_id.values())

    @property
    def new_id(self) -> ObjectId:
        """The id that the next object gets."""
        return f"u{self.next_id}"

    def get(self, id_: ObjectId) -> CatalogObject | None:
        """The object of an id, if it is there."""
        return self._by_id.get(id_)

    def by_id(self, id_: ObjectId) -> CatalogObject:
        """The object of an id that must be there."""
        return self._by_id[id_]

    def find(self, name: str) -> CatalogObject:
        """The object of a name. Raises `UnknownObject`, and `InvalidUsage` for a relation."""
        refuse_relation(name, "the object")
        entry = self._by_name.get(_key("", name))
        if entry is None:
            for kind in APART:
                if _key(kind, name) in self._by_name:
                    raise InvalidUsage(f"{name} is a {kind}: it cannot be read or built upon")
            raise UnknownObject(f"there is no table, view or index named {name!r}")
        return entry

    def find_apart(self, kind: str, name: str) -> CatalogObject:
        """The source or sink of a name. Raises `UnknownObject`."""
        entry = self._by_name.get(_key(kind, name))
        if entry is None:
            raise UnknownObject(f"there is no {kind} named {name!r}")
        return entry

    def check_free(self, name: str, kind: str = "") -> None:
        """Raises `ObjectExists` when the name is taken; `kind` counts for sources and sinks."""
        entry = self._by_name.get(_key(kind, name))
        if entry is not None:
            raise ObjectExists(f"{name!r} is taken by a {entry.kind} ({entry.name})")

    def dependents(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """What stands directly on an object."""
        return tuple(entry for entry in self._by_id.values() if id_ in entry.depends)

    def indexes(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """The indexes on an object."""
        return tuple(self._indexes.get(id_, ()))

    def readable(self) -> dict[str, Schema]:
        """What a view may read: tables, source tables and views, by name."""
        kinds = (TABLE, SOURCE_TABLE, VIEW)
        return {e.name: e.schema for e in self._by_id.values() if e.kind in kinds}

    def of_kind(self, kind: str) -> tuple[CatalogObject, ...]:
        """All objects of a kind, oldest first."""
        return tuple(entry for entry in self._by_id.values() if entry.kind == kind)

    def below(self, id_: ObjectId) -> frozenset[ObjectId | None]:
        """The source tables that an object is, or stands on however far below; None among them:
        it is a table that clients write, or stands on one."""
        known = self._below.get(id_)
        if known is None:
            entry = self._by_id[id_]
            if entry.kind in (TABLE, SOURCE_TABLE):
                known = frozenset({None if entry.kind == TABLE else id_})
            else:
                known = frozenset().union(*(self.below(below) for below in entry.depends))
            self._below[id_] = known
        return known

    def allowed_lag_ms(self, id_: ObjectId) -> int:
        """Return how old an object may be: the most that any view says which it is or stands on."""
        known = self._allowed_lags.get(id_)
        if known is None:
            entry = self._by_id[id_]
            # Each read asks, and views that meet again below would be walked over and over.
            known = max([entry.target_lag_ms, *map(self.allowed_lag_ms, entry.depends)])
            self._allowed_lags[id_] = known
        return known

    def add(self, entry: CatalogObject) -> Catalog:
        """With one more object, whose id is `new_id`. Raises `ObjectExists`."""
        self.check_free(entry.name, entry.kind)
        assert entry.id == self.new_id, (entry.id, self.new_id)
        assert all(id_ in self._by_id for id_ in entry.depends), entry.depends
        return Catalog((*self.objects, entry), self.next_id + 1)

    def remove(self, *entries: CatalogObject) -> Catalog:
        """Without these objects. Raises `ObjectInUse` naming what else stands on one."""
        gone = {entry.id for entry in entries}
        for entry in entries:
            users = [user for user in self.dependents(entry.id) if user.id not in gone]
            if users:
                names = ", ".join(f"{user.kind} {user.name}" for user in users)
                raise ObjectInUse(f"{entry.kind} {entry.name} is used by {names}: drop them first")
        kept = tuple(other for other in self.objects if other.id not in gone)
        return Catalog(kept, self.next_id)

    def encode(self) -> bytes:
        """The durable document."""
        document = _Document(FORMAT_VERSION, self.next_id, self.objects)
        return msgspec.msgpack.encode(document)

    @staticmethod
    def decode(data: bytes) -> Catalog:
        """The catalog in a document. Raises `StateDirectoryError` (another format), `Corrupt`."""
        try:
            found = msgspec.msgpack.decode(data, type=_Format).format
            if found not in (2, FORMAT_VERSION):
                than = "a newer one" if found > FORMAT_VERSION else "another state directory"
                raise StateDirectoryError(
                    f"the catalog has format {found}; this version knows {FORMAT_VERSION}: "
                    f"use the version that wrote it, or {than}"
                )
            document = _decoded(data)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"consensus key {CATALOG_KEY!r}: {error}", determinate=True) from None
        return Catalog(document.objects, document.next_id)


def _decoded(data: bytes) -> _Document:
    """Decode a document; a plan that this version cannot read says nothing but its policy."""
    try:
        return msgspec.msgpack.decode(data, type=_Document)
    except msgspec.ValidationError:
        found = msgspec.msgpack.decode(data)
    for entry in found["objects"]:
        plan = entry.get("plan")
        if plan is None:
            continue
        try:
            msgspec.convert(plan, DeltaPlan)
        except msgspec.ValidationError:
            policy = plan.get("policy", AUTO) if isinstance(plan, dict) else AUTO
            entry |= {"plan": unreadable_plan(policy), "fingerprint": "", "compiled_by": ""}
    return msgspec.convert(found, _Document)


def unreadable_plan(policy: str) -> DeltaPlan:
    """Stand for a plan of another version until its view is compiled anew."""
    return DeltaPlan((), (), Schema(()), "", "opaque", "of another version", policy=policy)
