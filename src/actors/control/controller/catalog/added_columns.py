"""ALTER TABLE … ADD COLUMNS: further columns of a table, whose older rows have NULL there.

Nothing is written anew: the shard gets another schema in the set that changes the catalog, and a
part of an older schema is read with NULL. A table that a source fills is given columns that the
source knows of (`SourceConnector.describe_added`): its task appends nothing more that it read
without them, and the one that follows gives their values. What depends on the table:

- a view goes on with the columns that it was compiled for, also where its query says ``*``: its
  plan names them (`CatalogSnapshot.readable_by`);
- an index is built anew with all columns, by another dataflow;
- a plain view is its text, so it must not take all columns; nor may a sink write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from actors.control.controller.catalog.alterations import check_dependents
from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    SOURCE_TABLE,
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import (
    CatalogChanged,
    CatalogStore,
    fenced,
    seqno_after,
    table_schema,
)
from actors.durable.persist import CompareAndSet, SchemaMismatch
from actors.durable.persist.change import SeqnoMismatch
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, PenstockError


def grown_schema(entry: CatalogObject, columns: Sequence[TableColumn]) -> TableSchema:
    """Return a table's schema with further columns. Raises `InvalidUsage` for an object whose
    columns are not its own, a name that is taken, and NOT NULL."""
    if entry.kind not in (TABLE, SOURCE_TABLE):
        raise InvalidUsage(f"{entry.name} is a {entry.kind}: only tables are given columns")
    for column in columns:
        if not column.nullable:
            raise InvalidUsage(
                f"table {entry.name}: column {column.name} cannot be NOT NULL, since the rows that "
                f"are there have no value in it"
            )
    # Raises for a name that comes twice.
    return table_schema(
        entry.name, TableSchema((*entry.schema.columns, *columns), entry.schema.key)
    )


async def add_columns(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    seqno: int | None,
    entry: CatalogObject,
    schema: TableSchema,
    comments: Mapping[str, str],
) -> CatalogChanged:
    """Give a table this schema, which extends its own, and have its indexes built anew. No write
    of a client to the table may be under way.

    Raises `ObjectInUse` (a plain view or a sink takes all columns), `IncompatibleSchema`,
    `WriterFenced`, `StorageError`.
    """
    assert entry.shard is not None, entry.name
    plain = [each for each in catalog.dependents(entry.id) if each.kind != VIEW]
    await check_dependents(store, catalog, entry, schema, plain)
    indexes = await store.rebuilt_indexes(catalog, entry, schema, catalog.next_id)
    kept = {**entry.column_comments, **{_own(schema, name): comments[name] for name in comments}}
    grown = replace(entry, schema=schema, column_comments=kept)
    after = catalog.put(grown, *indexes, used=len(indexes))
    cas = CompareAndSet(CATALOG_KEY, seqno, after.encode())
    persist = store.persist
    try:
        expected = (await persist.state(entry.shard)).schema_id
        found = await persist.schemas.evolve(entry.shard, expected, schema, extra=[cas])
        if isinstance(found, SchemaMismatch):
            raise fenced(seqno)
    except SeqnoMismatch as error:
        raise fenced(seqno) from error
    except PenstockError as error:
        if error.determinate:
            for index in indexes:
                await store.drop_holds(catalog, index)
        raise
    return CatalogChanged(after, seqno_after(seqno), altered=(grown, *indexes))


def _own(schema: TableSchema, name: str) -> str:
    return next(each for each in schema.names if fold(each) == fold(name))
