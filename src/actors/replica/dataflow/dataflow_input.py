"""Tracks the described and fetched parts of each input, for the machine. Pure.

Theory of operation. A listen task describes parts. Nothing is fetched until the budget has room for
it, so a slow dataflow accumulates descriptions rather than bytes. A described part becomes a
`PartInterval`: the part with the interval of times that the description covers. Such a piece is
first *waiting*, then *outstanding* (requested). Finally its rows are *held* until the step that
covers them takes them.

Invariants:

- A time is sealed for an input once the input has been described beyond it and no waiting or
  outstanding piece may contain an earlier time. Results are matched by (time, key) and counted per
  time, so their order does not matter.
- Held rows lie in the interval of their piece. Rows beyond a step's `hi` stay held for the next
  step.
- Progress never goes back.

`step_choice` chooses where a step ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TIME
from actors.model.plan.updates import advance, between
from actors.model.protocol.internal import (
    DescribedPart,
    FetchFailed,
    FilteredParts,
    InputStatistics,
    PartFetched,
    PartsDescribed,
)
from actors.runtime.errors import LocalProtocolError
from actors.runtime.progress import EMPTY, Frontier, ObjectId, ShardId, Time, format_frontier


class PartInterval(msgspec.Struct, frozen=True, gc=False):
    """A described part, and the interval ``lower <= time < upper`` that the description covers."""

    part: DescribedPart
    lower: Time
    upper: Frontier
    time: Frontier
    """Upper of the description; fetches are counted by it."""
    snapshot: bool
    group: int
    """Number of the piece's description, whose credit is returned once all of its pieces are
    done."""


class HeldRows(msgspec.Struct, frozen=True, gc=False):
    """Rows that wait for their step, with their first and last time."""

    rows: pa.Table
    first: Time
    last: Time
    bytes: int


class SnapshotProgress(msgspec.Struct):
    """Progress of reading snapshots, in parts and bytes."""

    parts_read: int = 0
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0

    def add(self, other: SnapshotProgress) -> None:
        """Add another input's progress."""
        self.parts_read += other.parts_read
        self.parts_total += other.parts_total
        self.bytes_read += other.bytes_read
        self.bytes_total += other.bytes_total


def total_reading(inputs: Iterable[DataflowInput]) -> SnapshotProgress:
    """Return how far the snapshots of all inputs have been read."""
    whole = SnapshotProgress()
    for input_ in inputs:
        whole.add(input_.reading)
    return whole


class _Group(msgspec.Struct):
    """Number of pieces of a description that are not done, and the description's size."""

    pieces: int
    bytes: int


class DataflowInput:
    """Described, outstanding and held parts of one input."""

    def __init__(self, index: int, as_of: Time, *, snapshot: bool) -> None:
        self.index = index
        self.as_of = as_of
        self.progress: Frontier = 0 if snapshot else as_of + 1
        """Frontier up to which the input was described."""
        self.waiting: deque[PartInterval] = deque()
        """Described pieces that have not been requested yet."""
        self.outstanding: dict[tuple[Frontier, str], deque[PartInterval]] = {}
        """Requested pieces, by (time, key of the part)."""
        self.counts: dict[Frontier, int] = {}
        """Number of outstanding fetches for each time; times without any are absent."""
        self.lost: list[PartInterval] = []
        """Pieces that could not be fetched. Their times are never sealed."""
        self.held: list[HeldRows] = []
        """Fetched rows that no step has taken yet."""
        self.held_bytes = 0
        """Size of the held rows."""
        self.reading = SnapshotProgress()
        """Progress of reading the snapshot."""
        self._groups: dict[int, _Group] = {}
        """Descriptions whose pieces are not all done, by number."""
        self._described = 0
        """Number of descriptions so far."""
        self._filtered = FilteredParts(0, 0, 0)
        """Counts of parts that the listen task filtered out, as last reported."""

    def describe(self, described: PartsDescribed) -> list[PartInterval]:
        """Add a description, and return its pieces that contain nothing of interest (to be
        released).

        Call `answers` with them next, even if there are none. Raise `LocalProtocolError` if the
        description leaves a gap or goes back.
        """
        snapshot = described.snapshot
        if described.upper < self.progress or (described.lower > self.progress and not snapshot):
            raise LocalProtocolError(
                f"input {self.index} is described to {format_frontier(self.progress)}; a"
                f" description of [{described.lower}, {described.upper}) does not continue there"
            )
        self._described += 1
        self._filtered = described.filtered or self._filtered
        size = sum(part.bytes for part in described.parts)
        self._groups[self._described] = _Group(len(described.parts), size)
        idle = []
        for part in described.parts:
            # A compacted batch may repeat older updates, which the interval cuts off.
            lower = 0 if snapshot else max(part.lower, described.lower)
            upper = self.as_of + 1 if snapshot else min(part.upper, described.upper)
            piece = PartInterval(part, lower, upper, described.upper, snapshot, self._described)
            # A part without rows or times of interest need not be fetched.
            if part.rows and lower < upper:
                self.waiting.append(piece)
            else:
                idle.append(piece)
        if snapshot:
            read = sum(piece.part.bytes for piece in idle)
            self.reading.add(SnapshotProgress(len(idle), len(described.parts), read, size))
        self.progress = described.upper
        return idle

    def answers(self, done: Iterable[PartInterval]) -> list[int]:
        """Mark pieces as done, and return the bytes of each description that is now complete.

        If there are no pieces, complete the descriptions that had none.
        """
        for piece in done:
            self._groups[piece.group].pieces -= 1
        ended = [number for number, group in self._groups.items() if not group.pieces]
        return [self._groups.pop(number).bytes for number in ended]

    def ask(self, before: Frontier) -> PartInterval | None:
        """Move the next waiting piece with times below `before` to outstanding, and return it, if
        any."""
        for position, piece in enumerate(self.waiting):
            if piece.lower >= before:
                continue
            del self.waiting[position]
            self.outstanding.setdefault((piece.time, piece.part.key), deque()).append(piece)
            self.counts[piece.time] = self.counts.get(piece.time, 0) + 1
            return piece
        return None

    def fetched(self, message: PartFetched) -> tuple[PartInterval, pa.Table]:
        """Return the piece that a result belongs to, and its rows of interest, which are not held
        yet.

        Raise `LocalProtocolError` for a part that was not requested.
        """
        piece = self._take_outstanding(message)
        if piece.snapshot:
            self.reading.add(SnapshotProgress(parts_read=1, bytes_read=piece.part.bytes))
        return piece, _relevant_updates(message.updates, piece, self.as_of)

    def lose(self, message: FetchFailed) -> PartInterval:
        """Record that a piece cannot be fetched, and return it.

        Raise `LocalProtocolError` for a part that was not requested.
        """
        piece = self._take_outstanding(message)
        self.lost.append(piece)
        return piece

    def _take_outstanding(self, message: PartFetched | FetchFailed) -> PartInterval:
        """Remove the piece that a result belongs to from the outstanding ones, and return it."""
        asked = self.outstanding.get((message.time, message.key))
        if not asked:
            raise LocalProtocolError(
                f"input {self.index}: part {message.key!r} was fetched at"
                f" {format_frontier(message.time)} but was not requested"
            )
        piece = asked.popleft()
        if not asked:
            del self.outstanding[message.time, message.key]
        self.counts[message.time] -= 1
        if not self.counts[message.time]:
            del self.counts[message.time]
        return piece

    def hold(self, *tables: pa.Table) -> None:
        """Keep rows for the step that covers them."""
        for rows in tables:
            if rows.num_rows:
                times = pc.min_max(rows[TIME])
                made = HeldRows(rows, times["min"].as_py(), times["max"].as_py(), rows.nbytes)
                self.held.append(made)
                self.held_bytes += made.bytes

    def sealed(self, frontier: Frontier) -> bool:
        """Return whether every update below `frontier` is held or was already taken."""
        if self.progress < frontier:
            return False
        return not any(piece.lower < frontier for piece in self.pending())

    def has_rows_below(self, frontier: Frontier) -> bool:
        """Return whether an update below `frontier` is held, or may be in a pending part."""
        held = any(each.first < frontier for each in self.held)
        return held or any(piece.lower < frontier for piece in self.pending())

    def pending(self) -> Iterable[PartInterval]:
        """Yield the pieces whose rows have not arrived."""
        yield from self.waiting
        yield from self.lost
        for pieces in self.outstanding.values():
            yield from pieces

    def outstanding_bytes(self) -> int:
        """Return the total size of the outstanding parts."""
        return sum(piece.part.bytes for pieces in self.outstanding.values() for piece in pieces)

    def take(self, hi: Frontier) -> list[pa.Table]:
        """Remove the held rows below `hi`, and return them in as few tables as possible."""
        taken: list[pa.Table] = []
        held, self.held, self.held_bytes = self.held, [], 0
        for each in held:
            if each.last < hi:
                taken.append(each.rows)
            elif each.first >= hi:
                self.held.append(each)
                self.held_bytes += each.bytes
            else:
                # Only tables that extend across `hi` are copied.
                taken.append(between(each.rows, each.first, hi))
                self.hold(between(each.rows, hi, EMPTY))
        return _joined(taken)

    def statistics(self, dataflow: ObjectId, shard: ShardId) -> InputStatistics:
        """Return the input's progress, and its waiting, outstanding and held parts."""
        return InputStatistics(
            dataflow,
            self.index,
            shard,
            self.progress,
            len(self.waiting),
            sum(piece.part.bytes for piece in self.waiting),
            sum(self.counts.values()),
            self.outstanding_bytes(),
            sum(each.rows.num_rows for each in self.held),
            self.held_bytes,
            *msgspec.structs.astuple(self._filtered),
        )

    def validate(self) -> None:
        """Assert the invariants. Tests call this after every event."""
        counted: dict[Frontier, int] = {}
        for (time, _), pieces in self.outstanding.items():
            assert pieces, "an answered fetch is still outstanding"
            counted[time] = counted.get(time, 0) + len(pieces)
        assert counted == self.counts, f"fetches were counted as {self.counts}, but are {counted}"
        assert self.reading.parts_read <= self.reading.parts_total
        assert self.reading.bytes_read <= self.reading.bytes_total
        assert self.held_bytes == sum(each.bytes for each in self.held)
        assert all(piece.upper <= self.progress for piece in self.pending() if not piece.snapshot)


def _joined(tables: Iterable[pa.Table]) -> list[pa.Table]:
    """Return the tables concatenated without copying, one for each set of columns."""
    # Only some tables have an error column.
    alike: dict[tuple[str, ...], list[pa.Table]] = {}
    for table in tables:
        alike.setdefault(tuple(table.column_names), []).append(table)
    return [each[0] if len(each) == 1 else pa.concat_tables(each) for each in alike.values()]


def _relevant_updates(updates: pa.Table, piece: PartInterval, as_of: Time) -> pa.Table:
    """Return the updates in the piece's interval. Those of a snapshot get its as_of as their
    time."""
    if not updates.num_rows:
        return updates
    # Fetch tasks have already cut the updates, so usually this only checks.
    times = pc.min_max(updates[TIME])
    if times["min"].as_py() < piece.lower or times["max"].as_py() >= piece.upper:
        updates = between(updates, piece.lower, piece.upper)
    if piece.snapshot and times["min"].as_py() < as_of:
        updates = advance(updates, as_of)
    return updates


def ask_parts(
    inputs: Sequence[DataflowInput], before: Frontier, fetches_max: int
) -> list[tuple[DataflowInput, PartInterval]]:
    """Return pieces with times below `before` to request now.

    At most `fetches_max` pieces are outstanding over all inputs.
    """
    found: list[tuple[DataflowInput, PartInterval]] = []
    out = sum(count for input_ in inputs for count in input_.counts.values())
    for input_ in inputs:
        while out < fetches_max:
            piece = input_.ask(before)
            if piece is None:
                break
            out += 1
            found.append((input_, piece))
    return found
