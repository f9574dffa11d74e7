"""PostgreSQL's types: their OIDs, how a Spark type appears to a client, and values as text.

Values of a catalog answer are Python's: bool for `bool`, int for the integers and `oid`, float,
str for all texts, list for arrays, and `ObjectReference` for `regclass` and its like.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from actors.model.plan.schema import inner_types, text_limit

BOOL: Final = 16
BYTEA: Final = 17
CHAR: Final = 18
NAME: Final = 19
INT8: Final = 20
INT2: Final = 21
INT2VECTOR: Final = 22
INT4: Final = 23
REGPROC: Final = 24
TEXT: Final = 25
OID: Final = 26
TID: Final = 27
XID: Final = 28
CID: Final = 29
OIDVECTOR: Final = 30
JSON: Final = 114
PG_NODE_TREE: Final = 194
FLOAT4: Final = 700
FLOAT8: Final = 701
UNKNOWN: Final = 705
INET: Final = 869
ACLITEM: Final = 1033
BPCHAR: Final = 1042
VARCHAR: Final = 1043
DATE: Final = 1082
TIME: Final = 1083
TIMESTAMP: Final = 1114
TIMESTAMPTZ: Final = 1184
INTERVAL: Final = 1186
NUMERIC: Final = 1700
REGPROCEDURE: Final = 2202
REGOPER: Final = 2203
REGOPERATOR: Final = 2204
REGCLASS: Final = 2205
REGTYPE: Final = 2206
RECORD: Final = 2249
CSTRING: Final = 2275
ANYARRAY: Final = 2277
ANYELEMENT: Final = 2283
UUID: Final = 2950
PG_LSN: Final = 3220
REGCONFIG: Final = 3734
REGDICTIONARY: Final = 3769
JSONB: Final = 3802
REGNAMESPACE: Final = 4089
REGROLE: Final = 4096
REGCOLLATION: Final = 4191
XID8: Final = 5069

ARRAY_OF: Final[dict[int, int]] = {
    BOOL: 1000,
    BYTEA: 1001,
    CHAR: 1002,
    NAME: 1003,
    INT2: 1005,
    INT2VECTOR: 1006,
    INT4: 1007,
    REGPROC: 1008,
    TEXT: 1009,
    TID: 1010,
    XID: 1011,
    CID: 1012,
    OIDVECTOR: 1013,
    BPCHAR: 1014,
    VARCHAR: 1015,
    INT8: 1016,
    FLOAT4: 1021,
    FLOAT8: 1022,
    OID: 1028,
    ACLITEM: 1034,
    INET: 1041,
    TIMESTAMP: 1115,
    DATE: 1182,
    TIME: 1183,
    TIMESTAMPTZ: 1185,
    INTERVAL: 1187,
    NUMERIC: 1231,
    CSTRING: 1263,
    JSON: 199,
    REGPROCEDURE: 2207,
    REGOPER: 2208,
    REGOPERATOR: 2209,
    REGCLASS: 2210,
    REGTYPE: 2211,
    RECORD: 2287,
    UUID: 2951,
    PG_LSN: 3221,
    REGCONFIG: 3735,
    REGDICTIONARY: 3770,
    JSONB: 3807,
    REGNAMESPACE: 4090,
    REGROLE: 4097,
    REGCOLLATION: 4192,
    XID8: 271,
}
"""The array type of each element type."""

ELEMENT_OF: Final[dict[int, int]] = {
    **{array: element for element, array in ARRAY_OF.items()},
    # Vectors are subscripted and unnested as arrays are; only their text differs.
    INT2VECTOR: INT2,
    OIDVECTOR: OID,
}
"""The element type of each array and vector type."""

VECTORS: Final = frozenset({INT2VECTOR, OIDVECTOR})
"""Arrays that count from 0 and are written with blanks between."""
TEXTUAL: Final = frozenset({CHAR, NAME, TEXT, UNKNOWN, BPCHAR, VARCHAR, CSTRING, PG_NODE_TREE})
INTEGERS: Final = frozenset({INT2, INT4, INT8, OID, XID, CID, XID8})
NUMBERS: Final = INTEGERS | {FLOAT4, FLOAT8, NUMERIC}
REGISTERED: Final = frozenset(
    {
        REGPROC,
        REGPROCEDURE,
        REGOPER,
        REGOPERATOR,
        REGCLASS,
        REGTYPE,
        REGCONFIG,
        REGDICTIONARY,
        REGNAMESPACE,
        REGROLE,
        REGCOLLATION,
    }
)
"""OIDs that are read and written as names."""

_SQL_NAMES: Final[dict[int, str]] = {
    BOOL: "boolean",
    CHAR: '"char"',
    INT2: "smallint",
    INT4: "integer",
    INT8: "bigint",
    FLOAT4: "real",
    FLOAT8: "double precision",
    NUMERIC: "numeric",
    INTERVAL: "interval",
    VARCHAR: "character varying",
    1560: "bit",
    1562: "bit varying",
    1266: "time with time zone",
    TIME: "time without time zone",
    TIMESTAMP: "timestamp without time zone",
    TIMESTAMPTZ: "timestamp with time zone",
}
"""Types that the SQL standard names otherwise than the catalog does."""

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
    # Without quotes it is CHARACTER; the type "char" is always written with them.
    "char": "bpchar",
    '"char"': "char",
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "time without time zone": "time",
    "time with time zone": "timetz",
    "bit varying": "varbit",
}
"""Catalog names of the types that SQL has words for."""


class PostgresColumnType(msgspec.Struct, frozen=True):
    """A column's type as a client of PostgreSQL sees it: the type's OID and its modifier."""

    oid: int
    modifier: int = -1


class ObjectReference(str):
    """The name of a catalog object, of type `regclass` or the like; `oid` is what it stands for."""

    oid: int

    def __new__(cls, name: str, oid: int) -> ObjectReference:
        made = super().__new__(cls, name)
        made.oid = oid
        return made


_SPARK: Final[dict[str, int]] = {
    "boolean": BOOL,
    # PostgreSQL has no integer of one byte.
    "tinyint": INT2,
    "byte": INT2,
    "smallint": INT2,
    "short": INT2,
    "int": INT4,
    "integer": INT4,
    "bigint": INT8,
    "long": INT8,
    "float": FLOAT4,
    "real": FLOAT4,
    "double": FLOAT8,
    "string": TEXT,
    "binary": BYTEA,
    "date": DATE,
    "timestamp": TIMESTAMPTZ,
    "timestamp_ltz": TIMESTAMPTZ,
    "timestamp_ntz": TIMESTAMP,
    "void": TEXT,
}
_DECIMAL: Final = re.compile(r"(?:decimal|dec|numeric)(?:\((\d+)\s*(?:,\s*(\d+)\s*)?\))?")


def postgres_type(spark_type: str) -> PostgresColumnType:
    """Return the type that shows a Spark type to a client of PostgreSQL.

    >>> postgres_type("decimal(12,2)")
    PostgresColumnType(oid=1700, modifier=786438)
    >>> postgres_type("array<int>"), postgres_type("map<string,int>")
    (PostgresColumnType(oid=1007, modifier=-1), PostgresColumnType(oid=114, modifier=-1))
    """
    text = spark_type.strip().lower()
    if text in _SPARK:
        return PostgresColumnType(_SPARK[text])
    if decimal := _DECIMAL.fullmatch(text):
        precision, scale = int(decimal[1] or 10), int(decimal[2] or 0)
        return PostgresColumnType(NUMERIC, (precision << 16 | scale) + 4)
    if limit := text_limit(text):
        return PostgresColumnType(BPCHAR if limit[1] else VARCHAR, limit[0] + 4)
    inner = inner_types(text)
    if text.startswith("array<") and len(inner) == 1:
        element = postgres_type(inner[0])
        # An array of arrays may be ragged, which PostgreSQL's arrays cannot be: it goes as JSON.
        if element.oid not in ELEMENT_OF and element.oid != JSON:
            return PostgresColumnType(ARRAY_OF[element.oid], element.modifier)
    return PostgresColumnType(JSON)


_PLAIN_IDENTIFIER: Final = re.compile(r"[a-z_][a-z0-9_$]*")
RESERVED_WORDS: Final = frozenset(
    [
        "all",
        "analyse",
        "analyze",
        "and",
        "any",
        "array",
        "as",
        "asc",
        "asymmetric",
        "authorization",
        "binary",
        "both",
        "case",
        "cast",
        "check",
        "collate",
        "collation",
        "column",
        "concurrently",
        "constraint",
        "create",
        "cross",
        "current_catalog",
        "current_date",
        "current_role",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "default",
        "deferrable",
        "desc",
        "distinct",
        "do",
        "else",
        "end",
        "except",
        "false",
        "fetch",
        "for",
        "foreign",
        "freeze",
        "from",
        "full",
        "grant",
        "group",
        "having",
        "ilike",
        "in",
        "initially",
        "inner",
        "intersect",
        "into",
        "is",
        "isnull",
        "join",
        "lateral",
        "leading",
        "left",
        "like",
        "limit",
        "localtime",
        "localtimestamp",
        "natural",
        "not",
        "notnull",
        "null",
        "offset",
        "on",
        "only",
        "or",
        "order",
        "outer",
        "overlaps",
        "placing",
        "primary",
        "references",
        "returning",
        "right",
        "select",
        "session_user",
        "similar",
        "some",
        "symmetric",
        "table",
        "tablesample",
        "then",
        "to",
        "trailing",
        "true",
        "union",
        "unique",
        "user",
        "using",
        "variadic",
        "verbose",
        "when",
        "where",
        "window",
        "with",
        "between",
        "bigint",
        "bit",
        "boolean",
        "char",
        "character",
        "coalesce",
        "dec",
        "decimal",
        "exists",
        "extract",
        "float",
        "greatest",
        "grouping",
        "inout",
        "int",
        "integer",
        "interval",
        "least",
        "national",
        "nchar",
        "none",
        "normalize",
        "nullif",
        "numeric",
        "out",
        "overlay",
        "position",
        "precision",
        "real",
        "row",
        "setof",
        "smallint",
        "substring",
        "time",
        "timestamp",
        "treat",
        "trim",
        "values",
        "varchar",
        "xmlattributes",
        "xmlconcat",
        "xmlelement",
        "xmlexists",
        "xmlforest",
        "xmlnamespaces",
        "xmlparse",
        "xmlpi",
        "xmlroot",
        "xmlserialize",
        "xmltable",
    ]
)
"""Keywords that `quote_ident` quotes."""


def quote_identifier(name: str) -> str:
    """Return a name as SQL writes it, with quotes where it needs them.

    >>> quote_identifier("orders"), quote_identifier("Orders"), quote_identifier("user")
    ('orders', '"Orders"', '"user"')
    """
    if _PLAIN_IDENTIFIER.fullmatch(name) and name not in RESERVED_WORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def _time_precision(base: str, modifier: int) -> str:
    """Return a time type with its precision, which stands before WITH and WITHOUT."""
    head, _, zone = base.partition(" ")
    return f"{head}({modifier}) {zone}"


def format_type(oid: int, modifier: int | None, name_of: Callable[[int], str | None]) -> str:
    """Return a type as `format_type` writes it. `name_of` returns the name, qualified as needed,
    of a type that SQL has no word for, and None for an unknown one.

    >>> format_type(1700, 786438, {}.get), format_type(1007, None, {}.get)
    ('numeric(12,2)', 'integer[]')
    """
    if oid == 0:
        return "-"
    # A vector has a name of its own, int2vector.
    if oid in ELEMENT_OF and oid not in VECTORS:
        return format_type(ELEMENT_OF[oid], modifier, name_of) + "[]"
    sized = modifier is not None and modifier >= 0
    if oid == BPCHAR:
        # With a modifier that says "none" it is the type itself, which is no CHARACTER(1).
        if sized and modifier is not None:
            return f"character({modifier - 4})"
        return "character" if modifier is None else "bpchar"
    base = _SQL_NAMES.get(oid) or name_of(oid)
    if base is None:
        return "???"
    if not sized or modifier is None:
        return base
    if oid == VARCHAR:
        return f"{base}({modifier - 4})"
    if oid == NUMERIC:
        return f"{base}({(modifier - 4) >> 16 & 0xFFFF},{(modifier - 4) & 0x7FF})"
    if oid in (TIME, TIMESTAMP, TIMESTAMPTZ, 1266):
        return _time_precision(base, modifier)
    return f"{base}({modifier})" if oid in (1560, 1562) else base


_ARRAY_PLAIN: Final = re.compile(r'[^\s{}",\\]+')


def _array_element(value: Any, element: int) -> str:
    """Return one element as an array's text holds it, with quotes where they are needed."""
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return array_text(value, element)
    text = format_catalog_value(value, element) or ""
    # The word NULL without quotes would be no text.
    if _ARRAY_PLAIN.fullmatch(text) and text.upper() != "NULL":
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_text(values: list[Any], element: int = TEXT) -> str:
    """Return an array as PostgreSQL writes it.

    >>> print(array_text(["a", "b c", None]))
    {a,"b c",NULL}
    """
    return "{" + ",".join(_array_element(value, element) for value in values) + "}"


def parse_array(text: str) -> list[Any]:
    """Return the elements of an array's text, as texts; `CatalogQueryError` is not raised: what
    is no array becomes the only element.

    >>> parse_array('{a,"b, c",NULL,{1,2}}')
    ['a', 'b, c', None, ['1', '2']]
    """
    text = text.strip()
    # A text with bounds: [0:1]={1,2}.
    if text.startswith("[") and "={" in text:
        text = text[text.index("={") + 1 :]
    if not text.startswith("{"):
        return [text]
    values, _ = _parse_braces(text, 1)
    return values


_ARRAY_TOKEN: Final = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^,{}]*))\s*', re.S)


def _parse_braces(text: str, at: int) -> tuple[list[Any], int]:
    """Return the elements from `at`, behind an opening brace, and the place behind the closing."""
    values: list[Any] = []
    while at < len(text):
        if text[at] == "}":
            return values, at + 1
        # An array within the array.
        if text[at] == "{":
            inner, at = _parse_braces(text, at + 1)
            values.append(inner)
        elif text[at] == "," or text[at].isspace():
            at += 1
        else:
            found = _ARRAY_TOKEN.match(text, at)
            if found is None:  # pragma: no cover: the pattern matches the empty text
                break
            quoted, bare = found[1], found[2]
            # Quotes keep blanks and the word NULL as they are.
            if quoted is not None:
                values.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.S))
            else:
                values.append(None if bare.strip().upper() == "NULL" else bare.strip())
            at = found.end()
    return values, at


def format_catalog_value(value: Any, type_oid: int) -> str | None:
    """Return a value of a catalog answer in PostgreSQL's text format; None for NULL.

    >>> format_catalog_value([1, 2], INT2VECTOR), format_catalog_value(True, BOOL)
    ('1 2', 't')
    """
    if value is None:
        return None
    # Before numbers: True is an int to Python.
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list):
        if type_oid in VECTORS:
            return " ".join(str(each) for each in value)
        return array_text(value, ELEMENT_OF.get(type_oid, TEXT))
    if isinstance(value, float):
        # PostgreSQL writes whole floats without a point.
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)
