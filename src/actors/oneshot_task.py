"""The oneshot task: reads files once and stages their rows as parts that nothing names yet.

Theory of operation. Pieces come from a `OneshotCopy`; they gather until they make a part, which is
written while the next piece is read. Parts are written without a time: whoever appends them says
at which (`persist.shard.placed`), so nothing here needs to know when that will be, and nothing is
written twice. When all is read and no file has changed meanwhile, the parts are offered to whoever
claims them, and the owner is told of them (`OneshotEnded`), once.

Rules and invariants:
- memory is bounded: what gathers is at most about `source_inflight_bytes_max` and one piece, and
  as much is being written; parts are at most `copy_parts_max`;
- until it has told its owner, the parts are its own: when it fails or is stopped, they go;
- it fails whole: the error names the file, and is told in place of the parts.

It appends nothing, and knows no times and no keys.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeAlias, assert_never

import anyio
import msgspec
import pyarrow as pa

from actors.errors import InvalidUsage, PenstockError, StorageError, to_wire
from actors.kernel import Actor, Address
from actors.persist import Part, PersistClient
from actors.progress import ShardId
from actors.protocol.storage import (
    RunOneshotIngestion,
    Staged,
    StagedBatch,
    StagingFailed,
    StagingResult,
)
from actors.settings import Settings
from actors.sources.file_reading import Malformed
from actors.sources.oneshot import CopyProgress
from actors.sources.source import Unreachable

log = logging.getLogger("penstock.ingest")


class OneshotReading(Protocol):
    """Something outside that is read once; see `sources.oneshot.OneshotCopy`."""

    async def prepare(self) -> None:
        """Checks what can be checked. Raises `PenstockError`."""
        ...

    def pieces(self) -> AsyncGenerator[pa.Table, None]:
        """The rows, with `DIFF`. Raises `PenstockError`."""
        ...

    def progress(self) -> CopyProgress:
        """How far it is."""
        ...


def nothing_once(oneshot: RunOneshotIngestion) -> OneshotReading:
    """Where nothing can be read once. Raises `InvalidUsage`."""
    raise InvalidUsage(f"nothing of kind {oneshot.request.kind} can be read here")


class OneshotProgress(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: so much was read, and so many rows are in parts."""

    number: int
    progress: CopyProgress
    rows_staged: int


class OneshotEnded(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: the end, once. The parts are the owner's."""

    number: int
    result: StagingResult


class _Prepared(msgspec.Struct, frozen=True, gc=False):
    """What can be checked is right."""


class _Read(msgspec.Struct, frozen=True, gc=False):
    """The next piece; None: that was all."""

    piece: pa.Table | None


class _Wrote(msgspec.Struct, frozen=True, gc=False):
    """What was to be written is among the parts."""


class _Failed(msgspec.Struct, frozen=True, gc=False):
    error: Exception


_Message: TypeAlias = _Prepared | _Read | _Wrote | _Failed


class OneshotTask(Actor[_Message]):
    """Messages: `OneshotProgress` and one `OneshotEnded` to `owner`, each with `number`."""

    def __init__(
        self,
        number: int,
        shard: ShardId,
        make: Callable[[], OneshotReading],
        persist: PersistClient,
        owner: Address[Any],
        settings: Settings,
    ) -> None:
        """`make` may raise `PenstockError`."""
        self._number = number
        self._shard = shard
        self._make = make
        self._persist = persist
        self._owner = owner
        self._settings = settings
        self._reading: OneshotReading | None = None
        self._pieces: AsyncGenerator[pa.Table, None] | None = None
        self._gathered: list[pa.Table] = []
        self._bytes = 0
        self._parts: list[Part] = []
        self._asking = self._writing = self._exhausted = self._ended = False

    async def on_start(self) -> None:
        """Looks at what there is to read."""

        async def prepare() -> _Prepared:
            self._reading = self._make()
            await self._reading.prepare()
            self._pieces = self._reading.pieces()
            return _Prepared()

        self.ctx.effect(prepare, done=lambda done: done, failed=_Failed)

    async def on_stop(self) -> None:
        """What nobody was told of goes."""
        with anyio.CancelScope(shield=True):
            if self._pieces is not None:
                await self._pieces.aclose()
            parts, self._parts = self._parts, []
            await self._persist.discard_parts(parts)

    async def receive(self, message: _Message) -> None:
        """Handles what an effect brought."""
        match message:
            case _Prepared():
                self._tell()
            case _Read(piece):
                self._asking = False
                self._take(piece)
            case _Wrote():
                self._writing = False
                self._tell()
            case _Failed(error):
                self._fail(error)
            case _:
                assert_never(message)
        if not self._ended:
            self._go_on()

    def _take(self, piece: pa.Table | None) -> None:
        if piece is None:
            self._exhausted = True
        elif piece.num_rows:
            self._gathered.append(piece)
            self._bytes += piece.nbytes

    def _go_on(self) -> None:
        """Starts whatever may be under way and is not."""
        limit = self._settings.source_inflight_bytes_max
        if len(self._parts) > self._settings.copy_parts_max:
            self._fail(
                InvalidUsage(
                    f"the copy makes more than {self._settings.copy_parts_max} parts"
                    " (copy_parts_max): copy fewer files at a time"
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
        limit_ms = self._settings.copy_part_timeout_ms

        async def write() -> _Wrote:
            # What is being stopped waits for it: a thread that writes cannot be called back, and
            # what it makes would be nobody's.
            with anyio.move_on_after(limit_ms / 1000, shield=True):
                self._parts += await self._persist.stage_parts(self._shard, rows)
                return _Wrote()
            raise StorageError(
                f"the store has not taken a part within {limit_ms} ms (copy_part_timeout_ms)",
                determinate=True,
            )

        self.ctx.effect(write, done=lambda done: done, failed=_Failed)

    def _tell(self) -> None:
        assert self._reading is not None, "it is being read"
        rows = sum(part.rows for part in self._parts)
        self._owner.reply(OneshotProgress(self._number, self._reading.progress(), rows))

    # -- the end -------------------------------------------------------------------------------

    def _end(self) -> None:
        self._ended = True
        assert self._reading is not None, "it was read"
        far = self._reading.progress()
        parts, self._parts = self._parts, []
        self._persist.offer_parts(parts)
        batches = tuple(
            StagedBatch(msgspec.msgpack.encode(part), part.rows, part.bytes) for part in parts
        )
        self._owner.reply(OneshotEnded(self._number, Staged(batches, far.files, far.bytes)))
        self.ctx.stop()

    def _fail(self, error: Exception) -> None:
        if self._ended:
            return
        self._ended = True
        if not isinstance(error, PenstockError):
            log.error("a copy from files failed by a fault of ours", exc_info=error)
        code, text, _ = to_wire(error)
        if isinstance(error, Malformed):
            code = InvalidUsage.__name__
        if isinstance(error, Unreachable) and error.hint:
            text = f"{text} ({error.hint})"
        self._owner.reply(OneshotEnded(self._number, StagingFailed(code, text)))
        self.ctx.stop()

    def describe(self) -> str:
        """Where it stands."""
        if self._reading is None:
            return "looks at what there is to read"
        far = self._reading.progress()
        return (
            f"{far.files_done} of {far.files} files, {far.rows} rows read; {len(self._parts)}"
            f" parts; {'writes one' if self._writing else 'reads'}"
        )
