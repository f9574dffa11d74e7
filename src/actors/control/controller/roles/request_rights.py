"""The right that each request of a session needs. Pure.

Reading an object needs READ on it, changing its rows WRITE. Creating an object needs CREATE on the
service and READ on everything that it is built on. Changing or dropping an object needs OWN or
ADMIN on it. Everything about the service and its roles needs ADMIN. READ on a materialized view
suffices to read it, whatever the rights on the objects below. A plain view is inlined, so reading
it needs the rights on what its query reads. The catalog, system relations and statistics are
readable by everyone.

Only Spark knows which objects and functions a query uses. So a query is analysed over the objects
that its session may read, and sees no others (`readable_by`). Unless the role is an administrator,
it may use only functions and constructs that reach nothing else (`AnalyzeStatement.restricted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TypeAlias

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
from actors.engine.views.query_analysis import missing_object_text
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
"""A right, and the object on which it is needed; None for the whole service."""


def check_request(
    access: AccessRules, catalog: CatalogSnapshot, role: str | None, request: Request
) -> None:
    """Raise `AccessDenied` unless a session may make a request. Raises `UnknownObject` and
    `InvalidUsage` for a name that the request could not use anyway."""
    if access.is_free(role) or isinstance(request, EndRequest):
        return
    # Check this even for requests that need no right: a dropped role may do nothing.
    if not role or access.registry.get(role) is None:
        raise AccessDenied(access.refusal(role, READ))
    match request:
        case AlterRole(name=name, login=None) if fold(role) == fold(name):
            # Every role may change its own password and drop its own tokens. Whether it may create
            # a token is checked when the change is carried out (`RoleStore`).
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
            # A write may change several tables, and is refused as a whole.
            for change in changes:
                yield WRITE, catalog.find(change.table, quarantined=True)
        case ReadObject(name=name) | SubscribeObject(name=name) | WaitFor(name=name):
            if not is_relation(name):
                for read in _objects_read(catalog, name):
                    yield READ, read
        case CheckRight(right=right, name=name):
            yield right, object_named(catalog, name)
        case CreateView(for_subscribe=True):
            # It subscribes to what its query reads, which is checked as for a view.
            check_subscribed_view(request)
        case CreateView(replace=True, name=name) if catalog.has(name):
            yield ADMIN, catalog.find(name, quarantined=True)
        case CreateTable() | CreateSource() | CreateView():
            # What a view reads is checked once its text has been analysed.
            yield CREATE, None
        case CreateIndex(on=on) | CreateSink(on=on):
            yield CREATE, None
            yield READ, _read_by(catalog, on)
        case DropObject(name=name, cascade=cascade):
            entry = catalog.find(name, quarantined=True)
            yield ADMIN, entry
            # The objects dropped with it have owners, too.
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
            # Owners may grant rights on their objects.
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
            # Roles, replicas and traces; copies, which use files with the service's own rights; and
            # anything added later that is not named above: by default only administrators may do
            # it.
            yield ADMIN, None


def object_named(catalog: CatalogSnapshot, name: str) -> CatalogObject:
    """Return the object with a name: a table, view or index, else a source, else a sink. Raises
    `UnknownObject`, and `InvalidUsage` for a system relation."""
    try:
        return catalog.find(name, quarantined=True)
    except UnknownObject:
        raise
    except InvalidUsage:
        # This is how `find` refuses the names of sources, sinks and relations.
        for kind in (SOURCE, SINK):
            with suppress(UnknownObject):
                return catalog.find_connector(kind, name, quarantined=True)
        raise


def _read_by(catalog: CatalogSnapshot, name: str) -> CatalogObject:
    """Return the object whose contents a read of a name returns: for an index, the object it is
    on."""
    entry = catalog.find(name, quarantined=True)
    return catalog.by_id(entry.depends[0]) if entry.kind == INDEX else entry


def _objects_read(catalog: CatalogSnapshot, name: str) -> Iterator[CatalogObject]:
    """Yield the objects on which a reader of a name needs READ: for the view of a subscribe,
    everything that its query reads."""
    entry = _read_by(catalog, name)
    yield entry
    # The session owns the view of its subscribe, and ownership alone would let it keep reading.
    if is_subscribed_view(entry.name):
        yield from map(catalog.by_id, entry.depends)


def redacted_error(
    access: AccessRules, role: str | None, entry: CatalogObject | None, text: str
) -> str:
    """Return the text of an object's error as a session of this role may see it. The text may quote
    values of rows, so it is only for roles that may read them. `entry` is None for an object that
    no longer exists, whose errors administrators see."""
    if not text or (access.is_free(role) if entry is None else access.may(role, READ, entry.id)):
        return text
    name = "it" if entry is None else entry.name
    return f"hidden, because it may quote rows: ask for GRANT READ ON {name}"


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
    """Return the error to answer a query with: `AccessDenied` if the missing object exists but the
    session may not read it."""
    if not isinstance(error, UnknownObject) or access.is_free(role):
        return error
    # The analysis only knows that a name is missing; the reason is known here.
    text = fold(str(error))
    for entry in catalog.objects:
        missing = text.startswith(fold(missing_object_text(entry.name)))
        if missing and not access.may(role, READ, entry.id):
            return AccessDenied(access.refusal(role, READ, entry.name))
    return error
