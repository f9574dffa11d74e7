"""The worker: performs the effects that its state machine (`compute.state`) decides on.

Each of the N workers owns a partition of every index, its fetch tasks, and some of the listen
tasks. Worker 0 also sequences the client's commands (`sequencer`) and owns the dataflow actors.

The sends that may wait for room form an acyclic graph, so actors cannot deadlock::

    connection → adapter i → worker i
    worker 0 → worker i (i > 0);  worker 0 → dataflow → listen and fetch tasks, executor

All other messages use `ActorAddress.reply`, which never waits. Their number is bounded otherwise:

- worker 0 → worker 0: one ordered command for each proposal;
- dataflow → worker: one `StartInputs` for each incarnation; one `InstallUpdates` or `EmitBatch`
  until `UpdatesInstalled` or `BatchEmitted`; progress and status once a step;
- task → dataflow: bounded by grants and requested fetches;
- worker → adapter: a window (`compute.outbox`), reopened by `ResponsesForwarded`;
- a worker's own effects: one result each.

Dropping a dataflow stops it on worker 0, which then informs the other workers (`DataflowStopped`).
Each worker stops its tasks and removes its partition, and only then reports the end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from actors.channel_adapter import (
    ClientGone,
    InspectAdapter,
    ResponsesForwarded,
    outbox_measures,
    send_responses,
)
from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.persist import PersistClient
from actors.model.protocol.compute import (
    IndexExport,
    Peek,
    PeekResponse,
    StatusResponse,
)
from actors.model.protocol.internal import (
    AdapterStatistics,
    BatchEmitted,
    CopyFinished,
    DataflowProgress,
    EmitBatch,
    Half,
    InstallUpdates,
    ProposeCommand,
    SequencedCommand,
    StartInputs,
    StopInputs,
    TaggedCommand,
)
from actors.model.protocol.storage_internal import ForStorage
from actors.replica.compute import events as e
from actors.replica.compute.dataflow_children import DataflowChildren
from actors.replica.compute.index import ClusterPartitions, IndexPartition, IndexStatistics
from actors.replica.compute.index_installer import IndexInstaller
from actors.replica.compute.input_tasks import InputTasks
from actors.replica.compute.logs import WorkerLogs
from actors.replica.compute.outbox import ResponseOutbox
from actors.replica.compute.peek_runner import INSPECT_TIMEOUT_MS, PeekRunner
from actors.replica.compute.reconciliation import ReconcileObstacle
from actors.replica.compute.rendering import (
    ActorFactory,
    ChildrenTurn,
    DataflowEnded,
    DataflowRemoved,
    DataflowRendering,
    DataflowStopped,
    FromDataflow,
    IndexTurn,
    InstallFinished,
    MaintenanceDue,
    MaintenanceFinished,
    PeekFinished,
    RespawnDue,
    RetryInsertion,
    TaskEnded,
    TasksStopped,
    TasksTurn,
    WorkerContext,
)
from actors.replica.compute.state import ComputeState
from actors.replica.storage.half import StorageHalf, StorageMessage
from actors.runtime.errors import ERROR_TEXT_BYTES_MAX
from actors.runtime.kernel import Actor, ActorAddress, FlowWindow, ReplySlot
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import RECONCILED_REPLACED, RECONCILED_REUSED
from actors.runtime.settings import Settings
from actors.runtime.spans import measure, span_below
from actors.runtime.telemetry import WORKER_EMIT

log = logging.getLogger("penstock.worker")

REPLACED_LOGGED_MAX: Final = 64
"""Number of a reconciliation's replaced dataflows that are logged with both plans."""


class WorkerStatistics(msgspec.Struct, frozen=True, gc=False):
    """Statistics of a worker at one moment."""

    rendered: int
    """Number of dataflows that run here."""
    dropping: int
    """Number of dropped dataflows that have not stopped yet."""
    peeks: int
    """Number of unanswered peeks."""
    responses_waiting: int
    """Number of responses that wait for the window."""
    commands_ignored: int
    commands_applied: int
    dataflows_reused: int = 0
    """Number of dataflows kept by all reconciliations so far."""
    dataflows_replaced: tuple[tuple[str, int], ...] = ()
    """Number of dataflows replaced, by flag (`compute.reconciliation`). One dataflow may have
    several flags."""
    indexes: tuple[IndexStatistics, ...] = ()
    """Statistics of this worker's index partitions."""
    stashed: int = 0
    """Number of blobs of stashed results that this worker wrote and has not removed."""
    replica: str = ""
    """Name of the worker's replica."""


class InspectWorker(msgspec.Struct, frozen=True, gc=False):
    """Request for `WorkerStatistics`."""

    reply: ReplySlot[WorkerStatistics]


WorkerMessage: TypeAlias = (
    TaggedCommand[Any]
    | SequencedCommand
    | ResponsesForwarded
    | ClientGone
    | FromDataflow
    | InspectWorker
    | MaintenanceDue
    | PeekFinished
    | IndexTurn
    | TasksTurn
    | ChildrenTurn
    | DataflowRemoved
    | StorageMessage
)


class Worker(Actor[WorkerMessage]):
    """Worker number `index` of `count`.

    `workers`, and for each half `adapters` and `windows` (of commands), hold those of all workers
    by index; they may be filled after construction, before the first message. `propose` puts a
    command into the one order (`Sequencer`); only worker 0 calls it. `replica` names the worker's
    cluster for display, `life` its incarnation in this process.
    """

    def __init__(
        self,
        index: int,
        count: int,
        propose: Callable[[ProposeCommand], Awaitable[None]],
        workers: Sequence[ActorAddress[Any]],
        adapters: Mapping[Half, Sequence[ActorAddress[Any]]],
        factory: ActorFactory,
        persist: PersistClient,
        settings: Settings,
        state_dir: Path,
        partitions: ClusterPartitions,
        replica: str = "r1",
        life: int = 0,
        connectors: StorageConnectors | None = None,
        windows: Mapping[Half, Sequence[FlowWindow[Any]]] | None = None,
    ) -> None:
        self._index = index
        self._replica = replica
        self._life = life
        self._count = count
        self._propose = propose
        self._workers = workers
        self._adapters = adapters
        self._factory = factory
        self._persist = persist
        self._settings = settings
        self._scratch = state_dir / "scratch"
        self._arrangements = state_dir / "arrangements" / f"worker-{index}"
        self._partitions = partitions
        self._state = ComputeState(
            index,
            count,
            result_bytes_max=settings.result_bytes_max,
            peeks_max=settings.peeks_pending_max,
        )
        self._outbox: ResponseOutbox[tuple[int, BatchEmitted]] = ResponseOutbox(
            settings.responses_in_flight_max, settings.subscribe_inflight_bytes_max
        )
        self._renderings: dict[int, DataflowRendering] = {}
        """The dataflows on this worker by rendering number, until they have stopped."""
        self._parked: dict[int, dict[str, FromDataflow]] = {}
        """Latest message of each kind from dataflows that this worker has not rendered yet; handled
        when it renders them."""
        self._logs = WorkerLogs(
            self._state, self._renderings, settings.log_rows_max, factory.shared, replica
        )
        persist.ledger.add(self._logs.memory)
        self._connectors = connectors
        self._windows = windows
        self._storage: StorageHalf | None = None
        """The storage half, created by `on_start` if there are connectors."""

    async def on_start(self) -> None:
        """Create the parts that need the actor's context, and start the maintenance timer."""
        context = WorkerContext(
            self.ctx,
            self._index,
            self._count,
            self._workers,
            self._factory,
            self._settings,
            self._scratch,
            self._renderings,
            self._feed,
            self._life,
        )
        self._tasks = InputTasks(context)
        self._installs = IndexInstaller(context)
        self._peeking = PeekRunner(
            context, self._persist, self._logs, self._ask_adapter, tuple(self._adapters)
        )
        # Worker 0 clears the stash for all workers. A replica process leaves it alone: results of
        # other replicas may still be on their way to a client.
        if self._index == 0 and self._persist.commanded is None:
            self._peeking.clear_stash()
        self._children = DataflowChildren(context, self._tasks, self._state.commands_for)
        self._tick_ms = self._settings.maintenance_ms
        self._tick = self.ctx.after(self._tick_ms, MaintenanceDue())
        if self._connectors is not None:
            self._storage = StorageHalf(
                self.ctx,
                self._index,
                self._workers,
                self._propose,
                self._adapters["storage"],
                self._persist,
                self._settings,
                self._connectors,
                self._windows["storage"][self._index] if self._windows else None,
            )
            self._storage.begin()
            self._logs.storage_rows = self._storage.rows

    async def receive(self, message: WorkerMessage) -> None:
        """Handle one message, then send the adapter the responses that fit its window."""
        match message:
            case TaggedCommand(half="compute"):
                effects = self._state.handle(message)
                for effect in effects:
                    await self._perform(effect)
                # Without a proposal the command is not sequenced.
                if not effects:
                    self._release_window()
            case SequencedCommand(command=command):
                # A traced peek is never part of a batch.
                if isinstance(command, Peek):
                    self._peeking.keep_context(command.uuid)
                for effects in self._state.steps(message):
                    for effect in effects:
                        await self._perform(effect)
                self._keep_tick()
                if self._storage is not None:
                    await self._storage.receive(message)
                if self._index == 0 and not isinstance(message.command, ForStorage):
                    self._release_window()
            case FromDataflow():
                await self._from_dataflow(message)
            case ResponsesForwarded(half="compute"):
                self._deliver(self._outbox.acknowledge(message.nonce, message.serials))
            case PeekFinished():
                self._peeking.ended(message.done.ticket)
                await self._feed(message.done)
            case ClientGone(half="compute"):
                await self._feed(e.ComputeClientLost(message.nonce))
            case InstallFinished() | RetryInsertion() | MaintenanceFinished():
                await self._installs.turn(message)
            case TasksStopped() | TaskEnded():
                self._tasks.turn(message)
            case DataflowEnded() | RespawnDue() | DataflowStopped():
                await self._children.turn(message)
            case DataflowRemoved():
                rendering = self._renderings.pop(message.number, None)
                if rendering is not None:
                    self._children.gone(rendering)
                await self._feed(e.DropCompleted(message.number))
            case MaintenanceDue():
                self._installs.maintain()
                self._peeking.collect()
                self._tick = self.ctx.after(self._tick_ms, MaintenanceDue())
            case InspectWorker():
                message.reply.set(self._statistics())
            case _:
                if self._storage is not None:
                    await self._storage.receive(message)
        send_responses(self._outbox, self._adapters["compute"][self._index])
        if self._storage is not None:
            self._storage.flush()

    def _keep_tick(self) -> None:
        """Restart the maintenance timer if the client configured another interval."""
        wanted_ms = self._state.maintenance_ms or self._settings.maintenance_ms
        if wanted_ms != self._tick_ms:
            # The new interval takes effect now, however long the old one was.
            self._tick.cancel()
            self._tick_ms = wanted_ms
            self._tick = self.ctx.after(wanted_ms, MaintenanceDue())

    def _release_window(self) -> None:
        """Release the flow window: a compute command was sequenced, or need not be."""
        if self._windows:
            self._windows["compute"][self._index].done()

    async def _feed(self, event: e.Event) -> None:
        for effect in self._state.handle(event):
            await self._perform(effect)

    # -- effects -----------------------------------------------------------------------------------

    async def _perform(self, effect: e.Effect) -> None:
        match effect:
            case e.OfferCommand():
                await self._propose(effect.propose)
            case e.SendComputeResponse(response=response, number=number, receipt=receipt):
                if isinstance(response, PeekResponse):
                    self._peeking.forget_context(response.uuid)
                self._outbox.push(response, None if receipt is None else (number, receipt))
            case e.StartPeek():
                nonce = self._state.nonce or ""
                self._peeking.start(effect, self._renderings.get(effect.number), nonce)
            case e.SwitchComputeClient():
                self._peeking.forget_context(None)
                self._deliver(self._outbox.switch(effect.nonce))
            case e.AcknowledgeBatch():
                self._deliver([(effect.number, effect.emitted)])
            case e.RenderDataflow():
                await self._render(effect)
            case e.RespawnDataflow():
                self._children.respawn(self._renderings[effect.number])
            case e.SendToDataflow():
                await self._children.tell(self._renderings[effect.number], effect.message)
            case e.CompactIndex():
                index = self._renderings[effect.number].index
                if index is not None:
                    index.compact(effect.since)
            case e.StopDataflow():
                self._drop(self._renderings[effect.number])
            case e.LogReconciliation():
                self._note_reconciliation(effect)
            case e.StopPeek():
                self._peeking.stop(effect.ticket)

    def _deliver(self, receipts: list[tuple[int, BatchEmitted]]) -> None:
        for number, emitted in receipts:
            rendering = self._renderings.get(number)
            if rendering is not None and rendering.dataflow is not None:
                rendering.dataflow.reply(emitted)

    async def _render(self, effect: e.RenderDataflow) -> None:
        rendering = self._renderings[effect.number] = DataflowRendering(
            effect.number, effect.description
        )
        export = effect.description.export
        if isinstance(export, IndexExport):
            rendering.index = IndexPartition(self._arrangements / f"d{rendering.number}", export)
            self._partitions.put(rendering.id, self._index, rendering.index)
        self._children.render(rendering)
        for parked in self._parked.pop(effect.number, {}).values():
            await self._from_dataflow(parked)

    def _drop(self, rendering: DataflowRendering) -> None:
        # First of all, so that no read finds a partition that is being removed.
        if rendering.index is not None:
            self._partitions.take(rendering.id, self._index, rendering.index)
        self._children.drop(rendering)

    def _note_reconciliation(self, done: e.LogReconciliation) -> None:
        """Count a reconciliation, and log it on worker 0."""
        self._logs.reconciliation.note(done)
        # All workers reach the same decision, so one logs for all.
        if self._index != 0:
            return
        measure(RECONCILED_REUSED, done.reused)
        for each in done.replaced:
            for flag in each.flags:
                measure(RECONCILED_REPLACED, 1, flag.value)
        log.info(
            "client %s: %d dataflows reused, %d created (%d of them replace a running one), "
            "%d dropped",
            done.nonce,
            done.reused,
            done.created,
            len(done.replaced),
            done.dropped,
        )
        for each in done.replaced[:REPLACED_LOGGED_MAX]:
            usual = each.flags[0] in (ReconcileObstacle.SUBSCRIBE, ReconcileObstacle.COPY)
            log.log(
                logging.INFO if usual else logging.WARNING,
                "client %s: %s",
                done.nonce,
                each.text(ERROR_TEXT_BYTES_MAX),
            )

    def _with_span_context(self, emit: EmitBatch) -> EmitBatch:
        """Return the batch with the trace context of this worker's span."""
        batch = emit.batch
        with span_below(batch.traceparent, WORKER_EMIT) as opened:
            if opened is None:
                return emit
            nonce = self._state.nonce or ""
            opened.describe(nonce, self._index, emit.dataflow, batch.lower, batch.upper)
            batch = msgspec.structs.replace(batch, traceparent=opened.traceparent)
            return msgspec.structs.replace(emit, batch=batch)

    # -- messages of dataflows ---------------------------------------------------------------------

    async def _from_dataflow(self, signed: FromDataflow) -> None:
        number, message = signed.number, signed.message
        rendering = self._renderings.get(number)
        if rendering is None:
            # Worker 0 rendered it first; the command has not reached this worker yet.
            if number > self._state.last_number:
                self._parked.setdefault(number, {})[type(message).__name__] = signed
            return
        # Of a dropped dataflow only the end is reported, once it has stopped.
        if rendering.dropping:
            return
        if self._index != 0:
            # Only worker 0 spawns the actor; the others learn its address from its messages.
            rendering.dataflow = signed.dataflow
        # Ignore a message of an actor that has crashed since.
        elif rendering.dataflow is not signed.dataflow:
            return
        match message:
            case DataflowProgress():
                await self._feed(e.DataflowProgressed(number, message))
            case StatusResponse() if self._index == 0:
                self._note_step(number, message)
                await self._feed(e.StatusSeen(number, message))
            case EmitBatch() if self._index == 0:
                await self._feed(e.SubscribeBatchReady(number, self._with_span_context(message)))
            case CopyFinished() if self._index == 0:
                await self._feed(e.CopyEnded(number, message.result))
            case StartInputs():
                self._tasks.start(rendering, message, signed.dataflow)
            case StopInputs():
                self._tasks.finish(rendering)
            case InstallUpdates() if rendering.index is not None:
                await self._installs.queue(rendering, message, signed.dataflow)

    def _note_step(self, number: int, status: StatusResponse) -> None:
        rendered = self._state.by_number(number)
        if rendered is not None:
            self._logs.steps.note(rendered, status, self.ctx.now_ms())

    # -- for display -------------------------------------------------------------------------------

    async def _ask_adapter(self, half: Half) -> AdapterStatistics:
        adapter = self._adapters[half][self._index]
        found: AdapterStatistics = await adapter.ask(InspectAdapter, INSPECT_TIMEOUT_MS)
        return found

    def _statistics(self) -> WorkerStatistics:
        state = self._state
        return WorkerStatistics(
            rendered=len(state.rendered),
            dropping=len(state.dropping),
            peeks=len(state.reads.pending),
            responses_waiting=len(self._outbox),
            commands_ignored=state.ignored,
            commands_applied=state.next_index,
            dataflows_reused=self._logs.reconciliation.total["reused"],
            dataflows_replaced=self._logs.reconciliation.flags(),
            indexes=tuple(
                held
                for rendering in self._renderings.values()
                if rendering.index is not None
                and (held := rendering.index.statistics(rendering.id)) is not None
            ),
            stashed=len(self._peeking.stash),
            replica=self._replica,
        )

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of both halves."""
        yield from self._logs.measures()
        yield from outbox_measures(self._outbox, "compute")
        if self._storage is not None:
            yield from self._storage.measures(self._replica)

    def describe(self) -> str:
        """Describe the client, the dataflows and what waits, for operators."""
        state = self._state
        client = f"client {state.nonce}" if state.connected else "no client"
        stage = ", initializing" if state.incoming is not None else ""
        storage = "" if self._storage is None else f"; {self._storage.describe()}"
        return (
            f"{client}{stage}, {len(state.rendered)} dataflows, {len(state.reads.pending)} peeks, "
            f"{len(self._outbox)} responses wait{storage}"
        )
