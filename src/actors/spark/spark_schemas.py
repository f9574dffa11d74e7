"""Our schemas as Spark writes them, and names as SQL."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from actors.catalyst.relations import TABLE_METADATA
from actors.plan.schema import TableSchema

CHAR_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's own key in the metadata of a column (`CharVarcharUtils`)."""


def view_name(name: str) -> str:
    """Return a table's name as SQL: quoted unless it is written so already."""
    return name if name.startswith("`") else "`" + name.replace("`", "``") + "`"


def bare_name(name: str) -> str:
    """Return a table's name without quotes, however it is written.

    >>> bare_name("`a``b`"), bare_name("a.b")
    ('a`b', 'a.b')
    """
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


@lru_cache(maxsize=1024)
def spark_struct(arrow: pa.Schema) -> StructType:
    """Return an Arrow schema as Spark's, all columns nullable."""
    return from_arrow_schema(arrow, prefer_timestamp_ntz=True)


@lru_cache(maxsize=1024)
def struct_json(arrow: pa.Schema) -> str:
    """Return an Arrow schema as Spark writes it in JSON, all columns nullable."""
    return str(spark_struct(arrow).json())


@lru_cache(maxsize=1024)
def declared_json(schema: TableSchema) -> str:
    """Return a schema as Spark writes it in JSON, with the columns' own nullability."""
    struct = StructType()
    for field, column in zip(spark_struct(schema.arrow()).fields, schema.columns, strict=True):
        struct.add(field.name, field.dataType, column.nullable)
    return str(struct.json())


def numbered_json(schema: TableSchema, number: int) -> str:
    """Return a schema as `declared_json` does, with the table's number in each column's
    metadata."""
    struct = StructType()
    declared = StructType.fromJson(json.loads(declared_json(schema)))
    for field, column in zip(declared.fields, schema.columns, strict=True):
        marks: dict[str, Any] = {TABLE_METADATA: number}
        if column.type.lower().startswith("char("):
            # Spark fills up what is compared with such a column.
            marks[CHAR_LENGTH] = column.type.lower()
        struct.add(field.name, field.dataType, field.nullable, marks)
    return str(struct.json())
