"""SQL text → a syntax tree, and the tables it reads.

Theory of operation. sqlglot parses the text as Spark SQL, and that is all that is taken from it:
its qualifier and optimiser do not follow Spark's rules. Names are left for `resolve`. A text that
Spark knows and the parser does not is an opaque view.

What a view may read is found from the tree where it parses, else from the words of the text: a
superset of the tables is harmless, a missing one is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.errors import QueryRejected, UnknownObject
from actors.plan.schema import Schema
from actors.protocol.relations import refuse_relation
from actors.views.dialect import VerbatimSpark

DIALECT: Final = VerbatimSpark

Tree = Any
"""A sqlglot expression: the library is untyped for us."""


_NOTHING: Final = re.compile(r"(?:\s|;|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*", re.DOTALL)


def query_text(sql: str) -> str:
    """Return the text up to its last word: without semicolons and comments behind it."""
    bare = sql.strip().rstrip(";").strip()
    try:
        words = [each for each in DIALECT().tokenize(sql) if each.text != ";"]
    except (SqlglotError, ValueError):
        return bare
    end = words[-1].end + 1 if words else 0
    return sql[:end].strip() if end and _NOTHING.fullmatch(sql, end) else bare


def lower_columns(schema: Schema) -> dict[str, str]:
    """Lower-cased column name → its name."""
    return {name.lower(): name for name in schema.names}


def read_tables(sql: str, tables: Mapping[str, Schema]) -> tuple[Tree | None, str, tuple[str, ...]]:
    """(tree or None, reason, sources) of a view. Raises `QueryRejected` and `UnknownObject`."""
    tree, reason, sources = read_query(sql, tables, "a view")
    if not sources:
        raise QueryRejected("a maintained view must read at least one table or view")
    return tree, reason, sources


def read_query(
    sql: str, tables: Mapping[str, Schema], what: str
) -> tuple[Tree | None, str, tuple[str, ...]]:
    """The same of any query, which may read nothing; `what` it is, for people."""
    catalog = {name.lower(): name for name in tables}
    try:
        parsed = (_query_of(tree) for tree in sqlglot.parse(sql, dialect=DIALECT))
        statements: list[Tree] = [tree for tree in parsed if tree is not None]
    except (SqlglotError, RecursionError, ValueError) as error:
        reason = f"the parser does not know this syntax: {_first_line(error)}"
        return None, reason, _words(sql, catalog)
    if len(statements) != 1:
        raise QueryRejected(f"{what} is one query, not {len(statements)} statements")
    tree: Tree = statements[0]
    if isinstance(tree, exp.Condition | exp.Alias):
        return None, "the parser takes the text for an expression", _words(sql, catalog)
    if not isinstance(tree, exp.Query):
        raise QueryRejected(f"{what} is a query, not {tree.key.upper()}")
    return tree, "", _sources(tree, catalog)


def _query_of(tree: Tree | None) -> Tree | None:
    """Return a statement; None for a semicolon with a comment, and of ``TABLE t`` the query."""
    if isinstance(tree, exp.Semicolon):
        return None
    if isinstance(tree, exp.Alias) and isinstance(tree.this, exp.Column):
        name = tree.this.this
        if tree.this.sql().upper() == "TABLE" and not name.args.get("quoted"):
            return exp.select("*").from_(exp.Table(this=tree.args["alias"].copy()))
    return tree


def _sources(tree: Tree, catalog: Mapping[str, str]) -> tuple[str, ...]:
    ctes = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    found: dict[str, None] = {}
    for table in tree.find_all(exp.Table):
        if table.find_ancestor(exp.Hint) or not isinstance(table.this, exp.Identifier):
            continue
        name = table.name.lower()
        if table.args.get("db"):
            refuse_relation(f"{table.db}.{table.name}", "a query over")
            raise UnknownObject(
                f"{table.sql(dialect=DIALECT)}: names are not qualified here; write {table.name}"
            )
        if name in catalog:
            found[catalog[name]] = None
        elif name not in ctes:
            known = ", ".join(sorted(catalog.values())[:20]) or "none"
            raise UnknownObject(f"no table or view named {table.name!r}; known: {known}")
    return tuple(found)


def _words(sql: str, catalog: Mapping[str, str]) -> tuple[str, ...]:
    # A name may hold anything, also what looks like a comment: it is looked for as a whole, as it
    # stands between backticks.
    text = sql.lower()
    return tuple(name for low, name in catalog.items() if low.replace("`", "``") in text)


def without_literals(sql: str) -> str:
    """Return the text without what its string literals and comments say."""
    return re.sub(r"'(?:[^'\\]|\\.)*'|--[^\n]*", "''", sql)


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]
