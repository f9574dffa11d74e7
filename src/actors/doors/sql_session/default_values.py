"""Defaults of columns: what DDL makes of them, and their values in a statement.

CREATE TABLE and SET DEFAULT check an expression as Spark does: it has no columns and no queries,
is constant within a statement, and assignable to its column. Its value is kept, so that writes need
no Spark; only what differs from statement to statement is computed by each, once. A statement that
used other defaults than there are by then is refused by the service, and carried out again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

import msgspec
import pyarrow as pa

from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.mapped_sql import MappedSql, concat_sql
from actors.doors.sql_session.row_arithmetic import arithmetic_of, computed_array
from actors.doors.sql_session.row_values import (
    NotLocal,
    SqlParameter,
    column_array,
    literal_value,
    spark_literal,
)
from actors.doors.sql_session.store_assignment import (
    assigned_cast,
    check_assignable,
    exact_cast,
    number_text,
)
from actors.doors.sql_session.transaction import as_stored
from actors.engine.sql.statements import QualifiedName, TextSpan
from actors.engine.sql.tokens import (
    SqlDialect,
    SqlToken,
    lex_sql,
    name_value,
    text_value,
)
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.plan.column_defaults import (
    ColumnDefault,
    DefaultValues,
    MomentKind,
    constant_default,
    defaults_digest,
    known_values,
)
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.protocol.relations import fold
from actors.runtime.errors import DefinitionChanged, QueryRejected, TypeMismatch

T = TypeVar("T")
_MOMENTS: Final[dict[str, MomentKind]] = {
    "current_timestamp": "timestamp",
    "now": "timestamp",
    "localtimestamp": "timestamp",
    "current_date": "date",
    "curdate": "date",
}
"""Functions that give a statement's time or day."""
_CHANGING: Final = re.compile(
    r"current_\w*|now|localtime\w*|curdate|\w*unix_timestamp|\w*aes_encrypt"
)
"""Names of functions of constants whose values differ from statement to statement."""
_USER: Final = re.compile(r"(current_|session_)?user")
_NOT_CONSTANT: Final = (
    "INVALID_NON_DETERMINISTIC_EXPRESSIONS",
    "UNSUPPORTED_EXPR_FOR_OPERATOR",
    "UNSUPPORTED_GENERATOR",
)
"""Spark's conditions for what `_computed_value` asks of an expression."""
_CHANGING_TEXTS: Final = re.compile(r"\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Texts that Spark casts to another moment each day."""
_DUMMY: Final = pa.table({"row": [0]})


class TableScope(msgspec.Struct, frozen=True):
    """A table whose rows a statement changes, and what it is carried out with: its session, its
    parameters, the values of the table's defaults, and the digest of all its defaults (None: the
    statement takes none)."""

    context: SessionContext
    table: str
    schema: TableSchema
    parameters: Sequence[SqlParameter] = ()
    values: DefaultValues = {}
    digest: str | None = None

    def default(self, column: TableColumn) -> str:
        """Return the default of a column as an expression of Spark's, of the column's type."""
        return _default_literal(self.values.get(column.name), column)

    def spark(self, span: TextSpan) -> MappedSql:
        """Return a part of the statement in Spark's dialect."""
        return self.context.spark(span, self.parameters)


def _default_literal(value: pa.Scalar | None, column: TableColumn) -> str:
    return spark_literal(None if value is None else value.as_py(), column.type)


async def open_table(
    context: SessionContext, name: QualifiedName, parameters: Sequence[SqlParameter]
) -> TableScope:
    """Return the scope of a statement that changes a table. Raises as `find_table` does."""
    table, schema = await context.catalog.find_table(name)
    return TableScope(context, table, schema, parameters)


def is_default(span: TextSpan) -> bool:
    """Return whether a value is the word DEFAULT, which is no expression."""
    return [token.word for token in span.tokens] == ["DEFAULT"]


# -- statements of rows ----------------------------------------------------------------------------


async def with_defaults(scope: TableScope, wanted: Callable[[], Collection[str]]) -> TableScope:
    """Return a statement's scope with the table's defaults. `wanted` returns the columns whose
    defaults it takes; it is asked only if Spark would have to compute one. Raises as
    `SessionContext.collect`."""
    context, schema = scope.context, scope.schema
    defaults = context.catalog.column_defaults(scope.table)
    if not defaults:
        return msgspec.structs.replace(scope, digest="")
    now = datetime.now(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    values = known_values(defaults, schema, now // _MICROSECOND)
    if not context.times.is_utc:
        # The day and the clock's time are those of the session's zone, which Spark knows.
        for each in schema.columns:
            default = defaults.get(each.name)
            is_clock = each.type == "timestamp" and default and default.moment == "timestamp"
            if default and default.moment and not is_clock:
                del values[each.name]
    rest = [each for each in schema.columns if each.name in defaults and each.name not in values]
    if rest:
        asked = wanted()
        rest = [each for each in rest if each.name in asked]
    if rest:
        casts = (f"CAST(({defaults[each.name].text}) AS {each.type})" for each in rest)
        with context.as_service():
            rows = await context.collect(concat_sql(f"SELECT {', '.join(casts)}"))
        for number, column in enumerate(rest):
            values[column.name] = rows.column(number).cast(arrow_type(column.type))[0]
    return msgspec.structs.replace(scope, values=values, digest=defaults_digest(defaults))


_MICROSECOND: Final = datetime.resolution


def columns_of_default(columns: Iterable[TableColumn], values: Iterable[TextSpan]) -> set[str]:
    """Return the names of the columns whose value is DEFAULT."""
    pairs = zip(columns, values, strict=False)
    return {column.name for column, span in pairs if is_default(span)}


async def with_present_definition(context: SessionContext, write: Callable[[], Awaitable[T]]) -> T:
    """Carry out a write; once more if the session knew another table than there is. Raises
    `DefinitionChanged` if they changed again, and what the write raises."""
    try:
        return await write()
    except DefinitionChanged:
        # Another session has altered it since this one read the objects.
        context.catalog.forget()
        return await write()


# -- definitions -----------------------------------------------------------------------------------


async def defined_default(
    context: SessionContext, table: str, column: TableColumn, span: TextSpan
) -> ColumnDefault | None:
    """Return the default that an expression of the statement is to a column; None if it is NULL.

    Raises:
        DefiniteError: Its evaluation fails.
        QueryRejected: Spark refuses it; it names a column, is not constant, or is not assignable to
            the column; or its value does not fit.
    """
    query = context.spark(span)
    text = query.text
    kind = arrow_type(column.type)
    try:
        value = _local_value(context, span, column)
    except (TypeMismatch, InvalidClientData) as error:
        raise _refused(f"{error}: the value of {span.text} does not fit", span) from None
    if value is None:
        tokens = lex_sql(text)
        _refuse_user(tokens, span)
        moment = _moment_of(tokens)
        if moment and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
            return ColumnDefault(text, moment=moment)
        value = await _computed_value(context, table, column, query, span)
        if _is_changing(tokens):
            return ColumnDefault(text)
    shape = TableSchema((TableColumn(column.name, column.type),))
    try:
        stored = as_stored(table, pa.table([value], schema=shape.arrow()), shape)
        made = stored.column(0).combine_chunks()
        # Statements write it as a literal, too.
        _default_literal(made[0], column)
    except (TypeMismatch, ValueError, OverflowError) as error:
        raise _refused(f"{error}: the value of {span.text} does not fit", span) from None
    return None if made.null_count else constant_default(text, made)


def _refused(problem: str, span: TextSpan) -> QueryRejected:
    """Return the error for an expression that is no DEFAULT, at its place in the statement."""
    error = QueryRejected(problem)
    error.position = span.place_of(0)
    return error


def _local_value(context: SessionContext, span: TextSpan, column: TableColumn) -> pa.Array | None:
    """Return the value of a literal, or of plain arithmetic; None for another expression."""
    try:
        value = literal_value(span, ())
        return column_array([value], column, times=context.times)
    except NotLocal:
        pass
    try:
        node = arithmetic_of(span, ())
        return computed_array(node, _DUMMY, TableSchema(()), "", column).combine_chunks()
    except NotLocal:
        return None


async def _computed_value(
    context: SessionContext,
    table: str,
    column: TableColumn,
    query: MappedSql,
    span: TextSpan,
) -> pa.Array:
    """Return the value that Spark computes, after its checks."""
    # Without FROM no name is a column. The condition of a join refuses what is not deterministic,
    # and aggregates, windows and generators, so that what is left is constant in a statement.
    asked = concat_sql(
        "SELECT CAST(",
        query.before(f" AS {column.type}) AS value"),
        ", (",
        query.before(") AS given"),
        " WHERE EXISTS (SELECT 1 FROM (SELECT 1) LEFT JOIN (SELECT 1) ON (",
        query.before(") IS NULL)"),
    )
    try:
        # It is kept for statements of all sessions.
        with context.as_service():
            rows = await context.collect(asked.around(span))
    except QueryRejected as error:
        if not any(condition in str(error) for condition in _NOT_CONSTANT):
            raise
        raise _refused(
            f"table {table}, column {column.name}: {span.text} is no DEFAULT: it is not constant "
            f"(constant expressions, and current_timestamp() and its like, are)",
            span,
        ) from None
    try:
        check_assignable(table, pa.schema([rows.schema.field(1)]), [column])
    except TypeMismatch as error:
        raise _refused(f"{error}, as its DEFAULT", span) from None
    # Spark makes NULL of a NaN that is cast to a decimal.
    if rows.column(0).null_count > rows.column(1).null_count:
        raise _refused(f"table {table}, column {column.name}: {column.type} has no NaN", span)
    return rows.column(0).cast(arrow_type(column.type)).combine_chunks()


def _refuse_user(tokens: Sequence[SqlToken], span: TextSpan) -> None:
    """Raise `QueryRejected` for an expression of the user's name."""
    for token in tokens:
        if token.kind == "word" and _USER.fullmatch(token.text.lower()):
            # Spark would give its own user, whoever writes the row.
            raise _refused(f"{token.text} is not known in a DEFAULT: write the name", span)


def _moment_of(tokens: Sequence[SqlToken]) -> MomentKind:
    """Return which time of a statement an expression of Spark's dialect is; empty: none."""
    words = [token.text.lower() for token in tokens]
    if words[1:] in ([], ["(", ")"]):
        # Some are known without brackets, and Spark refuses the others before.
        bare = words[1:] or words[0] in ("current_timestamp", "current_date", "localtimestamp")
        return _MOMENTS.get(words[0], "") if bare else ""
    return ""


def _is_changing(tokens: Iterable[SqlToken]) -> bool:
    """Return whether an expression may have another value in a later statement.

    >>> texts = ["date_add(current_date(), 7)", "concat('now', 'x')", "upper('a') || 'b'"]
    >>> [_is_changing(lex_sql(text)) for text in texts]
    [True, True, False]
    """
    for token in tokens:
        match token.kind:
            case "word" if _CHANGING.fullmatch(token.text.lower()):
                return True
            case "name" if _CHANGING.fullmatch(fold(name_value(token.text))):
                return True
            case "text" if _CHANGING_TEXTS.match(text_value(token.text)):
                return True
    return False


def _moment_literal(context: SessionContext, span: TextSpan) -> str | None:
    """Return a text that is for a timestamptz with its offset; None for other expressions, and
    where Spark reads it by itself."""
    times = context.times
    if times.is_utc or context.dialect is SqlDialect.SPARK:
        return None
    try:
        value = literal_value(span, ())
    except NotLocal:
        return None
    return times.absolute(value.value) if isinstance(value, SqlParameter) else None


def cast_or_default(
    scope: TableScope,
    span: TextSpan,
    column: TableColumn,
    *,
    cast: bool = True,
    as_text: bool = False,
) -> MappedSql:
    """Return an expression of the statement, cast to a column's type (unless `cast` is False), or
    the column's default. `as_text`: a number that must be exact is given as its digits
    (`number_text`)."""
    context = scope.context
    exact = context.dialect is SqlDialect.POSTGRES

    def known(literal: str) -> MappedSql:
        return concat_sql((as_text and number_text(literal, column.type)) or literal)

    # DEFAULT is no expression.
    if is_default(span):
        return known(scope.default(column))
    moment = _moment_literal(context, span) if column.type == "timestamp" else None
    if moment is not None:
        return concat_sql(f"CAST('{moment}' AS timestamp)").around(span)
    if exact:
        # A text is read as PostgreSQL does, and not as Spark casts it.
        try:
            value = literal_value(span, scope.parameters)
            found = column_array([value], column, times=context.times)
            return known(spark_literal(found[0].as_py(), column.type)).around(span)
        except NotLocal:
            pass
    text = scope.spark(span)
    digits = (number_text if as_text else exact_cast)(f"({text.text})", column.type)
    if exact and digits:
        return text.within(digits).around(span)
    # Spark tells of a value that does not fit at the cast, which the user did not write.
    if not cast:
        return text.around(span)
    return assigned_cast(text, column, context.spark_conf()).around(span)
