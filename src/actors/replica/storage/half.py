"""Runs a worker's storage half: performs the effects of its state machine (`storage.state`).

The half is a part of the worker and runs in the worker's actor. The worker passes it four kinds of
messages: commands and acknowledgements from the storage adapter, sequenced commands, messages from
tasks, and the results of the half's own effects (`StorageTurn`).

Tasks are children of the worker: an ingest task for each source this worker owns, a sink task for
each sink, and a oneshot task for each copy from files. They start when writes are allowed.

Flow control: a task's reports use reserved room, one message for each append or commit.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import anyio
import msgspec
from msgspec.structs import replace

from actors.channel_adapter import ClientGone, ResponsesForwarded, outbox_measures, send_responses
from actors.connectors.ingest.shards import ExportShard, IngestShards
from actors.connectors.ingest_task import (
    IngestEnded,
    IngestProgressed,
    IngestRunning,
    IngestTask,
    ReconfigureIngest,
)
from actors.connectors.oneshot_task import (
    OneshotEnded,
    OneshotProgress,
    OneshotTask,
)
from actors.connectors.sinks.messages import (
    SinkEnded,
    SinkProgress,
    SinkStatus,
    StopSink,
)
from actors.connectors.sources.source import (
    SourceExport,
    hint_of,
)
from actors.connectors.storage_connectors import StorageConnectors
from actors.durable.arrangement import ArrangementStatistics
from actors.durable.persist import BatchPart, PersistClient
from actors.model.protocol.internal import ProposeCommand, SequencedCommand, TaggedCommand
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    DroppedId,
    FrontierUpper,
    IngestionDescription,
    Response,
    RunOneshotIngestion,
    SinkDescription,
    StagedBatches,
    StagingFailed,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.model.protocol.storage_internal import ForwardedCommand, ResumeState
from actors.replica.storage import events as e
from actors.replica.storage.reporting import (
    Described,
    ObjectUppers,
    arrangement_rows,
    dataflow_rows,
    frontier_rows,
    oneshot_statistics,
    reported_ids,
    sink_statistics,
    source_health,
    source_statistics,
)
from actors.replica.storage.state import StorageState
from actors.runtime.errors import PenstockError, UnknownObject
from actors.runtime.kernel import (
    STOP,
    Actor,
    ActorAddress,
    ActorContext,
    CoalescingOutbox,
    FlowWindow,
    RunningEffect,
)
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import DATAFLOWS, RECONCILED_OBJECTS
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.storage")


class StorageOutbox(CoalescingOutbox[Response, None]):
    """Responses that the adapter has not acknowledged yet.

    Waiting responses are bounded: one frontier, one status and one drop for each object, one answer
    for each one-shot ingestion, and one statistics report.
    """

    def __init__(self, messages_max: int) -> None:
        super().__init__(messages_max, 1)  # responses of this half are small, so sizes do not count

    def key(self, message: Response) -> tuple[str, str]:
        """Return the key under which a waiting response is replaced by a newer one."""
        match message:
            case FrontierUpper() | StatusUpdate() | DroppedId():
                return (type(message).__name__, message.id)
            case StagedBatches():
                return ("StagedBatches", message.uuid)
        return (type(message).__name__, "")

    def merged(self, old: Response, new: Response) -> Response:
        """Return the response that replaces two waiting ones of the same key."""
        if not (isinstance(old, StatisticsUpdates) and isinstance(new, StatisticsUpdates)):
            return new
        # A report contains only objects that have changed, so the older one may contain others.
        return StatisticsUpdates(
            _newest(old.sources, new.sources),
            _newest(old.sinks, new.sinks),
            _newest(old.oneshots, new.oneshots),
        )


def _newest(
    before: Iterable[ObjectStatistics], after: Iterable[ObjectStatistics]
) -> tuple[ObjectStatistics, ...]:
    return tuple({each.id: each for each in (*before, *after)}.values())


class StorageTurn(msgspec.Struct, frozen=True, gc=False):
    """A message to the worker itself: one of the half's own effects has ended."""

    event: e.Event | None


class TaskGone(msgspec.Struct, frozen=True, gc=False):
    """The task of a rendering has stopped, for any reason."""

    number: int


StorageMessage: TypeAlias = (
    TaggedCommand[Any]
    | ResponsesForwarded
    | ClientGone
    | ForwardedCommand
    | StorageTurn
    | IngestRunning
    | IngestProgressed
    | IngestEnded
    | SinkProgress
    | SinkStatus
    | SinkEnded
    | OneshotProgress
    | OneshotEnded
    | TaskGone
)


class StorageHalf:
    """Runs the storage half; see the module's docstring. Call `flush` after each message."""

    def __init__(
        self,
        ctx: ActorContext[Any],
        index: int,
        workers: Sequence[ActorAddress[Any]],
        propose: Callable[[ProposeCommand], Awaitable[None]],
        adapters: Sequence[ActorAddress[Any]],
        persist: PersistClient,
        settings: Settings,
        connectors: StorageConnectors,
        window: FlowWindow[Any] | None = None,
    ) -> None:
        """Create the half. `window` is the flow window of the client's commands."""
        self._ctx = ctx
        self._index = index
        self._workers = workers
        self._propose = propose
        self._adapters = adapters
        self._persist = persist
        self._settings = settings
        self._connectors = connectors
        self.state = StorageState(index, len(workers))
        """The state machine."""
        self._outbox = StorageOutbox(settings.responses_in_flight_max)
        self._tasks: dict[int, ActorAddress[Any]] = {}
        """Address of each running task, by render number. Here and below, tasks are keyed by
        number."""
        self._described: dict[int, Described] = {}
        """Description of each rendering owned by this worker, until its task has been stopped."""
        self._held_back: list[e.StartIngestion | e.StartSink | e.StartOneshot] = []
        """Tasks to start once writes are allowed."""
        self._reached: dict[ObjectId, ObjectUppers] = {}
        """Uppers of the tasks' objects, for the relation `penstock.frontiers`."""
        self._started_ms: dict[int, float] = {}
        """Monotonic time at which each running task started."""
        self._broken: dict[int, dict[str, tuple[str, str]]] = {}
        """Failed exports of each task: external name → (error, hint)."""
        self._held: dict[int, dict[str, ArrangementStatistics]] = {}
        """Sizes of the export contents that each task keeps, by external name."""
        self._ended: set[int] = set()
        """Tasks that have reported their end but may still be stopping."""
        self._stopping: dict[int, e.StopTask] = {}
        """Tasks that were told to stop and have not stopped yet."""
        self._look_ups: dict[int, RunningEffect] = {}
        """Look-ups in progress, by ticket."""
        self._round = 0
        """Number of the last health report; each report is a separate round."""
        self._reconciled: Counter[str] = Counter()
        """Outcomes of reconciliations on worker 0."""
        self._window = window
        self._unordered: deque[int] = deque()
        """For each client command in progress: the number of proposals made up to and including
        it."""

    def begin(self) -> None:
        """Start the timer that triggers statistics reports."""
        self._ctx.after(self._settings.statistics_ms, StorageTurn(e.StatisticsDue()))

    async def receive(self, message: StorageMessage | SequencedCommand) -> None:
        """Handle one message of the storage half."""
        match message:
            case ResponsesForwarded(nonce, serials):
                self._outbox.acknowledge(nonce, serials)
            case ClientGone(nonce):
                await self._feed(e.StorageClientLost(nonce))
            case StorageTurn(event):
                if isinstance(event, e.StatisticsDue):
                    self.begin()
                if isinstance(event, e.ResumeFound | e.ResumeFailed):
                    self._look_ups.pop(event.ticket, None)
                if event is not None:
                    await self._feed(event)
            case IngestRunning() | IngestProgressed() | IngestEnded():
                await self._from_ingestion(message)
            case SinkProgress() | SinkStatus() | SinkEnded():
                await self._from_sink(message)
            case OneshotProgress() | OneshotEnded():
                await self._from_oneshot(message)
            case TaskGone(number):
                await self._task_gone(number)
            case TaggedCommand():
                await self._feed(message)
                # The window opens again when all proposals made so far have been sequenced.
                self._unordered.append(self.state.proposed)
                self._open_window()
            case SequencedCommand():
                await self._feed(message)
                self._open_window()
            case _:
                await self._feed(message)

    def _open_window(self) -> None:
        """Open the flow window for commands whose proposals have all been sequenced."""
        while self._unordered and self._unordered[0] <= self.state.ordered:
            self._unordered.popleft()
            if self._window is not None:
                self._window.done()

    def flush(self) -> None:
        """Send the adapter as many responses as it has room for."""
        send_responses(self._outbox, self._adapters[self._index])

    async def _feed(self, event: e.Event) -> None:
        for effect in self.state.handle(event, self._ctx.now_ms()):
            await self._perform(effect)

    # -- effects -----------------------------------------------------------------------------------

    async def _perform(self, effect: e.Effect) -> None:
        match effect:
            case e.OfferStorageCommand():
                await self._propose(effect.propose)
            case e.ForwardCommand():
                self._workers[0].reply(effect.forwarded)
            case e.SwitchStorageClient():
                self._outbox.switch(effect.nonce)
            case e.SendStorageResponse():
                self._outbox.push(effect.response)
            case e.LookUp():
                self._look_up(effect)
            case e.CancelLookUp():
                under_way = self._look_ups.pop(effect.ticket, None)
                if under_way is not None:
                    under_way.cancel()
            case e.StartIngestion() | e.StartSink() | e.StartOneshot():
                self._start(effect)
            case e.StopTask():
                self._stop(effect)
            case e.CleanUpSource():
                self._forget(effect)
            case e.RestartLater():
                delay = effect.delay_ms(self._settings)
                self._ctx.after(delay, StorageTurn(e.RestartDue(effect.number)))
            case e.AllowTaskWrites():
                held_back, self._held_back = self._held_back, []
                for start in held_back:
                    self._start(start)
            case e.ConfigureTasks():
                self._configure(effect)
            case e.DiscardParts():
                self._discard(effect)
            case e.LogStorageReconciliation() | e.LogRefusedUpdate():
                self._note(effect)

    def _look_up(self, effect: e.LookUp) -> None:
        description, persist, settings = effect.description, self._persist, self._settings

        async def look() -> ResumeState:
            remap = await persist.state(description.remap_shard)
            uppers = [(each.id, await persist.upper(each.shard)) for each in description.exports]
            return ResumeState(remap.since, remap.upper, tuple(uppers))

        async def look_up() -> ResumeState:
            if effect.attempt:
                await anyio.sleep(settings.retry_delay_ms(effect.attempt) / 1000)
                return await look()
            try:
                return await look()
            except UnknownObject:
                # A shard was dropped. The command that cancels this look-up should follow, so
                # report the error only if it does not.
                await anyio.sleep(settings.retry_delay_ms_max / 1000)
            return await look()

        self._look_ups[effect.ticket] = self._ctx.effect(
            look_up,
            done=lambda found: StorageTurn(e.ResumeFound(effect.ticket, found)),
            failed=lambda error: StorageTurn(e.ResumeFailed(effect.ticket, _text(error))),
        )

    # -- tasks -------------------------------------------------------------------------------------

    def _start(self, effect: e.StartIngestion | e.StartSink | e.StartOneshot) -> None:
        number = effect.number
        what = effect.oneshot if isinstance(effect, e.StartOneshot) else effect.description
        self._described[number] = what
        if not self.state.writes_allowed:
            self._held_back.append(effect)
            return
        make: Callable[[], Actor[Any]]
        match what:
            case SinkDescription(id=id_):
                make, name = partial(self._sink_task, number, what), f"sink-{id_}"
            case IngestionDescription(id=id_):
                make, name = partial(self._ingest_task, number, what), f"ingest-{id_}"
            case RunOneshotIngestion(uuid=uuid, shard=shard):
                read = partial(self._connectors.oneshot, what)
                given = number, shard, read, self._persist, self._ctx.self, self._settings
                make, name = partial(OneshotTask, *given), f"oneshot-{uuid}"
        try:
            task = make()
        except PenstockError as error:
            failed = e.TaskFailed(number, _text(error), hint_of(error) or None)
            # Send it as a message, because the state machine's effects are still being performed.
            self._ctx.after(0, StorageTurn(failed))
            return
        address = self._tasks[number] = self._ctx.spawn(
            lambda: task, f"{name}-{number}", policy=STOP
        )
        self._ctx.watch(address, TaskGone(number))
        self._started_ms[number] = self._ctx.monotonic_ms()

    def _sink_task(self, number: int, description: SinkDescription) -> Actor[Any]:
        return self._connectors.sink(description, number, self._ctx.self)

    def _ingest_task(self, number: int, description: IngestionDescription) -> IngestTask:
        exports = {each.outside: each for each in description.exports}
        return IngestTask(
            description.id,
            number,
            [SourceExport(name, each.schema) for name, each in exports.items()],
            IngestShards(
                self._persist,
                description.remap_shard,
                {name: ExportShard(each.shard, each.schema) for name, each in exports.items()},
            ),
            lambda: self._connectors.source(description.configuration, description.id),
            self._ctx.self,
            self._settings,
            self._connectors.scratch / f"ingest-{description.id}-{number}-{self._index}",
        )

    def _stop(self, effect: e.StopTask) -> None:
        number = effect.number
        self._held_back = [each for each in self._held_back if each.number != number]
        self._stopping[number] = effect
        task = self._tasks.get(number)
        if task is None:
            self._ctx.after(0, TaskGone(number))
        elif isinstance(self._described.get(number), SinkDescription):
            task.reply(StopSink())  # the sink waits for its calls in progress before it stops
        else:
            # Run this outside the actor: the stop may take a while, and the worker must keep
            # handling messages.
            self._ctx.effect(lambda: self._ctx.stop_child(task), done=lambda _: None)

    async def _task_gone(self, number: int) -> None:
        """Handle the end of a task, whether it was stopped or ended on its own."""
        self._tasks.pop(number, None)
        self._started_ms.pop(number, None)
        self._broken.pop(number, None)
        self._held.pop(number, None)
        effect = self._stopping.pop(number, None)
        ended = number in self._ended
        self._ended.discard(number)
        # Without a stop command the task has crashed, unless it had reported its end.
        if effect is None:
            text = "the object's task crashed"
            if not ended and isinstance(self._described.get(number), RunOneshotIngestion):
                await self._feed(e.OneshotDone(number, StagingFailed("PenstockError", text)))
            elif not ended:
                hint = "it will be restarted; see the service's log"
                await self._feed(e.TaskFailed(number, text, hint))
            return
        description = self._described.pop(number, None)
        for id_ in reported_ids(description):
            self._reached.pop(id_, None)

        async def forget() -> None:
            if effect.forget and isinstance(description, IngestionDescription):
                # Remove resources before `TaskStopped`: that event starts the next rendering, which
                # may need the same replication slot.
                await self._remove_external(description)

        self._ctx.effect(forget, done=lambda _: StorageTurn(e.TaskStopped(number)))

    def _forget(self, effect: e.CleanUpSource) -> None:
        gone, what = StorageTurn(e.TaskStopped(effect.number)), effect.description
        self._ctx.effect(lambda: self._remove_external(what), done=lambda _: gone)

    async def _remove_external(self, description: IngestionDescription) -> None:
        """Remove the external resources of a dropped source, and log those that cannot be
        removed."""
        try:
            source = self._connectors.source(description.configuration, description.id)
            try:
                await source.forget()
            finally:
                with anyio.CancelScope(shield=True):
                    await source.close()
        except PenstockError as error:
            log.warning(
                "source %s was dropped, but its external resources could not be removed: %s",
                description.name,
                error,
            )

    def _configure(self, effect: e.ConfigureTasks) -> None:
        wanted = msgspec.structs.asdict(effect.configuration)
        self._settings = replace(
            self._settings, **{name: value for name, value in wanted.items() if value is not None}
        )
        # Sinks and one-shot ingestions keep the settings with which they started.
        for number, task in self._tasks.items():
            if isinstance(self._described.get(number), IngestionDescription):
                task.reply(ReconfigureIngest(self._settings))

    def _discard(self, effect: e.DiscardParts) -> None:
        parts = [msgspec.msgpack.decode(batch.part, type=BatchPart) for batch in effect.batches]
        self._ctx.effect(
            lambda: self._persist.discard_parts(parts),
            done=lambda _: StorageTurn(None),
            failed=lambda _: StorageTurn(None),  # collected later as orphans
        )

    def _note(self, done: e.LogStorageReconciliation | e.LogRefusedUpdate) -> None:
        if isinstance(done, e.LogRefusedUpdate):
            log.warning("%s", done.refusal.text())
            return
        self._reconciled.update(
            kept=done.kept,
            created=done.run - done.replaced,
            replaced=done.replaced,
            dropped=done.dropped,
            refused=len(done.refused),
        )
        log.info(
            "storage client %s: %d objects kept, %d run, %d dropped, %d commands skipped",
            done.nonce,
            done.kept,
            done.run,
            done.dropped,
            done.skipped,
        )
        for refusal in done.refused:
            log.warning("storage client %s: %s", done.nonce, refusal.text())

    # -- messages of tasks -------------------------------------------------------------------------

    async def _from_ingestion(
        self, message: IngestRunning | IngestProgressed | IngestEnded
    ) -> None:
        description = self._described.get(message.number)
        if not isinstance(description, IngestionDescription):
            return
        if isinstance(message, IngestEnded):
            self._ended.add(message.number)
            failed = e.TaskFailed(
                message.number, message.error, message.hint or None, message.is_dropped
            )
            await self._feed(failed)
            return
        ids = {export.outside: export.id for export in description.exports}
        uppers = {message.id: message.upper} | {ids[name]: upper for name, upper in message.sealed}
        for id_, upper in uppers.items():
            await self._feed(e.FrontierReached(message.number, id_, upper))
        self._reached |= {id_: (upper, 0) for id_, upper in uppers.items()}
        self._round += 1
        broken = self._broken.setdefault(message.number, {})
        if isinstance(message, IngestRunning):
            broken |= {name: (error, "") for name, error in message.failed}
            seen = source_health(description, broken, None)
        else:
            broken |= {each.export: (each.error, each.hint) for each in message.failed}
            seen = source_health(description, broken, message.lag)
        await self._feed(
            e.HealthObserved(message.number, self._round, seen, self._has_progressed(message))
        )
        if isinstance(message, IngestProgressed):
            self._held[message.number] = dict(message.held)
            await self._feed(
                e.StatisticsMeasured(message.number, source_statistics(message, self._ctx.now_ms()))
            )

    def _has_progressed(self, message: IngestRunning | IngestProgressed) -> bool:
        """Return whether a task has committed something, or has run longer than any restart
        delay."""
        if isinstance(message, IngestProgressed) and message.counts.commits:
            return True
        up_ms = self._ctx.monotonic_ms() - self._started_ms.get(message.number, 0.0)
        return up_ms > self._settings.retry_delay_ms_max

    async def _from_sink(self, message: SinkProgress | SinkStatus | SinkEnded) -> None:
        if not isinstance(self._described.get(message.number), SinkDescription):
            return
        match message:
            case SinkProgress(id_, number, upper, input=heard):
                await self._feed(e.FrontierReached(number, id_, upper))
                self._reached[id_] = (upper, heard)
                await self._feed(e.StatisticsMeasured(number, sink_statistics(message)))
            case SinkStatus(id_, number, status, error, hint):
                self._round += 1
                seen = e.HealthObservation(id_, status, error, hint)
                await self._feed(e.HealthObserved(number, self._round, (seen,)))
            case SinkEnded(_, number, error):
                self._ended.add(number)
                if error is not None:
                    await self._feed(e.TaskFailed(number, _text(error), hint_of(error) or None))

    async def _from_oneshot(self, message: OneshotProgress | OneshotEnded) -> None:
        what = self._described.get(message.number)
        if isinstance(message, OneshotEnded):
            self._ended.add(message.number)
            await self._feed(e.OneshotDone(message.number, message.result))
        elif isinstance(what, RunOneshotIngestion):
            await self._feed(
                e.StatisticsMeasured(message.number, oneshot_statistics(what.uuid, message))
            )

    def rows(self, name: str) -> Iterator[tuple[Any, ...]]:
        """Yield this worker's rows of the relations `dataflows`, `frontiers` and `arrangements`."""
        if name == "dataflows":
            for description, state in self._shown_states():
                yield from dataflow_rows(self._index, description, state)
            return
        for number, description in self._described.items():
            if name == "frontiers":
                yield from frontier_rows(self._index, description, self._reached)
            elif name == "arrangements":
                held = self._held.get(number, {})
                yield from arrangement_rows(self._index, description, held)

    def _shown_states(self) -> Iterator[tuple[Described, str]]:
        """Yield this worker's sources, sinks and copies with their states, for people."""
        begun = self._tasks.keys() | {each.number for each in self._held_back}
        for number, description in self._described.items():
            if number in begun or not isinstance(description, RunOneshotIngestion):
                state = "running" if number in self._tasks else "suspended"
                yield description, "dropping" if number in self._stopping else state

    def measures(self, replica: str) -> Iterator[Measurement]:
        """Yield the metrics of this worker's tasks, and on worker 0 of its reconciliations."""
        states = Counter(state for _, state in self._shown_states())
        for state, count in states.items():
            yield Measurement(DATAFLOWS, count, (replica, state))
        for outcome, count in self._reconciled.items():
            yield Measurement(RECONCILED_OBJECTS, count, ("storage", outcome))
        yield from outbox_measures(self._outbox, "storage")

    def describe(self) -> str:
        """Return the client and the number of tasks as readable text."""
        return f"storage: {self.state.client.describe()}, {len(self._tasks)} tasks"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
