"""Reads PostgreSQL's catalog: tables, types, publication and slot. Changes nothing.

Every query is a simple query with literals (`quote_literal`), so that it also works on a
replication connection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.connectors.sources.postgres_names import (
    local_column_names,
    numbers_of,
    qualified_name,
    split_name,
)
from actors.connectors.sources.postgres_types import (
    UNBOUNDED,
    TypeFacts,
    column_type,
    numeric_held_by,
)
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceExport
from actors.model.pgwire.quoting import quote_literal, quote_name
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.runtime.errors import InvalidUsage
from actors.wal.lsn import parse_lsn

VERSION_MIN: Final = 130_000
_VERSION_WITH_MULTIRANGES: Final = 140_000
VERSION_WITH_LISTS: Final = 150_000
"""First version in which publications can have column lists and row filters."""


class PostgresColumn(msgspec.Struct, frozen=True):
    """A column of a table."""

    name: str
    number: int
    type_oid: int
    modifier: int
    not_null: bool
    generated: bool
    readable: bool
    key_place: int
    """Position of the column in the key of the replica identity (from 1); 0 if it is not in the
    key."""
    changed_xid: int = 0
    """Transaction that last wrote the column's catalog row. Every ALTER of the column changes
    it."""


class LeafPartition(msgspec.Struct, frozen=True):
    """A partition that holds rows."""

    oid: int
    relation: str
    """Quoted name for SQL."""
    kind: str
    """relkind: ``r``, or ``f`` for a foreign table."""
    permanent: bool
    identity: str
    key: tuple[str, ...]
    """Columns of the partition's own replica identity."""
    filenode: int
    attached_xid: int
    """Transaction that attached this partition, or a partition above it, to the root."""


class PostgresTable(msgspec.Struct, frozen=True):
    """A table, or the root of a partitioned table."""

    oid: int
    schema: str
    table: str
    partitioned: bool
    permanent: bool
    identity: str
    """Replica identity: ``d`` (default), ``i`` (index), ``f`` (full) or ``n`` (nothing)."""
    row_security: bool
    owned: bool
    """True if the user owns the table, directly or through a role."""
    rows: int
    """Estimated number of rows; -1 if unknown."""
    columns: tuple[PostgresColumn, ...]
    filenode: int = 0
    """File that stores the rows. Every rewrite changes it, including TRUNCATE and VACUUM FULL."""
    leaves: tuple[LeafPartition, ...] = ()
    """Partitions that hold rows, in order of oid."""

    @property
    def name(self) -> str:
        """Return the name of the table as an export."""
        return qualified_name(self.schema, self.table)

    @property
    def relation(self) -> str:
        """Return the FROM expression that selects only the table's own rows."""
        place = f"{quote_name(self.schema)}.{quote_name(self.table)}"
        return place if self.partitioned else f"ONLY {place}"

    @property
    def key(self) -> tuple[str, ...]:
        """Return the names of the key columns in order; empty if there is no key."""
        inside = sorted((each.key_place, each.name) for each in self.columns if each.key_place)
        return tuple(name for _, name in inside)


class PublicationInfo(msgspec.Struct, frozen=True):
    """A publication and the tables in it."""

    name: str
    owned: bool
    missing: tuple[str, ...]
    """Operations that it does not publish, of insert, update, delete and truncate."""
    tables: Mapping[str, tuple[str, ...]]
    """Published columns by table name; empty for all columns."""
    filtered: tuple[str, ...]
    """Tables with a row filter."""
    tokens: Mapping[int, str]
    """Token of each table's membership, by oid. It changes when the membership is altered or
    recreated. Oid 0 stands for the publication itself."""


class ReplicationSlot(msgspec.Struct, frozen=True):
    """A replication slot."""

    plugin: str
    database: str
    active_pid: int
    """Process of the server that reads it; 0 if none."""
    confirmed_lsn: int
    wal_status: str


class ServerHealth(msgspec.Struct, frozen=True):
    """State of the server's log and of a slot."""

    wal_lsn: int
    """End of the server's log."""
    slot: ReplicationSlot | None


async def tables(
    wire: PostgresConnection, names: Iterable[str] | None = None, oids: Iterable[int] | None = None
) -> dict[str, PostgresTable]:
    """Return the tables with these names or oids, keyed by their current names.

    If both are None, return all tables that the user may read. Partitions are not returned as
    tables of their own.
    """
    chosen = "has_table_privilege(c.oid, 'SELECT')"
    if oids is not None:
        chosen = f"c.oid IN ({listed_numbers(oids) or 'NULL'})"
    elif names is not None:
        pairs = (
            f"({quote_literal(schema)}, {quote_literal(table)})"
            for schema, table in map(split_name, names)
        )
        chosen = f"(n.nspname, c.relname) IN ({', '.join(pairs) or '(NULL, NULL)'})"
    rows = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident,"
        " row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE'), c.reltuples::bigint,"
        " c.relfilenode FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
        " AND n.nspname NOT IN ('pg_catalog', 'information_schema')"
        f" AND n.nspname !~ '^pg_(toast|temp)' AND {chosen}"
        " ORDER BY n.nspname <> 'public', 2, 3"
    )
    columns = await _columns(wire, [number_of(row[0]) for row in rows])
    leaves = await _leaves(wire, [number_of(row[0]) for row in rows if row[3] == "p"])
    found = [
        PostgresTable(
            oid=number_of(row[0]),
            schema=row[1] or "",
            table=row[2] or "",
            partitioned=row[3] == "p",
            permanent=row[4] == "p",
            identity=row[5] or "n",
            row_security=row[6] == "t",
            owned=row[7] == "t",
            rows=number_of(row[8]),
            columns=columns.get(number_of(row[0]), ()),
            filenode=number_of(row[9]),
            leaves=leaves.get(number_of(row[0]), ()),
        )
        for row in rows
    ]
    return {table.name: table for table in found}


_KEY: Final = (
    "SELECT string_to_array(i.indkey::text, ' ')::int2[] AS columns FROM pg_index i"
    " WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate"
    " AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END LIMIT 1"
)
"""Subquery that returns the numbers of the columns that identify rows of table ``c``."""


async def _columns(
    wire: PostgresConnection, oids: Sequence[int]
) -> dict[int, tuple[PostgresColumn, ...]]:
    if not oids:
        return {}
    rows = await wire.query(
        "SELECT a.attrelid, a.attname, a.attnum, a.atttypid, a.atttypmod, a.attnotnull,"
        " a.attgenerated <> '', has_column_privilege(a.attrelid, a.attnum, 'SELECT'),"
        " COALESCE(array_position(k.columns, a.attnum), 0), a.xmin"
        " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        f" LEFT JOIN LATERAL ({_KEY}) k ON true"
        f" WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attrelid IN ({listed_numbers(oids)})"
        " ORDER BY a.attrelid, a.attnum"
    )
    found: dict[int, list[PostgresColumn]] = {}
    for oid, name, number, kind, modifier, not_null, generated, readable, place, xid in rows:
        column = PostgresColumn(
            name=name or "",
            number=number_of(number),
            type_oid=number_of(kind),
            modifier=number_of(modifier),
            not_null=not_null == "t",
            generated=generated == "t",
            readable=readable == "t",
            key_place=number_of(place),
            changed_xid=number_of(xid),
        )
        found.setdefault(number_of(oid), []).append(column)
    return {oid: tuple(columns) for oid, columns in found.items()}


async def _leaves(
    wire: PostgresConnection, oids: Sequence[int]
) -> dict[int, tuple[LeafPartition, ...]]:
    """Return the partitions that hold rows, by oid of the root table."""
    if not oids:
        return {}
    # Uses catalog tables only: catalog functions would not see the transaction's snapshot.
    rows = await wire.query(
        "WITH RECURSIVE below(root, oid, attached) AS ("
        " SELECT i.inhparent, i.inhrelid, i.xmin FROM pg_inherits i"
        f" WHERE i.inhparent IN ({listed_numbers(oids)}) UNION ALL"
        # `age` compares transaction ids across wraparound. The latest attachment on the path
        # counts.
        " SELECT b.root, i.inhrelid, CASE WHEN age(i.xmin) < age(b.attached) THEN i.xmin"
        " ELSE b.attached END FROM below b JOIN pg_inherits i ON i.inhparent = b.oid)"
        " SELECT b.root, c.oid, n.nspname, c.relname, c.relkind, c.relpersistence,"
        " c.relreplident, c.relfilenode, b.attached, (SELECT json_agg(a.attname ORDER BY a.attnum)"
        " FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (k.columns))"
        " FROM below b JOIN pg_class c ON c.oid = b.oid"
        f" JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN LATERAL ({_KEY}) k ON true"
        " WHERE c.relkind <> 'p' ORDER BY c.oid"
    )
    found: dict[int, list[LeafPartition]] = {}
    for root, oid, schema, table, kind, persistence, identity, filenode, attached, key in rows:
        leaf = LeafPartition(
            oid=number_of(oid),
            relation=f"{quote_name(schema or '')}.{quote_name(table or '')}",
            kind=kind or "",
            permanent=persistence == "p",
            identity=identity or "n",
            key=msgspec.json.decode(key, type=tuple[str, ...]) if key else (),
            filenode=number_of(filenode),
            attached_xid=number_of(attached),
        )
        found.setdefault(number_of(root), []).append(leaf)
    return {root: tuple(leaves) for root, leaves in found.items()}


async def type_facts(wire: PostgresConnection, oids: Iterable[int]) -> dict[int, TypeFacts]:
    """Return the facts about these types and their component types, by oid."""
    wanted = sorted(set(oids))
    if not wanted:
        return {}
    # Joined by oid, which is indexed; typarray is not.
    element = "(SELECT e.oid FROM pg_type e WHERE e.oid = t.typelem AND e.typarray = t.oid)"
    multiple = wire.server_version >= _VERSION_WITH_MULTIRANGES
    ranges = "r.rngtypid, r.rngmultitypid" if multiple else "r.rngtypid"
    attributes = (
        "FROM pg_attribute a WHERE a.attrelid = t.typrelid AND t.typtype = 'c' AND a.attnum > 0"
        " AND NOT a.attisdropped"
    )
    rows = await wire.query(
        f"WITH RECURSIVE used(oid) AS (SELECT unnest(ARRAY[{listed_numbers(wanted)}]::oid[]) UNION"
        " SELECT below.oid FROM used u JOIN pg_type t ON t.oid = u.oid, LATERAL"
        f" (SELECT t.typbasetype UNION SELECT {element} UNION SELECT a.atttypid {attributes}"
        f" UNION SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN ({ranges}))"
        " below(oid) WHERE below.oid <> 0)"
        " SELECT t.oid, t.typname, t.typoutput::regproc::text, t.typbasetype, t.typtypmod,"
        f" COALESCE({element}, 0), t.typdelim,"
        " (SELECT json_agg(json_build_array(e.oid::bigint, e.enumlabel) ORDER BY e.oid)"
        " FROM pg_enum e WHERE e.enumtypid = t.oid),"
        " (SELECT json_agg(json_build_array(a.attnum, a.atttypid::bigint, a.atttypmod)"
        f" ORDER BY a.attnum) {attributes}),"
        f" (SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN ({ranges}))"
        " FROM used JOIN pg_type t USING (oid)"
    )
    found = [
        TypeFacts(
            oid=number_of(oid),
            name=name or "",
            output=output or "textout",
            base=number_of(base),
            base_modifier=number_of(modifier),
            element=number_of(inner),
            delimiter=delimiter or ",",
            labels=msgspec.json.decode(labels, type=tuple[tuple[int, str], ...]) if labels else (),
            attributes=_attributes(parts),
            range_of=number_of(below),
        )
        for oid, name, output, base, modifier, inner, delimiter, labels, parts, below in rows
    ]
    return {facts.oid: facts for facts in found}


def _attributes(text: str | None) -> tuple[tuple[int, int, int], ...]:
    return msgspec.json.decode(text, type=tuple[tuple[int, int, int], ...]) if text else ()


async def publication(wire: PostgresConnection, name: str) -> PublicationInfo | None:
    """Return a publication; None if it does not exist."""
    rows = await wire.query(
        "SELECT pg_has_role(pubowner, 'USAGE'), pubinsert, pubupdate, pubdelete, pubtruncate"
        f" FROM pg_publication WHERE pubname = {quote_literal(name)}"
    )
    if not rows:
        return None
    lists = wire.server_version >= VERSION_WITH_LISTS
    more = "array_to_json(attnames)::text, rowfilter" if lists else "NULL, NULL"
    listed = await wire.query(
        f"SELECT schemaname, tablename, {more} FROM pg_publication_tables"
        f" WHERE pubname = {quote_literal(name)}"
    )
    given: dict[str, tuple[str, ...]] = {}
    for schema, table, columns, _ in listed:
        given[qualified_name(schema or "", table or "")] = (
            tuple(msgspec.json.decode(columns, type=list[str])) if columns else ()
        )
    kinds = ("insert", "update", "delete", "truncate")
    return PublicationInfo(
        name=name,
        owned=rows[0][0] == "t",
        missing=tuple(kind for kind, on in zip(kinds, rows[0][1:], strict=True) if on != "t"),
        tables=given,
        filtered=tuple(
            qualified_name(schema or "", table or "")
            for schema, table, _, condition in listed
            if condition
        ),
        tokens=await _memberships(wire, name),
    )


async def _memberships(wire: PostgresConnection, publication: str) -> dict[int, str]:
    """Return a token of each table's membership, by oid: the catalog rows of the publication, and
    of the table or schema in it."""
    whole = f"SELECT oid, xmin FROM pg_publication WHERE pubname = {quote_literal(publication)}"
    parts = "SELECT prrelid AS table, oid AS part FROM pg_publication_rel WHERE prpubid = p.oid"
    if wire.server_version >= VERSION_WITH_LISTS:
        parts += (
            " UNION ALL SELECT c.oid, s.oid FROM pg_publication_namespace s"
            " JOIN pg_class c ON c.relnamespace = s.pnnspid WHERE s.pnpubid = p.oid"
            " AND c.relkind IN ('r', 'p')"
        )
    rows = await wire.query(
        "SELECT r.table, concat_ws(' ', p.oid, p.xmin, string_agg(r.part::text, ' ' ORDER BY"
        f" r.part)) FROM ({whole}) p CROSS JOIN LATERAL ({parts}) r GROUP BY 1, p.oid, p.xmin"
        f" UNION ALL SELECT 0, concat_ws(' ', p.oid, p.xmin) FROM ({whole}) p"
    )
    return {number_of(table): token or "" for table, token in rows}


async def sender_timeout_ms(wire: PostgresConnection) -> int:
    """Return the time without feedback after which the server ends a replication connection, in ms;
    0 if never."""
    rows = await wire.query("SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return number_of(rows[0][0])


async def health(wire: PostgresConnection, slot: str) -> ServerHealth:
    """Return the end of the server's log, and the state of the slot."""
    rows = await wire.query(
        "SELECT pg_current_wal_flush_lsn(), s.plugin, s.database, s.active_pid,"
        " s.confirmed_flush_lsn, s.wal_status FROM (SELECT) AS one"
        # The outer join returns a row even if the slot does not exist, because the end of the log
        # is needed anyway.
        f" LEFT JOIN pg_replication_slots s ON s.slot_name = {quote_literal(slot)}"
    )
    lsn, plugin, database, process, confirmed, status = rows[0]
    found = None
    if database is not None or plugin is not None:
        found = ReplicationSlot(
            plugin=plugin or "",
            database=database or "",
            active_pid=number_of(process),
            confirmed_lsn=parse_lsn(confirmed) if confirmed else 0,
            wal_status=status or "",
        )
    return ServerHealth(parse_lsn(str(lsn)), found)


def listed_numbers(numbers: Iterable[int]) -> str:
    """Return the numbers as a comma-separated list for SQL."""
    return ", ".join(map(str, numbers))


def number_of(text: str | None) -> int:
    """Parse a number in a query's result; NULL becomes 0."""
    return int(text or 0)


# -- Exports of PostgreSQL tables, and the reasons why a table cannot be ingested. Pure ------------


def export_of(
    table: PostgresTable, leave_out: Sequence[str], types: Mapping[int, TypeFacts], numeric: str
) -> SourceExport:
    """Return the table as an export, without the columns to leave out and without generated
    columns.

    Raises `InvalidUsage`, with all reasons why the table cannot be ingested and what to do.
    """
    name = f"{quote_name(table.schema)}.{quote_name(table.table)}"
    absent = sorted(set(leave_out) - {column.name for column in table.columns})
    if absent:
        raise InvalidUsage(f"{table.name} has no columns {', '.join(absent)} to leave out")
    if not table.permanent:
        raise InvalidUsage(f"{table.name} is unlogged: run ALTER TABLE {name} SET LOGGED")
    check_row_security(table)
    # Logical replication does not send generated columns.
    columns = [
        column for column in table.columns if column.name not in leave_out and not column.generated
    ]
    hidden = [column.name for column in columns if not column.readable]
    if hidden:
        raise InvalidUsage(
            f"no permission to read {', '.join(hidden)} of {table.name}: GRANT SELECT ON {name} "
            "(and USAGE on the schema) to the user, or leave these columns out"
        )
    if not columns:
        raise InvalidUsage(f"{table.name} has no columns to ingest")
    here = local_column_names(
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
    # A key must find rows again, but floats and arrays have no exact equality.
    unfit = [name for name in kept if _is_no_key(held[name].type)]
    if table.identity != "f":
        _check_identity(table, name, kept, unfit)
    for leaf in table.leaves:
        if wrong := leaf_fault(table, leaf):
            raise InvalidUsage(f"{table.name}: {wrong}")
    key = () if unfit else tuple(held[name].name for name in kept)
    return SourceExport(table.name, TableSchema(tuple(held.values()), key), table=table.table)


def check_row_security(table: PostgresTable) -> None:
    """Raise `InvalidUsage` if row security policies may hide rows from the user."""
    if table.row_security:
        raise InvalidUsage(
            f"row security hides rows of {table.name} from the user: run ALTER ROLE … BYPASSRLS"
        )


def added_column(
    table: PostgresTable,
    taken: Collection[int],
    column: TableColumn,
    types: Mapping[int, TypeFacts],
) -> PostgresColumn:
    """Return the upstream column that fills a column added to the export.

    `taken` are the numbers of the columns that the export already has. Raises `InvalidUsage`.
    """
    free = [each for each in table.columns if each.number not in taken and not each.generated]
    (number,) = numbers_of((column.name,), [(each.number, each.name) for each in free])
    found = next((each for each in free if each.number == number), None)
    if found is None:
        others = ", ".join(each.name for each in free) or "none"
        raise InvalidUsage(
            f"{table.name} has no upstream column {column.name} that is not yet ingested "
            f"(available: {others}): add it there first, or drop the table from the source and add "
            "it again"
        )
    if not found.readable:
        raise InvalidUsage(
            f"no permission to read {found.name} of {table.name}: GRANT SELECT on it to the user, "
            "and try again"
        )
    held = numeric_held_by(column.type)
    there = column_type(found.type_oid, found.modifier, types, held).spark
    there = there.replace(UNBOUNDED, "decimal(38,18)")
    # CHAR and VARCHAR with a length are text, too, but would restrict PostgreSQL's values.
    sized = column.type.lower().startswith(("char", "varchar"))
    if sized or arrow_type(there) != arrow_type(column.type):
        raise InvalidUsage(
            f"column {column.name} of {table.name} has type {there}, not {column.type}: use ADD "
            f"COLUMN {column.name} {there}"
        )
    return found


def _is_no_key(spark: str) -> bool:
    """Return whether values of this type have no exact equality."""
    return spark in ("float", "double") or spark.startswith("array<")


def _check_identity(
    table: PostgresTable, name: str, kept: Sequence[str], unfit: Sequence[str]
) -> None:
    """Raise `InvalidUsage` if the table's replica identity does not identify the ingested rows."""
    full = f"ALTER TABLE {name} REPLICA IDENTITY FULL"
    if table.identity == "n" or not table.key:
        raise InvalidUsage(
            f"{table.name} has no replica identity: add a PRIMARY KEY, or run {full}"
        )
    if not kept:
        raise InvalidUsage(
            f"the key of {table.name} ({', '.join(table.key)}) is left out: ingest these columns, "
            f"too, or run {full}"
        )
    if unfit:
        raise InvalidUsage(
            f"the key of {table.name} contains {', '.join(unfit)}, whose type has no exact "
            f"equality: run {full}"
        )


def leaf_fault(table: PostgresTable, leaf: LeafPartition) -> str:
    """Return why a partition's changes do not arrive as changes of its table, and what to do; "" if
    they do."""
    if leaf.kind != "r":
        return (
            f"partition {leaf.relation} is a foreign table: its changes are not in this server's "
            "log"
        )
    if not leaf.permanent:
        return f"partition {leaf.relation} is unlogged: run ALTER TABLE {leaf.relation} SET LOGGED"
    if leaf.identity == "f" or leaf.identity == "n":
        return ""  # without an identity the server rejects updates and deletes
    # Each partition has a replica identity of its own, which is the one that the server uses.
    if table.identity == "f" or set(leaf.key) != set(table.key):
        identity = f"({', '.join(leaf.key)})" if leaf.key else "nothing"
        return (
            f"the replica identity of partition {leaf.relation} is {identity}, unlike its table's: "
            f"run ALTER TABLE {leaf.relation} REPLICA IDENTITY FULL"
        )
    return ""


def check_published(found: PublicationInfo, export: SourceExport, table: PostgresTable) -> None:
    """Raise `InvalidUsage` if the publication covers only part of an export."""
    if found.missing:
        raise InvalidUsage(
            f"publication {found.name} does not publish {', '.join(found.missing)}: run ALTER "
            f"PUBLICATION {quote_name(found.name)} SET (publish = 'insert, update, delete, "
            "truncate')"
        )
    columns = found.tables.get(export.name, ())
    taken = {each.name for each in bound_columns(table, export) if each is not None}
    absent = sorted(taken - set(columns)) if columns else []
    if absent:
        raise InvalidUsage(
            f"publication {found.name} does not publish {', '.join(absent)} of {export.name}: add "
            "them to its column list, or leave them out of the source"
        )
    if export.name in found.filtered:
        raise InvalidUsage(
            f"publication {found.name} filters the rows of {export.name} (WHERE): remove the "
            "filter, and put the condition into a view here"
        )


def bound_columns(table: PostgresTable, export: SourceExport) -> tuple[PostgresColumn | None, ...]:
    """Return the upstream column of each of the export's columns; None where there is none."""
    by_number = {column.number: column for column in table.columns}
    pairs = [(column.number, column.name) for column in table.columns]
    return tuple(by_number.get(number) for number in numbers_of(export.schema.names, pairs))
