"""Converts rows between dicts or Arrow tables and the protocol's messages.

Types are inferred; the service casts them to those of the table's columns. The columns' types are
needed here only if values are dicts, which may be structs or maps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias, cast

import msgspec
import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.model.plan.one_row import RowForm, form_of
from actors.model.plan.schema import DIFF, TableColumn
from actors.model.plan.updates import to_ipc
from actors.model.protocol.api import ReadObject
from actors.model.protocol.message_parts import ColumnComparison, OrderBy, RowSetFinishing
from actors.model.protocol.relations import fold
from actors.model.protocol.row_finishing import RowFinisher
from actors.runtime.errors import InvalidUsage, TypeMismatch
from actors.runtime.progress import Time

Rows: TypeAlias = Sequence[Mapping[str, Any]] | pa.Table
"""Rows as dicts or as an Arrow table. In a dict, a struct or a map is a dict, and an inserted row
gets the defaults, or else NULL, for missing columns."""


def column_of(name: str, text: str) -> TableColumn:
    """Make a column from the text of a Spark type, which may end with ``not null``."""
    words = text.strip()
    if words.lower().endswith(" not null"):
        return TableColumn(name, words[: -len(" not null")].strip().lower(), nullable=False)
    return TableColumn(name, words.lower())


def expand(contents: pa.Table) -> pa.Table:
    """Repeat each row by its diff, and drop the column of diffs."""
    diffs = contents[DIFF]
    rows = contents.drop_columns([DIFF])
    few = rows.num_rows <= 1
    if (few and diffs.to_pylist() in ([], [1])) or (not few and pc.max(diffs).as_py() == 1):
        return rows
    numbers = [row for row, diff in enumerate(diffs.to_pylist()) for _ in range(diff)]
    return rows.take(pa.array(numbers, pa.int64()))


def encode(table: str, rows: Rows | None, shape: pa.Schema | None = None) -> bytes | None:
    """Encode rows for a message; None for None.

    `shape`: the table's columns, needed if values are dicts. Raises `TypeMismatch` for values that
    do not form a column.
    """
    if rows is None:
        return None
    made = rows if isinstance(rows, pa.Table) else _from_dicts(f"table {table}", rows, shape)
    return to_ipc(made)


def encode_left_out(rows: Rows | None) -> bytes | None:
    """Encode which rows lack columns that other rows have; None if none does.

    >>> encode_left_out([{"a": 1, "b": 2}, {"b": 3, "a": None}]) is None
    True
    """
    if rows is None or isinstance(rows, pa.Table):
        return None
    names = dict.fromkeys(chain.from_iterable(rows))
    # Fast path for the usual case, in which all rows have all columns.
    if all(len(row) == len(names) for row in rows):
        return None
    masks = {name: [name not in row for row in rows] for name in names}
    return to_ipc(pa.table({name: pa.array(mask) for name, mask in masks.items() if any(mask)}))


def holds_dicts(rows: Rows | None) -> bool:
    """Return whether any value is or contains a dict, which may be a struct or a map."""
    if rows is None or isinstance(rows, pa.Table):
        return False
    kinds = set(map(type, chain.from_iterable(row.values() for row in rows)))
    return not kinds <= _FLAT and any(_holds_dict(value) for row in rows for value in row.values())


_FLAT: Final = {bool, bytes, date, datetime, Decimal, float, int, str, type(None)}


def _holds_dict(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_dict, value))
    return isinstance(value, Mapping)


def _from_dicts(
    what: str, rows: Sequence[Mapping[str, Any]], shape: pa.Schema | None = None
) -> pa.Table:
    """Convert dicts to a table with a column for each key that occurs. Raises `TypeMismatch`, which
    names `what`, the column and the row."""
    types = {} if shape is None else {fold(field.name): field.type for field in shape}
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        wanted = types.get(fold(name))
        try:
            arrays.append(_shaped(values, wanted))
        except _MISFITS as error:
            row = _first_misfit(values, wanted)
            raise TypeMismatch(
                f"{what}, column {name}, row {row}: {values[row]!r}: {error}"
            ) from None
    return pa.table(arrays, names=names)


_MISFITS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)


def _shaped(values: Sequence[Any], wanted: pa.DataType | None) -> pa.Array:
    """Convert values to an array that is nested like `wanted`.

    Leaves get the type that Arrow infers; the service checks whether it fits. Raises one of
    `_MISFITS`.
    """
    if wanted is None or not pa.types.is_nested(wanted):
        return pa.array(values)
    present = [value for value in values if value is not None]
    if not present:
        # Arrow cannot infer a type without a value.
        return pa.nulls(len(values), wanted)
    mask = pa.array([value is None for value in values])
    if pa.types.is_struct(wanted):
        _check_all(present, Mapping, wanted)
        types = {field.name: field.type for field in wanted}
        # Omit fields that no value has; the service sets them to NULL.
        names = list(dict.fromkeys(name for value in present for name in value))
        fields = [
            _shaped([None if v is None else v.get(name) for v in values], types.get(name))
            for name in names
        ]
        return pa.StructArray.from_arrays(fields, names, mask=mask)
    if pa.types.is_map(wanted):
        present = [list(v.items()) if isinstance(v, Mapping) else v for v in present]
    _check_all(present, (list, tuple), wanted)
    lengths = iter([len(value) for value in present])
    offsets = [0, *accumulate(0 if value is None else next(lengths) for value in values)]
    inside = [each for value in present for each in value]
    if not pa.types.is_map(wanted):
        elements = _shaped(inside, wanted.value_type)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, mask=mask)
    keys, items = ([pair[n] for pair in inside] for n in (0, 1))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        _shaped(keys, wanted.key_type) if keys else pa.array([], wanted.key_type),
        _shaped(items, wanted.item_type),
        mask=mask,
    )


def _check_all(values: Sequence[Any], kinds: Any, wanted: pa.DataType) -> None:
    for value in values:
        if not isinstance(value, kinds):
            raise TypeError(f"{type(value).__name__} does not fit {wanted}")


def _first_misfit(values: Sequence[Any], wanted: pa.DataType | None) -> int:
    """Return the position of the first value that does not fit with the values before it."""
    low, high = 0, len(values)
    while high - low > 1:
        # Bisection: a prefix that converts has no misfit.
        middle = (low + high) // 2
        try:
            _shaped(values[:middle], wanted)
            low = middle
        except _MISFITS:
            high = middle
    return low


def encode_keys(
    name: str, key: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> tuple[bytes | None, tuple[str, ...]]:
    """Encode key values for a message. Return them with the names of their columns; None and no
    names for no key. Raises `InvalidUsage`."""
    if key is None:
        return None, ()
    rows = [key] if isinstance(key, Mapping) else list(key)
    if not rows or not rows[0] or any(set(row) != set(rows[0]) for row in rows):
        raise InvalidUsage(
            f"invalid key for {name}: expected one or more dicts with the same columns"
        )
    names = tuple(rows[0])
    if len(rows) == 1 and all(type(value) is int for value in rows[0].values()):
        # Fast path for one row of integers: fill in a cached IPC message.
        integers = _form_of_integers(names)
        found = None if integers is None else integers.write(tuple(rows[0].values()))
        if found is not None:
            return found, names
    table = _from_dicts(f"key of {name}", rows)
    return to_ipc(table), tuple(table.column_names)


@functools.lru_cache(maxsize=256)
def _form_of_integers(names: tuple[str, ...]) -> RowForm | None:
    """Return the IPC message template for one row of bigint columns, the type that Arrow infers for
    Python integers."""
    schema = pa.schema([(name, pa.int64()) for name in names])
    return form_of(to_ipc(pa.table([pa.array([0], pa.int64()) for _ in names], schema=schema)))


Condition: TypeAlias = tuple[str, str] | tuple[str, str, Any]
"""A column, an operator (``=``, ``<>``, ``<``, ``<=``, ``>``, ``>=``, ``is null``, ``is not
null``), and a value unless the operator tests for NULL."""

_OPERATORS: Final = ("=", "<>", "<", "<=", ">", ">=", "is null", "is not null")
_ORDER: Final = re.compile(
    r"\s*(`[^`]+`|\S+)(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?\s*", re.IGNORECASE
)


class ReadSpec(msgspec.Struct, frozen=True):
    """The arguments of a read, encoded for the message."""

    keys: bytes | None
    key_columns: tuple[str, ...]
    filter: tuple[ColumnComparison, ...]
    columns: tuple[str, ...] | None
    finishing: RowSetFinishing | None

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
    ) -> ReadSpec:
        """Encode the arguments of a read. Raises `InvalidUsage` and `TypeMismatch`."""
        keys, key_columns = encode_keys(name, key)
        finishing = None
        if order_by or offset or limit is not None:
            finishing = RowSetFinishing(
                tuple(_order_of(name, text) for text in order_by), limit, offset
            )
        tests = tuple(_comparison_of(name, condition) for condition in where)
        chosen = None if columns is None else tuple(columns)
        return cls(keys, key_columns, tests, chosen, finishing)

    def finisher(self, names: Sequence[str]) -> RowFinisher:
        """Return what orders, limits and projects answers with these column names, which are
        spelled as in the object."""
        if self.columns is None and self.finishing is None:
            return RowFinisher(None, None)
        own = {fold(name): name for name in names}
        columns = None if self.columns is None else [own[fold(name)] for name in self.columns]
        finishing = self.finishing
        if finishing is not None:
            order_by = tuple(
                OrderBy(own[fold(by.column)], by.descending, by.nulls_first)
                for by in finishing.order_by
            )
            finishing = msgspec.structs.replace(finishing, order_by=order_by)
        return RowFinisher(finishing, columns)

    def read(
        self,
        number: int,
        name: str,
        as_of: Time | None,
        deadline_ms: int | None,
    ) -> ReadObject:
        """Build the request for this read."""
        return ReadObject(
            number,
            name,
            as_of,
            self.keys,
            self.key_columns,
            deadline_ms,
            self.filter,
            self.columns,
            self.finishing,
        )


PLAIN_READ: Final = ReadSpec(None, (), (), None, None)
"""A read of all rows in undefined order."""


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_pylist([], schema=schema)


def _comparison_of(name: str, condition: Condition) -> ColumnComparison:
    column, sign, *rest = condition
    op = next((known for known in _OPERATORS if known == " ".join(sign.lower().split())), None)
    op = "<>" if sign == "!=" else op
    if op is None or len(rest) != (0 if op.startswith("is") else 1):
        raise InvalidUsage(
            f"invalid condition {condition!r} on {name}: expected (column, operator, value) with "
            f"an operator of {', '.join(_OPERATORS)}; the NULL tests take no value"
        )
    known = cast(Any, op)
    if not rest:
        return ColumnComparison(column, known)
    value = _from_dicts(f"condition on {name}", [{column: rest[0]}])
    return ColumnComparison(column, known, to_ipc(value))


def _order_of(name: str, text: str) -> OrderBy:
    found = _ORDER.fullmatch(text)
    if found is None:
        raise InvalidUsage(
            f"invalid order_by {text!r} for {name}: expected COLUMN [asc|desc] [nulls first|last]"
        )
    descending = (found[2] or "").lower() == "desc"
    nulls_first = not descending if found[3] is None else found[3].lower() == "first"
    return OrderBy(found[1].strip("`"), descending, nulls_first)
