"""Encodes Spark's intervals as PostgreSQL's type ``interval``: months, days, and microseconds.

Day-time intervals are Arrow durations, year-month intervals Arrow's months, days and nanoseconds.
A day-time interval counts microseconds alone, of which PostgreSQL's days are the whole ones: so
does PostgreSQL itself where it subtracts timestamps. All parts of one value have one sign then.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.pgwire.encoded_values import (
    EncodedValues,
    FixedValues,
    Lengths,
    Numbers,
    VariableValues,
    fixed_numbers,
    valid_mask,
)
from actors.model.pgwire.time_text import DAY_US

_PARTS: Final = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanos", "<i8")])
"""A value of Arrow's `month_day_nano_interval` in memory."""
_WIRE: Final = np.dtype([("micros", ">i8"), ("days", ">i4"), ("months", ">i4")])
"""A value in PostgreSQL's binary format."""
_WIRE_BYTES: Final = 16


def is_interval(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are sent as intervals."""
    return bool(pa.types.is_duration(kind) or pa.types.is_interval(kind))


def interval_binary(array: pa.Array) -> EncodedValues:
    """Return intervals in binary format: eight bytes of microseconds, four of days, four of
    months."""
    months, days, micros = _parts(array)
    values = np.empty(len(array), _WIRE)
    values["micros"], values["days"], values["months"] = micros, days, months
    return FixedValues(values.view(f"V{_WIRE_BYTES}"), f"V{_WIRE_BYTES}", valid_mask(array))


def interval_text(array: pa.Array) -> EncodedValues:
    """Return intervals in PostgreSQL's style ``postgres``: ``1 day 04:05:06.7``."""
    parts = (part.tolist() for part in _parts(array))
    texts = [_text(*each).encode() for each in zip(*parts, strict=True)]
    made = pa.array(texts, pa.large_binary())
    return VariableValues(pc.if_else(array.is_valid(), made, None) if array.null_count else made)


def _parts(array: pa.Array) -> tuple[Numbers, Numbers, Lengths]:
    """Return the months, days and microseconds of each value; 0 where it is NULL."""
    if pa.types.is_duration(array.type):
        if array.type.unit != "us":
            array = array.cast(pa.duration("us"), safe=False)
        micros = fixed_numbers(array, "i8")
        # Towards zero, as for PostgreSQL: -1 hour is no day less and 23 hours more.
        rest = np.fmod(micros, DAY_US)
        return np.zeros(len(array), np.int32), (micros - rest) // DAY_US, rest
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64)
    values = np.frombuffer(data, _PARTS, len(array), array.offset * _PARTS.itemsize)
    valid = valid_mask(array)
    if valid is not None:
        values = np.where(valid, values, np.zeros((), _PARTS))
    nanos = values["nanos"]
    return values["months"], values["days"], (nanos - np.fmod(nanos, 1000)) // 1000


def _text(months: int, days: int, micros: int) -> str:
    """Return one interval as text.

    >>> _text(-14, 3, -1_500_000)
    '-1 years -2 mons +3 days -00:00:01.5'
    >>> _text(0, 0, 0), _text(1, 0, 0), _text(-1, 0, 3_600_000_000)
    ('00:00:00', '1 mon', '-1 mons +01:00:00')
    """
    # As EncodeInterval of PostgreSQL: a part after a negative one shows its sign.
    sign = -1 if months < 0 else 1
    years, months = divmod(abs(months), 12)
    words: list[str] = []
    negative = False
    for value, unit in ((sign * years, "year"), (sign * months, "mon"), (days, "day")):
        if not value:
            continue
        plus = "+" if negative and value > 0 else ""
        words.append(f"{plus}{value} {unit}{'' if value == 1 else 's'}")
        negative = value < 0
    if micros or not words:
        seconds, micros_left = divmod(abs(micros), 1_000_000)
        fraction = f".{micros_left:06d}".rstrip("0") if micros_left else ""
        mark = "-" if micros < 0 else "+" if negative else ""
        hours, seconds = divmod(seconds, 3600)
        words.append(f"{mark}{hours:02d}:{seconds // 60:02d}:{seconds % 60:02d}{fraction}")
    return " ".join(words)
