"""Substituting the arguments of a statement into its text. Pure.

Spark's clients send arguments separately: ``spark.sql("DELETE FROM t WHERE a = ?", [1])``. Spark
binds the arguments of a query itself. The service's own statements need a complete text.
"""

from __future__ import annotations

import datetime
import math
from typing import Any, Final

from actors.doors.connect_gateway.error_status import SparkCondition, unsupported
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.sql_names import split_words
from actors.engine.sql.tokens import quote_text

_SUFFIXES: Final = {"byte": "Y", "short": "S", "integer": "", "long": "L"}
_EPOCH: Final = datetime.datetime(1970, 1, 1)  # noqa: DTZ001 - the zone is written behind it


def text_with_arguments(sql: ProtoMessage) -> str:
    """Return the text of an `SQL` message with its parameters replaced by their arguments. Raises
    `SparkCondition` for a parameter without an argument, and for an argument that is not a
    literal."""
    named = {name: _literal_of(each) for name, each in sql.named_arguments.items()}
    named |= {name: _written(each) for name, each in sql.args.items()}
    positional = [_literal_of(each) for each in sql.pos_arguments]
    positional += [_written(each) for each in sql.pos_args]
    text, edits, count = sql.query, [], 0
    for word in split_words(text):
        if word.kind != "parameter":
            continue
        if word.text == "?":
            found = positional[count] if count < len(positional) else None
            count += 1
        else:
            found = named.get(word.text[1:])
        if found is None:
            raise SparkCondition(
                "UNBOUND_SQL_PARAMETER",
                "42P02",
                f"Found the unbound parameter: {word.text}. Please, fix `args` and provide a "
                "mapping of the parameter to a literal.",
            )
        edits.append((word.start, word.end, found))
    # From the end, so that earlier positions remain valid.
    for start, end, found in reversed(edits):
        text = text[:start] + found + text[end:]
    return str(text)


def _literal_of(expression: ProtoMessage) -> str:
    if expression.WhichOneof("expr_type") != "literal":
        raise unsupported("An expression as an argument of a Penstock statement is not supported.")
    return _written(expression.literal)


def _written(literal: ProtoMessage) -> str:
    """Format a literal as Spark SQL."""
    kind = literal.WhichOneof("literal_type")
    value: Any = getattr(literal, kind) if kind else None
    match kind:
        case "null":
            return "NULL"
        case "boolean":
            return str(value).upper()
        case "byte" | "short" | "integer" | "long":
            return f"{value}{_SUFFIXES[kind]}"
        case "float":
            # A numeric literal would first be a decimal or a double, and so be rounded twice.
            return f"CAST('{value!r}' AS FLOAT)"
        case "double":
            return f"{value!r}D" if math.isfinite(value) else f"CAST('{value!r}' AS DOUBLE)"
        case "decimal":
            return f"{value.value}BD"
        case "string":
            return quote_text(value)
        case "binary":
            return f"X'{value.hex()}'"
        case "date" | "timestamp" | "timestamp_ntz":
            return _written_time(kind, value)
    raise unsupported(
        f"An argument of type {kind or 'unknown'} in a Penstock statement is not supported."
    )


def _written_time(kind: str, value: int) -> str:
    since = {"days": value} if kind == "date" else {"microseconds": value}
    try:
        at = _EPOCH + datetime.timedelta(**since)
    except OverflowError:
        raise unsupported(
            f"An argument of type {kind} outside of the years 1 to 9999 is not supported."
        ) from None
    if kind == "date":
        return f"DATE'{at.date().isoformat()}'"
    # With an explicit zone, to be independent of the session's.
    zone = "Z" if kind == "timestamp" else ""
    return f"{kind.upper()}'{at.isoformat(' ', 'microseconds')}{zone}'"
