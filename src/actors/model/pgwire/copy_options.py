"""The options of a COPY: the format of its rows.

Defaults and rules are PostgreSQL's. A delimiter is one byte, by default a tab, or a comma in CSV.
NULL is by default ``\\N``, or an empty field without quotes in CSV.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from actors.runtime.errors import InvalidUsage

BINARY_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
BINARY_HEADER: Final = BINARY_SIGNATURE + bytes(8)
"""The header of the binary format: signature, flags (none) and length of the extension (0)."""
BINARY_TRAILER: Final = b"\xff\xff"
_NO_DELIMITERS: Final = b"\\.abcdefghijklmnopqrstuvwxyz0123456789"


class CopyFormat(Enum):
    """The format in which rows are written."""

    TEXT = "text"
    CSV = "csv"
    BINARY = "binary"


class RowFormat(msgspec.Struct, frozen=True):
    """The options of one COPY."""

    kind: CopyFormat = CopyFormat.TEXT
    delimiter: bytes = b"\t"
    null: bytes = b"\\N"
    header: bool = False
    """True if the first line has the column names."""
    header_match: bool = False
    """True if other names in that line are an error."""
    quote: bytes = b'"'
    escape: bytes = b'"'

    def check(self) -> None:
        """Raise `InvalidUsage` if the options make rows ambiguous."""
        if self.kind is CopyFormat.BINARY:
            return
        is_csv = self.kind is CopyFormat.CSV
        marks = [("DELIMITER", self.delimiter)]
        marks += [("QUOTE", self.quote), ("ESCAPE", self.escape)] if is_csv else []
        for name, mark in marks:
            if len(mark) != 1 or not mark.isascii() or mark in b"\0\r\n":
                raise InvalidUsage(
                    f"COPY {name} {mark.decode()!r} must be one character of one byte"
                )
        if not is_csv and self.delimiter in _NO_DELIMITERS:
            # Such a character has a special meaning after a backslash.
            raise InvalidUsage(f"COPY DELIMITER cannot be {self.delimiter.decode()!r}")
        null = self.null.decode()
        if b"\r" in self.null or b"\n" in self.null or self.delimiter in self.null:
            raise InvalidUsage(f"COPY NULL {null!r} must not contain a line break or the delimiter")
        if is_csv and (self.quote == self.delimiter or self.quote in self.null):
            raise InvalidUsage(
                f"COPY QUOTE {self.quote.decode()!r} must not be the delimiter or occur in NULL"
            )
