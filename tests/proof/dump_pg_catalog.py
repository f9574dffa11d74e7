"""Write `src/actors/doors/postgres/pg_catalog/postgres_15.json.gz` from a real PostgreSQL 15 on
this machine.

    python tests/proof/dump_pg_catalog.py [FILE]

Only what clients ask for is written: see `TABLES` and `LEFT_OUT`. What depends on the machine
(its locales, its settings' values, sizes) is left out or replaced by PostgreSQL's defaults.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from actors.doors.postgres.pg_catalog.catalog_data import DATA_FILE, pack_column
from actors.testing.postgres_server import PostgresServer, postgres_server

MAJOR = 15
TABLES: dict[str, str] = {
    "pg_aggregate": "true",
    "pg_am": "true",
    "pg_auth_members": "true",
    "pg_authid": "oid <> 10",
    "pg_cast": "true",
    "pg_class": "relnamespace::regnamespace::text in "
    "('pg_catalog', 'information_schema', 'pg_toast')",
    # Others are the machine's locales.
    "pg_collation": "collprovider in ('d', 'c') and collname in ('default', 'C', 'POSIX')",
    "pg_constraint": "true",
    # Of functions and operators there are thousands, and no client reads them.
    "pg_description": "classoid::regclass::text in ('pg_class', 'pg_type', 'pg_namespace', "
    "'pg_am', 'pg_language', 'pg_extension', 'pg_collation')",
    "pg_extension": "true",
    "pg_index": "true",
    "pg_language": "true",
    "pg_namespace": "nspname not like 'pg_temp%' and nspname not like 'pg_toast_temp%'",
    "pg_opclass": "true",
    "pg_operator": "true",
    "pg_opfamily": "true",
    "pg_proc": "true",
    "pg_range": "true",
    "pg_tablespace": "true",
    "pg_ts_config": "true",
    "pg_ts_dict": "true",
    "pg_ts_parser": "true",
    "pg_ts_template": "true",
    "pg_type": "true",
}
"""The tables whose rows are written, and which."""
LEFT_OUT: dict[str, frozenset[str]] = {
    # Source texts, node trees and planner hints: long, and shown by no client's query.
    "pg_proc": frozenset({"probin", "prosqlbody", "prosrc", "proargdefaults", "prosupport"}),
    "pg_type": frozenset({"typdefaultbin"}),
    "pg_class": frozenset({"relpages", "reltuples", "relallvisible", "relfrozenxid", "relacl"}),
    "pg_collation": frozenset({"collversion"}),
    "pg_aggregate": frozenset(
        {"aggserialfn", "aggdeserialfn", "agginitval", "aggminitval", "aggmfinalfn"}
    ),
}
SETTINGS_LEFT_OUT = frozenset({"extra_desc", "sourcefile", "sourceline", "pending_restart"})
VIEWS = (
    "pg_catalog.pg_group",
    "pg_catalog.pg_indexes",
    "pg_catalog.pg_matviews",
    "pg_catalog.pg_policies",
    "pg_catalog.pg_publication_tables",
    "pg_catalog.pg_roles",
    "pg_catalog.pg_rules",
    "pg_catalog.pg_sequences",
    "pg_catalog.pg_shadow",
    "pg_catalog.pg_stat_all_indexes",
    "pg_catalog.pg_stat_all_tables",
    "pg_catalog.pg_stat_database",
    "pg_catalog.pg_stat_sys_indexes",
    "pg_catalog.pg_stat_sys_tables",
    "pg_catalog.pg_stat_user_indexes",
    "pg_catalog.pg_stat_user_tables",
    "pg_catalog.pg_stat_xact_all_tables",
    "pg_catalog.pg_stat_xact_user_tables",
    "pg_catalog.pg_statio_all_indexes",
    "pg_catalog.pg_statio_all_tables",
    "pg_catalog.pg_statio_user_indexes",
    "pg_catalog.pg_statio_user_tables",
    "pg_catalog.pg_tables",
    "pg_catalog.pg_user",
    "pg_catalog.pg_user_mappings",
    "pg_catalog.pg_views",
)
"""System views whose own definition answers them; of `information_schema` all are taken."""


def value_of(column: str, type_name: str) -> str:
    """Return the expression that reads a column as JSON has it."""
    quoted = f't."{column}"'
    if type_name in ("pg_node_tree", "anyarray", "bytea"):
        return "null"
    if type_name == "bool":
        return f"{quoted}::int"
    if type_name in ("oid", "regproc", "xid"):
        return f"{quoted}::oid::int8" if type_name != "xid" else f"{quoted}::text::int8"
    if type_name in ("int2vector", "oidvector"):
        return f"string_to_array({quoted}::text, ' ')::int8[]"
    if type_name in ("_oid", "_int2", "_regtype"):
        return f"{quoted}::text::int8[]"
    if type_name.startswith("_"):
        return f"{quoted}::text::text[]"
    if type_name in ("int2", "int4", "int8"):
        return quoted
    return f"{quoted}::float8" if type_name == "float4" else f"{quoted}::text"


def read_rows(connection: psycopg.Connection[Any], table: str, where: str) -> dict[str, Any]:
    """Return a table's rows, packed column by column."""
    columns = connection.execute(
        "select attname, typname from pg_attribute join pg_type on pg_type.oid = atttypid"
        " where attrelid = %s::regclass and attnum > 0 order by attnum",
        (table,),
    ).fetchall()
    kept = [(name, kind) for name, kind in columns if name not in LEFT_OUT.get(table, frozenset())]
    fields = ", ".join(f'{value_of(name, kind)} as "{name}"' for name, kind in kept)
    first = "oid" if any(name == "oid" for name, _ in kept) else "1, 2"
    query = f"select {fields} from {table} t where {where} order by {first}"
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(query).fetchall()
    return {
        "count": len(rows),
        "columns": {name: pack_column([row[name] for row in rows]) for name, _ in kept},
    }


def read_settings(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return `pg_settings` with PostgreSQL's defaults in place of this machine's values."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            "select name, case when context = 'internal' then setting else boot_val end as"
            " setting, unit, category, short_desc, context, vartype, 'default' as source, min_val,"
            " max_val, enumvals, boot_val, boot_val as reset_val from pg_settings order by name"
        ).fetchall()
    names = [name for name in rows[0] if name not in SETTINGS_LEFT_OUT]
    return {
        "count": len(rows),
        "columns": {name: pack_column([row[name] for row in rows]) for name in names},
    }


def read_keywords(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return what `pg_get_keywords` returns."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            "select word, catcode::text, barelabel::int, catdesc, baredesc"
            " from pg_get_keywords() order by word"
        ).fetchall()
    return {
        "count": len(rows),
        "columns": {name: pack_column([row[name] for row in rows]) for name in rows[0]},
    }


def read_relations(connection: psycopg.Connection[Any]) -> list[Any]:
    """Return the tables and views of both schemas with their columns."""
    rows = connection.execute(
        "select c.oid::int8, n.nspname, c.relname, c.relkind::text, json_agg(json_build_array("
        "a.attname, case when t.typtype = 'd' then t.typbasetype else t.oid end::int8,"
        " t.oid::int8, a.attnotnull, a.attndims, a.atttypmod, a.attcollation::int8)"
        " order by a.attnum)"
        " from pg_class c join pg_namespace n on n.oid = relnamespace"
        " join pg_attribute a on attrelid = c.oid join pg_type t on t.oid = atttypid"
        " where nspname in ('pg_catalog', 'information_schema') and relkind in ('r', 'v')"
        " and attnum > 0 group by 1, 2, 3, 4 order by 1"
    ).fetchall()
    return [list(row) for row in rows]


def read_views(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """Return the queries of `VIEWS` and of all views of `information_schema`."""
    rows = connection.execute(
        "select schemaname || '.' || viewname, definition from pg_views"
        " where schemaname = 'information_schema' or schemaname || '.' || viewname = any(%s)"
        " order by 1",
        (list(VIEWS),),
    ).fetchall()
    return {name: " ".join(text.split()) for name, text in rows}


def dump_catalog(server: PostgresServer) -> dict[str, Any]:
    """Return all that the data file holds."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        (version,) = connection.execute("show server_version").fetchone() or ("",)
        if not str(version).startswith(f"{MAJOR}."):
            raise SystemExit(f"PostgreSQL {MAJOR} is needed; this machine has {version}")
        rows = {table: read_rows(connection, table, where) for table, where in TABLES.items()}
        rows["pg_settings"] = read_settings(connection)
        return {
            "version": str(version).split()[0],
            "keywords": read_keywords(connection),
            "relations": read_relations(connection),
            "rows": rows,
            "views": read_views(connection),
        }


def main() -> None:
    """Write the file."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA_FILE
    with postgres_server() as server:
        text = msgspec.json.encode(dump_catalog(server))
    # Without a time in it: the same catalog makes the same file.
    target.write_bytes(gzip.compress(text, mtime=0))
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
