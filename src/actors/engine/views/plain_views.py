"""Plain views: queries that are inlined where they are named. Pure.

A query that names a plain view gets a WITH that defines it. So names inside the view keep their
meaning, and a name that the query defines itself takes precedence over the view.

>>> inline_views("SELECT * FROM big b -- all", {"big": "SELECT * FROM t WHERE a > 9"})
'WITH `big` AS (SELECT * FROM t WHERE a > 9\\n) (SELECT * FROM big b -- all\\n)'
>>> inline_views("SELECT big FROM t", {"big": "SELECT 1"})
'SELECT big FROM t'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.engine.sql.tokens import SqlToken, lex_sql, quote_name
from actors.runtime.errors import SqlSyntaxError

_CLAUSES: Final = frozenset(
    {"SELECT", "FROM", "WHERE", "GROUP", "HAVING", "ORDER", "SORT", "CLUSTER", "DISTRIBUTE"}
    | {"LIMIT", "OFFSET", "WINDOW", "ON", "UNION", "EXCEPT", "INTERSECT", "MINUS", "SET"}
)
"""Words that start a clause. Only in FROM is a comma followed by a relation."""
_BEFORE_RELATION: Final = frozenset({"FROM", "JOIN", "TABLE", "USING", "INTO"})
_BETWEEN: Final = frozenset({"LATERAL"})
"""Words that may come between FROM or JOIN and the relation."""


def find_relations(sql: str) -> list[str]:
    """Return the unqualified names that occur where a query names a relation, without repetition.

    The result may contain too much (``extract(YEAR FROM a)``), and lacks only names that a text
    computes. It is empty for a text that cannot be split into tokens.

    >>> find_relations("SELECT a, b FROM t, (v JOIN `w x`) WHERE c IN (SELECT d FROM e.f)")
    ['t', 'v', 'w x']
    """
    try:
        tokens = lex_sql(sql)
    # Spark reports the error.
    except SqlSyntaxError:
        return []
    found: dict[str, None] = {}
    clauses = [""]
    wanted = False
    for place, token in enumerate(tokens):
        word = token.text.upper() if token.kind == "word" else ""
        if token.text == "(":
            # FROM (a JOIN b): the same is expected inside the bracket as before it.
            clauses.append("FROM" if wanted else "")
        elif token.text == ")" and len(clauses) > 1:
            clauses.pop()
            wanted = False
        elif token.text == ",":
            wanted = clauses[-1] == "FROM"
        elif word in _BEFORE_RELATION or word in _CLAUSES:
            clauses[-1] = word if word in _CLAUSES else clauses[-1]
            wanted = word in _BEFORE_RELATION
        elif word not in _BETWEEN:
            if wanted and not _name_continues(tokens, place):
                found[token.name] = None
            wanted = False
    return list(found)


def _name_continues(tokens: list[SqlToken], place: int) -> bool:
    """Return whether the name continues: a qualified name or the arguments of a function follow."""
    return place + 1 < len(tokens) and tokens[place + 1].text in (".", "(")


def inline_views(sql: str, views: Mapping[str, str]) -> str:
    """Return the query with definitions of the plain views that it names before it.

    Args:
        sql: A query in Spark's dialect.
        views: Queries of the plain views by their lower-case names, each with its own plain views
            already inlined.
    """
    named = dict.fromkeys(name for name in map(str.lower, find_relations(sql)) if name in views)
    return define_views(sql, {name: views[name] for name in named})


def define_views(sql: str, views: Mapping[str, str]) -> str:
    """Return the query with definitions of all of these views before it (see `inline_views`)."""
    if not views:
        return sql
    # A line break comes before each bracket, since a text may end with a comment.
    parts = (f"{quote_name(name)} AS ({text}\n)" for name, text in views.items())
    return f"WITH {', '.join(parts)} ({sql}\n)"
