"""PostgreSQL's types, by group and name, and the text format of values in catalog answers.

The values of a catalog answer are Python objects: bool for `bool`, int for integers and `oid`,
float, str for text, list for arrays, and `ObjectReference` for types such as `regclass`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import msgspec

from actors.model.pgwire import type_oids as pg

ELEMENT_OF: Final[dict[int, int]] = {
    **{array: element for element, array in pg.ARRAY_OF.items()},
    # Vectors are subscripted and unnested like arrays; only their text format differs.
    pg.INT2VECTOR: pg.INT2,
    pg.OIDVECTOR: pg.OID,
}
"""Maps each array and vector type to its element type."""

VECTORS: Final = frozenset({pg.INT2VECTOR, pg.OIDVECTOR})
"""Array types whose subscripts start at 0 and whose text format separates elements by spaces."""
TEXTUAL: Final = frozenset(
    {pg.CHAR, pg.NAME, pg.TEXT, pg.UNKNOWN, pg.BPCHAR, pg.VARCHAR, pg.CSTRING, pg.PG_NODE_TREE}
)
INTEGERS: Final = frozenset({pg.INT2, pg.INT4, pg.INT8, pg.OID, pg.XID, pg.CID, pg.XID8})
NUMBERS: Final = INTEGERS | {pg.FLOAT4, pg.FLOAT8, pg.NUMERIC}
REGISTERED: Final = frozenset(
    {
        pg.REGPROC,
        pg.REGPROCEDURE,
        pg.REGOPER,
        pg.REGOPERATOR,
        pg.REGCLASS,
        pg.REGTYPE,
        pg.REGCONFIG,
        pg.REGDICTIONARY,
        pg.REGNAMESPACE,
        pg.REGROLE,
        pg.REGCOLLATION,
    }
)
"""OID types whose text format is a name."""

_SQL_NAMES: Final[dict[int, str]] = {
    pg.BOOL: "boolean",
    pg.CHAR: '"char"',
    pg.INT2: "smallint",
    pg.INT4: "integer",
    pg.INT8: "bigint",
    pg.FLOAT4: "real",
    pg.FLOAT8: "double precision",
    pg.NUMERIC: "numeric",
    pg.INTERVAL: "interval",
    pg.VARCHAR: "character varying",
    pg.BIT: "bit",
    pg.VARBIT: "bit varying",
    pg.TIMETZ: "time with time zone",
    pg.TIME: "time without time zone",
    pg.TIMESTAMP: "timestamp without time zone",
    pg.TIMESTAMPTZ: "timestamp with time zone",
}
"""Standard SQL names of types, where they differ from the catalog's."""

TYPE_SYNONYMS: Final[dict[str, str]] = {
    "boolean": "bool",
    "smallint": "int2",
    "integer": "int4",
    "int": "int4",
    "bigint": "int8",
    "real": "float4",
    "float": "float8",
    "double precision": "float8",
    "decimal": "numeric",
    "dec": "numeric",
    "character varying": "varchar",
    "character": "bpchar",
    # Unquoted, it is CHARACTER. The type "char" is always quoted.
    "char": "bpchar",
    '"char"': "char",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "time with time zone": "timetz",
    "bit varying": "varbit",
}
"""Maps SQL names of types to their catalog names."""


class ObjectReference(str):
    """A value of a type such as `regclass`: the object's name, with its OID in `oid`."""

    oid: int

    def __new__(cls, name: str, oid: int) -> ObjectReference:
        made = super().__new__(cls, name)
        made.oid = oid
        return made


def _time_precision(base: str, modifier: int) -> str:
    """Insert the precision into the name of a time type, before WITH or WITHOUT."""
    head, _, zone = base.partition(" ")
    return f"{head}({modifier}) {zone}"


def format_type(oid: int, modifier: int | None, name_of: Callable[[int], str | None]) -> str:
    """Return a type's name as PostgreSQL's `format_type` does.

    `name_of` returns the name, qualified if necessary, of a type without a standard SQL name; None
    if it is unknown.

    >>> format_type(1700, 786438, {}.get), format_type(1007, None, {}.get)
    ('numeric(12,2)', 'integer[]')
    """
    if oid == 0:
        return "-"
    # A vector type such as int2vector has its own name.
    if oid in ELEMENT_OF and oid not in VECTORS:
        return format_type(ELEMENT_OF[oid], modifier, name_of) + "[]"
    sized = modifier is not None and modifier >= 0
    if oid == pg.BPCHAR:
        # Modifier -1 means the type itself, which is not CHARACTER(1).
        if sized and modifier is not None:
            return f"character({modifier - 4})"
        return "character" if modifier is None else "bpchar"
    base = _SQL_NAMES.get(oid) or name_of(oid)
    if base is None:
        return "???"
    if not sized or modifier is None:
        return base
    if oid == pg.VARCHAR:
        return f"{base}({modifier - 4})"
    if oid == pg.NUMERIC:
        return f"{base}({(modifier - 4) >> 16 & 0xFFFF},{(modifier - 4) & 0x7FF})"
    if oid in (pg.TIME, pg.TIMESTAMP, pg.TIMESTAMPTZ, pg.TIMETZ):
        return _time_precision(base, modifier)
    return f"{base}({modifier})" if oid in (pg.BIT, pg.VARBIT) else base


_ARRAY_PLAIN: Final = re.compile(r'[^\s{}",\\]+')


def _array_element(value: Any, element: int) -> str:
    """Format an element for the text format of an array, quoted if necessary."""
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return array_text(value, element)
    text = format_catalog_value(value, element) or ""
    # An unquoted NULL would not be a text.
    if _ARRAY_PLAIN.fullmatch(text) and text.upper() != "NULL":
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_text(values: list[Any], element: int = pg.TEXT) -> str:
    """Format an array as PostgreSQL does.

    >>> print(array_text(["a", "b c", None]))
    {a,"b c",NULL}
    """
    return "{" + ",".join(_array_element(value, element) for value in values) + "}"


def format_catalog_value(value: Any, type_oid: int) -> str | None:
    """Format a value of a catalog answer in PostgreSQL's text format; None for NULL.

    >>> format_catalog_value([1, 2], 22), format_catalog_value(True, 16)
    ('1 2', 't')
    """
    match value:
        case None:
            return None
        # Before numbers, because bool is a subclass of int.
        case bool():
            return "t" if value else "f"
        case list():
            if type_oid in VECTORS:
                return " ".join(map(str, value))
            return array_text(value, ELEMENT_OF.get(type_oid, pg.TEXT))
        case float():
            # PostgreSQL writes integral floats without a decimal point.
            return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
        case Decimal():
            return f"{value:f}"
        case bytes():
            return f"\\x{value.hex()}"
        case dict():
            return msgspec.json.encode(value).decode()
    return str(value)
