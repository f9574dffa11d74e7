"""The segments of one log as files in one folder: named, created, filled, read, removed.

The name of the newest segment ends with ``.partial`` until it is full; then it is flushed and
renamed. A name proves nothing about the contents: after a crash a full segment may still be
``.partial``. Calls raise `OSError`, which `storage` handles.
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
"""Name of a segment that does not have its full length yet."""
PG_TIMELINE: Final = 1

_HEADER: Final = Struct("<HHIQI4x")
_LONG: Final = Struct("<QII")


class LogSegment(msgspec.Struct, frozen=True):
    """One file of a log: [begin_lsn, end_lsn)."""

    number: int
    begin_lsn: int
    end_lsn: int
    whole: bool
    """True if it is full, according to the file's name."""
    path: Path


def first_headers(
    start_lsn: int, magic: int, system_id: int, segment_bytes: int = SEGMENT_BYTES
) -> list[tuple[int, bytes]]:
    """Return the page headers that a log starting at `start_lsn` needs in its first segment.

    These are the headers of the segment's first page and of the page of `start_lsn`, as (offset in
    the segment, bytes).
    """
    begin = start_lsn - start_lsn % segment_bytes
    page = start_lsn - start_lsn % PAGE_BYTES
    made = []
    for address in sorted({begin, page}):
        first = address == begin
        length = LONG_HEADER_BYTES if first else SHORT_HEADER_BYTES
        # This page pretends that a record ends at `start_lsn`, so that readers of the file start
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
        """Held while a segment is created or prepared."""
        self._spare: OpenFile | None = None
        """A prepared segment, complete and on disk, under `NEW_NAME`."""
        self._closed = False
        """True once closed; no segment is prepared after that."""

    def all(self) -> list[LogSegment]:
        """Return the segments, ascending by number."""
        found = {}
        for name in self._files.names(self.folder):
            with contextlib.suppress(InvalidUsage):
                number, whole = parse_segment_name(name, self.segment_bytes)
                if name != segment_name(number, self.segment_bytes) + ("" if whole else PARTIAL):
                    continue  # of another of PostgreSQL's timelines
                begin = number * self.segment_bytes
                end = begin + self.segment_bytes
                found[name] = LogSegment(number, begin, end, whole, self.folder / name)
        return sorted(found.values(), key=lambda each: (each.number, each.whole))

    def path(self, number: int, *, whole: bool) -> Path:
        """Return the path of a segment, depending on whether it is full."""
        name = segment_name(number, self.segment_bytes)
        return self.folder / (name if whole else name + PARTIAL)

    def open(self, number: int) -> tuple[OpenFile, bool]:
        """Return (file, whether it is full according to its name). Raise `FileNotFoundError`."""
        # The file may be renamed meanwhile: partial, full, and partial again when it is truncated.
        for whole in (False, True):
            with contextlib.suppress(FileNotFoundError):
                return self._files.open(self.path(number, whole=whole)), whole
        return self._files.open(self.path(number, whole=False)), False

    def create(self, number: int) -> OpenFile:
        """Create an empty segment of full length. It is durable when this returns."""
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
            # Write the zeros first and rename later: a named segment has its full length, which
            # writes never change, so `sync_data` is enough for them.
            file.set_length(self.segment_bytes)
            file.sync()
        except BaseException:
            file.close()
            raise
        return file

    @property
    def prepared(self) -> bool:
        """Return whether a prepared segment is available for `create`."""
        return self._spare is not None

    def prepare(self) -> None:
        """Prepare the segment that the next `create` returns, unless there is one. Writing its
        zeros takes a while.

        May run concurrently with anything else.
        """
        with self._making:
            if self._spare is None and not self._closed:
                self._spare = self._made()

    def close(self) -> None:
        """Close the prepared segment. No other is prepared afterwards."""
        with self._making:
            self._closed = True
            if self._spare is not None:
                self._spare.close()
                self._spare = None

    def finish(self, number: int) -> None:
        """Give a segment that is full and flushed its final name."""
        # Not synced: the contents of a segment count, not its name.
        self._files.rename(self.path(number, whole=False), self.path(number, whole=True))

    def cut_off(self, number: int, offset: int) -> None:
        """Replace everything from `offset` on with zeros, durably, and name the segment as not
        full."""
        file, whole = self.open(number)
        try:
            # Shorten the file first and extend it again, so that after `offset` it never has other
            # bytes than before the cut.
            file.set_length(offset)
            file.set_length(self.segment_bytes)
            file.sync()
        finally:
            file.close()
        if whole:
            self._files.rename(self.path(number, whole=True), self.path(number, whole=False))
            self._files.sync_folder(self.folder)

    def remove(self, segment: LogSegment) -> None:
        """Remove a segment. This is durable after `sync_names`."""
        self._files.remove(segment.path)

    def sync_names(self) -> None:
        """Make the folder's names durable."""
        self._files.sync_folder(self.folder)
