"""Converts values between SQL text, Python and Arrow.

Literals and parameters of an INSERT are converted here if the result is certain to equal Spark's
cast to the column's type; Spark computes everything else. In the other direction, rows become Spark
literals, for queries that read the changes of an open transaction. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.doors.sql_session.time_literals import TimeLiterals, local_in, moment_in
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import SqlDialect, SqlToken, quote_name, quote_text
from actors.engine.sql.type_names import read_written_type
from actors.model.pgwire.column_parsing import Rounding, fit_value
from actors.model.pgwire.sqlstate import NUMBER_OUT_OF_RANGE, InvalidClientData
from actors.model.pgwire.type_map import pg_type
from actors.model.pgwire.value_parsing import parse_array, parse_bytea, parse_text_value
from actors.model.plan.column_defaults import DefaultValues
from actors.model.plan.schema import (
    TableColumn,
    TableSchema,
    arrow_type,
    inner_types,
    spark_type,
    text_limit,
)
from actors.runtime.errors import InvalidUsage, ValueTooLong


class SqlParameter(msgspec.Struct, frozen=True, gc=False):
    """A parameter of a statement: its value, and its text in Spark's dialect.

    `untyped`: the client gave a text without a type, whose type follows from the context.
    `computed`: only Spark knows the value, and `text` is an expression. `cast`: the type to which
    the statement casts the parameter; "" for none.
    """

    value: Any
    text: str
    untyped: bool = False
    computed: bool = False
    cast: str = ""


class NotLocal(Exception):
    """Spark must compute the value."""


class _DefaultMark:
    """The type of `DEFAULT_MARK`, which stands for the default of the column."""


DEFAULT_MARK: Final = _DefaultMark()


_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_FRACTION: Final = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+")
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MOMENT: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?"
    r"(?P<zone>Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
)
_EXACT_WHOLE: Final = {pa.float32(): 1 << 24, pa.float64(): 1 << 53}
"""Limits up to which a floating-point type represents every integer."""


def literal_value(span: TextSpan, parameters: Sequence[SqlParameter]) -> Any:
    """Return the value of a literal or a parameter.

    A number, NULL, a Boolean, ``DATE '…'`` and ``TIMESTAMP '…'`` return their Python value; a
    timestamp without a zone is in the session's zone. A string or a parameter returns a
    `SqlParameter`, whose type may follow from the context. DEFAULT returns `DEFAULT_MARK`.

    >>> from actors.engine.sql.statements import generated_span
    >>> literal_value(generated_span(SqlDialect.SPARK, "-12"), ())
    -12
    >>> literal_value(generated_span(SqlDialect.POSTGRES, "$1"), (SqlParameter("a", "'a'"),)).value
    'a'

    Raises:
        NotLocal: The text is any other expression.
    """
    tokens, dialect, count = span.lexed.tokens, span.lexed.dialect, span.last - span.first
    token = tokens[span.first]
    # Accept only these few forms: any other may not mean what it seems to.
    if count == 1:
        return _one_token(token, dialect, parameters)
    second = tokens[span.first + 1]
    if token.kind == "parameter" and second.text == "::" and count > 2:
        return _cast_parameter(span, parameters)
    if count == 2 and token.word in ("DATE", "TIMESTAMP") and second.kind == "text":
        return _moment(token.word, _text(second, dialect))
    if count == 2 and token.text == "-" and second.kind == "number":
        return _number(second.text, negative=True)
    raise NotLocal


def _one_token(token: SqlToken, dialect: SqlDialect, parameters: Sequence[SqlParameter]) -> Any:
    match token.kind:
        case "number":
            return _number(token.text, negative=False)
        case "text":
            return SqlParameter(_text(token, dialect), "", untyped=dialect is SqlDialect.POSTGRES)
        case "parameter":
            return _parameter(token, parameters)
        case "word" if token.word in _WORDS:
            return _WORDS[token.word]
    raise NotLocal


_WORDS: Final[Mapping[str, Any]] = {
    "NULL": None,
    "TRUE": True,
    "FALSE": False,
    "DEFAULT": DEFAULT_MARK,
}


def _parameter(token: SqlToken, parameters: Sequence[SqlParameter]) -> SqlParameter:
    number = int(token.text[1:12]) if token.text.startswith("$") else 0
    if not 1 <= number <= len(parameters):
        raise NotLocal
    return parameters[number - 1]


def _cast_parameter(span: TextSpan, parameters: Sequence[SqlParameter]) -> SqlParameter:
    """Return the parameter of ``$1::type``, which drivers write to declare a parameter's type."""
    given = _parameter(span.tokens[0], parameters)
    reader = StatementReader(span.lexed, span.first + 2, span.last)
    written = read_written_type(reader)
    # Leave a text to Spark if the cast would check or convert it.
    if not reader.ends() or (written.checked and isinstance(given.value, str)):
        raise NotLocal
    return msgspec.structs.replace(given, cast=written.spark)


def _number(text: str, *, negative: bool) -> int | Decimal:
    if _WHOLE.fullmatch(text):
        return -int(text) if negative else int(text)
    if _FRACTION.fullmatch(text):
        # Put the sign into the text: Python's unary minus would round to 28 digits.
        return Decimal(f"-{text}" if negative else text)
    raise NotLocal  # suffixes and exponents


def _moment(kind: str, text: str) -> date | datetime:
    """Return the value of a typed literal in ISO format without a zone. Raises `NotLocal` for other
    forms: Spark and PostgreSQL treat a zone differently."""
    moment = None if kind == "DATE" else _MOMENT.fullmatch(text)
    # A TIMESTAMP with only a date is midnight of that day.
    if not _DAY.fullmatch(text) and (moment is None or moment["zone"]):
        raise NotLocal
    try:
        return date.fromisoformat(text) if kind == "DATE" else datetime.fromisoformat(text)
    except ValueError:
        raise NotLocal from None


def _text(token: SqlToken, dialect: SqlDialect) -> str:
    """Return the value of a quoted string without escapes. Raises `NotLocal` for others."""
    text = token.text
    if text[0] != "'" or (dialect is SqlDialect.SPARK and "\\" in text):
        raise NotLocal
    return text[1:-1].replace("''", "'")


def column_array(
    values: Sequence[Any],
    column: TableColumn,
    *,
    times: TimeLiterals,
    defaults: DefaultValues | None = None,
) -> pa.Array:
    """Convert values of `literal_value` to an array of a column's type.

    Args:
        values: A value or a `SqlParameter` for each row.
        column: The column that the values are for.
        times: Reads times without a zone.
        defaults: The columns' defaults, which replace DEFAULT; None if DEFAULT is not allowed.

    Raises:
        NotLocal: Spark's cast of a value might give another result.
    """
    kind = arrow_type(column.type)
    if defaults is not None:
        default = defaults.get(column.name)
        values = [default if each is DEFAULT_MARK else each for each in values]
    try:
        return pa.array([_fitted(value, column.type, kind, times=times) for value in values], kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # Let Spark report the value that does not fit, in its own words.
        raise NotLocal from None


def _fitted(value: Any, spark: str, kind: pa.DataType, *, times: TimeLiterals) -> Any:
    # A default already has the column's type.
    if isinstance(value, pa.Scalar):
        return value
    untyped = False
    if isinstance(value, SqlParameter):
        if value.computed or not _is_kept(value.cast, spark):
            raise NotLocal
        value, untyped = value.value, value.untyped
    if value is None:
        return None
    limit = text_limit(spark)
    if limit is not None:
        length, padded = limit
        if not isinstance(value, str):
            raise NotLocal
        if len(value) > length:
            # Trailing spaces beyond the length are cut off.
            if value[length:].strip(" "):
                raise ValueTooLong(f"a text of {len(value)} characters is longer than {spark}")
            value = value[:length]
        return value.ljust(length) if padded else value
    if isinstance(value, list) and pa.types.is_list(kind):
        (element,) = inner_types(spark)
        return [_fitted(each, element, kind.value_type, times=times) for each in value]
    if untyped and isinstance(value, str) and not pa.types.is_string(kind):
        return _parsed(value, spark, kind, times=times)
    exact = isinstance(value, int) and abs(value) <= _EXACT_WHOLE.get(kind, 0)
    tests = {
        bool: pa.types.is_boolean,
        int: lambda each: pa.types.is_integer(each) or pa.types.is_decimal(each) or exact,
        float: pa.types.is_float64,
        Decimal: lambda each: pa.types.is_decimal(each) or pa.types.is_float64(each),
        str: pa.types.is_string,
        bytes: pa.types.is_binary,
        date: pa.types.is_date,
        datetime: pa.types.is_timestamp,
    }
    test = tests.get(type(value))
    if test is None or not test(kind):
        raise NotLocal
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return local_in(times.present, value) if value.tzinfo is not None else value
        return times.instant(value) if value.tzinfo is None else value
    return _number_fitted(value, kind, times=times) if _is_number(kind) else value


def _is_number(kind: pa.DataType) -> bool:
    numbers = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_floating)
    return any(test(kind) for test in numbers)


def _number_fitted(
    value: int | Decimal, kind: pa.DataType, *, times: TimeLiterals
) -> int | Decimal:
    """Convert a number to its column's type. Raises `InvalidClientData` for one that is out of
    range, because Spark's error would not name the value."""
    if pa.types.is_decimal(kind):
        # Spark rounds. PostgreSQL's numeric without a precision is never rounded.
        rounding = Rounding.ALL if times.as_spark else Rounding.DECLARED
        rounded: Decimal = fit_value(Decimal(value), kind, rounding)
        return rounded
    limit = 1 << (kind.bit_width - 1)
    if not -limit <= value < limit:
        raise InvalidClientData(f"value {value} is out of range for {kind}", NUMBER_OUT_OF_RANGE)
    return value


def _is_kept(cast: str, spark: str) -> bool:
    """Return whether a parameter's cast is redundant, given the type of its column."""
    return cast in ("", spark) or (cast == "string" and text_limit(spark) is not None)


def _parsed(text: str, spark: str, kind: pa.DataType, *, times: TimeLiterals) -> Any:
    """Parse a text as a value of a type, if it is in a simple form that both systems read alike.

    Raises `NotLocal` for other forms, and `InvalidClientData` for a text that PostgreSQL refuses.
    """
    if pa.types.is_binary(kind):
        return parse_bytea(text)
    if _is_number(kind) or pa.types.is_boolean(kind):
        return fit_value(parse_text_value(text, pg_type(kind).oid), kind)
    if pa.types.is_list(kind):
        (element,) = inner_types(spark)
        words = [
            None if each is None else SqlParameter(each, "", untyped=True)
            for each in parse_array(text)
        ]
        return [_fitted(each, element, kind.value_type, times=times) for each in words]
    if pa.types.is_date(kind) and _DAY.fullmatch(text):
        return date.fromisoformat(text)
    moment = _MOMENT.fullmatch(text) if pa.types.is_timestamp(kind) else None
    if moment is None:
        raise NotLocal
    found = datetime.fromisoformat(text)
    if kind.tz is None:
        if moment["zone"]:
            raise NotLocal
        return found
    return moment_in(times.zone, found) if found.tzinfo is None else found


# -- Rows as Spark's literals ----------------------------------------------------------------------


def spark_literal(value: Any, spark: str) -> str:
    """Write a value as a Spark expression of exactly this Spark type.

    >>> spark_literal(Decimal("1.50"), "decimal(12,2)")
    "CAST('1.50' AS decimal(12,2))"
    >>> spark_literal([1, None], "array<int>")
    'array(CAST(1 AS int), CAST(NULL AS int))'
    """
    kind = arrow_type(spark)
    if value is None:
        return f"CAST(NULL AS {spark})"
    # String and Boolean literals have their type without a cast.
    if pa.types.is_string(kind):
        return quote_text(value)
    if pa.types.is_boolean(kind):
        return "true" if value else "false"
    if pa.types.is_integer(kind):
        return f"CAST({value} AS {spark})"
    if pa.types.is_binary(kind):
        return f"X'{value.hex()}'"
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            return f"timestamp_micros({_micros(value)})"
        return f"TIMESTAMP_NTZ'{value.isoformat(sep=' ')}'"
    if pa.types.is_nested(kind):
        return _nested_literal(value, spark, kind)
    return f"CAST('{value}' AS {spark})"


def _micros(value: datetime) -> int:
    since = value - datetime(1970, 1, 1, tzinfo=value.tzinfo)
    # Compute with integers: a float cannot represent microseconds since 1970 exactly.
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _nested_literal(value: Any, spark: str, kind: pa.DataType) -> str:
    inner = inner_types(spark)
    if pa.types.is_list(kind):
        if not value:
            return f"CAST(array() AS {spark})"
        return f"array({', '.join(spark_literal(each, inner[0]) for each in value)})"
    if pa.types.is_map(kind):
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not pairs:
            return f"CAST(map() AS {spark})"
        key, item = inner
        entries = (f"{spark_literal(k, key)}, {spark_literal(v, item)}" for k, v in pairs)
        return f"map({', '.join(entries)})"
    names = [field.name for field in kind]
    named = (
        f"{quote_text(name)}, {spark_literal(value.get(name), each)}"
        for name, each in zip(names, inner, strict=True)
    )
    return f"named_struct({', '.join(named)})"


def values_query(rows: pa.Table, schema: TableSchema) -> str:
    """Return a Spark query whose result is these rows, with the schema's columns and types. There
    must be at least one row."""
    columns = [rows[column.name].to_pylist() for column in schema.columns]
    types = [column.type for column in schema.columns]
    lines = (
        f"({', '.join(spark_literal(v, t) for v, t in zip(row, types, strict=True))})"
        for row in zip(*columns, strict=True)
    )
    names = ", ".join(map(quote_name, schema.names))
    return f"SELECT * FROM VALUES {', '.join(lines)} AS given({names})"


def schema_of(shape: pa.Schema) -> TableSchema:
    """Convert an Arrow schema to columns with Spark types. Raises `InvalidUsage` for a type that
    tables cannot store."""
    for field in shape:
        if pa.types.is_duration(field.type) or pa.types.is_interval(field.type):
            raise InvalidUsage(
                f"column {field.name!r} is an interval, which tables cannot store: cast it"
            )
    return TableSchema(tuple(TableColumn(field.name, spark_type(field.type)) for field in shape))
