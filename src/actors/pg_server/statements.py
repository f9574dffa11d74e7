"""Prepared statements and portals of one connection, and what clients are told of them.

A statement is parsed when it is prepared. Types of parameters that the client leaves open are those
of the columns that they stand beside; else they are text. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import msgspec
import pyarrow as pa

from actors.access.open_sessions import ReadRights
from actors.errors import InvalidUsage, SqlSyntaxError
from actors.pg_server.point_statements import PointStatement
from actors.pgwire.messages import BindPortal, FieldDescription, expand_formats
from actors.pgwire.row_encoding import EncodedRows
from actors.pgwire.type_map import INT8, INTERVAL, TEXT, UNKNOWN, pg_type, pg_type_of_spark, sized
from actors.pgwire.value_parsing import ParameterValue
from actors.plan.schema import TableSchema
from actors.protocol.relations import fold
from actors.sql import statements as sql
from actors.sql.reader import LexedText, StatementReader, lex_text
from actors.sql.statements import InsertStatement, SqlStatement
from actors.sql.tokens import SqlDialect, SqlToken, lex_sql, name_value
from actors.sql.type_names import read_type

PARAMETERS_MAX: Final = 65_535
"""The protocol counts parameters in 16 bits."""
_COMPARISONS: Final = frozenset({"=", "<>", "!=", "<", "<=", ">", ">=", "LIKE", "ILIKE", "+", "-"})
_COUNTS: Final = frozenset({"LIMIT", "OFFSET", "FETCH"})
_PASSED: Final = frozenset({"(", ",", "IN", "BETWEEN", "NOT"})
"""Words between a column and a parameter that it is compared with: ``id IN ($1, $2)``."""
_ROWS: Final = (
    sql.QueryStatement,
    sql.SubscribeStatement,
    sql.ShowObjectsStatement,
    sql.ShowColumnsStatement,
    sql.ShowCreateStatement,
    sql.ShowSettingStatement,
    sql.DescribeStatement,
    sql.ExplainStatement,
    sql.FetchCursorStatement,
    sql.ExecutePreparedStatement,
    sql.CreateTokenStatement,
    sql.ShowRolesStatement,
    sql.ShowGrantsStatement,
)
WRITES: Final = (
    sql.InsertStatement,
    sql.UpdateStatement,
    sql.DeleteStatement,
    sql.MergeStatement,
    sql.CopyStatement,
)
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


class KeptStatement(msgspec.Struct):
    """A prepared statement. `statement` None: the text is empty."""

    text: str
    statement: SqlStatement | None
    parameter_oids: tuple[int, ...]
    zone: str = "UTC"
    """Time zone of times in the text: the session's when it was parsed."""
    whole: str = ""
    """The text as it was sent, in which the positions of errors count."""
    offset: int = 0
    """Offset of `text` in it."""
    described: bool = False
    fields: tuple[FieldDescription, ...] | None = None
    """Columns of the result, in text, once `described`; None: it has no rows."""
    point: PointStatement | None = None
    """The statement as a query of one key, if it is one."""
    headers: dict[tuple[int, ...], bytes] = msgspec.field(default_factory=dict)
    """Descriptions of a point's columns, by the formats that were asked for."""


class OpenPortal(msgspec.Struct):
    """A prepared statement with its parameters, and its rows as far as they were sent."""

    kept: KeptStatement
    bound: BindPortal
    values: list[ParameterValue | None] = []
    """Values of its parameters, read in the time zone that the session had then."""
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
    begun: bool = False
    ended: bool = False

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
    found = []
    for place, (field, code) in enumerate(zip(shape, codes, strict=True)):
        kind = pg_type(field.type) if oids is None else sized(oids[place])
        found.append(FieldDescription(field.name, kind.oid, kind.size, kind.modifier, code))
    return tuple(found)


def count_parameters(text: str) -> int:
    """Return the greatest number of a parameter in a text. Raises `InvalidUsage` for too many.

    >>> count_parameters("SELECT $2, '$9', $1")
    2
    """
    numbers = [
        int(token.text[1:12])
        for token in lex_sql(text, SqlDialect.POSTGRES)
        if token.kind == "parameter"
    ]
    most = max(numbers, default=0)
    if most > PARAMETERS_MAX:
        raise InvalidUsage(f"there is no parameter ${most}: at most {PARAMETERS_MAX}")
    return most


def infer_parameters(
    text: str,
    statement: SqlStatement | None,
    given: Sequence[int],
    schemas: Mapping[str, TableSchema],
) -> tuple[int, ...]:
    """Return the type of each parameter of a statement, by OID.

    Args:
        text: The statement in PostgreSQL's dialect.
        statement: The same, parsed.
        given: The types that the client named, from the first parameter on; 0 for none.
        schemas: The objects that the text may name, by name.
    """
    count = max(count_parameters(text), len(given))
    # Columns of an INSERT are sure, neighbours a guess: the former are laid over the latter. A cast
    # says its type itself, and an INSERT's value with one is none of `_by_columns`.
    found = dict(_by_neighbours(text, _column_types(schemas)))
    if isinstance(statement, InsertStatement):
        found |= _by_columns(statement, schemas)
    oids = []
    for number in range(1, count + 1):
        named = given[number - 1] if number <= len(given) else 0
        oids.append(named if named not in (0, UNKNOWN) else found.get(number, TEXT))
    return tuple(oids)


def _column_types(schemas: Mapping[str, TableSchema]) -> dict[str, int]:
    """Return the types of columns by folded name, of those whose types agree in all objects."""
    found: dict[str, set[int]] = {}
    for schema in schemas.values():
        for column in schema.columns:
            found.setdefault(fold(column.name), set()).add(pg_type_of_spark(column.type).oid)
    return {name: oids.pop() for name, oids in found.items() if len(oids) == 1}


def _by_neighbours(text: str, columns: Mapping[str, int]) -> dict[int, int]:
    """Return types of parameters that are compared with a column, or that count rows."""
    lexed = lex_text(text, SqlDialect.POSTGRES)
    tokens = lexed.tokens
    found: dict[int, int] = {}
    last: int | None = None
    between = False
    for place, token in enumerate(tokens):
        if token.kind == "parameter":
            number = int(token.text[1:12])
            oid = _cast(lexed, place) or (
                last if last is not None else _following(tokens, place, columns)
            )
            if oid is not None:
                found.setdefault(number, oid)
            continue
        # What precedes a parameter decides: `LIMIT $1` counts rows, `id = $1` is of id's type.
        if token.word in _COUNTS:
            last = INT8
        elif token.word == "AND" and between:
            between = False  # of BETWEEN, not the next condition
        elif token.word in _COMPARISONS or token.word in _PASSED:
            between = between or token.word == "BETWEEN"
        elif token.kind in ("word", "name"):
            last = columns.get(_folded(token))
        else:
            last = None
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


def _following(tokens: Sequence[SqlToken], place: int, columns: Mapping[str, int]) -> int | None:
    """Return the type of the column in ``$1 = column``."""
    after = tokens[place + 1 : place + 5]
    if len(after) < 2 or after[0].word not in _COMPARISONS:
        return None
    # A qualified name: the column is its last part.
    name = after[3] if len(after) == 4 and after[2].text == "." else after[1]
    return columns.get(_folded(name)) if name.kind in ("word", "name") else None


def _folded(token: SqlToken) -> str:
    """Return the name that a word or a quoted identifier stands for, folded."""
    return fold(name_value(token.text) if token.kind == "name" else token.text)


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
            value = span.text.strip()
            if value.startswith("$") and value[1:].isdecimal() and name in types:
                found[int(value[1:])] = pg_type_of_spark(types[name]).oid
    return found
