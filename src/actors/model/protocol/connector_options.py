"""Converts the options of sources and sinks between users' spelling and requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from actors.model.plan.schema import TableColumn
from actors.runtime.errors import InvalidUsage

_NOT_NULL: Final = " not null"


def source_configuration(config: Mapping[str, Any] | msgspec.Struct) -> tuple[str, bytes]:
    """Return the kind of a source and its configuration as JSON. Raises `InvalidUsage`.

    >>> source_configuration({"kind": "wal", "columns": {"id": "bigint not null"}})
    ('wal', b'{"type":"wal","columns":[{"name":"id","type":"bigint","nullable":false}]}')
    """
    if isinstance(config, msgspec.Struct):
        return str(config.__struct_config__.tag), msgspec.json.encode(config)
    given = dict(config)
    # Accept both spellings, because the Struct of a configuration has its kind as ``type``.
    kind = given.pop("kind", given.pop("type", None))
    if not isinstance(kind, str):
        raise InvalidUsage(
            "the configuration of a source must have a kind, for example {'kind': 'postgres', …}"
        )
    if "columns" in given:
        given["columns"] = _columns("columns", given["columns"])
    if isinstance(given.get("tables"), dict):
        given["tables"] = {
            name: _columns(f"tables: {name}", each) for name, each in given["tables"].items()
        }
    try:
        return kind, msgspec.json.encode({"type": kind, **given})
    except (TypeError, ValueError) as error:
        raise InvalidUsage(f"configuration of a source of kind {kind}: {error}") from None


def _columns(where: str, given: Any) -> Any:
    """Convert a mapping of column names to types into a list of columns; leave anything else."""
    if not isinstance(given, dict):
        return given
    return [_column(f"{where}: {name}", name, type_) for name, type_ in given.items()]


def _column(where: str, name: str, type_: Any) -> TableColumn:
    if not isinstance(type_, str):
        raise InvalidUsage(f"{where}: the type must be a string such as 'bigint', not {type_!r}")
    text = type_.strip()
    bare = len(text) - len(_NOT_NULL)
    if text.lower().endswith(_NOT_NULL):
        return TableColumn(name, text[:bare].strip(), nullable=False)
    return TableColumn(name, text)


def option_text(value: Any) -> str:
    """Return the text of an option that `typed_options` parses into this value.

    >>> option_text(100), option_text("/data"), option_text("100")
    ('100', '/data', '"100"')
    """
    if isinstance(value, str) and typed_options({"": value})[""] == value:
        return value
    return json.dumps(value)


def typed_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of options as JSON; values that are not JSON stay text.

    >>> typed_options({"rate": "100", "folder": "/data", "tls": "true"})
    {'rate': 100, 'folder': '/data', 'tls': True}
    """
    found: dict[str, Any] = {}
    for key, text in options.items():
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found
