"""The timestamp oracle: strictly increasing times, reserved durably ahead of their use.

A time is ``max(wall clock, last + 1)``. No time is given out before a reservation beyond it is
durable under the consensus key `oracle`. Reserving ahead (`oracle_reserve_ms`) makes it one durable
write for many times.

Times strictly increase over all restarts; a wall clock that jumps back or stands still only makes
times denser than milliseconds would be. `TimestampOracle` is pure: the owner feeds it the clock and
carries out the reservations it asks for (`DurableOracle` does both). It does not order reads: those
name a time that was written.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.errors import CorruptData, InvalidUsage, StateDirectoryError, WriterFenced
from actors.progress import TIME_MAX, Time

ORACLE_KEY: Final = "oracle"
FORMAT_VERSION: Final = 1


class OracleReservation(msgspec.Struct, frozen=True):
    """The document under the key `oracle`: no time at or above `reserved` was ever given out."""

    format: int
    reserved: Time


class TimestampOracle:
    """Gives times, and the reservations that they need first."""

    def __init__(self, reserved: Time, reserve_ms: int) -> None:
        # An earlier process may have given out any time below its reservation.
        self.last: Time = reserved - 1
        self.reserved: Time = reserved
        self._reserve_ms = reserve_ms

    def candidate(self, now_ms: int, at: Time | None = None) -> Time:
        """Return the time that would be given now, or `at` itself when tests drive the oracle.

        Raises `InvalidUsage` when `at` is not later than every time given before.
        """
        if at is None:
            return max(now_ms, self.last + 1)
        if not self.last < at <= TIME_MAX:
            raise InvalidUsage(f"time {at} is not later than the last one given, {self.last}")
        return at

    def reservation(self, time: Time) -> Time | None:
        """Return the reservation that must be durable before `time` is given; None: it is."""
        return None if time < self.reserved else time + self._reserve_ms

    def reserve(self, reserved: Time) -> None:
        """Note that the reservation is durable."""
        self.reserved = max(self.reserved, reserved)

    def give(self, time: Time) -> Time:
        """Give `time` out."""
        assert self.last < time < self.reserved, (self.last, time, self.reserved)
        self.last = time
        return time


def decode_reservation(data: bytes) -> Time:
    """Return the reserved time. Raises `StateDirectoryError` for a newer format, `CorruptData`."""
    try:
        reservation = msgspec.msgpack.decode(data, type=OracleReservation)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"consensus key {ORACLE_KEY!r}: {error}", determinate=True) from None
    if reservation.format > FORMAT_VERSION:
        raise StateDirectoryError(
            f"the oracle's record has format {reservation.format}; this version knows "
            f"{FORMAT_VERSION}: use the version that wrote it, or a newer one"
        )
    return reservation.reserved


def encode_reservation(reserved: Time) -> bytes:
    """Return the record to store."""
    return msgspec.msgpack.encode(OracleReservation(FORMAT_VERSION, reserved))


def fenced(expected: int | None) -> WriterFenced:
    """Return the error for a record that another service has changed."""
    return WriterFenced(
        f"the oracle's record is no longer at seqno {expected}: another service uses this state",
        determinate=True,
    )
