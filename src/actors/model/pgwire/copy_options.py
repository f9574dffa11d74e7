"""The options of a COPY: the format of its rows.

Defaults and rules are PostgreSQL's: a delimiter is one byte, a tab or, in CSV, a comma; NULL is
``\\N`` or, in CSV, an empty field without quotes.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from actors.runtime.errors import InvalidUsage

BINARY_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
BINARY_HEADER: Final = BINARY_SIGNATURE + bytes(8)
"""Signature, flags (none) and the length of an extension (none)."""
BINARY_TRAILER: Final = b"\xff\xff"
_NO_DELIMITERS: Final = frozenset("\\.abcdefghijklmnopqrstuvwxyz0123456789\r\n")


class CopyFormat(Enum):
    """How rows are written."""

    TEXT = "text"
    CSV = "csv"
    BINARY = "binary"


class RowFormat(msgspec.Struct, frozen=True):
    """The options of one COPY; make it by `row_format`."""

    kind: CopyFormat = CopyFormat.TEXT
    delimiter: bytes = b"\t"
    null: bytes = b"\\N"
    header: bool = False
    """The first line has the columns' names."""
    header_match: bool = False
    """It is an error if it has others."""
    quote: bytes = b'"'
    escape: bytes = b'"'


def row_format(
    kind: str = "text",
    *,
    delimiter: str | None = None,
    null: str | None = None,
    header: bool = False,
    quote: str | None = None,
    escape: str | None = None,
) -> RowFormat:
    """Return the options that a COPY names, and PostgreSQL's defaults for others. Raises
    `InvalidUsage`.

    >>> row_format("csv", delimiter=";").null
    b''
    """
    try:
        form = CopyFormat(kind.lower())
    except ValueError:
        raise InvalidUsage(f"COPY format {kind!r} is not recognized: text, csv or binary") from None
    is_csv = form is CopyFormat.CSV
    if form is CopyFormat.BINARY and (header or delimiter is not None or null is not None):
        raise InvalidUsage("COPY in binary format takes no HEADER, DELIMITER or NULL")
    if not is_csv and (quote is not None or escape is not None):
        raise InvalidUsage("COPY takes QUOTE and ESCAPE only in CSV format")
    delimiter = ("," if is_csv else "\t") if delimiter is None else delimiter
    null = ("" if is_csv else "\\N") if null is None else null
    quote = '"' if quote is None else quote
    # In CSV a quote within quotes is written twice unless another escape is given.
    escape = quote if escape is None else escape
    for name, text in (("DELIMITER", delimiter), ("QUOTE", quote), ("ESCAPE", escape)):
        if len(text) != 1 or not text.isascii() or text in "\0\r\n":
            raise InvalidUsage(f"COPY {name} {text!r} must be one character of one byte")
    if not is_csv and delimiter in _NO_DELIMITERS:
        # Such a character has a meaning of its own after a backslash.
        raise InvalidUsage(f"COPY DELIMITER cannot be {delimiter!r}")
    if "\r" in null or "\n" in null or delimiter in null:
        raise InvalidUsage(f"COPY NULL {null!r} must hold no end of line and no delimiter")
    if is_csv and (quote == delimiter or quote in null):
        raise InvalidUsage(f"COPY QUOTE {quote!r} must be neither the delimiter nor in NULL")
    return RowFormat(
        form,
        delimiter.encode(),
        null.encode(),
        header,
        quote=quote.encode(),
        escape=escape.encode(),
    )
