"""A log on disk: appended to, flushed, truncated and read. Opening it finds its end.

``flush_lsn <= write_lsn`` and ``flush_record_lsn <= write_record_lsn``. A record position is at
most the corresponding byte position, except for padding, and after a switch of segments, when it is
the start of the next segment although the bytes in between have not arrived (they are zeros, which
the file already has). All are 0 while the log is empty.

After an error of the disk the log is *broken*: everything except reading is refused until it is
opened again, when `recover` finds its end. Not thread-safe, except for `read` and `prepare`: these
use files of their own and may run concurrently with one other call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, WalRemoved, storage_error
from actors.wal.acceptor_stores import ControlState
from actors.wal.files import FileSystem, OpenFile, OperatingSystemFiles
from actors.wal.lsn import INVALID, SEGMENT_BYTES, lsn_text
from actors.wal.records import MAGICS, BadRecord, RecordScanner
from actors.wal.segments import LogSegment, SegmentFiles, first_headers

# -- recovery --------------------------------------------------------------------------------------

PIECE_BYTES: Final = 1 << 20
"""Number of bytes read at a time."""


class RecoveredLog(msgspec.Struct, frozen=True):
    """The end of a log, and the reason why it ends there."""

    end_lsn: int
    bad: BadRecord | None
    """None if the log ends with its last file."""


def recover(segments: SegmentFiles, commit_lsn: int, pg_version: int) -> RecoveredLog:
    """Return the end of the log, which is durable when this returns.

    A record starts at the control file's ``commit_lsn``, and everything before it is on disk.
    Writing later bytes may have been interrupted anywhere: the log ends at the first record that is
    not complete and correct, and what follows was never acknowledged (or was truncated). Raise
    `CorruptData` if committed bytes are missing, and `OSError`.
    """
    scanner = RecordScanner(commit_lsn, pg_version=pg_version, segment_bytes=segments.segment_bytes)
    size = segments.segment_bytes
    number = commit_lsn // size
    bad = None
    while bad is None:
        begin = max(commit_lsn, number * size)
        try:
            file, _ = segments.open(number)
        except FileNotFoundError:
            if number == commit_lsn // size and commit_lsn % size:
                raise CorruptData(
                    f"the segment of {lsn_text(commit_lsn)}, the end of the committed log, is"
                    f" not in {segments.folder}: restore it, or remove the timeline and let its"
                    " peers fill it again",
                    determinate=True,
                ) from None
            break
        try:
            while begin < (number + 1) * size and bad is None:
                piece = file.read_at(begin % size, min(PIECE_BYTES, (number + 1) * size - begin))
                # A crash inside `SegmentFiles.cut_off` leaves a file shorter than a segment.
                if not piece:
                    bad = BadRecord(begin, scanner.record_lsn, "the file ends")
                else:
                    bad = _feed(scanner, piece)
                    begin += len(piece)
        finally:
            file.close()
        number += 1
    end_lsn = bad.record_lsn if bad else scanner.record_lsn
    # A process that died, or whose flush failed, leaves bytes that can be read but are not on disk:
    # the operating system may have dropped them and report the next flush as successful. Only the
    # last segment can have such bytes, because each other one was flushed before the next was
    # created.
    _rewrite(segments, max(commit_lsn, (end_lsn - 1) // size * size), end_lsn)
    return RecoveredLog(end_lsn, bad)


def _feed(scanner: RecordScanner, piece: bytes) -> BadRecord | None:
    try:
        scanner.feed(piece)
    except CorruptData:
        return scanner.bad
    return None


def _rewrite(segments: SegmentFiles, begin_lsn: int, end_lsn: int) -> None:
    """Write the bytes [begin_lsn, end_lsn) of one segment again, and flush them."""
    size = segments.segment_bytes
    try:
        file, _ = segments.open((end_lsn - 1) // size)
    except FileNotFoundError:
        return  # removed below the horizon: committed, and no longer needed
    try:
        for at in range(begin_lsn, end_lsn, PIECE_BYTES):
            piece = file.read_at(at % size, min(PIECE_BYTES, end_lsn - at))
            file.write_at(at % size, piece)
        file.sync()
    finally:
        file.close()
    segments.sync_names()


# -- the log ---------------------------------------------------------------------------------------


class FileWal:
    """The log of one folder: an `acceptor_stores.WalStore`. Create it with `open`."""

    def __init__(self, segments: SegmentFiles, state: ControlState, end_lsn: int) -> None:
        self._segments = segments
        self._bytes = segments.segment_bytes
        self._pg_version = state.pg_version
        self._system_id = state.system_id
        self._scanner = self._scanner_at(end_lsn)
        """Scans the written bytes; its position is `write_lsn`."""
        self._write_lsn = self._write_record_lsn = end_lsn
        """LSN after the last byte, and after the last complete record, that was written."""
        self._flush_lsn = self._flush_record_lsn = end_lsn
        """The same for what is on disk."""
        self._file: OpenFile | None = None
        """Open file of the segment at `write_lsn`; None before the first write to it."""
        self._broken = ""
        """Error text once the log must be opened again, or ""."""
        self.pending_truncation = True
        """True while writes are refused, because bytes after the end that was found must first be
        truncated."""

    @classmethod
    def open(
        cls,
        folder: Path,
        state: ControlState,
        files: FileSystem | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> FileWal:
        """Open the log of a folder, up to its last complete record, which is on disk when this
        returns.

        Only segments of 16 MiB can be read (`segment_bytes` is for tests). Raise `InvalidUsage` for
        others, `CorruptData` if committed bytes are missing, and `StorageError`.
        """
        if state.segment_bytes not in (0, segment_bytes):
            raise InvalidUsage(
                f"unsupported segment size {state.segment_bytes}: expected {segment_bytes}"
            )
        segments = SegmentFiles(folder, files or OperatingSystemFiles(), segment_bytes)
        end_lsn = INVALID
        if state.commit_lsn:
            try:
                end_lsn = recover(segments, state.commit_lsn, state.pg_version).end_lsn
            except OSError as error:
                raise storage_error(f"recover the log of {folder}", error) from error
        return cls(segments, state, end_lsn)

    @property
    def write_lsn(self) -> int:
        """Return the LSN after the last byte written; 0 for an empty log."""
        return self._write_lsn

    @property
    def write_record_lsn(self) -> int:
        """Return the LSN after the last complete record written."""
        return self._write_record_lsn

    @property
    def flush_lsn(self) -> int:
        """Return the LSN after the last byte on disk."""
        return self._flush_lsn

    @property
    def flush_record_lsn(self) -> int:
        """Return the LSN after the last complete record on disk."""
        return self._flush_record_lsn

    def initialize(self, start_lsn: int) -> None:
        """Create the first segment of an empty log; see `acceptor_stores.WalStore.initialize`.

        Removes what an earlier attempt has left.
        """
        self._check_usable()
        if self._write_lsn:
            raise InvalidUsage(
                f"the log is not empty: it ends at {lsn_text(self._write_lsn)} and cannot start at"
                f" {lsn_text(start_lsn)}"
            )
        number = start_lsn // self._bytes
        magic = MAGICS[self._pg_version // 10_000] if self._pg_version else max(MAGICS.values())
        headers = first_headers(start_lsn, magic, self._system_id, self._bytes)
        self._at_disk("create the first segment of a log", start_lsn, self._begin, number, headers)

    def _begin(self, number: int, headers: Iterable[tuple[int, bytes]]) -> None:
        here = False
        for segment in self._segments.all():
            here = here or segment.number == number
            if segment.number != number:
                self._segments.remove(segment)
        file = self._segments.open(number)[0] if here else self._segments.create(number)
        try:
            for offset, header in headers:
                file.write_at(offset, header)
        finally:
            file.close()

    def write(self, begin_lsn: int, wal: bytes) -> None:
        """Append bytes; see `acceptor_stores.WalStore.write`. Bytes that are not records change
        nothing."""
        self._check_usable()
        if self.pending_truncation:
            raise InvalidUsage(
                "the log was opened but not truncated since: nothing may be written before a"
                " proposer is elected"
            )
        if begin_lsn != self._write_lsn:
            what = "rewrite the log" if begin_lsn < self._write_lsn else "leave a gap"
            raise InvalidUsage(
                f"WAL at {lsn_text(begin_lsn)} would {what}, which ends at"
                f" {lsn_text(self._write_lsn)}"
            )
        # Scan everything first, so that bytes that are not records are never written.
        for end, record_lsn in self._scanned(begin_lsn, wal):
            lsn = self._write_lsn
            part = wal[lsn - begin_lsn : end - begin_lsn]
            self._at_disk(f"write {len(part)} bytes of WAL", lsn, self._write_part, part)
            self._write_lsn, self._write_record_lsn = end, record_lsn
            # `_write_part` has flushed the full segment, so at most one segment has bytes that are
            # not on disk.
            if end % self._bytes == 0:
                self._flush_lsn, self._flush_record_lsn = end, record_lsn

    def _scanned(self, begin_lsn: int, wal: bytes) -> list[tuple[int, int]]:
        """Return (end, last complete record before it) for the parts of a piece, cut at the ends of
        segments."""
        before = self._scanner.saved()
        found, at = [], begin_lsn
        while at < begin_lsn + len(wal):
            end = min(begin_lsn + len(wal), at - at % self._bytes + self._bytes)
            try:
                self._scanner.feed(wal[at - begin_lsn : end - begin_lsn])
            except BaseException:
                self._scanner.restore(before)
                raise
            found.append((end, self._scanner.record_lsn))
            at = end
        return found

    def _write_part(self, part: bytes) -> None:
        number, offset = divmod(self._write_lsn, self._bytes)
        if self._file is None:
            # The first byte of a segment creates its file; any other continues an existing file.
            self._file = self._segments.open(number)[0] if offset else self._segments.create(number)
        self._file.write_at(offset, part)
        if offset + len(part) == self._bytes:
            self._file.sync_data()
            self._close()
            self._segments.finish(number)

    def flush(self) -> None:
        """Make the written bytes durable; see `acceptor_stores.WalStore.flush`."""
        self._check_usable()
        if self._flush_record_lsn == self._write_record_lsn:
            return
        if self._file is not None:
            self._at_disk("flush the log", self._write_record_lsn, self._file.sync_data)
        self._flush_lsn, self._flush_record_lsn = self._write_lsn, self._write_record_lsn

    def truncate(self, end_lsn: int) -> None:
        """Remove everything from `end_lsn` on; see `acceptor_stores.WalStore.truncate`."""
        self._check_usable()
        if self._write_record_lsn and end_lsn > self._write_record_lsn:
            raise InvalidUsage(
                f"cannot truncate the log at {lsn_text(end_lsn)}: it ends at"
                f" {lsn_text(self._write_record_lsn)}"
            )
        if not self.pending_truncation and end_lsn == self._write_lsn == self._flush_record_lsn:
            return
        # If the cut fails halfway this stays set, and nothing is written after a partial cut.
        self.pending_truncation = True
        self._at_disk("truncate the log", end_lsn, self._cut, end_lsn)
        self._write_lsn = self._write_record_lsn = end_lsn
        self._flush_lsn = self._flush_record_lsn = end_lsn
        self._scanner = self._scanner_at(end_lsn)
        self.pending_truncation = False

    def _cut(self, end_lsn: int) -> None:
        if self._file is not None:
            self._file.sync()
            self._close()
        number, offset = divmod(end_lsn, self._bytes)
        # Make this cut durable first: from then on recovery ends here, whatever later segments
        # contain.
        if offset:
            self._segments.cut_off(number, offset)
            number += 1
        found = self._segments.all()
        # Remove the first of the later segments first: recovery cannot get past a missing one.
        for segment in found:
            if segment.number == number:
                self._segments.remove(segment)
                self._segments.sync_names()
            elif segment.number > number:
                self._segments.remove(segment)
            elif segment.number < end_lsn // self._bytes and not segment.whole:
                # The full segment precedes the end: a crash or a switch prevented its rename.
                self._finish(segment.number)
        self._segments.sync_names()

    def _finish(self, number: int) -> None:
        file, _ = self._segments.open(number)
        try:
            file.sync()
        finally:
            file.close()
        self._segments.finish(number)

    def read(self, begin_lsn: int, size: int) -> bytes:
        """Read ``[begin_lsn, begin_lsn + size)`` of what was written, up to the end of the last
        record.

        Raise `InvalidUsage` for bytes that were not written, `WalRemoved` for removed ones, and
        `StorageError`.
        """
        # Padding after the last record may not have arrived yet, but the file has zeros there in
        # any case.
        end_lsn = max(self._write_lsn, self._write_record_lsn)
        if size < 0 or begin_lsn + size > end_lsn:
            raise InvalidUsage(
                f"cannot read {size} bytes at {lsn_text(begin_lsn)}:"
                f" the log ends at {lsn_text(end_lsn)}"
            )
        pieces, at, end = [], begin_lsn, begin_lsn + size
        while at < end:
            number, offset = divmod(at, self._bytes)
            wanted = min(end - at, self._bytes - offset)
            try:
                file, _ = self._segments.open(number)
                try:
                    piece = file.read_at(offset, wanted)
                finally:
                    file.close()
            except FileNotFoundError:
                raise WalRemoved(
                    f"the log is no longer kept at {lsn_text(at)}: its segment was removed"
                ) from None
            except OSError as error:
                raise storage_error(f"read the log at {lsn_text(at)}", error) from error
            if len(piece) != wanted:
                raise StorageError(
                    f"expected {wanted} bytes of the log at {lsn_text(at)}, but found"
                    f" {len(piece)}: it is being truncated, or was changed by another process",
                    determinate=True,
                )
            pieces.append(piece)
            at += wanted
        return b"".join(pieces)

    def segments(self) -> list[LogSegment]:
        """Return the log's segments, oldest first. Raise `StorageError`."""
        try:
            found = self._segments.all()
        except OSError as error:
            raise storage_error(f"list {self._segments.folder}", error) from error
        return [each for each in found if each.begin_lsn < self._write_lsn]

    def remove_before(self, lsn: int) -> list[LogSegment]:
        """Remove the full segments that end at or before `lsn`, and return them. Raise
        `StorageError`."""
        self._check_usable()
        # Only up to the end of a record: an incomplete record is read again from its start when the
        # log is opened.
        horizon = min(lsn, self._flush_record_lsn)
        gone = [each for each in self.segments() if each.whole and each.end_lsn <= horizon]
        for segment in gone:
            try:
                # Not synced: segments that reappear after a crash are removed again later.
                self._segments.remove(segment)
            except OSError as error:
                raise storage_error(f"remove {segment.path}", error, determinate=False) from error
        return gone

    @property
    def wants_segment(self) -> bool:
        """Return whether the newest segment is half full and the next one has not been prepared
        yet."""
        within = self._write_lsn % self._bytes
        return 2 * within >= self._bytes and not self._segments.prepared and not self._broken

    def prepare(self) -> None:
        """Prepare the segment after the newest one. May run concurrently with other calls.

        Raise `StorageError`, which leaves the log unchanged.
        """
        try:
            self._segments.prepare()
        except OSError as error:
            raise storage_error("prepare a segment", error) from error

    def close(self) -> None:
        """Close the log without a flush. Only `read` works afterwards."""
        self._broken = self._broken or "the log was closed: open it again"
        self._segments.close()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _check_usable(self) -> None:
        if self._broken:
            raise StorageError(self._broken, determinate=True)

    def _scanner_at(self, lsn: int) -> RecordScanner:
        return RecordScanner(lsn, pg_version=self._pg_version, segment_bytes=self._bytes)

    def _at_disk(self, what: str, lsn: int, function: Callable[..., None], *given: object) -> None:
        """Make a call that changes the disk. An `OSError` breaks the log."""
        try:
            function(*given)
        except OSError as error:
            # A flush that is repeated after an error may succeed without having written anything.
            doing = f"{what} at {lsn_text(lsn)}"
            self._broken = f"could not {doing}, and the log must be opened again: {error}"
            raise storage_error(doing, error, determinate=False) from error
