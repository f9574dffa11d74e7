"""Results of SHOW TABLES, SHOW TABLE EXTENDED and SHOW VIEWS for the service's objects. Pure.

Spark lists its own tables, and the service's objects are added as rows with the same columns. Tools
such as dbt find objects this way.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from actors.control.controller.catalog.catalog import VIEW
from actors.doors.connect_gateway.catalog_answers import SparkCatalogAnswer, is_database
from actors.doors.connect_gateway.object_catalog import (
    CATALOG,
    DATABASE,
    SYSTEM_DATABASE,
    ObjectNames,
    matches_pattern,
)
from actors.doors.connect_gateway.sql_names import names_of, parse_text
from actors.engine.sql.statements import ShowObjectsStatement
from actors.model.protocol.relations import RELATIONS, is_relation
from actors.runtime.errors import SqlSyntaxError

_LISTED: Final = frozenset({"tables", "views"})


def answer_show_statement(text: str, names: ObjectNames) -> SparkCatalogAnswer | None:
    """Return the service's rows for a text that lists tables or views; None for all other texts,
    and for a database without objects of the service."""
    # Most texts are queries, and some are long, so avoid parsing them.
    if names_of(text).head != "SHOW":
        return None
    try:
        statement = parse_text(text)
    except SqlSyntaxError:
        return None  # it may still be valid for Spark
    if not isinstance(statement, ShowObjectsStatement) or statement.kind not in _LISTED:
        return None
    database = ".".join(statement.schema) or DATABASE
    views = statement.kind == "views"
    # Spark has no such database, and would reject the statement.
    alone = is_database(database, SYSTEM_DATABASE)
    if alone:
        found = [] if views else sorted(RELATIONS)
    elif is_database(database, DATABASE):
        entries = names.objects.values()
        found = sorted(each.name for each in entries if not views or each.kind == VIEW)
    else:
        return None
    # These rows are added after Spark's, which Spark has already filtered by the pattern.
    rows = [_row(names, key, statement) for key in found]
    name = "viewName" if views else "tableName"
    pattern = statement.pattern
    kept = [row for row in rows if pattern is None or matches_pattern(row[name], pattern)]
    return SparkCatalogAnswer(pa.Table.from_pylist(kept, _shape(statement)), added=not alone)


def _shape(statement: ShowObjectsStatement) -> pa.Schema:
    name = "viewName" if statement.kind == "views" else "tableName"
    columns = [("namespace", pa.string()), (name, pa.string()), ("isTemporary", pa.bool_())]
    if statement.extended:
        columns.append(("information", pa.string()))
    return pa.schema([pa.field(each, kind, nullable=False) for each, kind in columns])


def _row(names: ObjectNames, key: str, statement: ShowObjectsStatement) -> dict[str, Any]:
    system = is_relation(key)
    return {
        "namespace": SYSTEM_DATABASE if system else DATABASE,
        "viewName" if statement.kind == "views" else "tableName": (
            key.partition(".")[2] if system else key
        ),
        "isTemporary": False,
        "information": _information(names, key) if statement.extended else "",
    }


def _information(names: ObjectNames, key: str) -> str:
    """Return the `information` of an object in SHOW TABLE EXTENDED, in Spark's form."""
    entry = names.entry(key)
    system = is_relation(key)
    lines = [
        f"Catalog: {CATALOG}",
        f"Database: {SYSTEM_DATABASE if system else DATABASE}",
        f"Table: {key.partition('.')[2] if system else key}",
        # Tools use this to choose between DROP VIEW, which includes materialized views, and DROP
        # TABLE.
        f"Type: {'VIEW' if entry is not None and entry.kind == VIEW else 'MANAGED'}",
        "Provider: penstock",
        "Schema: root",
    ]
    for column in names.schemas[key].columns:
        nullable = str(column.nullable).lower()
        lines.append(f" |-- {column.name}: {column.type} (nullable = {nullable})")
    return "\n".join(lines) + "\n"
