"""Answers requests of `spark.catalog` about the service's objects. Pure.

`spark.catalog` sends relations (`Relation.catalog`), whose rows have columns defined by Spark.
Requests about one object of the service are answered here. A list is Spark's own, with the
service's rows added. Spark answers all other requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from actors.control.controller.catalog.catalog import PLAIN_VIEW, VIEW
from actors.doors.connect_gateway.object_catalog import (
    CATALOG,
    DATABASE,
    SYSTEM_DATABASE,
    ObjectNames,
    matches_pattern,
)
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.sql_names import NameParts, ResolveName, parse_identifier
from actors.engine.sql.tokens import quote_name
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import RELATIONS, is_relation

_VIEWS: Final = frozenset({VIEW, PLAIN_VIEW})
_STRING: Final = pa.string()
_TABLES: Final = pa.schema(
    [
        pa.field("name", _STRING),
        pa.field("catalog", _STRING),
        pa.field("namespace", pa.list_(pa.field("element", _STRING))),
        pa.field("description", _STRING),
        pa.field("tableType", _STRING),
        pa.field("isTemporary", pa.bool_(), nullable=False),
    ]
)
_COLUMNS: Final = pa.schema(
    [
        pa.field("name", _STRING),
        pa.field("description", _STRING),
        pa.field("dataType", _STRING),
        *(
            pa.field(name, pa.bool_(), nullable=False)
            for name in ("nullable", "isPartition", "isBucket", "isCluster")
        ),
    ]
)
_DATABASES: Final = pa.schema(
    [pa.field(name, _STRING) for name in ("name", "catalog", "description", "locationUri")]
)
_BOOLEAN: Final = pa.schema([pa.field("value", pa.bool_(), nullable=False)])
_PAIRS: Final = pa.schema([pa.field("key", _STRING), pa.field("value", _STRING)])
_TEXT: Final = pa.schema([pa.field("value", _STRING)])


class SparkCatalogAnswer(NamedTuple):
    """The rows that answer a request; with `added`, they are appended to Spark's own answer."""

    rows: pa.Table
    added: bool = False


def answer_catalog(
    catalog: ProtoMessage, names: ObjectNames, resolve: ResolveName
) -> SparkCatalogAnswer | None:
    """Return the answer to a catalog request; None if Spark alone answers it."""
    kind = catalog.WhichOneof("cat_type")
    if kind is None:
        return None
    asked = getattr(catalog, kind)
    match kind:
        # Lists combine Spark's tables and views, which are the user's, with the service's.
        case "list_tables":
            return _listed(names, asked, views_only=False)
        case "list_views":
            return _listed(names, asked, views_only=True)
        case "list_databases":
            return _databases(asked)
        case "database_exists" if is_database(asked.db_name, SYSTEM_DATABASE):
            return SparkCatalogAnswer(_table(_BOOLEAN, [{"value": True}]))
        case "get_database" if is_database(asked.db_name, SYSTEM_DATABASE):
            return SparkCatalogAnswer(_table(_DATABASES, [dict(_SYSTEM_ROW)]))
    key = _object_of(asked, resolve)
    return None if key is None else _about(kind, key, names)


def _object_of(asked: ProtoMessage, resolve: ResolveName) -> str | None:
    """Return the service's object that a request is about; None if there is none."""
    # Check for the field instead of listing the kinds, to cover requests of later releases.
    if "table_name" not in asked.DESCRIPTOR.fields_by_name:
        return None
    parts = parse_identifier(asked.table_name)
    if parts is None:
        return None
    # The older form of a request has a separate database name.
    if "db_name" in asked.DESCRIPTOR.fields_by_name and asked.HasField("db_name"):
        parts = (*(parse_identifier(asked.db_name) or ()), *parts)
    return resolve(parts)


def _about(kind: str, key: str, names: ObjectNames) -> SparkCatalogAnswer | None:
    """Return the answer to a request about one object; None for an unknown kind of request."""
    match kind:
        case "table_exists":
            return SparkCatalogAnswer(_table(_BOOLEAN, [{"value": True}]))
        case "is_cached":
            return SparkCatalogAnswer(_table(_BOOLEAN, [{"value": False}]))
        case "get_table":
            return SparkCatalogAnswer(_table(_TABLES, [_table_row(names, key)]))
        case "list_columns":
            return SparkCatalogAnswer(_table(_COLUMNS, _column_rows(names, key)))
        case "get_table_properties":
            rows = [{"key": k, "value": v} for k, v in _properties(names, key).items()]
            return SparkCatalogAnswer(_table(_PAIRS, rows))
        case "get_create_table_string":
            return SparkCatalogAnswer(_table(_TEXT, [{"value": _creation(names, key)}]))
        case "refresh_table" | "cache_table" | "uncache_table" | "analyze_table":
            # Objects are never cached, so there is nothing to do.
            return SparkCatalogAnswer(pa.table({}))
    return None


# -- rows ------------------------------------------------------------------------------------------


def _table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema)


def _listed(
    names: ObjectNames, asked: ProtoMessage, *, views_only: bool
) -> SparkCatalogAnswer | None:
    database = asked.db_name if asked.HasField("db_name") else DATABASE
    if is_database(database, SYSTEM_DATABASE):
        found = [] if views_only else list(RELATIONS)
    elif is_database(database, DATABASE):
        entries = names.objects.values()
        found = [each.name for each in entries if not views_only or each.kind in _VIEWS]
    else:
        return None
    pattern = asked.pattern if asked.HasField("pattern") else "*"
    rows = [_table_row(names, key) for key in sorted(found)]
    # Spark applies the same pattern to its own rows.
    kept = [row for row in rows if matches_pattern(row["name"], pattern)]
    # Spark does not have this database, and would fail to list it.
    alone = is_database(database, SYSTEM_DATABASE)
    return SparkCatalogAnswer(_table(_TABLES, kept), added=not alone)


_SYSTEM_ROW: Final[Mapping[str, Any]] = {
    "name": SYSTEM_DATABASE,
    "catalog": CATALOG,
    "description": "the service about itself",
    "locationUri": "",
}


def _databases(asked: ProtoMessage) -> SparkCatalogAnswer:
    pattern = asked.pattern if asked.HasField("pattern") else "*"
    rows = [dict(_SYSTEM_ROW)] if matches_pattern(SYSTEM_DATABASE, pattern) else []
    return SparkCatalogAnswer(_table(_DATABASES, rows), added=True)


def is_database(written: str, name: str) -> bool:
    """Return whether a written name, with or without the catalog, means this database."""
    parts: NameParts = parse_identifier(written) or ()
    folded = tuple(part.lower() for part in parts)
    return folded in ((name,), (CATALOG, name))


def _table_row(names: ObjectNames, key: str) -> dict[str, Any]:
    entry = names.entry(key)
    system = is_relation(key)
    return {
        "name": key.partition(".")[2] if system else key,
        "catalog": CATALOG,
        "namespace": [SYSTEM_DATABASE if system else DATABASE],
        "description": RELATIONS[key].text if system else (entry and entry.comment) or None,
        "tableType": "VIEW" if entry is not None and entry.kind in _VIEWS else "MANAGED",
        "isTemporary": False,
    }


def _column_rows(names: ObjectNames, key: str) -> list[dict[str, Any]]:
    entry = names.entry(key)
    texts: Mapping[str, str] = {} if entry is None else entry.column_comments
    if is_relation(key):
        texts = {each.name: each.text for each in RELATIONS[key].columns}
    return [
        {
            "name": column.name,
            "description": texts.get(column.name),
            "dataType": column.type,
            "nullable": column.nullable,
            "isPartition": False,
            "isBucket": False,
            "isCluster": False,
        }
        for column in names.schemas[key].columns
    ]


def _properties(names: ObjectNames, key: str) -> dict[str, str]:
    entry = names.entry(key)
    if entry is None:
        return {}
    made = {"kind": entry.kind, "primary_key": ", ".join(entry.schema.key)}
    if entry.plan is not None:
        made |= {"mode": entry.plan.mode, "target_lag_ms": str(entry.target_lag_ms)}
    if entry.retain_history_ms is not None:
        made["retain_history_ms"] = str(entry.retain_history_ms)
    return {name: value for name, value in made.items() if value}


def _creation(names: ObjectNames, key: str) -> str:
    """Return a CREATE statement for the object."""
    entry, schema = names.entry(key), names.schemas[key]
    quoted = quote_name(key)
    if entry is not None and entry.kind in _VIEWS:
        kind = "MATERIALIZED VIEW" if entry.kind == VIEW else "VIEW"
        return f"CREATE {kind} {quoted} AS\n{entry.written}"
    keys = ", ".join(map(quote_name, schema.key))
    primary = f", PRIMARY KEY ({keys})" if keys else ""
    defaults = {} if entry is None else entry.column_defaults
    columns = ", ".join(
        TableSchema((each,)).ddl()
        + (f" DEFAULT {defaults[each.name].text}" if each.name in defaults else "")
        for each in schema.columns
    )
    return f"CREATE TABLE {quoted} ({columns}{primary})"
