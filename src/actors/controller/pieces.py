"""Batches that are too large for one answer: blobs, on their way to several subscribers. Pure.

A `Shelf` holds the blobs of one batch until each of its readers has had them or has left; then
they may be removed, one by one. A `Way` is one reader's way along it: piece after piece, of which
the last carries the upper of the whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import TIME
from actors.plan.updates import between, from_ipc, to_ipc
from actors.progress import Frontier


class Shelf:
    """The blobs of one batch, for so many readers."""

    def __init__(self, keys: Sequence[str], readers: int) -> None:
        self.keys = tuple(keys)
        self._wanted = Counter(dict.fromkeys(keys, readers))

    def take(self, keys: Sequence[str]) -> list[str]:
        """A reader needs these no more; those that nobody needs."""
        free = []
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                free.append(key)
        return free


class Way:
    """One reader's: updates with ``lower <= time < upper``."""

    def __init__(self, shelf: Shelf, lower: Frontier, upper: Frontier) -> None:
        self.shelf = shelf
        self.lower = lower
        self.upper = upper
        self._left = deque(shelf.keys)
        self.reading = False
        """A piece is being read."""
        self.attempts = 0
        """To read the present one, that failed."""

    @property
    def present(self) -> str:
        """The blob to be read now."""
        return self._left[0]

    @property
    def last(self) -> bool:
        """Whether none follows."""
        return len(self._left) == 1

    def passed(self) -> list[str]:
        """It was read; what may be removed."""
        self.reading, self.attempts = False, 0
        return self.shelf.take([self._left.popleft()])

    def abandoned(self) -> list[str]:
        """The reader has left; what may be removed."""
        left = list(self._left)
        self._left.clear()
        return self.shelf.take(left)

    def cut(self, arrow: bytes) -> bytes | None:
        """Of a piece, what is for this reader; None: nothing."""
        rows: pa.Table = from_ipc(arrow)
        if not rows.num_rows:
            return None
        times = pc.min_max(rows[TIME])
        if self.lower <= times["min"].as_py() and times["max"].as_py() < self.upper:
            return arrow
        kept = between(rows, self.lower, self.upper)
        return to_ipc(kept) if kept.num_rows else None
