"""Reads and writes the fields of a WAL message, checking each read against the remaining bytes.

An error of the peer is a `MalformedFrame` that names the message, the field and the numbers; an
error of our side is a `LocalProtocolError`. `codec_v3`, `codec_v2` and `feedback_codec` contain
what differs between the versions (byte order, order of fields).
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

from actors.runtime.errors import LocalProtocolError, MalformedFrame
from actors.wal.messages import WAL_BYTES_MAX, TermEntry

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Types that can be parsed; a memoryview saves copying the log's bytes."""
ID_DIGITS: Final = 32
"""Number of hexadecimal digits in the id of a tenant or timeline."""
ENTRY_BYTES: Final = 16


class MessageFields:
    """The fields of one message, read one after another from its first byte."""

    def __init__(self, data: Bytes, message: str) -> None:
        self._data = data
        self._at = 0
        """Position of the next byte to read."""
        self.message = message
        """Name of the message in errors; set again once the tag has been read."""

    @property
    def remaining(self) -> int:
        """Return the number of bytes that have not been read yet."""
        return len(self._data) - self._at

    def malformed(self, what: str) -> MalformedFrame:
        """Return a `MalformedFrame` to raise, with the message's name."""
        return MalformedFrame(f"{self.message}: {what}")

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """Read the next fields, which have a fixed size."""
        self._need(layout.size, what)
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def take(self, size: int, what: str) -> bytes:
        """Read the next `size` bytes."""
        self._need(size, what)
        taken = bytes(self._data[self._at : self._at + size])
        self._at += size
        return taken

    def text(self, bytes_max: int, what: str) -> str:
        """Read the next text, which ends with a NUL after at most `bytes_max` bytes."""
        # The window bounds the search for the NUL.
        window = bytes(self._data[self._at : self._at + bytes_max + 1])
        end = window.find(0)
        if end < 0 and len(window) <= bytes_max:
            raise self.malformed(
                f"{what} has no terminating NUL in the remaining {self.remaining} bytes"
            )
        if end < 0:
            raise self.malformed(f"{what} is longer than {bytes_max} bytes")
        self._at += end + 1
        try:
            return window[:end].decode()
        except UnicodeDecodeError:
            raise self.malformed(f"{what} is not valid UTF-8: {window[:end].hex()}") from None

    def count(self, layout: struct.Struct, item_bytes_min: int, what: str) -> int:
        """Read a number of items, each of at least `item_bytes_min` bytes."""
        (count,) = self.unpack(layout, f"the number of {what}")
        # Check it before anything is allocated: the remaining bytes bound a count from the wire.
        if count * item_bytes_min > self.remaining:
            raise self.malformed(
                f"{count} {what} of at least {item_bytes_min} bytes do not fit in"
                f" the remaining {self.remaining} bytes"
            )
        return int(count)

    def history(self, layout: struct.Struct, entry: struct.Struct) -> tuple[TermEntry, ...]:
        """Read a history: a count followed by as many pairs."""
        count = self.count(layout, ENTRY_BYTES, "history entries")
        taken = self.take(count * ENTRY_BYTES, "the history")
        return tuple(TermEntry(term, lsn) for term, lsn in entry.iter_unpack(taken))

    def wal(self, begin_lsn: int, end_lsn: int) -> bytes:
        """Read the log's bytes between two positions."""
        size = end_lsn - begin_lsn
        if size < 0:
            raise self.malformed(f"end_lsn {end_lsn} is less than begin_lsn {begin_lsn}")
        if size > WAL_BYTES_MAX:
            raise self.malformed(
                f"WAL of one message too large: {size} bytes (limit {WAL_BYTES_MAX})"
            )
        return self.take(size, "the WAL")

    def flag(self, value: int, what: str) -> bool:
        """Return a number that must be 0 or 1 as a bool."""
        if value not in (0, 1):
            raise self.malformed(f"{what} is {value}: expected 0 or 1")
        return value == 1

    def end(self) -> None:
        """Raise `MalformedFrame` if any byte remains."""
        if self.remaining:
            raise self.malformed(f"{self.remaining} extra bytes after its end")

    def _need(self, size: int, what: str) -> None:
        if size > self.remaining:
            raise self.malformed(f"{what} needs {size} bytes, but {self.remaining} remain")


def pack(layout: struct.Struct, *values: int | bytes) -> bytes:
    """Pack fields of fixed size. Raise `LocalProtocolError` if a number is out of range."""
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise LocalProtocolError(f"cannot encode {values}: {error}") from None


def pack_history(
    count: struct.Struct, entry: struct.Struct, history: tuple[TermEntry, ...]
) -> list[bytes]:
    """Pack a count followed by as many pairs."""
    return [pack(count, len(history)), *(pack(entry, item.term, item.lsn) for item in history)]


def pack_text(text: str, bytes_max: int, what: str) -> bytes:
    """Pack a text and its NUL. Raise `LocalProtocolError` if the peer could not read it."""
    data = text.encode()
    # A NUL inside would end the text early.
    if len(data) > bytes_max or 0 in data:
        raise LocalProtocolError(
            f"invalid {what} {text!r}: expected at most {bytes_max} bytes without NUL"
        )
    return data + b"\0"


def check_wal(begin_lsn: int, end_lsn: int, wal: bytes) -> None:
    """Raise `LocalProtocolError` unless `wal` has the length of [begin_lsn, end_lsn) and is not too
    long."""
    if end_lsn - begin_lsn != len(wal) or len(wal) > WAL_BYTES_MAX:
        raise LocalProtocolError(
            f"invalid WAL of {len(wal)} bytes from {begin_lsn} to {end_lsn}: the length must be"
            f" their difference, and at most {WAL_BYTES_MAX}"
        )


def is_id(text: str) -> bool:
    """Return whether the text is a valid id of a tenant or a timeline."""
    return len(text) == ID_DIGITS and not text.strip("0123456789abcdef")
