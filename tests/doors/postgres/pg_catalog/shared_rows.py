"""The rows that a live PostgreSQL and the data file share, whichever minor releases they are of.

A minor release may add functions, types, operators or casts to a new cluster, remove some, and
correct others. Answers over them can be compared only where both catalogs hold the same rows.
`keep_shared_rows` deletes from the live server, which is the test's own, the rows that the file
lacks, and returns the file's catalog without the rows that the server lacks. If the two are of
different versions, it takes over what the server's has corrected.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import psycopg

from actors.doors.postgres.pg_catalog import catalog_database
from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog, SystemRows
from actors.doors.postgres.pg_catalog.catalog_queries import CatalogQueries

KEYS: Mapping[str, tuple[str, ...]] = {
    "pg_aggregate": ("aggfnoid",),
    "pg_cast": ("castsource", "casttarget"),
    "pg_language": ("lanname",),
    "pg_opclass": ("opcmethod", "opcname", "opcnamespace"),
    "pg_operator": ("oid",),
    "pg_opfamily": ("opfmethod", "opfname", "opfnamespace"),
    "pg_proc": ("proname", "proargtypes", "pronamespace"),
    "pg_range": ("rngtypid",),
    "pg_ts_config": ("cfgname",),
    "pg_ts_dict": ("dictname",),
    "pg_ts_parser": ("prsname",),
    "pg_ts_template": ("tmplname",),
    "pg_type": ("typname", "typnamespace"),
}
"""Tables that a minor release may change, and the columns of their keys. All releases of a major
version have the same system relations. The first column of each table is an OID."""
ASSIGNED_OID_MIN = 10_000
"""PostgreSQL assigns OIDs from here on when a cluster is made, so that releases may differ."""
USER_OID_MIN = 16_384
"""The smallest OID of an object that a user has made."""

Record: TypeAlias = dict[str, Any]
Records: TypeAlias = dict[tuple[Any, ...], Record]


def live_version(connection: psycopg.Connection[Any]) -> str:
    """Return the server's version in the data file's form."""
    ((version,),) = connection.execute("SHOW server_version").fetchall()
    return str(version).split()[0]


def live_records(connection: psycopg.Connection[Any], table: str) -> Records:
    """Return the system's rows of a table by key, with values in the data file's form."""
    # By the program that has written the data file; mypy knows it by another name.
    dump = importlib.import_module("tests.proof.dump_pg_catalog")
    rows = dump.read_rows(connection, table, dump.TABLES[table])
    found = by_key(table, msgspec.convert(rows, SystemRows))
    return {key: row for key, row in found.items() if oid_of(row) < USER_OID_MIN}


def by_key(table: str, rows: SystemRows) -> Records:
    """Return a table's rows by key."""
    return {tuple(comparable(row[name]) for name in KEYS[table]): row for row in rows.records()}


def oid_of(row: Record) -> int:
    """Return the OID that a row begins with."""
    oid: int = next(iter(row.values()))
    return oid


def comparable(value: Any) -> Any:
    """Return a value as both sides have it: OIDs that the server assigned are all alike."""
    if isinstance(value, list):
        return tuple(comparable(each) for each in value)
    return "assigned" if isinstance(value, int) and value >= ASSIGNED_OID_MIN else value


def corrected_row(kept: Record, live: Record) -> Record:
    """Return a row of the file with the values that the server's version has corrected."""
    changed = (name for name in kept if comparable(kept[name]) != comparable(live[name]))
    return kept | {name: live[name] for name in changed}


def table_of(records: Sequence[Record], columns: Iterable[str]) -> SystemRows:
    """Return rows in the data file's form."""
    return SystemRows(len(records), {name: [row[name] for row in records] for name in columns})


def change_live(connection: psycopg.Connection[Any], statement: str) -> None:
    """Run a statement that changes one row of a system table of the live server."""
    connection.execute("SET LOCAL allow_system_table_mods = on")
    assert connection.execute(statement.encode()).rowcount == 1, statement


def delete_live_rows(
    connection: psycopg.Connection[Any], table: str, rows: Iterable[Record]
) -> None:
    """Delete rows of a system table of the live server."""
    for row in rows:
        change_live(connection, f"DELETE FROM {table} WHERE {next(iter(row))}::oid = {oid_of(row)}")


def keep_shared_rows(connection: psycopg.Connection[Any], catalog: SystemCatalog) -> SystemCatalog:
    """Delete from the live server the system's rows that the file's catalog lacks, and return the
    catalog without the rows that the server lacks. The connection is in a transaction."""
    same_version = live_version(connection) == catalog.version
    rows = dict(catalog.rows)
    for table in KEYS:
        live, kept = live_records(connection, table), by_key(table, rows[table])
        delete_live_rows(connection, table, (live[key] for key in live.keys() - kept.keys()))
        # Rows of one version must be equal, which the answers over them show.
        left = [
            row if same_version else corrected_row(row, live[key])
            for key, row in kept.items()
            if key in live
        ]
        rows[table] = table_of(left, rows[table].columns)
    return msgspec.structs.replace(catalog, rows=rows)


def queries_over(catalog: SystemCatalog, patch: Any) -> CatalogQueries:
    """Return queries that answer over this catalog."""
    patch.setattr(catalog_database, "load_system_catalog", lambda: catalog)
    return CatalogQueries()


# -- another minor release, made up ----------------------------------------------------------------


@dataclass(frozen=True)
class MinorChange:
    """The changes of a made-up minor release in one system table; rows are named by their keys."""

    table: str
    removed: tuple[tuple[Any, ...], ...]
    copied: tuple[Any, ...]
    """A row that is there a second time, with the values of `added`."""
    added: Mapping[str, Any]
    corrected: tuple[Any, ...]
    """A row that has the values of `values`."""
    values: Mapping[str, Any]


PG_CATALOG = 11
ANYARRAY, ANYCOMPATIBLE, ANYCOMPATIBLEARRAY, INT4, TEXT, CIDR, INET, XML = (
    (2277,),
    5077,
    5078,
    23,
    25,
    650,
    869,
    142,
)
EARLIER = {"server_version": "15.0", "server_version_num": "150000"}
SERVER_CHANGES = (
    MinorChange(
        "pg_proc",
        removed=(("array_ndims", ANYARRAY, PG_CATALOG),),
        copied=("array_append", (ANYCOMPATIBLEARRAY, ANYCOMPATIBLE), PG_CATALOG),
        added={"oid": 9_901, "proname": "array_of_a_later_minor"},
        corrected=("array_length", (*ANYARRAY, INT4), PG_CATALOG),
        values={"provolatile": "v"},
    ),
    MinorChange(
        "pg_type",
        removed=(("_pg_snapshot", PG_CATALOG),),
        copied=("macaddr", PG_CATALOG),
        added={"oid": 9_902, "typname": "type_of_a_later_minor"},
        corrected=("circle", PG_CATALOG),
        values={"typdelim": ";"},
    ),
    MinorChange(
        "pg_operator",
        removed=((3_629,),),
        copied=(3_677,),
        added={"oid": 9_903, "oprleft": 9_902},
        corrected=(1_220,),
        values={"oprcanhash": 0},
    ),
    MinorChange(
        "pg_cast",
        removed=((CIDR, TEXT),),
        copied=(INET, TEXT),
        added={"oid": 9_904, "castsource": 9_902},
        corrected=(CIDR, INET),
        values={"castcontext": "a"},
    ),
)
FILE_CHANGES = (
    MinorChange(
        "pg_proc",
        removed=(
            ("array_dims", ANYARRAY, PG_CATALOG),
            ("array_positions", (ANYCOMPATIBLEARRAY, ANYCOMPATIBLE), PG_CATALOG),
        ),
        copied=("array_append", (ANYCOMPATIBLEARRAY, ANYCOMPATIBLE), PG_CATALOG),
        added={"oid": 9_911, "proname": "array_of_an_earlier_minor"},
        corrected=("array_lower", (*ANYARRAY, INT4), PG_CATALOG),
        values={"provolatile": "v"},
    ),
    MinorChange(
        "pg_type",
        removed=(("_txid_snapshot", PG_CATALOG), ("_pg_lsn", PG_CATALOG)),
        copied=("macaddr", PG_CATALOG),
        added={"oid": 9_912, "typname": "type_of_an_earlier_minor"},
        corrected=("line", PG_CATALOG),
        values={"typdelim": ";"},
    ),
    MinorChange(
        "pg_operator",
        removed=((3_362,), (3_222,)),
        copied=(3_677,),
        added={"oid": 9_913, "oprleft": 9_912},
        corrected=(1_222,),
        values={"oprcanhash": 1},
    ),
    MinorChange(
        "pg_cast",
        removed=((INET, TEXT), (XML, 1_043)),
        copied=(XML, TEXT),
        added={"oid": 9_914, "castsource": 9_912},
        corrected=(XML, 1_042),
        values={"castcontext": "e"},
    ),
)
"""The corpus asks for rows of each of these tables."""


def alter_live(connection: psycopg.Connection[Any]) -> None:
    """Make the live server's catalogs those of a later minor release. The connection is in a
    transaction."""
    for change in SERVER_CHANGES:
        table, records = change.table, live_records(connection, change.table)
        delete_live_rows(connection, table, (records[key] for key in change.removed))
        columns = connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
            " ORDER BY attnum",
            (table,),
        ).fetchall()
        fields = ", ".join(literal(change.added.get(name)) or name for (name,) in columns)
        source = oid_of(records[change.copied])
        insert = f"INSERT INTO {table} SELECT {fields} FROM {table} WHERE oid = {source}"
        change_live(connection, insert)
        values = ", ".join(f"{name} = {literal(value)}" for name, value in change.values.items())
        corrected = oid_of(records[change.corrected])
        change_live(connection, f"UPDATE {table} SET {values} WHERE oid = {corrected}")


def literal(value: Any) -> str:
    """Return a value as SQL takes it for a column of any type; "" for None."""
    return "" if value is None else f"'{value}'"


def alter_catalog(catalog: SystemCatalog) -> SystemCatalog:
    """Return the catalog of an earlier minor release, of another version."""
    rows = dict(catalog.rows)
    for change in FILE_CHANGES:
        records = by_key(change.table, rows[change.table])
        records[change.corrected].update(change.values)
        added = {**records[change.copied], **change.added}
        for key in change.removed:
            del records[key]
        rows[change.table] = table_of([*records.values(), added], rows[change.table].columns)
    settings = [
        row | {"setting": EARLIER[row["name"]]} if row["name"] in EARLIER else row
        for row in rows["pg_settings"].records()
    ]
    rows["pg_settings"] = table_of(settings, rows["pg_settings"].columns)
    return msgspec.structs.replace(catalog, rows=rows, version=EARLIER["server_version"])
