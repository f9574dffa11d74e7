"""The time zones of a session, as PostgreSQL's ``SET TIME ZONE`` accepts them. Pure.

A number counts hours east of UTC. An offset in a text has the sign of POSIX, which is reversed:
``-05:30`` is east of UTC. Names are those of the IANA database, in any case.

>>> parse_session_zone("europe/rome"), parse_session_zone("5.5")
(SessionZone(shown='Europe/Rome', name='Europe/Rome'), SessionZone(shown='<+05:30>-05:30', \
name='+05:30'))
>>> parse_session_zone("GMT-05:30").name, parse_session_zone("+05:30").name
('+05:30', '-05:30')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from zoneinfo import available_timezones

import msgspec

from actors.runtime.errors import InvalidUsage

_HOURS: Final = re.compile(r"\s*([+-]?(?:[0-9]{1,3}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}))")
_POSIX: Final = re.compile(
    r"(?P<name>[A-Za-z]{3,16}|<[A-Za-z0-9+:-]{1,16}>|(?=[+-]|[0-9]+:))"
    r"(?P<sign>[+-]?)(?P<hours>[0-9]{1,2})(?::(?P<minutes>[0-5][0-9]))?"
)
_ISO: Final = re.compile(
    r"(?:UTC|GMT|UT)?(?P<sign>[+-])(?P<hours>[0-9]{1,2})(?::?(?P<minutes>[0-5][0-9]))?"
)
_INTERVAL: Final = re.compile(
    r"INTERVAL\s*'(?P<sign>[+-]?)(?P<hours>[0-9]{1,2})(?::(?P<minutes>[0-5][0-9]))?'"
    r"\s*HOUR(?:\s+TO\s+MINUTE)?",
    re.IGNORECASE,
)
_MINUTES_MAX: Final = 18 * 60
"""Largest offset that Spark supports: 18 hours."""
_NOT_OF_SPARK: Final = frozenset({"factory", "localtime", "roc"})
"""Names that the JVM's database lacks."""


class SessionZone(msgspec.Struct, frozen=True):
    """A session's time zone.

    `shown` is the form that ``SHOW TimeZone`` displays. `name` is the form for
    `time_text.time_zone` and Spark: a name, or an offset with the sign of ISO 8601.
    """

    shown: str
    name: str


@lru_cache(maxsize=1)
def _zones() -> Mapping[str, str]:
    return {name.lower(): name for name in available_timezones()}


@lru_cache(maxsize=256)
def parse_session_zone(text: str) -> SessionZone:
    """Parse a PostgreSQL time zone. Raises `InvalidUsage`."""
    if (hours := _HOURS.fullmatch(text)) is not None:
        return _of_minutes(text, round(float(hours[1]) * 60))
    if (interval := _INTERVAL.fullmatch(text)) is not None:
        return _of_minutes(text, _minutes(interval))
    folded = text.lower()
    known = _zones().get(folded)
    if known is not None and folded not in _NOT_OF_SPARK:
        return SessionZone(known, known)
    posix = None if known is not None else _POSIX.fullmatch(text)
    if posix is None:
        raise _unknown(text)
    return SessionZone(_posix_name(text), _iso(text, -_minutes(posix)))


def parse_spark_zone(text: str) -> SessionZone:
    """Parse a Spark time zone, whose offsets have the sign of ISO 8601. Raises `InvalidUsage`.

    >>> parse_spark_zone("+05:30").name
    '+05:30'
    """
    offset = _ISO.fullmatch(text)
    return parse_session_zone(text) if offset is None else _of_minutes(text, _minutes(offset))


def _posix_name(text: str) -> str:
    """Return an offset in a text as PostgreSQL displays it, with letters outside of brackets in
    capitals."""
    return text if text.startswith("<") else text.upper()


def _minutes(found: re.Match[str]) -> int:
    size = int(found["hours"]) * 60 + int(found["minutes"] or 0)
    return -size if found["sign"] == "-" else size


def _of_minutes(text: str, east: int) -> SessionZone:
    name = _iso(text, east)
    # Like PostgreSQL: the name in brackets has the sign of ISO 8601, the offset that of POSIX.
    sign = "-" if east < 0 else "+"
    size = name[1:].removesuffix(":00") if name != "UTC" else "00"
    return SessionZone(f"<{sign}{size}>{'+' if east < 0 else '-'}{size}", name)


def _iso(text: str, east: int) -> str:
    if abs(east) > _MINUTES_MAX:
        raise _unknown(text)
    hours, minutes = divmod(abs(east), 60)
    return f"{'-' if east < 0 else '+'}{hours:02}:{minutes:02}" if east else "UTC"


def _unknown(text: str) -> InvalidUsage:
    return InvalidUsage(
        f'invalid value for parameter "TimeZone": "{text[:64]}"; expected a name like Europe/Rome '
        "or a number of hours east of UTC"
    )
