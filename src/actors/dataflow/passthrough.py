"""Indexes and subscribes: the one import's updates, passed on as they are.

An index's updates go to every worker, each its share by key hash; errors travel in an
``__error`` column, to one of them. A subscribe's go to worker 0, one batch at a time. Nothing is
durable: a new incarnation of an index replaces its contents from a snapshot; one of a subscribe
goes on from the upper of its last batch.

The contents that a subscribe begins with are read by the subscribe itself (`snapshots`), so that
they need not fit in memory. A step is in memory; what of it does not fit a response goes by the
blob store, too, so a batch is one message however large it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from actors.arrangement import partition
from actors.dataflow.contents import error_sums, errors_held, split_errors
from actors.dataflow.events import Restored, Step
from actors.dataflow.hydrate import errors_of
from actors.dataflow.snapshots import Stashing, snapshot
from actors.errors import InvalidUsage, PenstockError, ReadBelowSince, ViewInError
from actors.kernel import Clock
from actors.persist import PersistClient
from actors.plan.schema import DIFF, ERROR, TIME, Schema
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
from actors.protocol.internal import Install
from actors.settings import Settings
from actors.threshold_probes import SUBSCRIBED_BATCH


class Passed(msgspec.Struct, frozen=True):
    """A step made ready to be passed on: installs for the workers, or a batch."""

    number: int
    rows: int
    installs: tuple[Install, ...] = ()
    batch: SubscribeBatch | None = None
    large: pa.Table | None = None
    """The batch's updates, when they are too many for it."""


class Opened(msgspec.Struct, frozen=True):
    """A subscribe's first batch, and where it goes on when that was passed on; None: the batch
    says why it ends."""

    restored: Restored | None
    batch: SubscribeBatch


class PassThrough:
    """An index's or a subscribe's stages. Raises `InvalidUsage` unless there is one import."""

    def __init__(
        self,
        description: DataflowDescription,
        workers: int,
        persist: PersistClient,
        clock: Clock,
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
        self._stashing = Stashing(persist.stashed, clock, settings.piece_bytes_max)
        self._scratch = scratch

    async def restore(self, incarnation: int, lo: Time) -> Restored | Opened:
        """Where the incarnation starts; of a subscribe, its first batch. Raises `StoreFull`,
        `StorageError`, `ReadBelowSince` (which another try makes an `Opened` of)."""
        source = self._description.imports[0]
        since = (await self._persist.state(source.shard)).since
        first = self._description.as_of
        if isinstance(self._export, IndexExport):
            as_of = max(first, lo - 1, since)
            return Restored(incarnation, 0, as_of, (True,))
        as_of = first if lo == 0 else lo - 1
        if since > as_of:
            text = f"the subscribe cannot read at {as_of}: history is kept from {since} on"
            return self._ended(lo, ReadBelowSince(text))
        name = f"{self._description.id}/{incarnation}"
        await self._persist.wait_upper(source.shard, as_of)
        held = await errors_of(self._persist, source.shard, source.schema, as_of, name)
        if held:
            return self._ended(lo, ViewInError(held[0]))
        restored = Restored(incarnation, as_of + 1, as_of, (False,))
        if lo == 0 and self._export.snapshot:
            place = self._scratch / f"snapshot-{incarnation}"
            found = await snapshot(
                self._persist, self._clock, source, as_of, name, place, self._stashing
            )
            return Opened(restored, SubscribeBatch(0, as_of + 1, found.arrow, parts=found.parts))
        return restored

    def _ended(self, lo: Time, error: PenstockError) -> Opened:
        upper = max(lo, self._description.as_of) + 1
        why = (type(error).__name__, str(error))
        return Opened(None, SubscribeBatch(lo, upper, None, why))

    async def compute(self, step: Step) -> Passed:
        """Makes the step ready, off the loop. Raises `StoreFull`, `StorageError`."""
        made = await self._clock.run_blocking(lambda: self.make(step))
        if made.large is None or made.batch is None:
            return made
        rows = made.large
        parts = await self._stashing.all_of(iter(rows.to_batches()), rows.schema)
        batch = msgspec.structs.replace(made.batch, parts=parts)
        return msgspec.structs.replace(made, batch=batch, large=None)

    def make(self, step: Step) -> Passed:
        """The same, but for what goes by the blob store; blocks on large updates."""
        tables = [table for tables in step.deltas for table in tables]
        if isinstance(self._export, SubscribeExport):
            made, large = batch(step, tables, self._export.schema, self._batch_bytes_max)
            SUBSCRIBED_BATCH.crossed(large is not None)
            count = sum(table.num_rows for table in tables)
            return Passed(step.number, count, batch=made, large=large)
        parts = installs(self._description.id, step, tables, self._export, self._workers)
        return Passed(step.number, sum(part.updates.num_rows for part in parts), parts)


def _consolidated(tables: Sequence[pa.Table], schema: Schema) -> tuple[pa.Table, list[pa.Table]]:
    """The plain updates, consolidated, and the error updates."""
    plain: list[pa.Table] = []
    errors: list[pa.Table] = []
    for table in tables:
        kept, held = split_errors(table)
        plain.append(kept)
        if held is not None:
            errors.append(held)
    return consolidate(concat(plain, schema.arrow_updates())), errors


def installs(
    dataflow: ObjectId, step: Step, tables: Sequence[pa.Table], export: IndexExport, workers: int
) -> tuple[Install, ...]:
    """One `Install` a worker."""
    updates, errors = _consolidated(tables, export.schema)
    if errors:
        shape = export.schema.arrow_updates().append(pa.field(ERROR, pa.string()))
        held = consolidate(concat(errors, shape))
        updates = pa.concat_tables([updates, held], promote_options="default")
    return tuple(
        Install(dataflow, step.incarnation, step.lo, step.hi, part, step.snapshot)
        for part in partition(updates, export.key, workers)
    )


def batch(
    step: Step, tables: Sequence[pa.Table], schema: Schema, bytes_max: int
) -> tuple[SubscribeBatch, pa.Table | None]:
    """The step as a subscriber sees it, in order of time; and its updates, when they take more
    than `bytes_max`. An error that the import comes to hold ends the subscribe."""
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
