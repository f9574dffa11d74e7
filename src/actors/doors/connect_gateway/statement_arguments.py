"""The arguments of a statement, written into its text as literals. Pure.

Spark's clients give them beside the text: ``spark.sql("DELETE FROM t WHERE a = ?", [1])``.
Spark binds those of a query; of a statement of the service the text itself is needed.
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
    """Return the text of an `SQL` with its arguments in place of its parameters. Raises
    `SparkCondition` for a parameter without an argument, and for an argument that is no literal."""
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
    # From the end, so that the places before stay what they were.
    for start, end, found in reversed(edits):
        text = text[:start] + found + text[end:]
    return str(text)


def _literal_of(expression: ProtoMessage) -> str:
    if expression.WhichOneof("expr_type") != "literal":
        raise unsupported(
            "A parameter of a statement of Penstock whose argument is an expression: give a value."
        )
    return _written(expression.literal)


def _written(literal: ProtoMessage) -> str:
    """Return a literal as Spark's SQL has it."""
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
            # A literal of Spark's would be a decimal or a double first, and be rounded twice.
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
        f"A parameter of a statement of Penstock whose argument is a {kind or 'nothing'}."
    )


def _written_time(kind: str, value: int) -> str:
    since = {"days": value} if kind == "date" else {"microseconds": value}
    try:
        at = _EPOCH + datetime.timedelta(**since)
    except OverflowError:
        raise unsupported(
            f"A parameter whose argument is a {kind} outside of years 1 to 9999."
        ) from None
    if kind == "date":
        return f"DATE'{at.date().isoformat()}'"
    # Whatever the session's zone is.
    zone = "Z" if kind == "timestamp" else ""
    return f"{kind.upper()}'{at.isoformat(' ', 'microseconds')}{zone}'"
