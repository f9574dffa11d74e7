"""Plain views: queries that are inlined where they are named. Pure.

A query that names one is read by Spark as a WITH that defines it. So names inside keep their
meaning, and a name that the query defines itself goes before the view.

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
"""Words that begin a clause: a comma behind FROM alone is followed by a relation."""
_BEFORE_RELATION: Final = frozenset({"FROM", "JOIN", "TABLE", "USING", "INTO"})
_BETWEEN: Final = frozenset({"LATERAL"})
"""Words that may stand between FROM or JOIN and the relation."""


def find_relations(sql: str) -> list[str]:
    """Return the names of one part that stand where a query names a relation, each once.

    It may be too much (``extract(YEAR FROM a)``), and is too little only for names that a text
    computes. A text that cannot be split has none.

    >>> find_relations("SELECT a, b FROM t, (v JOIN `w x`) WHERE c IN (SELECT d FROM e.f)")
    ['t', 'v', 'w x']
    """
    try:
        tokens = lex_sql(sql)
    # Spark says what is wrong with it.
    except SqlSyntaxError:
        return []
    found: dict[str, None] = {}
    clauses = [""]
    wanted = False
    for place, token in enumerate(tokens):
        word = token.text.upper() if token.kind == "word" else ""
        if token.text == "(":
            # FROM (a JOIN b): what was wanted before the bracket is wanted behind it.
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
            if wanted and not _goes_on(tokens, place):
                found[token.name] = None
            wanted = False
    return list(found)


def _goes_on(tokens: list[SqlToken], place: int) -> bool:
    """Return whether a qualified name or a function's arguments follow."""
    return place + 1 < len(tokens) and tokens[place + 1].text in (".", "(")


def inline_views(sql: str, views: Mapping[str, str]) -> str:
    """Return the query with the plain views that it names defined before it.

    Args:
        sql: A query in Spark's dialect.
        views: Queries of the plain views by their names in lower case; each has its own plain views
            inlined already.
    """
    named = dict.fromkeys(name for name in map(str.lower, find_relations(sql)) if name in views)
    return define_views(sql, {name: views[name] for name in named})


def define_views(sql: str, views: Mapping[str, str]) -> str:
    """Return the query with all of these views defined before it. See `inline_views`."""
    if not views:
        return sql
    # A line break before each bracket: a text may end with a comment.
    parts = (f"{quote_name(name)} AS ({text}\n)" for name, text in views.items())
    return f"WITH {', '.join(parts)} ({sql}\n)"
