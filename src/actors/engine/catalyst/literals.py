"""Writes literals and types of Catalyst as Spark SQL text that makes the same value of the same
type.

Values come as Spark stores them (a timestamp as microseconds), so the text depends neither on the
session's time zone nor on a format. A value without a literal in SQL becomes a constant expression.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from actors.engine.catalyst.plan_tree import TreeNode
from actors.model.plan.schema import quote

_TYPE_NAMES: Final = {
    "integer": "int",
    "long": "bigint",
    "short": "smallint",
    "byte": "tinyint",
}
_SIMPLE_TYPE: Final = re.compile(
    r"(?:int|bigint|smallint|tinyint|float|double|boolean|string|binary|date|timestamp"
    r"|timestamp_ntz|void|variant|interval(?: [a-z]+(?: to [a-z]+)?)?"
    r"|(?:decimal|char|varchar|time)\(\d+(?:,\d+)?\))"
)
_INTEGER_SUFFIXES: Final = {"integer": "", "long": "L", "short": "S", "byte": "Y"}
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 it counts, it is at no place
_DAY_UNITS: Final = ("day", "hour", "minute", "second")
_MICROS: Final = 1_000_000
_VARIABLE: Final = "${"
_ESCAPES: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}


class NotRendered(Exception):
    """The expression has no text that is sure to mean the same; the message names it and the
    reason."""


def type_text(kind: Any) -> str:
    """Return the DDL of a type given as Spark's JSON. Raises `NotRendered` for a type that DDL
    cannot express.

    >>> type_text({"type": "array", "elementType": "long", "containsNull": True})
    'array<bigint>'
    """
    if isinstance(kind, str):
        name = _TYPE_NAMES.get(kind, kind)
        if _SIMPLE_TYPE.fullmatch(name) is None:
            raise NotRendered(f"the type {kind}")
        return name
    match kind.get("type"):
        case "array":
            return f"array<{type_text(kind['elementType'])}>"
        case "map":
            return f"map<{type_text(kind['keyType'])}, {type_text(kind['valueType'])}>"
        case "struct":
            fields = (
                f"{quote(field['name'])}: {type_text(field['type'])}"
                + ("" if field["nullable"] else " NOT NULL")
                for field in kind["fields"]
            )
            return f"struct<{', '.join(fields)}>"
        case "collated":
            return str(kind["sql"])
    raise NotRendered(f"the type {kind.get('type')}")


def string_text(value: str, *, raw: bool) -> str:
    """Return a string literal. `raw`: the session reads backslashes literally
    (``spark.sql.parser.escapedStringLiterals``).

    >>> print(string_text("it's", raw=False), string_text("a", raw=True))
    'it\\'s' 'a'
    """
    if not any(character in _ESCAPES for character in value) and _VARIABLE not in value:
        return f"'{value}'"
    if not raw:
        text = "".join(_ESCAPES.get(character, character) for character in value)
        # Spark substitutes settings (``${…}``) in a text before it parses it, even in strings.
        return "'" + text.replace(_VARIABLE, "\\u0024{") + "'"
    # Which quotes can be escaped in a raw string depends on other settings.
    return f"CAST(X'{value.encode().hex().upper()}' AS string)"


def literal_text(node: TreeNode, *, raw: bool = False) -> str:
    """Return the text of a literal. Raises `NotRendered` for types without a literal."""
    kind, value = node.fields["dataType"], node.fields["value"]
    if value is None:
        return "NULL" if kind == "void" else f"CAST(NULL AS {type_text(kind)})"
    if isinstance(kind, dict):
        if kind.get("type") == "collated" and "bytes" not in node.fields:
            return f"CAST({string_text(value, raw=raw)} AS {type_text(kind)})"
        raise NotRendered(f"a literal of type {kind.get('type')}")
    if kind == "string" or kind.startswith(("char(", "varchar(")):
        if "bytes" in node.fields:
            return f"CAST(X'{node.fields['bytes']}' AS string)"
        return string_text(value, raw=raw)
    if kind in _INTEGER_SUFFIXES:
        return _signed(f"{value}{_INTEGER_SUFFIXES[kind]}")
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value)
    if kind.startswith("decimal"):
        return _decimal(value, kind)
    if kind.startswith("interval ") or kind.startswith("time("):
        return _span(int(value), kind)
    raise NotRendered(f"a literal of type {kind}")


def _signed(text: str) -> str:
    # Next to another operator, a minus sign could become part of it: "--1" would be a comment.
    return f"({text})" if text.startswith("-") else text


def _float(value: str, suffix: str, name: str) -> str:
    if value in ("NaN", "Infinity", "-Infinity"):
        return f"CAST('{value}' AS {name})"
    return _signed(value + suffix)


def _decimal(value: str, kind: str) -> str:
    """Return `1.50BD` if its digits imply the type, else a cast."""
    digits, exponent = Decimal(value).as_tuple()[1:]
    scale = -int(exponent)
    if kind == f"decimal({max(len(digits), scale)},{scale})":
        return _signed(f"{value}BD")
    return f"CAST('{value}' AS {kind})"


def _date(value: str) -> str:
    try:
        return f"DATE'{(_EPOCH + dt.timedelta(days=int(value))).date().isoformat()}'"
    # Beyond the year 9999, which neither Python nor the literal can express.
    except OverflowError:
        return f"date_from_unix_date({_signed(value)})"


def _moment(value: str) -> str | None:
    try:
        found = _EPOCH + dt.timedelta(microseconds=int(value))
    except OverflowError:
        return None
    return found.isoformat(sep=" ", timespec="microseconds")


def _timestamp(value: str) -> str:
    moment = _moment(value)
    # With a zone, since without one an hour that occurs twice (at the end of summer time) is
    # ambiguous.
    return (
        f"timestamp_micros({_signed(value + 'L')})" if moment is None else f"TIMESTAMP'{moment}Z'"
    )


def _timestamp_ntz(value: str) -> str:
    moment = _moment(value)
    if moment is None:
        raise NotRendered("a timestamp_ntz beyond the year 9999")
    return f"TIMESTAMP_NTZ'{moment}'"


def _calendar_interval(value: str) -> str:
    months, days, micros = (int(part) for part in value.split())
    sign = "-" if micros < 0 else ""
    seconds, fraction = divmod(abs(micros), _MICROS)
    # Parts in parentheses keep it a calendar interval; plain numbers would make it a year-month
    # one.
    return f"make_interval(0, ({months}), 0, ({days}), 0, 0, ({sign}{seconds}.{fraction:06}BD))"


def _span(value: int, kind: str) -> str:
    """Return an interval of months or microseconds with exactly its units, or a time of day."""
    if kind.startswith("time("):
        return _time_of_day(value, kind)
    sign, size = ("-" if value < 0 else ""), abs(value)
    units = kind.removeprefix("interval ").split(" to ")
    first, last = units[0], units[-1]
    if first in ("year", "month"):
        if size > 2**31 - 1:
            raise NotRendered("the smallest interval of months")
        years, months = divmod(size, 12)
        parts = {"year": f"{years}", "month": f"{size}"}
        text = parts[first] if first == last else f"{years}-{months}"
        if first == last == "year" and months:
            raise NotRendered(f"a literal of type {kind} with months")
        return f"INTERVAL '{sign}{text}' {kind.removeprefix('interval ').upper()}"
    return _day_time(sign, size, first, last)


def _day_time(sign: str, size: int, first: str, last: str) -> str:
    low, high = _DAY_UNITS.index(first), _DAY_UNITS.index(last)
    seconds, fraction = divmod(size, _MICROS)
    sizes = (86_400, 3_600, 60, 1)
    numbers: list[int] = []
    for at in range(low, high + 1):
        number, seconds = divmod(seconds, sizes[at])
        numbers.append(number)
    if seconds or (fraction and last != "second"):
        raise NotRendered(f"an interval of {first} to {last} with a remainder")
    # SQL parses the sign and the magnitude separately, and the magnitude of the smallest long does
    # not fit into a long.
    if size > 2**63 - 1:
        raise NotRendered("the smallest interval")
    texts = [str(numbers[0]), *(f"{number:02}" for number in numbers[1:])]
    if last == "second":
        texts[-1] += f".{fraction:06}"
    joined = texts[0]
    for at, text in enumerate(texts[1:], low + 1):
        joined += (" " if at == 1 else ":") + text
    units = first.upper() if first == last else f"{first.upper()} TO {last.upper()}"
    return f"INTERVAL '{sign}{joined}' {units}"


def _time_of_day(nanos: int, kind: str) -> str:
    micros, rest = divmod(nanos, 1000)
    if rest or kind not in ("time(0)", "time(6)"):
        raise NotRendered(f"a literal of type {kind}")
    text = (_EPOCH + dt.timedelta(microseconds=micros)).time().isoformat("microseconds")
    return f"CAST(TIME'{text}' AS {kind})"


_WRITERS: Final[dict[str, Callable[[str], str]]] = {
    "boolean": str,
    "float": lambda value: _float(value, "F", "float"),
    "double": lambda value: _float(value, "D", "double"),
    "date": _date,
    "timestamp": _timestamp,
    "timestamp_ntz": _timestamp_ntz,
    "interval": _calendar_interval,
    "binary": lambda value: f"X'{value}'",
}
