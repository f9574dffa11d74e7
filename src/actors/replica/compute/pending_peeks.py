"""The pending peeks of one worker: events in, effects out. A part of `compute.state`. Pure.

A peek is answered exactly once, or not at all if its connection is lost. A peek of an index waits
until its time is sealed in this worker's partition, and holds back compaction until then. A peek of
a shard is read by a single worker, chosen by the peek's uuid; the others answer without rows. For a
peek of a relation each worker answers with its own current rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.model.protocol.compute import (
    LogTarget,
    Peek,
    PeekCanceled,
    PeekResponse,
    PeekResult,
    ShardTarget,
)
from actors.model.protocol.relations import worker_relation
from actors.model.protocol.row_finishing import check_finishing
from actors.replica.compute.events import (
    CompactIndex,
    Effect,
    PeekDone,
    SendComputeResponse,
    StartPeek,
    StopPeek,
)
from actors.replica.compute.peeks import NOTHING, chosen_worker, error_of
from actors.replica.compute.rendered_dataflow import RenderedDataflow
from actors.runtime.errors import PenstockError, ReadBelowSince, ResourceBusy, UnknownObject
from actors.runtime.progress import Frontier, ObjectId, Time


class PendingPeek(msgspec.Struct):
    """An unanswered peek. `number` is the index's render number, or 0 for a shard or relation."""

    ticket: int
    number: int
    peek: Peek
    started: bool = False
    """True while the peek is being read; False while it waits for its time."""


class PendingPeeks:
    """All unanswered peeks of the current connection. Their number is limited."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_uuid: dict[str, PendingPeek] = {}
        """All pending peeks, by uuid."""
        self._by_ticket: dict[int, PendingPeek] = {}
        """The same peeks, by ticket."""
        self._by_number: dict[int, dict[int, PendingPeek]] = {}
        """The same peeks, by render number of the index and then by ticket."""
        self._last_ticket = 0
        """Last ticket that was given out."""

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._by_uuid

    def check_room(self) -> None:
        """Raise `ResourceBusy` if the limit of pending peeks is reached."""
        if len(self) >= self._limit:
            raise ResourceBusy(
                f"too many pending reads: {len(self)} (limit peeks_pending_max); try again later"
            )

    def add(self, peek: Peek, number: int) -> PendingPeek:
        """Add a peek under a new ticket."""
        # A ticket is never reused: the late result of a cancelled peek must not answer a new peek
        # with the same uuid.
        self._last_ticket += 1
        pending = PendingPeek(self._last_ticket, number, peek)
        self._by_uuid[peek.uuid] = self._by_ticket[pending.ticket] = pending
        self._by_number.setdefault(number, {})[pending.ticket] = pending
        return pending

    def get(self, uuid: str) -> PendingPeek | None:
        """Return the peek with this uuid, if it is pending."""
        return self._by_uuid.get(uuid)

    def by_ticket(self, ticket: int) -> PendingPeek | None:
        """Return the peek with this ticket, if it is pending."""
        return self._by_ticket.get(ticket)

    def remove(self, pending: PendingPeek) -> None:
        """Remove a peek that was answered or cancelled."""
        del self._by_uuid[pending.peek.uuid]
        del self._by_ticket[pending.ticket]
        same = self._by_number[pending.number]
        del same[pending.ticket]
        if not same:
            del self._by_number[pending.number]

    def all(self) -> list[PendingPeek]:
        """Return all peeks, oldest first."""
        return list(self._by_uuid.values())

    def of(self, number: int) -> list[PendingPeek]:
        """Return the pending peeks of the index with this render number."""
        return list(self._by_number.get(number, {}).values())

    def earliest(self, number: int) -> Time | None:
        """Return the earliest time at which a pending peek reads an index, or None."""
        return min((p.peek.time for p in self._by_number.get(number, {}).values()), default=None)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._by_uuid) == len(self._by_ticket) <= self._limit
        assert all(self._by_ticket[p.ticket] is p for p in self._by_uuid.values())
        assert sum(map(len, self._by_number.values())) == len(self._by_uuid)


class PeekHolds:
    """Answers peeks, and computes how far indexes may be compacted while peeks are pending.

    `rendered` belongs to `ComputeState`.
    """

    def __init__(
        self,
        rendered: Mapping[ObjectId, RenderedDataflow],
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
        """Limit set by a client; None if no client has set one."""
        self.pending = PendingPeeks(peeks_max)
        """Peeks that wait for their time or for their rows."""

    def accept(self, peek: Peek) -> list[Effect]:
        """Refuse, start or queue a new peek."""
        try:
            number = self._number_for(peek)
        except PenstockError as error:
            return [SendComputeResponse(PeekResponse(peek.uuid, error_of(error)))]
        target = peek.target
        # Only one worker reads a shard.
        mine = chosen_worker(peek.uuid, self._count) == self._index
        if isinstance(target, ShardTarget) and not mine:
            return [SendComputeResponse(PeekResponse(peek.uuid, NOTHING))]
        return self._start(self.pending.add(peek, number))

    def _number_for(self, peek: Peek) -> int:
        """Return the index's render number, or 0 for a shard or relation. Raise the error that
        refuses the peek."""
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
            raise UnknownObject(f"index {peek.target.id} does not exist")
        if peek.time < rendered.allowed:
            raise _below_since(peek, rendered.allowed)
        return rendered.number

    def _start(self, pending: PendingPeek) -> list[Effect]:
        if pending.started:
            return []
        if pending.number:
            read = self._rendered.get(pending.peek.target.id)
            if read is None or read.sealed <= pending.peek.time:
                return []
            # The snapshot of a new incarnation may be later than the peek's time.
            if pending.peek.time < read.since:
                refused = error_of(_below_since(pending.peek, read.since))
                return self._answer(pending, refused)
        pending.started = True
        limit, inline = self.result_bytes_max, self.inline_bytes_max
        return [StartPeek(pending.ticket, pending.number, pending.peek, limit, inline)]

    def sealed(self, rendered: RenderedDataflow) -> list[Effect]:
        """Start the peeks whose time is now sealed."""
        effects: list[Effect] = []
        for pending in self.pending.of(rendered.number):
            effects += self._start(pending)
        return effects

    def done(self, event: PeekDone) -> list[Effect]:
        """Answer the peek, or start it again if its arrangement was replaced."""
        pending = self.pending.by_ticket(event.ticket)
        if pending is None:
            return []
        if event.result is not None:
            return self._answer(pending, event.result)
        pending.started = False
        return self._start(pending)

    def cancel(self, uuid: str) -> list[Effect]:
        """Cancel a peek, unless it was already answered."""
        pending = self.pending.get(uuid)
        if pending is None:
            return []
        return _stop(pending) + self._answer(pending, PeekCanceled())

    def refuse(self, rendered: RenderedDataflow) -> list[Effect]:
        """Refuse the pending peeks of an index that is being dropped."""
        error = UnknownObject(f"index {rendered.id} was dropped before a pending read could run")
        effects: list[Effect] = []
        for pending in self.pending.of(rendered.number):
            effects += _stop(pending) + self._answer(pending, error_of(error))
        return effects

    def forget(self) -> list[Effect]:
        """Stop all peeks without answering them, because the connection is lost."""
        effects: list[Effect] = []
        for pending in self.pending.all():
            effects += _stop(pending) + self._remove(pending)
        return effects

    def compact(self, rendered: RenderedDataflow) -> list[Effect]:
        """Allow compaction of the partition, but not beyond the time of a pending peek."""
        if not rendered.is_index:
            return []
        if rendered.allowed <= rendered.compacted:
            return []
        earliest = self.pending.earliest(rendered.number)
        since = rendered.allowed if earliest is None else min(rendered.allowed, earliest)
        if since <= rendered.compacted:
            return []
        rendered.compacted = since
        return [CompactIndex(rendered.number, since)]

    def _answer(self, pending: PendingPeek, result: PeekResult) -> list[Effect]:
        return [
            *self._remove(pending),
            SendComputeResponse(PeekResponse(pending.peek.uuid, result)),
        ]

    def _remove(self, pending: PendingPeek) -> list[Effect]:
        self.pending.remove(pending)
        # The peek may have held back compaction.
        read = self._rendered.get(pending.peek.target.id) if pending.number else None
        return self.compact(read) if read is not None else []

    def validate(self) -> None:
        """Assert the invariants."""
        self.pending.validate()
        for pending in self.pending.all():
            if pending.number:
                read = self._rendered.get(pending.peek.target.id)
                assert read is not None, "a pending peek of a dropped index"
                assert read.number == pending.number, "a pending peek of an earlier rendering"
                assert read.compacted <= pending.peek.time, "compaction overtook a peek"


def _stop(pending: PendingPeek) -> list[Effect]:
    return [StopPeek(pending.ticket)] if pending.started else []


def _below_since(peek: Peek, since: Frontier) -> ReadBelowSince:
    return ReadBelowSince(
        f"time {peek.time} is below the since {since} of {peek.target.id}; read a later time"
    )
