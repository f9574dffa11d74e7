"""The right that each request of a session needs. Pure.

Reading needs `read` on the object, changing rows `write`, creating objects `create` on the service
and `read` on what they are built upon, changing and dropping an object to own or administer it,
and everything about the service and its roles to be an administrator. A materialized view's right
suffices for the view: those of the objects below it do not matter. A plain view is inlined, and
reading it needs the rights of what its query reads. The catalog, the service's relations about
itself and statistics are for everybody.

A query's objects and functions are known only to Spark. So a query is analysed over the objects
that its session may read, and knows no others (`readable_by`); of functions and constructs it may
use what reaches nothing else (`AnalyzeStatement.restricted`), unless the role is an administrator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, TypeAlias

from actors.control.access.access_rules import AccessRules
from actors.control.access.role_registry import ADMIN, CREATE, READ, WRITE
from actors.control.controller.catalog.catalog import (
    INDEX,
    SINK,
    SOURCE,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import check_subscribed_view
from actors.model.plan.schema import TableSchema
from actors.model.protocol.api import (
    AlterObject,
    AlterSource,
    CreateIndex,
    CreateSink,
    CreateSource,
    CreateTable,
    CreateView,
    DescribeQuery,
    DropObject,
    DropSink,
    DropSource,
    EndRequest,
    ExplainQuery,
    ExplainView,
    ListActors,
    ListSources,
    ReadObject,
    ReadStatus,
    Request,
    RunQuery,
    SubscribeObject,
    WaitFor,
    WriteTables,
)
from actors.model.protocol.relations import fold, is_relation, is_subscribed_view
from actors.model.protocol.role_messages import (
    AlterRole,
    ChangeRights,
    CheckRight,
    ListRoles,
)
from actors.runtime.errors import AccessDenied, InvalidUsage, PenstockError, UnknownObject

NeededRight: TypeAlias = tuple[str, CatalogObject | None]
"""A right, and the object that it is needed on; None: the whole service."""
_MISSING: Final = "no table or view named"
"""Begin of the error of a name that a query's analysis does not find, before its `repr`."""


def check_request(
    access: AccessRules, catalog: CatalogSnapshot, role: str | None, request: Request
) -> None:
    """Raise `AccessDenied` unless a session may make a request; `UnknownObject` and `InvalidUsage`
    for a name that the request could not use either."""
    if access.is_free(role) or isinstance(request, EndRequest):
        return
    # Also for requests that need no right: a role that was dropped may not go on.
    if not role or access.registry.get(role) is None:
        raise AccessDenied(access.refusal(role, READ))
    match request:
        case AlterRole(name=name, login=None) if fold(role) == fold(name):
            # Everybody may change the own password, and drop the own tokens. Whether it may make
            # one is looked at when the change's turn comes (`RoleStore`).
            return
    for right, entry in needed_rights(catalog, request):
        if entry is None:
            access.check(role, right)
        else:
            access.check(role, right, entry.id, entry.name)


def needed_rights(catalog: CatalogSnapshot, request: Request) -> Iterator[NeededRight]:
    """Yield the rights that a request needs. Raises `UnknownObject` and `InvalidUsage`."""
    match request:
        case WriteTables(changes=changes):
            # One write may change several tables, and is refused whole.
            for change in changes:
                yield WRITE, catalog.find(change.table, quarantined=True)
        case ReadObject(name=name) | SubscribeObject(name=name) | WaitFor(name=name):
            if not is_relation(name):
                for read in _objects_read(catalog, name):
                    yield READ, read
        case CheckRight(right=right, name=name):
            yield right, object_named(catalog, name)
        case CreateView(for_subscribe=True):
            # It is the subscribe of what its query reads, which is checked as a view's is.
            check_subscribed_view(request)
        case CreateView(replace=True, name=name) if catalog.has(name):
            yield ADMIN, catalog.find(name, quarantined=True)
        case CreateTable() | CreateSource() | CreateView():
            # What a view reads is checked when its text has been analysed.
            yield CREATE, None
        case CreateIndex(on=on) | CreateSink(on=on):
            yield CREATE, None
            yield READ, _read_by(catalog, on)
        case DropObject(name=name, cascade=cascade):
            entry = catalog.find(name, quarantined=True)
            yield ADMIN, entry
            # All that goes with it is somebody's, too.
            for other in catalog.dropped_with(entry) if cascade else ():
                yield ADMIN, other
        case AlterObject(name=name):
            yield ADMIN, catalog.find(name, quarantined=True)
        case DropSource(name=name, cascade=True):
            entry = catalog.find_connector(SOURCE, name, quarantined=True)
            yield ADMIN, entry
            for other in catalog.dependents_below(entry.id):
                if entry.id not in other.depends:
                    yield ADMIN, other
        case AlterSource(name=name) | DropSource(name=name):
            yield ADMIN, catalog.find_connector(SOURCE, name, quarantined=True)
        case DropSink(name=name):
            yield ADMIN, catalog.find_connector(SINK, name, quarantined=True)
        case ChangeRights(scope="objects", names=names):
            # Owners give rights on their objects.
            for name in names:
                yield ADMIN, object_named(catalog, name)
        case (
            RunQuery()
            | DescribeQuery()
            | ExplainQuery()
            | ExplainView()
            | ReadStatus()
            | ListActors()
            | ListSources()
            | ListRoles()
            | EndRequest()
        ):
            pass
        case _:
            # Roles, replicas, traces; copies, which use files with the service's own rights; and
            # whatever is added and not named above: nobody may do that by mistake.
            yield ADMIN, None


def object_named(catalog: CatalogSnapshot, name: str) -> CatalogObject:
    """Return the object of a name: a table, view or index, else a source, else a sink. Raises
    `UnknownObject`, and `InvalidUsage` for a relation of the service about itself."""
    try:
        return catalog.find(name, quarantined=True)
    except UnknownObject:
        raise
    except InvalidUsage:
        # `find` refuses names of sources and sinks in this way, and of relations.
        for kind in (SOURCE, SINK):
            with suppress(UnknownObject):
                return catalog.find_connector(kind, name, quarantined=True)
        raise


def _read_by(catalog: CatalogSnapshot, name: str) -> CatalogObject:
    """Return the object whose contents are read by a name: of an index the one below it."""
    entry = catalog.find(name, quarantined=True)
    return catalog.by_id(entry.depends[0]) if entry.kind == INDEX else entry


def _objects_read(catalog: CatalogSnapshot, name: str) -> Iterator[CatalogObject]:
    """Yield the objects on which a reader of a name needs READ: with the view of a subscribe all
    that its query reads."""
    entry = _read_by(catalog, name)
    yield entry
    # Whoever follows a query owns its view, and would by that keep what the query reads.
    if is_subscribed_view(entry.name):
        yield from map(catalog.by_id, entry.depends)


def shown_error(
    access: AccessRules, role: str | None, entry: CatalogObject | None, text: str
) -> str:
    """Return the text of an object's error as a session of a role sees it: the text may quote
    values of rows, so it is for those who may read them. `entry` None: of an object that is gone,
    which administrators see."""
    if not text or (access.is_free(role) if entry is None else access.may(role, READ, entry.id)):
        return text
    name = "it" if entry is None else entry.name
    return f"hidden, since it may quote rows: ask for GRANT READ ON {name}"


def readable_by(
    access: AccessRules, catalog: CatalogSnapshot, role: str | None
) -> dict[str, TableSchema]:
    """Return the schemas of the objects that a session may read, by name."""
    readable = catalog.readable()
    if access.is_free(role):
        return readable
    return {
        name: schema
        for name, schema in readable.items()
        if access.may(role, READ, catalog.find(name, quarantined=True).id)
    }


def named_denial(
    access: AccessRules, catalog: CatalogSnapshot, role: str | None, error: PenstockError
) -> PenstockError:
    """Return the error of a query: `AccessDenied` if what was not found is there, and the session
    may not read it."""
    if not isinstance(error, UnknownObject) or access.is_free(role):
        return error
    # The analysis knows no more than that a name is missing: here it is known why.
    text = fold(str(error))
    for entry in catalog.objects:
        missing = text.startswith(fold(f"{_MISSING} {entry.name!r};"))
        if missing and not access.may(role, READ, entry.id):
            return AccessDenied(access.refusal(role, READ, entry.name))
    return error
