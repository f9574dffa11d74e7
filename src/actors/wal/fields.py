"""Reading and writing the fields of a WAL message: every read is checked against what is left.

Nothing is allocated before its size was compared with the bytes that remain: a count from the wire
is bounded by them, a text by its own limit. Any breach is a `MalformedFrame` that names the
message, the field, and the numbers. What our own side gets wrong is a `LocalProtocolError`.

Used by `codec_v3`, `codec_v2` and `feedback`; what differs between the versions (byte order, order
of fields) stands there.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

from actors.errors import LocalProtocolError, MalformedFrame
from actors.wal.messages import WAL_BYTES_MAX, Entry

Bytes: TypeAlias = bytes | bytearray | memoryview
"""What is read from: a view saves a copy of the log's bytes."""
ID_DIGITS: Final = 32
"""Hexadecimal digits of a tenant's or timeline's name."""
ENTRY_BYTES: Final = 16


class Fields:
    """The fields of one message, read one after the other from its first byte."""

    def __init__(self, data: Bytes, message: str) -> None:
        self._data = data
        self._at = 0
        self.message = message
        """For errors; set again once the tag was read."""

    @property
    def remaining(self) -> int:
        """How many bytes were not read yet."""
        return len(self._data) - self._at

    def malformed(self, what: str) -> MalformedFrame:
        """The error to raise."""
        return MalformedFrame(f"{self.message}: {what}")

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """The next fields, of fixed size."""
        self._need(layout.size, what)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def take(self, size: int, what: str) -> bytes:
        """The next `size` bytes."""
        self._need(size, what)
        taken = bytes(self._data[self._at : self._at + size])
        self._at += size
        return taken

    def text(self, bytes_max: int, what: str) -> str:
        """The next text, which ends with a NUL after at most `bytes_max` bytes."""
        window = bytes(self._data[self._at : self._at + bytes_max + 1])
        end = window.find(0)
        if end < 0 and len(window) <= bytes_max:
            raise self.malformed(f"{what} has no NUL at its end, {self.remaining} bytes are left")
        if end < 0:
            raise self.malformed(f"{what} is longer than {bytes_max} bytes")
        self._at += end + 1
        try:
            return window[:end].decode()
        except UnicodeDecodeError:
            raise self.malformed(f"{what} is no UTF-8: {window[:end].hex()}") from None

    def count(self, layout: struct.Struct, item_bytes_min: int, what: str) -> int:
        """The next number of items, each of at least so many bytes: they must fit in the rest."""
        (count,) = self.unpack(layout, f"the number of {what}")
        if count * item_bytes_min > self.remaining:
            raise self.malformed(
                f"{count} {what} of at least {item_bytes_min} bytes do not fit in"
                f" the {self.remaining} bytes that are left"
            )
        return int(count)

    def history(self, layout: struct.Struct, entry: struct.Struct) -> tuple[Entry, ...]:
        """The next history: a count and so many pairs."""
        count = self.count(layout, ENTRY_BYTES, "history entries")
        taken = self.take(count * ENTRY_BYTES, "the history")
        return tuple(Entry(term, lsn) for term, lsn in entry.iter_unpack(taken))

    def wal(self, begin_lsn: int, end_lsn: int) -> bytes:
        """The bytes of the log between two positions."""
        size = end_lsn - begin_lsn
        if size < 0:
            raise self.malformed(f"end_lsn {end_lsn} is less than begin_lsn {begin_lsn}")
        if size > WAL_BYTES_MAX:
            raise self.malformed(
                f"{size} bytes of WAL, at most {WAL_BYTES_MAX} may come in one message"
            )
        return self.take(size, "the WAL")

    def flag(self, value: int, what: str) -> bool:
        """A number that is 0 or 1."""
        if value not in (0, 1):
            raise self.malformed(f"{what} is {value}, it must be 0 or 1")
        return value == 1

    def end(self) -> None:
        """Nothing may be left."""
        if self.remaining:
            raise self.malformed(f"{self.remaining} bytes are left after its end")

    def _need(self, size: int, what: str) -> None:
        if size > self.remaining:
            raise self.malformed(f"{what} needs {size} bytes, {self.remaining} are left")


def pack(layout: struct.Struct, *values: int | bytes) -> bytes:
    """Fields of fixed size. Raises `LocalProtocolError` for a number that has no room."""
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise LocalProtocolError(f"cannot be said on the wire: {values}: {error}") from None


def pack_history(
    count: struct.Struct, entry: struct.Struct, history: tuple[Entry, ...]
) -> list[bytes]:
    """A count and so many pairs."""
    return [pack(count, len(history)), *(pack(entry, item.term, item.lsn) for item in history)]


def pack_text(text: str, bytes_max: int, what: str) -> bytes:
    """A text and its NUL. Raises `LocalProtocolError` where the other side could not read it."""
    data = text.encode()
    if len(data) > bytes_max or 0 in data:
        raise LocalProtocolError(
            f"{what} {text!r} cannot be said: at most {bytes_max} bytes, none of them 0"
        )
    return data + b"\0"


def check_wal(begin_lsn: int, end_lsn: int, wal: bytes) -> None:
    """Raises `LocalProtocolError` unless these are the bytes between the two, and not too many."""
    if end_lsn - begin_lsn != len(wal) or len(wal) > WAL_BYTES_MAX:
        raise LocalProtocolError(
            f"{len(wal)} bytes of WAL from {begin_lsn} to {end_lsn}: it must be as many as lie"
            f" between, and at most {WAL_BYTES_MAX}"
        )


def is_id(text: str) -> bool:
    """Whether that names a tenant or a timeline."""
    return len(text) == ID_DIGITS and not text.strip("0123456789abcdef")
