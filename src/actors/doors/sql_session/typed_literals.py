"""Parses strings that a statement casts to a type, as PostgreSQL does.

Spark would cast them differently: a bytea would be the string's own bytes, a uuid or JSON any
string, and a date only what precedes the first space. So such strings are parsed here, and written
as Spark literals of their values. Pure.

>>> typed_literal(r"\\xdead", WrittenType("binary", "bytea", False))
"X'DEAD'"
>>> typed_literal("{1,NULL}", WrittenType("array<int>", "int4", False))
'CAST(array(1, CAST(NULL AS int)) AS array<int>)'
"""

from __future__ import annotations

from typing import Final

from actors.engine.sql.type_names import WrittenType
from actors.model.pgwire.parameters import spark_literal
from actors.model.pgwire.sqlstate import NOT_SUPPORTED, InvalidClientData
from actors.model.pgwire.type_map import pg_type_of_spark
from actors.model.pgwire.type_oids import (
    ARRAY_OF,
    BYTEA,
    DATE,
    JSON,
    JSONB,
    NUMERIC,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
)
from actors.model.pgwire.value_parsing import parse_text_value
from actors.model.plan.schema import inner_types, text_limit

_OIDS: Final = {"bytea": BYTEA, "uuid": UUID, "json": JSON, "jsonb": JSONB}
_CLOCKS: Final = {"date": DATE, "timestamp": TIMESTAMPTZ, "timestamp_ntz": TIMESTAMP}
_MOMENTS: Final = frozenset({"now", "today", "tomorrow", "yesterday", "epoch"})
"""Special strings for times that Spark and PostgreSQL read alike."""
_NUMERICS: Final = frozenset({"numeric", "decimal", "dec"})


def typed_literal(text: str, kind: WrittenType, time_zone: str = "UTC") -> str:
    """Return a string that is cast to a type as a Spark literal of its value.

    Return "" if Spark reads the string as PostgreSQL does. Raises `InvalidClientData`.
    """
    element, levels = kind.spark, 0
    while inner := inner_types(element):
        if not element.startswith("array<"):
            return ""  # not a type of PostgreSQL
        element, levels = inner[0], levels + 1
    oid = _OIDS.get(kind.name)
    if kind.name in _NUMERICS and not kind.limited:
        # Without a precision all digits are kept, which no decimal type chosen in advance can do.
        oid = NUMERIC
    if levels == 0 and element in _CLOCKS and text.strip().lower() not in _MOMENTS:
        oid = _CLOCKS[element]
        return spark_literal(parse_text_value(text, oid, time_zone), oid)
    if levels == 0:
        return "" if oid is None else spark_literal(parse_text_value(text, oid), oid)
    array = ARRAY_OF.get(pg_type_of_spark(element).oid if oid is None else oid)
    if levels > 1 or array is None:
        raise InvalidClientData("only one-dimensional arrays are supported", NOT_SUPPORTED)
    values = parse_text_value(text, array, time_zone)
    assert isinstance(values, list)
    limit = text_limit(element)
    if limit is not None:
        length, padded = limit
        # As the SQL standard requires, a cast truncates silently; only assignments fail.
        cut = [each[:length] if isinstance(each, str) else None for each in values]
        values = [each if each is None or not padded else each.ljust(length) for each in cut]
        return spark_literal(values, array)
    written = spark_literal(values, array)
    # The cast gives an empty array its type.
    return written if oid == NUMERIC else f"CAST({written} AS {kind.spark})"
