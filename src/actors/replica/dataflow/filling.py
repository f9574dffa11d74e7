"""Fills a view's arrangements from the shards, up to the view's `lo`.

Theory of operation. The first view that needs an unfilled arrangement of an import fills it, part
by part. An arrangement that ends before the view's `lo` gets the missing updates (the gap). Hidden
states are read by the one view that owns them. Every read has its own leased reader and keeps one
part in memory (or, for a gap, at most the byte budget of one dataflow).

Compaction raises times at most to one below the shard's since. A gap may therefore be read from
`lower` on if ``since <= lower``, and no update is inserted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import pyarrow as pa

from actors.durable.arrangement import ArrangementFill, ArrangementHandle
from actors.durable.persist import PersistClient
from actors.durable.persist.part_filter import PartVerdict
from actors.model.plan.input_names import InputName
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import between, concat
from actors.model.protocol.compute import ShardImport
from actors.replica.dataflow.contents import split_errors
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.state_lookups import ImportArrangements, StateLookups
from actors.runtime.errors import ReadBelowSince
from actors.runtime.progress import Frontier, Time
from actors.runtime.threshold_probes import FILLING_GAP


async def make_ready(
    engine: EngineClient,
    persist: PersistClient,
    arrangements: ImportArrangements,
    imports: Sequence[ShardImport],
    reader_id: str,
) -> None:
    """Return once all updates before the view's `lo` can be read. Callers may run concurrently.

    Raise `ReadBelowSince` if only a new incarnation can continue, and the stores' errors.
    """
    for (target, _), handle in arrangements.handles.items():
        schema = imports[InputName.parse(target).number].schema
        while not handle.ready:
            if handle.upper:
                await _close_gap(engine, persist, handle, schema, reader_id)
                continue
            filling = handle.claim()
            if filling is None:
                await _wait_filled(handle)
                continue
            try:
                await _fill(engine, persist, handle, filling, schema, reader_id)
            finally:
                filling.abandon()


async def fill_hidden(
    engine: EngineClient, persist: PersistClient, lookups: StateLookups, reader_id: str
) -> None:
    """Read the hidden states' rows below the view's `lo` from their shards, one part at a time.

    No step may change a hidden state meanwhile. Raise `ReadBelowSince` if only a new incarnation
    can continue, and the stores' errors.
    """
    await engine.clock.run_blocking(lookups.empty_hidden)
    # An abandoned attempt may continue in its thread, on arrangements that are closed.
    hidden = lookups.hidden
    for target in hidden.by_target:
        shard = lookups.hidden_shards[InputName.parse(target).number]
        reader = await persist.open_reader(shard, reader_id)
        try:
            # Read `lo` after the reader is open, because empty steps advance it and the holds
            # follow.
            lo = lookups.imports.lo
            parts, _ = await reader.snapshot(lo - 1)
            # Read one part at a time, because a state may be as large as the inputs.
            for part in parts:
                rows = await persist.fetch(part, lookups.schema(target))
                add = partial(hidden.insert, target)
                await engine.clock.run_blocking(partial(_insert, add, rows, lo))
                reader.release([part.key])
        finally:
            await reader.close()
    lookups.hidden_filled = True


async def _wait_filled(handle: ArrangementHandle) -> None:
    """Wait while another caller fills the arrangement."""
    event = anyio.Event()
    # The filling dataflow runs on this event loop, so it may set the event directly.
    if handle.when_settled(event.set):
        await event.wait()


async def _fill(
    engine: EngineClient,
    persist: PersistClient,
    handle: ArrangementHandle,
    filling: ArrangementFill,
    schema: TableSchema,
    reader_id: str,
) -> None:
    reader = await persist.open_reader(handle.shard, reader_id)
    try:
        # Read the since after the reader is open: the lease then keeps it below the updates to
        # read.
        since = (await persist.state(handle.shard)).since
        await engine.clock.run_blocking(partial(filling.start, since))
        # Fill up to the shard's upper, so that every other view of the input finds its `lo`
        # covered.
        upper = max(handle.lo, await persist.upper(handle.shard))
        parts, _ = await reader.snapshot(upper - 1)
        for part in parts:
            # According to its statistics, the part has no row that the arrangement keeps.
            if handle.rows is not None and handle.rows.verdict(part) is PartVerdict.DISCARD:
                reader.release([part.key])
                continue
            rows = await persist.fetch(part, schema)
            await engine.clock.run_blocking(partial(_insert, filling.insert, rows, upper))
            reader.release([part.key])
    finally:
        await reader.close()
    filling.publish(upper)


def _insert(add: Callable[[pa.Table], None], rows: pa.Table, upper: Frontier) -> None:
    add(_plain(rows, 0, upper))


def _plain(rows: pa.Table, lower: Time, upper: Frontier) -> pa.Table:
    """Return the plain updates of an interval."""
    return split_errors(between(rows, lower, upper))[0]


async def _close_gap(
    engine: EngineClient,
    persist: PersistClient,
    handle: ArrangementHandle,
    schema: TableSchema,
    reader_id: str,
) -> None:
    reader = await persist.open_reader(handle.shard, reader_id)
    try:
        lower, lo = handle.upper, handle.lo
        if lower >= lo:
            return
        try:
            batches, _ = await reader.next(lower)
        # The arrangement is retired here, and a new incarnation opens another one.
        except ReadBelowSince:
            handle.retire()
            raise
        parts = [part for batch in batches for part in batch.parts if part.time_min < lo]
        size, most = sum(p.bytes for p in parts), engine.settings.inflight_bytes_per_dataflow_max
        if FILLING_GAP.crossed(size > most):
            handle.retire()
            raise ReadBelowSince(
                f"the arrangement of {handle.shard} ends at {lower}, too far below {lo}"
            )
        fetched = [await persist.fetch(part, schema) for part in parts]

        def offer() -> None:
            rows = concat((_plain(rows, lower, lo) for rows in fetched), schema.arrow_updates())
            handle.offer(rows, lower, lo)

        await engine.clock.run_blocking(offer)
    finally:
        await reader.close()
