"""Cuts a read into tasks, and divides its rows into those that must be summed and others. Pure.

A row's diffs may lie in several parts: an insert in one, its deletion in another. Only their sum
says whether the row is there, so a task that gives out such a row must have seen all of them. But
a row of which **no** diff is negative needs no sum: each part's updates of it can be given out
where they are read. So the rows are divided by their hash:

- *suspects*: rows whose hash is that of some negative update. A `SuspectHashes` is a bitmap of
  the hashes' low bits, of a fixed size however many there are: it may take an innocent row for a
  suspect, never the reverse.
- A *direct* task reads its parts once and gives out all rows but suspects. It holds one part.
- A *summing* task reads all parts, keeps the suspects of its share (by the hashes' high bits),
  sums them, and gives out the sums. There are as many as it takes for each to keep no more than
  `sum_rows_max` rows, as far as can be estimated.

Without any part that may retract there are only direct tasks; with few rows one summing task does
it all, and nothing is read to plan. Both kinds together give out each row exactly once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from actors.durable.persist.shard import BatchPart

_BITS: Final = 23
"""A bitmap has 2**23 bits: 1 MiB, less when it is compressed."""
TASKS_MAX: Final = 256


class SuspectHashes:
    """Hashes of rows that must be summed."""

    def __init__(self) -> None:
        self._bits = np.zeros(1 << (_BITS - 3), np.uint8)

    def add(self, hashes: Any) -> None:
        """Add uint64 hashes."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        marks = np.left_shift(np.uint8(1), (low & np.uint64(7)).astype(np.uint8))
        # By `at`, since several hashes may fall into one byte.
        np.bitwise_or.at(self._bits, (low >> np.uint64(3)).astype(np.int64), marks)

    def has(self, hashes: Any) -> Any:
        """Return a bool for each hash; never False for one that was added."""
        low = hashes & np.uint64((1 << _BITS) - 1)
        found = self._bits[(low >> np.uint64(3)).astype(np.int64)]
        return (found >> (low & np.uint64(7)).astype(np.uint8)) & np.uint8(1) == 1

    def share(self) -> float:
        """Return the share of all rows that are taken for suspects if their hashes are spread
        evenly."""
        return float(np.unpackbits(self._bits).mean())

    def packed(self) -> bytes:
        """Return the bitmap, compressed, to be sent to tasks."""
        return zlib.compress(self._bits.tobytes(), 1)

    @staticmethod
    def unpacked(data: bytes) -> SuspectHashes:
        """Return the bitmap that `packed` packed."""
        made = SuspectHashes()
        made._bits = np.frombuffer(zlib.decompress(data), np.uint8)
        return made


class ReadTask(msgspec.Struct, frozen=True):
    """The read of one task. `share` (number, of how many): it sums the suspects of that share;
    None: it gives out rows that are no suspects. `suspects` is None: with a share every row is one,
    without a share none is."""

    parts: tuple[BatchPart, ...]
    share: tuple[int, int] | None = None
    suspects: bytes | None = None


def grouped(parts: Sequence[BatchPart], bytes_max: int) -> list[tuple[BatchPart, ...]]:
    """Return adjacent parts together as long as they are small; no more groups than tasks may
    be."""
    total = sum(part.bytes for part in parts)
    # The other half of the tasks is left to those that sum.
    most = max(bytes_max, -(-total // (TASKS_MAX // 2)))
    groups: list[list[BatchPart]] = []
    held = 0
    for part in parts:
        if not groups or held + part.bytes > most:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += part.bytes
    while len(groups) > TASKS_MAX // 2:  # many parts just over the half: pairs of them
        pairs = zip(groups[::2], [*groups[1::2], []], strict=False)
        groups = [one + other for one, other in pairs]
    return [tuple(group) for group in groups]


def direct(parts: Sequence[BatchPart], bytes_max: int) -> list[ReadTask]:
    """Return the tasks for parts without a negative diff."""
    return [ReadTask(group) for group in grouped(parts, bytes_max)]


def summing(parts: Sequence[BatchPart]) -> list[ReadTask]:
    """Return one task, which sums all parts."""
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
