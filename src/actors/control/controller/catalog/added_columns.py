"""ALTER TABLE … ADD COLUMNS: add columns to a table; its existing rows have NULL in them.

No data is rewritten. The change sets the shard's new schema together with the catalog, and parts
written under the old schema are read with NULL in the new columns. A table that a source fills can
only get columns that the source knows (`SourceConnector.describe_added`): the source's running task
stops appending rows that it read without them, and the task that replaces it supplies their values.
For objects that depend on the table:

- a view keeps the columns that it was compiled for, even if its query says ``*``, because its plan
  names them (`CatalogSnapshot.readable_by`);
- an index is rebuilt with all columns, by a new dataflow;
- a plain view is only text, so the change is refused if it selects all columns; likewise for a
  sink, which writes all columns.
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
    """Return a table's schema with these columns added. Raises `InvalidUsage` for an object that is
    not a table, a duplicate column name, or a NOT NULL column."""
    if entry.kind not in (TABLE, SOURCE_TABLE):
        raise InvalidUsage(f"cannot add columns to {entry.name}: it is a {entry.kind}, not a table")
    for column in columns:
        if not column.nullable:
            raise InvalidUsage(
                f"table {entry.name}: column {column.name} cannot be NOT NULL, because existing "
                f"rows have no value for it"
            )
    # Raises for a duplicate name.
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
    """Replace a table's schema with this one, which extends it, and rebuild its indexes. The caller
    ensures that no client write to the table is in progress.

    Raises `ObjectInUse` (a plain view or a sink uses all columns), `IncompatibleSchema`,
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
