"""Recognizes plans that are plain reads of one object, which are answered without Spark. Pure.

A DataFrame with only column names, comparisons with literals and a limit is converted to an SQL
text. `read_choice.choose_query` decides whether a text, converted or given, is a plain read. If its
result might differ from Spark's, Spark executes it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Final

import msgspec
import pyarrow as pa

from actors.doors.connect_gateway.plan_rewriting import ProtoMessage, plain_text_of
from actors.doors.connect_gateway.sql_names import (
    ResolveName,
    find_text_reads,
    parse_identifier,
    rename_chains,
)
from actors.engine.sql.tokens import quote_name
from actors.engine.views.plain_read import PlainRead
from actors.engine.views.plain_sql import query_text
from actors.engine.views.read_choice import choose_query
from actors.model.plan.schema import TableSchema, arrow_type
from actors.model.protocol.relations import is_relation
from actors.runtime.errors import QueryRejected

_COMPARISONS: Final = {"==": "=", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "!=": "<>"}
_TESTS: Final = {"isnull": "IS NULL", "isnotnull": "IS NOT NULL"}
_EPOCH: Final = datetime.date(1970, 1, 1)
_WHOLE_NUMBERS: Final = frozenset({"byte", "short", "integer", "long"})


class DirectRead(msgspec.Struct, frozen=True):
    """A plain read: its SQL text, and what it reads."""

    sql: str
    read: PlainRead
    schema: TableSchema
    """The columns of the object."""

    def columns(self) -> pa.Schema:
        """Return the columns of the result, with their nullability."""
        own = {column.name: column for column in self.schema.columns}
        pairs = zip(self.read.names, self.read.project, strict=True)
        return pa.schema(
            [pa.field(name, arrow_type(own[of].type), own[of].nullable) for name, of in pairs]
        )


class _NotPlain(Exception):
    """The plan is not a plain read."""


def direct_read(
    relation: ProtoMessage, resolve: ResolveName, schemas: Mapping[str, TableSchema]
) -> DirectRead | None:
    """Return a relation as a plain read; None if it is not one. `schemas`: the columns of all
    objects, by name."""
    try:
        sql = _text_of(relation, resolve)
        sql = None if sql is None else query_text(sql)
    except (_NotPlain, QueryRejected, ValueError, OverflowError):
        return None
    found = None if sql is None else choose_query(sql, schemas).read
    if found is None or sql is None:
        return None
    return DirectRead(sql, found, schemas[found.name])


def _text_of(relation: ProtoMessage, resolve: ResolveName) -> str | None:
    text = plain_text_of(relation)
    return _written(relation, resolve) if text is None else _bare_text(text, resolve)


def _bare_text(sql: str, resolve: ResolveName) -> str | None:
    """Return a text with its only object renamed to the object's own name; None if the text names
    several objects or none."""
    reads = find_text_reads(sql, resolve)
    if len({each.key for each in reads}) != 1 or any(each.in_string for each in reads):
        return None
    (key,) = {each.key for each in reads}
    # The service's relations keep their database as part of the name.
    own = key if is_relation(key) else quote_name(key)
    renames = {
        tuple(part.lower() for part in each.parts): own
        for each in reads
        if len(each.parts) > 1 and ".".join(each.parts).lower() != own
    }
    return rename_chains(sql, renames)


# -- DataFrames ------------------------------------------------------------------------------------


def _written(relation: ProtoMessage, resolve: ResolveName) -> str:
    """Convert a DataFrame to an SQL text. Raises `_NotPlain`."""
    # Only an outermost limit: below a filter, it would restrict the rows before filtering.
    limit = ""
    if relation.WhichOneof("rel_type") == "limit":
        limit, relation = f" LIMIT {int(relation.limit.limit)}", relation.limit.input
    columns: list[str] | None = None
    tests: list[str] = []
    while (kind := relation.WhichOneof("rel_type")) != "read":
        if kind == "filter":
            # A filter above a projection may name columns that the projection renamed or dropped.
            tests.append(_condition(relation.filter.condition))
            if columns is None:
                _refuse_projection_below(relation.filter.input)
            relation = relation.filter.input
        elif kind == "project" and columns is None and relation.project.HasField("input"):
            columns = [_column(each) for each in relation.project.expressions]
            relation = relation.project.input
        else:
            raise _NotPlain
    read = relation.read
    parts = parse_identifier(read.named_table.unparsed_identifier)
    key = None if parts is None or not read.HasField("named_table") else resolve(parts)
    if key is None or read.is_streaming or read.named_table.options:
        raise _NotPlain
    name = key if is_relation(key) else quote_name(key)
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    return f"SELECT {', '.join(columns or ['*'])} FROM {name}{where}{limit}"


def _refuse_projection_below(relation: ProtoMessage) -> None:
    while relation.WhichOneof("rel_type") == "filter":
        relation = relation.filter.input
    if relation.WhichOneof("rel_type") != "read":
        raise _NotPlain


def _column(expression: ProtoMessage) -> str:
    """Convert an item of a projection to text: ``*``, a name, or a name with an alias."""
    match expression.WhichOneof("expr_type"):
        case "unresolved_attribute":
            return _name(expression)
        case "unresolved_star" if not expression.unresolved_star.HasField("unparsed_target"):
            return "*"
        case "alias" if len(expression.alias.name) == 1:
            return f"{_name(expression.alias.expr)} AS {quote_name(expression.alias.name[0])}"
    raise _NotPlain


def _name(expression: ProtoMessage) -> str:
    if expression.WhichOneof("expr_type") != "unresolved_attribute":
        raise _NotPlain
    attribute = expression.unresolved_attribute
    parts = parse_identifier(attribute.unparsed_identifier)
    # Only Spark can tell whether a name with dots is a field of a struct.
    if parts is None or len(parts) != 1 or attribute.is_metadata_column:
        raise _NotPlain
    return quote_name(parts[0])


def _condition(expression: ProtoMessage) -> str:
    """Convert a condition to text: comparisons with literals, NULL tests, and AND."""
    left = [expression]
    tests: list[str] = []
    # Iterate instead of recursing, since thousands of conditions may be combined.
    while left:
        found = left.pop()
        if found.WhichOneof("expr_type") != "unresolved_function":
            raise _NotPlain
        function = found.unresolved_function
        name, arguments = function.function_name.lower(), list(function.arguments)
        if function.is_user_defined_function or function.is_distinct:
            raise _NotPlain
        if name == "and" and len(arguments) == 2:
            left += reversed(arguments)
        elif name in _TESTS and len(arguments) == 1:
            tests.append(f"{_name(arguments[0])} {_TESTS[name]}")
        elif name in _COMPARISONS and len(arguments) == 2:
            tests.append(f"{_side(arguments[0])} {_COMPARISONS[name]} {_side(arguments[1])}")
        else:
            raise _NotPlain
    return " AND ".join(tests)


def _side(expression: ProtoMessage) -> str:
    if expression.WhichOneof("expr_type") == "literal":
        return _literal(expression.literal)
    return _name(expression)


def _literal(literal: ProtoMessage) -> str:
    """Write a literal as Spark SQL. Raises `_NotPlain` for kinds that Spark might read
    differently."""
    kind = literal.WhichOneof("literal_type")
    if kind in _WHOLE_NUMBERS:
        return str(getattr(literal, kind))
    if kind == "boolean":
        return str(literal.boolean).upper()
    if kind == "double" and math.isfinite(literal.double):
        return f"{literal.double!r}D"
    if kind == "date":
        return f"DATE'{(_EPOCH + datetime.timedelta(days=literal.date)).isoformat()}'"
    # How to escape a quote or a backslash depends on a setting.
    if kind == "string" and not set("'\\") & set(literal.string):
        return f"'{literal.string}'"
    raise _NotPlain
