"""Prepared statements and portals of one connection, and their descriptions for clients.

A statement is parsed when it is prepared. If the client does not specify the type of a parameter,
it is inferred from the context (`parameter_inference`), or else is text. Pure.
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
"""Maximum number of parameters: the protocol counts them in 16 bits."""
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
"""Statements that change the session's settings."""
TRANSACTION_STATEMENTS: Final = (sql.BeginStatement, sql.CommitStatement, sql.RollbackStatement)
"""Statements that begin or end a transaction."""


def may_have_rows(statement: sql.SqlStatement | None) -> bool:
    """Return whether a statement may have a result with rows."""
    return isinstance(statement, _ROWS) or bool(getattr(statement, "returning", ()))


class PreparedStatement(msgspec.Struct):
    """A prepared statement of the extended protocol.

    `statement` is None for an empty text, and for a catalog query.
    """

    text: str
    statement: SqlStatement | None
    parameter_oids: tuple[int, ...]
    zone: str = "UTC"
    """Time zone of times in the text: the session's zone when it was parsed."""
    described: bool = False
    """True once the first Describe has set `fields`."""
    fields: tuple[FieldDescription, ...] | None = None
    """The columns of the result in text format; None if it has no rows."""
    point: PointStatement | None = None
    """The statement as a point query; None if it is not one."""
    headers: dict[tuple[int, ...], bytes] = msgspec.field(default_factory=dict)
    """Cached RowDescription messages of a point query, by the requested formats."""


class OpenPortal(msgspec.Struct):
    """A prepared statement with its parameters, and the progress of sending its rows."""

    prepared: PreparedStatement
    bound: BindPortal
    tag: str = ""
    """The result's command tag; set, like `shape`, `oids` and `rights`, when it is executed."""
    shape: pa.Schema | None = None
    oids: tuple[int, ...] | None = None
    batches: AsyncGenerator[pa.RecordBatch, None] | None = None
    """Batches that were not read yet; None before the execution and after `close`."""
    found: pa.RecordBatch | None = None
    """All rows, if they were read in one piece."""
    rights: ReadRights | None = None
    """Checked before rows are sent; None: the rows are not from any object."""
    rows: EncodedRows | None = None
    """The encoded rows of the current batch."""
    at: int = 0
    """The first row of `rows` that was not sent yet."""
    count: int = 0
    """Number of rows sent so far."""
    started: bool = False
    """True once the statement is executed."""
    ended: bool = False
    """True once all rows were sent or the portal is closed."""
    values: Sequence[ParameterValue | None] = ()
    """Values of the parameters, parsed in the session's time zone at the time of the Bind."""

    async def close(self) -> None:
        """Stop the statement, and close its rows."""
        self.ended = True
        batches, self.batches = self.batches, None
        if batches is not None:
            await batches.aclose()


def describe_fields(
    shape: pa.Schema, formats: Sequence[int] = (), oids: Sequence[int] | None = None
) -> tuple[FieldDescription, ...]:
    """Describe the columns of a result for clients.

    `oids`: the columns' PostgreSQL types, unless they follow from their Arrow types. Raises
    `RemoteProtocolError` for a wrong number of formats.
    """
    codes = expand_formats(formats, len(shape), "columns")
    kinds = [pg_type(field.type) for field in shape] if oids is None else map(sized, oids)
    fields = zip(shape.names, kinds, codes, strict=True)
    return tuple(FieldDescription(*each) for each in fields)


def count_parameters(span: TextSpan) -> int:
    """Return the highest parameter number in a text. Raises `InvalidUsage` if it is too high.

    >>> from actors.engine.sql.tokens import SqlDialect
    >>> count_parameters(sql.generated_span(SqlDialect.POSTGRES, "SELECT $2, '$9', $1"))
    2
    """
    numbers = [int(token.text[1:12]) for token in span.tokens if token.kind == "parameter"]
    most = max(numbers, default=0)
    if most > PARAMETERS_MAX:
        raise InvalidUsage(f"there is no parameter ${most} (limit {PARAMETERS_MAX})")
    return most


def infer_parameters(
    span: TextSpan,
    statement: SqlStatement | None,
    given: Sequence[int],
    schemas: Mapping[str, TableSchema],
) -> tuple[int, ...]:
    """Return the type OID of each parameter of a statement.

    Args:
        span: The statement in PostgreSQL's dialect.
        statement: The parsed statement.
        given: The types that the client specified, starting with the first parameter; 0 for none.
        schemas: The columns of all objects that the text may name, by name.
    """
    count = max(count_parameters(span), len(given))
    # Casts and columns of an INSERT are certain, so they override what the scope suggests.
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
    """Return the names of the relations that must exist when a statement is parsed.

    For other kinds of statements, PostgreSQL checks this only when they are executed.
    """
    if not isinstance(statement, (sql.QueryStatement, *_CHANGES)):
        return []
    return named_relations(_queried(span, statement))


def _queried(span: TextSpan, statement: SqlStatement | None) -> str:
    """Return the part of a statement, in plain SQL, from which parameter types can be inferred."""
    match statement:
        case sql.QueryStatement(query=query) | sql.SubscribeStatement(query=query) if query:
            return as_columns(query)
        case InsertStatement(rows=tuple() as rows) if len(rows) > 1:
            # Only the first of several rows is needed; `_by_columns` handles all of them.
            begin = TextSpan(span.lexed, span.first, rows[0][-1].last)
            return as_columns(begin) + as_columns(
                TextSpan(span.lexed, rows[-1][-1].last, span.last)
            )
    return as_columns(span)


def _by_casts(span: TextSpan) -> dict[int, int]:
    """Return the types of parameters that are cast, or that follow LIMIT, OFFSET or FETCH."""
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
    """Return the type to which ``$1::type`` casts a parameter; 0 if there is no cast."""
    reader = StatementReader(lexed, place + 1)
    if not reader.take("::"):
        return 0
    try:
        oid = pg_type_of_spark(read_type(reader)).oid
        # An interval is passed as text and cast by Spark, whose syntax differs from PostgreSQL's.
        return TEXT if oid == INTERVAL else oid
    except SqlSyntaxError:
        return 0  # the error is reported when the statement is translated


def _by_columns(statement: InsertStatement, schemas: Mapping[str, TableSchema]) -> dict[int, int]:
    """Return the types of parameters that an INSERT assigns directly to columns."""
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
