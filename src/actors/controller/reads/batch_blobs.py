"""Batches that are too large for one answer: blobs in transfer to several subscribers. Pure.

A `BatchBlobs` holds the blobs of one batch until each of its readers has had them or has left. A
`BatchReader` is one reader's position in them: piece after piece, of which the last has the batch's
upper.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import TIME
from actors.plan.updates import between, from_ipc, to_ipc
from actors.progress import Frontier


class BatchBlobs:
    """The blobs of one batch, each with the number of readers that still need it."""

    def __init__(self, keys: Sequence[str], readers: int) -> None:
        self.keys = tuple(keys)
        self._wanted = Counter(dict.fromkeys(keys, readers))

    def take(self, keys: Sequence[str]) -> list[str]:
        """Release blobs for one reader. Return those that no reader needs any more."""
        free = []
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                free.append(key)
        return free


class BatchReader:
    """One reader's position: updates with ``lower <= time < upper``."""

    def __init__(self, shelf: BatchBlobs, lower: Frontier, upper: Frontier) -> None:
        self.shelf = shelf
        self.lower = lower
        self.upper = upper
        self._left = deque(shelf.keys)
        self.reading = False
        """True while a piece is being read."""
        self.attempts = 0
        """Number of failed attempts to read the present piece."""

    @property
    def present(self) -> str:
        """Return the key of the blob to read now."""
        return self._left[0]

    @property
    def last(self) -> bool:
        """Return whether the present piece is the last."""
        return len(self._left) == 1

    def passed(self) -> list[str]:
        """Advance to the next piece. Return the blobs that may be deleted."""
        self.reading, self.attempts = False, 0
        return self.shelf.take([self._left.popleft()])

    def abandoned(self) -> list[str]:
        """Release all remaining pieces, as the reader has left. Return the blobs that may be
        deleted."""
        left = list(self._left)
        self._left.clear()
        return self.shelf.take(left)

    def cut(self, arrow: bytes) -> bytes | None:
        """Return the updates of a piece that are for this reader; None if there are none."""
        rows: pa.Table = from_ipc(arrow)
        if not rows.num_rows:
            return None
        times = pc.min_max(rows[TIME])
        if self.lower <= times["min"].as_py() and times["max"].as_py() < self.upper:
            # All of it is for this reader: the same bytes, without a copy.
            return arrow
        kept = between(rows, self.lower, self.upper)
        return to_ipc(kept) if kept.num_rows else None
