"""What the server says of itself, its tables, publication and slot; and what is wrong with them.

Every query is a simple one with names in it (`literal`), so that it also runs on a connection for
replication. Nothing here changes anything on the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.errors import InvalidUsage
from actors.plan.schema import Column, Schema
from actors.sources.postgres_types import TypeFacts, column_type
from actors.sources.postgres_wire import Wire, identifier, literal
from actors.sources.source import Export

VERSION_MIN: Final = 130_000
_VERSION_WITH_LISTS: Final = 150_000
"""From here on publications may name columns and filter rows."""


class TableColumn(msgspec.Struct, frozen=True):
    """One column."""

    name: str
    number: int
    type_oid: int
    modifier: int
    not_null: bool
    generated: bool
    readable: bool
    key_place: int
    """In the key that tells rows apart (from 1); 0: not in it."""


class Table(msgspec.Struct, frozen=True):
    """One table."""

    oid: int
    schema: str
    table: str
    partitioned: bool
    permanent: bool
    identity: str
    """``d``, ``i``, ``f`` or ``n``."""
    row_security: bool
    owned: bool
    """By the user, or by a role that it is in."""
    rows: int
    """About; -1: not known."""
    columns: tuple[TableColumn, ...]

    @property
    def name(self) -> str:
        """As exports are named."""
        return f"{self.schema}.{self.table}"

    @property
    def relation(self) -> str:
        """As SQL's FROM names exactly its own rows."""
        place = f"{identifier(self.schema)}.{identifier(self.table)}"
        return place if self.partitioned else f"ONLY {place}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the columns that tell rows apart; empty: none do."""
        inside = sorted((each.key_place, each.name) for each in self.columns if each.key_place)
        return tuple(name for _, name in inside)


class Publication(msgspec.Struct, frozen=True):
    """What a publication gives."""

    owned: bool
    all_tables: bool
    missing: tuple[str, ...]
    """Of insert, update, delete, truncate: what it leaves out."""
    tables: Mapping[str, tuple[str, ...]]
    """Name of each table, with its columns (empty: all)."""
    filtered: tuple[str, ...]
    """Tables of which it gives some rows only."""


class Slot(msgspec.Struct, frozen=True):
    """A replication slot."""

    plugin: str
    database: str
    active_pid: int
    """0: nobody reads it."""
    confirmed_lsn: int
    wal_status: str


class Health(msgspec.Struct, frozen=True):
    """What is asked from time to time."""

    wal_lsn: int
    """Where the server's log ends."""
    slot: Slot | None


def lsn_of(text: str | None) -> int:
    """A position as a number: ``16/B374D848``; 0 for None."""
    if not text:
        return 0
    high, low = text.split("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    """A position as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


async def tables(wire: Wire, names: Iterable[str] | None = None) -> dict[str, Table]:
    """Tables of that name, with their schemas; None: all that the user may read. Partitions of a
    partitioned table are no tables of their own."""
    chosen = "has_table_privilege(c.oid, 'SELECT')"
    if names is not None:
        listed = ", ".join(literal(name) for name in names) or "NULL"
        chosen = f"n.nspname || '.' || c.relname IN ({listed})"
    rows = await wire.query(
        "SELECT c.oid, n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident,"
        " row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE'), c.reltuples::bigint"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
        " AND n.nspname NOT IN ('pg_catalog', 'information_schema')"
        f" AND n.nspname !~ '^pg_(toast|temp)' AND {chosen} ORDER BY 2, 3"
    )
    columns = await _columns(wire, [_number(row[0]) for row in rows])
    found = [
        Table(
            oid=_number(row[0]),
            schema=row[1] or "",
            table=row[2] or "",
            partitioned=row[3] == "p",
            permanent=row[4] == "p",
            identity=row[5] or "n",
            row_security=row[6] == "t",
            owned=row[7] == "t",
            rows=_number(row[8]),
            columns=columns.get(_number(row[0]), ()),
        )
        for row in rows
    ]
    return {table.name: table for table in found}


async def _columns(wire: Wire, oids: Sequence[int]) -> dict[int, tuple[TableColumn, ...]]:
    if not oids:
        return {}
    rows = await wire.query(
        "SELECT a.attrelid, a.attname, a.attnum, a.atttypid, a.atttypmod, a.attnotnull,"
        " a.attgenerated <> '', has_column_privilege(a.attrelid, a.attnum, 'SELECT'),"
        " COALESCE(array_position(k.columns, a.attnum), 0)"
        " FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " LEFT JOIN LATERAL (SELECT string_to_array(i.indkey::text, ' ')::int2[] AS columns"
        " FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate"
        " AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END"
        " LIMIT 1) k ON true"
        f" WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attrelid IN ({_listed(oids)})"
        " ORDER BY a.attrelid, a.attnum"
    )
    found: dict[int, list[TableColumn]] = {}
    for oid, name, number, kind, modifier, not_null, generated, readable, place in rows:
        column = TableColumn(
            name=name or "",
            number=_number(number),
            type_oid=_number(kind),
            modifier=_number(modifier),
            not_null=not_null == "t",
            generated=generated == "t",
            readable=readable == "t",
            key_place=_number(place),
        )
        found.setdefault(_number(oid), []).append(column)
    return {oid: tuple(columns) for oid, columns in found.items()}


async def type_facts(wire: Wire, oids: Iterable[int]) -> dict[int, TypeFacts]:
    """Of these types, and of those that they are made of."""
    wanted = sorted(set(oids))
    if not wanted:
        return {}
    element = "(SELECT e.oid FROM pg_catalog.pg_type e WHERE e.typarray = t.oid)"
    rows = await wire.query(
        f"WITH RECURSIVE used(oid) AS (SELECT unnest(ARRAY[{_listed(wanted)}]::oid[]) UNION"
        " SELECT below.oid FROM used u JOIN pg_type t ON t.oid = u.oid,"
        f" LATERAL (VALUES (t.typbasetype), ({element})) below(oid) WHERE below.oid <> 0)"
        " SELECT t.oid, t.typname, t.typoutput::regproc::text, t.typbasetype, t.typtypmod,"
        f" COALESCE({element}, 0), t.typdelim FROM used JOIN pg_type t USING (oid)"
    )
    found = [
        TypeFacts(
            oid=_number(oid),
            name=name or "",
            output=output or "textout",
            base=_number(base),
            base_modifier=_number(modifier),
            element=_number(inner),
            delimiter=delimiter or ",",
        )
        for oid, name, output, base, modifier, inner, delimiter in rows
    ]
    return {facts.oid: facts for facts in found}


async def publication(wire: Wire, name: str) -> Publication | None:
    """None: there is none."""
    rows = await wire.query(
        "SELECT pg_has_role(pubowner, 'USAGE'), puballtables, pubinsert, pubupdate, pubdelete,"
        f" pubtruncate FROM pg_publication WHERE pubname = {literal(name)}"
    )
    if not rows:
        return None
    lists = wire.server_version >= _VERSION_WITH_LISTS
    more = "array_to_json(attnames)::text, rowfilter" if lists else "NULL, NULL"
    listed = await wire.query(
        f"SELECT schemaname || '.' || tablename, {more} FROM pg_publication_tables"
        f" WHERE pubname = {literal(name)}"
    )
    given: dict[str, tuple[str, ...]] = {}
    for table, columns, _ in listed:
        given[table or ""] = tuple(msgspec.json.decode(columns, type=list[str])) if columns else ()
    kinds = ("insert", "update", "delete", "truncate")
    return Publication(
        owned=rows[0][0] == "t",
        all_tables=rows[0][1] == "t",
        missing=tuple(kind for kind, on in zip(kinds, rows[0][2:], strict=True) if on != "t"),
        tables=given,
        filtered=tuple(table or "" for table, _, condition in listed if condition),
    )


async def sender_timeout_ms(wire: Wire) -> int:
    """After so long without a word of ours the server ends a replication; 0: never."""
    rows = await wire.query("SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return _number(rows[0][0])


async def health(wire: Wire, slot: str) -> Health:
    """Where the log ends, and how the slot is."""
    rows = await wire.query(
        "SELECT pg_current_wal_flush_lsn(), s.plugin, s.database, s.active_pid,"
        " s.confirmed_flush_lsn, s.wal_status FROM (SELECT) AS one"
        f" LEFT JOIN pg_replication_slots s ON s.slot_name = {literal(slot)}"
    )
    lsn, plugin, database, process, confirmed, status = rows[0]
    found = None
    if database is not None or plugin is not None:
        found = Slot(
            plugin=plugin or "",
            database=database or "",
            active_pid=_number(process),
            confirmed_lsn=lsn_of(confirmed),
            wal_status=status or "",
        )
    return Health(lsn_of(lsn), found)


def export_of(
    table: Table, leave_out: Sequence[str], types: Mapping[int, TypeFacts], numeric: str
) -> Export:
    """The table as an export, without these columns and generated ones. Raises `InvalidUsage`:
    everything that is wrong with it, and what to do."""
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
    kept = {column.name for column in columns}
    key = table.key if set(table.key) <= kept else ()
    if table.identity != "f":
        advice = (
            f"give it a PRIMARY KEY, or ALTER TABLE {name} REPLICA IDENTITY FULL"
            if not table.key
            else f"take these columns too, or ALTER TABLE {name} REPLICA IDENTITY FULL"
        )
        if table.identity == "n" or not table.key:
            raise InvalidUsage(f"nothing tells rows of {table.name} apart: {advice}")
        if not key:
            raise InvalidUsage(
                f"the key of {table.name} ({', '.join(table.key)}) is left out: {advice}"
            )
    held = tuple(
        Column(
            column.name,
            column_type(column.type_oid, column.modifier, types, numeric).spark,
            nullable=not column.not_null,
        )
        for column in columns
    )
    return Export(table.name, Schema(held, key))


def check_published(found: Publication, name: str, exports: Sequence[Export]) -> list[Export]:
    """Those of the exports that the publication does not give yet. Raises `InvalidUsage` when it
    gives others only in part."""
    if found.missing:
        raise InvalidUsage(
            f"publication {name} leaves out {', '.join(found.missing)}: ALTER PUBLICATION"
            f" {identifier(name)} SET (publish = 'insert, update, delete, truncate')"
        )
    for export in exports:
        columns = found.tables.get(export.name, ())
        absent = sorted(set(export.schema.names) - set(columns)) if columns else []
        if absent:
            raise InvalidUsage(
                f"publication {name} leaves out {', '.join(absent)} of {export.name}: add them to"
                " its list of columns, or leave them out here"
            )
        if export.name in found.filtered:
            raise InvalidUsage(
                f"publication {name} gives some rows of {export.name} only (WHERE): take the"
                " condition away, and put it into a view here"
            )
    return [export for export in exports if export.name not in found.tables]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _number(text: str | None) -> int:
    return int(text or 0)
