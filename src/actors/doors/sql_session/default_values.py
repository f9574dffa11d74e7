"""Column defaults: how DDL checks them, and their values in a statement.

CREATE TABLE and SET DEFAULT check an expression by Spark's rules: it has no columns or queries, is
constant within a statement, and can be assigned to its column. DDL stores the value, so that writes
do not need Spark. Only an expression whose value differs between statements is computed by each
statement, once. If the defaults changed after a statement read them, the service refuses its write,
and the statement runs again.
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
"""Maps functions to the kind of their value: the time or the day of the statement."""
_CHANGING: Final = re.compile(
    r"current_\w*|now|localtime\w*|curdate|\w*unix_timestamp|\w*aes_encrypt"
)
"""Names of functions whose values differ between statements even for constant arguments."""
_USER: Final = re.compile(r"(current_|session_)?user")
_NOT_CONSTANT: Final = (
    "INVALID_NON_DETERMINISTIC_EXPRESSIONS",
    "UNSUPPORTED_EXPR_FOR_OPERATOR",
    "UNSUPPORTED_GENERATOR",
)
"""Spark's error conditions for an expression that is not constant, in `_computed_value`'s query."""
_CHANGING_TEXTS: Final = re.compile(r"\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Strings that Spark casts to a moment that depends on the current time."""
_DUMMY: Final = pa.table({"row": [0]})


class TableScope(msgspec.Struct, frozen=True):
    """The table whose rows a statement changes, with all that the statement needs for it.

    `parameters` are the statement's parameters, `values` the values of the table's column defaults,
    and `digest` the digest of all its defaults (None: the statement uses none).
    """

    context: SessionContext
    table: str
    schema: TableSchema
    parameters: Sequence[SqlParameter] = ()
    values: DefaultValues = {}
    digest: str | None = None

    def default(self, column: TableColumn) -> str:
        """Return a column's default as a Spark expression of the column's type."""
        return _default_literal(self.values.get(column.name), column)

    def spark(self, span: TextSpan) -> MappedSql:
        """Translate a part of the statement to Spark's dialect."""
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
    """Return whether a value is the word DEFAULT, which is not an expression."""
    return [token.word for token in span.tokens] == ["DEFAULT"]


# -- statements of rows ----------------------------------------------------------------------------


async def with_defaults(scope: TableScope, wanted: Callable[[], Collection[str]]) -> TableScope:
    """Return the scope with the values of the table's defaults.

    `wanted` returns the names of the columns whose defaults the statement uses. It is called only
    if Spark has to compute a default. Raises as `SessionContext.collect` does.
    """
    context, schema = scope.context, scope.schema
    defaults = context.catalog.column_defaults(scope.table)
    if not defaults:
        return msgspec.structs.replace(scope, digest="")
    now = datetime.now(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    values = known_values(defaults, schema, now // _MICROSECOND)
    if not context.times.is_utc:
        # The date and the local time depend on the session's zone, so leave them to Spark.
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
    """Await `write`, and retry it once if the table's definition was stale.

    Raises `DefinitionChanged` if the definition changed again, and what `write` raises.
    """
    try:
        return await write()
    except DefinitionChanged:
        # Another session altered the table after this one read the catalog.
        context.catalog.forget()
        return await write()


# -- definitions -----------------------------------------------------------------------------------


async def defined_default(
    context: SessionContext, table: str, column: TableColumn, span: TextSpan
) -> ColumnDefault | None:
    """Check an expression as the DEFAULT of a column, and return the default; None for NULL.

    Raises:
        DefiniteError: The expression fails when it is evaluated.
        QueryRejected: Spark refuses the expression; or it names a column, is not constant, or
            cannot be assigned to the column; or its value does not fit.
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
        # Fail now if statements could not write the value as a literal.
        _default_literal(made[0], column)
    except (TypeMismatch, ValueError, OverflowError) as error:
        raise _refused(f"{error}: the value of {span.text} does not fit", span) from None
    return None if made.null_count else constant_default(text, made)


def _refused(problem: str, span: TextSpan) -> QueryRejected:
    """Return the error for an invalid DEFAULT, with its position in the statement."""
    error = QueryRejected(problem)
    error.position = span.place_of(0)
    return error


def _local_value(context: SessionContext, span: TextSpan, column: TableColumn) -> pa.Array | None:
    """Return the value of a literal or of plain arithmetic; None if Spark must compute it."""
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
    """Return the value of the expression, which Spark checks and computes."""
    # Without FROM, no name is a column. In a join condition Spark refuses nondeterministic
    # functions, aggregates, windows and generators, so what it accepts is constant within a
    # statement.
    asked = concat_sql(
        "SELECT CAST(",
        query.before(f" AS {column.type}) AS value"),
        ", (",
        query.before(") AS given"),
        " WHERE EXISTS (SELECT 1 FROM (SELECT 1) LEFT JOIN (SELECT 1) ON (",
        query.before(") IS NULL)"),
    )
    try:
        # The value is stored for statements of all sessions.
        with context.as_service():
            rows = await context.collect(asked.around(span))
    except QueryRejected as error:
        if not any(condition in str(error) for condition in _NOT_CONSTANT):
            raise
        raise _refused(
            f"table {table}, column {column.name}: invalid DEFAULT {span.text}: expected a "
            f"constant expression, or one such as current_timestamp()",
            span,
        ) from None
    try:
        check_assignable(table, pa.schema([rows.schema.field(1)]), [column])
    except TypeMismatch as error:
        raise _refused(f"{error}, as its DEFAULT", span) from None
    # Spark casts NaN to a NULL decimal.
    if rows.column(0).null_count > rows.column(1).null_count:
        raise _refused(f"table {table}, column {column.name}: {column.type} cannot hold NaN", span)
    return rows.column(0).cast(arrow_type(column.type)).combine_chunks()


def _refuse_user(tokens: Sequence[SqlToken], span: TextSpan) -> None:
    """Raise `QueryRejected` for an expression that contains current_user or a synonym."""
    for token in tokens:
        if token.kind == "word" and _USER.fullmatch(token.text.lower()):
            # Spark would return its own user, whoever writes the row.
            raise _refused(
                f"{token.text} is not supported in a DEFAULT: write the name as a text", span
            )


def _moment_of(tokens: Sequence[SqlToken]) -> MomentKind:
    """Return which kind of statement time an expression in Spark's dialect is; "" if none."""
    words = [token.text.lower() for token in tokens]
    if words[1:] in ([], ["(", ")"]):
        # Only these may omit the parentheses.
        bare = words[1:] or words[0] in ("current_timestamp", "current_date", "localtimestamp")
        return _MOMENTS.get(words[0], "") if bare else ""
    return ""


def _is_changing(tokens: Iterable[SqlToken]) -> bool:
    """Return whether an expression may have a different value in a later statement.

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
    """Return a literal for a timestamptz column with its UTC offset.

    None for other expressions, and where Spark itself reads the literal correctly.
    """
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
    """Return a value of the statement as a Spark expression: the column's default for DEFAULT, else
    the expression, cast to the column's type unless `cast` is False.

    `as_text`: return a number that must be exact as its digits (see `number_text`).
    """
    context = scope.context
    exact = context.dialect is SqlDialect.POSTGRES

    def known(literal: str) -> MappedSql:
        return concat_sql((as_text and number_text(literal, column.type)) or literal)

    # DEFAULT is not an expression that Spark knows.
    if is_default(span):
        return known(scope.default(column))
    moment = _moment_literal(context, span) if column.type == "timestamp" else None
    if moment is not None:
        return concat_sql(f"CAST('{moment}' AS timestamp)").around(span)
    if exact:
        # Read a text as PostgreSQL does; Spark's cast would accept other texts.
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
    # Spark reports a value that does not fit at the cast, which the user did not write. So map all
    # positions of the cast to the expression.
    if not cast:
        return text.around(span)
    return assigned_cast(text, column, context.spark_conf()).around(span)
