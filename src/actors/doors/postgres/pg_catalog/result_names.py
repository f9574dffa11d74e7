"""The names that PostgreSQL gives to unnamed columns of a result."""

from __future__ import annotations

from typing import Any, Final

from sqlglot import exp

from actors.doors.postgres.pg_catalog.sql_dialect import called_name, identifier_name

NO_NAME: Final = "?column?"
_WEAK, _STRONG = 1, 2
_WORDS: Final[dict[Any, str]] = {
    exp.Exists: "exists",
    exp.Array: "array",
    exp.Extract: "extract",
    exp.AtTimeZone: "timezone",
    exp.Tuple: "row",
}


def result_name(node: Any) -> str:
    """Return the name of a result's column for its expression."""
    return _find_name(node)[0] or NO_NAME


def _find_name(node: Any) -> tuple[str, int]:
    """Return the name that an expression suggests ("" if none), and the name's strength.

    The name of a type is weak: "case" overrides it.
    """
    if isinstance(node, exp.Paren | exp.Collate | exp.Window | exp.Filter | exp.Bracket):
        return _find_name(node.this)
    # Columns, fields and functions give their own name.
    if isinstance(node, exp.Column):
        return identifier_name(node.this), _STRONG
    if isinstance(node, exp.Dot):
        inner = node.expression
        return (
            _find_name(inner) if isinstance(inner, exp.Func) else (identifier_name(inner), _STRONG)
        )
    if isinstance(node, exp.Anonymous):
        return called_name(node), _STRONG
    if isinstance(node, exp.Cast):
        name, strength = _find_name(node.this)
        return (name, strength) if strength > _WEAK else (_type_name(node.args["to"]), _WEAK)
    if isinstance(node, exp.Boolean):
        return "bool", _WEAK
    if isinstance(node, exp.Case):
        default = node.args.get("default")
        name, strength = _find_name(default) if default is not None else ("", 0)
        return (name, strength) if strength > _WEAK else ("case", _WEAK)
    if isinstance(node, exp.Subquery | exp.SetOperation):
        return _find_name(node.this)
    if isinstance(node, exp.Select):
        first = node.expressions[0]
        if isinstance(first, exp.Alias):
            return identifier_name(first.args["alias"]), _STRONG
        return _find_name(first)
    word = _WORDS.get(type(node), "")
    return word, _STRONG if word else 0


def _type_name(node: Any) -> str:
    # For an array type, PostgreSQL uses the name of the element type.
    text = str(node.args.get("kind") or "").removesuffix("[]")
    return text.partition("(")[0].strip('"')
