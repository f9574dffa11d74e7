"""The segments of one log as files of one folder: named, made, filled, read, removed.

The newest has a name that ends with ``.partial`` until it is full; then it is flushed and renamed.
A new one is made under another name with its whole length in zeros, flushed, renamed, and the
folder flushed: so a segment that has a name has its length, writing never changes it, and
`sync_data` is enough. Names are not trusted for what is in a file: a crash may keep a full one
``.partial``. One may be made ahead of time (`prepare`); who opens the folder anew makes it again.

Calls raise `OSError`; `storage` knows what that means.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from actors.errors import InvalidUsage
from actors.wal.files import File, Files
from actors.wal.lsn import PAGE_BYTES, PARTIAL, SEGMENT_BYTES, parse_segment_name, segment_name
from actors.wal.records import CONTINUED, LONG, LONG_HEADER_BYTES, SHORT_HEADER_BYTES

NEW_NAME: Final = "waltmp"
"""Of a segment that has not got its length yet."""
PG_TIMELINE: Final = 1

_HEADER: Final = Struct("<HHIQI4x")
_LONG: Final = Struct("<QII")


class Segment(msgspec.Struct, frozen=True):
    """One file of a log: [begin_lsn, end_lsn)."""

    number: int
    begin_lsn: int
    end_lsn: int
    whole: bool
    """By its name."""
    path: Path


def first_headers(
    start_lsn: int, magic: int, system_id: int, segment_bytes: int = SEGMENT_BYTES
) -> list[tuple[int, bytes]]:
    """(offset in the segment, bytes) of the page headers that a log which begins at `start_lsn`
    needs in its first segment: those of its first page and of the page of `start_lsn`, which
    pretends that a record ends there, so that whoever reads the file begins at `start_lsn`."""
    begin = start_lsn - start_lsn % segment_bytes
    page = start_lsn - start_lsn % PAGE_BYTES
    made = []
    for address in sorted({begin, page}):
        first = address == begin
        length = LONG_HEADER_BYTES if first else SHORT_HEADER_BYTES
        to_come = max(0, start_lsn - page - length) if address == page else 0
        info = (LONG if first else 0) | (CONTINUED if to_come else 0)
        data = _HEADER.pack(magic, info, PG_TIMELINE, address, to_come)
        if first:
            data += _LONG.pack(system_id, segment_bytes, PAGE_BYTES)
        made.append((address - begin, data))
    return made


class SegmentFiles:
    """The files of one folder, by the numbers of their segments."""

    def __init__(self, folder: Path, files: Files, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self._files = files
        self._making = threading.Lock()
        self._spare: File | None = None
        """A new one, whole and on disk, under `NEW_NAME`."""
        self._closed = False

    def all(self) -> list[Segment]:
        """By number ascending; a number has one file."""
        found = {}
        for name in self._files.names(self.folder):
            with contextlib.suppress(InvalidUsage):
                number, whole = parse_segment_name(name, self.segment_bytes)
                if name != segment_name(number, self.segment_bytes) + ("" if whole else PARTIAL):
                    continue  # of another timeline of PostgreSQL's
                begin = number * self.segment_bytes
                end = begin + self.segment_bytes
                found[name] = Segment(number, begin, end, whole, self.folder / name)
        return sorted(found.values(), key=lambda each: (each.number, each.whole))

    def path(self, number: int, *, whole: bool) -> Path:
        """Where a segment is while it is full, or not."""
        name = segment_name(number, self.segment_bytes)
        return self.folder / (name if whole else name + PARTIAL)

    def open(self, number: int) -> tuple[File, bool]:
        """(file, whole by its name). Raises `FileNotFoundError`."""
        # It may be renamed while we look: partial, whole, and partial again where it was cut off.
        for whole in (False, True):
            with contextlib.suppress(FileNotFoundError):
                return self._files.open(self.path(number, whole=whole)), whole
        return self._files.open(self.path(number, whole=False)), False

    def create(self, number: int) -> File:
        """An empty one of its whole length, durably there when this returns."""
        with self._making:
            file, self._spare = self._spare or self._made(), None
            try:
                self._files.rename(self.folder / NEW_NAME, self.path(number, whole=False))
                self._files.sync_folder(self.folder)
            except BaseException:
                file.close()
                raise
        return file

    def _made(self) -> File:
        file = self._files.create(self.folder / NEW_NAME)
        try:
            file.set_length(self.segment_bytes)
            file.sync()
        except BaseException:
            file.close()
            raise
        return file

    @property
    def prepared(self) -> bool:
        """Whether `create` has nothing left to make."""
        return self._spare is not None

    def prepare(self) -> None:
        """Makes what the next `create` gives, unless there is one: its zeros take a while. May be
        called beside anything else."""
        with self._making:
            if self._spare is None and not self._closed:
                self._spare = self._made()

    def close(self) -> None:
        """Lets go of what was prepared; nothing is any more."""
        with self._making:
            self._closed = True
            if self._spare is not None:
                self._spare.close()
                self._spare = None

    def finish(self, number: int) -> None:
        """Gives a full one, that is flushed, its final name. The name need not be durable: what
        is in the file counts."""
        self._files.rename(self.path(number, whole=False), self.path(number, whole=True))

    def cut_off(self, number: int, offset: int) -> None:
        """Nothing but zeros from `offset` on, durably, and the name of one that is not full."""
        file, whole = self.open(number)
        try:
            # First shorter, then longer again: at no time is there a file with other bytes behind
            # `offset` than it had.
            file.set_length(offset)
            file.set_length(self.segment_bytes)
            file.sync()
        finally:
            file.close()
        if whole:
            self._files.rename(self.path(number, whole=True), self.path(number, whole=False))
            self._files.sync_folder(self.folder)

    def remove(self, segment: Segment) -> None:
        """Not durably: `sync_names` is."""
        self._files.remove(segment.path)

    def sync_names(self) -> None:
        """The folder's names are durable when this returns."""
        self._files.sync_folder(self.folder)
