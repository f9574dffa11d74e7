"""ALTER, COMMENT and plain views: change the definitions of objects whose contents stay the same.

Definitions that no dataflow depends on (names, comments, retained history) change with one set of
the catalog. A view's refresh policy and target lag belong to its dataflow: a new dataflow takes
over where the old one ends (`replacements.restart_view`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from actors.control.controller.catalog.catalog import (
    PLAIN_VIEW,
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import (
    CatalogChanged,
    CatalogStore,
    checked_defaults,
    columns_named,
    retain,
    target_lag,
)
from actors.control.controller.catalog.replacements import restart_view
from actors.engine.views.fingerprint import rules_digest
from actors.engine.views.query_analysis import analyzed_query
from actors.model.plan.schema import TableSchema, arrow_type
from actors.model.protocol.api import AlterObject, CreateView
from actors.model.protocol.relations import check_name, fold
from actors.runtime.errors import (
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    PenstockError,
    QueryRejected,
)
from actors.runtime.progress import ObjectId


async def alter_object(
    store: CatalogStore, catalog: CatalogSnapshot, seqno: int | None, request: AlterObject
) -> CatalogChanged:
    """Change an object's definition. Raises `UnknownObject`, `InvalidUsage` and its subclasses, and
    engine and store errors."""
    entry = catalog.find(request.name)
    changed = _described(_renamed(catalog, entry, request.rename), request)
    changed = _with_defaults(changed, request)
    if request.retain_history_ms is not None:
        if entry.shard is None:
            raise InvalidUsage(
                f"cannot set retained history: {entry.name} is a {entry.kind}, which has none"
            )
        changed = replace(changed, retain_history_ms=retain(request.retain_history_ms or None))
    if request.refresh_policy is None and request.target_lag_ms is None:
        return await store.replace_entries(catalog, seqno, [changed])
    if entry.kind != VIEW or entry.plan is None:
        raise InvalidUsage(
            f"{entry.name} is a {entry.kind}: only materialized views have a refresh policy and a "
            f"target lag"
        )
    if catalog.replacement(entry.id) is not None:
        raise ObjectInUse(
            f"view {entry.name} is being replaced: wait until that ends, or cancel it"
        )
    if request.target_lag_ms is not None:
        changed = replace(changed, target_lag_ms=target_lag(request.target_lag_ms))
    policy = request.refresh_policy or entry.plan.policy
    if policy != entry.plan.policy:
        # Compile the text again: a plan for full recomputation no longer contains the incremental
        # steps.
        plan = await store.compile(catalog, entry.sql, entry.conf, policy, former=entry.plan)
        if plan.output != entry.schema:
            raise QueryRejected(
                f"the columns of view {entry.name} would change: drop and create it"
            )
        changed = replace(
            changed, plan=plan, fingerprint=plan.fingerprint, compiled_by=rules_digest()
        )
    return await restart_view(store, catalog, seqno, entry, changed)


def _renamed(catalog: CatalogSnapshot, entry: CatalogObject, name: str | None) -> CatalogObject:
    """Return the object under another name. Raises `ObjectExists`, and `ObjectInUse` if a query
    names it."""
    if name is None:
        return entry
    name = check_name(entry.kind, name)
    if fold(name) != fold(entry.name):
        catalog.check_free(name, entry.kind)
    users = [user for user in catalog.dependents(entry.id) if user.kind in (VIEW, PLAIN_VIEW)]
    if users:
        names = ", ".join(f"{user.kind} {user.name}" for user in users)
        raise ObjectInUse(
            f"{entry.kind} {entry.name} is named in the query of {names}: drop {names} first, and "
            f"create them again after the rename"
        )
    return replace(entry, name=name)


def _described(entry: CatalogObject, request: AlterObject) -> CatalogObject:
    """Return the object with a new comment on itself or on a column. Raises `InvalidUsage`."""
    if request.comment is None:
        return entry
    if not request.column:
        return replace(entry, comment=request.comment)
    (column,) = columns_named(entry, [request.column])
    comments = {name: text for name, text in entry.column_comments.items() if name != column}
    if request.comment:
        comments[column] = request.comment
    return replace(entry, column_comments=comments)


def _with_defaults(entry: CatalogObject, request: AlterObject) -> CatalogObject:
    """Return the object with new column defaults. Raises `InvalidUsage`."""
    if not request.column_defaults:
        return entry
    if entry.kind != TABLE:
        raise InvalidUsage(
            f"{entry.name} is a {entry.kind}: only tables that clients write to can have column "
            f"defaults"
        )
    given = checked_defaults(entry.name, entry.schema, request.column_defaults)
    found = {**entry.column_defaults, **given}
    return replace(entry, column_defaults={name: each for name, each in found.items() if each.text})


# -- plain views -----------------------------------------------------------------------------------


async def create_plain_view(
    store: CatalogStore, catalog: CatalogSnapshot, seqno: int | None, request: CreateView
) -> CatalogChanged:
    """Create or replace a plain view. If its query changes, the plain views above it are analysed
    again. Raises `QueryRejected`, `UnknownObject`, `InvalidUsage` and its subclasses, engine and
    store errors."""
    name = check_name("view", request.name)
    there = find_replaced(catalog, name, PLAIN_VIEW) if request.replace else None
    if there is None:
        catalog.check_free(name)
    entry = CatalogObject(
        id=catalog.new_id if there is None else there.id,
        name=name if there is None else there.name,
        kind=PLAIN_VIEW,
        schema=TableSchema(()),
        text=request.sql,
        comment=request.comment,
    )
    made = await _analysed(store, catalog, entry)
    if there is None:
        return await store.store(catalog.add(made), seqno, [], created=made)
    if made.sql == there.sql:
        return await store.replace_entries(catalog, seqno, [made])
    check_circle(catalog, there, made.depends)
    grown = catalog.put(made)
    entries = [made]
    for user in catalog.dependents_below(there.id):
        if user.kind != PLAIN_VIEW:
            raise ObjectInUse(
                f"{user.kind} {user.name} uses the query of view {there.name}: drop it first, or "
                f"replace it with one that does not name {there.name}"
            )
        try:
            again = await _analysed(store, grown, user)
        except InvalidUsage as error:
            raise InvalidUsage(
                f"view {user.name} uses {there.name} and would no longer be valid: {error}"
            ) from error
        # The next view up inlines the new text of this one.
        grown = grown.put(again)
        entries.append(again)
    return await store.replace_entries(catalog, seqno, entries)


async def _analysed(
    store: CatalogStore, catalog: CatalogSnapshot, entry: CatalogObject
) -> CatalogObject:
    """Analyse a plain view: return it with its columns, its inputs, and its text with other plain
    views inlined."""
    sql, plain = catalog.inlined(entry.text)
    if entry.id in plain:
        raise InvalidUsage(f"view {entry.name} cannot name itself in its query")
    found = await analyzed_query(sql, catalog.readable(), store.analyze)
    _check_columns(entry.name, found.schema)
    inputs = (catalog.find(name).id for name in found.inputs)
    depends = tuple(dict.fromkeys((*inputs, *plain)))
    names = found.schema.names
    kept = {name: text for name, text in entry.column_comments.items() if name in names}
    return replace(entry, sql=sql, schema=found.schema, depends=depends, column_comments=kept)


def _check_columns(view: str, schema: TableSchema) -> None:
    seen: set[str] = set()
    for column in schema.columns:
        if fold(column.name) in seen:
            raise QueryRejected(
                f"view {view} has two columns named {column.name!r}: give one an alias"
            )
        seen.add(fold(column.name))
        try:
            # Queries may return intervals, but clients that read object metadata do not know that
            # type.
            arrow_type(column.type)
        except InvalidUsage:
            raise QueryRejected(
                f"view {view}: column {column.name!r} has type {column.type}, which no table "
                "or view has: cast it"
            ) from None


# -- checks of a replacement -----------------------------------------------------------------------


def find_replaced(catalog: CatalogSnapshot, name: str, kind: str) -> CatalogObject | None:
    """Return the object that OR REPLACE would replace, or None if the name is free. Raises
    `ObjectExists` if the name belongs to an object of another kind."""
    try:
        catalog.check_free(name)
    except ObjectExists as error:
        there = catalog.find(name, quarantined=True)
        if there.kind != kind:
            raise ObjectExists(f"{error}, which a {kind} cannot replace") from None
        return there
    return None


def check_circle(
    catalog: CatalogSnapshot, entry: CatalogObject, depends: Sequence[ObjectId]
) -> None:
    """Raise `InvalidUsage` if these dependencies would make an object depend on itself."""
    above = {entry.id, *(user.id for user in catalog.dependents_below(entry.id))}
    for id_ in depends:
        if id_ in above:
            through = catalog.by_id(id_).name
            raise InvalidUsage(
                f"{entry.name} would depend on itself"
                + ("" if id_ == entry.id else f" through {through}")
            )


async def check_dependents(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    entry: CatalogObject,
    schema: TableSchema,
    users: Sequence[CatalogObject],
) -> None:
    """Check that these dependents of an object stay valid and unchanged when its columns become
    `schema`, an extension of its columns. Raises `ObjectInUse`, and engine errors."""
    grown = catalog.put(replace(entry, schema=schema))
    for user in users:
        what = f"{user.kind} {user.name}"
        if user.kind not in (VIEW, PLAIN_VIEW):
            if user.kind == "sink":
                raise ObjectInUse(
                    f"{what} writes the current columns of {entry.name}: drop it first"
                )
            continue
        try:
            found = await analyzed_query(user.sql, grown.readable(), store.analyze)
        except PenstockError as error:
            if not isinstance(error, InvalidUsage):
                raise
            raise ObjectInUse(
                f"{what} reads {entry.name} and would no longer be valid: {error}"
            ) from error
        if found.schema.names != user.schema.names:
            raise ObjectInUse(
                f"{what} selects all columns of {entry.name} (*), so its own columns would change: "
                f"list the columns in its query"
            )
