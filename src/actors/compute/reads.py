"""The rules of peeks on one worker: pure, events in → effects out, a part of `compute.state`.

A peek is answered exactly once, or not at all when its connection is gone. One of an index waits
until its time is sealed in this worker's partition, and holds back compaction until it is
answered. One of a shard is read by a single worker, chosen by its uuid; the others answer at
once that they have no rows. One of a relation is answered by each worker with its own rows, as
they are then.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.compute.answers import NOTHING
from actors.compute.events import Compact, Effect, PeekDone, Respond, StartPeek, StopPeek
from actors.compute.finishing import check_finishing
from actors.compute.peeks import chosen_worker, error_of
from actors.compute.pending import Pending, PendingPeeks
from actors.compute.rendered import Rendered
from actors.errors import PenstockError, ReadBelowSince, UnknownObject
from actors.progress import Frontier, ObjectId
from actors.protocol.compute import (
    LogTarget,
    Peek,
    PeekCanceled,
    PeekResponse,
    PeekResult,
    ShardTarget,
)
from actors.protocol.relations import worker_relation


class Reads:
    """Peeks without an answer, and what they hold back. `rendered` is the state's own."""

    def __init__(
        self,
        rendered: Mapping[ObjectId, Rendered],
        index: int,
        count: int,
        *,
        result_bytes_max: int,
        peeks_max: int,
    ) -> None:
        self._rendered = rendered
        self._index = index
        self._count = count
        self.result_bytes_max = result_bytes_max
        self.inline_bytes_max: int | None = None
        """What a client has configured; None: nothing yet."""
        self.pending = PendingPeeks(peeks_max)

    def accept(self, peek: Peek) -> list[Effect]:
        """A new peek: refused, started, or left to wait."""
        try:
            number = self._number_for(peek)
        except PenstockError as error:
            return [Respond(PeekResponse(peek.uuid, error_of(error)))]
        target = peek.target
        mine = chosen_worker(peek.uuid, self._count) == self._index
        if isinstance(target, ShardTarget) and not mine:
            return [Respond(PeekResponse(peek.uuid, NOTHING))]
        return self._start(self.pending.add(peek, number))

    def _number_for(self, peek: Peek) -> int:
        """The index's number (0: a shard, or a relation of the worker's own). Raises what refuses
        the peek."""
        self.pending.check_room()
        if peek.finishing is not None:
            check_finishing(peek.finishing)
        if isinstance(peek.target, ShardTarget):
            return 0
        if isinstance(peek.target, LogTarget):
            worker_relation(peek.target.id)
            return 0
        rendered = self._rendered.get(peek.target.id)
        if rendered is None or not rendered.is_index:
            raise UnknownObject(f"there is no index {peek.target.id}")
        if peek.time < rendered.allowed:
            raise _below_since(peek, rendered.allowed)
        return rendered.number

    def _start(self, pending: Pending) -> list[Effect]:
        if pending.started:
            return []
        if pending.number:
            read = self._rendered.get(pending.peek.target.id)
            if read is None or read.sealed <= pending.peek.time:
                return []
            if pending.peek.time < read.since:
                refused = error_of(_below_since(pending.peek, read.since))
                return self._answer(pending, refused)
        pending.started = True
        limit, inline = self.result_bytes_max, self.inline_bytes_max
        return [StartPeek(pending.ticket, pending.number, pending.peek, limit, inline)]

    def sealed(self, rendered: Rendered) -> list[Effect]:
        """More of an index can be read."""
        effects: list[Effect] = []
        for pending in self.pending.of(rendered.number):
            effects += self._start(pending)
        return effects

    def done(self, event: PeekDone) -> list[Effect]:
        """Rows or an error; or the index was replaced meanwhile, and the peek waits again."""
        pending = self.pending.by_ticket(event.ticket)
        if pending is None:
            return []
        if event.result is not None:
            return self._answer(pending, event.result)
        pending.started = False
        return self._start(pending)

    def cancel(self, uuid: str) -> list[Effect]:
        """On request; without effect when it was answered already."""
        pending = self.pending.get(uuid)
        if pending is None:
            return []
        return _stop(pending) + self._answer(pending, PeekCanceled())

    def refuse(self, rendered: Rendered) -> list[Effect]:
        """The index is about to be dropped."""
        error = UnknownObject(f"index {rendered.id} was dropped while a read of it waited")
        effects: list[Effect] = []
        for pending in self.pending.of(rendered.number):
            effects += _stop(pending) + self._answer(pending, error_of(error))
        return effects

    def forget(self) -> list[Effect]:
        """The connection is gone: no answers."""
        effects: list[Effect] = []
        for pending in self.pending.all():
            effects += _stop(pending) + self._remove(pending)
        return effects

    def compact(self, rendered: Rendered) -> list[Effect]:
        """Tells the partition what it may forget: never what a pending peek reads."""
        if not rendered.is_index:
            return []
        if rendered.allowed <= rendered.compacted:
            return []
        earliest = self.pending.earliest(rendered.number)
        since = rendered.allowed if earliest is None else min(rendered.allowed, earliest)
        if since <= rendered.compacted:
            return []
        rendered.compacted = since
        return [Compact(rendered.number, since)]

    def _answer(self, pending: Pending, result: PeekResult) -> list[Effect]:
        return [*self._remove(pending), Respond(PeekResponse(pending.peek.uuid, result))]

    def _remove(self, pending: Pending) -> list[Effect]:
        self.pending.remove(pending)
        read = self._rendered.get(pending.peek.target.id) if pending.number else None
        return self.compact(read) if read is not None else []

    def validate(self) -> None:
        """Asserts the invariants."""
        self.pending.validate()
        for pending in self.pending.all():
            if pending.number:
                read = self._rendered.get(pending.peek.target.id)
                assert read is not None, "a peek of a dropped index waits"
                assert read.number == pending.number, "a peek waits for a former rendering"
                assert read.compacted <= pending.peek.time, "compaction overtook a peek"


def _stop(pending: Pending) -> list[Effect]:
    return [StopPeek(pending.ticket)] if pending.started else []


def _below_since(peek: Peek, since: Frontier) -> ReadBelowSince:
    return ReadBelowSince(
        f"time {peek.time} is below the since {since} of {peek.target.id}; read a later time"
    )
