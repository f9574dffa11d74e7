"""Parses a single value in PostgreSQL's text or binary format into a Python value.

Values are ``bool``, ``int``, ``float``, ``Decimal``, ``str``, ``bytes``, ``date``, ``datetime``
(with zone UTC for ``timestamptz``), and lists of these and of None. A value that its type or
Spark's type cannot represent raises `InvalidClientData` and is never rounded or truncated: dates
before year 1, after 9999 or infinite, NaN in a ``numeric``, arrays of several dimensions.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import struct
import uuid
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias

from actors.model.pgwire.decimal_digits import parse_binary_decimal
from actors.model.pgwire.sqlstate import (
    INVALID_BINARY,
    INVALID_PARAMETER,
    INVALID_TEXT,
    INVALID_TIME,
    LIMIT_EXCEEDED,
    NOT_IN_ENCODING,
    NOT_SUPPORTED,
    NUMBER_OUT_OF_RANGE,
    TIME_OUT_OF_RANGE,
    InvalidClientData,
)
from actors.model.pgwire.time_text import local_to_utc_second
from actors.model.pgwire.type_map import ELEMENT_OF
from actors.model.pgwire.type_oids import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    DAYS_TO_2000,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    JSON,
    JSONB,
    NAME,
    NUMERIC,
    OID,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    US_TO_2000,
    UUID,
    VARCHAR,
)
from actors.runtime.errors import InvalidUsage

ParameterValue: TypeAlias = (
    bool
    | int
    | float
    | Decimal
    | str
    | bytes
    | dt.date
    | dt.datetime
    | list["ParameterValue | None"]
)

ARRAY_ELEMENTS_MAX: Final = 1_000_000
"""Maximum number of elements of an array, and of all arrays among the parameters of a statement.
Python values take many times as many bytes as the text that declares them."""
UNTYPED: Final = 0
"""OID of a parameter whose type the client left open."""
TEXTS: Final = frozenset({UNTYPED, TEXT, NAME, JSON, UNKNOWN, BPCHAR, VARCHAR})
"""Types whose binary form is their text."""
SHOWN_MAX: Final = 64
"""Number of characters of a value that an error shows."""
_EPOCH_DATE: Final = dt.date(1970, 1, 1)
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_INT_LIMITS: Final = {
    INT2: (-(2**15), 2**15 - 1, "smallint"),
    INT4: (-(2**31), 2**31 - 1, "integer"),
    INT8: (-(2**63), 2**63 - 1, "bigint"),
    OID: (0, 2**32 - 1, "oid"),
}
_LAYOUTS: Final = {
    BOOL: struct.Struct("!?"),
    INT2: struct.Struct("!h"),
    INT4: struct.Struct("!i"),
    INT8: struct.Struct("!q"),
    OID: struct.Struct("!I"),
    FLOAT4: struct.Struct("!f"),
    FLOAT8: struct.Struct("!d"),
    DATE: struct.Struct("!i"),
    TIMESTAMP: struct.Struct("!q"),
    TIMESTAMPTZ: struct.Struct("!q"),
}
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_FLOAT: Final = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?|inf(?:inity)?)|nan",
    re.IGNORECASE,
)
_FLOAT_TEXT_MAX: Final = 2_000
_DECIMAL_TEXT_MAX: Final = 131_072 + 16_383 + 2
"""Number of characters of PostgreSQL's longest ``numeric``."""
_TIME: Final = re.compile(
    r"(?P<year>[0-9]{4,7})-(?P<month>[0-9]{1,2})-(?P<day>[0-9]{1,2})"
    r"(?:[T ]\s*(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})"
    r"(?::(?P<second>[0-9]{2})(?:\.(?P<fraction>[0-9]{0,12}))?)?)?"
    r"\s*(?P<zone>[zZ]|[+-][0-9]{1,2}(?::?[0-9]{2}(?::?[0-9]{2})?)?"
    r"|(?!(?:BC|AD)\b)[A-Za-z_]+(?:/[A-Za-z_+-]+)*)?"
    r"\s*(?P<era>\s(?:BC|AD))?"
)
_OFFSET: Final = re.compile(r"([+-])([0-9]{1,2}):?([0-9]{2})?:?([0-9]{2})?")
_ABBREVIATIONS: Final = {"CET": 3600, "EET": 7200, "MET": 3600, "WET": 0}
"""Seconds east of UTC. In a text, PostgreSQL uses these as standard time all year."""
_BOUNDS: Final = re.compile(r"(?:\[-?[0-9]{1,10}:-?[0-9]{1,10}\])+=")
_BLANK: Final = r"[ \t\n\v\f\r]*+"
_OPENING: Final = re.compile(rf"{_BLANK}\{{{_BLANK}(\}})?")
_ELEMENT: Final = re.compile(
    rf"""{_BLANK}
    (?: "([^"\\]*+ (?:\\. [^"\\]*+)*+)" {_BLANK}
      | ([^"{{}},\\]*+ (?:\\. [^"{{}},\\]*+)*+)
    ) ([,}}])""",
    re.DOTALL | re.VERBOSE,
)
"""Matches one element of an array, quoted or not, and the comma or brace after it."""
_BEHIND: Final = re.compile(rf"{_BLANK}([,}}])")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_DIMENSIONS_MAX: Final = 6
"""Maximum number of dimensions of an array, as in PostgreSQL."""
_OCTAL: Final = re.compile(rb"\\(?:\\|[0-3][0-7]{2})|[^\\]")
_HEX: Final = re.compile(r"(?:[ \n\t\r]|[0-9a-fA-F]{2})*")
_UUID: Final = re.compile(r"(\{)?[0-9a-fA-F]{4}(?:-?[0-9a-fA-F]{4}){7}(?(1)\})")
BLANKS: Final = " \t\n\v\f\r"
"""Characters that PostgreSQL ignores around a value. Python strips more: U+00A0 and U+001C to
U+001F belong to a text."""


def invalid(kind: str, text: str, sqlstate: str = INVALID_TEXT) -> InvalidClientData:
    """Return the error for a text that is not a value of a type."""
    shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    return InvalidClientData(f'invalid input syntax for type {kind}: "{shown}"', sqlstate)


def _out_of_range(kind: str, text: str, sqlstate: str = NUMBER_OUT_OF_RANGE) -> InvalidClientData:
    return InvalidClientData(
        f'value "{text[:SHOWN_MAX]}" is out of range for type {kind}', sqlstate
    )


# -- text ------------------------------------------------------------------------------------------


def parse_text_value(text: str, oid: int, zone: str = "UTC") -> ParameterValue:
    """Parse a value in text format. `zone` applies to times without a zone. A value of an unknown
    type stays text. Raises `InvalidClientData`.

    >>> parse_text_value("{1,NULL}", 1007)
    [1, None]
    """
    if oid in ELEMENT_OF:
        element = ELEMENT_OF[oid]
        return [
            None if word is None else parse_text_value(word, element, zone)
            for word in parse_array(text)
        ]
    # Only these types depend on the session.
    if oid in (TIMESTAMP, TIMESTAMPTZ):
        return _parse_timestamp(text, oid, zone)
    parser = _TEXT_PARSERS.get(oid)
    return text if parser is None else parser(text)


def _parse_integer(oid: int) -> Callable[[str], int]:
    low, high, name = _INT_LIMITS[oid]

    def parse(text: str) -> int:
        stripped = text.strip(BLANKS)
        # `int` alone would accept underscores and digits of other scripts.
        if _INTEGER.fullmatch(stripped) is None:
            raise invalid(name, text)
        number = int(stripped)
        if not low <= number <= high:
            raise _out_of_range(name, text)
        return number

    return parse


def _parse_float(oid: int) -> Callable[[str], float]:
    name = "real" if oid == FLOAT4 else "double precision"

    def parse(text: str) -> float:
        stripped = text.strip(BLANKS)
        if len(stripped) > _FLOAT_TEXT_MAX or _FLOAT.fullmatch(stripped) is None:
            raise invalid(name, text)
        number = float(stripped)
        if oid == FLOAT4:
            try:
                number = float(struct.unpack("f", struct.pack("f", number))[0])
            except OverflowError:
                raise _out_of_range(name, text) from None
        # Only the word means infinity: 1e400 is out of range.
        if math.isinf(number) and "inf" not in stripped.lower():
            raise _out_of_range(name, text)
        return number

    return parse


def _parse_decimal(text: str) -> Decimal:
    stripped = text.strip(BLANKS)
    if len(stripped) > _DECIMAL_TEXT_MAX or _FLOAT.fullmatch(stripped) is None:
        raise invalid("numeric", text)
    try:
        number = Decimal(stripped)
    except InvalidOperation:
        raise invalid("numeric", text) from None
    return _finite(number)


def _finite(number: Decimal) -> Decimal:
    if not number.is_finite():
        raise InvalidClientData(f"numeric value {number} is not supported", NUMBER_OUT_OF_RANGE)
    return number


TRUE_WORDS: Final = frozenset({"t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"})
FALSE_WORDS: Final = frozenset({"f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0"})


def parse_boolean(text: str) -> bool:
    """Parse a Boolean, which clients may abbreviate. Raises `InvalidClientData`."""
    word = text.strip(BLANKS).lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise invalid("boolean", text)


def parse_bytea(text: str) -> bytes:
    r"""Parse bytes in hex or escape format. Raises `InvalidClientData`.

    >>> parse_bytea(r"\x6869"), parse_bytea(r"h\151\\")
    (b'hi', b'hi\\')
    """
    if text.startswith("\\x"):
        if _HEX.fullmatch(text, 2) is None:
            raise invalid("bytea", text, INVALID_PARAMETER)
        return bytes.fromhex(text[2:])
    raw = text.encode()
    parts = _OCTAL.findall(raw)
    if sum(map(len, parts)) != len(raw):
        raise invalid("bytea", text)
    return b"".join(_unescaped(part) for part in parts)


def _unescaped(part: bytes) -> bytes:
    if len(part) == 1:
        return part
    return b"\\" if part == b"\\\\" else bytes([int(part[1:], 8)])


def _parse_uuid(text: str) -> str:
    # `uuid.UUID` alone would accept other forms: hyphens anywhere, or `urn:uuid:`.
    if _UUID.fullmatch(text) is None:
        raise invalid("uuid", text)
    return str(uuid.UUID(text))


def _parse_json(text: str) -> str:
    """Return a text unchanged if it is valid JSON."""

    def refuse(_: str) -> None:
        raise ValueError

    try:
        # Keep numbers as texts, because Python limits their digits and accepts NaN.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise invalid("json", text) from None
    return text


class _Moment:
    """The parts of the text of a date or time."""

    def __init__(self, text: str, kind: str) -> None:
        stripped = text.strip(BLANKS)
        found = _TIME.fullmatch(stripped)
        if found is None:
            if stripped.lower().lstrip("+-") in ("infinity", "epoch"):
                raise _out_of_range(kind, text, TIME_OUT_OF_RANGE)
            raise invalid(kind, text, INVALID_TIME)
        self._found = found
        self._out = _out_of_range(kind, text, TIME_OUT_OF_RANGE)
        self.zone: str | None = found["zone"]
        if found["era"] is not None and found["era"].strip() == "BC":
            raise self._out

    def date(self) -> dt.date:
        """Return the date."""
        year, month, day = (int(self._found[name]) for name in ("year", "month", "day"))
        try:
            return dt.date(year, month, day)
        except ValueError:
            raise self._out from None

    def since_midnight(self) -> dt.timedelta:
        """Return the time of day; 24:00 is the start of the next day."""
        # Second 60 is the first second of the next minute, as in PostgreSQL.
        hour, minute, second = (int(self._found[n] or 0) for n in ("hour", "minute", "second"))
        # PostgreSQL rounds to microseconds.
        micros = round(float(f"0.{self._found['fraction'] or 0}") * 1_000_000)
        if hour > 24 or minute > 59 or second > 60 or (hour == 24 and (minute or second or micros)):
            raise self._out
        return dt.timedelta(hours=hour, minutes=minute, seconds=second, microseconds=micros)

    def moment(self) -> dt.datetime:
        """Return date and time without the zone."""
        try:
            start = dt.datetime.combine(self.date(), dt.time())
            return start + self.since_midnight()
        except OverflowError:
            raise self._out from None

    def in_utc(self, zone: str) -> dt.datetime:
        """Return date and time in UTC; `zone` applies to a text without a zone."""
        # Treat the local time as if it were UTC, only to carry a number of seconds.
        local = self.moment().replace(tzinfo=dt.UTC)
        seconds, micros = divmod((local - _EPOCH) // dt.timedelta(microseconds=1), 1_000_000)
        seconds = self._utc_second(seconds, zone)
        try:
            return _EPOCH + dt.timedelta(seconds=seconds, microseconds=micros)
        except OverflowError:
            raise self._out from None

    def local(self) -> dt.datetime:
        """Return date and time. A valid zone after them is ignored."""
        self._utc_second(0, "UTC")
        return self.moment()

    def day(self) -> dt.date:
        """Return the date. A valid time and zone after it are ignored."""
        self.since_midnight()
        self._utc_second(0, "UTC")
        return self.date()

    def _utc_second(self, local: int, zone: str) -> int:
        offset = None if self.zone is None else _offset_seconds(self.zone)
        if offset is not None:
            return local - offset
        try:
            return local_to_utc_second(local, self.zone or zone)
        except InvalidUsage as error:
            raise InvalidClientData(str(error), "22023") from None


def local_moment(text: str) -> dt.datetime | None:
    """Return the date and time of a text without a zone; None for any other text."""
    try:
        found = _Moment(text, "timestamp")
        return found.moment() if found.zone is None else None
    except InvalidClientData:
        return None


def _offset_seconds(zone: str) -> int | None:
    """Return the offset in seconds east of UTC that a zone's text gives; None for a name."""
    if zone in ("z", "Z"):
        return 0
    found = _OFFSET.fullmatch(zone)
    # The offset of any other name depends on the time.
    if found is None:
        return _ABBREVIATIONS.get(zone.upper())
    hours, minutes, seconds = (int(part or 0) for part in found.groups()[1:])
    size = hours * 3600 + minutes * 60 + seconds
    return -size if found[1] == "-" else size


def _parse_date(text: str) -> dt.date:
    # Some clients send a date with a time or zone, which PostgreSQL ignores.
    return _Moment(text, "date").day()


def _parse_timestamp(text: str, oid: int, zone: str) -> dt.datetime:
    if oid == TIMESTAMPTZ:
        return _Moment(text, "timestamp with time zone").in_utc(zone)
    # PostgreSQL ignores a zone in a text of this type.
    return _Moment(text, "timestamp").local()


_TEXT_PARSERS: Final[dict[int, Callable[[str], ParameterValue]]] = {
    BOOL: parse_boolean,
    **{oid: _parse_integer(oid) for oid in _INT_LIMITS},
    FLOAT4: _parse_float(FLOAT4),
    FLOAT8: _parse_float(FLOAT8),
    NUMERIC: _parse_decimal,
    BYTEA: parse_bytea,
    UUID: _parse_uuid,
    JSON: _parse_json,
    JSONB: _parse_json,
    DATE: _parse_date,
}


def check_elements(count: int, elements_max: int | None = None) -> None:
    """Raise `InvalidClientData` if arrays have too many elements: more than `elements_max` (None:
    `ARRAY_ELEMENTS_MAX`)."""
    elements_max = ARRAY_ELEMENTS_MAX if elements_max is None else elements_max
    if count > elements_max:
        raise InvalidClientData(f"arrays have at most {elements_max} elements", LIMIT_EXCEEDED)


def parse_array(text: str, elements_max: int | None = None) -> list[str | None]:
    r"""Parse the elements of an array of one dimension. Raises `InvalidClientData`.

    >>> parse_array(r'{1, NULL,"a,\"b"}')
    ['1', None, 'a,"b']
    """
    elements = parse_nested_array(text, elements_max)
    if any(isinstance(each, list) for each in elements):
        raise InvalidClientData("only one-dimensional arrays are supported", NOT_SUPPORTED)
    return elements


def parse_nested_array(text: str, elements_max: int | None = None) -> list[Any]:
    """Parse the elements of an array: texts, None, and lists of these for further dimensions.
    Raises `InvalidClientData`.

    >>> parse_nested_array("[0:1]={{1,2},{3,NULL}}")
    [['1', '2'], ['3', None]]
    """
    body = text.strip(BLANKS)
    if body.startswith("[") and (bounds := _BOUNDS.match(body)) is not None:
        body = body[bounds.end() :]
    most = ARRAY_ELEMENTS_MAX if elements_max is None else elements_max
    levels: list[list[Any]] = []
    at, count = 0, 0
    while True:
        found = _ELEMENT.match(body, at) if levels else None
        if found is not None:
            quoted, bare, end = found.groups()
            levels[-1].append(_unquoted(quoted) if bare is None else _bare(bare, text))
            count += 1
            # Check within the loop, so that a short text does not become many objects before it is
            # refused.
            if count > most:
                check_elements(count, most)
        else:
            found = _OPENING.match(body, at)
            if found is None or len(levels) == _DIMENSIONS_MAX:
                raise invalid("array", text)
            levels.append([])
            end = found[1]
        at = found.end()
        # An array ends with its brace and is then an element of the enclosing one.
        while end == "}":
            array = levels.pop()
            if not levels:
                if at != len(body):
                    raise invalid("array", text)
                return array
            levels[-1].append(array)
            found = _BEHIND.match(body, at)
            if found is None:
                raise invalid("array", text)
            end, at = found[1], found.end()


def _unquoted(word: str) -> str:
    return _ESCAPED.sub(r"\1", word) if "\\" in word else word


def _bare(word: str, text: str) -> str | None:
    """Return an element without its quotes; `text` is the whole array, for errors."""
    found = word.rstrip(BLANKS)
    if not found:
        raise invalid("array", text)
    if "\\" not in found:
        return None if found.upper() == "NULL" else found
    # An escaped blank at the end belongs to the value.
    if (len(found) - len(found.rstrip("\\"))) % 2:
        found = word[: len(found) + 1]
    return _unquoted(found)


# -- binary ----------------------------------------------------------------------------------------


def parse_binary_value(data: bytes, oid: int) -> ParameterValue:
    """Parse a value in binary format. Raises `InvalidClientData`."""
    if oid in TEXTS:
        text = decode_text(data)
        return _parse_json(text) if oid == JSON else text
    if (layout := _LAYOUTS.get(oid)) is not None:
        if len(data) != layout.size:
            raise _bad_binary(oid, f"{len(data)} bytes, expected {layout.size}")
        (number,) = layout.unpack(data)
        return _from_number(number, oid)
    if oid == NUMERIC:
        try:
            return _finite(parse_binary_decimal(data))
        except ValueError as error:
            raise _bad_binary(oid, str(error)) from None
    if oid == BYTEA:
        return data
    if oid == UUID:
        if len(data) != 16:
            raise _bad_binary(oid, f"{len(data)} bytes, expected 16")
        return str(uuid.UUID(bytes=data))
    if oid == JSONB:
        if data[:1] != b"\x01":
            raise _bad_binary(oid, "unknown version, expected 1")
        return _parse_json(decode_text(data[1:]))
    if oid in ELEMENT_OF:
        return _parse_binary_array(data, oid)
    raise InvalidClientData(
        f"unknown binary format of type {oid}: send the value as text", NOT_SUPPORTED
    )


def decode_text(data: bytes) -> str:
    """Decode UTF-8. Raises `InvalidClientData`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidClientData(
            f'invalid byte sequence for encoding "UTF8": 0x{data[error.start : error.end].hex()}',
            NOT_IN_ENCODING,
        ) from None


def _bad_binary(oid: int, why: str) -> InvalidClientData:
    return InvalidClientData(f"incorrect binary data format for type {oid}: {why}", INVALID_BINARY)


def _from_number(number: ParameterValue, oid: int) -> ParameterValue:
    if oid not in (DATE, TIMESTAMP, TIMESTAMPTZ):
        return number
    assert isinstance(number, int)
    try:
        if oid == DATE:
            return _EPOCH_DATE + dt.timedelta(days=number + DAYS_TO_2000)
        moment = _EPOCH + dt.timedelta(microseconds=number + US_TO_2000)
    except OverflowError:
        raise InvalidClientData(
            "a date or time is out of range: only years 1 to 9999 are supported", TIME_OUT_OF_RANGE
        ) from None
    return moment if oid == TIMESTAMPTZ else moment.replace(tzinfo=None)


def _parse_binary_array(data: bytes, oid: int) -> list[ParameterValue | None]:
    if len(data) < 12:
        raise _bad_binary(oid, f"{len(data)} bytes")
    dimensions, _, element = struct.unpack_from("!iiI", data)
    # The elements would be parsed as the wrong type.
    if element != ELEMENT_OF[oid]:
        raise _bad_binary(oid, f"elements of type {element}, expected {ELEMENT_OF[oid]}")
    if dimensions == 0:
        return []
    if dimensions != 1:
        raise InvalidClientData("only one-dimensional arrays are supported", NOT_SUPPORTED)
    values: list[ParameterValue | None] = []
    try:
        count, _ = struct.unpack_from("!ii", data, 12)
        at = 20
        # A count from the wire is bounded by the remaining bytes, because each element has at least
        # 4.
        if not 0 <= count <= (len(data) - at) // 4:
            raise _bad_binary(oid, f"{len(data)} bytes cannot contain {count} elements")
        check_elements(count)
        for _ in range(count):
            (length,) = struct.unpack_from("!i", data, at)
            at += 4
            if length == -1:
                values.append(None)
                continue
            if not 0 <= length <= len(data) - at:
                raise _bad_binary(oid, f"invalid length of an element: {length}")
            values.append(parse_binary_value(data[at : at + length], element))
            at += length
    except struct.error:
        raise _bad_binary(oid, "it ends within an element") from None
    if at != len(data):
        raise _bad_binary(oid, f"{len(data) - at} bytes follow the last element")
    return values
