"""Parses names of types: Spark's, and PostgreSQL's as the corresponding types of Spark.

Both dialects accept Spark's names, so any client can create a table with arrays and maps. Where a
name denotes different types, the dialect of the statement decides: PostgreSQL's ``timestamp`` is
``timestamp_ntz``, its ``float`` is ``double``. Pure.

>>> from actors.engine.sql.tokens import lex_text
>>> def read(text: str, dialect: SqlDialect = SqlDialect.SPARK) -> str:
...     return read_type(StatementReader(lex_text(text, dialect)))
>>> read("MAP<STRING, DECIMAL(12, 2)>"), read("STRUCT<A: INT, b ARRAY<LONG>>")
('map<string,decimal(12,2)>', 'struct<A:int,b:array<bigint>>')
>>> [read(each, SqlDialect.POSTGRES) for each in ("int8", "numeric(10,2)", "character varying(5)")]
['bigint', 'decimal(10,2)', 'varchar(5)']
>>> [read(each, SqlDialect.POSTGRES) for each in ("timestamp(6) with time zone", "text[][]")]
['timestamp', 'array<array<string>>']
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from actors.engine.sql.reader import StatementReader
from actors.engine.sql.tokens import SqlDialect, name_value, quote_name
from actors.model.plan.schema import UNBOUNDED_NUMERIC

DEPTH_MAX: Final = 32
"""Maximum nesting of a type, since reading one recurses."""
_PLAIN_FIELD: Final = re.compile(r"\w+")
_PARTED: Final = re.compile(r"[,:<>()`]")
"""Characters that separate the fields in a type's text; a field's name cannot contain them."""
_SPARK_NAMES: Final[Mapping[str, str]] = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "dec": "decimal",
    "numeric": "decimal",
    "character": "char",
    "timestamp_ltz": "timestamp",
}
"""Spark's alternative names of its types."""
_POSTGRES_NAMES: Final[Mapping[str, str]] = {
    "bool": "boolean",
    "bpchar": "char",
    "bytea": "binary",
    "character": "char",
    "character varying": "varchar",
    "dec": "decimal",
    "double precision": "double",
    "float": "double",
    "float4": "float",
    "float8": "double",
    "int2": "smallint",
    "int4": "int",
    "int8": "bigint",
    "integer": "int",
    "json": "string",
    "jsonb": "string",
    "name": "string",
    "numeric": "decimal",
    "oid": "bigint",
    "real": "float",
    "text": "string",
    "timestamp": "timestamp_ntz",
    "timestamp with time zone": "timestamp",
    "timestamp without time zone": "timestamp_ntz",
    "timestamptz": "timestamp",
    "uuid": "string",
}
_TIME_DIGITS: Final = 6
_FLOAT_BITS_MAX: Final = 24
"""Maximum precision at which PostgreSQL's ``float(n)`` is a float."""


CHECKED_NAMES: Final = frozenset({"bytea", "uuid", "json", "jsonb"})
"""PostgreSQL types whose text form Spark's types do not check."""


class WrittenType(NamedTuple):
    """A type as written: Spark's text of it, and PostgreSQL's name of the type, or of the element
    type of an array. `limited`: a length or a precision follows the name."""

    spark: str
    name: str
    limited: bool

    @property
    def checked(self) -> bool:
        """Return whether PostgreSQL checks the form of the type's texts and Spark does not."""
        return self.name in CHECKED_NAMES


def read_written_type(reader: StatementReader) -> WrittenType:
    """Read a type. Raises `SqlSyntaxError`."""
    if reader.dialect is SqlDialect.POSTGRES:
        _pass_schema(reader)
    first = reader.peek()
    spark = read_type(reader)
    name = name_value(first.text) if first.kind == "name" else first.text.lower()
    taken = reader.tokens[reader.place - 1].end
    return WrittenType(spark, name, "(" in reader.text[first.end : taken])


def read_type(reader: StatementReader) -> str:
    """Read a type and return Spark's text of it, without checking that Spark has such a type.

    Raises `SqlSyntaxError`.
    """
    return _type(reader, 0)


def _type(reader: StatementReader, depth: int) -> str:
    if reader.dialect is SqlDialect.POSTGRES:
        _pass_schema(reader)
    word = reader.name("a type").lower()
    return _type_named(reader, word, depth)


def _pass_schema(reader: StatementReader) -> None:
    """Skip ``pg_catalog.`` before a type; asyncpg writes it in double quotes."""
    token = reader.peek()
    quoted = token.kind == "name" and name_value(token.text) == "pg_catalog"
    if (quoted or token.word == "PG_CATALOG") and reader.peek(1).text == ".":
        reader.place += 2


def _type_named(reader: StatementReader, word: str, depth: int) -> str:
    """Return the type whose first word has been read."""
    # The lexer never reads `>>` as one sign, so each level has its own `>`.
    if reader.take("<"):
        return _nested(reader, word, depth + 1)
    if reader.dialect is not SqlDialect.POSTGRES:
        name = _SPARK_NAMES.get(word, word)
        numbers = _numbers(reader)
        # The text that Spark itself reports for this type.
        if name == "decimal" and not numbers:
            return "decimal(10,0)"
        return name + _in_brackets(numbers)
    return _with_arrays(reader, _postgres_type(reader, word))


def _nested(reader: StatementReader, word: str, depth: int) -> str:
    if depth > DEPTH_MAX:
        raise reader.error(f"a type is nested more than {DEPTH_MAX} levels deep")
    read = _field if word == "struct" else _type
    parts = reader.sequence(lambda: read(reader, depth))
    reader.need(">")
    return f"{word}<{','.join(parts)}>"


def _field(reader: StatementReader, depth: int) -> str:
    name = reader.name("a field")
    if _PARTED.search(name):
        raise reader.error(f"invalid field name {name!r}: , : < > ( ) and ` are not allowed")
    # Spark also writes such names in backticks.
    if not _PLAIN_FIELD.fullmatch(name):
        name = quote_name(name)
    token = reader.peek()
    # In `a :int` the lexer reads a parameter.
    if token.kind == "parameter" and token.text.startswith(":"):
        reader.place += 1
        return f"{name}:{_type_named(reader, token.text[1:].lower(), depth)}"
    reader.take(":")
    return f"{name}:{_type(reader, depth)}"


def _numbers(reader: StatementReader) -> tuple[int, ...]:
    if not reader.follows("("):
        return ()
    inner = reader.bracketed()
    numbers = [inner.whole_number("a number")]
    if inner.take(","):
        numbers.append(inner.whole_number("a number"))
    inner.need_end("')'")
    return tuple(numbers)


def _in_brackets(numbers: tuple[int, ...]) -> str:
    return f"({','.join(map(str, numbers))})" if numbers else ""


def _postgres_type(reader: StatementReader, word: str) -> str:
    if word == "double" and reader.take("PRECISION"):
        word = "double precision"
    if word == "character" and reader.take("VARYING"):
        word = "character varying"
    numbers = _numbers(reader)
    if word == "timestamp":
        # The precision comes before the zone; Spark's precision is always microseconds.
        if numbers and numbers[0] < _TIME_DIGITS:
            raise reader.error(
                f"timestamp({numbers[0]}) is not supported: times always have microsecond precision"
            )
        if reader.take("WITH", "TIME", "ZONE"):
            word = "timestamp with time zone"
        else:
            reader.take("WITHOUT", "TIME", "ZONE")
    name = _POSTGRES_NAMES.get(word, word)
    match name:
        case "double" if word == "float" and numbers:
            return "float" if numbers[0] <= _FLOAT_BITS_MAX else "double"
        case "timestamp" | "timestamp_ntz":
            return name
        case "decimal" if not numbers:
            return UNBOUNDED_NUMERIC
        case "char" if not numbers:
            # In PostgreSQL, char without a length has one character, and bpchar any number.
            return "string" if word == "bpchar" else "char(1)"
        case "varchar" if not numbers:
            return "string"
    return name + _in_brackets(numbers)


def _with_arrays(reader: StatementReader, element: str) -> str:
    levels = int(reader.take("ARRAY"))
    while reader.follows("["):
        reader.place = reader.partners[reader.place] + 1
        levels += 1
        if levels > DEPTH_MAX:
            raise reader.error(f"a type is nested more than {DEPTH_MAX} levels deep")
    return "array<" * levels + element + ">" * levels
