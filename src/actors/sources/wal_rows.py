"""Rows of JSON, as records of a log hold them, to columns of Arrow: exactly, or not at all. Pure.

Rules:
- a row is an object; its names are the columns', letter by letter. A column that may be NULL may be
  missing; one that may not must be there;
- values are as JSON has them: integers for integers (no text, no fraction), numbers for ``float``
  and ``double``; dates and timestamps as ISO 8601, ``timestamp`` with an offset, ``timestamp_ntz``
  without; ``binary`` as base64; decimals as numbers or, for more digits than a writer's floats
  have, as text; arrays, and objects for structs and maps (whose keys are strings);
- a value that its column cannot hold as it is makes a `Misfit`: nothing is rounded, cut or guessed,
  but for what JSON's numbers lose in a column of floats, and what is finer than a microsecond.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.schema import DIFF, Column, Schema

FLOAT_MAX: Final = 3.4028234663852886e38
"""Of 32 bits."""
_SHOWN: Final = 200
"""Of a row, in an error."""
_DIGITS_MAX: Final = 100
"""Of a decimal, before or behind the point: more than any column has. Arrow is asked about no
others: exponents of some hundred millions, and as many digits, end its process."""
_SHORT_BYTES: Final = 4096
"""A row that is not longer has not many digits."""

_AWARE: Final = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
_PLAIN: Final = Annotated[datetime.datetime, msgspec.Meta(tz=False)]


class Misfit(Exception):
    """A row does not fit; the text names the column and what is wrong."""


def check_type(type_: pa.DataType) -> None:
    """Raises `InvalidUsage` for a type that no JSON can be for."""
    _python(type_)


def _python(type_: pa.DataType) -> Any:
    """What msgspec decodes for a value that is not NULL."""
    if pa.types.is_boolean(type_):
        return bool
    if pa.types.is_integer(type_):
        bits = type_.bit_width - 1
        return Annotated[int, msgspec.Meta(ge=-(2**bits), le=2**bits - 1)]
    if pa.types.is_floating(type_):
        if type_.bit_width == 64:
            return float
        return Annotated[float, msgspec.Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)]
    if pa.types.is_decimal(type_):
        return decimal.Decimal
    if pa.types.is_string(type_):
        return str
    if pa.types.is_binary(type_):
        return bytes
    if pa.types.is_date(type_):
        return datetime.date
    if pa.types.is_timestamp(type_):
        return _PLAIN if type_.tz is None else _AWARE
    if pa.types.is_list(type_):
        return list[_python(type_.value_type) | None]  # type: ignore[misc]
    if pa.types.is_map(type_):
        if not pa.types.is_string(type_.key_type):
            raise InvalidUsage(f"maps of JSON have keys of type string, not {type_.key_type}")
        return dict[str, _python(type_.item_type) | None]  # type: ignore[misc]
    if pa.types.is_struct(type_):
        columns = [(field.name, field.type, True) for field in type_]
        return _record(columns, skips=False)
    if pa.types.is_null(type_):
        return Literal[None]
    raise InvalidUsage(f"no JSON is read as {type_}")


def _record(columns: Sequence[tuple[str, pa.DataType, bool]], *, skips: bool) -> Any:
    """A Struct for an object of these fields (name, type, whether it may be NULL)."""
    fields: list[Any] = []
    for place, (_, type_, nullable) in enumerate(columns):
        kind = _python(type_)
        fields.append((f"c{place}", kind | None, None) if nullable else (f"c{place}", kind))
    return msgspec.defstruct(
        "Row",
        fields,
        rename={f"c{place}": name for place, (name, _, _) in enumerate(columns)},
        forbid_unknown_fields=not skips,
        kw_only=True,
        gc=False,
    )


class RowsOfTable:
    """Rows of one table, as they gather; `updates` gives them as a table of Arrow.

    `keep`: the columns that are wanted, some of those in `declared`."""

    def __init__(self, declared: Schema, keep: Schema, *, skips: bool) -> None:
        """`skips`: what a row has besides the columns is left out; else it is a `Misfit`."""
        columns = [(each.name, _arrow(each), each.nullable) for each in declared.columns]
        self._decoder = msgspec.json.Decoder(_record(columns, skips=skips))
        places = {name: place for place, name in enumerate(declared.names)}
        self._keep = [places[name] for name in keep.names]
        self._names = keep.names
        self._arrow = keep.arrow()
        self._nested = any(pa.types.is_nested(field.type) for field in self._arrow)
        kinds = [type_ for _, type_, _ in columns]
        self._plain = [place for place, kind in enumerate(kinds) if pa.types.is_decimal(kind)]
        self._deep = [
            place
            for place, kind in enumerate(kinds)
            if pa.types.is_nested(kind) and "decimal" in str(kind)
        ]
        self._rows: list[tuple[Any, ...]] = []
        self._diffs: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: bytes | memoryview | msgspec.Raw, diff: int) -> None:
        """One more. Raises `Misfit`."""
        try:
            found = self._decoder.decode(row)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = bytes(row)[: _SHOWN + 1].decode(errors="replace")
            more = "…" if len(shown) > _SHOWN else ""
            raise Misfit(f"{error}, in the row {shown[:_SHOWN]}{more}") from None
        values = msgspec.structs.astuple(found)
        for place in self._plain:
            value = values[place]
            if value is not None and abs(value.adjusted()) > _DIGITS_MAX:
                _check_decimals(value)
        if self._deep or len(row) > _SHORT_BYTES:
            for place in (*self._plain, *self._deep):
                _check_decimals(values[place])
        self._rows.append(values)
        self._diffs.append(diff)

    def clear(self) -> None:
        """Forgets the rows."""
        self._rows, self._diffs = [], []

    def updates(self) -> pa.Table:
        """The rows' wanted columns and `DIFF`; they go on gathering until `clear`. Raises
        `Misfit`."""
        columns = list(zip(*self._rows, strict=True))
        arrays = []
        for place, field in zip(self._keep, self._arrow, strict=True):
            values = [_plain(each) for each in columns[place]] if self._nested else columns[place]
            try:
                arrays.append(pa.array(values, field.type))
            except (pa.ArrowException, ValueError, OverflowError):
                raise self._misfit(field, values) from None
        diffs = pa.array(self._diffs, pa.int64())
        return pa.table([*arrays, diffs], names=[*self._names, DIFF])

    def _misfit(self, field: pa.Field, values: Sequence[Any]) -> Misfit:
        """The first value that its column cannot hold."""
        for value in values:
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, ValueError, OverflowError) as error:
                shown = ascii(str(value))[:_SHOWN]
                return Misfit(f"column {field.name} ({field.type}) cannot hold {shown}: {error}")
        return Misfit(f"column {field.name} ({field.type}) cannot hold all values that came")


def _arrow(column: Column) -> pa.DataType:
    return Schema((column,)).arrow().field(0).type


def _check_decimals(value: Any) -> None:
    """Raises `Misfit` for digits that nothing can hold, however deep."""
    if isinstance(value, decimal.Decimal):
        text = str(value)
        if abs(value.adjusted()) > _DIGITS_MAX or len(text) > 2 * _DIGITS_MAX:
            raise Misfit(f"no decimal column can hold {text[:_SHOWN]}")
    elif isinstance(value, msgspec.Struct):
        _check_decimals(msgspec.structs.astuple(value))
    elif isinstance(value, dict):
        _check_decimals(value.values())
    elif value is not None and not isinstance(value, str | bytes | int | float | datetime.date):
        for each in value:
            _check_decimals(each)


def _plain(value: Any) -> Any:
    """Structs as dicts, however deep."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        named = zip(kind.__struct_encode_fields__, msgspec.structs.astuple(value), strict=True)
        return {name: _plain(each) for name, each in named}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value
