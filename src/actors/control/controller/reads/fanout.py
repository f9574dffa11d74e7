"""Lets subscribers share dataflows: decides which of them share one, and cuts its updates for each.
Pure.

A *stream* is one transient dataflow over a shard, with its members. Each batch is cut, for every
member, to the times that the member has not received yet; members that need the same cut share its
bytes. A new member starts its own stream, unless an existing one is exactly where the member
begins. Streams of one shard follow the same changes, so they reach nearly the same frontier: then
the members of the younger stream move to the older one, and the younger dataflow is dropped. In the
long run one dataflow serves all.

Rules:

- a member moves only if nothing is lost: the stream's upper is at or below what the member has
  received, and the member's hold protects the history from which that stream would restart;
- it moves only if nothing is delayed: the last steps of the two streams touch;
- only members that want the same snapshot join a stream that has not sent its snapshot;
- a stream without members is dropped.

Invariants (`validate`): a member has received everything below `delivered`, each update once; no
member of a stream has received less than the stream has sent; ``hold <= since`` for each member.
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
    still need it."""

    def __init__(self, keys: Sequence[str], readers: int) -> None:
        self.keys = tuple(keys)
        """Keys of the blobs, in order."""
        self._wanted = Counter(dict.fromkeys(keys, readers))
        """Number of readers that still need each blob."""

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
    """One reader's position in a batch's blobs: updates with ``lower <= time < upper``, piece by
    piece; the last piece has the batch's upper."""

    def __init__(self, shelf: BatchBlobs, lower: Frontier, upper: Frontier) -> None:
        self.shelf = shelf
        self.lower = lower
        self.upper = upper
        self._left = deque(shelf.keys)
        """Keys of the pieces still to be sent, the current one first."""
        self.reading = False
        """True while a piece is being read."""
        self.attempts = 0
        """Number of failed attempts to read the current piece."""

    @property
    def present(self) -> str:
        """Return the key of the blob to read now."""
        return self._left[0]

    @property
    def last(self) -> bool:
        """Return whether the current piece is the last."""
        return len(self._left) == 1

    def advance(self) -> list[str]:
        """Advance to the next piece. Return the blobs that may be deleted."""
        self.reading, self.attempts = False, 0
        return self.shelf.take([self._left.popleft()])

    def abandon(self) -> list[str]:
        """Release all remaining pieces, since the reader has left. Return the blobs that may be
        deleted."""
        left = list(self._left)
        self._left.clear()
        return self.shelf.take(left)

    def cut(self, arrow: bytes) -> bytes | None:
        """Return the updates of a piece that are for this reader, or None if there are none."""
        rows: pa.Table = from_ipc(arrow)
        if not rows.num_rows:
            return None
        times = pc.min_max(rows[TIME])
        if self.lower <= times["min"].as_py() and times["max"].as_py() < self.upper:
            # The whole piece is for this reader: pass on the same bytes without a copy.
            return arrow
        kept = between(rows, self.lower, self.upper)
        return to_ipc(kept) if kept.num_rows else None


# -- streams and their members ---------------------------------------------------------------------


class FanoutMember(msgspec.Struct, eq=False, kw_only=True):
    """One subscriber."""

    id: ObjectId
    """Names the durable hold, and the first stream that the member starts."""
    name: str
    """Name of the object, for display."""
    imported: ShardImport
    """The shard that the member reads, with the columns it reads."""
    as_of: Time
    """Time of the snapshot, or after which changes are delivered."""
    snapshot: bool
    """True until the contents at `as_of` were delivered."""
    delivered: Frontier
    """Frontier below which the member has received everything."""
    up_to: Frontier = EMPTY
    """Frontier at which the subscribe ends."""
    hold: Time
    """Time of the durable hold; a move to it may still be in progress."""
    stream: FanoutStream | None = None
    """The stream that it is a member of; None if it has not started or is paused."""
    streamed: bool = False
    """True once a stream has been named by the member's id."""

    @property
    def shard(self) -> ShardId:
        """Return the shard that the member reads."""
        return self.imported.shard

    def since(self) -> Time:
        """Return the time to which the hold may advance now."""
        stands = self.delivered
        if self.stream is not None:
            # The stream may restart from its upper, which can be below what this member has
            # received.
            stands = min(stands, self.stream.upper)
        return max(self.hold, self.as_of, min(stands, EMPTY - 1) - 1)


class FanoutStream(msgspec.Struct, eq=False, kw_only=True):
    """One transient dataflow and its members."""

    id: ObjectId
    imported: ShardImport
    as_of: Time
    snapshot: bool
    """True until the snapshot was sent."""
    upper: Frontier
    """Frontier below which all updates were sent to the members."""
    lower: Frontier
    """Lower bound of the last batch."""
    since: Time
    """Time from which the dataflow would restart."""
    members: dict[ObjectId, FanoutMember] = {}
    """Members by id."""


class FanoutDelivery(msgspec.Struct, frozen=True, gc=False):
    """The updates with ``lower <= time < upper`` to send to one member."""

    member: FanoutMember
    lower: Frontier
    upper: Frontier
    arrow: bytes | None
    parts: tuple[str, ...] = ()
    """Keys of blobs with additional updates. Updates outside the interval are not for the
    member."""


class SubscribeFanout:
    """All streams. Methods return the commands for the replica."""

    def __init__(self, fresh_id: Callable[[], ObjectId]) -> None:
        self._fresh_id = fresh_id
        self._streams: dict[ObjectId, FanoutStream] = {}
        """Streams by the id of their dataflow."""
        self._by_import: dict[ShardImport, list[FanoutStream]] = {}
        """Streams of each shard and set of columns, oldest first. The columns matter since a table
        may get more of them."""

    def __len__(self) -> int:
        return len(self._streams)

    def members(self, id_: ObjectId) -> list[FanoutMember]:
        """Return the members of a stream."""
        stream = self._streams.get(id_)
        return [] if stream is None else list(stream.members.values())

    # -- joining and leaving -----------------------------------------------------------------------

    def join(self, member: FanoutMember) -> list[Command]:
        """Add a member, which starts or resumes, to a stream."""
        assert member.stream is None, member
        for stream in self._by_import.get(member.imported, ()):
            alike = stream.snapshot == member.snapshot and stream.upper == member.delivered
            # The member's hold must protect the time from which the stream would restart
            # (`_enter`).
            if alike and member.hold <= max(stream.since, stream.upper - 1):
                return self._enter(member, stream)
        return self._start(member)

    def _start(self, member: FanoutMember) -> list[Command]:
        id_ = self._fresh_id() if member.streamed else member.id
        member.streamed = True
        if not member.snapshot:
            # A dataflow without a snapshot sends what is later than its as_of: everything from
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
        # All members have received what is below its upper, so it may restart from there.
        stream.since = stream.upper - 1
        return [AllowCompaction(stream.id, stream.since)]

    def leave(self, member: FanoutMember) -> list[Command]:
        """Remove a member, which pauses or ends, from its stream. The other members stay."""
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
        """Return what to send to the members for a stream's batch (without an error).

        A batch without news, as after a reconnection, is dropped. The caller removes a member that
        has received everything below its `up_to`, and one that is sent parts: that one joins again
        when it has received them.
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
            # The hold must protect the time from which the older stream would restart.
            if member.hold < older.upper:
                del younger.members[member.id]
                commands += self._enter(member, older)
        if not younger.members:
            commands += self._drop(younger)
        return commands

    def compact(self) -> list[Command]:
        """Advance the sinces of the streams to what all members have received. The caller then
        moves the members' holds to `FanoutMember.since`."""
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
            assert stream.members, "a stream without members still exists"
            assert stream in self._by_import[stream.imported]
        assert sum(map(len, self._by_import.values())) == len(self._streams)


def _steps_touch(younger: FanoutStream, older: FanoutStream) -> bool:
    """Return whether the older stream's upper is within the last step of the younger one."""
    pending = younger.snapshot or older.snapshot
    return not pending and younger.lower <= older.upper <= younger.upper


class _BatchCuts:
    """Cuts a batch by time, making each cut only once."""

    def __init__(self, batch: SubscribeBatch) -> None:
        self._batch = batch
        self._rows: pa.Table | None = None
        """The decoded batch; None until a cut needs it."""
        self._made: dict[tuple[Frontier, Frontier], bytes | None] = {}
        """Cuts made so far, by their bounds."""

    def between(self, lower: Frontier, upper: Frontier) -> bytes | None:
        """Return the batch's updates with ``lower <= time < upper``, or None if there are none."""
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
            # There is nothing to cut: pass on the same bytes without a copy.
            return arrow
        kept = between(self._rows, lower, upper)
        return to_ipc(kept) if kept.num_rows else None
