"""Times in the text of a statement that name no zone: they are of the session's.

PostgreSQL reads a literal when the statement is parsed. Spark reads it when the query runs, takes
the earlier of two times that the clocks show at the end of summer time (PostgreSQL the later), and
knows one zone only. So a literal with a type is sent with its offset, and one whose type Spark
alone finds is refused where the two would differ. Pure.
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
    """Reads the times of one statement: `zone` is that of the session when the statement was
    parsed, `present` that in which it is carried out. `for_others`: sessions in other zones will
    read it. `as_spark`: the text is Spark's, in which of two times that
    the clocks show the earlier is meant."""

    zone: str
    present: str
    for_others: bool = False
    as_spark: bool = False

    @property
    def is_utc(self) -> bool:
        """Return whether both are UTC."""
        return is_utc(self.zone) and is_utc(self.present)

    def instant(self, moment: dt.datetime) -> dt.datetime:
        """Return a timestamp as a timestamptz, in the session's present zone."""
        return moment_in(self.present, moment, earlier=self.as_spark)

    def absolute(self, text: str) -> str | None:
        """Return a text of type timestamptz with its offset; None for one that is no time.

        >>> TimeLiterals("Europe/Rome", "UTC").absolute("2024-10-27 02:30")
        '2024-10-27 01:30:00+00:00'
        """
        try:
            found = parse_text_value(text, TIMESTAMPTZ, self.zone)
        except InvalidClientData:
            return None  # Spark says so
        assert isinstance(found, dt.datetime)
        # With an offset it means the same whatever zone Spark is in.
        return found.isoformat(" ")

    def check_untyped(self, text: str) -> None:
        """Raise `AmbiguousTime` for a text without a type that Spark would read as another time,
        where it stands for one."""
        moment = local_moment(text)
        if moment is None:
            return
        if self.zone != self.present:
            # Clients prepare a statement anew when they are told this.
            raise AmbiguousTime(
                f"cached plan must not change result type: '{text}' was read in the time zone "
                f"{self.zone}, which the session has left since: prepare the statement anew"
            )
        if self.for_others:
            raise AmbiguousTime(
                f"a plain view is read in the time zone of each session, and '{text}' is a time of "
                f"{self.zone}: write timestamptz '{text}', or date '…' for a day"
            )
        if is_ambiguous(_second_of(moment), self.zone):
            raise AmbiguousTime(
                f"'{text}' comes twice in the time zone {self.zone}: write its offset, or "
                f"timestamptz '{text}'"
            )


def moment_in(zone: str, moment: dt.datetime, *, earlier: bool = False) -> dt.datetime:
    """Return a time without a zone as the instant at which the clocks of `zone` show it: the later
    of two, or the earlier."""
    local = _second_of(moment)
    second = local_to_utc_second(local, zone)
    # The offset that held the day before is the one of the earlier of the two.
    if earlier and is_ambiguous(local, zone):
        second = local - int(utc_offsets(np.array([local - DAY_S], np.int64), zone)[0])
    return _EPOCH + dt.timedelta(seconds=second, microseconds=moment.microsecond)


def local_in(zone: str, moment: dt.datetime) -> dt.datetime:
    """Return what the clocks of `zone` show at an instant."""
    utc = moment.astimezone(dt.UTC).replace(tzinfo=None)
    offset = int(utc_offsets(np.array([_second_of(utc)], np.int64), zone)[0])
    return utc + dt.timedelta(seconds=offset)


def _second_of(moment: dt.datetime) -> int:
    return (moment.replace(tzinfo=dt.UTC, microsecond=0) - _EPOCH) // dt.timedelta(seconds=1)
