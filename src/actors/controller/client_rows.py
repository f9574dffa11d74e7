"""Rows as a client's caller gives and takes them: dicts and Arrow tables, to and from messages.

Only what the client can know without the table: types are inferred, and the service fits them to
the table's columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from actors.errors import InvalidUsage, TypeMismatch
from actors.plan.schema import DIFF, Column
from actors.plan.updates import to_ipc

Rows: TypeAlias = Sequence[Mapping[str, Any]] | pa.Table
"""Rows as dicts (a missing column is NULL) or as an Arrow table."""


def column_of(name: str, text: str) -> Column:
    """A column of a Spark type's text, with ``not null`` at its end or without."""
    words = text.strip()
    if words.lower().endswith(" not null"):
        return Column(name, words[: -len(" not null")].strip().lower(), nullable=False)
    return Column(name, words.lower())


def expand(contents: pa.Table) -> pa.Table:
    """Rows repeated by their weight, without it."""
    diffs = contents[DIFF]
    rows = contents.drop_columns([DIFF])
    if rows.num_rows == 0 or pc.max(diffs).as_py() == 1:
        return rows
    numbers = [row for row, diff in enumerate(diffs.to_pylist()) for _ in range(diff)]
    return rows.take(pa.array(numbers, pa.int64()))


def encode(table: str, rows: Rows | None) -> bytes | None:
    """Rows for a message. Raises `TypeMismatch` for values that make no column."""
    if rows is None:
        return None
    return to_ipc(rows if isinstance(rows, pa.Table) else _from_dicts(f"table {table}", rows))


def _from_dicts(what: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Columns of all keys that occur; raises `TypeMismatch` naming column and row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            arrays.append(pa.array(values))
        except (pa.ArrowException, OverflowError, ValueError) as error:
            row = _first_misfit(values)
            raise TypeMismatch(
                f"{what}, column {name}, row {row}: {values[row]!r}: {error}"
            ) from None
    return pa.table(arrays, names=names)


def _first_misfit(values: Sequence[Any]) -> int:
    """The first value that does not go with those before it."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pa.array(values[:middle])
            low = middle
        except (pa.ArrowException, OverflowError, ValueError):
            high = middle
    return low


def encode_keys(
    name: str, key: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> tuple[bytes | None, tuple[str, ...]]:
    """Key values for a message, and the columns they are of. Raises `InvalidUsage`."""
    if key is None:
        return None, ()
    rows = [key] if isinstance(key, Mapping) else list(key)
    if not rows or not rows[0] or any(set(row) != set(rows[0]) for row in rows):
        raise InvalidUsage(f"key of {name}: give one or more dicts with the same columns")
    table = _from_dicts(f"key of {name}", rows)
    return to_ipc(table), tuple(table.column_names)
