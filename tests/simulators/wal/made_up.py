"""WAL in PostgreSQL's format, made up for tests that need a log and have no server.

`MadeUpLog` writes records one after another from an LSN on, cut into pages and segments, with true
CRCs. It shares no code with `actors.wal.records`, and notes the LSN of each record.
"""

from __future__ import annotations

from struct import pack

import google_crc32c

from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES


class MadeUpLog:
    """A log. `wal` is its bytes from `start_lsn` on; ``records`` are (begin, first LSN at which the
    next may begin) of each. `start_lsn` is an LSN at which a record may begin."""

    def __init__(
        self,
        start_lsn: int,
        *,
        magic: int = 0xD110,
        segment_bytes: int = SEGMENT_BYTES,
        system_id: int = 7,
    ) -> None:
        self.start_lsn = start_lsn
        self.wal = bytearray()
        self.records: list[tuple[int, int]] = []
        self._magic = magic
        self.segment_bytes = segment_bytes
        self._system_id = system_id
        self._previous = 0

    @property
    def end_lsn(self) -> int:
        """Return the LSN behind the last byte."""
        return self.start_lsn + len(self.wal)

    def record(self, body: bytes, *, manager: int = 10, info: int = 0) -> int:
        """Append one record; return the LSN behind it and its padding."""
        self._header_of_page(0)
        begin = self.end_lsn
        head = pack("<IIQBB2x", 24 + len(body), 3, self._previous, info, manager)
        crc = google_crc32c.extend(google_crc32c.value(body), head)
        data = head + pack("<I", crc) + body
        done = 0
        while done < len(data):
            self._header_of_page(len(data) - done)
            room = PAGE_BYTES - self.end_lsn % PAGE_BYTES
            self.wal += data[done : done + room]
            done += room
        self.wal += bytes(-self.end_lsn % 8)
        self._previous = begin
        self.records.append((begin, self.end_lsn))
        return self.end_lsn

    def switch(self) -> int:
        """Append a record after which the segment is left empty; return the LSN of the next
        segment."""
        self.record(b"", manager=0, info=0x40)
        begin, _ = self.records.pop()
        self.wal += bytes(-self.end_lsn % self.segment_bytes)
        self.records.append((begin, self.end_lsn))
        return self.end_lsn

    def _header_of_page(self, to_come: int) -> None:
        if self.end_lsn % PAGE_BYTES:
            return
        first = self.end_lsn % self.segment_bytes == 0
        info = (1 if to_come else 0) | (2 if first else 0)
        self.wal += pack("<HHIQI4x", self._magic, info, 1, self.end_lsn, to_come)
        if first:
            self.wal += pack("<QII", self._system_id, self.segment_bytes, PAGE_BYTES)
