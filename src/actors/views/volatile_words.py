"""What makes a query's answer no function of its tables, by the words of its text.

For engines that do not show Catalyst's own flags (Spark Connect, the in-memory one): names of
functions, where they can be told from names of columns, and literals that stand for the day. An
engine in our own JVM looks at the analysed plan instead (``PlanInspector.java``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.plan.jobs import Volatility
from actors.views.parse import DIALECT, Tree, without_literals

_CLOCK_WORDS: Final = """
now current_timestamp current_date curdate localtimestamp current_time localtime
current_user user session_user current_database current_schema current_catalog
current_timezone version
"""
_CLOCK: Final = frozenset(_CLOCK_WORDS.split())
_CHANCE_WORDS: Final = """
rand random randn randstr uniform uuid shuffle monotonically_increasing_id
spark_partition_id input_file_name input_file_block_start input_file_block_length
reflect java_method try_reflect aes_encrypt
"""
_CHANCE: Final = frozenset(_CHANCE_WORDS.split())
_ORDER_DEPENDENT_WORDS: Final = """
first first_value last last_value any_value collect_list array_agg collect_set listagg
string_agg mode max_by min_by
"""
_ORDER_DEPENDENT: Final = frozenset(_ORDER_DEPENDENT_WORDS.split())
"""Aggregates where Spark itself is free to choose: not deterministic, but not refused."""
_MOVING_DAY: Final = re.compile(
    r"""\b(?:date|timestamp\w*)\s*r?(['"])[^'"]*\b(?:now|today|yesterday|tomorrow)\b""", re.I
)


def volatility_of(sql: str) -> Volatility | None:
    """Return the first call of a text that is volatile, or None."""
    moving = _MOVING_DAY.search(sql)
    if moving is not None:
        return Volatility(f"the literal {moving.group(0)}{moving.group(1)}", clock=True)
    names = _names(sql)
    for name in sorted(names & (_CLOCK | _CHANCE)):
        return Volatility(f"{name}()", clock=name in _CLOCK)
    if "tablesample" in names:
        return Volatility("TABLESAMPLE")
    return None


def has_free_choice(sql: str) -> bool:
    """Return whether a text calls an aggregate that may choose among the rows of a group."""
    return bool(_names(sql) & _ORDER_DEPENDENT)


def _names(sql: str) -> set[str]:
    try:
        trees = sqlglot.parse(sql, dialect=DIALECT)
    except (SqlglotError, RecursionError, ValueError):
        called = re.findall(r"([A-Za-z_]\w*)\s*\(", without_literals(sql))
        return {name.lower() for name in called}
    return {name for tree in trees if tree is not None for name in _function_names(tree)}


def _function_names(tree: Tree) -> Iterator[str]:
    """Yield the names of all functions called, lower-cased, as Spark writes them."""
    for node in tree.walk():
        if isinstance(node, exp.TableSample):
            yield "tablesample"
        elif isinstance(node, exp.Anonymous):
            yield str(node.this).lower()
        elif isinstance(node, exp.StrToUnix):
            if not isinstance(node.this, exp.Expression):
                yield "current_timestamp"
        elif isinstance(node, exp.Func):
            for name in node.sql_names():
                yield name.lower()
