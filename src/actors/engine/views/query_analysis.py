"""Has Spark analyse a query: its schema, and the tables that it names.

The query is not parsed here. The engine gets the tables whose names occur in the text, and answers
which of them the query reads, or which name is missing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import Final, Protocol, TypeAlias

from actors.model.plan.jobs import QueryAnalyzed
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import is_relation, refuse_relation, relation_of
from actors.runtime.errors import UnknownObject

Conf: TypeAlias = tuple[tuple[str, str], ...]
Tables: TypeAlias = tuple[tuple[str, TableSchema], ...]


class AnalyzeQuery(Protocol):
    """Asks the engine to analyse a text over (empty) tables under given settings."""

    def __call__(
        self, tables: Tables, sql: str, conf: Conf, *, translate: bool = False
    ) -> Awaitable[QueryAnalyzed]:
        """Return the engine's analysis; with `translate`, also the relational plan."""


KNOWN_SHOWN_MAX: Final = 20
_PART: Final = re.compile(r"`((?:[^`]|``)*)`|([^`.]+)")


async def analyzed_query(
    sql: str,
    tables: Mapping[str, TableSchema],
    analyze: AnalyzeQuery,
    conf: Conf = (),
    *,
    translate: bool = False,
) -> QueryAnalyzed:
    """Return the engine's analysis of a query over `tables`; its `inputs` are the tables that it
    reads.

    Raises `UnknownObject` for a name that is not among them, `InvalidUsage` for a relation that
    describes the service, and what `analyze` raises.
    """
    folded = {name.lower(): name for name in tables}
    names = dict.fromkeys(find_mentioned_tables(sql, tables))
    while True:
        given = tuple((name, tables[name]) for name in names)
        analyzed = await analyze(given, sql, conf, translate=translate)
        if not analyzed.missing:
            return analyzed
        # If the text computes a name (``IDENTIFIER('a' || 'b')``), the missing table is added.
        name = folded.get(_only_part(analyzed.missing).lower())
        if name is None or name in names:
            shown = ", ".join(sorted(tables)[:KNOWN_SHOWN_MAX]) or "none"
            raise UnknownObject(
                f"{missing_object_text(_only_part(analyzed.missing))} (available: {shown})"
            )
        names[name] = None


def missing_object_text(name: str) -> str:
    """Return the start of the error text for a name that a query's analysis does not find.

    The service recognizes it, so that a role that may not read an object gets `AccessDenied`.
    """
    return f"no table or view named {name!r}"


def find_mentioned_tables(sql: str, tables: Mapping[str, TableSchema]) -> list[str]:
    """Return the tables whose names occur in a text.

    A name that is not a plain word may contain any character, so its backticked form is searched
    for.

    >>> tables = dict.fromkeys(["a b", "b", "t2", "T", "x"])
    >>> find_mentioned_tables("SELECT 1 FROM `a b`, T2 -- t", tables)
    ['a b', 'b', 't2', 'T']
    """
    text = sql.lower()
    words = set(re.findall(r"\w+", text))
    found = []
    for name in tables:
        low = name.lower()
        plain = re.fullmatch(r"\w+", low) is not None
        if low in words if plain else low.replace("`", "``") in text:
            found.append(name)
    return found


def _only_part(name: str) -> str:
    """Return a name that Spark wrote, without its quotes. Raises `UnknownObject` and `InvalidUsage`
    for a qualified name."""
    parts: list[str] = [quoted.replace("``", "`") or plain for quoted, plain in _PART.findall(name)]
    if len(parts) == 1:
        return parts[0]
    name = ".".join(parts)
    if is_relation(name):
        # Raises its own error if there is no such relation.
        relation_of(name)
    refuse_relation(name, "a query over")
    raise UnknownObject(
        f"{'.'.join(parts)}: qualified names are not supported here; write"
        f" {parts[-1] if parts else name}"
    )
