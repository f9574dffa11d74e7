"""Marks the places of a statement whose meaning depends on types: untyped texts, and casts to text.

A text that is compared with a column of bytes is bytes in PostgreSQL, but characters in Spark. So
the queries of a statement are written again for a `PlaceFinder`, which knows the types of columns:
in them each such place is replaced by a name that contains its offset in the statement. Pure.

>>> from actors.engine.sql.grammar import parse_statement
>>> from actors.engine.sql.tokens import SqlDialect
>>> marked_queries(parse_statement(r"SELECT a FROM t WHERE b = 'a\\134'", SqlDialect.POSTGRES))
['SELECT a FROM t WHERE b = "penstock place 26"']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from actors.engine.sql import statements as sql
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import LexedText
from actors.engine.sql.type_names import read_written_type
from actors.model.plan.schema import TableSchema, text_limit
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

PLACE: Final = "penstock place "
"""Prefix of the name of a place, before the offset."""
CHAR: Final = " char"
"""Suffix of the name of a place that is a type ``char(n)``."""
PlaceRoles: TypeAlias = Mapping[int, str]
"""Roles of places, by their offsets.

- ``bytea``: a text that denotes bytes.
- ``timestamptz``: the type that a timestamptz is cast to.
- ``char``: a type ``char(n)``, or a text or parameter compared with one, whose trailing blanks are
  ignored.
- ``char column``: a type ``char(n)`` whose value is compared with a column of such a type.
"""
PlaceFinder: TypeAlias = Callable[[list[str], Mapping[str, TableSchema]], PlaceRoles]
"""Finds the roles of the places in such queries, given the schemas of the objects."""
_Change: TypeAlias = (
    sql.InsertStatement | sql.UpdateStatement | sql.DeleteStatement | sql.MergeStatement
)
_Mark: TypeAlias = Callable[[sql.TextSpan], str]
_SIGNS: Final = re.compile(r"\\|::|\bcast\b", re.IGNORECASE)
_TYPE_WORDS: Final = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMPTZ", "INTERVAL", "BYTEA", "ESCAPE")


def marked_queries(statement: sql.SqlStatement) -> list[str]:
    """Return the queries of a statement with such places replaced by names; [] if there are
    none."""
    written = _Marker()
    queries = list(_queries(statement, written))
    return queries if written.wanted else []


def marked_length(statement: sql.SqlStatement) -> int:
    """Return the length of the texts that `marked_queries` would read; 0 if none has such a
    place."""
    spans: list[sql.TextSpan] = []

    def note(span: sql.TextSpan) -> str:
        spans.append(span)
        return ""

    for _ in _queries(statement, note):
        pass
    # Most statements have no such place, and are not read a second time.
    some = any(_SIGNS.search(span.text) for span in spans)
    return sum(len(span.text) for span in spans) if some else 0


class _Marker:
    """Writes expressions with names in place of such places. `wanted` becomes True once there is
    one."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, span: sql.TextSpan) -> str:
        lexed, text = span.as_text(), span.text
        parts, at = [], 0
        for place, token in enumerate(lexed.tokens):
            end = token.end
            # Part of a type that already has a name.
            if token.start < at:
                continue
            name = f'"{PLACE}{span.start + token.start}"'
            if token.kind == "parameter":
                pass
            elif token.kind == "text" and not _is_typed(lexed, place):
                self.wanted |= "\\" in token.text
            elif (found := _text_type(lexed, place)) is not None:
                self.wanted = True
                end, padded = found
                name = f'"{PLACE}{span.start + token.start}{CHAR if padded else ""}"'
            else:
                continue
            parts += [text[at : token.start], name]
            at = end
        return "".join([*parts, text[at:]])


def _is_typed(lexed: LexedText, place: int) -> bool:
    """Return whether the type of a text is written next to it."""
    before = lexed.tokens[place - 1].word if place else ""
    after = lexed.tokens[place + 1].text if place + 1 < len(lexed.tokens) else ""
    return after == "::" or before in _TYPE_WORDS


def _text_type(lexed: LexedText, place: int) -> tuple[int, bool] | None:
    """Return the end of the type at a place, and whether it is ``char(n)``, if it is a text type
    that an expression is cast to; else None."""
    before = lexed.tokens[place - 1].word if place > 1 else ""
    if before not in ("::", "AS"):
        return None
    reader = StatementReader(lexed, place)
    try:
        kind = read_written_type(reader).spark
        limit = text_limit(kind)
    except (SqlSyntaxError, InvalidUsage):
        return None
    padded = limit is not None and limit[1]
    is_cast = before == "::" or reader.place in lexed.partners.values()
    # A literal is not a timestamptz before it is cast.
    is_literal = lexed.tokens[place - 2].kind in ("text", "number")
    is_text = padded or (not is_literal and (kind == "string" or limit is not None))
    return (lexed.tokens[reader.place - 1].end, padded) if is_cast and is_text else None


def _queries(statement: object, mark: _Mark) -> Iterator[str]:
    match statement:
        case (
            sql.QueryStatement(query=sql.TextSpan() as query)
            | sql.SubscribeStatement(query=sql.TextSpan() as query)
            | sql.ChangeStatement(query=sql.TextSpan() as query)
        ):
            yield mark(query)
        case (
            sql.CreateTableAsStatement(query=inner)
            | sql.DescribeStatement(query=inner)
            | sql.ExplainStatement(statement=inner)
            | sql.DeclareCursorStatement(source=inner)
            | sql.CopyStatement(source=inner)
        ):
            yield from _queries(inner, mark)
        case sql.InsertStatement():
            yield from _queries(statement.query, mark)
            if (conflict := statement.conflict) is not None:
                found = _conditions(statement, [conflict.condition], conflict.assignments, mark)
                yield _changes(statement, found, f', {_name(statement.table)} AS "excluded"')
        case sql.UpdateStatement():
            found = _conditions(statement, [statement.where], statement.assignments, mark)
            yield _changes(statement, found)
        case sql.DeleteStatement():
            yield _changes(statement, _conditions(statement, [statement.where], (), mark))
        case sql.MergeStatement():
            yield _changes(statement, list(_of_merge(statement, mark)), _source(statement, mark))
    if isinstance(statement, sql.InsertStatement | sql.UpdateStatement | sql.DeleteStatement):
        returned = ", ".join(map(mark, statement.returning))
        if returned:
            yield f"SELECT {returned} FROM {_name(statement.table)} AS {_alias(statement)}"


def _source(statement: sql.MergeStatement, mark: _Mark) -> str:
    query, name = statement.source_query, statement.source_name
    source = f"({mark(query.query)})" if query is not None else _name(name or ())
    alias = statement.source_alias or (name[-1] if name else "source")
    return f", {source} AS {_quoted(alias)}"


def _of_merge(statement: sql.MergeStatement, mark: _Mark) -> Iterator[str]:
    yield from _conditions(statement, [statement.on], (), mark)
    for clause in statement.clauses:
        inserted = map(sql.ColumnAssignment, ((name,) for name in clause.columns), clause.values)
        assigned = (*clause.assignments, *inserted)
        yield from _conditions(statement, [clause.condition], assigned, mark)


def _conditions(
    statement: _Change,
    conditions: Iterable[sql.TextSpan | None],
    assignments: Iterable[sql.ColumnAssignment],
    mark: _Mark,
) -> list[str]:
    """Return conditions that give each expression the type that the statement would give it."""
    alias = _alias(statement)
    asked = [f"{alias}.{_quoted(each.column[-1])} = ({mark(each.value)})" for each in assignments]
    return [*(f"({mark(each)})" for each in conditions if each is not None), *asked]


def _changes(statement: _Change, conditions: list[str], sources: str = "") -> str:
    """Return a query over the rows that a statement changes, with these conditions."""
    table, alias = _name(statement.table), _alias(statement)
    return f"SELECT 1 FROM {table} AS {alias}{sources} WHERE {' AND '.join(conditions) or 'true'}"


def _alias(statement: _Change) -> str:
    return _quoted(statement.alias or statement.table[-1])


def _name(name: Iterable[str]) -> str:
    return ".".join(map(_quoted, name))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
