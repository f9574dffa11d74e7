"""Indexes and subscribes: the one import's updates, passed on as they are.

An index's updates go to every worker, each its share by key hash; errors travel in an
``__error`` column, to one of them. A subscribe's go to worker 0, one batch at a time. Nothing is
durable: a new incarnation of an index replaces its contents from a snapshot; one of a subscribe
goes on from the upper of its last batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa

from actors.arrangement import partition
from actors.dataflow.contents import error_sums, errors_held, split_errors
from actors.dataflow.events import Restored, Step
from actors.dataflow.hydrate import errors_of
from actors.errors import InvalidUsage, ReadBelowSince, ViewInError
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


class Passed(msgspec.Struct, frozen=True):
    """A step made ready to be passed on: installs for the workers, or a batch."""

    number: int
    rows: int
    installs: tuple[Install, ...] = ()
    batch: SubscribeBatch | None = None


class PassThrough:
    """An index's or a subscribe's stages. Raises `InvalidUsage` unless there is one import."""

    def __init__(
        self, description: DataflowDescription, workers: int, persist: PersistClient, clock: Clock
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

    async def restore(self, incarnation: int, lo: Time) -> Restored | ViewInError | ReadBelowSince:
        """Where the incarnation starts, or the error that ends a subscribe for good."""
        source = self._description.imports[0]
        since = (await self._persist.state(source.shard)).since
        first = self._description.as_of
        if isinstance(self._export, IndexExport):
            as_of = max(first, lo - 1, since)
            return Restored(incarnation, 0, as_of, (True,))
        as_of = first if lo == 0 else lo - 1
        if since > as_of:
            return ReadBelowSince(
                f"the subscribe cannot read at {as_of}: history is kept from {since} on"
            )
        if lo == 0 and self._export.snapshot:
            return Restored(incarnation, 0, as_of, (True,))
        name = f"{self._description.id}/{incarnation}"
        await self._persist.wait_upper(source.shard, as_of)
        held = await errors_of(self._persist, source.shard, source.schema, as_of, name)
        if held:
            return ViewInError(held[0])
        return Restored(incarnation, as_of + 1, as_of, (False,))

    async def compute(self, step: Step) -> Passed:
        """Makes the step ready, off the loop."""
        return await self._clock.run_blocking(lambda: self.make(step))

    def make(self, step: Step) -> Passed:
        """The same; blocks on large updates."""
        tables = [table for tables in step.deltas for table in tables]
        if isinstance(self._export, SubscribeExport):
            made = batch(step, tables, self._export.schema)
            return Passed(step.number, sum(table.num_rows for table in tables), batch=made)
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


def batch(step: Step, tables: Sequence[pa.Table], schema: Schema) -> SubscribeBatch:
    """The step as a subscriber sees it, in order of time; updates of a snapshot stand at the
    as_of. An error that the import comes to hold ends the subscribe."""
    updates, errors = _consolidated(tables, schema)
    held = errors_held(error_sums(errors))
    if held:
        return SubscribeBatch(step.lo, step.hi, None, (ViewInError.__name__, held[0]))
    if not updates.num_rows:
        return SubscribeBatch(step.lo, step.hi)
    ordered = updates.sort_by(TIME).select([*schema.names, TIME, DIFF])
    return SubscribeBatch(step.lo, step.hi, to_ipc(ordered))
