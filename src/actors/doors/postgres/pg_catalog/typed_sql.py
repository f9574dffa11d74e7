"""SQL expressions for SQLite with the PostgreSQL types of their values, and casts between types.

SQLite has no Booleans, arrays or `regclass`. Booleans are 0 and 1, arrays and composites are JSON,
and values of types such as `regclass` are OIDs. Only the type tells which is meant, so every
expression has one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from actors.doors.postgres.pg_catalog import pg_types
from actors.doors.postgres.pg_catalog.catalog_errors import INVALID_TEXT, CatalogQueryError
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.quoting import quote_text
from actors.model.pgwire.value_parsing import parse_boolean, parse_nested_array

_PRECEDENCE: Final = (pg.INT2, pg.INT4, pg.INT8, pg.NUMERIC, pg.FLOAT4, pg.FLOAT8)
"""Numeric types, from the narrowest to the widest."""


class TypedSql(msgspec.Struct, frozen=True):
    """An SQL expression for SQLite, and the PostgreSQL type of its value."""

    sql: str
    type: int
    fields: tuple[tuple[str, int], ...] = ()
    """The names and types of the fields of a composite."""
    literal: str | None = None
    """The text of a string constant, whose type is decided by its use."""
    parameter: int = 0
    """The number of a parameter, whose type is decided by its use; 0 if it is not a parameter."""

    @property
    def undecided(self) -> bool:
        """Return whether the type is still to be decided by the use."""
        return self.type == pg.UNKNOWN


NULL_VALUE: Final = TypedSql("NULL", pg.UNKNOWN)


def text_constant(text: str) -> TypedSql:
    """Return a string constant of undecided type."""
    return TypedSql(quote_text(text), pg.UNKNOWN, literal=text)


def array_json(values: Iterable[Any]) -> str:
    """Encode an array for SQLite, as compact JSON like SQLite's own, so that equal arrays are equal
    strings."""
    return json.dumps(list(values), separators=(",", ":"), ensure_ascii=False)


def _read_element(text: Any, element: int) -> Any:
    if text is None:
        return None
    if isinstance(text, list):
        return [_read_element(each, element) for each in text]
    return read_text(text, element)


def read_text(text: str, type_oid: int) -> Any:
    """Parse the text of a value of a type, and return the value as SQLite stores it. Raises
    `CatalogQueryError` and `InvalidClientData`.

    >>> read_text("t", 16), read_text("{1,2}", 1007), read_text("42", 26)
    (1, '[1,2]', 42)
    """
    stripped = text.strip()
    if type_oid == pg.BOOL:
        return int(parse_boolean(text))
    if type_oid in pg_types.INTEGERS:
        try:
            return int(stripped)
        except ValueError:
            raise _invalid("integer" if type_oid != pg.OID else "oid", text) from None
    if type_oid in (pg.FLOAT4, pg.FLOAT8, pg.NUMERIC):
        try:
            return float(stripped) if "." in stripped or "e" in stripped.lower() else int(stripped)
        except ValueError:
            raise _invalid("numeric", text) from None
    if type_oid in pg_types.VECTORS:
        return array_json(int(each) for each in stripped.split())
    if type_oid in pg_types.ELEMENT_OF:
        element = pg_types.ELEMENT_OF[type_oid]
        return array_json(_read_element(each, element) for each in parse_nested_array(text))
    return text


def _invalid(kind: str, text: str) -> CatalogQueryError:
    return CatalogQueryError(f'invalid input syntax for type {kind}: "{text}"', INVALID_TEXT)


def constant_sql(value: Any) -> str:
    """Write a stored value as a constant of SQLite's SQL."""
    if value is None:
        return "NULL"
    return quote_text(value) if isinstance(value, str) else repr(value)


def decide_type(value: TypedSql, type_oid: int) -> TypedSql:
    """Give a value of undecided type the type `type_oid`. Return other values unchanged."""
    if not value.undecided or type_oid == pg.UNKNOWN:
        return value
    if value.parameter:
        # The parameter's value is parsed as that type when it is bound.
        return TypedSql(value.sql, type_oid, parameter=value.parameter)
    if value.literal is None:
        return TypedSql(value.sql, type_oid, value.fields)
    if type_oid in pg_types.REGISTERED:
        return TypedSql(f"pg_read_registered({type_oid}, {value.sql})", type_oid)
    held = constant_sql(read_text(value.literal, type_oid))
    if pg_types.ELEMENT_OF.get(type_oid) in pg_types.REGISTERED:
        held = f"pg_array_of_registered({held}, {pg_types.ELEMENT_OF[type_oid]})"
    return TypedSql(held, type_oid)


def common_type(types: Iterable[int]) -> int:
    """Return the common type of values of these types, as for CASE and UNION.

    >>> common_type([705, 21, 20]), common_type([705, 705]), common_type([18, 19, 25])
    (20, 25, 19)
    """
    decided = [each for each in types if each != pg.UNKNOWN]
    if not decided:
        return pg.TEXT
    chosen = decided[0]
    for each in decided[1:]:
        if pg.OID in (chosen, each) and pg_types.INTEGERS.issuperset((chosen, each)):
            # OID is PostgreSQL's preferred numeric type: integers become OIDs, not vice versa.
            chosen = pg.OID
        elif chosen in _PRECEDENCE and each in _PRECEDENCE:
            chosen = max(chosen, each, key=_PRECEDENCE.index)
        elif chosen == pg.CHAR and each in pg_types.TEXTUAL:
            # Other text types convert to each other without a cast, so the first one stays.
            chosen = each
    return chosen


def unify_values(values: list[TypedSql]) -> tuple[list[TypedSql], int]:
    """Give undecided values the common type of all values. Return the values and that type."""
    chosen = common_type(value.type for value in values)
    return [decide_type(value, chosen) for value in values], chosen


def _to_text(value: TypedSql) -> str:
    """Return the SQL for a value's text in PostgreSQL's format."""
    if value.type == pg.BOOL:
        return f"CASE {value.sql} WHEN 1 THEN 'true' WHEN 0 THEN 'false' END"
    if value.type in pg_types.REGISTERED:
        return f"pg_write_registered({value.type}, {value.sql})"
    if value.type in pg_types.ELEMENT_OF or value.type in (pg.RECORD,):
        return f"pg_write_array({value.sql}, {value.type})"
    if value.type in pg_types.NUMBERS:
        return f"CAST({value.sql} AS TEXT)"
    return value.sql


def _to_array(value: TypedSql, target: int) -> str:
    if value.type in pg_types.ELEMENT_OF:
        source, element = pg_types.ELEMENT_OF[value.type], pg_types.ELEMENT_OF[target]
        # Convert elements that are OIDs to names.
        if element in pg_types.TEXTUAL and source in pg_types.REGISTERED:
            return f"pg_array_of_names({value.sql}, {source})"
        if element in pg_types.TEXTUAL and source not in pg_types.TEXTUAL:
            return f"pg_array_of_texts({value.sql}, {source})"
        if element in pg_types.REGISTERED and source in pg_types.TEXTUAL:
            return f"pg_array_of_registered({value.sql}, {element})"
        return value.sql
    return f"pg_read_text({value.sql}, {target})"


def cast_value(value: TypedSql, target: int, modifier: int = -1) -> TypedSql:
    """Cast a value to a type. `modifier` is the length of a text type; -1 for none."""
    # Constants and parameters get the type directly.
    if value.undecided and (value.parameter or value.literal is not None):
        decided = decide_type(value, target)
        return _shortened(decided, target, modifier)
    # Most casts of clients change nothing.
    if value.type == target and modifier < 0:
        return value
    sql = value.sql
    if target in pg_types.REGISTERED:
        if value.type in pg_types.TEXTUAL:
            sql = f"pg_read_registered({target}, {sql})"
    elif target in pg_types.TEXTUAL or target in (pg.JSON, pg.JSONB, pg.ACLITEM):
        sql = _to_text(value)
    elif target in pg_types.ELEMENT_OF:
        sql = _to_array(value, target)
    elif target == pg.BOOL:
        if value.type != pg.BOOL:
            sql = (
                f"pg_read_text({sql}, {pg.BOOL})"
                if value.type in pg_types.TEXTUAL
                else f"({sql} <> 0)"
            )
    elif target in pg_types.INTEGERS:
        if value.type in pg_types.TEXTUAL:
            sql = f"pg_read_text({sql}, {target})"
        elif value.type in (pg.FLOAT4, pg.FLOAT8, pg.NUMERIC):
            sql = f"CAST(round({sql}) AS INTEGER)"
    elif target in (pg.FLOAT4, pg.FLOAT8):
        sql = f"CAST({sql} AS REAL)"
    elif target == pg.NUMERIC and value.type in pg_types.TEXTUAL:
        sql = f"CAST({sql} AS NUMERIC)"
    return _shortened(TypedSql(sql, target, value.fields), target, modifier)


def _shortened(value: TypedSql, target: int, modifier: int) -> TypedSql:
    """Truncate a text to the length of its type."""
    length = 1 if target == pg.CHAR else modifier
    # Only types such as varchar truncate to their length.
    if length < 0 or target not in pg_types.TEXTUAL or target == pg.NAME:
        return TypedSql(value.sql, value.type, value.fields, parameter=value.parameter)
    return TypedSql(f"substr({value.sql}, 1, {length})", target)


def array_type(element: int) -> int:
    """Return the array type of an element type; that of text if there is none."""
    return pg.ARRAY_OF.get(element, pg.ARRAY_OF[pg.TEXT])
