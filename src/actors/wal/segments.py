"""The segments of one log as files of one folder: named, created, filled, read, removed.

The newest has a name that ends with ``.partial`` until it is full; then it is flushed and renamed.
A name proves nothing about the content: a crash may keep a full segment ``.partial``. Calls raise
`OSError`, which `storage` handles.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from actors.runtime.errors import InvalidUsage
from actors.wal.files import FileSystem, OpenFile
from actors.wal.lsn import PAGE_BYTES, PARTIAL, SEGMENT_BYTES, parse_segment_name, segment_name
from actors.wal.records import CONTINUED, LONG, LONG_HEADER_BYTES, SHORT_HEADER_BYTES

NEW_NAME: Final = "waltmp"
"""Name of a segment that does not have its length yet."""
PG_TIMELINE: Final = 1

_HEADER: Final = Struct("<HHIQI4x")
_LONG: Final = Struct("<QII")


class LogSegment(msgspec.Struct, frozen=True):
    """One file of a log: [begin_lsn, end_lsn)."""

    number: int
    begin_lsn: int
    end_lsn: int
    whole: bool
    """True if it is full, by the file's name."""
    path: Path


def first_headers(
    start_lsn: int, magic: int, system_id: int, segment_bytes: int = SEGMENT_BYTES
) -> list[tuple[int, bytes]]:
    """Return (offset in the segment, bytes) of the page headers that a log which begins at
    `start_lsn` needs in its first segment: that of its first page, and that of the page of
    `start_lsn`."""
    begin = start_lsn - start_lsn % segment_bytes
    page = start_lsn - start_lsn % PAGE_BYTES
    made = []
    for address in sorted({begin, page}):
        first = address == begin
        length = LONG_HEADER_BYTES if first else SHORT_HEADER_BYTES
        # This page pretends that a record ends at `start_lsn`, so that readers of the file begin
        # there.
        to_come = max(0, start_lsn - page - length) if address == page else 0
        info = (LONG if first else 0) | (CONTINUED if to_come else 0)
        data = _HEADER.pack(magic, info, PG_TIMELINE, address, to_come)
        if first:
            data += _LONG.pack(system_id, segment_bytes, PAGE_BYTES)
        made.append((address - begin, data))
    return made


class SegmentFiles:
    """The files of one folder, by the numbers of their segments."""

    def __init__(self, folder: Path, files: FileSystem, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self._files = files
        self._making = threading.Lock()
        self._spare: OpenFile | None = None
        """A prepared segment, whole and on disk, under `NEW_NAME`."""
        self._closed = False

    def all(self) -> list[LogSegment]:
        """Return the segments, by number ascending."""
        found = {}
        for name in self._files.names(self.folder):
            with contextlib.suppress(InvalidUsage):
                number, whole = parse_segment_name(name, self.segment_bytes)
                if name != segment_name(number, self.segment_bytes) + ("" if whole else PARTIAL):
                    continue  # of another timeline of PostgreSQL's
                begin = number * self.segment_bytes
                end = begin + self.segment_bytes
                found[name] = LogSegment(number, begin, end, whole, self.folder / name)
        return sorted(found.values(), key=lambda each: (each.number, each.whole))

    def path(self, number: int, *, whole: bool) -> Path:
        """Return the path of a segment while it is full, or not."""
        name = segment_name(number, self.segment_bytes)
        return self.folder / (name if whole else name + PARTIAL)

    def open(self, number: int) -> tuple[OpenFile, bool]:
        """Return (file, whole by its name). Raises `FileNotFoundError`."""
        # The file may be renamed meanwhile: partial, whole, and partial again when it is cut off.
        for whole in (False, True):
            with contextlib.suppress(FileNotFoundError):
                return self._files.open(self.path(number, whole=whole)), whole
        return self._files.open(self.path(number, whole=False)), False

    def create(self, number: int) -> OpenFile:
        """Create an empty segment of its whole length; durable when this returns."""
        with self._making:
            file, self._spare = self._spare or self._made(), None
            try:
                self._files.rename(self.folder / NEW_NAME, self.path(number, whole=False))
                self._files.sync_folder(self.folder)
            except BaseException:
                file.close()
                raise
        return file

    def _made(self) -> OpenFile:
        file = self._files.create(self.folder / NEW_NAME)
        try:
            # Zeros first, the name later: a segment with a name has its whole length, writes never
            # change it, and `sync_data` is enough for them.
            file.set_length(self.segment_bytes)
            file.sync()
        except BaseException:
            file.close()
            raise
        return file

    @property
    def prepared(self) -> bool:
        """Return whether `create` finds a prepared segment."""
        return self._spare is not None

    def prepare(self) -> None:
        """Prepare the segment that the next `create` returns, unless there is one: its zeros take a
        while. May run beside anything else."""
        with self._making:
            if self._spare is None and not self._closed:
                self._spare = self._made()

    def close(self) -> None:
        """Close the prepared segment; no other is prepared afterwards."""
        with self._making:
            self._closed = True
            if self._spare is not None:
                self._spare.close()
                self._spare = None

    def finish(self, number: int) -> None:
        """Give a segment that is full and flushed its final name."""
        # Not synced: the content of a segment counts, not its name.
        self._files.rename(self.path(number, whole=False), self.path(number, whole=True))

    def cut_off(self, number: int, offset: int) -> None:
        """Replace all from `offset` on by zeros, durably, and name the segment as one that is not
        full."""
        file, whole = self.open(number)
        try:
            # First shorter, then longer: the file never has other bytes after `offset` than before
            # the cut.
            file.set_length(offset)
            file.set_length(self.segment_bytes)
            file.sync()
        finally:
            file.close()
        if whole:
            self._files.rename(self.path(number, whole=True), self.path(number, whole=False))
            self._files.sync_folder(self.folder)

    def remove(self, segment: LogSegment) -> None:
        """Remove a segment; durable after `sync_names`."""
        self._files.remove(segment.path)

    def sync_names(self) -> None:
        """Make the folder's names durable."""
        self._files.sync_folder(self.folder)
