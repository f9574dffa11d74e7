"""One instance on several replicas: one history, and one answer out of theirs. Pure.

Theory of operation. All replicas run the same dataflows over the same shards. Every command goes
into the one `ComputeHistory` and to every replica that is connected; a replica that connects is
given the history as it stands, so one that comes late is brought up like one that comes again.
What replicas say is merged, whichever of them says it first:

- peeks: the first answer counts; the others are asked no more (`CancelPeek`), and what they say
  is dropped. An error that tells of the replica and not of the data (it is busy, it has begun
  later than the time that is read, its store failed) counts when no connected replica is left
  that may still answer. That a replica is gone is no answer: it is asked again when it comes;
- peeks of what replicas keep of themselves (`LogTarget`): all that are connected answer, and
  their rows together are the answer. One whose error tells of the replica is left out, unless
  all are;
- frontiers: joined. A shard is the same for all, so what one has sealed is sealed. What an index
  holds is its replica's own: it counts while that replica is connected, so an index's frontier
  is the furthest of those connected, and goes back when that one is lost;
- subscribes: a batch counts as far as it goes beyond what was told, cut where that ended, so that
  all batches together are contiguous and hold every update once. A dataflow that failed by its
  replica's fault counts when it has failed on every connected replica;
- copies: one replica makes a copy, another one when that is lost; the first answer counts;
- statuses: of the replica whose dataflow is furthest on.

Which history is kept. What is allowed to be compacted follows the joined frontier, thus the
fastest replica. A slower one reads under leases of its own, which protect what it has begun to
read; one that is lost begins again at the `as_of` that the compactions have left in the history,
and the durable holds stand there. So nobody is waited for, and no replica that stays away keeps
history for itself.

Invariants (`validate`): a peek is told once; told frontiers of what is durable advance strictly;
batches of a subscribe are contiguous; nothing is kept of what was dropped or answered.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.cluster.partitioned import merge_results
from actors.compute.history import ComputeHistory
from actors.errors import (
    DefiniteError,
    InvalidUsage,
    ReadBelowSince,
    UnknownObject,
    ViewInError,
    from_wire,
)
from actors.plan.updates import between, from_ipc, to_ipc
from actors.progress import Frontier, ObjectId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    Command,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    Frontiers,
    IndexExport,
    LogTarget,
    Peek,
    PeekCanceled,
    PeekError,
    PeekResponse,
    PeekRows,
    PeekStashed,
    Response,
    Schedule,
    Status,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
)


class Merged(msgspec.Struct):
    """What follows from one event: responses that count, commands to send, and stashed parts
    that nobody will read."""

    told: list[Response] = []
    sent: list[tuple[str, Command]] = []
    """(replica, command)."""
    unread: list[str] = []
    fell: list[tuple[ObjectId, Frontier]] = []
    """Indexes whose furthest replica was lost, and how far the others are."""


class _Replica:
    """One replica, connected or wanted."""

    def __init__(self) -> None:
        self.incarnation: int | None = None
        """Of the connection that serves; None: there is none."""
        self.written: dict[ObjectId, Frontier] = {}
        """What it has sealed, on this connection."""


class _Stream:
    """A subscribe: how far it was told, and on which replicas it has failed."""

    def __init__(self) -> None:
        self.upper: Frontier | None = None
        self.over = False
        self.failed: dict[str, SubscribeResponse] = {}


class Replicas:
    """See the module's text. Replicas are known by name."""

    def __init__(
        self, commands: Iterable[Command] = (), result_bytes_max: int = 48 * 1024 * 1024
    ) -> None:
        self._result_bytes_max = result_bytes_max
        self._history = ComputeHistory()
        self._replicas: dict[str, _Replica] = {}
        self._joined: dict[ObjectId, Frontier] = {}
        self._in_memory: set[ObjectId] = set()
        """Indexes: of those that are there."""
        self._peeks: dict[str, dict[str, PeekResponse]] = {}
        """Not answered; with errors by replica, of which one may come to count. Of those in
        `_of_all`: with all answers."""
        self._of_all: set[str] = set()
        """Peeks that every connected replica has to answer."""
        self._unread: list[str] = []
        """Stashed parts of such peeks that nobody waits for any more; told with what comes next."""
        self._streams: dict[ObjectId, _Stream] = {}
        self._copies: dict[ObjectId, str | None] = {}
        """Not answered; which replica makes it."""
        self._copied: set[ObjectId] = set()
        """Answered, and not dropped yet."""
        self._statuses: dict[ObjectId, tuple[str, Frontier]] = {}
        """Whose was told last, and how far it was."""
        for command in commands:
            self.command(command)

    # -- who is there --------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """All that are wanted."""
        return list(self._replicas)

    @property
    def connected_names(self) -> list[str]:
        """Those that are connected, in the order in which they were added."""
        return [name for name, each in self._replicas.items() if each.incarnation is not None]

    def add(self, name: str) -> None:
        """One more is wanted; it counts when it has connected."""
        assert name not in self._replicas, name
        self._replicas[name] = _Replica()

    def drop(self, name: str) -> Merged:
        """One is wanted no more."""
        merged = self._gone(name)
        del self._replicas[name]
        return merged

    def connected(self, name: str, incarnation: int) -> tuple[list[Command], Merged]:
        """A connection serves: what it must be told first, and what follows for others."""
        replica = self._replicas.get(name)
        if replica is None:
            return [], Merged()
        merged = self._gone(name)
        replica.incarnation = incarnation
        for id_, maker in self._copies.items():
            if maker is None:
                self._copies[id_] = name
        self._history.reduce()
        commands = self._history.commands()
        elsewhere = {id_ for id_, maker in self._copies.items() if maker != name} | self._copied
        if elsewhere:
            commands = [each for each in commands if _about(each) not in elsewhere]
        return commands, merged

    def lost(self, name: str, incarnation: int) -> Merged:
        """That connection is gone; nothing of an earlier or later one is said by it."""
        replica = self._replicas.get(name)
        if replica is None or replica.incarnation != incarnation:
            return Merged()
        return self._gone(name)

    def _gone(self, name: str) -> Merged:
        replica, merged = self._replicas[name], Merged()
        if replica.incarnation is None:
            return merged
        replica.incarnation = None
        written, replica.written = replica.written, {}
        for id_ in written:
            if id_ in self._in_memory:
                left = max(each.written.get(id_, 0) for each in self._replicas.values())
                if left < self._joined[id_]:
                    self._joined[id_] = left
                    merged.fell.append((id_, left))
        for uuid, answers in list(self._peeks.items()):
            answer = answers.pop(name, None)
            merged.unread += [] if answer is None else _parts(answer)
            self._settle_peek(uuid, answers, merged)
        for stream in self._streams.values():
            stream.failed.pop(name, None)
            self._settle_stream(stream, merged)
        for id_, maker in self._copies.items():
            if maker == name:
                self._copies[id_] = self._hand_over(id_, merged)
        return merged

    def _hand_over(self, id_: ObjectId, merged: Merged) -> str | None:
        """Another replica makes the copy, if there is one."""
        maker = next(iter(self.connected_names), None)
        if maker is not None:
            about = [each for each in self._history.commands() if _about(each) == id_]
            merged.sent += [(maker, each) for each in about]
        return maker

    # -- commands ------------------------------------------------------------------------------

    def command(self, command: Command) -> list[str]:
        """Takes a command into the history: the replicas to send it to."""
        self._history.push(command)
        connected = self.connected_names
        match command:
            case Peek(uuid=uuid, target=target):
                self._peeks.setdefault(uuid, {})
                if isinstance(target, LogTarget):
                    self._of_all.add(uuid)
                return connected
            case CancelPeek(uuid=uuid):
                self._of_all.discard(uuid)
                for answer in self._peeks.pop(uuid, {}).values():
                    self._unread += _parts(answer)
                return connected
            case CreateDataflow(dataflow):
                id_ = dataflow.id
                match dataflow.export:
                    case SubscribeExport():
                        self._streams[id_] = _Stream()
                    case CopyToExport():
                        self._copies[id_] = next(iter(connected), None)
                    case export:
                        self._joined.setdefault(id_, 0)
                        if isinstance(export, IndexExport):
                            self._in_memory.add(id_)
        about = _about(command)
        maker = self._copies.get(about) if about is not None else None
        if isinstance(command, AllowCompaction) and is_empty(command.frontier):
            self._forget(command.id)
        return connected if maker is None else [maker]

    def _forget(self, id_: ObjectId) -> None:
        self._joined.pop(id_, None)
        self._in_memory.discard(id_)
        self._streams.pop(id_, None)
        self._copies.pop(id_, None)
        self._copied.discard(id_)
        self._statuses.pop(id_, None)
        for replica in self._replicas.values():
            replica.written.pop(id_, None)

    # -- responses -----------------------------------------------------------------------------

    def responded(self, name: str, incarnation: int, response: Response) -> Merged:
        """What counts of a response, by all that was said before."""
        replica, merged = self._replicas.get(name), Merged()
        if replica is None or replica.incarnation != incarnation:
            if isinstance(response, PeekResponse):
                merged.unread += _parts(response)
            elif isinstance(response, SubscribeResponse):
                merged.unread += _pieces(response)
            return merged
        match response:
            case Frontiers(id=id_, write=int() as write) if id_ in self._joined:
                replica.written[id_] = max(write, replica.written.get(id_, 0))
                if write > self._joined[id_]:
                    self._joined[id_] = write
                    merged.told.append(response)
            case PeekResponse():
                self._answered(name, response, merged)
            case SubscribeResponse():
                self._subscribed(name, response, merged)
            case CopyToResponse(id=id_):
                if id_ in self._copies:
                    del self._copies[id_]
                    self._copied.add(id_)
                    merged.told.append(response)
            case Status(id=id_, hi=hi):
                owner, furthest = self._statuses.get(id_, (name, 0))
                alone = owner not in self._replicas or self._replicas[owner].incarnation is None
                if owner == name or alone or hi > furthest:
                    self._statuses[id_] = (name, hi)
                    merged.told.append(response)
            case Frontiers():
                pass
            case _:
                merged.told.append(response)
        return merged

    def _answered(self, name: str, response: PeekResponse, merged: Merged) -> None:
        unread, self._unread = self._unread, []
        merged.unread += unread
        answers = self._peeks.get(response.uuid)
        if answers is None:
            merged.unread += _parts(response)
            return
        answers[name] = response
        match response.result:
            case PeekError(code=code) if of_replica(code):
                self._settle_peek(response.uuid, answers, merged)
            case PeekCanceled():
                self._settle_peek(response.uuid, answers, merged)
            case PeekError():
                self._tell(response, merged)
            case _ if response.uuid in self._of_all:
                self._settle_peek(response.uuid, answers, merged)
            case _:
                self._tell(response, merged)

    def _settle_peek(self, uuid: str, answers: dict[str, PeekResponse], merged: Merged) -> None:
        """When every connected replica has answered: all rows count together, or the last
        error."""
        connected = self.connected_names
        if not connected or not all(name in answers for name in connected):
            return
        rows = [
            answers[name]
            for name in connected
            if isinstance(answers[name].result, PeekRows | PeekStashed)
        ]
        if not rows:
            self._tell(next(reversed(answers.values())), merged)
            return
        result = merge_results([each.result for each in rows], self._result_bytes_max)
        self._tell(PeekResponse(uuid, result, rows[0].traceparent), merged)

    def _tell(self, response: PeekResponse, merged: Merged) -> None:
        """This answer counts: no replica is to answer any more, nor is one that comes later."""
        answers = self._peeks.pop(response.uuid)
        self._of_all.discard(response.uuid)
        told = set(_parts(response))
        for answer in answers.values():
            merged.unread += [key for key in _parts(answer) if key not in told]
        cancel = CancelPeek(response.uuid)
        self._history.push(cancel)
        merged.told.append(response)
        merged.sent += [(each, cancel) for each in self.connected_names if each not in answers]

    def _subscribed(self, name: str, response: SubscribeResponse, merged: Merged) -> None:
        stream = self._streams.get(response.id)
        if stream is None or stream.over or name in stream.failed:
            merged.unread += _pieces(response)
            return
        batch = response.batch
        if not isinstance(batch, SubscribeBatch):
            # Nobody dropped it, or it would not be known any more.
            stream.failed[name] = response
            self._settle_stream(stream, merged)
            return
        if batch.error is None and stream.upper is not None and batch.lower > stream.upper:
            gap = f"{name} went on from {batch.lower}, but {stream.upper} was reached"
            batch = msgspec.structs.replace(batch, arrow=None, error=("Broken", gap))
        if batch.error is not None and of_replica(batch.error[0]):
            stream.failed[name] = SubscribeResponse(response.id, batch)
            self._settle_stream(stream, merged)
            return
        if stream.upper is not None and batch.upper <= stream.upper:
            merged.unread += _pieces(response)
            return
        if stream.upper is not None and batch.lower < stream.upper:
            batch = _beyond(batch, stream.upper)
        stream.upper = batch.upper
        stream.over = batch.error is not None or is_empty(batch.upper)
        merged.told.append(SubscribeResponse(response.id, batch))

    def _settle_stream(self, stream: _Stream, merged: Merged) -> None:
        connected = self.connected_names
        if connected and not stream.over and all(name in stream.failed for name in connected):
            stream.over = True
            merged.told.append(next(reversed(stream.failed.values())))

    # -- looking in ----------------------------------------------------------------------------

    def upper(self, id_: ObjectId) -> Frontier:
        """How far an object is sealed, by what connected replicas have said."""
        return self._joined.get(id_, 0)

    def written(self, name: str) -> dict[ObjectId, Frontier]:
        """What a replica has sealed, as far as it has said so."""
        return dict(self._replicas[name].written)

    @property
    def objects(self) -> int:
        """Dataflows that report frontiers."""
        return len(self._joined)

    def __len__(self) -> int:
        """Commands in the history."""
        return len(self._history)

    def validate(self) -> None:
        """Asserts the invariants."""
        connected = set(self.connected_names)
        for uuid, answers in self._peeks.items():
            assert answers.keys() <= connected
            assert not connected or answers.keys() < connected, "it should have been told"
            rows = (PeekRows, PeekStashed)
            assert uuid in self._of_all or not any(
                isinstance(each.result, rows) for each in answers.values()
            )
        assert self._of_all <= self._peeks.keys()
        for stream in self._streams.values():
            assert stream.failed.keys() <= connected
        for id_, upper in self._joined.items():
            said = [each.written.get(id_, 0) for each in self._replicas.values()]
            assert upper >= max(said, default=0)
            assert id_ not in self._in_memory or upper == max(said, default=0)
        for maker in self._copies.values():
            assert maker in connected if connected else maker is None
        assert self._in_memory <= self._joined.keys()


def of_replica(code: str) -> bool:
    """Whether an error tells of the replica that gives it: another may answer well."""
    error = from_wire(code, "", True)
    if isinstance(error, ReadBelowSince | UnknownObject):
        return True
    return not isinstance(error, InvalidUsage | ViewInError | DefiniteError)


def _about(command: Command) -> ObjectId | None:
    """Which dataflow a command is about."""
    match command:
        case CreateDataflow(dataflow):
            return dataflow.id
        case Schedule(id=id_) | AllowCompaction(id=id_):
            return id_
    return None


def _parts(response: PeekResponse) -> list[str]:
    """Blobs that an answer names."""
    result = response.result
    return [part.key for part in result.parts] if isinstance(result, PeekStashed) else []


def _pieces(response: SubscribeResponse) -> list[str]:
    """Blobs that a batch names."""
    batch = response.batch
    return [part.key for part in batch.parts] if isinstance(batch, SubscribeBatch) else []


def _beyond(batch: SubscribeBatch, lower: Frontier) -> SubscribeBatch:
    """What of a batch is not below `lower`; whoever reads its blobs leaves out what is."""
    arrow = batch.arrow
    if arrow is not None:
        kept = between(from_ipc(arrow), lower, batch.upper)
        arrow = to_ipc(kept) if kept.num_rows else None
    return msgspec.structs.replace(batch, lower=lower, arrow=arrow)
