"""SQL text → a syntax tree, and the tables it reads.

Theory of operation. sqlglot parses the text as Spark SQL, and that is all that is taken from it:
its qualifier and optimiser do not follow Spark's rules. Names are left for `resolve`. A text that
Spark knows and the parser does not is an opaque view.

What a view may read is found from the tree where it parses, else from the words of the text: a
superset of the tables is harmless, a missing one is not.

Volatile functions are refused: their value belongs to no time of the inputs. The clock
(``now()``) is refused too until views can register their next change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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

_CLOCK_WORDS: Final = """
now current_timestamp current_date curdate localtimestamp current_time localtime
"""
CLOCK: Final = frozenset(_CLOCK_WORDS.split())
_VOLATILE_WORDS: Final = """
rand random randn randstr uniform uuid shuffle monotonically_increasing_id
spark_partition_id input_file_name input_file_block_start input_file_block_length
current_user user session_user current_database current_schema current_catalog
current_timezone version reflect java_method try_reflect
"""
VOLATILE: Final = frozenset(_VOLATILE_WORDS.split())
_ORDER_DEPENDENT_WORDS: Final = """
first first_value last last_value any_value collect_list array_agg collect_set listagg
string_agg mode max_by min_by
"""
ORDER_DEPENDENT: Final = frozenset(_ORDER_DEPENDENT_WORDS.split())
"""Aggregates where Spark itself is free to choose: not deterministic, but not refused."""


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
        statements = [tree for tree in sqlglot.parse(sql, dialect=DIALECT) if tree is not None]
    except (SqlglotError, RecursionError, ValueError) as error:
        reason = f"the parser does not know this syntax: {_first_line(error)}"
        return None, reason, _words(sql, catalog)
    if len(statements) != 1:
        raise QueryRejected(f"{what} is one query, not {len(statements)} statements")
    tree = statements[0]
    if not isinstance(tree, exp.Query):
        raise QueryRejected(f"{what} is a query, not {tree.key.upper()}")
    return tree, "", _sources(tree, catalog)


def refuse_volatile(tree: Tree, *, deterministic: bool) -> None:
    """Raises `QueryRejected` for a query whose answer is not a function of its inputs."""
    names = set(function_names(tree))
    for name in sorted(names & CLOCK):
        raise QueryRejected(
            f"{name}() is not supported in a maintained view: compute it when you read the view"
        )
    if "unix_timestamp" in names and _reads_clock(tree):
        raise QueryRejected("unix_timestamp() reads the clock: give it an argument")
    for name in sorted(names & VOLATILE):
        raise QueryRejected(
            f"{name}() is not deterministic: store its value in a table and read it from there"
        )
    if tree.find(exp.TableSample):
        raise QueryRejected("TABLESAMPLE is not deterministic: filter by a stored column instead")
    if not deterministic and not names & ORDER_DEPENDENT:
        raise QueryRejected("the query is not deterministic: Spark would answer it differently")


def refuse_volatile_text(sql: str) -> None:
    """The same for a text that does not parse, by its words. Raises `QueryRejected`."""
    for name in re.findall(r"([A-Za-z_]\w*)\s*\(", _without_literals(sql)):
        if name.lower() in CLOCK | VOLATILE:
            raise QueryRejected(f"{name.lower()}() is not supported in a maintained view")


def function_names(tree: Tree) -> Iterator[str]:
    """Names of all functions called, lower-cased, as Spark writes them."""
    for node in tree.walk():
        if isinstance(node, exp.Anonymous):
            yield str(node.this).lower()
        elif isinstance(node, exp.Func):
            for name in node.sql_names():
                yield name.lower()


def _reads_clock(tree: Tree) -> bool:
    return any(
        not isinstance(node.this, exp.Expression) or isinstance(node.this, exp.CurrentTimestamp)
        for node in tree.find_all(exp.StrToUnix)
    )


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


def _without_literals(sql: str) -> str:
    return re.sub(r"'(?:[^'\\]|\\.)*'|--[^\n]*", "''", sql)


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[\d*m", "", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0][:200]
