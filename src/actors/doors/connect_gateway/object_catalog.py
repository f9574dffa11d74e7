"""The service's objects as a Connect client names them, and the time at which they are read.

An object is ``orders``, ``default.orders`` or ``spark_catalog.default.orders``; a relation of the
service about itself is ``penstock.objects``. A name of one part that a session has given to a
temporary view of its own means that view.
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
"""Database of the service's relations about itself."""
_READABLE: Final = (TABLE, SOURCE_TABLE, VIEW)
_PREFIXES: Final[tuple[NameParts, ...]] = ((), (DATABASE,), (CATALOG, DATABASE))
_UNKNOWN: Final = -1
_CONTENTS_TRIES_MAX: Final = 8
"""Source tables below one plan that are waited for, one after the other."""


class ObjectNames(msgspec.Struct, frozen=True):
    """The readable objects of one catalog."""

    objects: Mapping[str, CatalogObject]
    """By their names, in lower case."""
    schemas: Mapping[str, TableSchema]
    """Columns of the objects and of the service's relations, by their names."""
    plain: Mapping[str, CatalogObject] = {}
    """Plain views, which are inlined, by their names in lower case."""

    @classmethod
    def of(cls, objects: Iterable[CatalogObject]) -> ObjectNames:
        """Return the names of a catalog's objects."""
        objects = [
            entry for entry in objects if not entry.replaces and not is_subscribed_view(entry.name)
        ]
        readable = [entry for entry in objects if entry.kind in _READABLE]
        schemas = {entry.name: entry.schema for entry in readable}
        relations = {name: relation.schema for name, relation in RELATIONS.items()}
        plain = {fold(entry.name): entry for entry in objects if entry.kind == PLAIN_VIEW}
        return cls({fold(entry.name): entry for entry in readable}, schemas | relations, plain)

    def key_of(self, parts: NameParts, hidden: Container[str] = ()) -> str | None:
        """Return the name of the object that a client means; None if it means none. `hidden`: names
        that mean something else where they stand alone."""
        folded = tuple(map(fold, parts))
        # The catalog may stand before the service's own database, too.
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
        """Return the name in lower case of the plain view that a client means; None if it means
        none. `hidden` as in `key_of`."""
        folded = tuple(map(fold, parts))
        if folded[:-1] not in _PREFIXES or (len(folded) == 1 and folded[0] in hidden):
            return None
        return folded[-1] if folded[-1] in self.plain else None

    def own_name(self, parts: NameParts, hidden: Container[str] = ()) -> str | None:
        """Return the name of the object, which need not be there, that a client means; None for a
        name that is Spark's to find. `hidden` as in `key_of`."""
        folded = tuple(map(fold, parts))
        if folded[:-1] not in _PREFIXES or (len(folded) == 1 and folded[0] in hidden):
            return None
        return parts[-1]

    def with_plain(self) -> ObjectNames:
        """Return names in which plain views are objects like others, to tell of them."""
        schemas = {entry.name: entry.schema for entry in self.plain.values()}
        return ObjectNames({**self.objects, **self.plain}, {**self.schemas, **schemas})

    def resolver(self, hidden: Container[str] = ()) -> ResolveName:
        """Return `key_of` for one session."""
        return lambda parts: self.key_of(parts, hidden)

    def entry(self, key: str) -> CatalogObject | None:
        """Return an object by its name; None for a relation of the service about itself."""
        return self.objects.get(fold(key))


def qualifier_of(key: str) -> NameParts:
    """Return the catalog and database before an object's name."""
    return (CATALOG, SYSTEM_DATABASE) if is_relation(key) else (CATALOG, DATABASE)


def canonical_read(key: str) -> ProtoMessage:
    """Return a relation that reads an object by a name that no temporary view can hide."""
    made = relations_pb2.Relation()
    name = key.partition(".")[2] if is_relation(key) else key
    quoted = quote_name(name)
    made.read.named_table.unparsed_identifier = ".".join([*qualifier_of(key), quoted])
    return made


def plain_relation(names: ObjectNames, name: str) -> ProtoMessage:
    """Return a relation that is a plain view's query; `name` in lower case."""
    made = relations_pb2.Relation()
    # The plain views that it names are inlined in it already.
    made.sql.query = names.plain[name].sql
    return made


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern of Spark's catalog: ``*`` and ``|``, in any case.

    >>> matches_pattern("orders", "or*|x"), matches_pattern("orders", "order")
    (True, False)
    """
    return any(
        re.fullmatch(fnmatch.translate(each.strip().replace("?", "[?]").lower()), name.lower())
        for each in pattern.split("|")
    )


class ObjectDirectory:
    """Asks the controller for the catalog and for times."""

    def __init__(self, controller: ActorAddress[Any], client: SharedClient) -> None:
        self._controller = controller
        self._client = client
        self._seqno: int | None = _UNKNOWN
        self._names = ObjectNames({}, {})
        self._access = AccessRules()

    async def names(self) -> ObjectNames:
        """Return the objects that there are now."""
        await self._ask(())
        return self._names

    def check(self, role: str, right: str, keys: Iterable[str]) -> None:
        """Raise `AccessDenied` unless a session with this role has a right on these objects, by the
        roles and the catalog that `names` found last."""
        for key in keys:
            entry = self._names.entry(key)
            # The service's relations about itself are for everybody.
            if entry is not None:
                self._access.check(role, right, entry.id, entry.name)

    def reads_of(self, keys: Iterable[str]) -> ReadObjects:
        """Return these objects as those whose rows are read: as `check`."""
        found = map(self._names.entry, keys)
        return tuple((entry.id, entry.name) for entry in found if entry is not None)

    def may(self, role: str, right: str) -> bool:
        """Return whether a session with this role has a right on the whole service, by the roles
        that `names` found last."""
        return self._access.may(role, right)

    async def pin(self, keys: Iterable[str]) -> Time:
        """Return the time at which these objects are read together, which sees every acknowledged
        write. Waits for the first contents of sources. Raises `UnknownObject`, `ResourceBusy`."""
        names = tuple(key for key in keys if not is_relation(key))
        for _ in range(_CONTENTS_TRIES_MAX):
            found = await self._ask(names)
            if not found.missing:
                return found.time
            # A read waits until there is something to read.
            await (await self._client.get()).peek(found.missing, limit=0)
        raise ResourceBusy(f"{found.missing} has no contents yet: try again later")

    async def _ask(self, names: tuple[str, ...]) -> PinnedObjects:
        # Only a catalog that changed is sent again: the controller passes thousands of objects.
        known = self._seqno

        def ask(reply: ReplySlot[PinnedObjects]) -> PinObjects:
            return PinObjects(names, known, reply)

        found = await self._controller.ask(ask)
        self._access = found.access
        # Another task may have heard of a later catalog meanwhile: sequence numbers only grow.
        if found.objects is not None and self._seqno == known:
            self._names, self._seqno = ObjectNames.of(found.objects), found.seqno
        return found


class SharedClient:
    """One client of the service, made anew when its connection is lost."""

    def __init__(self, connect: Callable[[str | None], Awaitable[Client]]) -> None:
        """Take a coroutine function that makes a client for a role; None: a trusted one."""
        self._connect = connect
        self._client: Client | None = None

    async def get(self) -> Client:
        """Return the client, which is trusted. Raises what connecting raises."""
        client = self._client
        if client is None or client.is_lost:
            made = await self._connect(None)
            # Two tasks may connect at once: the later one's is kept.
            client, before = made, self._client
            self._client = made
            if before is not None:
                await before.aclose()
        return client

    @asynccontextmanager
    async def reader_of(self, key: str, role: str) -> AsyncIterator[Client]:
        """Read an object for a caller of this role, whose right was checked: by the client, but for
        a relation of the service, which does not tell all to everybody."""
        if not is_relation(key):
            yield await self.get()
            return
        async with await self._connect(role) as client:
            yield client

    async def of_role(self, role: str) -> Client:
        """Return another client, of a role."""
        return await self._connect(role)

    async def aclose(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.aclose()
