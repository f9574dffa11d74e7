"""The state machine of a worker's compute half: events in, effects out. Pure.

Theory of operation. A command arrives twice. First worker 0 gets it from its client as a
`TaggedCommand` and offers it to the sequencer (`OfferCommand`). Then every worker gets it as a
`SequencedCommand`, and only that changes state. `Hello` starts an iteration: commands are collected
until `InitializationComplete`, then reconciled with what runs (`reconciliation`); later commands
are applied as they come. Every rendering has a *render number*, assigned in command order and
therefore equal on all workers, which identifies the messages of a dataflow.

Rules:
- While an iteration initializes, or its client is gone, no response is sent. Dataflows continue,
  and their frontiers are reported after the next reconciliation.
- Reported frontiers never go back, start at the `as_of`, and end with the empty one. Subscribes
  report none (`compute.rendered_dataflow`).
- A peek is answered exactly once, or not at all if its connection is lost
  (`compute.pending_peeks`).
- A drop is reported (all frontiers empty) only after the dataflow and its tasks have stopped.
- Only worker 0 sends the batches of a subscribe. The other workers send one empty batch
  immediately.
- A copy is answered once: by worker 0 when it finishes, fails or is dropped, and by the others
  immediately.

`validate` checks the invariants. The state machine reads no clock, and decisions that all workers
must make alike do not depend on progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import msgspec

from actors.model.protocol.client_commands import HalfClient
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CommandBatch,
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
    Peek,
    ScheduleDataflow,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    CompactionAllowed,
    DataflowScheduled,
    ProposeCommand,
    SequencedCommand,
    TaggedCommand,
    WritesAllowed,
)
from actors.model.protocol.storage_internal import ForStorage
from actors.replica.compute.events import (
    AcknowledgeBatch,
    ComputeClientLost,
    CopyEnded,
    DataflowCrashed,
    DataflowProgressed,
    DropCompleted,
    Effect,
    Event,
    IndexSealed,
    LogReconciliation,
    OfferCommand,
    PeekDone,
    RenderDataflow,
    RespawnDataflow,
    SendComputeResponse,
    SendToDataflow,
    StatusSeen,
    StopDataflow,
    SubscribeBatchReady,
    SwitchComputeClient,
)
from actors.replica.compute.history import ComputeHistory
from actors.replica.compute.pending_peeks import PeekHolds
from actors.replica.compute.reconciliation import RunningDataflow, reconcile
from actors.replica.compute.rendered_dataflow import RenderedDataflow
from actors.runtime.errors import LocalProtocolError
from actors.runtime.progress import EMPTY, Frontier, Nonce, ObjectId, is_empty


class DroppingDataflow(msgspec.Struct, frozen=True):
    """A dropped dataflow that has not stopped yet. `nonce` is the client that gets the report."""

    id: ObjectId
    nonce: Nonce | None
    report: Frontiers | None
    """Frontiers to report once it has stopped: empty for each kind not yet reported as empty."""


class ComputeState(HalfClient[ComputeHistory]):
    """State of one worker; see the module's docstring."""

    def __init__(self, index: int, count: int, *, result_bytes_max: int, peeks_max: int) -> None:
        super().__init__()
        self.index = index
        self.count = count
        self.generation = 0
        """Worker 0: count of client connections. The sequencer drops proposals of earlier ones."""
        self.next_index = 0
        """Position of the next sequenced command."""
        self.last_number = 0
        """Render number of the latest rendering."""
        self.ignored = 0
        """Number of commands that were ignored: of other connections, repeated, or about unknown
        objects."""
        self.writes_allowed = False
        """True from the first `AllowWrites` on."""
        self.maintenance_ms: int | None = None
        """Interval set by a client; None if no client has set one."""
        self.rendered: dict[ObjectId, RenderedDataflow] = {}
        """Running dataflows, by id of the export."""
        self._numbers: dict[int, RenderedDataflow] = {}
        """The same dataflows, by render number."""
        self.dropping: dict[int, DroppingDataflow] = {}
        """Dropped dataflows that have not stopped yet, by render number."""
        self.reads = PeekHolds(
            self.rendered, index, count, result_bytes_max=result_bytes_max, peeks_max=peeks_max
        )
        """Unanswered peeks."""
        self._proposing_for: Nonce | None = None
        """Worker 0: client whose commands are proposed, from its `Hello` to the next one."""

    def handle(self, event: Event) -> list[Effect]:
        """Apply an event, and return its effects in the order to perform them.

        Raise `LocalProtocolError` if a sequenced command is missing.
        """
        match event:
            case TaggedCommand():
                return self._tagged(event)
            case SequencedCommand():
                return [effect for effects in self.steps(event) for effect in effects]
            case ComputeClientLost():
                return self._client_lost(event)
            case PeekDone():
                return self.reads.done(event)
            case DropCompleted():
                return self._stopped(event)
        rendered = self.by_number(event.number)
        if rendered is None:
            return []
        match event:
            case DataflowProgressed():
                rendered.progressed(event.progress)
                return self._report(rendered)
            case StatusSeen():
                return self._set_status(rendered, event.status)
            case IndexSealed():
                return self._sealed(rendered, event)
            case SubscribeBatchReady():
                return self._batch_ready(rendered, event)
            case CopyEnded():
                return self._answer_copy(rendered, event.result)
            case DataflowCrashed():
                return self._crashed(rendered, event.text)
            case _:
                assert_never(event)

    def commands_for(
        self, number: int
    ) -> list[DataflowScheduled | CompactionAllowed | WritesAllowed]:
        """Return the past commands for a dataflow whose actor starts late or again."""
        rendered = self.by_number(number)
        if rendered is None:
            return []
        messages: list[DataflowScheduled | CompactionAllowed | WritesAllowed] = []
        if self.writes_allowed:
            messages.append(WritesAllowed())
        if rendered.allowed > rendered.description.as_of:
            messages.append(CompactionAllowed(rendered.allowed))
        if rendered.scheduled:
            messages.append(DataflowScheduled())
        return messages

    def by_number(self, number: int) -> RenderedDataflow | None:
        """Return the dataflow that runs under a render number."""
        return self._numbers.get(number)

    # -- connections and the order -----------------------------------------------------------------

    def _tagged(self, event: TaggedCommand[Command | CommandBatch]) -> list[Effect]:
        """Propose the client's commands on worker 0. The other workers get them from the
        sequencer."""
        if self.index != 0:
            return []
        if isinstance(event.command, Hello):
            self._proposing_for = event.nonce
            # The sequencer drops late proposals of earlier generations.
            self.generation += 1
        elif event.nonce != self._proposing_for:
            self.ignored += 1
            return []
        return [OfferCommand(ProposeCommand(self.generation, event.command))]

    def steps(self, event: SequencedCommand) -> Iterator[list[Effect]]:
        """Apply the commands of a batch one by one, and yield the effects of each.

        The effects must be performed before the next command is applied. Commands of the storage
        half have a position in the order but no effect here. Raise `LocalProtocolError` if a
        sequenced command is missing.
        """
        if event.index != self.next_index:
            raise LocalProtocolError(
                f"worker {self.index} got command {event.index}: expected {self.next_index}"
            )
        self.next_index += 1
        command = event.command
        if isinstance(command, ForStorage):
            return
        for one in command.commands if isinstance(command, CommandBatch) else (command,):
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
        served = self.begin(command.nonce, ComputeHistory())
        return [*self.reads.forget(), SwitchComputeClient(served)]

    def _client_lost(self, event: ComputeClientLost) -> list[Effect]:
        if not self.disconnect(event.nonce):
            return []
        return [*self.reads.forget(), SwitchComputeClient(None)]

    def _reconcile(self, incoming: ComputeHistory) -> list[Effect]:
        """Keep and compact compatible dataflows, drop the others without reporting it, and create
        new ones."""
        self.incoming = None
        incoming.reduce()
        commands = incoming.commands()
        running = {id: RunningDataflow(r.description, r.allowed) for id, r in self.rendered.items()}
        plan = reconcile(running, commands)
        effects: list[Effect] = []
        for id, description in plan.keep.items():
            kept = self.rendered[id]
            old = kept.description
            # Keep the parts of the old description, which the dataflow shares, so that the new ones
            # are freed.
            kept.description = msgspec.structs.replace(
                old, name=description.name, as_of=description.as_of, until=description.until
            )
            # The new client does not know any frontiers yet.
            kept.reported = None
            effects += self._allow(kept, description.as_of)
        # Drop first, because the new dataflows may reuse the ids.
        for id in plan.drop:
            effects += self._drop(self.rendered[id], silently=True)
        for command in commands:
            if not (isinstance(command, CreateDataflow) and command.dataflow.id in plan.keep):
                effects += self._apply(command)
        for id in plan.keep:
            kept = self.rendered[id]
            effects += self._report(kept)
            if kept.status is not None and not self.muted:
                effects.append(SendComputeResponse(kept.status))
        effects.append(
            LogReconciliation(
                self.nonce or "", len(plan.keep), len(plan.create), len(plan.drop), plan.replaced
            )
        )
        return effects

    # -- commands ----------------------------------------------------------------------------------

    def _apply(self, command: Command) -> list[Effect]:
        match command:
            case CreateDataflow():
                return self._create(command.dataflow)
            case ScheduleDataflow():
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
        rendered = RenderedDataflow(self.last_number, description, allowed=as_of, compacted=as_of)
        self.rendered[description.id] = self._numbers[rendered.number] = rendered
        effects: list[Effect] = [RenderDataflow(rendered.number, description)]
        if self.writes_allowed:
            effects.append(SendToDataflow(rendered.number, WritesAllowed()))
        if rendered.is_subscribe and self.index != 0 and not self.muted:
            # Only worker 0 sends batches, so this worker's part ends immediately.
            nothing = SubscribeBatch(0, EMPTY)
            effects.append(SendComputeResponse(SubscribeResponse(description.id, nothing)))
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
        return [SendToDataflow(rendered.number, DataflowScheduled())]

    def _allow_writes(self) -> list[Effect]:
        if self.writes_allowed:
            return []
        self.writes_allowed = True
        return [
            SendToDataflow(rendered.number, WritesAllowed()) for rendered in self.rendered.values()
        ]

    def _allow_compaction(self, command: AllowCompaction) -> list[Effect]:
        rendered = self.rendered.get(command.id)
        if rendered is None:
            self.ignored += 1
            return []
        if is_empty(command.frontier):
            return self._drop(rendered, silently=False)
        return self._allow(rendered, command.frontier)

    def _allow(self, rendered: RenderedDataflow, frontier: Frontier) -> list[Effect]:
        if frontier <= rendered.allowed:
            return []
        rendered.allowed = frontier
        effects: list[Effect] = [SendToDataflow(rendered.number, CompactionAllowed(frontier))]
        return effects + self.reads.compact(rendered)

    def _drop(self, rendered: RenderedDataflow, *, silently: bool) -> list[Effect]:
        id, number = rendered.id, rendered.number
        effects = self.reads.refuse(rendered)
        del self.rendered[id], self._numbers[number]
        report = None if silently else rendered.end()
        self.dropping[number] = DroppingDataflow(id, self.nonce, report)
        ends_here = rendered.is_subscribe and self.index == 0 and not is_empty(rendered.emitted)
        if ends_here and not silently and not self.muted:
            dropped = SubscribeDropped(rendered.emitted)
            effects.append(SendComputeResponse(SubscribeResponse(id, dropped)))
        if rendered.is_copy and not silently:
            effects += self._answer_copy(rendered, CopyDropped())
        return [*effects, StopDataflow(number)]

    def _stopped(self, event: DropCompleted) -> list[Effect]:
        dropped = self.dropping.pop(event.number)
        # A later client does not know the dropped dataflow.
        if dropped.report is None or dropped.nonce != self.nonce or self.muted:
            return []
        return [SendComputeResponse(dropped.report)]

    # -- messages of dataflows ---------------------------------------------------------------------

    def _report(self, rendered: RenderedDataflow) -> list[Effect]:
        news = None if self.muted else rendered.news()
        return [] if news is None else [SendComputeResponse(news)]

    def _set_status(self, rendered: RenderedDataflow, seen: StatusResponse) -> list[Effect]:
        rendered.status = seen
        return [] if self.muted else [SendComputeResponse(seen)]

    def _sealed(self, rendered: RenderedDataflow, event: IndexSealed) -> list[Effect]:
        rendered.seal(event.upper, event.since)
        return self.reads.sealed(rendered) + self._report(rendered)

    def _batch_ready(self, rendered: RenderedDataflow, event: SubscribeBatchReady) -> list[Effect]:
        emit = event.emit
        receipt = BatchEmitted(emit.dataflow, emit.incarnation, emit.batch.upper)
        if self.muted:
            # No client reads the batch. Acknowledge it, so that the dataflow continues.
            return [AcknowledgeBatch(event.number, receipt)]
        rendered.emitted = max(rendered.emitted, emit.batch.upper)
        batch = self._bounded(emit.batch)
        return [SendComputeResponse(SubscribeResponse(emit.dataflow, batch), event.number, receipt)]

    def _bounded(self, batch: SubscribeBatch) -> SubscribeBatch:
        size = len(batch.arrow or b"")
        limit = self.reads.result_bytes_max
        if size <= limit:
            return batch
        text = (
            f"batch too large: the changes in [{batch.lower}, {batch.upper}) take {size} bytes "
            f"(limit result_bytes_max: {limit})"
        )
        return SubscribeBatch(batch.lower, batch.upper, None, ("InvalidUsage", text))

    def _answer_copy(self, rendered: RenderedDataflow, result: CopyResult) -> list[Effect]:
        """Send the response of a copy, at most once."""
        if rendered.answered:
            return []
        rendered.answered = True
        # A reconnecting client issues the copy again; the copy then finds its manifest.
        return [] if self.muted else [SendComputeResponse(CopyToResponse(rendered.id, result))]

    def _crashed(self, rendered: RenderedDataflow, text: str) -> list[Effect]:
        # A copy does not run again: its failure is the response.
        if rendered.is_copy:
            return self._answer_copy(rendered, CopyFailed("ActorDead", text))
        if not rendered.is_subscribe:
            stalled = self._set_status(rendered, StatusResponse(rendered.id, "stalled", text))
            return [*stalled, RespawnDataflow(rendered.number)]
        # A subscribe cannot run again either, because sent batches cannot be repeated.
        if self.muted or is_empty(rendered.emitted):
            return []
        lower, rendered.emitted = rendered.emitted, EMPTY
        batch = SubscribeBatch(lower, EMPTY, None, ("ActorDead", text))
        return [SendComputeResponse(SubscribeResponse(rendered.id, batch))]

    # -- checks ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert the invariants."""
        numbers = [rendered.number for rendered in self.rendered.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) == self._numbers.keys()
        assert not set(numbers) & self.dropping.keys()
        assert all(0 < number <= self.last_number for number in [*numbers, *self.dropping])
        assert not (len(self.reads.pending) and self.muted), "a pending peek without a client"
        self.reads.validate()
        for rendered in self.rendered.values():
            assert rendered.allowed >= rendered.description.as_of
            assert rendered.compacted <= rendered.allowed
