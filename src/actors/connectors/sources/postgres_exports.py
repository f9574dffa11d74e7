"""Exports of PostgreSQL tables, and the reasons why a table cannot be ingested. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.connectors.sources.postgres_catalog import (
    LeafPartition,
    PostgresColumn,
    PostgresTable,
    PublicationInfo,
)
from actors.connectors.sources.postgres_names import columns_here, identifier, numbers_of
from actors.connectors.sources.postgres_types import TypeFacts, column_type
from actors.connectors.sources.source import SourceExport
from actors.errors import InvalidUsage
from actors.plan.schema import TableColumn, TableSchema


def export_of(
    table: PostgresTable, leave_out: Sequence[str], types: Mapping[int, TypeFacts], numeric: str
) -> SourceExport:
    """Return the table as an export, without these columns and generated ones. Raises
    `InvalidUsage` with the reasons why it cannot be ingested, and what to do."""
    name = f"{identifier(table.schema)}.{identifier(table.table)}"
    absent = sorted(set(leave_out) - {column.name for column in table.columns})
    if absent:
        raise InvalidUsage(f"{table.name} has no columns {', '.join(absent)} to leave out")
    if not table.permanent:
        raise InvalidUsage(f"{table.name} is unlogged: ALTER TABLE {name} SET LOGGED")
    if table.row_security:
        raise InvalidUsage(
            f"row security hides rows of {table.name} from the user: ALTER ROLE … BYPASSRLS"
        )
    # Logical replication does not send generated columns.
    columns = [
        column for column in table.columns if column.name not in leave_out and not column.generated
    ]
    hidden = [column.name for column in columns if not column.readable]
    if hidden:
        raise InvalidUsage(
            f"the user may not read {', '.join(hidden)} of {table.name}: GRANT SELECT ON {name}"
            " to it (and USAGE on the schema), or leave these columns out"
        )
    if not columns:
        raise InvalidUsage(f"{table.name} has no columns to take")
    here = columns_here(
        ((column.number, column.name) for column in columns), (c.name for c in table.columns)
    )
    held = {
        column.name: TableColumn(
            here[column.number],
            column_type(column.type_oid, column.modifier, types, numeric).spark,
            nullable=not column.not_null,
        )
        for column in columns
    }
    kept = table.key if all(name in held for name in table.key) else ()
    # A key must find rows again: floats and arrays have no exact equality.
    unfit = [name for name in kept if _is_no_key(held[name].type)]
    if table.identity != "f":
        _check_identity(table, name, kept, unfit)
    for leaf in table.leaves:
        if wrong := leaf_fault(table, leaf):
            raise InvalidUsage(f"{table.name}: {wrong}")
    key = () if unfit else tuple(held[name].name for name in kept)
    return SourceExport(table.name, TableSchema(tuple(held.values()), key), table=table.table)


def _is_no_key(spark: str) -> bool:
    """Say whether values of that type have no exact equality."""
    return spark in ("float", "double") or spark.startswith("array<")


def _check_identity(
    table: PostgresTable, name: str, kept: Sequence[str], unfit: Sequence[str]
) -> None:
    """Raise `InvalidUsage` where a replica identity by key does not identify rows here."""
    full = f"ALTER TABLE {name} REPLICA IDENTITY FULL"
    if table.identity == "n" or not table.key:
        raise InvalidUsage(
            f"nothing tells rows of {table.name} apart: give it a PRIMARY KEY, or {full}"
        )
    if not kept:
        raise InvalidUsage(
            f"the key of {table.name} ({', '.join(table.key)}) is left out: take these columns too,"
            f" or {full}"
        )
    if unfit:
        raise InvalidUsage(
            f"the key of {table.name} has {', '.join(unfit)}, of a type without exact equality:"
            f" {full}"
        )


def leaf_fault(table: PostgresTable, leaf: LeafPartition) -> str:
    """Return the error and a hint if a partition's changes do not come as those of its table; "" if
    they do."""
    if leaf.kind != "r":
        return (
            f"partition {leaf.relation} is no table of this server: its changes are not in the log"
        )
    if not leaf.permanent:
        return f"partition {leaf.relation} is unlogged: ALTER TABLE {leaf.relation} SET LOGGED"
    if leaf.identity == "f" or leaf.identity == "n":
        return ""  # with none the server refuses updates and deletes
    # Each partition has a replica identity of its own, which the server uses.
    if table.identity == "f" or set(leaf.key) != set(table.key):
        told = f"({', '.join(leaf.key)})" if leaf.key else "nothing"
        return (
            f"the replica identity of partition {leaf.relation} is {told}, not its table's:"
            f" ALTER TABLE {leaf.relation} REPLICA IDENTITY FULL"
        )
    return ""


def check_published(found: PublicationInfo, export: SourceExport, table: PostgresTable) -> None:
    """Raise `InvalidUsage` when the publication gives an export in part only."""
    if found.missing:
        raise InvalidUsage(
            f"publication {found.name} leaves out {', '.join(found.missing)}: ALTER PUBLICATION"
            f" {identifier(found.name)} SET (publish = 'insert, update, delete, truncate')"
        )
    columns = found.tables.get(export.name, ())
    taken = {each.name for each in bound_columns(table, export) if each is not None}
    absent = sorted(taken - set(columns)) if columns else []
    if absent:
        raise InvalidUsage(
            f"publication {found.name} leaves out {', '.join(absent)} of {export.name}: add them"
            " to its list of columns, or leave them out here"
        )
    if export.name in found.filtered:
        raise InvalidUsage(
            f"publication {found.name} gives some rows of {export.name} only (WHERE): take the"
            " condition away, and put it into a view here"
        )


def bound_columns(table: PostgresTable, export: SourceExport) -> tuple[PostgresColumn | None, ...]:
    """Return the table's column for each of the export's columns; None where there is none."""
    by_number = {column.number: column for column in table.columns}
    pairs = [(column.number, column.name) for column in table.columns]
    return tuple(by_number.get(number) for number in numbers_of(export.schema.names, pairs))
