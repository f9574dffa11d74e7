"""Recognizes prepared point queries, which read the rows of one key and need no Spark.

When a statement is prepared its parameters have no values. So each gets an example value that does
not occur in the text. The plain read of that text (`read_choice.choose_query`) then shows which
column is compared with which parameter. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from actors.control.controller.reads.memory_reads import PointSelection
from actors.doors.sql_session.error_positions import map_positions
from actors.doors.sql_session.typed_literals import typed_literal
from actors.engine.sql.dialects import to_spark
from actors.engine.sql.statements import QueryStatement
from actors.engine.sql.type_names import WrittenType
from actors.engine.views.read_choice import choose_query
from actors.model.pgwire.parameters import spark_literal
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.pgwire.type_oids import INT2, INT4, INT8, TEXT, VARCHAR
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc

_INTEGERS: Final = frozenset({INT2, INT4, INT8})
_TEXTS: Final = frozenset({TEXT, VARCHAR})
_FIRST_EXAMPLE: Final = 30_000
"""The first example value for integers; it fits every integer type but the smallest."""
_PARAMETERS_MAX: Final = 64


class PointStatement(msgspec.Struct, frozen=True):
    """A prepared query of the rows of one key."""

    selection: PointSelection
    names: tuple[str, ...]
    """Columns of the result."""
    values: tuple[Any, ...]
    """For each column of the key, the literal in the text; None if it is a parameter."""
    parameters: tuple[int, ...]
    """For each column of the key, the index of its parameter; -1 if it is a literal."""

    def key(self, given: Sequence[Any]) -> list[Any]:
        """Return the key for these values of the parameters."""
        return [
            value if place < 0 else given[place]
            for value, place in zip(self.values, self.parameters, strict=True)
        ]


def find_point(
    text: str,
    statement: QueryStatement,
    oids: Sequence[int],
    schemas: Mapping[str, TableSchema],
    conf: Iterable[str] = (),
) -> PointStatement | None:
    """Recognize a query as a point query. Return None if it is not one.

    Args:
        text: The query in PostgreSQL's dialect.
        statement: The parsed query.
        oids: Types of its parameters.
        schemas: The columns of all objects that have contents, by name.
        conf: Names of the Spark settings under which the query runs.
    """
    if statement.as_of is not None or statement.pins or len(oids) > _PARAMETERS_MAX:
        return None
    examples = [_example(number, oid) for number, oid in enumerate(oids)]
    # An example value must not occur in the text, or it could be mistaken for a literal.
    if any(each is None or str(each) in text for each in examples):
        return None
    literals = [spark_literal(each, oid) for each, oid in zip(examples, oids, strict=True)]
    try:
        with map_positions(statement.query):
            query = to_spark(statement.query.as_text(), literals, read_typed=_typed).text
    except InvalidClientData:
        return None  # the text cannot be read before its parameters or the time zone are known
    read = choose_query(query, schemas, conf).read
    if read is None or read.finishing is not None or not read.filter:
        return None
    key, values, parameters = [], [], []
    for test in read.filter:
        if test.op != "=" or test.column in key:
            return None
        value = from_ipc(test.value).column(0)[0].as_py()
        place = examples.index(value) if value in examples else -1
        key.append(test.column)
        values.append(None if place >= 0 else value)
        parameters.append(place)
    # Every parameter must be compared with a column of the key.
    if set(range(len(oids))) != set(parameters) - {-1}:
        return None
    selection = PointSelection(read.name, tuple(key), read.project)
    return PointStatement(selection, read.names, tuple(values), tuple(parameters))


def _typed(text: str, kind: WrittenType) -> str:
    # The session's time zone may change between two executions.
    if kind.spark == "timestamp":
        raise InvalidClientData("a time depends on the session's time zone")
    return typed_literal(text, kind)


def _example(number: int, oid: int) -> int | str | None:
    if oid in _INTEGERS:
        return _FIRST_EXAMPLE + number
    return f"\u00a7{number}\u00a7" if oid in _TEXTS else None
