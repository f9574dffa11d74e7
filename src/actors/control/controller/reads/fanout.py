"""Sharing of dataflows among subscribers: which share one, and the updates each is sent. Pure.

A *stream* is one transient dataflow over a shard, with its members. Each batch is cut, for every
member, to the times that the member has not had; members that need the same cut share its bytes. A
new member starts a stream of its own, unless one stands where the member begins. Streams of one
shard follow the same changes, and so come to nearly the same frontier: then the younger one's
members move to the older one, and its dataflow is dropped. In the long run one dataflow serves all.

Rules:

- a member moves only where nothing is lost: the stream stands at or below what the member
  has had, and the member's hold protects the history from which that stream would start over;
- it moves only where nothing is delayed: the two streams' last steps touch;
- only members that want the same snapshot join a stream that has not sent its snapshot;
- a stream without members is dropped.

Invariants (`validate`): a member has had everything below `delivered`, each update once; no member
of a stream has had less than the stream sent; ``hold <= since`` for each of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TIME
from actors.model.plan.updates import between, from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    DataflowDescription,
    ScheduleDataflow,
    ShardImport,
    SubscribeBatch,
    SubscribeExport,
)
from actors.runtime.progress import EMPTY, Frontier, ObjectId, ShardId, Time

# -- batches in blobs ------------------------------------------------------------------------------


class BatchBlobs:
    """The blobs of one batch that is too large for one answer, each with the number of readers that
    still need it: that have neither had it nor left."""

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
    """One reader's position in a batch's blobs: updates with ``lower <= time < upper``, piece after
    piece, of which the last has the batch's upper."""

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

    def advance(self) -> list[str]:
        """Advance to the next piece. Return the blobs that may be deleted."""
        self.reading, self.attempts = False, 0
        return self.shelf.take([self._left.popleft()])

    def abandon(self) -> list[str]:
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


# -- streams and their members ---------------------------------------------------------------------


class FanoutMember(msgspec.Struct, eq=False, kw_only=True):
    """One subscriber."""

    id: ObjectId
    """Names the durable hold, and the first stream that the member starts."""
    name: str
    """Name of the object, for people."""
    imported: ShardImport
    as_of: Time
    snapshot: bool
    """True while the contents at `as_of` are still due."""
    delivered: Frontier
    up_to: Frontier = EMPTY
    """Frontier at which the subscribe ends."""
    hold: Time
    """Time of the durable hold, which may still be on its way there."""
    stream: FanoutStream | None = None
    """None: not started yet, or paused."""
    streamed: bool = False
    """True when the id has named a stream."""

    @property
    def shard(self) -> ShardId:
        """Return the shard that the member reads."""
        return self.imported.shard

    def since(self) -> Time:
        """Return the time to which the hold may advance now."""
        stands = self.delivered
        if self.stream is not None:
            # The stream may start over from its upper, which can be below what this member has had.
            stands = min(stands, self.stream.upper)
        return max(self.hold, self.as_of, min(stands, EMPTY - 1) - 1)


class FanoutStream(msgspec.Struct, eq=False, kw_only=True):
    """One transient dataflow."""

    id: ObjectId
    imported: ShardImport
    as_of: Time
    snapshot: bool
    """True until the snapshot was sent."""
    upper: Frontier
    """Frontier below which all updates were sent to the members."""
    lower: Frontier
    """Lower of the last batch."""
    since: Time
    """Time from which the dataflow would start over."""
    members: dict[ObjectId, FanoutMember] = {}


class FanoutDelivery(msgspec.Struct, frozen=True, gc=False):
    """The updates with ``lower <= time < upper`` that one member is to be sent."""

    member: FanoutMember
    lower: Frontier
    upper: Frontier
    arrow: bytes | None
    parts: tuple[str, ...] = ()
    """Keys of blobs with further updates; those outside of the interval are not for the member."""


class SubscribeFanout:
    """All streams. Methods return the commands for the replica."""

    def __init__(self, fresh_id: Callable[[], ObjectId]) -> None:
        self._fresh_id = fresh_id
        self._streams: dict[ObjectId, FanoutStream] = {}
        self._by_import: dict[ShardImport, list[FanoutStream]] = {}
        """Streams of each shard and the columns that are read of it, oldest first: a table may be
        given further ones."""

    def __len__(self) -> int:
        return len(self._streams)

    def members(self, id_: ObjectId) -> list[FanoutMember]:
        """Return the members of a stream."""
        stream = self._streams.get(id_)
        return [] if stream is None else list(stream.members.values())

    # -- joining and leaving -------------------------------------------------------------------

    def join(self, member: FanoutMember) -> list[Command]:
        """Add a member, which begins or resumes, to a stream."""
        assert member.stream is None, member
        for stream in self._by_import.get(member.imported, ()):
            alike = stream.snapshot == member.snapshot and stream.upper == member.delivered
            # The member's hold must protect the time from which the stream would start over
            # (`_enter`).
            if alike and member.hold <= max(stream.since, stream.upper - 1):
                return self._enter(member, stream)
        return self._start(member)

    def _start(self, member: FanoutMember) -> list[Command]:
        id_ = self._fresh_id() if member.streamed else member.id
        member.streamed = True
        if not member.snapshot:
            # A dataflow without snapshot sends what is later than its as_of: everything from
            # `delivered` on.
            member.as_of = member.delivered - 1
        stream = FanoutStream(
            id=id_,
            imported=member.imported,
            as_of=member.as_of,
            snapshot=member.snapshot,
            upper=member.delivered,
            lower=member.delivered,
            since=member.as_of,
        )
        self._streams[id_] = stream
        self._by_import.setdefault(member.imported, []).append(stream)
        description = DataflowDescription(
            id_,
            f"subscribe to {member.name}",
            (member.imported,),
            SubscribeExport(member.imported.schema, member.snapshot),
            member.as_of,
        )
        entered = self._enter(member, stream)
        return [CreateDataflow(description), ScheduleDataflow(id_), *entered]

    def _enter(self, member: FanoutMember, stream: FanoutStream) -> list[Command]:
        member.stream = stream
        stream.members[member.id] = member
        if member.hold <= stream.since:
            return []
        # All have had what is below its upper: it may start over from there.
        stream.since = stream.upper - 1
        return [AllowCompaction(stream.id, stream.since)]

    def leave(self, member: FanoutMember) -> list[Command]:
        """Remove a member, which pauses or ends, from its stream; the others go on."""
        stream, member.stream = member.stream, None
        if stream is None:
            return []
        del stream.members[member.id]
        return [] if stream.members else self._drop(stream)

    def _drop(self, stream: FanoutStream) -> list[Command]:
        del self._streams[stream.id]
        alike = self._by_import[stream.imported]
        alike.remove(stream)
        if not alike:
            del self._by_import[stream.imported]
        return [AllowCompaction(stream.id, EMPTY)]

    # -- batches -------------------------------------------------------------------------------

    def batch(
        self, id_: ObjectId, batch: SubscribeBatch
    ) -> tuple[list[FanoutDelivery], list[Command]]:
        """Return what the members are sent of a stream's batch (without an error).

        A batch without news, as after a reconnection, is dropped. The caller removes a member that
        has had everything below its `up_to`, and one that is sent parts: it joins again when it has
        had them.
        """
        stream = self._streams.get(id_)
        if stream is None or batch.upper <= stream.upper:
            return [], []
        cuts = _BatchCuts(batch)
        keys = tuple(part.key for part in batch.parts)
        deliveries = []
        for member in stream.members.values():
            lower = member.delivered
            upper = min(batch.upper, member.up_to)
            if upper > lower:
                deliveries.append(
                    FanoutDelivery(member, lower, upper, cuts.between(lower, upper), keys)
                )
                member.delivered, member.snapshot = upper, False
        stream.lower, stream.upper, stream.snapshot = stream.upper, batch.upper, False
        return deliveries, self._merge(stream)

    def _merge(self, moved: FanoutStream) -> list[Command]:
        """Move the members of younger streams to older ones."""
        commands: list[Command] = []
        alike = self._by_import[moved.imported]
        place = alike.index(moved)
        pairs = [(moved, older) for older in alike[:place]]
        pairs += [(younger, moved) for younger in alike[place + 1 :]]
        for younger, older in pairs:
            alive = younger.members and older.members  # an earlier pair may have emptied it
            if alive and _steps_touch(younger, older):
                commands += self._merge_streams(younger, older)
        return commands

    def _merge_streams(self, younger: FanoutStream, older: FanoutStream) -> list[Command]:
        commands: list[Command] = []
        for member in list(younger.members.values()):
            # The hold must protect the time from which the older stream would start over.
            if member.hold < older.upper:
                del younger.members[member.id]
                commands += self._enter(member, older)
        if not younger.members:
            commands += self._drop(younger)
        return commands

    def compact(self) -> list[Command]:
        """Advance the streams' sinces to what all members have had. Move the members' holds to
        `FanoutMember.since` with it."""
        commands: list[Command] = []
        for stream in self._streams.values():
            since = min(stream.upper, EMPTY - 1) - 1
            if since > stream.since:
                stream.since = since
                commands.append(AllowCompaction(stream.id, since))
        return commands

    def validate(self, members: Iterable[FanoutMember]) -> None:
        """Assert the invariants."""
        for member in members:
            stream = member.stream
            if stream is not None:
                assert self._streams[stream.id] is stream
                assert stream.members[member.id] is member
                assert member.delivered >= stream.upper
                assert member.hold <= stream.since, (member.hold, stream.since)
                assert member.snapshot == stream.snapshot
        for stream in self._streams.values():
            assert stream.members, "a stream without members goes on"
            assert stream in self._by_import[stream.imported]
        assert sum(map(len, self._by_import.values())) == len(self._streams)


def _steps_touch(younger: FanoutStream, older: FanoutStream) -> bool:
    """Return whether the older stream stands within the last step of the younger one."""
    pending = younger.snapshot or older.snapshot
    return not pending and younger.lower <= older.upper <= younger.upper


class _BatchCuts:
    """Cuts of a batch by time; each is made once."""

    def __init__(self, batch: SubscribeBatch) -> None:
        self._batch = batch
        self._rows: pa.Table | None = None
        self._made: dict[tuple[Frontier, Frontier], bytes | None] = {}

    def between(self, lower: Frontier, upper: Frontier) -> bytes | None:
        """Return the batch's updates with ``lower <= time < upper``; None if there are none."""
        whole = self._batch
        if whole.arrow is None or (lower <= whole.lower and upper >= whole.upper):
            return whole.arrow
        if (lower, upper) not in self._made:
            self._made[lower, upper] = self._cut(whole.arrow, lower, upper)
        return self._made[lower, upper]

    def _cut(self, arrow: bytes, lower: Frontier, upper: Frontier) -> bytes | None:
        if self._rows is None:
            self._rows = from_ipc(arrow)
        times = pc.min_max(self._rows[TIME])
        if lower <= times["min"].as_py() and times["max"].as_py() < upper:
            # Nothing to cut: the same bytes, without a copy.
            return arrow
        kept = between(self._rows, lower, upper)
        return to_ipc(kept) if kept.num_rows else None
