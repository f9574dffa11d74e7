"""Finds the first record of a log that is read from a page's begin on. Pure.

A log of acceptors begins at a record, while a server's log is read from a segment's begin on, where
a record of the segment before may continue. Each page's header has the number of its bytes still to
come, so only headers are read.

Source: PostgreSQL's xlog_internal.h (`records` describes the format).
"""

from __future__ import annotations

import struct
from typing import Final

from actors.errors import CorruptData, InvalidUsage
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES, aligned, lsn_text
from actors.wal.records import CONTINUED, LONG_HEADER_BYTES, SHORT_HEADER_BYTES, magics_of

_PAGE: Final = struct.Struct("<HHIQI")


class FirstRecord:
    """Searches a log that is fed from a page's begin on. Raises `CorruptData` for an unknown
    version."""

    def __init__(self, page_lsn: int, pg_version: int) -> None:
        if page_lsn % PAGE_BYTES:
            raise InvalidUsage(f"{lsn_text(page_lsn)} is no begin of a page")
        self._magics = magics_of(pg_version)
        self._page_lsn = page_lsn
        """LSN of the page whose header is read, or awaited."""
        self._lsn = page_lsn
        self._header = b""

    def feed(self, wal: bytes) -> int | None:
        """Take the log's next bytes, and return the LSN of the first record once it is known.
        Raises `CorruptData`."""
        while wal:
            if self._lsn < self._page_lsn:
                skipped = min(len(wal), self._page_lsn - self._lsn)
                self._lsn += skipped
                wal = wal[skipped:]
                continue
            missing = _PAGE.size - len(self._header)
            self._header += wal[:missing]
            self._lsn += len(wal[:missing])
            wal = wal[missing:]
            if len(self._header) == _PAGE.size:
                found = self._judge()
                if found is not None:
                    return found
        return None

    def _judge(self) -> int | None:
        page_lsn = self._page_lsn
        magic, info, _, address, to_come = _PAGE.unpack(self._header)
        if magic not in self._magics or address != page_lsn:
            raise CorruptData(
                f"no page of the log begins at {lsn_text(page_lsn)}: its magic is {magic:04X}, and"
                f" it says that it is the one of {lsn_text(address)}",
                determinate=True,
            )
        # Without a continued record the log is whole from the page's own header on.
        if not info & CONTINUED:
            return page_lsn
        header = LONG_HEADER_BYTES if page_lsn % SEGMENT_BYTES == 0 else SHORT_HEADER_BYTES
        behind = aligned(page_lsn + header + to_come)
        self._page_lsn += PAGE_BYTES
        self._header = b""
        return behind if behind <= self._page_lsn else None
