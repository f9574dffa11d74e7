"""Parses SQL text into a syntax tree, and finds the tables that it reads.

Theory of operation. sqlglot parses the text as Spark SQL, and only its tree is used: its qualifier
and optimiser do not follow Spark's rules. Names are left for `resolve`.

The tables of a query are found in the tree if the text parses, otherwise among the words of the
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.model.plan.schema import TableSchema
from actors.runtime.errors import QueryRejected
from actors.testing.parsed.dialect import VerbatimSpark

DIALECT: Final = VerbatimSpark

Tree = Any
"""A sqlglot expression, untyped here."""


class UnknownTable(Exception):
    """Raised if a query names a table that is not given. The text is the name as Spark writes
    it."""


def lower_columns(schema: TableSchema) -> dict[str, str]:
    """Return the column names by lower-cased name."""
    return {name.lower(): name for name in schema.names}


def read_tables(
    sql: str, tables: Mapping[str, TableSchema]
) -> tuple[Tree | None, str, tuple[str, ...]]:
    """Return (tree or None, reason for None, inputs) of a query.

    Raises `QueryRejected` for a text that is not a query, and `UnknownTable`.
    """
    catalog = {name.lower(): name for name in tables}
    try:
        parsed = (_query_of(tree) for tree in sqlglot.parse(sql, dialect=DIALECT))
        statements: list[Tree] = [tree for tree in parsed if tree is not None]
    except (SqlglotError, RecursionError, ValueError) as error:
        reason = f"the parser does not know this syntax: {_first_line(error)}"
        return None, reason, _words(sql, catalog)
    if len(statements) != 1:
        raise QueryRejected(f"[PARSE_SYNTAX_ERROR] one query, not {len(statements)} statements")
    tree: Tree = statements[0]
    if isinstance(tree, exp.Condition | exp.Alias):
        return None, "the parser reads the text as an expression", _words(sql, catalog)
    if not isinstance(tree, exp.Query):
        raise QueryRejected(f"a view is a query; this is a command ({tree.key.upper()})")
    return tree, "", _inputs(tree, catalog)


def _query_of(tree: Tree | None) -> Tree | None:
    """Return a statement: None for a semicolon with a comment, the equivalent query for ``TABLE
    t``."""
    if isinstance(tree, exp.Semicolon):
        return None
    if isinstance(tree, exp.Alias) and isinstance(tree.this, exp.Column):
        name = tree.this.this
        if tree.this.sql().upper() == "TABLE" and not name.args.get("quoted"):
            return exp.select("*").from_(exp.Table(this=tree.args["alias"].copy()))
    return tree


def _inputs(tree: Tree, catalog: Mapping[str, str]) -> tuple[str, ...]:
    ctes = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    found: dict[str, None] = {}
    for table in tree.find_all(exp.Table):
        if table.find_ancestor(exp.Hint) or not isinstance(table.this, exp.Identifier):
            continue
        name = table.name.lower()
        parts = [table.db, table.name] if table.args.get("db") else [table.name]
        if len(parts) == 1 and name in catalog:
            found[catalog[name]] = None
        elif len(parts) > 1 or name not in ctes:
            raise UnknownTable(".".join("`" + each.replace("`", "``") + "`" for each in parts))
    return tuple(found)


def _words(sql: str, catalog: Mapping[str, str]) -> tuple[str, ...]:
    # A name may hold any text, even one that looks like a comment: search for all of it, in the
    # form that it has between backticks.
    text = sql.lower()
    return tuple(name for low, name in catalog.items() if low.replace("`", "``") in text)


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]
