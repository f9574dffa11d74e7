"""Rows as a client's caller gives and takes them: dicts and Arrow tables, to and from messages.

Only what the client can know without the table: types are inferred, and the service fits them to
the table's columns.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.compute.finishing import Finisher
from actors.controller.names import fold
from actors.errors import InvalidUsage, TypeMismatch
from actors.plan.one_row import Form, form_of
from actors.plan.schema import DIFF, Column
from actors.plan.updates import to_ipc
from actors.progress import Time
from actors.protocol.api import Read
from actors.protocol.compute import Comparison, Finishing, OrderBy

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
    few = rows.num_rows <= 1
    if (few and diffs.to_pylist() in ([], [1])) or (not few and pc.max(diffs).as_py() == 1):
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
    names = tuple(rows[0])
    if len(rows) == 1 and all(type(value) is int for value in rows[0].values()):
        integers = _form_of_integers(names)
        found = None if integers is None else integers.write(tuple(rows[0].values()))
        if found is not None:
            return found, names
    table = _from_dicts(f"key of {name}", rows)
    return to_ipc(table), tuple(table.column_names)


@functools.lru_cache(maxsize=256)
def _form_of_integers(names: tuple[str, ...]) -> Form | None:
    """Of one row of integers, as Arrow makes them of Python's."""
    schema = pa.schema([(name, pa.int64()) for name in names])
    return form_of(to_ipc(pa.table([pa.array([0], pa.int64()) for _ in names], schema=schema)))


Condition: TypeAlias = tuple[str, str] | tuple[str, str, Any]
"""A column, how it compares (``=``, ``<>``, ``<``, ``<=``, ``>``, ``>=``, ``is null``, ``is not
null``), and with which value."""

_OPERATORS: Final = ("=", "<>", "<", "<=", ">", ">=", "is null", "is not null")
_ORDER: Final = re.compile(
    r"\s*(`[^`]+`|\S+)(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?\s*", re.IGNORECASE
)


class Wish(msgspec.Struct, frozen=True):
    """What a read asks for, as it goes into the message."""

    keys: bytes | None
    key_columns: tuple[str, ...]
    filter: tuple[Comparison, ...]
    columns: tuple[str, ...] | None
    finishing: Finishing | None

    @classmethod
    def of(
        cls,
        name: str,
        key: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        where: Sequence[Condition],
        columns: Sequence[str] | None,
        order_by: Sequence[str],
        limit: int | None,
        offset: int,
    ) -> Wish:
        """Raises `InvalidUsage` and `TypeMismatch`."""
        keys, key_columns = encode_keys(name, key)
        finishing = None
        if order_by or offset or limit is not None:
            finishing = Finishing(tuple(_order_of(name, text) for text in order_by), limit, offset)
        tests = tuple(_comparison_of(name, condition) for condition in where)
        chosen = None if columns is None else tuple(columns)
        return cls(keys, key_columns, tests, chosen, finishing)

    def finisher(self, names: Sequence[str]) -> Finisher:
        """What finishes the answer, whose columns have these names: as the object spells them."""
        if self.columns is None and self.finishing is None:
            return Finisher(None, None)
        own = {fold(name): name for name in names}
        columns = None if self.columns is None else [own[fold(name)] for name in self.columns]
        finishing = self.finishing
        if finishing is not None:
            order_by = tuple(
                OrderBy(own[fold(by.column)], by.descending, by.nulls_first)
                for by in finishing.order_by
            )
            finishing = msgspec.structs.replace(finishing, order_by=order_by)
        return Finisher(finishing, columns)

    def read(
        self,
        number: int,
        name: str,
        as_of: Time | None,
        deadline_ms: int | None,
        traceparent: str | None,
    ) -> Read:
        """The request."""
        return Read(
            number,
            name,
            as_of,
            self.keys,
            self.key_columns,
            deadline_ms,
            traceparent,
            self.filter,
            self.columns,
            self.finishing,
        )


NO_WISH: Final = Wish(None, (), (), None, None)
"""All rows, as they come."""


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """No rows."""
    return pa.RecordBatch.from_pylist([], schema=schema)


def _comparison_of(name: str, condition: Condition) -> Comparison:
    column, sign, *rest = condition
    op = next((known for known in _OPERATORS if known == " ".join(sign.lower().split())), None)
    op = "<>" if sign == "!=" else op
    if op is None or len(rest) != (0 if op.startswith("is") else 1):
        raise InvalidUsage(
            f"condition {condition!r} on {name}: give (column, one of {', '.join(_OPERATORS)}, "
            "value), without a value for the two tests of null"
        )
    known = cast(Any, op)
    if not rest:
        return Comparison(column, known)
    value = _from_dicts(f"condition on {name}", [{column: rest[0]}])
    return Comparison(column, known, to_ipc(value))


def _order_of(name: str, text: str) -> OrderBy:
    found = _ORDER.fullmatch(text)
    if found is None:
        raise InvalidUsage(
            f"order_by {text!r} of {name}: write it as COLUMN [asc|desc] [nulls first|last]"
        )
    descending = (found[2] or "").lower() == "desc"
    nulls_first = not descending if found[3] is None else found[3].lower() == "first"
    return OrderBy(found[1].strip("`"), descending, nulls_first)
