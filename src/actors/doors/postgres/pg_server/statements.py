"""Prepared statements and portals of one connection, and what clients are told of them.

A statement is parsed when it is prepared. Types of parameters that the client leaves open are those
of their place (`parameter_scope`); else they are text. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import msgspec
import pyarrow as pa

from actors.control.access.open_sessions import ReadRights
from actors.doors.postgres.pg_server.parameter_inference import (
    as_columns,
    named_relations,
    scoped_types,
)
from actors.doors.postgres.pg_server.point_statements import PointStatement
from actors.engine.sql import statements as sql
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import InsertStatement, SqlStatement, TextSpan
from actors.engine.sql.tokens import LexedText
from actors.engine.sql.type_names import read_type
from actors.model.pgwire.messages import BindPortal, FieldDescription, expand_formats
from actors.model.pgwire.row_encoding import EncodedRows
from actors.model.pgwire.type_map import pg_type, pg_type_of_spark
from actors.model.pgwire.type_oids import INT8, INTERVAL, TEXT, UNKNOWN, sized
from actors.model.pgwire.value_parsing import ParameterValue
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import InvalidUsage, SqlSyntaxError

PARAMETERS_MAX: Final = 65_535
"""The protocol counts parameters in 16 bits."""
_COUNTS: Final = frozenset({"LIMIT", "OFFSET", "FETCH"})
_ROWS: Final = (
    sql.QueryStatement,
    sql.SubscribeStatement,
    sql.ShowingStatement,
    sql.FetchCursorStatement,
    sql.ExecutePreparedStatement,
    sql.CreateTokenStatement,
)
_CHANGES: Final = (
    sql.InsertStatement,
    sql.UpdateStatement,
    sql.DeleteStatement,
    sql.MergeStatement,
)
WRITES: Final = (*_CHANGES, sql.CopyStatement)
"""Statements that change rows."""
SETTING_STATEMENTS: Final = (
    sql.SetVariableStatement,
    sql.ResetVariableStatement,
    sql.SetTransactionStatement,
)
"""Statements that change settings of the session."""
TRANSACTION_STATEMENTS: Final = (sql.BeginStatement, sql.CommitStatement, sql.RollbackStatement)
"""Statements that begin or end a transaction."""


def may_have_rows(statement: sql.SqlStatement | None) -> bool:
    """Return whether a statement may have a result with rows."""
    return isinstance(statement, _ROWS) or bool(getattr(statement, "returning", ()))


class PreparedStatement(msgspec.Struct):
    """A prepared statement. `statement` None: the text is empty."""

    text: str
    statement: SqlStatement | None
    parameter_oids: tuple[int, ...]
    zone: str = "UTC"
    """Time zone of times in the text: the session's when it was parsed."""
    described: bool = False
    fields: tuple[FieldDescription, ...] | None = None
    """Columns of the result, in text, once `described`; None: it has no rows."""
    point: PointStatement | None = None
    """The statement as a query of one key, if it is one."""
    headers: dict[tuple[int, ...], bytes] = msgspec.field(default_factory=dict)
    """Descriptions of a point's columns, by the formats that were asked for."""


class OpenPortal(msgspec.Struct):
    """A prepared statement with its parameters, and its rows as far as they were sent."""

    prepared: PreparedStatement
    bound: BindPortal
    tag: str = ""
    shape: pa.Schema | None = None
    oids: tuple[int, ...] | None = None
    batches: AsyncGenerator[pa.RecordBatch, None] | None = None
    found: pa.RecordBatch | None = None
    """All rows, where they were read at once."""
    rights: ReadRights | None = None
    """Checked before rows are sent; None: they are of no object."""
    rows: EncodedRows | None = None
    """Rows of the current batch, from `at` on not sent yet."""
    at: int = 0
    count: int = 0
    """Number of rows that were sent."""
    started: bool = False
    ended: bool = False
    values: Sequence[ParameterValue | None] = ()
    """Values of the parameters, read in the time zone that the session had at the Bind."""

    async def close(self) -> None:
        """End the statement."""
        self.ended = True
        batches, self.batches = self.batches, None
        if batches is not None:
            await batches.aclose()


def describe_fields(
    shape: pa.Schema, formats: Sequence[int] = (), oids: Sequence[int] | None = None
) -> tuple[FieldDescription, ...]:
    """Return the columns of a result as clients are told of them; `oids` are their types, where
    those of the Arrow types are not meant. Raises `RemoteProtocolError` for a wrong number of
    formats."""
    codes = expand_formats(formats, len(shape), "columns")
    kinds = [pg_type(field.type) for field in shape] if oids is None else map(sized, oids)
    fields = zip(shape.names, kinds, codes, strict=True)
    return tuple(FieldDescription(*each) for each in fields)


def count_parameters(span: TextSpan) -> int:
    """Return the greatest number of a parameter in a text. Raises `InvalidUsage` for too many.

    >>> from actors.engine.sql.tokens import SqlDialect
    >>> count_parameters(sql.generated_span(SqlDialect.POSTGRES, "SELECT $2, '$9', $1"))
    2
    """
    numbers = [int(token.text[1:12]) for token in span.tokens if token.kind == "parameter"]
    most = max(numbers, default=0)
    if most > PARAMETERS_MAX:
        raise InvalidUsage(f"there is no parameter ${most}: at most {PARAMETERS_MAX}")
    return most


def infer_parameters(
    span: TextSpan,
    statement: SqlStatement | None,
    given: Sequence[int],
    schemas: Mapping[str, TableSchema],
) -> tuple[int, ...]:
    """Return the type of each parameter of a statement, by OID.

    Args:
        span: The statement in PostgreSQL's dialect.
        statement: The same, parsed.
        given: The types that the client named, from the first parameter on; 0 for none.
        schemas: The objects that the text may name, by name.
    """
    count = max(count_parameters(span), len(given))
    # Columns of an INSERT are sure, and so are casts: what the scope tells is laid below them.
    found = _by_casts(span)
    if isinstance(statement, (sql.QueryStatement, sql.SubscribeStatement, *_CHANGES)) and count:
        found = scoped_types(_queried(span, statement), schemas) | found
    if isinstance(statement, InsertStatement):
        found |= _by_columns(statement, schemas)
    oids = []
    for number in range(1, count + 1):
        named = given[number - 1] if number <= len(given) else 0
        oids.append(named if named not in (0, UNKNOWN) else found.get(number, TEXT))
    return tuple(oids)


def relations_of(span: TextSpan, statement: SqlStatement) -> list[str]:
    """Return the names of the relations that must be there when a statement is parsed; PostgreSQL
    looks for those of others when they are carried out."""
    if not isinstance(statement, (sql.QueryStatement, *_CHANGES)):
        return []
    return named_relations(_queried(span, statement))


def _queried(span: TextSpan, statement: SqlStatement | None) -> str:
    """Return the part of a text that says how its parameters are used, in plain SQL."""
    match statement:
        case sql.QueryStatement(query=query) | sql.SubscribeStatement(query=query) if query:
            return as_columns(query)
        case InsertStatement(rows=tuple() as rows) if len(rows) > 1:
            # Each row is like the first one, and `_by_columns` has the types of all.
            begin = TextSpan(span.lexed, span.first, rows[0][-1].last)
            return as_columns(begin) + as_columns(
                TextSpan(span.lexed, rows[-1][-1].last, span.last)
            )
    return as_columns(span)


def _by_casts(span: TextSpan) -> dict[int, int]:
    """Return types of parameters that are cast, or that count rows."""
    found: dict[int, int] = {}
    before = ""
    for place, token in enumerate(span.tokens, span.first):
        if token.kind == "parameter":
            oid = _cast(span.lexed, place) or (INT8 if before in _COUNTS else 0)
            if oid:
                found.setdefault(int(token.text[1:12]), oid)
        before = token.word
    return found


def _cast(lexed: LexedText, place: int) -> int:
    """Return the type of the parameter in ``$1::type``; 0 if there is none."""
    reader = StatementReader(lexed, place + 1)
    if not reader.take("::"):
        return 0
    try:
        oid = pg_type_of_spark(read_type(reader)).oid
        # An interval is given as text, which Spark casts: it reads other texts than PostgreSQL.
        return TEXT if oid == INTERVAL else oid
    except SqlSyntaxError:
        return 0  # whoever reads the statement says so


def _by_columns(statement: InsertStatement, schemas: Mapping[str, TableSchema]) -> dict[int, int]:
    """Return types of parameters that are values of an INSERT's columns."""
    schema = {fold(name): each for name, each in schemas.items()}.get(fold(statement.table[-1]))
    if schema is None or statement.rows is None:
        return {}
    types = {fold(column.name): column.type for column in schema.columns}
    names = [fold(name) for name in statement.columns or schema.names]
    found = {}
    for row in statement.rows:
        for name, span in zip(names, row, strict=False):
            (value, *more) = span.tokens
            if value.kind == "parameter" and not more and name in types:
                found[int(value.text[1:])] = pg_type_of_spark(types[name]).oid
    return found
