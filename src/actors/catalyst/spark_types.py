"""Spark's JSON of a type → the text by which the service names the type."""

from __future__ import annotations

from typing import Any, Final

_NAMES: Final = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}


def type_text(kind: Any) -> str:
    """Return a type as Spark's `simpleString` writes it.

    >>> type_text({"type": "array", "elementType": "long", "containsNull": True})
    'array<bigint>'
    """
    if isinstance(kind, str):
        return _NAMES.get(kind, kind)
    match kind.get("type"):
        case "array":
            return f"array<{type_text(kind['elementType'])}>"
        case "map":
            return f"map<{type_text(kind['keyType'])},{type_text(kind['valueType'])}>"
        case "struct":
            fields = (f"{each['name']}:{type_text(each['type'])}" for each in kind["fields"])
            return f"struct<{','.join(fields)}>"
        case other:
            return str(other)
