"""Bound parameters: from the bytes of a Bind to Python values, and to Spark literals.

A literal has the type of its parameter in any context, and cannot end early. Texts are escaped for
Spark's parser and for its variable substitution. Negative numbers are in parentheses, because two
minus signs would start a comment.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from actors.model.pgwire.messages import BINARY_FORMAT, BindPortal, expand_formats
from actors.model.pgwire.sqlstate import NOT_SUPPORTED, NUMBER_OUT_OF_RANGE, InvalidClientData
from actors.model.pgwire.type_map import DECIMAL_DIGITS_MAX, ELEMENT_OF, spark_type
from actors.model.pgwire.type_oids import FLOAT4, INT2, INT4
from actors.model.pgwire.value_parsing import (
    UNTYPED,
    ParameterValue,
    check_elements,
    decode_text,
    parse_binary_value,
    parse_text_value,
)
from actors.runtime.errors import RemoteProtocolError

_INTEGER_SUFFIX: Final = {INT2: "S", INT4: ""}


def parse_parameter(data: bytes, oid: int, form: int, time_zone: str = "UTC") -> ParameterValue:
    """Parse the value of a parameter in a format. Raises `InvalidClientData`.

    >>> parse_parameter(b"42", 23, 0), parse_parameter(bytes([0, 7]), 21, 1)
    (42, 7)
    """
    if form == BINARY_FORMAT:
        return parse_binary_value(data, oid)
    return parse_text_value(decode_text(data), oid, time_zone)


def parse_parameters(
    bind: BindPortal, oids: Sequence[int], time_zone: str = "UTC"
) -> list[ParameterValue | None]:
    """Parse all values of a Bind, given the parameter types of its statement.

    Raises `RemoteProtocolError` for a wrong number of values, and `InvalidClientData`, which names
    the parameter, for an invalid value.
    """
    if len(bind.parameters) != len(oids):
        raise RemoteProtocolError(
            f"the Bind has {len(bind.parameters)} parameters, its statement needs {len(oids)}"
        )
    formats = expand_formats(bind.parameter_formats, len(oids), "parameters")
    values: list[ParameterValue | None] = []
    elements = 0
    for number, (data, oid, form) in enumerate(zip(bind.parameters, oids, formats, strict=True), 1):
        try:
            values.append(None if data is None else parse_parameter(data, oid, form, time_zone))
            elements += len(found) if isinstance(found := values[-1], list) else 0
            check_elements(elements)
        except InvalidClientData as error:
            raise InvalidClientData(f"parameter ${number}: {error}", error.sqlstate) from None
    return values


def spark_literal(value: ParameterValue | None, oid: int) -> str:
    """Write a value as a Spark SQL literal of its type.

    Raises `InvalidClientData` for a value or type that Spark does not have.

    >>> spark_literal("it's", 25), spark_literal(-5, 20), spark_literal(None, 20)
    ("'it\\\\'s'", '(-5L)', 'CAST(NULL AS bigint)')
    """
    if value is None:
        return _null(oid)
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            # The suffix keeps the type: with a bare 5, expressions over bigint columns would become
            # int.
            number = f"{value}{_INTEGER_SUFFIX.get(oid, 'L')}"
            return f"({number})" if value < 0 else number
        case float():
            return _float_literal(value, oid)
        case Decimal():
            return _decimal_literal(value)
        case str():
            return _text_literal(value)
        case bytes():
            return f"X'{value.hex().upper()}'"
        case dt.datetime():
            # With an explicit zone, because a literal without one would be read in Spark's zone.
            if value.tzinfo is not None:
                return f"TIMESTAMP '{value.isoformat(' ')}'"
            return f"TIMESTAMP_NTZ '{value.isoformat(' ')}'"
        case dt.date():
            return f"DATE '{value.isoformat()}'"
        case list():
            return _array_literal(value, oid)


def _null(oid: int) -> str:
    if oid == UNTYPED:
        return "NULL"
    kind = spark_type(oid)
    if kind is None:
        raise InvalidClientData(f"type {oid} has no counterpart in Spark", NOT_SUPPORTED)
    return f"CAST(NULL AS {kind})"


def _float_literal(value: float, oid: int) -> str:
    kind, suffix = ("FLOAT", "F") if oid == FLOAT4 else ("DOUBLE", "D")
    if not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return f"CAST('{name}' AS {kind})"
    # Use the 8-byte digits also for 4-byte floats: the shortest text of the largest float would
    # exceed the range that Spark's parser checks.
    text = f"{value!r}{suffix}"
    return f"({text})" if math.copysign(1, value) < 0 else text


def _decimal_literal(value: Decimal) -> str:
    # Check before writing the number out, because 1e999999 has many digits.
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "infinities and NaN are refused when parsed"
    whole, scale = max(len(digits) + exponent, 0), max(-exponent, 0)
    if whole + scale > DECIMAL_DIGITS_MAX:
        raise InvalidClientData(
            f"a numeric value has more than {DECIMAL_DIGITS_MAX} digits", NUMBER_OUT_OF_RANGE
        )
    text = f"{value:f}BD"
    return f"({text})" if value.is_signed() else text


# Not as \0, because digits after it would extend the octal code.
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "'": "\\'", "\0": "\\u0000"})


def _text_literal(value: str) -> str:
    # Spark replaces ${name} by the value of a variable before it parses, even within literals.
    escaped = value.translate(_ESCAPES).replace("${", "\\u0024{")
    return f"'{escaped}'"


def _array_literal(values: Sequence[ParameterValue | None], oid: int) -> str:
    element = ELEMENT_OF.get(oid)
    if element is None:
        raise InvalidClientData(f"type {oid} is not an array type", NOT_SUPPORTED)
    # Spark cannot infer the type of an empty array.
    if not values:
        return f"CAST(array() AS {spark_type(oid)})"
    return f"array({', '.join(spark_literal(each, element) for each in values)})"
