"""Converts rows of JSON to columns of Arrow, exactly, or not at all: records of a log, and rows
that are inserted from a shell. Reads what `sinks.formats` writes. Pure.

Rules:
- a row is an object with the columns' exact names. A nullable column may be missing;
- integers are integers (no text, no fraction); ``float`` and ``double`` are numbers, "NaN",
  "Infinity" or "-Infinity"; dates and timestamps are ISO 8601, ``timestamp`` with an offset (or,
  where that is allowed, without: UTC), ``timestamp_ntz`` without; ``binary`` is base64; decimals
  are numbers or, for more digits than a writer's floats have, text; arrays are arrays; structs and
  maps are objects, a map's keys being texts of the key type's values;
- a value that its column cannot hold is a `RowMisfit`: nothing is rounded, cut or guessed, but for
  digits that a column of floats, or a timestamp's microseconds, cannot hold.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from actors.model.plan.schema import DIFF, TableColumn, TableSchema, arrow_type
from actors.model.plan.text_limits import fit_texts
from actors.runtime.errors import InvalidUsage

FLOAT_MAX: Final = 3.4028234663852886e38
"""Greatest float of 32 bits."""
_SHOWN: Final = 200
"""Length to which rows are cut in errors."""
_DIGITS_MAX: Final = 100
"""Most digits of a decimal before or after the point: more than any column has."""
_SHORT_BYTES: Final = 4096
"""A row of at most this length has few digits."""

OBJECTS_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most memory that the objects of one row may take."""
_OBJECT_BYTES: Final = 64
_VALUE_BYTES: Final = 40

_AWARE: Final = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
_PLAIN: Final = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')
"""Characters that JSON writes as escapes."""
_Change: TypeAlias = Callable[[Any], Any]
_NOT_FINITE: Final = Literal["NaN", "Infinity", "-Infinity"]


class RowMisfit(Exception):
    """A row does not fit the table; the text names the column and the reason. `row`: its number
    among the gathered rows, if known."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def check_type(type_: pa.DataType) -> None:
    """Raise `InvalidUsage` for a type that JSON cannot hold."""
    _python(type_)


def check_key_type(kind: pa.DataType) -> None:
    """Raise `InvalidUsage` for map keys that have no text in JSON."""
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise InvalidUsage(f"maps of JSON have no keys of type {kind}")


def _python(type_: pa.DataType, naive: bool = False) -> Any:
    """Return the type that msgspec decodes a value to that is not NULL."""
    if pa.types.is_boolean(type_):
        return bool
    if pa.types.is_integer(type_):
        bits = type_.bit_width - 1
        return Annotated[int, msgspec.Meta(ge=-(2**bits), le=2**bits - 1)]
    if pa.types.is_floating(type_):
        if type_.bit_width == 64:
            return float | _NOT_FINITE
        return Annotated[float, msgspec.Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)] | _NOT_FINITE
    if pa.types.is_decimal(type_):
        return decimal.Decimal
    if pa.types.is_string(type_):
        return str
    if pa.types.is_binary(type_):
        return bytes
    if pa.types.is_date(type_):
        return datetime.date
    if pa.types.is_timestamp(type_):
        return _PLAIN if type_.tz is None else (datetime.datetime if naive else _AWARE)
    if pa.types.is_list(type_):
        return list[_python(type_.value_type, naive) | None]  # type: ignore[misc]
    if pa.types.is_map(type_):
        check_key_type(type_.key_type)
        return dict[str, _python(type_.item_type, naive) | None]  # type: ignore[misc]
    if pa.types.is_struct(type_):
        columns = [(field.name, field.type, True) for field in type_]
        return _record(columns, skips=False, naive=naive)
    if pa.types.is_null(type_):
        return Literal[None]
    raise InvalidUsage(f"no JSON is read as {type_}")


def _record(columns: Sequence[tuple[str, pa.DataType, bool]], *, skips: bool, naive: bool) -> Any:
    """Return a Struct for an object with these fields (name, type, nullable). Raises `InvalidUsage`
    for a name that cannot be matched."""
    fields: list[Any] = []
    for name, _, _ in columns:
        # msgspec compares names byte by byte with the text of the JSON, in which these are escaped.
        if _ESCAPED.search(name):
            raise InvalidUsage(f"rows of JSON are not read into a column named {name!r}")
    for place, (_, type_, nullable) in enumerate(columns):
        kind = _python(type_, naive)
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
    """Gathers rows of one table; `updates` returns them as Arrow."""

    def __init__(
        self, declared: TableSchema, keep: TableSchema, *, skips: bool, naive: bool = False
    ) -> None:
        """Make an empty buffer for the columns `keep`, some of those in `declared`. `skips`: other
        fields of a row are ignored; else they are a `RowMisfit`. `naive`: a timestamp without an
        offset is UTC; else it is a `RowMisfit`."""
        columns = [(each.name, arrow_type(each.type), each.nullable) for each in declared.columns]
        self._decoder = msgspec.json.Decoder(_record(columns, skips=skips, naive=naive))
        places = {name: place for place, name in enumerate(declared.names)}
        self._keep = [places[name] for name in keep.names]
        self._names = keep.names
        self._columns = keep.columns
        self._changes = [_reader(arrow_type(column.type)) for column in keep.columns]
        kinds = [type_ for _, type_, _ in columns]
        self._object_bytes = _OBJECT_BYTES + 8 * max(map(_fields_max, kinds), default=0)
        self._nested = any(map(pa.types.is_nested, kinds))
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
        """Decode and add a row. Raises `RowMisfit`."""
        if self._nested and len(row) > _SHORT_BYTES:
            self._check_objects(bytes(row))
        try:
            found = self._decoder.decode(row)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = bytes(row)[: _SHOWN + 1].decode(errors="replace")
            more = "…" if len(shown) > _SHOWN else ""
            raise RowMisfit(f"{error}, in the row {shown[:_SHOWN]}{more}") from None
        values = msgspec.structs.astuple(found)
        # Arrow must not see such decimals: exponents of some hundred millions, and as many digits,
        # end the process.
        for place in self._plain:
            value = values[place]
            if value is not None and abs(value.adjusted()) > _DIGITS_MAX:
                _check_decimals(value)
        if self._deep or len(row) > _SHORT_BYTES:
            for place in (*self._plain, *self._deep):
                _check_decimals(values[place])
        self._rows.append(values)
        self._diffs.append(diff)

    def _check_objects(self, row: bytes) -> None:
        """Raise `RowMisfit` for a row of a few bytes an object, which may become much larger."""
        # An empty object or list of two bytes is decoded to one with all its fields.
        opened = row.count(b"{") * self._object_bytes + row.count(b"[") * _OBJECT_BYTES
        size = opened + row.count(b",") * _VALUE_BYTES
        if size > OBJECTS_BYTES_MAX:
            raise RowMisfit(
                f"a row of {len(row)} bytes may decode to {size}: at most {OBJECTS_BYTES_MAX}"
            )

    def clear(self) -> None:
        """Drop the rows."""
        self._rows, self._diffs = [], []

    def updates(self) -> pa.Table:
        """Return the wanted columns of all rows, and `DIFF`; the rows stay until `clear`. Raises
        `RowMisfit`."""
        columns = list(zip(*self._rows, strict=True))
        arrays: list[Any] = []
        for place, column, change in zip(self._keep, self._columns, self._changes, strict=True):
            try:
                arrays.append(_array(columns[place], column.type, change))
            except (pa.ArrowException, ValueError, OverflowError):
                # Arrow's error names no row: find it by converting values one by one.
                raise _misfit(column, columns[place], change) from None
        diffs = pa.array(self._diffs, pa.int64())
        return pa.table([*arrays, diffs], names=[*self._names, DIFF])


def _fields_max(kind: pa.DataType) -> int:
    """Return the most fields that a struct within a type has."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    own = kind.num_fields if pa.types.is_struct(kind) else 0
    return max(own, *map(_fields_max, inner)) if inner else own


def _array(values: Sequence[Any], kind: str, change: _Change | None) -> pa.ChunkedArray:
    if change is not None:
        values = [_changed(each, change) for each in values]
    return fit_texts(pa.chunked_array([pa.array(values, arrow_type(kind))]), kind)


def _misfit(column: TableColumn, values: Sequence[Any], change: _Change | None) -> RowMisfit:
    """Return the error for the first value that its column cannot hold."""
    for row, value in enumerate(values):
        try:
            _array([value], column.type, change)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            shown = ascii(str(value))[:_SHOWN]
            text = f"column {column.name} ({column.type}) cannot hold {shown}: {error}"
            return RowMisfit(text, row)
    return RowMisfit(f"column {column.name} ({column.type}) cannot hold all values that came")


def _check_decimals(value: Any) -> None:
    """Raise `RowMisfit` for decimals with more digits than any column has, at any depth."""
    if isinstance(value, decimal.Decimal):
        text = str(value)
        if abs(value.adjusted()) > _DIGITS_MAX or len(text) > 2 * _DIGITS_MAX:
            raise RowMisfit(f"no decimal column can hold {text[:_SHOWN]}")
    elif isinstance(value, msgspec.Struct):
        _check_decimals(msgspec.structs.astuple(value))
    elif isinstance(value, dict):
        _check_decimals(value.values())
    elif value is not None and not isinstance(value, str | bytes | int | float | datetime.date):
        for each in value:
            _check_decimals(each)


def _reader(kind: pa.DataType) -> _Change | None:
    """Return the function that converts msgspec's value of that type to Arrow's; None if none is
    needed. Raises `ValueError` for a text that is no value of a map's key type."""
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_map(kind):
        key, item = _python(kind.key_type, naive=True), _reader(kind.item_type)
        if key is str and item is None:
            return None
        return lambda found: [
            (_changed(msgspec.convert(name, key, strict=False), _reader(kind.key_type)),
             _changed(value, item))
            for name, value in found.items()
        ]  # fmt: skip
    if pa.types.is_list(kind):
        element = _reader(kind.value_type)
        return element and (lambda values: [_changed(value, element) for value in values])
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        fields = [_reader(field.type) for field in kind]
        return lambda found: {
            name: _changed(value, change)
            for name, value, change in zip(
                names, msgspec.structs.astuple(found), fields, strict=True
            )
        }
    return None


def _changed(value: Any, change: _Change | None) -> Any:
    return value if value is None or change is None else change(value)
