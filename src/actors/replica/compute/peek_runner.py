"""Runs a worker's peeks, off the event loop.

The parts of a shard are read one after another, except those whose statistics rule out any row that
passes the filter. Only updates that the peek selects are kept: in memory up to `HELD_BYTES_MAX`,
and beyond that in a temporary arrangement on disk, whose rows are then streamed like those of an
index.

Stopping a peek does not stop a piece that a thread is already computing. Its stashed blobs are
removed by the next collection.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.gathered_updates import CollectionContents, GatheredUpdates
from actors.durable.persist import BatchPart, PartFilter, PersistClient
from actors.model.plan.schema import DIFF, ERROR, TableSchema
from actors.model.plan.updates import between, iter_slices
from actors.model.protocol.compute import (
    LogTarget,
    Peek,
    PeekError,
    PeekRows,
    PeekStashed,
    ShardImport,
    ShardTarget,
)
from actors.model.protocol.internal import (
    AdapterStatistics,
    Half,
    InputStatistics,
    InspectInputs,
)
from actors.model.protocol.relations import worker_relation
from actors.replica.compute.events import PeekDone, PeekResult, StartPeek
from actors.replica.compute.logs import ADAPTERS, PARTS_IN_FLIGHT, WorkerLogs, answer
from actors.replica.compute.peeks import (
    PeekSpec,
    PeekStash,
    error_of,
    index_answer,
    select_keys,
)
from actors.replica.compute.rendering import DataflowRendering, PeekFinished, WorkerContext
from actors.runtime.errors import (
    ActorDead,
    ConnectionBroken,
    DeadlineExceeded,
    PenstockError,
    ResourceClosed,
)
from actors.runtime.kernel import ActorClock, RunningEffect
from actors.runtime.progress import Time
from actors.runtime.spans import span_below
from actors.runtime.telemetry import BYTES, TRACEPARENT, WORKER_PEEK

log = logging.getLogger("penstock.worker")

INSPECT_TIMEOUT_MS: Final = 1_000
"""Time in ms within which a dataflow must report its inputs; otherwise it is left out."""


class ShardPeekRead:
    """Selected updates of a shard, up to the peek's time. All methods block."""

    def __init__(self, schema: TableSchema, time: Time, spec: PeekSpec, place: Path) -> None:
        self._time = time
        self._spec = spec
        self._gathered = GatheredUpdates(schema, place)
        self.weight = 0
        """Sum of the weights of the kept rows."""

    def add(self, updates: pa.Table) -> None:
        """Add the selected updates of a part. Raise `StoreFull` or `StorageError`."""
        for piece in iter_slices(updates):
            kept = self._wanted(piece)
            if kept.num_rows:
                self.weight += pc.sum(kept[DIFF]).as_py()
                self._gathered.add(kept)

    def _wanted(self, updates: pa.Table) -> pa.Table:
        updates = between(updates, 0, self._time + 1)
        errors: pa.Table | None = None
        if ERROR in updates.column_names:
            # Error updates pass every filter: if there is one, the answer is the error.
            errors = updates.filter(pc.is_valid(updates[ERROR]))
            updates = updates.filter(pc.is_null(updates[ERROR])).drop_columns([ERROR])
        if self._spec.keys is not None:
            updates = select_keys(updates, self._spec.keys)
        updates = self._spec.filter.passing(updates)
        if errors is not None and errors.num_rows:
            updates = pa.concat_tables([updates, errors], promote_options="default")
        return updates

    def contents(self) -> CollectionContents:
        """Return all added updates, summed."""
        return self._gathered.contents()

    def close(self) -> None:
        """Remove spilled files. Contents that are still being read stay valid."""
        self._gathered.close()


def _rows_needed(peek: Peek, parts: Sequence[BatchPart]) -> int | None:
    """Return how many rows are enough to complete the answer; None if all are needed."""
    wanted = peek.finishing
    if wanted is None or wanted.limit is None or wanted.order_by:
        return None
    # A later part may retract a row of an earlier one.
    if any(part.retracts or part.has_errors for part in parts):
        return None
    return wanted.limit + wanted.offset


async def shard_answer(
    persist: PersistClient,
    clock: ActorClock,
    stash: PeekStash,
    imported: ShardImport,
    peek: Peek,
    limits: tuple[int, int],
    reader_id: str,
    place: Path,
) -> PeekRows | PeekStashed | PeekError:
    """Return the rows of a shard at the peek's time, waiting until that time is sealed.

    Args:
        limits: Bytes of a response, and of its inline rows before the stash is used.
        reader_id: Name of the lease; must be new.
        place: Folder that may be created for spilled files.

    Raise what `peeks.index_answer` raises, and the stores' errors.
    """
    spec = PeekSpec(imported.schema, peek)
    gathered = ShardPeekRead(imported.schema, peek.time, spec, place)
    bytes_max, piece_bytes = limits
    try:
        reader = await persist.open_reader(imported.shard, reader_id)
        try:
            # Do this before the snapshot, which may wait for a long time: from here on the lease
            # protects the peek's time from compaction.
            await reader.downgrade(peek.time)
            parts, _ = await reader.snapshot(
                peek.time, PartFilter.of(imported.schema, peek.filter, spec.keys)
            )
            enough = _rows_needed(peek, parts)
            for part in parts:
                if enough is not None and gathered.weight >= enough:
                    break
                updates = await persist.fetch(part, imported.schema)
                await clock.run_blocking(lambda: gathered.add(updates))  # noqa: B023
                reader.release([part.key])
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()
        contents = await clock.run_blocking(gathered.contents)
        return await stash.answer(spec.answer(contents, None, piece_bytes), bytes_max)
    finally:
        with anyio.CancelScope(shield=True):
            await clock.run_blocking(gathered.close)


class PeekRunner:
    """Starts and stops the peeks of a worker."""

    def __init__(
        self,
        context: WorkerContext,
        persist: PersistClient,
        logs: WorkerLogs,
        ask_adapter: Callable[[Half], Awaitable[AdapterStatistics]],
        halves: Sequence[Half],
    ) -> None:
        """`ask_adapter` asks the adapter of one of these halves of this worker. Raises as
        `ActorAddress.ask`."""
        self._context = context
        self._ask_adapter = ask_adapter
        self._halves = halves
        self._persist = persist
        self._logs = logs
        self._running: dict[int, RunningEffect] = {}
        """Peeks in progress, by ticket."""
        self._contexts: dict[str, str] = {}
        """Trace contexts of unanswered peeks, by uuid. A peek may wait long before it starts."""
        orphan_ms = context.settings.stash_orphan_ms
        writer = f"{context.life}-{context.index}" if context.life else f"{context.index}"
        self.stash = PeekStash(persist.stashed, context.ctx.clock, writer, orphan_ms)
        self._collecting = False
        """True while unread blobs are collected."""

    def clear_stash(self) -> None:
        """Remove blobs that earlier processes left in the stash."""
        self._context.ctx.effect(self._persist.stashed.clear, done=lambda _: None, failed=self._log)

    def collect(self) -> None:
        """Remove unread blobs, in one collection at a time."""
        if self._collecting or not self.stash.collects:
            return
        self._collecting = True

        async def run() -> None:
            try:
                await self.stash.collect()
            finally:
                self._collecting = False

        self._context.ctx.effect(run, done=lambda _: None, failed=self._log)

    def _log(self, error: Exception) -> None:
        log.warning("%s: cannot clean up the stash: %s", self._context.ctx.path, error)

    def keep_context(self, uuid: str) -> None:
        """Keep the current trace context for a peek."""
        traceparent = TRACEPARENT.get()
        if traceparent is not None:
            self._contexts[uuid] = traceparent

    def forget_context(self, uuid: str | None) -> None:
        """Forget the trace context of an answered peek. None: of all peeks, because their client is
        gone."""
        if uuid is None:
            self._contexts.clear()
        else:
            self._contexts.pop(uuid, None)

    def stop(self, ticket: int) -> None:
        """Cancel a peek, if it is in progress."""
        running = self._running.pop(ticket, None)
        if running is not None:
            running.cancel()

    def ended(self, ticket: int) -> None:
        """Forget a peek that was answered."""
        self._running.pop(ticket, None)

    def start(self, effect: StartPeek, rendering: DataflowRendering | None, nonce: str) -> None:
        """Start a peek of the index `rendering`, or of a shard or relation. The result is a
        `PeekFinished`."""
        arrangement = (
            None if rendering is None or rendering.index is None else rendering.index.arrangement
        )
        peek, ticket = effect.peek, effect.ticket
        context, clock, stash = self._context, self._context.ctx.clock, self.stash
        # A response combines the parts of all workers, so each worker gets its share of the bytes.
        inline_max = effect.inline_max or context.settings.inline_bytes_max
        inline_max = min(inline_max, effect.bytes_max // context.count)
        if isinstance(peek.target, ShardTarget):
            imported, name = peek.target.imported, f"peek-{context.index}-{ticket}-{peek.uuid}"
            limits, place = (effect.bytes_max, inline_max), context.scratch / name
            self._run(
                effect,
                nonce,
                lambda: shard_answer(
                    self._persist, clock, stash, imported, peek, limits, name, place
                ),
            )
            return
        if isinstance(peek.target, LogTarget):
            self._run(effect, nonce, lambda: self._log_answer(peek, effect.bytes_max, inline_max))
            return
        assert arrangement is not None, "a sealed index has an arrangement"
        made = index_answer(arrangement, peek, inline_max)
        self._run(effect, nonce, lambda: stash.answer(made, effect.bytes_max))

    async def _log_answer(self, peek: Peek, bytes_max: int, inline_max: int) -> PeekResult:
        relation = worker_relation(peek.target.id)
        answers: Sequence[Any] = ()
        if relation.name == PARTS_IN_FLIGHT:
            answers = await self._inputs()
        elif relation.name == ADAPTERS:
            answers = await self._adapter_statistics()
        made = answer(relation, self._logs.rows(relation.name, answers), peek, inline_max)
        return await self.stash.answer(made, bytes_max)

    async def _adapter_statistics(self) -> list[tuple[Half, AdapterStatistics]]:
        """Return the statistics of this worker's adapters, without those that do not answer in
        time."""
        found: list[tuple[Half, AdapterStatistics]] = []
        for half in self._halves:
            with suppress(ResourceClosed, ConnectionBroken, ActorDead, DeadlineExceeded):
                found.append((half, await self._ask_adapter(half)))
        return found

    async def _inputs(self) -> list[InputStatistics]:
        """Return the dataflows' reports about their inputs, without those that do not answer in
        time."""
        found: list[InputStatistics] = []
        for rendering in list(self._context.renderings.values()):
            if self._context.index != 0 or rendering.dataflow is None or rendering.dropping:
                continue
            with suppress(ResourceClosed, ConnectionBroken, ActorDead, DeadlineExceeded):
                answers: tuple[InputStatistics, ...] = await rendering.dataflow.ask(
                    InspectInputs, INSPECT_TIMEOUT_MS
                )
                found += answers
        return found

    def _run(
        self, effect: StartPeek, nonce: str, read: Callable[[], Awaitable[PeekResult]]
    ) -> None:
        ticket, peek, path = effect.ticket, effect.peek, self._context.ctx.path

        def failed(error: Exception) -> PeekFinished:
            if isinstance(error, ResourceClosed) and effect.number:
                # A snapshot replaced the arrangement, so the peek has to wait for it.
                return PeekFinished(PeekDone(ticket, None))
            if not isinstance(error, PenstockError):
                log.error("%s: a read failed", path, exc_info=error)
            return PeekFinished(PeekDone(ticket, error_of(error)))

        self._running[ticket] = self._context.ctx.effect(
            lambda: self._traced(peek, nonce, read),
            done=lambda result: PeekFinished(PeekDone(ticket, result)),
            failed=failed,
        )

    async def _traced(
        self, peek: Peek, nonce: str, read: Callable[[], Awaitable[PeekResult]]
    ) -> PeekResult:
        with span_below(self._contexts.get(peek.uuid), WORKER_PEEK) as opened:
            if opened is None:
                return await read()
            opened.describe(nonce, self._context.index, peek.target.id, peek.time)
            result = await read()
            opened.note(BYTES, _size(result))
            return result


def _size(result: PeekResult) -> int:
    if isinstance(result, PeekRows):
        return len(result.arrow)
    return result.size_bytes if isinstance(result, PeekStashed) else 0
