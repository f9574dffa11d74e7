"""Stashes results that are too large for a response in the blob store, piece by piece.

Theory of operation. A result is a sequence of `ResultPiece`s, each an Arrow IPC stream of about
the size of a response. If there is only one it is the answer itself (`PeekRows`); else each goes
into a blob before the next is computed, and the answer names the blobs (`PeekStashed`). So a
worker holds one piece, whatever the result.

The reader of a stashed result removes it. Blobs still there `orphan_ms` after they were written
(`collect`) are orphans: the reader is gone, or another worker failed. A process removes at its
start the blobs of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from actors.durable.persist.stashed import StashedBlobs
from actors.model.plan.updates import ResultPiece
from actors.model.protocol.compute import PeekError, PeekRows, PeekStashed, StashPart
from actors.runtime.kernel import ActorClock
from actors.runtime.threshold_probes import INLINE_ANSWER

AGAIN_MS = 60_000
"""Delay before the blobs of a cancelled peek are removed a second time."""


class PeekStash:
    """Stash of one worker."""

    def __init__(self, blobs: StashedBlobs, clock: ActorClock, writer: str, orphan_ms: int) -> None:
        """Create the stash; `writer` is unique among the workers of this process."""
        self._blobs = blobs
        self._clock = clock
        self._writer = writer
        self._orphan_ms = orphan_ms
        self._count = 0
        self._due: dict[str, float] = {}
        """Monotonic time at which to remove each blob."""
        self.bytes_written = 0

    def __len__(self) -> int:
        return len(self._due)

    async def answer(
        self, found: Iterator[ResultPiece], bytes_max: int
    ) -> PeekRows | PeekStashed | PeekError:
        """Consume all pieces and return the answer. Raise their errors, `StoreFull` and
        `StorageError`."""
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
                # Not due while it is written: a removal before the write would leave it for ever.
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
        """Remove blobs that are due."""
        now = self._clock.monotonic_ms()
        due = [key for key, when in self._due.items() if when <= now]
        left = set(await self._blobs.delete(due))
        for key in due:
            if key in left:
                continue
            if self._due[key] == 0.0:
                # Once more later: a write of a cancelled peek may end after its peek.
                self._due[key] = now + AGAIN_MS
            else:
                del self._due[key]

    @property
    def collects(self) -> bool:
        """Return whether any blob is due."""
        now = self._clock.monotonic_ms()
        return any(when <= now for when in self._due.values())


def row_too_large(bytes_max: int) -> PeekError:
    """Return the refusal of a row that is larger than a response."""
    text = f"a row takes more than result_bytes_max ({bytes_max}): leave out its large columns"
    return PeekError("InvalidUsage", text, "bytes")
