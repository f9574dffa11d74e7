"""Pieces of SQL text, schemas in Spark's notation, and facts about delta nodes, which all renderers
share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from actors.engine.catalyst.relations import TABLE_METADATA
from actors.model.plan.delta import MatchState, Node, PairRows, inputs_below
from actors.model.plan.schema import DIFF, TIME, TableSchema, arrow_type, quote

# -- schemas and names of tables -------------------------------------------------------------------


CHAR_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's own key in the metadata of a column (`CharVarcharUtils`)."""


def view_name(name: str) -> str:
    """Return the name of a table as SQL: quoted, unless it already is."""
    return name if name.startswith("`") else quote(name)


def bare_name(name: str) -> str:
    """Return the name of a table without quotes, whether or not it is written with them.

    >>> bare_name("`a``b`"), bare_name("a.b")
    ('a`b', 'a.b')
    """
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


@lru_cache(maxsize=1024)
def spark_struct(arrow: pa.Schema) -> StructType:
    """Return an Arrow schema as a Spark schema, with all columns nullable."""
    return from_arrow_schema(arrow, prefer_timestamp_ntz=True)


@lru_cache(maxsize=1024)
def struct_json(arrow: pa.Schema) -> str:
    """Return an Arrow schema in Spark's JSON, with all columns nullable."""
    return str(spark_struct(arrow).json())


@lru_cache(maxsize=1024)
def declared_json(schema: TableSchema) -> str:
    """Return a schema in Spark's JSON, with the columns' own nullability."""
    struct = StructType()
    for field, column in zip(spark_struct(schema.arrow()).fields, schema.columns, strict=True):
        struct.add(field.name, field.dataType, column.nullable)
    return str(struct.json())


def numbered_json(schema: TableSchema, number: int) -> str:
    """Return a schema as `declared_json` does, with the number of the table in the metadata of each
    column."""
    struct = StructType()
    declared = StructType.fromJson(json.loads(declared_json(schema)))
    for field, column in zip(declared.fields, schema.columns, strict=True):
        marks: dict[str, Any] = {TABLE_METADATA: number}
        if column.type.lower().startswith("char("):
            # Spark pads values that are compared with such a column.
            marks[CHAR_LENGTH] = column.type.lower()
        struct.add(field.name, field.dataType, field.nullable, marks)
    return str(struct.json())


# -- pieces of SQL ---------------------------------------------------------------------------------

_SCALE_KEPT: Final = 6
"""Maximum scale at which Spark keeps a product's scale, whatever its precision."""
UNION: Final = "\nUNION ALL\n"

Types: TypeAlias = Callable[[Node], Mapping[str, str]]
"""Returns Spark's type text of each column of a node."""


class SessionRelation(msgspec.Struct, frozen=True):
    """A named input in the session: a view, or no rows (`view` is None)."""

    schema: TableSchema
    view: str | None = None
    bytes: int = 0
    ones: bool = False
    """True if every diff is 1."""


def sql_type(text: str) -> str:
    """Return the type of a column in a form that a CAST may name (in a plan, a CHAR or VARCHAR is a
    string)."""
    low = text.strip().lower()
    return "string" if low.startswith(("char(", "varchar(")) else text


def leaves(node: Node) -> Iterator[str]:
    """Return the names of the inputs below a node."""
    return (found.name for found in inputs_below(node))


def times_diff(value: str, kind: str | None, diff: str = DIFF) -> str:
    """Return SQL for ``value × diff`` that loses no digits. `kind` is the wanted type."""
    if kind is None:
        return f"{value} * {diff}"
    cast = f"CAST({value} AS {kind})"
    if kind.startswith("decimal"):
        width = arrow_type(kind)
        product = _decimal_product(cast, diff, width)
        gone = ""
        if width.precision == 38 and width.scale > _SCALE_KEPT:
            # No product keeps all of 38 digits, and Spark's negation rounds to 34, so the sign is
            # changed in the text.
            text = f"CAST({cast} AS string)"
            text = f"CASE WHEN {cast} < 0 THEN substr({text}, 2) ELSE concat('-', {text}) END"
            gone = f"WHEN {diff} = -1 THEN CAST({text} AS {kind}) "
        return f"CASE WHEN {diff} = 1 THEN {cast} {gone}ELSE CAST({product} AS {kind}) END"
    # Nearly all diffs are 1 or -1, which need no product.
    product = f"{cast} * {diff}"
    return (
        f"CASE WHEN {diff} = 1 THEN {cast} WHEN {diff} = -1 THEN -{cast} "
        f"ELSE CAST({product} AS {kind}) END"
    )


def _decimal_product(value: str, diff: str, kind: pa.DataType) -> str:
    """Return SQL for ``value × diff`` if Spark's result type keeps the scale."""
    times, scale = f"CAST({diff} AS decimal(19,0))", kind.scale
    # Beyond 38 digits, Spark's product of decimals reduces the scale, but never below 6.
    if scale <= _SCALE_KEPT:
        return f"{value} * {times}"
    # A value with a larger scale is split into a coarse and a fine piece whose products are exact.
    whole = f"CASE WHEN {value} < 0 THEN ceil({value}) ELSE floor({value}) END"
    narrowed = f"CAST({diff} AS decimal({max(1, min(19, 36 - scale))},0))"
    piece = f"decimal({min(kind.precision, 37)},{scale})"
    return (
        f"CAST(({whole}) * {times} AS {piece}) + "
        f"CAST(({value} % CAST(1 AS decimal(1,0))) * {narrowed} AS {piece})"
    )


def join_tests(node: PairRows | MatchState) -> list[str]:
    """Return the conditions of a join."""
    tests = [f"({left}) = ({right})" for left, right in node.equal]
    tests += [f"({left}) <=> ({right})" for left, right in node.same]
    if node.residual is not None:
        tests.append(f"(\n{node.residual}\n)")
    return tests


def from_rows(rows: str) -> str:
    """Return a FROM clause over a subquery."""
    # The alias keeps `WHERE (flag)` from being parsed as one.
    return f"FROM (\n{rows}\n) AS __t"


def consolidated(
    rows: str,
    names: Sequence[str],
    exact: Mapping[str, Sequence[str]],
    *,
    by_time: bool = True,
    keep: str = "<> 0",
    sum_first: bool = False,
) -> str:
    """Return SQL that sums the diffs of equal rows (at equal times) and keeps the rows whose sum
    satisfies `keep`. `exact`: the keys of columns that cannot be grouped by themselves
    (`exact_keys`). `sum_first`: no filter above may be computed on rows that are not summed up
    yet."""
    grouped = [key for name in names for key in exact.get(name, (quote(name),))]
    items = [f"any_value({quote(n)}) AS {quote(n)}" if n in exact else quote(n) for n in names]
    if by_time:
        grouped.append(TIME)
        items.append(TIME)
    items.append(f"sum({DIFF}) AS {DIFF}")
    if sum_first:
        # This is true for every sum that is kept. As it is not deterministic, Spark moves no filter
        # below it.
        keep += f" AND rand(0) < abs({DIFF})"
    groups = ", ".join(grouped)
    tail = f"GROUP BY {groups} " if groups else ""
    summed = f"SELECT {', '.join(items)} {from_rows(rows)} {tail}"
    return f"SELECT * {from_rows(summed)} WHERE {DIFF} {keep}"
