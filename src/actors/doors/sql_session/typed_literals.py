"""Texts that a statement casts to a type, read as PostgreSQL reads them.

Spark would take a text of bytes for its letters, a uuid or JSON for any text, and a date for what
stands before the first blank. Such a text is parsed here, and written as Spark's literal of its
value. Pure.

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
"""Texts of times that Spark reads as PostgreSQL does."""
_NUMERICS: Final = frozenset({"numeric", "decimal", "dec"})


def typed_literal(text: str, kind: WrittenType, time_zone: str = "UTC") -> str:
    """Return a text that is cast to a type as Spark's literal of its value; "" if Spark reads it as
    PostgreSQL does. Raises `InvalidClientData`."""
    element, levels = kind.spark, 0
    while inner := inner_types(element):
        if not element.startswith("array<"):
            return ""  # no type of PostgreSQL's
        element, levels = inner[0], levels + 1
    oid = _OIDS.get(kind.name)
    if kind.name in _NUMERICS and not kind.limited:
        # Without a precision all digits count, which no decimal that is chosen before has.
        oid = NUMERIC
    if levels == 0 and element in _CLOCKS and text.strip().lower() not in _MOMENTS:
        oid = _CLOCKS[element]
        return spark_literal(parse_text_value(text, oid, time_zone), oid)
    if levels == 0:
        return "" if oid is None else spark_literal(parse_text_value(text, oid), oid)
    array = ARRAY_OF.get(pg_type_of_spark(element).oid if oid is None else oid)
    if levels > 1 or array is None:
        raise InvalidClientData("only arrays of one dimension can be held", NOT_SUPPORTED)
    values = parse_text_value(text, array, time_zone)
    assert isinstance(values, list)
    limit = text_limit(element)
    if limit is not None:
        length, padded = limit
        # A cast cuts off without an error, as the standard asks; only a column refuses.
        cut = [each[:length] if isinstance(each, str) else None for each in values]
        values = [each if each is None or not padded else each.ljust(length) for each in cut]
        return spark_literal(values, array)
    written = spark_literal(values, array)
    # An empty array alone has no type of its own.
    return written if oid == NUMERIC else f"CAST({written} AS {kind.spark})"
