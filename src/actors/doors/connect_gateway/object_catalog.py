"""Resolves the names by which Connect clients refer to objects, and chooses when to read them.

An object is named ``orders``, ``default.orders`` or ``spark_catalog.default.orders``; the service's
relations about itself have names such as ``penstock.objects``. An unqualified name means a
temporary view of the session if it has one of this name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from pyspark.sql.connect.proto import relations_pb2

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import ReadObjects
from actors.control.controller.catalog.catalog import (
    PLAIN_VIEW,
    SOURCE_TABLE,
    TABLE,
    VIEW,
    CatalogObject,
)
from actors.control.controller.messages import PinnedObjects, PinObjects
from actors.doors.client.client import Client
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.sql_names import NameParts, ResolveName
from actors.engine.sql.tokens import quote_name
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import RELATIONS, fold, is_relation, is_subscribed_view
from actors.runtime.errors import ResourceBusy
from actors.runtime.kernel import ActorAddress, ReplySlot
from actors.runtime.progress import Time

CATALOG: Final = "spark_catalog"
DATABASE: Final = "default"
SYSTEM_DATABASE: Final = "penstock"
"""The database of the service's relations about itself."""
_READABLE: Final = (TABLE, SOURCE_TABLE, VIEW)
_PREFIXES: Final[tuple[NameParts, ...]] = ((), (DATABASE,), (CATALOG, DATABASE))
_UNKNOWN: Final = -1
_CONTENTS_TRIES_MAX: Final = 8
"""How many source tables without contents a plan may wait for, one after another."""


class ObjectNames(msgspec.Struct, frozen=True):
    """The readable objects of one catalog."""

    objects: Mapping[str, CatalogObject]
    """The objects by lower-case name."""
    schemas: Mapping[str, TableSchema]
    """The columns of the objects and of the service's relations, by name."""
    plain: Mapping[str, CatalogObject] = {}
    """The plain views, which are inlined, by lower-case name."""

    @classmethod
    def of(cls, objects: Iterable[CatalogObject]) -> ObjectNames:
        """Build the names from a catalog's objects."""
        objects = [
            entry for entry in objects if not entry.replaces and not is_subscribed_view(entry.name)
        ]
        readable = [entry for entry in objects if entry.kind in _READABLE]
        schemas = {entry.name: entry.schema for entry in readable}
        relations = {name: relation.schema for name, relation in RELATIONS.items()}
        plain = {fold(entry.name): entry for entry in objects if entry.kind == PLAIN_VIEW}
        return cls({fold(entry.name): entry for entry in readable}, schemas | relations, plain)

    def key_of(self, parts: NameParts, hidden: Container[str] = ()) -> str | None:
        """Resolve a client's name to the name of an object; None if it is not an object.

        `hidden`: names that mean temporary views when they are unqualified.
        """
        folded = tuple(map(fold, parts))
        # The catalog may also precede the service's own database.
        if folded[:1] == (CATALOG,) and folded[1:2] == (SYSTEM_DATABASE,):
            folded = folded[1:]
        if folded[:-1] == (SYSTEM_DATABASE,):
            relation = ".".join(folded)
            return relation if relation in RELATIONS else None
        if folded[:-1] not in _PREFIXES or (len(folded) == 1 and folded[0] in hidden):
            return None
        entry = self.objects.get(folded[-1])
        return None if entry is None else entry.name

    def plain_key_of(self, parts: NameParts, hidden: Container[str] = ()) -> str | None:
        """Resolve a client's name to the lower-case name of a plain view; None if it is not one.
        `hidden` is as in `key_of`."""
        folded = tuple(map(fold, parts))
        if folded[:-1] not in _PREFIXES or (len(folded) == 1 and folded[0] in hidden):
            return None
        return folded[-1] if folded[-1] in self.plain else None

    def own_name(self, parts: NameParts, hidden: Container[str] = ()) -> str | None:
        """Resolve a client's name to that of an object, which need not exist; None for a name that
        Spark resolves. `hidden` is as in `key_of`."""
        folded = tuple(map(fold, parts))
        if folded[:-1] not in _PREFIXES or (len(folded) == 1 and folded[0] in hidden):
            return None
        return parts[-1]

    def with_plain(self) -> ObjectNames:
        """Return a copy in which plain views are ordinary objects, for listing them."""
        schemas = {entry.name: entry.schema for entry in self.plain.values()}
        return ObjectNames({**self.objects, **self.plain}, {**self.schemas, **schemas})

    def resolver(self, hidden: Container[str] = ()) -> ResolveName:
        """Return `key_of` with `hidden` bound, for one session."""
        return lambda parts: self.key_of(parts, hidden)

    def entry(self, key: str) -> CatalogObject | None:
        """Return an object by its name; None for one of the service's relations."""
        return self.objects.get(fold(key))


def qualifier_of(key: str) -> NameParts:
    """Return the catalog and database of an object."""
    return (CATALOG, SYSTEM_DATABASE) if is_relation(key) else (CATALOG, DATABASE)


def canonical_read(key: str) -> ProtoMessage:
    """Return a relation that reads an object by its qualified name, which no temporary view can
    hide."""
    made = relations_pb2.Relation()
    name = key.partition(".")[2] if is_relation(key) else key
    quoted = quote_name(name)
    made.read.named_table.unparsed_identifier = ".".join([*qualifier_of(key), quoted])
    return made


def plain_relation(names: ObjectNames, name: str) -> ProtoMessage:
    """Return a plain view's query as a relation; `name` is in lower case."""
    made = relations_pb2.Relation()
    # Other plain views are already inlined in this query.
    made.sql.query = names.plain[name].sql
    return made


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern of Spark's catalog, with ``*`` and ``|``, ignoring
    case.

    >>> matches_pattern("orders", "or*|x"), matches_pattern("orders", "order")
    (True, False)
    """
    return any(
        re.fullmatch(fnmatch.translate(each.strip().replace("?", "[?]").lower()), name.lower())
        for each in pattern.split("|")
    )


class ObjectDirectory:
    """Asks the controller for the catalog, roles and read timestamps, and caches the catalog."""

    def __init__(self, controller: ActorAddress[Any], client: SharedClient) -> None:
        self._controller = controller
        self._client = client
        # The last catalog that was received, with its sequence number, and the last rules.
        self._seqno: int | None = _UNKNOWN
        self._names = ObjectNames({}, {})
        self._access = AccessRules()

    async def names(self) -> ObjectNames:
        """Return the current objects."""
        await self._ask(())
        return self._names

    def check(self, role: str, right: str, keys: Iterable[str]) -> None:
        """Raise `AccessDenied` unless a role has a right on these objects, according to the rules
        and the catalog that were received last."""
        for key in keys:
            entry = self._names.entry(key)
            # Every role may read the service's relations about itself.
            if entry is not None:
                self._access.check(role, right, entry.id, entry.name)

    def reads_of(self, keys: Iterable[str]) -> ReadObjects:
        """Return the ids and names of these objects, in the form that `ReadRights` notes."""
        found = map(self._names.entry, keys)
        return tuple((entry.id, entry.name) for entry in found if entry is not None)

    def may(self, role: str, right: str) -> bool:
        """Return whether a role has a right on the whole service, according to the rules that were
        received last."""
        return self._access.may(role, right)

    async def pin(self, keys: Iterable[str]) -> Time:
        """Return a timestamp at which to read all these objects, which sees every acknowledged
        write.

        Waits for the first contents of source tables. Raises `UnknownObject`, `ResourceBusy`.
        """
        names = tuple(key for key in keys if not is_relation(key))
        for _ in range(_CONTENTS_TRIES_MAX):
            found = await self._ask(names)
            if not found.missing:
                return found.time
            # A read waits for the first contents.
            await (await self._client.get()).peek(found.missing, limit=0)
        raise ResourceBusy(f"{found.missing} has no contents yet: try again later")

    async def _ask(self, names: tuple[str, ...]) -> PinnedObjects:
        # The controller sends the catalog, which may be large, only if it has changed.
        known = self._seqno

        def ask(reply: ReplySlot[PinnedObjects]) -> PinObjects:
            return PinObjects(names, known, reply)

        found = await self._controller.ask(ask)
        self._access = found.access
        # Do not overwrite a later catalog that another task has received in the meantime.
        if found.objects is not None and self._seqno == known:
            self._names, self._seqno = ObjectNames.of(found.objects), found.seqno
        return found


class SharedClient:
    """A client of the service that all sessions share, and that reconnects when it is lost."""

    def __init__(self, connect: Callable[[str | None], Awaitable[Client]]) -> None:
        """`connect` creates a client for a role; for None, a trusted one."""
        self._connect = connect
        self._client: Client | None = None

    async def get(self) -> Client:
        """Return the trusted client, and connect it if necessary. Raises as `connect` does."""
        client = self._client
        if client is None or client.is_lost:
            made = await self._connect(None)
            # If two tasks connect concurrently, keep the later client.
            client, before = made, self._client
            self._client = made
            if before is not None:
                await before.aclose()
        return client

    @asynccontextmanager
    async def reader_of(self, key: str, role: str) -> AsyncIterator[Client]:
        """Yield a client with which to read an object for a role whose right was checked.

        That is the shared client, except for the service's relations, whose rows depend on the
        role.
        """
        if not is_relation(key):
            yield await self.get()
            return
        async with await self._connect(role) as client:
            yield client

    async def of_role(self, role: str) -> Client:
        """Connect a new client of a role."""
        return await self._connect(role)

    async def aclose(self) -> None:
        """Close the shared client."""
        if self._client is not None:
            await self._client.aclose()
