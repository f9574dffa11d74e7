"""The newest part of a log, in memory: the bytes that a proposer may still have to send. Pure.

Invariants: the pieces are adjacent, ``begin_lsn == pieces[0].begin`` and ``end_lsn - begin_lsn ==
retained_bytes == sum of the pieces``; no piece is empty or longer than `piece_bytes_max`.
"""

from __future__ import annotations

import bisect

from actors.wal.messages import WAL_BYTES_MAX


class LogTail:
    """Holds [begin_lsn, end_lsn) of a log."""

    def __init__(self, begin_lsn: int, piece_bytes_max: int = WAL_BYTES_MAX) -> None:
        self.end_lsn = begin_lsn
        self._piece_bytes_max = piece_bytes_max
        self._begins: list[int] = []
        self._pieces: list[bytes] = []
        self._dropped = 0
        """Number of dropped pieces at the front of both lists."""

    @property
    def begin_lsn(self) -> int:
        return self._begins[self._dropped] if self._dropped < len(self._begins) else self.end_lsn

    @property
    def retained_bytes(self) -> int:
        return self.end_lsn - self.begin_lsn

    def append(self, wal: bytes) -> None:
        """Append bytes at `end_lsn`."""
        for at in range(0, len(wal), self._piece_bytes_max):
            piece = wal[at : at + self._piece_bytes_max]
            self._begins.append(self.end_lsn)
            self._pieces.append(piece)
            self.end_lsn += len(piece)

    def read(self, begin_lsn: int, bytes_max: int) -> bytes:
        """Return 1 to `bytes_max` bytes from `begin_lsn` on, which must be inside."""
        assert self.begin_lsn <= begin_lsn < self.end_lsn, (self.begin_lsn, begin_lsn, self.end_lsn)
        index = bisect.bisect_right(self._begins, begin_lsn, self._dropped) - 1
        skipped = begin_lsn - self._begins[index]
        first = self._pieces[index][skipped : skipped + bytes_max]
        if len(first) == bytes_max or index + 1 == len(self._pieces):
            return first
        found = [first]
        room = bytes_max - len(first)
        while room and (index := index + 1) < len(self._pieces):
            found.append(self._pieces[index][:room])
            room -= len(found[-1])
        return b"".join(found)

    def trim(self, needed_lsn: int) -> None:
        """Drop pieces that lie wholly before `needed_lsn`."""
        # Pieces are dropped whole, so that those being sent are shared and never copied.
        dropped = self._dropped
        while (
            dropped < len(self._begins)
            and self._begins[dropped] + len(self._pieces[dropped]) <= needed_lsn
        ):
            self._pieces[dropped] = b""
            dropped += 1
        self._dropped = dropped
        # Seldom, since it moves all that follow.
        if dropped > 64 and dropped * 2 > len(self._begins):
            del self._begins[:dropped], self._pieces[:dropped]
            self._dropped = 0

    def validate(self) -> None:
        """Raise `AssertionError` when an invariant does not hold."""
        at = self.begin_lsn
        for begin, piece in zip(
            self._begins[self._dropped :], self._pieces[self._dropped :], strict=True
        ):
            assert begin == at, (begin, at)
            assert 0 < len(piece) <= self._piece_bytes_max, (begin, len(piece))
            at += len(piece)
        assert at == self.end_lsn, (at, self.end_lsn)
