"""The worker's rules: a pure state machine, events in → effects out.

Theory of operation. Commands arrive twice: on worker 0 as `Tagged` commands of its client,
which it offers to the sequencer (`Offer`); then, on every worker, as `Sequenced` commands, and
only these change anything. `Hello` begins an iteration: commands are collected until
`InitializationComplete`, then reconciled with what runs (`compute.reconcile`); after that each
is applied as it comes. Everything rendered has a *render number*, given out in command order
and therefore equal on all workers; whatever a dataflow says is told apart by it.

Rules:
- while an iteration is initializing, or its client is gone, nothing is answered; the dataflows
  go on, their frontiers are remembered and reported afresh after the next reconciliation;
- frontiers never go back, start at the `as_of`, and nothing follows the empty one; subscribes
  report none (`compute.rendered`);
- a peek is answered exactly once, or not at all when its connection is gone
  (`compute.reads`);
- a drop is reported (all frontiers empty) only when the dataflow and its tasks have stopped;
- of a subscribe only worker 0 sends batches; the others say at once that theirs are empty;
- a copy is answered once: by worker 0 when it is done, failed or dropped, by the others at once;
- a dataflow whose actor crashed is started afresh; a subscribe then ends with an error, since
  what was sent cannot be sent again, and a copy has failed.

Invariants: `validate`. It performs nothing, reads no clock, and decides nothing by progress
that another worker must decide alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, assert_never

import msgspec

from actors.compute.events import (
    ClientLost,
    CopyEnded,
    Crashed,
    DropDataflow,
    Effect,
    Emitting,
    Event,
    Offer,
    PeekDone,
    Progressed,
    Receipt,
    Reconciled,
    Render,
    Respawn,
    Respond,
    Sealed,
    StatusSeen,
    Stopped,
    SwitchClient,
    Tell,
)
from actors.compute.history import ComputeHistory
from actors.compute.reads import Reads
from actors.compute.reconcile import Running, reconcile
from actors.compute.rendered import Rendered
from actors.errors import LocalProtocolError
from actors.progress import EMPTY, Frontier, Nonce, ObjectId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyResult,
    CopyToResponse,
    CreateDataflow,
    DataflowDescription,
    Frontiers,
    Hello,
    InitializationComplete,
    Lot,
    Peek,
    Schedule,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
    Tagged,
    UpdateConfiguration,
)
from actors.protocol.internal import (
    CompactionAllowed,
    DataflowStatus,
    Emitted,
    Propose,
    Scheduled,
    Sequenced,
    WritesAllowed,
)
from actors.protocol.storage_internal import ForStorage

LOST_MAX: Final = 1024
"""Clients remembered that were gone before their Hello came: as many as nonces are remembered."""


class Dropping(msgspec.Struct, frozen=True):
    """A dropped dataflow that has not stopped yet; `nonce`: who is to learn of the end."""

    id: ObjectId
    nonce: Nonce | None
    report: Frontiers | None
    """What is to be told then: empty in every kind that was not told to be empty before."""


class ComputeState:
    """One worker's state; see the module's text."""

    def __init__(self, index: int, count: int, *, result_bytes_max: int, peeks_max: int) -> None:
        self.index = index
        self.count = count
        self.generation = 0
        self.next_index = 0
        self.last_number = 0
        self.ignored = 0
        self.nonce: Nonce | None = None
        self.connected = False
        self.incoming: ComputeHistory | None = None
        self.writes_allowed = False
        self.maintenance_ms: int | None = None
        """What a client has configured; None: nothing yet."""
        self.rendered: dict[ObjectId, Rendered] = {}
        self._numbers: dict[int, Rendered] = {}
        self.dropping: dict[int, Dropping] = {}
        self.reads = Reads(
            self.rendered, index, count, result_bytes_max=result_bytes_max, peeks_max=peeks_max
        )
        self._offering: Nonce | None = None
        self._lost: OrderedDict[Nonce, None] = OrderedDict()
        """Clients that were gone before their Hello came in its order."""

    def handle(self, event: Event) -> list[Effect]:
        """What an event leads to, in the order to perform it.

        Raises `LocalProtocolError` when the one order of commands has a gap.
        """
        match event:
            case Tagged():
                return self._tagged(event)
            case Sequenced():
                return [effect for effects in self.steps(event) for effect in effects]
            case ClientLost():
                return self._client_lost(event)
            case PeekDone():
                return self.reads.done(event)
            case Stopped():
                return self._stopped(event)
        rendered = self.by_number(event.number)
        if rendered is None:
            return []
        match event:
            case Progressed():
                rendered.progressed(event.progress)
                return self._report(rendered)
            case StatusSeen():
                return self._show(rendered, event.status)
            case Sealed():
                return self._sealed(rendered, event)
            case Emitting():
                return self._emitting(rendered, event)
            case CopyEnded():
                return self._answer_copy(rendered, event.result)
            case Crashed():
                return self._crashed(rendered, event.text)
            case _:
                assert_never(event)

    @property
    def muted(self) -> bool:
        """Whether there is nobody to answer."""
        return not self.connected or self.incoming is not None

    def commands_for(self, number: int) -> list[Scheduled | CompactionAllowed | WritesAllowed]:
        """What the actor of a dataflow must be told when it starts late or afresh."""
        rendered = self.by_number(number)
        if rendered is None:
            return []
        told: list[Scheduled | CompactionAllowed | WritesAllowed] = []
        if self.writes_allowed:
            told.append(WritesAllowed())
        if rendered.allowed > rendered.description.as_of:
            told.append(CompactionAllowed(rendered.allowed))
        if rendered.scheduled:
            told.append(Scheduled())
        return told

    def by_number(self, number: int) -> Rendered | None:
        """What runs under a render number."""
        return self._numbers.get(number)

    # -- connections and the order -----------------------------------------------------------------

    def _tagged(self, event: Tagged) -> list[Effect]:
        """Worker 0 offers its client's commands; the others hear them from the sequencer."""
        if self.index != 0:
            return []
        if isinstance(event.command, Hello):
            self._offering = event.nonce
            self.generation += 1
        elif event.nonce != self._offering:
            self.ignored += 1
            return []
        return [Offer(Propose(self.generation, event.command))]

    def steps(self, event: Sequenced) -> Iterator[list[Effect]]:
        """What each command of a lot leads to, to be performed before the next one is looked at.
        Commands of the storage half have their place in the order, and lead to nothing here.

        Raises `LocalProtocolError` when the one order of commands has a gap.
        """
        if event.index != self.next_index:
            raise LocalProtocolError(
                f"worker {self.index} got command {event.index}, {self.next_index} is next"
            )
        self.next_index += 1
        command = event.command
        if isinstance(command, ForStorage):
            return
        for one in command.commands if isinstance(command, Lot) else (command,):
            yield self._ordered(one)

    def _ordered(self, command: Command) -> list[Effect]:
        if isinstance(command, Hello):
            return self._hello(command)
        if self.nonce is None:
            self.ignored += 1
            return []
        if self.incoming is None:
            return self._apply(command)
        if isinstance(command, InitializationComplete):
            return self._reconcile(self.incoming)
        self.incoming.push(command)
        return []

    def _hello(self, command: Hello) -> list[Effect]:
        effects = self.reads.forget()
        self.nonce = command.nonce
        self.connected = command.nonce not in self._lost
        self._lost.pop(command.nonce, None)
        self.incoming = ComputeHistory()
        return [*effects, SwitchClient(command.nonce if self.connected else None)]

    def _client_lost(self, event: ClientLost) -> list[Effect]:
        if event.nonce != self.nonce:
            self._lost[event.nonce] = None
            if len(self._lost) > LOST_MAX:
                self._lost.popitem(last=False)
            return []
        if not self.connected:
            return []
        self.connected = False
        return [*self.reads.forget(), SwitchClient(None)]

    def _reconcile(self, incoming: ComputeHistory) -> list[Effect]:
        """Keeps and compacts what is compatible, drops the rest silently, then applies what is
        new, in this order."""
        self.incoming = None
        incoming.reduce()
        commands = incoming.commands()
        running = {id: Running(r.description, r.allowed) for id, r in self.rendered.items()}
        plan = reconcile(running, commands)
        effects: list[Effect] = []
        for id, description in plan.keep.items():
            kept = self.rendered[id]
            old = kept.description
            # The old one's parts stay, which the dataflow shares; the new one's are garbage.
            kept.description = msgspec.structs.replace(
                old, name=description.name, as_of=description.as_of, until=description.until
            )
            kept.reported = None
            effects += self._allow(kept, description.as_of)
        for id in plan.drop:
            effects += self._drop(self.rendered[id], silently=True)
        for command in commands:
            if not (isinstance(command, CreateDataflow) and command.dataflow.id in plan.keep):
                effects += self._apply(command)
        for id in plan.keep:
            kept = self.rendered[id]
            effects += self._report(kept)
            if kept.status is not None and not self.muted:
                effects.append(Respond(kept.status))
        effects.append(
            Reconciled(
                self.nonce or "", len(plan.keep), len(plan.create), len(plan.drop), plan.replaced
            )
        )
        return effects

    # -- commands ----------------------------------------------------------------------------------

    def _apply(self, command: Command) -> list[Effect]:
        match command:
            case CreateDataflow():
                return self._create(command.dataflow)
            case Schedule():
                return self._schedule(command.id)
            case AllowCompaction():
                return self._allow_compaction(command)
            case AllowWrites():
                return self._allow_writes()
            case Peek():
                if self.muted or command.uuid in self.reads.pending:
                    self.ignored += 1
                    return []
                return self.reads.accept(command)
            case CancelPeek():
                return self.reads.cancel(command.uuid)
            case UpdateConfiguration():
                self._configure(command)
        return []

    def _configure(self, command: UpdateConfiguration) -> None:
        if command.result_bytes_max is not None:
            self.reads.result_bytes_max = command.result_bytes_max
        if command.inline_bytes_max is not None:
            self.reads.inline_bytes_max = command.inline_bytes_max
        if command.maintenance_ms is not None:
            self.maintenance_ms = command.maintenance_ms

    def _create(self, description: DataflowDescription) -> list[Effect]:
        if description.id in self.rendered:
            self.ignored += 1
            return []
        self.last_number += 1
        as_of = description.as_of
        rendered = Rendered(self.last_number, description, allowed=as_of, compacted=as_of)
        self.rendered[description.id] = self._numbers[rendered.number] = rendered
        effects: list[Effect] = [Render(rendered.number, description)]
        if self.writes_allowed:
            effects.append(Tell(rendered.number, WritesAllowed()))
        if rendered.is_subscribe and self.index != 0 and not self.muted:
            nothing = SubscribeBatch(0, EMPTY)
            effects.append(Respond(SubscribeResponse(description.id, nothing)))
        if rendered.is_copy and self.index != 0:
            effects += self._answer_copy(rendered, CopyDone(0, 0, ""))
        return effects

    def _schedule(self, id: ObjectId) -> list[Effect]:
        rendered = self.rendered.get(id)
        if rendered is None:
            self.ignored += 1
            return []
        if rendered.scheduled:
            return []
        rendered.scheduled = True
        return [Tell(rendered.number, Scheduled())]

    def _allow_writes(self) -> list[Effect]:
        if self.writes_allowed:
            return []
        self.writes_allowed = True
        return [Tell(rendered.number, WritesAllowed()) for rendered in self.rendered.values()]

    def _allow_compaction(self, command: AllowCompaction) -> list[Effect]:
        rendered = self.rendered.get(command.id)
        if rendered is None:
            self.ignored += 1
            return []
        if is_empty(command.frontier):
            return self._drop(rendered, silently=False)
        return self._allow(rendered, command.frontier)

    def _allow(self, rendered: Rendered, frontier: Frontier) -> list[Effect]:
        if frontier <= rendered.allowed:
            return []
        rendered.allowed = frontier
        told: list[Effect] = [Tell(rendered.number, CompactionAllowed(frontier))]
        return told + self.reads.compact(rendered)

    def _drop(self, rendered: Rendered, *, silently: bool) -> list[Effect]:
        id, number = rendered.id, rendered.number
        effects = self.reads.refuse(rendered)
        del self.rendered[id], self._numbers[number]
        report = None if silently else rendered.end()
        self.dropping[number] = Dropping(id, self.nonce, report)
        ends_here = rendered.is_subscribe and self.index == 0 and not is_empty(rendered.emitted)
        if ends_here and not silently and not self.muted:
            dropped = SubscribeDropped(rendered.emitted)
            effects.append(Respond(SubscribeResponse(id, dropped)))
        if rendered.is_copy and not silently:
            effects += self._answer_copy(rendered, CopyDropped())
        return [*effects, DropDataflow(number)]

    def _stopped(self, event: Stopped) -> list[Effect]:
        dropped = self.dropping.pop(event.number)
        if dropped.report is None or dropped.nonce != self.nonce or self.muted:
            return []
        return [Respond(dropped.report)]

    # -- what dataflows say ------------------------------------------------------------------------

    def _report(self, rendered: Rendered) -> list[Effect]:
        news = None if self.muted else rendered.news()
        return [] if news is None else [Respond(news)]

    def _show(self, rendered: Rendered, seen: DataflowStatus) -> list[Effect]:
        status = rendered.show(seen)
        return [] if self.muted else [Respond(status)]

    def _sealed(self, rendered: Rendered, event: Sealed) -> list[Effect]:
        rendered.seal(event.upper, event.since)
        return self.reads.sealed(rendered) + self._report(rendered)

    def _emitting(self, rendered: Rendered, event: Emitting) -> list[Effect]:
        emit = event.emit
        receipt = Emitted(emit.dataflow, emit.incarnation, emit.batch.upper)
        if self.muted:
            return [Receipt(event.number, receipt)]
        rendered.emitted = max(rendered.emitted, emit.batch.upper)
        batch = self._bounded(emit.batch)
        return [Respond(SubscribeResponse(emit.dataflow, batch), event.number, receipt)]

    def _bounded(self, batch: SubscribeBatch) -> SubscribeBatch:
        size = len(batch.arrow or b"")
        limit = self.reads.result_bytes_max
        if size <= limit:
            return batch
        text = (
            f"the changes at [{batch.lower}, {batch.upper}) take {size} bytes, more than "
            f"result_bytes_max ({limit})"
        )
        return SubscribeBatch(batch.lower, batch.upper, None, ("InvalidUsage", text))

    def _answer_copy(self, rendered: Rendered, result: CopyResult) -> list[Effect]:
        """Once. Who was gone meanwhile asks again, and hears it from a copy that finds it done."""
        if rendered.answered:
            return []
        rendered.answered = True
        return [] if self.muted else [Respond(CopyToResponse(rendered.id, result))]

    def _crashed(self, rendered: Rendered, text: str) -> list[Effect]:
        if rendered.is_copy:
            return self._answer_copy(rendered, CopyFailed("ActorDead", text))
        if not rendered.is_subscribe:
            stalled = self._show(rendered, DataflowStatus(rendered.id, "stalled", text))
            return [*stalled, Respawn(rendered.number)]
        if self.muted or is_empty(rendered.emitted):
            return []
        lower, rendered.emitted = rendered.emitted, EMPTY
        batch = SubscribeBatch(lower, EMPTY, None, ("ActorDead", text))
        return [Respond(SubscribeResponse(rendered.id, batch))]

    # -- checks ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Asserts the invariants."""
        numbers = [rendered.number for rendered in self.rendered.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) == self._numbers.keys()
        assert not set(numbers) & self.dropping.keys()
        assert all(0 < number <= self.last_number for number in [*numbers, *self.dropping])
        assert not (len(self.reads.pending) and self.muted), "a peek of nobody waits"
        self.reads.validate()
        for rendered in self.rendered.values():
            assert rendered.allowed >= rendered.description.as_of
            assert rendered.compacted <= rendered.allowed
