"""Converts JSON rows to Arrow columns, exactly or not at all.

Used for the records of a log and for rows inserted from a shell. Reads what `sinks.formats` writes.
Pure.

Rules:
- A row is an object with exactly the columns' names. Nullable columns may be missing.
- Integers are JSON integers (not text, no fraction). ``float`` and ``double`` are numbers, "NaN",
  "Infinity" or "-Infinity".
- Dates and timestamps are ISO 8601. ``timestamp`` has an offset (or, where that is allowed, no
  offset and UTC); ``timestamp_ntz`` has none.
- ``binary`` is base64. Decimals are numbers or, for more digits than a writer's floats have, text.
- Arrays are arrays. Structs and maps are objects, where a map's keys are the text of values of its
  key type.
- A value that its column cannot hold is a `RowMisfit`. Nothing is rounded, truncated or guessed,
  except for digits beyond the precision of a float or of a timestamp's microseconds.
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
"""Largest 32-bit float."""
_SHOWN: Final = 200
"""Length to which rows are truncated in errors."""
_DIGITS_MAX: Final = 100
"""Maximum number of digits before or after a decimal's point, more than any column allows."""
_SHORT_BYTES: Final = 4096
"""A row up to this length cannot contain too many digits."""

OBJECTS_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum memory for the objects of one row."""
_OBJECT_BYTES: Final = 64
_VALUE_BYTES: Final = 40

_AWARE: Final = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
_PLAIN: Final = Annotated[datetime.datetime, msgspec.Meta(tz=False)]
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')
"""Characters that are escaped in JSON."""
_Change: TypeAlias = Callable[[Any], Any]
_NOT_FINITE: Final = Literal["NaN", "Infinity", "-Infinity"]


class RowMisfit(Exception):
    """A row does not fit its table. The text names the column and the reason; `row` is its index in
    the buffer, if known."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def check_type(type_: pa.DataType) -> None:
    """Raise `InvalidUsage` for a type that JSON cannot represent."""
    _python(type_)


def check_key_type(kind: pa.DataType) -> None:
    """Raise `InvalidUsage` for a map's key type that has no text form in JSON."""
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise InvalidUsage(f"JSON cannot represent maps with keys of type {kind}")


def _python(type_: pa.DataType, naive: bool = False) -> Any:
    """Return the type to which msgspec decodes a value that is not NULL."""
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
    raise InvalidUsage(f"JSON cannot represent values of type {type_}")


def _record(columns: Sequence[tuple[str, pa.DataType, bool]], *, skips: bool, naive: bool) -> Any:
    """Return a Struct type for an object with these fields (name, type, nullable).

    Raises `InvalidUsage` for a name that cannot be matched.
    """
    fields: list[Any] = []
    for name, _, _ in columns:
        # msgspec compares names byte by byte with the JSON text, where these characters are
        # escaped.
        if _ESCAPED.search(name):
            raise InvalidUsage(f"JSON rows cannot be read into a column named {name!r}")
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
    """Buffers rows of one table; `updates` returns them as Arrow."""

    def __init__(
        self, declared: TableSchema, keep: TableSchema, *, skips: bool, naive: bool = False
    ) -> None:
        """Make an empty buffer for the columns `keep`, which are some of those in `declared`.

        With `skips`, unknown fields of a row are ignored; otherwise they are a `RowMisfit`. With
        `naive`, a timestamp without an offset is UTC; otherwise it is a `RowMisfit`.
        """
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
        # The decoded rows since `clear`, and the diff of each.
        self._rows: list[tuple[Any, ...]] = []
        self._diffs: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: bytes | memoryview | msgspec.Raw, diff: int) -> None:
        """Decode a row and add it. Raises `RowMisfit`."""
        if self._nested and len(row) > _SHORT_BYTES:
            self._check_objects(bytes(row))
        try:
            found = self._decoder.decode(row)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = bytes(row)[: _SHOWN + 1].decode(errors="replace")
            more = "…" if len(shown) > _SHOWN else ""
            raise RowMisfit(f"{error}, in the row {shown[:_SHOWN]}{more}") from None
        values = msgspec.structs.astuple(found)
        # Arrow must not see such decimals: an exponent of hundreds of millions, or as many digits,
        # crashes the process.
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
        """Raise `RowMisfit` for a short row whose many objects may take much more memory."""
        # An empty object or list takes two bytes of JSON, but is decoded with all its fields.
        opened = row.count(b"{") * self._object_bytes + row.count(b"[") * _OBJECT_BYTES
        size = opened + row.count(b",") * _VALUE_BYTES
        if size > OBJECTS_BYTES_MAX:
            raise RowMisfit(
                f"row too large: {len(row)} bytes may decode to {size} (limit {OBJECTS_BYTES_MAX})"
            )

    def clear(self) -> None:
        """Remove all rows from the buffer."""
        self._rows, self._diffs = [], []

    def updates(self) -> pa.Table:
        """Return the kept columns of all rows, and `DIFF`. The rows stay in the buffer until
        `clear`. Raises `RowMisfit`."""
        columns = list(zip(*self._rows, strict=True))
        arrays: list[Any] = []
        for place, column, change in zip(self._keep, self._columns, self._changes, strict=True):
            try:
                arrays.append(_array(columns[place], column.type, change))
            except (pa.ArrowException, ValueError, OverflowError):
                # Arrow's error does not name the row, so find it by converting the values one by
                # one.
                raise _misfit(column, columns[place], change) from None
        diffs = pa.array(self._diffs, pa.int64())
        return pa.table([*arrays, diffs], names=[*self._names, DIFF])


def _fields_max(kind: pa.DataType) -> int:
    """Return the maximum number of fields of any struct within a type."""
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
    return RowMisfit(f"column {column.name} ({column.type}) cannot hold all values of these rows")


def _check_decimals(value: Any) -> None:
    """Raise `RowMisfit` for decimals with more digits than any column allows, at any depth."""
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
    """Return the function that converts msgspec's values of this type to Arrow's; None if none is
    needed.

    The function raises `ValueError` for a map's key that is not a value of its key type.
    """
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
