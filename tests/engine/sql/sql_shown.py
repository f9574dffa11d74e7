"""Statements as plain values, without positions and defaults, for comparisons in tables."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.engine.sql.grammar import parse_statement
from actors.engine.sql.statements import ChangeStatement, QualifiedName, SecretSpan, TextSpan
from actors.engine.sql.tokens import SqlDialect
from actors.runtime.errors import SqlSyntaxError

SPARK = SqlDialect.SPARK
POSTGRES = SqlDialect.POSTGRES


def shown(value: Any) -> Any:
    """A struct is a dictionary of its class (``is``) and of the fields that differ from their
    defaults; a span is its text."""
    match value:
        case TextSpan():
            return value.text
        case SecretSpan():
            return f"secret {value.value}"
        case msgspec.Struct():
            fields = {
                field.name: shown(getattr(value, field.name))
                for field in msgspec.structs.fields(value)
                if field.name not in ("position", "clause", "request")
                and getattr(value, field.name) not in (field.default, None, (), {})
            }
            return {"is": type(value).__name__.removesuffix("Statement"), **fields}
        case tuple():
            return tuple(map(shown, value))
        case dict():
            return {key: shown(each) for key, each in value.items()}
    return value


def parsed(text: str, dialect: SqlDialect = SPARK) -> dict[str, Any]:
    found = shown(parse_statement(text, dialect))
    assert isinstance(found, dict)
    return found


def changed(
    text: str, dialect: SqlDialect = SPARK
) -> tuple[str, tuple[QualifiedName, ...], tuple[Any, ...], dict[str, Any]]:
    """The command of a change, the names in it, its requests, and what it has besides."""
    found = parse_statement(text, dialect)
    assert isinstance(found, ChangeStatement)
    own = ("is", "command", "names", "requests")
    more = {name: value for name, value in shown(found).items() if name not in own}
    return found.command, found.names, found.requests, more


def check_position(error: SqlSyntaxError, text: str) -> None:
    assert error.position is not None
    assert 0 <= error.position <= len(text)
