"""Which subscribers share which dataflow, and what each of them is told. Pure.

Theory of operation. A *stream* is one transient dataflow over a shard, with all the members that
hear it. Its batches are what the replica sends; each is cut, for every member, to the times that
the member has not had, and members that want the same get the very same bytes. A member that
comes starts a stream of its own, unless there is one that stands where it wants to begin. Streams
of one shard come to stand at nearly the same frontier, since they follow the same changes: then
the younger one's members go over to the older one, and its dataflow is dropped. So in the long
run one dataflow serves all, however they came.

Rules:

- a member goes over only where nothing is lost: the stream stands at or below what the member
  has had, and the member's hold protects the history from which that stream would start over;
- it goes over only where nothing is delayed: the two streams' last steps touch;
- a stream that has not sent its snapshot is joined by members that want the same snapshot only;
- a stream without members is dropped.

Invariants (`validate`): a member has had everything below `delivered`, each update once; no
member of a stream has had less than the stream sent; ``hold <= since`` for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import TIME
from actors.plan.updates import between, from_ipc, to_ipc
from actors.progress import EMPTY, Frontier, ObjectId, ShardId, Time
from actors.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    DataflowDescription,
    Schedule,
    SourceImport,
    SubscribeBatch,
    SubscribeExport,
)


class Member(msgspec.Struct, eq=False, kw_only=True):
    """One subscriber."""

    id: ObjectId
    """Names its durable hold; and the stream that it starts, if it is the member's first."""
    name: str
    """Of the object, for people."""
    source: SourceImport
    as_of: Time
    snapshot: bool
    """The contents at `as_of` are still due."""
    delivered: Frontier
    up_to: Frontier = EMPTY
    """It wants nothing from there on."""
    hold: Time
    """Where its durable hold stands, or will."""
    stream: Stream | None = None
    """None: not started yet, or paused."""
    streamed: bool = False
    """Its id has named a stream."""

    @property
    def shard(self) -> ShardId:
        """What it reads."""
        return self.source.shard

    def since(self) -> Time:
        """Where its hold may go now."""
        stands = self.delivered
        if self.stream is not None:
            stands = min(stands, self.stream.upper)
        return max(self.hold, self.as_of, min(stands, EMPTY - 1) - 1)


class Stream(msgspec.Struct, eq=False, kw_only=True):
    """One transient dataflow."""

    id: ObjectId
    shard: ShardId
    as_of: Time
    snapshot: bool
    """It has not sent its snapshot yet."""
    upper: Frontier
    """Everything below was told to the members."""
    lower: Frontier
    """Of its last batch."""
    since: Time
    """From where it would start over."""
    members: dict[ObjectId, Member] = {}


class Told(msgspec.Struct, frozen=True, gc=False):
    """What one member is to be told: all updates with ``lower <= time < upper``."""

    member: Member
    lower: Frontier
    upper: Frontier
    arrow: bytes | None
    parts: tuple[str, ...] = ()
    """Keys of blobs with further ones, among others: what lies outside is not for the member."""


class Fanout:
    """All streams. Methods return the commands that the replica must be given."""

    def __init__(self, fresh_id: Callable[[], ObjectId]) -> None:
        self._fresh_id = fresh_id
        self._streams: dict[ObjectId, Stream] = {}
        self._by_shard: dict[ShardId, list[Stream]] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._streams)

    def members(self, id_: ObjectId) -> list[Member]:
        """Who hears a stream."""
        stream = self._streams.get(id_)
        return [] if stream is None else list(stream.members.values())

    # -- coming and going ----------------------------------------------------------------------

    def join(self, member: Member) -> list[Command]:
        """The member begins, or goes on."""
        assert member.stream is None, member
        for stream in self._by_shard.get(member.shard, ()):
            alike = stream.snapshot == member.snapshot and stream.upper == member.delivered
            if alike and member.hold <= max(stream.since, stream.upper - 1):
                return self._enter(member, stream)
        return self._start(member)

    def _start(self, member: Member) -> list[Command]:
        id_ = self._fresh_id() if member.streamed else member.id
        member.streamed = True
        if not member.snapshot:
            member.as_of = member.delivered - 1
        stream = Stream(
            id=id_,
            shard=member.shard,
            as_of=member.as_of,
            snapshot=member.snapshot,
            upper=member.delivered,
            lower=member.delivered,
            since=member.as_of,
        )
        self._streams[id_] = stream
        self._by_shard.setdefault(member.shard, []).append(stream)
        description = DataflowDescription(
            id_,
            f"subscribe to {member.name}",
            (member.source,),
            SubscribeExport(member.source.schema, member.snapshot),
            member.as_of,
        )
        entered = self._enter(member, stream)
        return [CreateDataflow(description), Schedule(id_), *entered]

    def _enter(self, member: Member, stream: Stream) -> list[Command]:
        member.stream = stream
        stream.members[member.id] = member
        if member.hold <= stream.since:
            return []
        # All have had what is below its upper: it may start over from there.
        stream.since = stream.upper - 1
        return [AllowCompaction(stream.id, stream.since)]

    def leave(self, member: Member) -> list[Command]:
        """The member pauses or ends; the others notice nothing."""
        stream, member.stream = member.stream, None
        if stream is None:
            return []
        del stream.members[member.id]
        return [] if stream.members else self._drop(stream)

    def _drop(self, stream: Stream) -> list[Command]:
        del self._streams[stream.id]
        alike = self._by_shard[stream.shard]
        alike.remove(stream)
        if not alike:
            del self._by_shard[stream.shard]
        return [AllowCompaction(stream.id, EMPTY)]

    # -- going on ------------------------------------------------------------------------------

    def batch(self, id_: ObjectId, batch: SubscribeBatch) -> tuple[list[Told], list[Command]]:
        """A batch (without an error) of a stream: what its members are told.

        One that tells nothing new, as after a reconnection, is nobody's business. A member that
        has had everything below its `up_to` must leave, and so must one that is told of parts:
        it comes back when it has had them.
        """
        stream = self._streams.get(id_)
        if stream is None or batch.upper <= stream.upper:
            return [], []
        cuts = _Cuts(batch)
        keys = tuple(part.key for part in batch.parts)
        told = []
        for member in stream.members.values():
            lower = member.delivered
            upper = min(batch.upper, member.up_to)
            if upper > lower:
                told.append(Told(member, lower, upper, cuts.between(lower, upper), keys))
                member.delivered, member.snapshot = upper, False
        stream.lower, stream.upper, stream.snapshot = stream.upper, batch.upper, False
        return told, self._merge(stream)

    def _merge(self, moved: Stream) -> list[Command]:
        """Members of a younger stream go over to an older one."""
        commands: list[Command] = []
        alike = self._by_shard[moved.shard]
        place = alike.index(moved)
        pairs = [(moved, older) for older in alike[:place]]
        pairs += [(younger, moved) for younger in alike[place + 1 :]]
        for younger, older in pairs:
            alive = younger.members and older.members  # what went over before is dropped
            if alive and _touch(younger, older):
                commands += self._go_over(younger, older)
        return commands

    def _go_over(self, younger: Stream, older: Stream) -> list[Command]:
        commands: list[Command] = []
        for member in list(younger.members.values()):
            if member.hold < older.upper:
                del younger.members[member.id]
                commands += self._enter(member, older)
        if not younger.members:
            commands += self._drop(younger)
        return commands

    def compact(self) -> list[Command]:
        """Nobody needs what all have had. Call `Member.since` of the members with it, and move
        their holds."""
        commands: list[Command] = []
        for stream in self._streams.values():
            since = min(stream.upper, EMPTY - 1) - 1
            if since > stream.since:
                stream.since = since
                commands.append(AllowCompaction(stream.id, since))
        return commands

    def validate(self, members: Iterable[Member]) -> None:
        """Asserts the invariants."""
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
            assert stream in self._by_shard[stream.shard]
        assert sum(map(len, self._by_shard.values())) == len(self._streams)


def _touch(younger: Stream, older: Stream) -> bool:
    """Whether the older one stands within the last step of the younger one."""
    pending = younger.snapshot or older.snapshot
    return not pending and younger.lower <= older.upper <= younger.upper


class _Cuts:
    """Pieces of a batch; each is made once."""

    def __init__(self, batch: SubscribeBatch) -> None:
        self._batch = batch
        self._rows: pa.Table | None = None
        self._made: dict[tuple[Frontier, Frontier], bytes | None] = {}

    def between(self, lower: Frontier, upper: Frontier) -> bytes | None:
        """Its updates with ``lower <= time < upper``: None when there are none."""
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
            return arrow
        kept = between(self._rows, lower, upper)
        return to_ipc(kept) if kept.num_rows else None
