"""The stash: results too large for a response go to the blob store, piece by piece.

Theory of operation. A result is made as a walk over `Piece`s, each an Arrow IPC stream of about
as many bytes as a response may hold. The first piece, if it is the only one, is the answer
itself (`PeekRows`); else each goes into a blob while nothing further is computed, and the answer
names the blobs (`PeekStashed`). So a worker holds one piece, whatever the result.

Rules. Whoever reads a stashed result removes it. What nobody removed goes `orphan_ms` after it
was written (`collect`): its reader is gone, or another worker failed. What is still being written
is left alone: what is removed before it is there would stay for ever. What was written for a peek
that was cancelled or failed goes at the next collection, and once more later, because a write
that was under way may end after its peek. A process removes at its start what earlier ones left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from actors.kernel import Clock
from actors.persist.stashed import StashedBlobs
from actors.plan.pieces import Piece
from actors.protocol.compute import PeekError, PeekRows, PeekStashed, StashPart
from actors.threshold_probes import INLINE_ANSWER

AGAIN_MS = 60_000
"""How long after a cancelled peek its blobs are removed a second time."""


class Stash:
    """One worker's."""

    def __init__(self, blobs: StashedBlobs, clock: Clock, writer: str, orphan_ms: int) -> None:
        """`writer` names the worker among all in this process."""
        self._blobs = blobs
        self._clock = clock
        self._writer = writer
        self._orphan_ms = orphan_ms
        self._count = 0
        self._due: dict[str, float] = {}
        """When a blob goes, on the monotonic clock; never, while it is being written."""
        self.bytes_written = 0

    def __len__(self) -> int:
        return len(self._due)

    async def answer(
        self, found: Iterator[Piece], bytes_max: int
    ) -> PeekRows | PeekStashed | PeekError:
        """Takes the walk to its end. Raises what it raises, `StoreFull` and `StorageError`."""
        parts: list[StashPart] = []
        clock = self._clock
        try:
            while True:
                piece = await clock.run_blocking(lambda: next(found))
                if not parts and not INLINE_ANSWER.crossed(not piece.last):
                    if len(piece.arrow) > bytes_max:
                        return row_too_large(bytes_max)
                    return PeekRows(piece.arrow, piece.rows)
                self._count += 1
                key = self._blobs.key(f"{self._writer}-{self._count:08x}")
                self._due[key] = math.inf
                parts.append(StashPart(key, piece.rows, len(piece.arrow)))
                await self._blobs.set(key, piece.arrow)
                self._due[key] = clock.monotonic_ms() + self._orphan_ms
                self.bytes_written += len(piece.arrow)
                if piece.last:
                    rows = sum(part.rows for part in parts)
                    return PeekStashed(tuple(parts), rows, sum(part.size_bytes for part in parts))
        except BaseException:
            for part in parts:
                self._due[part.key] = 0.0
            raise

    async def collect(self) -> None:
        """Removes what is due."""
        now = self._clock.monotonic_ms()
        due = [key for key, when in self._due.items() if when <= now]
        left = set(await self._blobs.delete(due))
        for key in due:
            if key in left:
                continue
            if self._due[key] == 0.0:
                self._due[key] = now + AGAIN_MS
            else:
                del self._due[key]

    @property
    def collects(self) -> bool:
        """Whether something is due."""
        now = self._clock.monotonic_ms()
        return any(when <= now for when in self._due.values())


def row_too_large(bytes_max: int) -> PeekError:
    """The refusal of what cannot be cut."""
    text = f"a row takes more than result_bytes_max ({bytes_max}): leave out its large columns"
    return PeekError("InvalidUsage", text, "bytes")
