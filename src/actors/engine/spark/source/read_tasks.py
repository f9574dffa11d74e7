"""Divides a read into tasks, and its rows into those that must be summed and all others. Pure.

The diffs of a row may be in several parts: an insertion in one, its deletion in another. Only their
sum tells whether the row exists, so a task that returns such a row must have seen all of them. But
a row **without** negative diffs needs no sum: each part's updates of it can be returned where they
are read. So the rows are divided by their hash:

- *suspects*: rows whose hash is that of some negative update. A `SuspectHashes` is a bitmap of
  the low bits of the hashes, of a fixed size however many there are. It may take an innocent row
  for a suspect, but never the reverse.
- A *direct* task reads its parts once and returns all rows except suspects. It keeps one part in
  memory.
- A *summing* task reads all parts, keeps the suspects of its share (by the high bits of their
  hashes), sums them, and returns the sums. There are as many such tasks as needed for each to
  keep at most `sum_rows_max` rows, as far as can be estimated.

If no part may contain retractions, there are only direct tasks. With few rows a single summing task
does everything, and nothing is read to plan. Together, both kinds return each row exactly once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from actors.durable.persist.shard import BatchPart

_BITS: Final = 23
"""A bitmap has 2**23 bits: 1 MiB, or less when compressed."""
TASKS_MAX: Final = 256


class SuspectHashes:
    """Hashes of rows that must be summed."""

    def __init__(self) -> None:
        # The bitmap, packed into bytes.
        self._bits = np.zeros(1 << (_BITS - 3), np.uint8)

    def add(self, hashes: Any) -> None:
        """Add uint64 hashes."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        marks = np.left_shift(np.uint8(1), (low & np.uint64(7)).astype(np.uint8))
        # With `at`, since several hashes may fall into the same byte.
        np.bitwise_or.at(self._bits, (low >> np.uint64(3)).astype(np.int64), marks)

    def has(self, hashes: Any) -> Any:
        """Return a bool for each hash, which is never False for one that was added."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        found = self._bits[(low >> np.uint64(3)).astype(np.int64)]
        return (found >> (low & np.uint64(7)).astype(np.uint8)) & np.uint8(1) == 1

    def share(self) -> float:
        """Return the share of all rows that count as suspects if their hashes are evenly
        distributed."""
        return float(np.unpackbits(self._bits).mean())

    def packed(self) -> bytes:
        """Return the bitmap in compressed form, for sending to tasks."""
        return zlib.compress(self._bits.tobytes(), 1)

    @staticmethod
    def unpacked(data: bytes) -> SuspectHashes:
        """Return the bitmap from the result of `packed`."""
        made = SuspectHashes()
        made._bits = np.frombuffer(zlib.decompress(data), np.uint8)
        return made


class ReadTask(msgspec.Struct, frozen=True):
    """The read of one task. `share` (number, count): it sums the suspects of this share; None: it
    returns the rows that are not suspects. `suspects` is None if, with a share, all rows are
    suspects, or, without a share, none are."""

    parts: tuple[BatchPart, ...]
    share: tuple[int, int] | None = None
    suspects: bytes | None = None


def grouped(parts: Sequence[BatchPart], bytes_max: int) -> list[tuple[BatchPart, ...]]:
    """Group adjacent parts as long as a group is small, into at most as many groups as there may be
    tasks."""
    total = sum(part.bytes for part in parts)
    # The other half of the tasks is reserved for those that sum.
    most = max(bytes_max, -(-total // (TASKS_MAX // 2)))
    groups: list[list[BatchPart]] = []
    held = 0
    for part in parts:
        if not groups or held + part.bytes > most:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += part.bytes
    # Many parts of just over half the size: group them in pairs.
    while len(groups) > TASKS_MAX // 2:
        pairs = zip(groups[::2], [*groups[1::2], []], strict=False)
        groups = [one + other for one, other in pairs]
    return [tuple(group) for group in groups]


def direct(parts: Sequence[BatchPart], bytes_max: int) -> list[ReadTask]:
    """Return the tasks for parts without a negative diff."""
    return [ReadTask(group) for group in grouped(parts, bytes_max)]


def summing(parts: Sequence[BatchPart]) -> list[ReadTask]:
    """Return a single task, which sums all parts."""
    return [ReadTask(tuple(parts), (0, 1))]


def divide_tasks(
    parts: Sequence[BatchPart], suspects: SuspectHashes, bytes_max: int, sum_rows_max: int
) -> list[ReadTask]:
    """Return direct tasks, and those that sum the suspects."""
    packed = suspects.packed()
    rows = sum(part.rows for part in parts)
    count = max(1, -(-int(rows * suspects.share()) // sum_rows_max))
    shares = min(count, TASKS_MAX // 2)
    tasks = [ReadTask(group, None, packed) for group in grouped(parts, bytes_max)]
    return tasks + [ReadTask(tuple(parts), (number, shares), packed) for number in range(shares)]
