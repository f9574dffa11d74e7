"""Passes on the updates of one import: stages of an index or a subscribe.

An index's updates are split among the workers by key hash; errors travel in an ``__error`` column.
A subscribe's go to worker 0, one batch at a time. Nothing is durable: a new incarnation of an index
replaces its contents from a snapshot; one of a subscribe resumes at the upper of its last batch.

A subscribe reads its own snapshot (`snapshots`), which need not fit in memory. A step is held in
memory; if it is too large for a response its rows go into blobs, so a batch is always one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from actors.arrangement import partition
from actors.dataflow.contents import error_sums, errors_held, split_errors
from actors.dataflow.events import DataflowStep, StateRestored
from actors.dataflow.hydrate import errors_of
from actors.dataflow.snapshots import RowStash, snapshot
from actors.errors import InvalidUsage, PenstockError, ReadBelowSince, ViewInError
from actors.kernel import ActorClock
from actors.persist import PersistClient
from actors.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.plan.updates import concat, consolidate, to_ipc
from actors.progress import ObjectId, Time
from actors.protocol.compute import (
    CopyToExport,
    DataflowDescription,
    IndexExport,
    SubscribeBatch,
    SubscribeExport,
    ViewExport,
)
from actors.protocol.internal import InstallUpdates
from actors.settings import Settings
from actors.threshold_probes import SUBSCRIBED_BATCH


class PassthroughStep(msgspec.Struct, frozen=True):
    """A computed step: installs for the workers, or a batch for the subscriber."""

    number: int
    rows: int
    installs: tuple[InstallUpdates, ...] = ()
    batch: SubscribeBatch | None = None
    large: pa.Table | None = None
    """Updates of the batch, if too many for its message."""


class SubscribeOpening(msgspec.Struct, frozen=True):
    """First batch of a subscribe, and the state to resume from once it is delivered.

    `restored` is None if the batch ends the subscribe with an error.
    """

    restored: StateRestored | None
    batch: SubscribeBatch


class PassThrough:
    """Runs the stages of an index or a subscribe. Raises `InvalidUsage` unless there is one
    import."""

    def __init__(
        self,
        description: DataflowDescription,
        workers: int,
        persist: PersistClient,
        clock: ActorClock,
        settings: Settings,
        scratch: Path,
    ) -> None:
        if len(description.imports) != 1 or isinstance(
            description.export, ViewExport | CopyToExport
        ):
            raise InvalidUsage(
                f"{description.id}: an index or subscribe has one import,"
                f" {len(description.imports)} were given"
            )
        self._description = description
        self._export: IndexExport | SubscribeExport = description.export
        self._workers = workers
        self._persist = persist
        self._clock = clock
        self._batch_bytes_max = settings.result_bytes_max
        self._stashing = RowStash(persist.stashed, clock, settings.piece_bytes_max)
        self._scratch = scratch

    async def restore(self, incarnation: int, lo: Time) -> StateRestored | SubscribeOpening:
        """Return the state that the incarnation starts from; for a subscribe, also its first batch.

        Raise `StoreFull`, `StorageError`, `ReadBelowSince`.
        """
        source = self._description.imports[0]
        since = (await self._persist.state(source.shard)).since
        first = self._description.as_of
        if isinstance(self._export, IndexExport):
            as_of = max(first, lo - 1, since)
            return StateRestored(incarnation, 0, as_of, (True,))
        as_of = first if lo == 0 else lo - 1
        if since > as_of:
            text = f"the subscribe cannot read at {as_of}: history is kept from {since} on"
            # Later reads may raise it too; the machine then restarts, and the retry ends the
            # subscribe here.
            return self._ended(lo, ReadBelowSince(text))
        name = f"{self._description.id}/{incarnation}"
        await self._persist.wait_upper(source.shard, as_of)
        held = await errors_of(self._persist, source.shard, source.schema, as_of, name)
        if held:
            return self._ended(lo, ViewInError(held[0]))
        restored = StateRestored(incarnation, as_of + 1, as_of, (False,))
        if lo == 0 and self._export.snapshot:
            place = self._scratch / f"snapshot-{incarnation}"
            found = await snapshot(
                self._persist, self._clock, source, as_of, name, place, self._stashing
            )
            return SubscribeOpening(
                restored, SubscribeBatch(0, as_of + 1, found.arrow, parts=found.parts)
            )
        return restored

    def _ended(self, lo: Time, error: PenstockError) -> SubscribeOpening:
        upper = max(lo, self._description.as_of) + 1
        why = (type(error).__name__, str(error))
        return SubscribeOpening(None, SubscribeBatch(lo, upper, None, why))

    async def compute(self, step: DataflowStep) -> PassthroughStep:
        """Compute the step off the loop. Raise `StoreFull`, `StorageError`."""
        made = await self._clock.run_blocking(lambda: self.make(step))
        if made.large is None or made.batch is None:
            return made
        rows = made.large
        parts = await self._stashing.all_of(iter(rows.to_batches()), rows.schema)
        batch = msgspec.structs.replace(made.batch, parts=parts)
        return msgspec.structs.replace(made, batch=batch, large=None)

    def make(self, step: DataflowStep) -> PassthroughStep:
        """Compute the step without writing blobs; block on large updates."""
        tables = [table for tables in step.deltas for table in tables]
        if isinstance(self._export, SubscribeExport):
            made, large = batch(step, tables, self._export.schema, self._batch_bytes_max)
            SUBSCRIBED_BATCH.crossed(large is not None)
            count = sum(table.num_rows for table in tables)
            return PassthroughStep(step.number, count, batch=made, large=large)
        parts = installs(self._description.id, step, tables, self._export, self._workers)
        return PassthroughStep(step.number, sum(part.updates.num_rows for part in parts), parts)


def _consolidated(
    tables: Sequence[pa.Table], schema: TableSchema
) -> tuple[pa.Table, list[pa.Table]]:
    """Return the plain updates, consolidated, and the error updates."""
    plain: list[pa.Table] = []
    errors: list[pa.Table] = []
    for table in tables:
        kept, held = split_errors(table)
        plain.append(kept)
        if held is not None:
            errors.append(held)
    return consolidate(concat(plain, schema.arrow_updates())), errors


def installs(
    dataflow: ObjectId,
    step: DataflowStep,
    tables: Sequence[pa.Table],
    export: IndexExport,
    workers: int,
) -> tuple[InstallUpdates, ...]:
    """Return one `InstallUpdates` for each worker."""
    updates, errors = _consolidated(tables, export.schema)
    if errors:
        shape = export.schema.arrow_updates().append(pa.field(ERROR, pa.string()))
        held = consolidate(concat(errors, shape))
        updates = pa.concat_tables([updates, held], promote_options="default")
    return tuple(
        InstallUpdates(dataflow, step.incarnation, step.lo, step.hi, part, step.snapshot)
        for part in partition(updates, export.key, workers)
    )


def batch(
    step: DataflowStep, tables: Sequence[pa.Table], schema: TableSchema, bytes_max: int
) -> tuple[SubscribeBatch, pa.Table | None]:
    """Return the step's batch, ordered by time; and its updates if they exceed `bytes_max`.

    An error that the import comes to hold ends the subscribe.
    """
    updates, errors = _consolidated(tables, schema)
    held = errors_held(error_sums(errors))
    if held:
        return SubscribeBatch(step.lo, step.hi, None, (ViewInError.__name__, held[0])), None
    if not updates.num_rows:
        return SubscribeBatch(step.lo, step.hi), None
    ordered = updates.sort_by(TIME).select([*schema.names, TIME, DIFF])
    if ordered.nbytes <= bytes_max:
        arrow = to_ipc(ordered)
        if len(arrow) <= bytes_max:
            return SubscribeBatch(step.lo, step.hi, arrow), None
    return SubscribeBatch(step.lo, step.hi), ordered
