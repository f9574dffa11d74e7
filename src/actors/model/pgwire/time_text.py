"""Formats whole columns of dates and times in PostgreSQL's ISO style, and computes time zones.

Years cover the whole range of Arrow's numbers, with more than four digits after 9999 and `` BC``
before year 1. All calendars are proleptic Gregorian, as in Spark and PostgreSQL.

The offsets of a zone come from `zoneinfo`, one day at a time, and are cached by year. Before
`YEAR_MIN` no zone has any rules; after `YEAR_MAX` the last 400 years repeat, as the calendar does.
"""

from __future__ import annotations

import datetime as dt
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from actors.model.pgwire.encoded_values import EncodedValues, Lengths, Numbers, RowMask, TextBlock
from actors.runtime.errors import InvalidUsage

YEAR_MIN: Final = 1800
YEAR_MAX: Final = 2600
DAY_S: Final = 86_400
SECOND_US: Final = 1_000_000
DAY_US: Final = DAY_S * SECOND_US
_CYCLE_S: Final = 146_097 * DAY_S
"""Seconds in 400 years."""
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_UTC_NAMES: Final = frozenset({"UTC", "Etc/UTC", "GMT", "Etc/GMT", "Z", "Zulu", "UCT"})
_YEARS_KEPT: Final = 16_384


# -- time zones ------------------------------------------------------------------------------------


def is_utc(name: str) -> bool:
    """Return whether the name of a zone means UTC."""
    return name in _UTC_NAMES


@lru_cache(maxsize=256)
def time_zone(name: str) -> dt.tzinfo:
    """Return the zone with a name such as ``Europe/Rome`` or ``UTC``, or an offset such as
    ``+05:30``.

    Raises `InvalidUsage` for an unknown zone.
    """
    if is_utc(name):
        return dt.UTC
    try:
        if name[:1] in ("+", "-"):
            # East is positive, as in Spark and ISO 8601; in POSIX it is negative.
            offset = dt.datetime.strptime(name, "%z").tzinfo
            assert offset is not None
            return offset
        return ZoneInfo(name)
    except (ValueError, ZoneInfoNotFoundError, OSError) as error:
        raise InvalidUsage(
            f"unknown time zone {name!r}: expected a name like Europe/Rome or an offset like +05:30"
        ) from error


def _second_of_year(year: int) -> int:
    return (dt.datetime(year, 1, 1, tzinfo=dt.UTC) - _EPOCH).days * DAY_S


def _offset_at(zone: dt.tzinfo, second: int) -> int:
    """Return the offset of a zone, in seconds east of UTC, at a second since 1970."""
    moment = _EPOCH + dt.timedelta(seconds=second)
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None
    return offset.days * DAY_S + offset.seconds


@lru_cache(maxsize=_YEARS_KEPT)
def _offsets_of_year(name: str, year: int) -> tuple[tuple[int, int], ...]:
    """Return (first second, offset) of each stretch of a year with a constant offset."""
    zone = time_zone(name)
    start, end = _second_of_year(year), _second_of_year(year + 1)
    known = _offset_at(zone, start)
    found = [(start, known)]
    # No zone changes back and forth within a day, so checking once a day finds all changes.
    for day in range(start, end, DAY_S):
        low, high = day, min(day + DAY_S, end) - 1
        after = _offset_at(zone, high)
        if after == known:
            continue
        while high - low > 0:
            middle = (low + high) // 2
            if _offset_at(zone, middle) == known:
                low = middle + 1
            else:
                high = middle
        known = after
        found.append((low, known))
    return tuple(found)


def utc_offsets(seconds: Lengths, name: str) -> Lengths:
    """Return the offset of a zone, in seconds east of UTC, at each of these seconds since 1970."""
    zone = time_zone(name)
    if isinstance(zone, dt.timezone) or not len(seconds):
        offset = _offset_at(zone, 0)
        return np.full(len(seconds), offset, np.int64)
    last = _second_of_year(YEAR_MAX) - 1
    beyond = np.maximum(seconds - last + _CYCLE_S - 1, 0) // _CYCLE_S
    folded = np.maximum(seconds - beyond * _CYCLE_S, _second_of_year(YEAR_MIN))
    years = folded[[folded.argmin(), folded.argmax()]].astype("M8[s]").astype("M8[Y]")
    first_year, last_year = (years.astype(np.int64) + 1970).tolist()
    steps = [
        step for year in range(first_year, last_year + 1) for step in _offsets_of_year(name, year)
    ]
    starts, offsets = np.array(steps, np.int64).T
    found: Lengths = offsets[np.searchsorted(starts, folded, side="right") - 1]
    return found


def local_to_utc(seconds: Lengths, name: str) -> Lengths:
    """Convert local times of a zone to UTC. Both are in seconds since 1970.

    Like PostgreSQL, use the offset before the change for a local time that is skipped, and the
    offset after the change for one that occurs twice.
    """
    before = utc_offsets(seconds - DAY_S, name)
    after = utc_offsets(seconds + DAY_S, name)
    # Offsets change at most once within the two days around a time.
    later = seconds - after
    found: Lengths = np.where(utc_offsets(later, name) == after, later, seconds - before)
    return found


def local_to_utc_second(second: int, name: str) -> int:
    """Do the same as `local_to_utc` for a single time."""
    return int(local_to_utc(np.array([second], np.int64), name)[0])


def is_ambiguous(second: int, name: str) -> bool:
    """Return whether a local time occurs twice in a zone."""
    around = np.array([second - DAY_S, second + DAY_S], np.int64)
    readings = second - utc_offsets(around, name)
    found = utc_offsets(readings, name) == second - readings
    return bool(found.all()) and int(readings[0]) != int(readings[1])


# -- texts -----------------------------------------------------------------------------------------


def date_text(days: Numbers, valid: RowMask | None) -> EncodedValues:
    """Format days since 1970: ``2026-01-02``, ``10000-01-01``, ``0044-03-15 BC``."""
    block = TextBlock(len(days))
    is_bc = _put_date(block, days.astype(np.int64))
    _put_era(block, is_bc)
    return block.finish(valid)


def timestamp_text(times_us: Numbers, zone: str | None, valid: RowMask | None) -> EncodedValues:
    """Format microseconds since 1970 as local times of a zone with offset: ``2026-01-02
    03:04:05.6+01``. Without a zone, format them as in UTC and without offset."""
    seconds, micros = np.divmod(times_us, SECOND_US)
    offsets = None if zone is None else utc_offsets(seconds, zone)
    if offsets is not None:
        seconds = seconds + offsets
    days, seconds = np.divmod(seconds, DAY_S)
    block = TextBlock(len(times_us))
    is_bc = _put_date(block, days)
    block.put(b" ")
    _put_time(block, seconds, micros)
    if offsets is not None:
        _put_offset(block, offsets)
    _put_era(block, is_bc)
    return block.finish(valid)


def time_text(times_us: Numbers, valid: RowMask | None) -> EncodedValues:
    """Format microseconds since midnight: ``03:04:05.6``."""
    block = TextBlock(len(times_us))
    _put_time(block, *np.divmod(times_us, SECOND_US))
    return block.finish(valid)


def _put_date(block: TextBlock, days: Lengths) -> RowMask:
    """Append year, month and day. Return a mask of the dates before year 1."""
    dates = days.astype("M8[D]")
    months = dates.astype("M8[M]")
    year, month = np.divmod(months.astype(np.int64) + 1970 * 12, 12)
    day = (dates - months.astype("M8[D]")).astype(np.int64)
    is_bc: RowMask = year < 1
    if is_bc.any():
        # There is no year 0: 1 BC is the year before 1.
        year = np.where(is_bc, 1 - year, year)
    if len(year) and int(year.max()) > 9999:
        for power in (1_000_000, 100_000, 10_000):
            block.put_characters(48 + year // power % 10, year >= power)
    # Two digits at a time: half as many divisions and stores.
    block.put_pair(year // 100 % 100)
    block.put_pair(year % 100)
    block.put(b"-")
    block.put_pair(month + 1)
    block.put(b"-")
    block.put_pair(day + 1)
    return is_bc


def _put_time(block: TextBlock, seconds: Lengths, micros: Lengths) -> None:
    block.put_pair(seconds // 3600)
    block.put(b":")
    block.put_pair(seconds // 60 % 60)
    block.put(b":")
    block.put_pair(seconds % 60)
    some = micros != 0
    if not some.any():
        return
    block.put(b".", some)
    # Leave out trailing zeros of a fraction.
    rest = micros
    for power in (100_000, 10_000, 1_000, 100, 10, 1):
        digit, left = np.divmod(rest, power)
        block.put_characters(48 + digit, rest != 0)
        rest = left


def _put_offset(block: TextBlock, offsets: Lengths) -> None:
    """Append an offset such as ``+01``, ``-03:30`` or, from the time before zones,
    ``+00:49:56``."""
    size = np.abs(offsets)
    block.put_characters(np.where(offsets < 0, ord("-"), ord("+")))
    block.put_pair(size // 3600)
    some = size % 3600 != 0
    if some.any():
        block.put(b":", some)
        block.put_pair(size // 60 % 60, some)
        some = size % 60 != 0
        if some.any():
            block.put(b":", some)
            block.put_pair(size % 60, some)


def _put_era(block: TextBlock, is_bc: RowMask) -> None:
    if is_bc.any():
        block.put(b" BC", is_bc)
