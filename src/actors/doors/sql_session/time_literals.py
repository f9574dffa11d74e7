"""Reads times without a zone in the text of a statement, as times in the session's zone.

PostgreSQL reads a literal when the statement is parsed. Spark reads it when the query runs, in a
single zone. When clocks go back and a local time occurs twice, Spark takes the earlier instant and
PostgreSQL the later. So a literal with a declared type is sent to Spark with its offset. A literal
whose type only Spark infers is refused if the two would read it differently. Pure.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

import msgspec
import numpy as np

from actors.model.pgwire.sqlstate import NOT_SUPPORTED, InvalidClientData
from actors.model.pgwire.time_text import (
    DAY_S,
    is_ambiguous,
    is_utc,
    local_to_utc_second,
    utc_offsets,
)
from actors.model.pgwire.type_oids import TIMESTAMPTZ
from actors.model.pgwire.value_parsing import local_moment, parse_text_value
from actors.runtime.errors import InvalidUsage

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class AmbiguousTime(InvalidUsage):
    """A time without a zone that PostgreSQL and Spark would read differently."""

    sqlstate = NOT_SUPPORTED


class TimeLiterals(msgspec.Struct, frozen=True):
    """Reads the times of one statement.

    `zone` is the session's zone when the statement was parsed, `present` the one in which it is
    executed. `for_others`: sessions in other zones will read the text. `as_spark`: the text is in
    Spark's dialect, in which a local time that occurs twice means the earlier instant.
    """

    zone: str
    present: str
    for_others: bool = False
    as_spark: bool = False

    @property
    def is_utc(self) -> bool:
        """Return whether both zones are UTC."""
        return is_utc(self.zone) and is_utc(self.present)

    def instant(self, moment: dt.datetime) -> dt.datetime:
        """Interpret a timestamp without a zone in the zone `present`."""
        return moment_in(self.present, moment, earlier=self.as_spark)

    def absolute(self, text: str) -> str | None:
        """Return a text of type timestamptz with its UTC offset; None if it is not a valid time.

        >>> TimeLiterals("Europe/Rome", "UTC").absolute("2024-10-27 02:30")
        '2024-10-27 01:30:00+00:00'
        """
        try:
            found = parse_text_value(text, TIMESTAMPTZ, self.zone)
        except InvalidClientData:
            return None  # Spark reports the error
        assert isinstance(found, dt.datetime)
        # With an offset, the text means the same in any zone of Spark.
        return found.isoformat(" ")

    def check_untyped(self, text: str) -> None:
        """Raise `AmbiguousTime` for an untyped text that Spark, if it took it for a time, might
        read as a different time than PostgreSQL does."""
        moment = local_moment(text)
        if moment is None:
            return
        if self.zone != self.present:
            # On this message of PostgreSQL, clients prepare the statement again.
            raise AmbiguousTime(
                f"cached plan must not change result type: '{text}' was read in the time zone "
                f"{self.zone}, but the session's zone has changed: prepare the statement again"
            )
        if self.for_others:
            raise AmbiguousTime(
                f"'{text}' is ambiguous in a plain view, which sessions in time zones other than "
                f"{self.zone} may read: write timestamptz '{text}', or date '…' for a day"
            )
        if is_ambiguous(_second_of(moment), self.zone):
            raise AmbiguousTime(
                f"'{text}' occurs twice in the time zone {self.zone}: add its UTC offset, or write "
                f"timestamptz '{text}'"
            )


def moment_in(zone: str, moment: dt.datetime, *, earlier: bool = False) -> dt.datetime:
    """Convert a local time in `zone` to an instant: if it occurs twice, the later one, or with
    `earlier` the earlier."""
    local = _second_of(moment)
    second = local_to_utc_second(local, zone)
    # The earlier instant has the offset of the day before.
    if earlier and is_ambiguous(local, zone):
        second = local - int(utc_offsets(np.array([local - DAY_S], np.int64), zone)[0])
    return _EPOCH + dt.timedelta(seconds=second, microseconds=moment.microsecond)


def local_in(zone: str, moment: dt.datetime) -> dt.datetime:
    """Convert an instant to local time in `zone`, without a tzinfo."""
    utc = moment.astimezone(dt.UTC).replace(tzinfo=None)
    offset = int(utc_offsets(np.array([_second_of(utc)], np.int64), zone)[0])
    return utc + dt.timedelta(seconds=offset)


def _second_of(moment: dt.datetime) -> int:
    return (moment.replace(tzinfo=dt.UTC, microsecond=0) - _EPOCH) // dt.timedelta(seconds=1)
