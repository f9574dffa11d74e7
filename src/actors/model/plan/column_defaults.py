"""Defaults of a table's columns: their expressions, and the values that need no Spark. Pure.

A default is a Spark expression without columns. If its value is constant, the value is stored with
it, so that no write computes it again. The time of a statement is taken from a clock. Only Spark
computes the others, such as ``current_user()`` and ``date_add(current_date(), 7)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from actors.model.plan.schema import TableSchema, arrow_type
from actors.model.plan.updates import from_ipc, to_ipc

DEFAULT_BYTES_MAX: Final = 65_536
"""Maximum size in bytes of one default in the catalog, text and value together."""
_DAY_MICROS: Final = 86_400_000_000

MomentKind: TypeAlias = Literal["", "timestamp", "date"]


class ColumnDefault(msgspec.Struct, frozen=True):
    """The default of one column.

    `text` is the expression in Spark's dialect; in a request, "" removes the default. `value` is
    its constant value in the type of the column, as an Arrow IPC stream of one row; empty if the
    value differs between statements. `moment` says whether it is the statement's time or day.
    """

    text: str
    value: bytes = b""
    moment: MomentKind = ""


ColumnDefaults: TypeAlias = Mapping[str, ColumnDefault]
"""Defaults by the names of their columns."""
DefaultValues: TypeAlias = Mapping[str, pa.Scalar]
"""Values of the defaults in one statement, by the names of their columns; NULL for other
columns."""


def constant_default(text: str, value: pa.Array) -> ColumnDefault:
    """Return a default with a constant value, which is given as an array of one.

    >>> from actors.model.plan.schema import TableColumn
    >>> made = constant_default("1 + 1", pa.array([2], pa.int32()))
    >>> schema = TableSchema((TableColumn("n", "int"),))
    >>> known_values({"n": made}, schema, 0)
    {'n': <pyarrow.Int32Scalar: 2>}
    """
    return ColumnDefault(text, to_ipc(pa.table({"value": value})))


def known_values(
    defaults: ColumnDefaults, schema: TableSchema, now_micros: int
) -> dict[str, pa.Scalar]:
    """Return the values of the defaults that need no Spark, in the types of their columns.

    `now_micros` is the statement's time, in microseconds since 1970. Raises `MalformedFrame`.
    """
    found: dict[str, pa.Scalar] = {}
    for column in schema.columns:
        default = defaults.get(column.name)
        if default is not None and default.value:
            found[column.name] = _decoded(default.value)
        elif default is not None and default.moment:
            kind = arrow_type(column.type)
            found[column.name] = _moment(default.moment, kind, now_micros)
    return found


@lru_cache(maxsize=1024)
def _decoded(value: bytes) -> pa.Scalar:
    """Return the value in a stream. Cached, because every INSERT needs it."""
    return from_ipc(value)[0][0]


def _moment(moment: MomentKind, kind: pa.DataType, now_micros: int) -> pa.Scalar:
    """Return a time as a timestamp, or its day as a date. Spark's sessions use UTC here."""
    days = now_micros // _DAY_MICROS
    if pa.types.is_date(kind):
        return pa.scalar(days, pa.int32()).cast(kind)
    micros = days * _DAY_MICROS if moment == "date" else now_micros
    return pa.scalar(micros, pa.int64()).cast(kind)


def defaults_digest(defaults: ColumnDefaults) -> str:
    """Return a digest that is equal only for equal defaults; "" if there are none.

    >>> defaults_digest({}), len(defaults_digest({"a": ColumnDefault("1")}))
    ('', 32)
    """
    if not defaults:
        return ""
    # Each part is preceded by its length, so that different lists give different bytes.
    parts = [(name, each.text, each.moment) for name, each in sorted(defaults.items())]
    values = [each.value for _, each in sorted(defaults.items())]
    return hashlib.blake2b(msgspec.msgpack.encode((parts, values)), digest_size=16).hexdigest()
