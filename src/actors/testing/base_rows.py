"""Base rows: many rows that a script's tables hold before its changes.

`base_rows` makes N rows of one table from a seed, as Arrow, without a Python object per row. A few
rows take each column's value from the script's values, so that they meet the script's keys in joins
and groups; all others take values beyond the script's, about two rows per value. Nullable columns
contain NULLs, some rows occur twice, and columns of a PRIMARY KEY are unique and never NULL.

Rules: the distance of values from the script's own is a *range*; ranges are tried from the widest
on, since a query that raises under ANSI rules would check nothing (`RANGES`). Sums and products of
`near` values fit their types; `own` rows contain only the script's values. Types for which no value
can be made up (nested ones, strings of bounded length) use only the script's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.testing.engine import table_of
from actors.testing.nodes import NodeRelation

RANGES: Final = ("far", "near", "own")
MET_ROWS: Final = 6
"""Rows of a table that take each of the script's values in a column; few, because a join of many
tables multiplies them."""
NULL_SHARE: Final = 0.03
TWICE_SHARE: Final = 0.05
NEAR_VALUES: Final = 30_000
"""Products of two of these fit an int."""
_INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "tinyint": (20, 100), "smallint": (100, 10_000), "int": (1_000, 1 << 30),
    "bigint": (1_000, 1 << 40),
}  # fmt: skip
"""Integer types → the least value beyond the script's, and how many there are."""


class UnmakeableTable(Exception):
    """Raised for a table whose rows cannot be made up because its key has too few values."""


def script_values(schema: TableSchema, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the values that the script uses in each column, without NULLs, each once."""
    found: dict[str, list[Any]] = {}
    for index, column in enumerate(schema.columns):
        values = {repr(row[index]): row[index] for row in rows if row[index] is not None}
        found[column.name] = list(values.values())
    return found


def base_rows(
    schema: TableSchema,
    values: Mapping[str, list[Any]],
    count: int,
    reach: str,
    seed: str,
    time: int,
) -> pa.Table:
    """Return `count` updates at a time, in the form of the script's table. Raises
    `UnmakeableTable`."""
    random = np.random.default_rng(list(seed.encode()))
    arrays = [
        _column(column, values[column.name], count, reach, random, unique=column.name in schema.key)
        for column in schema.columns
    ]
    diffs = np.ones(count, np.int64)
    if not schema.key:
        diffs[random.random(count) < TWICE_SHARE] = 2
    times = pa.repeat(pa.scalar(time, pa.int64()), count)
    return pa.Table.from_arrays([*arrays, times, pa.array(diffs)], schema=schema.arrow_updates())


def _column(
    column: TableColumn,
    values: Sequence[Any],
    count: int,
    reach: str,
    random: np.random.Generator,
    *,
    unique: bool,
) -> pa.Array:
    own = _arrow_values(column, values)
    if unique:
        made = _beyond(column, np.arange(count))
        if made is None or pc.count_distinct(made).as_py() < count:
            raise UnmakeableTable(f"column {column.name}: a key of type {column.type}")
        return made
    spread = {"far": max(1, count // 2), "near": min(NEAR_VALUES, max(1, count // 2)), "own": 0}
    numbers = random.integers(0, spread[reach], count) if spread[reach] else None
    beyond = None if numbers is None else _beyond(column, numbers)
    if beyond is None:
        if not len(own):
            beyond, own = _beyond(column, random.integers(0, 4, count)), own
        if beyond is None and not len(own):
            return pa.nulls(count, arrow_type(column.type))
    if beyond is None:
        made = own.take(pa.array(random.integers(0, len(own), count)))
    else:
        met = random.random(count) < min(0.5, MET_ROWS * len(own) / max(1, count))
        if len(own):
            chosen = own.take(pa.array(random.integers(0, len(own), count)))
            made = pc.if_else(pa.array(met), chosen, beyond)
        else:
            made = beyond
    if column.nullable:
        gone = random.random(count) < NULL_SHARE
        made = made.take(pa.array(np.arange(count), mask=gone))
    return made


def _arrow_values(column: TableColumn, values: Sequence[Any]) -> pa.Array:
    relation = NodeRelation(((column.name, column.type),), [((value,), 0, 1) for value in values])
    return table_of(relation)[column.name].combine_chunks()


def _beyond(column: TableColumn, numbers: np.ndarray[Any, Any]) -> pa.Array | None:
    """Return values that no script uses, one per number; None if the type has none."""
    kind, wanted = column.type, arrow_type(column.type)
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        return pa.array(least + numbers % most).cast(wanted)
    if kind in ("float", "double"):
        return pa.array(100.5 + numbers % (1 << 20)).cast(wanted)
    if kind.startswith("decimal"):
        digits = wanted.precision - wanted.scale
        if digits < 2:
            return None
        whole = 10 ** min(digits, 9)
        made = pa.array(whole // 10 + numbers % (whole - whole // 10))
        scale = min(wanted.scale, 19)  # a bigint has 19 digits before the point
        return made.cast(pa.decimal128(19 + scale, scale)).cast(wanted)
    if kind in ("string", "binary"):
        texts = pa.array(numbers).cast(pa.string())
        return pc.binary_join_element_wise("base", texts, "-").cast(wanted)
    if kind == "date":
        return pa.array((17_000 + numbers % 20_000).astype(np.int32)).cast(wanted)
    if kind.startswith("timestamp"):
        minutes = 25_000_000 + numbers % 20_000_000
        return pa.array(minutes * 60_000_000).cast(wanted)
    if kind == "boolean":
        return pa.array(numbers % 2 == 1)
    return None
