"""The catalog: all tables, views, indexes, sources and sinks, and their durable record.

`CatalogSnapshot` is immutable: a change makes a new one. The catalog is stored in full under one
consensus key, so that one compare-and-set changes it together with the shards that are created or
removed.

Ids are never reused. Objects are ordered so that each comes after its dependencies, and can be
built in that order. Names are unique regardless of case; sources and sinks, which cannot be read,
each have a separate namespace. Uppers and sinces are not in the catalog but in the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from actors.engine.views.plain_views import define_views, find_relations
from actors.model.plan.column_defaults import ColumnDefault
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import fold, is_subscribed_view, refuse_relation
from actors.model.protocol.storage import ConnectorConfiguration
from actors.runtime.errors import (
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    UnknownObject,
)
from actors.runtime.progress import ObjectId, ShardId, Time

CATALOG_KEY: Final = "catalog"
FORMAT_VERSION: Final = 3
"""Format 3 added sources and sinks; a document of format 2 has none and decodes unchanged."""

TABLE: Final = "table"
VIEW: Final = "view"
PLAIN_VIEW: Final = "plain view"
"""A view that is inlined into the queries that name it; it has no contents of its own."""
INDEX: Final = "index"
SOURCE: Final = "source"
"""Reads an external system. `shard` is its remap shard; its `SOURCE_TABLE`s depend on it."""
SOURCE_TABLE: Final = "source table"
SINK: Final = "sink"
"""Writes the object that it depends on to an external system."""
CONNECTOR_KINDS: Final = frozenset({SOURCE, SOURCE_TABLE, SINK})
"""Kinds that the storage half maintains."""
HIDDEN_SHARD: Final = "-hidden"
"""Separates a view's id from the number in the ids of its hidden shards."""
OWN_NAMESPACE_KINDS: Final = frozenset({SOURCE, SINK})
"""Kinds that cannot be read; each has its own namespace."""


class CatalogObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object. `shard` holds its contents; an index has none.

    `as_of` is the time from which a view has contents, or at which an index was created.
    """

    id: ObjectId
    name: str
    kind: str
    schema: TableSchema
    shard: ShardId | None = None
    hidden_shards: tuple[ShardId, ...] = ()
    depends: tuple[ObjectId, ...] = ()
    sql: str = ""
    plan: DeltaPlan | None = None
    fingerprint: str = ""
    compiled_by: str = ""
    """Digest of the rules that compiled a view's plan."""
    rebuilt_at: Time = 0
    """Upper of a view's output when its plan was replaced: the view is recomputed in full from
    there."""
    conf: dict[str, str] = {}
    spark_version: str = ""
    key: tuple[str, ...] = ()
    """Key columns of an index."""
    retain_history_ms: int | None = None
    target_lag_ms: int = 0
    """How stale a view may be (ms); 0 means as fresh as possible."""
    as_of: Time = 0
    configuration: ConnectorConfiguration | None = None
    """Configuration of a source or sink."""
    outside: str = ""
    """External name of a source's table."""
    comment: str = ""
    column_comments: dict[str, str] = {}
    text: str = ""
    """A view's query as written; empty if it equals `sql`, in which plain views are inlined."""
    dataflow: ObjectId = ""
    """Id of the dataflow that maintains it; empty if it equals the object's id. A dataflow that
    replaces another gets a new id, since ids are never reused."""
    taken_shard: ShardId | None = None
    """Shard whose contents the output takes over at `rebuilt_at`."""
    replaces: ObjectId = ""
    """Id of the view that this one will replace once it is computed; until then nobody can read
    it."""
    column_defaults: dict[str, ColumnDefault] = {}
    """Defaults of a table's columns, by column name."""

    @property
    def dataflow_id(self) -> ObjectId:
        """Return the id of the dataflow that maintains the object."""
        return self.dataflow or self.id

    @property
    def written(self) -> str:
        """Return a view's query as it was written."""
        return self.text or self.sql

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """Return all shards that belong to the object."""
        own = tuple(each for each in (self.shard, self.taken_shard) if each is not None)
        return own + self.hidden_shards


def _key(kind: str, name: str) -> str:
    """Return the lookup key of a name. Sources and sinks each have a separate namespace."""
    return f"{kind}/{fold(name)}" if kind in OWN_NAMESPACE_KINDS else fold(name)


class Quarantine(msgspec.Struct, frozen=True):
    """The reason why this release does not run an object."""

    reason: str
    original: bytes = b""
    """Stored form of an object that this release cannot read. It is written back unchanged, for a
    release that can. Empty if the object can be read."""


NO_QUARANTINE: Final[Mapping[ObjectId, Quarantine]] = MappingProxyType({})


class CatalogSnapshot:
    """An immutable set of objects."""

    __slots__ = (
        "_allowed_lags",
        "_below",
        "_by_dataflow",
        "_by_id",
        "_by_name",
        "_indexes",
        "next_id",
        "quarantined",
    )

    def __init__(
        self,
        objects: tuple[CatalogObject, ...] = (),
        next_id: int = 1,
        quarantined: Mapping[ObjectId, Quarantine] = NO_QUARANTINE,
    ) -> None:
        self.next_id = next_id
        self.quarantined = quarantined
        self._below: dict[ObjectId, frozenset[ObjectId | None]] = {}
        """Cache of `below`, by object."""
        self._allowed_lags: dict[ObjectId, int] = {}
        """Cache of `allowed_lag_ms`, by object."""
        self._by_id = {entry.id: entry for entry in objects}
        self._by_dataflow = {entry.dataflow_id: entry for entry in objects}
        self._by_name = {_key(entry.kind, entry.name): entry for entry in objects}
        self._indexes: dict[ObjectId, list[CatalogObject]] = {}
        """Indexes by the object they are on."""
        for entry in objects:
            if entry.kind == INDEX:
                for id_ in entry.depends:
                    self._indexes.setdefault(id_, []).append(entry)

    @property
    def objects(self) -> tuple[CatalogObject, ...]:
        """Return all objects, dependencies first."""
        return tuple(self._by_id.values())

    def of_dataflow(self, dataflow: ObjectId) -> CatalogObject | None:
        """Return the object that a dataflow maintains, or None."""
        return self._by_dataflow.get(dataflow)

    @property
    def new_id(self) -> ObjectId:
        """Return the id that the next object will get."""
        return f"u{self.next_id}"

    def get(self, id_: ObjectId) -> CatalogObject | None:
        """Return the object with this id, or None."""
        return self._by_id.get(id_)

    def by_id(self, id_: ObjectId) -> CatalogObject:
        """Return the object with this id. It must exist."""
        return self._by_id[id_]

    def names(self, ids: Sequence[ObjectId]) -> str:
        """Return the names of objects as a comma-separated list."""
        return ", ".join(self._by_id[id_].name for id_ in ids)

    def find(self, name: str, *, quarantined: bool = False) -> CatalogObject:
        """Return the table, view or index with this name. Raises `UnknownObject`; `InvalidUsage`
        for a system relation, and for a quarantined object unless `quarantined` is set."""
        refuse_relation(name, "the object")
        entry = self._by_name.get(_key("", name))
        if entry is not None and not quarantined:
            self.check_usable(entry)
        if entry is None:
            for kind in OWN_NAMESPACE_KINDS:
                if _key(kind, name) in self._by_name:
                    raise InvalidUsage(f"cannot read from {name}: it is a {kind}")
            raise UnknownObject(f"there is no table, view or index named {name!r}")
        return entry

    def check_usable(self, entry: CatalogObject) -> None:
        """Raise `InvalidUsage` if the object is quarantined."""
        found = self.quarantined.get(entry.id)
        if found is not None:
            raise InvalidUsage(
                f"{entry.kind} {entry.name} is quarantined: {found.reason}; drop or replace it"
            )

    def has(self, name: str) -> bool:
        """Return whether a table, view or index has this name."""
        return _key("", name) in self._by_name

    def find_stored(self, name: str, purpose: str) -> CatalogObject:
        """Return the object with this name, which must have contents or be an index. Raises as
        `find` does, and `InvalidUsage` for a plain view, with `purpose` as the start of the
        text."""
        entry = self.find(name)
        if entry.kind == PLAIN_VIEW:
            raise InvalidUsage(
                f"{purpose}: {entry.name} is a plain view, which stores no contents: query it with "
                f"SELECT, or create a materialized view"
            )
        return entry

    def find_connector(self, kind: str, name: str, *, quarantined: bool = False) -> CatalogObject:
        """Return the source or sink with this name. Raises `UnknownObject`, and `InvalidUsage` as
        `find` does."""
        entry = self._by_name.get(_key(kind, name))
        if entry is None:
            raise UnknownObject(f"there is no {kind} named {name!r}")
        if not quarantined:
            self.check_usable(entry)
        return entry

    def check_free(self, name: str, kind: str = "") -> None:
        """Raise `ObjectExists` if the name is taken in the namespace of `kind`."""
        entry = self._by_name.get(_key(kind, name))
        if entry is not None:
            raise ObjectExists(f"{name!r} already exists: it is a {entry.kind} ({entry.name})")

    def dependents(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """Return the objects that depend directly on this one."""
        return tuple(entry for entry in self._by_id.values() if id_ in entry.depends)

    def dependents_below(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """Return all direct and indirect dependents of this object, nearest first."""
        found: dict[ObjectId, CatalogObject] = {}
        seek = [id_]
        while seek:
            for user in self.dependents(seek.pop(0)):
                if user.id not in found:
                    found[user.id] = user
                    seek.append(user.id)
        return tuple(found.values())

    def dropped_with(self, entry: CatalogObject) -> tuple[CatalogObject, ...]:
        """Return what dropping this object with CASCADE also drops: all its dependents, and the
        views being computed to replace any of them."""
        found = {each.id: each for each in self.dependents_below(entry.id)}
        for each in (entry, *found.values()):
            coming = self.replacement(each.id)
            if coming is not None:
                found = {**found, coming.id: coming}
        return tuple(found.values())

    def replacement(self, id_: ObjectId) -> CatalogObject | None:
        """Return the view that is being computed to replace this one, or None."""
        return next((entry for entry in self._by_id.values() if entry.replaces == id_), None)

    def subscribed_on(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """Return the views of subscribes that depend directly on this object: they are dropped with
        it."""
        return tuple(each for each in self.dependents(id_) if is_subscribed_view(each.name))

    def indexes(self, id_: ObjectId) -> tuple[CatalogObject, ...]:
        """Return the indexes on an object."""
        return tuple(self._indexes.get(id_, ()))

    def readable(self) -> dict[str, TableSchema]:
        """Return the schemas of everything that a view may read (tables, source tables, views), by
        name."""
        kinds = (TABLE, SOURCE_TABLE, VIEW)
        found = self._by_id.values()
        return {e.name: e.schema for e in found if e.kind in kinds and not e.replaces}

    def readable_by(self, plan: DeltaPlan | None) -> dict[str, TableSchema]:
        """Return the schemas of `readable`, without the columns added to the inputs since `plan`
        was compiled, so that ``*`` keeps its meaning."""
        return {name: columns_read(plan, name, each) for name, each in self.readable().items()}

    def of_kind(self, kind: str) -> tuple[CatalogObject, ...]:
        """Return all objects of a kind, oldest first."""
        return tuple(entry for entry in self._by_id.values() if entry.kind == kind)

    def below(self, id_: ObjectId) -> frozenset[ObjectId | None]:
        """Return the source tables that an object is or depends on, directly or not. None in the
        result stands for the tables that clients write."""
        known = self._below.get(id_)
        if known is None:
            entry = self._by_id[id_]
            if entry.kind in (TABLE, SOURCE_TABLE):
                known = frozenset({None if entry.kind == TABLE else id_})
            else:
                known = frozenset().union(*(self.below(below) for below in entry.depends))
            # Cached forever: a snapshot never changes.
            self._below[id_] = known
        return known

    def allowed_lag_ms(self, id_: ObjectId) -> int:
        """Return the greatest target lag of the object and everything that it depends on."""
        known = self._allowed_lags.get(id_)
        if known is None:
            entry = self._by_id[id_]
            # Cached: each read asks for it, and a diamond of views would be walked many times.
            known = max([entry.target_lag_ms, *map(self.allowed_lag_ms, entry.depends)])
            self._allowed_lags[id_] = known
        return known

    def add(self, entry: CatalogObject) -> CatalogSnapshot:
        """Return a catalog with one more object, whose id is `new_id`. Raises `ObjectExists`, and
        `InvalidUsage` if the object depends on the view of a subscribe."""
        self.check_free(entry.name, entry.kind)
        assert entry.id == self.new_id, (entry.id, self.new_id)
        assert all(id_ in self._by_id for id_ in entry.depends), entry.depends
        for id_ in entry.depends:
            # Such a view is dropped when its subscribe ends, so nothing may depend on it.
            if is_subscribed_view(self._by_id[id_].name):
                raise InvalidUsage("nothing may depend on the view of a subscribe")
        return CatalogSnapshot((*self.objects, entry), self.next_id + 1, self.quarantined)

    def remove(self, *entries: CatalogObject) -> CatalogSnapshot:
        """Return a catalog without these objects. Raises `ObjectInUse`, which names the dependents,
        if others depend on them or one is being replaced."""
        gone = {entry.id for entry in entries}
        for entry in entries:
            coming = self.replacement(entry.id)
            if coming is not None and coming.id not in gone:
                raise ObjectInUse(
                    f"{entry.kind} {entry.name} is being replaced: wait until that ends, "
                    "or cancel it"
                )
            users = [user for user in self.dependents(entry.id) if user.id not in gone]
            if users:
                names = ", ".join(f"{user.kind} {user.name}" for user in users)
                raise ObjectInUse(f"{entry.kind} {entry.name} is used by {names}: drop them first")
        kept = tuple(other for other in self.objects if other.id not in gone)
        quarantined = {id_: each for id_, each in self.quarantined.items() if id_ not in gone}
        return CatalogSnapshot(kept, self.next_id, quarantined)

    def put(self, *entries: CatalogObject, used: int = 0) -> CatalogSnapshot:
        """Return a catalog in which these entries replace those with the same ids. The next `used`
        ids count as given out. Raises `ObjectExists`.

        Afterwards each object still comes after its dependencies, but the order may no longer
        follow the ids.
        """
        become = {entry.id: entry for entry in entries}
        for entry in entries:
            taken = self._by_name.get(_key(entry.kind, entry.name))
            if taken is not None and taken.id not in become:
                raise ObjectExists(
                    f"{entry.name!r} already exists: it is a {taken.kind} ({taken.name})"
                )
        changed = [become.get(entry.id, entry) for entry in self.objects]
        quarantined = {id_: each for id_, each in self.quarantined.items() if id_ not in become}
        return CatalogSnapshot(_in_order(changed), self.next_id + used, quarantined)

    def quarantine(self, found: Mapping[ObjectId, Quarantine]) -> CatalogSnapshot:
        """Return a catalog in which these objects are quarantined, too."""
        known = {id_: each for id_, each in found.items() if id_ in self._by_id}
        return CatalogSnapshot(self.objects, self.next_id, {**known, **self.quarantined})

    def inlined(self, sql: str) -> tuple[str, tuple[ObjectId, ...]]:
        """Return a query with the plain views that it names inlined, and the ids of those views."""
        found = self.plain_views_in(sql)
        text = define_views(sql, {fold(each.name): each.sql for each in found})
        return text, tuple(each.id for each in found)

    def plain_views_in(self, sql: str) -> list[CatalogObject]:
        """Return the plain views that a query names."""
        views = self._plain_views()
        named = dict.fromkeys(map(fold, find_relations(sql))) if views else ()
        return [views[name] for name in named if name in views]

    def _plain_views(self) -> dict[str, CatalogObject]:
        found = self.of_kind(PLAIN_VIEW)
        return {fold(each.name): each for each in found if each.id not in self.quarantined}

    def encode(self) -> bytes:
        """Return the document to store."""
        objects = [
            msgspec.Raw(self.quarantined[entry.id].original)
            if entry.id in self.quarantined and self.quarantined[entry.id].original
            else entry
            for entry in self.objects
        ]
        return msgspec.msgpack.encode(
            {"format": FORMAT_VERSION, "next_id": self.next_id, "objects": objects}
        )


def columns_read(plan: DeltaPlan | None, name: str, schema: TableSchema) -> TableSchema:
    """Return the schema with which a plan reads an input: without columns that were added since the
    plan was compiled."""
    inputs = () if plan is None else zip(plan.inputs, plan.input_schemas, strict=True)
    for known, read in inputs:
        if fold(known) == fold(name) and schema.columns[: len(read.columns)] == read.columns:
            return read
    return schema


def _in_order(objects: Sequence[CatalogObject]) -> tuple[CatalogObject, ...]:
    """Order objects so that each comes after its dependencies, and keep their order otherwise. The
    dependencies must be acyclic."""
    by_id = {entry.id: entry for entry in objects}
    made: dict[ObjectId, CatalogObject] = {}
    for entry in objects:
        # Use a stack, not recursion: a chain of views may be long.
        stack = [entry]
        while stack:
            missing = [by_id[id_] for id_ in stack[-1].depends if id_ not in made]
            if missing:
                stack += missing
            else:
                last = stack.pop()
                made.setdefault(last.id, last)
    return tuple(made.values())
