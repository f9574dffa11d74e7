"""Runs a one-shot ingestion: reads files once and stages their rows as parts that are not appended
yet.

Theory of operation. Pieces come from a `OneshotCopy` and accumulate until they make up a part,
which is written while the next piece is read. When everything has been read and no file has changed
meanwhile, the parts are offered for an append, and the owner is told about them once
(`OneshotEnded`).

Rules:
- Memory is bounded: about `source_inflight_bytes_max` and one piece accumulate, and as much again
  is being written. A copy has at most `copy_parts_max` parts.
- The parts belong to the task until its owner has been told; on failure or stop they are deleted.
- A copy fails as a whole. The error names the file.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Protocol, TypeAlias, assert_never

import anyio
import msgspec
import pyarrow as pa

from actors.connectors.sources.file_reading import MalformedFile
from actors.connectors.sources.oneshot import FilesProgress
from actors.connectors.sources.source import SourceUnreachable
from actors.durable.persist import BatchPart, PersistClient
from actors.model.protocol.storage import (
    FilesStaged,
    RunOneshotIngestion,
    StagedBatch,
    StagingFailed,
    StagingResult,
)
from actors.runtime.errors import InvalidUsage, PenstockError, StorageError, to_wire
from actors.runtime.kernel import Actor, ActorAddress
from actors.runtime.progress import ShardId
from actors.runtime.settings import Settings

PART_TIMEOUT_MS: Final = 60_000
"""Time after which a part that the store has not accepted fails its copy."""

log = logging.getLogger("penstock.ingest")


class OneshotReading(Protocol):
    """Reads files once. Implemented by `sources.oneshot.OneshotCopy`."""

    async def prepare(self) -> None:
        """Check everything that can be checked before rows are read. Raises `PenstockError`."""
        ...

    def pieces(self) -> AsyncGenerator[pa.Table, None]:
        """Yield the rows with `DIFF`. Raises `PenstockError`."""
        ...

    def progress(self) -> FilesProgress:
        """Return the number of files, bytes and rows read so far."""
        ...


def refuse_oneshot(oneshot: RunOneshotIngestion) -> OneshotReading:
    """Refuse every copy, in a service without connectors. Raises `InvalidUsage`."""
    raise InvalidUsage(f"this service cannot read copies of kind {oneshot.request.kind}")


class OneshotProgress(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: files, bytes and rows read, and rows already in parts."""

    number: int
    progress: FilesProgress
    rows_staged: int


class OneshotEnded(msgspec.Struct, frozen=True, gc=False):
    """Task → owner, sent once: the result. From here on the parts belong to the owner."""

    number: int
    result: StagingResult


class _Prepared(msgspec.Struct, frozen=True, gc=False):
    """All checks have passed; reading can start."""


class _Read(msgspec.Struct, frozen=True, gc=False):
    """The next piece was read; None after the last one."""

    piece: pa.Table | None


class _Wrote(msgspec.Struct, frozen=True, gc=False):
    """The accumulated rows were written as parts."""


class _Failed(msgspec.Struct, frozen=True, gc=False):
    """An effect has failed."""

    error: Exception


_Message: TypeAlias = _Prepared | _Read | _Wrote | _Failed


class OneshotTask(Actor[_Message]):
    """Sends `OneshotProgress` messages and one `OneshotEnded` to `owner`, each with `number`."""

    def __init__(
        self,
        number: int,
        shard: ShardId,
        make: Callable[[], OneshotReading],
        persist: PersistClient,
        owner: ActorAddress[Any],
        settings: Settings,
    ) -> None:
        """Make a task. `make` makes the reader, and may raise `PenstockError`."""
        self._number = number
        self._shard = shard
        self._make = make
        self._persist = persist
        self._owner = owner
        self._settings = settings
        self._reading: OneshotReading | None = None
        self._pieces: AsyncGenerator[pa.Table, None] | None = None
        """The generator of the rows; None until the files are checked."""
        self._gathered: list[pa.Table] = []
        """Rows that are not being written yet."""
        self._bytes = 0
        """Size of `_gathered`."""
        self._parts: list[BatchPart] = []
        """Parts written so far."""
        # A read and a write in progress; all rows read; the owner told about the result.
        self._asking = self._writing = self._exhausted = self._ended = False

    async def on_start(self) -> None:
        """Start listing and checking the files."""

        async def prepare() -> _Prepared:
            self._reading = self._make()
            await self._reading.prepare()
            self._pieces = self._reading.pieces()
            return _Prepared()

        self.ctx.effect(prepare, done=lambda done: done, failed=_Failed)

    async def on_stop(self) -> None:
        """Delete the parts that the owner was not told about."""
        with anyio.CancelScope(shield=True):
            if self._pieces is not None:
                await self._pieces.aclose()
            parts, self._parts = self._parts, []
            await self._persist.discard_parts(parts)

    async def receive(self, message: _Message) -> None:
        """Handle the result of an effect."""
        match message:
            case _Prepared():
                self._report_progress()
            case _Read(piece):
                self._asking = False
                self._take(piece)
            case _Wrote():
                self._writing = False
                self._report_progress()
            case _Failed(error):
                self._fail(error)
            case _:
                assert_never(message)
        if not self._ended:
            self._start_work()

    def _take(self, piece: pa.Table | None) -> None:
        if piece is None:
            self._exhausted = True
        elif piece.num_rows:
            self._gathered.append(piece)
            self._bytes += piece.nbytes

    def _start_work(self) -> None:
        """Start the next read and the next write, unless they are under way or must wait."""
        limit = self._settings.source_inflight_bytes_max
        if len(self._parts) > self._settings.copy_parts_max:
            self._fail(
                InvalidUsage(
                    f"too many parts in one copy (limit {self._settings.copy_parts_max}, "
                    "copy_parts_max): copy fewer files at a time"
                )
            )
            return
        if self._gathered and not self._writing and (self._bytes >= limit or self._exhausted):
            self._write()
        if self._pieces is None:
            return
        if not self._asking and not self._exhausted and self._bytes < limit:
            self._asking = True
            pieces = self._pieces
            self.ctx.effect(lambda: anext(pieces, None), done=_Read, failed=_Failed)
        if self._exhausted and not self._writing:
            self._end()

    def _write(self) -> None:
        rows = pa.concat_tables(self._gathered)
        self._gathered, self._bytes, self._writing = [], 0, True

        async def write() -> _Wrote:
            # Shielded: a thread that writes cannot be cancelled, and its parts would become
            # orphans.
            with anyio.move_on_after(PART_TIMEOUT_MS / 1000, shield=True):
                # Staged without a time. The append assigns one, so nothing has to be written again.
                self._parts += await self._persist.stage_parts(self._shard, rows)
                return _Wrote()
            raise StorageError(
                f"the store did not accept a part within {PART_TIMEOUT_MS} ms",
                determinate=True,
            )

        self.ctx.effect(write, done=lambda done: done, failed=_Failed)

    def _report_progress(self) -> None:
        assert self._reading is not None, "the files are being read"
        rows = sum(part.rows for part in self._parts)
        self._owner.reply(OneshotProgress(self._number, self._reading.progress(), rows))

    # -- the end -------------------------------------------------------------------------------

    def _end(self) -> None:
        self._ended = True
        assert self._reading is not None, "the files were read"
        far = self._reading.progress()
        parts, self._parts = self._parts, []
        # Offered before the owner is told. Parts that nobody appends in time become orphans.
        self._persist.offer_parts(parts)
        batches = tuple(
            StagedBatch(msgspec.msgpack.encode(part), part.rows, part.bytes) for part in parts
        )
        self._owner.reply(OneshotEnded(self._number, FilesStaged(batches, far.files, far.bytes)))
        self.ctx.stop()

    def _fail(self, error: Exception) -> None:
        if self._ended:
            return
        self._ended = True
        if not isinstance(error, PenstockError):
            log.error("a copy from files failed with an unexpected error", exc_info=error)
        code, text, _ = to_wire(error)
        if isinstance(error, MalformedFile):
            # The user must repair a malformed file; retrying this copy does not help.
            code = InvalidUsage.__name__
        if isinstance(error, SourceUnreachable) and error.hint:
            text = f"{text} ({error.hint})"
        self._owner.reply(OneshotEnded(self._number, StagingFailed(code, text)))
        self.ctx.stop()

    def describe(self) -> str:
        """Return the task's state for display."""
        if self._reading is None:
            return "checking the files to read"
        far = self._reading.progress()
        return (
            f"{far.files_done} of {far.files} files and {far.rows} rows read; {len(self._parts)} "
            f"parts; {'writing one' if self._writing else 'reading'}"
        )
