"""One instance on several replicas: one command history, and their responses merged into one. Pure.

All replicas run the same dataflows over the same shards. Every command goes into the one
`ComputeHistory` and to every connected replica; a replica that connects is sent the current
history. Responses are merged as follows:

- peeks: the first answer counts, and the others are canceled. An error that comes from the replica
  and not from the data (`of_replica`) counts only if no other connected replica can still answer;
- peeks of `LogTarget`: the answer is the rows of all connected replicas together. A replica that
  returns an error is left out, unless all of them do;
- frontiers: joined. A shard is the same for all, so the furthest report counts. An index belongs to
  its replica: its frontier is the furthest of the connected replicas, and goes back when that one
  is lost;
- subscribes: a batch is cut to what goes beyond the previous ones, so that all batches together are
  contiguous and contain every update once. A dataflow that failed because of its replica counts as
  failed once it has failed on every connected replica;
- copies: one replica makes a copy, and another takes over when that one is lost; the first answer
  counts;
- statuses: the status from the replica whose dataflow is furthest ahead counts.

Compaction follows the joined frontier, that is, the fastest replica. A slower replica reads under
leases of its own. A replica that was lost starts again at the `as_of` that the compactions have
left in the history, which the durable holds protect. So nothing waits for a slow replica, and an
absent one retains no history.

Invariants (`validate`): a peek is answered once; durable frontiers advance strictly; batches of a
subscribe are contiguous; nothing is kept of what was dropped or answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from actors.model.plan.updates import between, from_ipc, to_ipc
from actors.model.protocol.compute import (
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
    ScheduleDataflow,
    StatusResponse,
    SubscribeBatch,
    SubscribeExport,
    SubscribeResponse,
)
from actors.replica.cluster.partitioned import merge_results
from actors.replica.compute.history import ComputeHistory
from actors.runtime.errors import (
    DefiniteError,
    InvalidUsage,
    ReadBelowSince,
    UnknownObject,
    ViewInError,
    from_wire,
)
from actors.runtime.progress import Frontier, ObjectId, is_empty


class MergedResponses(msgspec.Struct):
    """The consequences of one event."""

    responses: list[Response] = []
    """Responses that count."""
    sent: list[tuple[str, Command]] = []
    """Commands to send, each with its replica."""
    unread: list[str] = []
    """Keys of stashed parts that no client will read."""
    regressed: list[tuple[ObjectId, Frontier]] = []
    """Indexes that lost the replica furthest ahead, with the upper of the others."""


class _Replica:
    """One replica, connected or not."""

    def __init__(self) -> None:
        self.incarnation: int | None = None
        """Number of the current connection; None if there is none."""
        self.written: dict[ObjectId, Frontier] = {}
        """Uppers reported on the current connection."""


class _Stream:
    """A subscribe: its upper, and the replicas on which it has failed."""

    def __init__(self) -> None:
        self.upper: Frontier | None = None
        """Upper of the last batch; None before the first."""
        self.over = False
        """True once the subscribe was answered for good."""
        self.failed: dict[str, SubscribeResponse] = {}
        """Errors of the replicas on which it has failed."""


class ReplicaMerge:
    """Merges the responses of all replicas; see the module."""

    def __init__(
        self, commands: Iterable[Command] = (), result_bytes_max: int = 48 * 1024 * 1024
    ) -> None:
        self._result_bytes_max = result_bytes_max
        self._history = ComputeHistory()
        """Commands that build the current state; a replica that connects gets them."""
        self._replicas: dict[str, _Replica] = {}
        """Replicas by name, in the order in which they were added."""
        self._joined: dict[ObjectId, Frontier] = {}
        """Joined upper of each dataflow's export."""
        self._in_memory: set[ObjectId] = set()
        """Ids of the indexes."""
        self._peeks: dict[str, dict[str, PeekResponse]] = {}
        """Open peeks, with the replicas' errors, one of which may come to count; for those in
        `_of_all`, with all answers."""
        self._of_all: set[str] = set()
        """Peeks that every connected replica has to answer."""
        self._unread: list[str] = []
        """Keys of stashed parts of canceled peeks; returned with the next answer."""
        self._streams: dict[ObjectId, _Stream] = {}
        """Open subscribes by dataflow."""
        self._copies: dict[ObjectId, str | None] = {}
        """Open copies, each with the replica that makes it; None if no connected replica does."""
        self._copied: set[ObjectId] = set()
        """Copies that were answered but not dropped yet."""
        self._statuses: dict[ObjectId, tuple[str, Frontier]] = {}
        """Replica and frontier of each dataflow's last status."""
        for command in commands:
            self.command(command)

    # -- replicas ------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the names of all replicas."""
        return list(self._replicas)

    @property
    def connected_names(self) -> list[str]:
        """Return the names of the connected replicas, in the order in which they were added."""
        return [name for name, each in self._replicas.items() if each.incarnation is not None]

    def add(self, name: str) -> None:
        """Add a replica, which counts once it has connected."""
        assert name not in self._replicas, name
        self._replicas[name] = _Replica()

    def drop(self, name: str) -> MergedResponses:
        """Remove a replica."""
        merged = self._gone(name)
        del self._replicas[name]
        return merged

    def count_commands(self) -> Counter[str]:
        """Return how many commands of each kind the history has."""
        return Counter(type(each).__name__ for each in self._history.commands())

    def connected(self, name: str, incarnation: int) -> tuple[list[Command], MergedResponses]:
        """Record a new connection. Return the history to send, and the consequences for other
        replicas."""
        replica = self._replicas.get(name)
        if replica is None:
            return [], MergedResponses()
        merged = self._gone(name)
        replica.incarnation = incarnation
        for id_, maker in self._copies.items():
            # No connected replica makes this copy, so this one does.
            if maker is None:
                self._copies[id_] = name
        self._history.reduce()
        commands = self._history.commands()
        # Another replica makes these copies, or they are complete: a second one would write them
        # again.
        elsewhere = {id_ for id_, maker in self._copies.items() if maker != name} | self._copied
        if elsewhere:
            commands = [each for each in commands if _about(each) not in elsewhere]
        return commands, merged

    def lost(self, name: str, incarnation: int) -> MergedResponses:
        """Record the loss of a connection. The loss of a former connection changes nothing."""
        replica = self._replicas.get(name)
        if replica is None or replica.incarnation != incarnation:
            return MergedResponses()
        return self._gone(name)

    def _gone(self, name: str) -> MergedResponses:
        replica, merged = self._replicas[name], MergedResponses()
        if replica.incarnation is None:
            return merged
        replica.incarnation = None
        written, replica.written = replica.written, {}
        for id_ in written:
            if id_ in self._in_memory:
                left = max(each.written.get(id_, 0) for each in self._replicas.values())
                if left < self._joined[id_]:
                    self._joined[id_] = left
                    merged.regressed.append((id_, left))
        for uuid, answers in list(self._peeks.items()):
            # The lost replica will not answer: the answers of the others may now be complete.
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

    def _hand_over(self, id_: ObjectId, merged: MergedResponses) -> str | None:
        """Give a copy to another connected replica and return its name, or None if there is
        none."""
        maker = next(iter(self.connected_names), None)
        if maker is not None:
            about = [each for each in self._history.commands() if _about(each) == id_]
            merged.sent += [(maker, each) for each in about]
        return maker

    # -- commands ------------------------------------------------------------------------------

    def command(self, command: Command) -> list[str]:
        """Add a command to the history. Return the replicas to send it to."""
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

    def responded(self, name: str, incarnation: int, response: Response) -> MergedResponses:
        """Merge a response with those that came before."""
        replica, merged = self._replicas.get(name), MergedResponses()
        if replica is None or replica.incarnation != incarnation:
            # It is from a former connection: it does not count, and no client will read its blobs.
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
                    merged.responses.append(response)
            case PeekResponse():
                self._answered(name, response, merged)
            case SubscribeResponse():
                self._subscribed(name, response, merged)
            case CopyToResponse(id=id_):
                if id_ in self._copies:
                    del self._copies[id_]
                    self._copied.add(id_)
                    merged.responses.append(response)
            case StatusResponse(id=id_, hi=hi):
                owner, furthest = self._statuses.get(id_, (name, 0))
                # The status of a lost replica is replaced by any other's.
                alone = owner not in self._replicas or self._replicas[owner].incarnation is None
                if owner == name or alone or hi > furthest:
                    self._statuses[id_] = (name, hi)
                    merged.responses.append(response)
            case Frontiers():
                pass
            case _:
                merged.responses.append(response)
        return merged

    def _answered(self, name: str, response: PeekResponse, merged: MergedResponses) -> None:
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
            # An error of the data is the same on all replicas, so it counts immediately.
            case PeekError():
                self._tell(response, merged)
            case _ if response.uuid in self._of_all:
                self._settle_peek(response.uuid, answers, merged)
            case _:
                self._tell(response, merged)

    def _settle_peek(
        self, uuid: str, answers: dict[str, PeekResponse], merged: MergedResponses
    ) -> None:
        """Answer a peek that every connected replica has answered, with all their rows or with the
        last error."""
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
        self._tell(PeekResponse(uuid, result), merged)

    def _tell(self, response: PeekResponse, merged: MergedResponses) -> None:
        """Accept the deciding answer, and cancel the peek on the other replicas."""
        answers = self._peeks.pop(response.uuid)
        self._of_all.discard(response.uuid)
        known = set(_parts(response))
        for answer in answers.values():
            merged.unread += [key for key in _parts(answer) if key not in known]
        cancel = CancelPeek(response.uuid)
        # A replica that connects later must not answer it, either.
        self._history.push(cancel)
        merged.responses.append(response)
        merged.sent += [(each, cancel) for each in self.connected_names if each not in answers]

    def _subscribed(self, name: str, response: SubscribeResponse, merged: MergedResponses) -> None:
        stream = self._streams.get(response.id)
        if stream is None or stream.over or name in stream.failed:
            merged.unread += _pieces(response)
            return
        batch = response.batch
        if not isinstance(batch, SubscribeBatch):
            # The replica dropped it on its own: a subscribe that its client ended is no longer in
            # `_streams`.
            stream.failed[name] = response
            self._settle_stream(stream, merged)
            return
        if batch.error is None and stream.upper is not None and batch.lower > stream.upper:
            # Updates between the two bounds would be missing: the dataflow counts as failed on this
            # replica.
            gap = f"{name} continued at {batch.lower}, but the last batch ended at {stream.upper}"
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
        merged.responses.append(SubscribeResponse(response.id, batch))

    def _settle_stream(self, stream: _Stream, merged: MergedResponses) -> None:
        connected = self.connected_names
        if connected and not stream.over and all(name in stream.failed for name in connected):
            stream.over = True
            merged.responses.append(next(reversed(stream.failed.values())))

    # -- queries -----------------------------------------------------------------------------------

    def upper(self, id_: ObjectId) -> Frontier:
        """Return an object's upper, from the reports of connected replicas."""
        return self._joined.get(id_, 0)

    def written(self, name: str) -> dict[ObjectId, Frontier]:
        """Return the uppers that a replica has reported."""
        return dict(self._replicas[name].written)

    @property
    def objects(self) -> int:
        """Return the number of dataflows that report frontiers."""
        return len(self._joined)

    def __len__(self) -> int:
        """Return the number of commands in the history."""
        return len(self._history)

    def validate(self) -> None:
        """Assert the invariants."""
        connected = set(self.connected_names)
        for uuid, answers in self._peeks.items():
            assert answers.keys() <= connected
            assert not connected or answers.keys() < connected, "it should have been answered"
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
    """Return whether an error comes from the replica that reports it, so that another may
    succeed."""
    error = from_wire(code, "", True)
    # The replica may have started its dataflow later than the time that is read.
    if isinstance(error, ReadBelowSince | UnknownObject):
        return True
    return not isinstance(error, InvalidUsage | ViewInError | DefiniteError)


def _about(command: Command) -> ObjectId | None:
    """Return the dataflow that a command is about."""
    match command:
        case CreateDataflow(dataflow):
            return dataflow.id
        case ScheduleDataflow(id=id_) | AllowCompaction(id=id_):
            return id_
    return None


def _parts(response: PeekResponse) -> list[str]:
    """Return the keys of the blobs of an answer."""
    result = response.result
    return [part.key for part in result.parts] if isinstance(result, PeekStashed) else []


def _pieces(response: SubscribeResponse) -> list[str]:
    """Return the keys of the blobs of a batch."""
    batch = response.batch
    return [part.key for part in batch.parts] if isinstance(batch, SubscribeBatch) else []


def _beyond(batch: SubscribeBatch, lower: Frontier) -> SubscribeBatch:
    """Return a batch without its updates below `lower`. Readers of its blobs skip those
    themselves."""
    arrow = batch.arrow
    if arrow is not None:
        kept = between(from_ipc(arrow), lower, batch.upper)
        arrow = to_ipc(kept) if kept.num_rows else None
    return msgspec.structs.replace(batch, lower=lower, arrow=arrow)
