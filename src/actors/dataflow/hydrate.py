"""Restores a view from its durable state, and hydrates it first if needed.

The output shard's upper U decides. At 0 the view is *fresh*: it is computed whole at the `as_of`,
and appended as [0, as_of + 1) at time `as_of`. A view whose plan has changed is computed whole at
U, and its hidden state begins there. Otherwise the view *resumes* at lo = U: imports are read from
U - 1, which the view's own durable holds keep readable. If a since has passed U - 1 nevertheless,
the view is recomputed at the least readable time, the difference is appended there, and the times
that cannot be known any more hold an error: a read there is refused, never wrong. Finally the
hidden state, and the errors of the imports and the output, are read into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import msgspec

from actors.arrangement import SharedArrangements
from actors.dataflow.commit import ErrorChange, commit, commit_parts, move_holds
from actors.dataflow.contents import error_sums, errors_held, scanned, split_errors, truncated
from actors.dataflow.engine import EngineClient
from actors.dataflow.first import first_parts
from actors.dataflow.policy import StepChooser
from actors.dataflow.recompute import recompute
from actors.dataflow.rivals import HydrationLock
from actors.dataflow.step import empty_deltas
from actors.dataflow.suspension import held_text
from actors.dataflow.touched import ImportArrangements, StateLookups
from actors.errors import DefiniteError, JobTooLarge
from actors.persist import PersistClient
from actors.plan.schema import TableSchema
from actors.progress import Frontier, ShardId, Time, is_empty
from actors.protocol.compute import DataflowDescription, ViewExport

log = logging.getLogger("penstock.dataflow")


class ResumedHydration(msgspec.Struct, frozen=True):
    """State that a new incarnation starts from."""

    lo: Frontier
    touched: StateLookups | None
    output_errors: tuple[str, ...]
    """Errors that the output holds at ``lo - 1``."""
    source_errors: tuple[dict[str, int], ...]
    """Sums of the error updates at ``lo - 1``, for each import."""
    state_rows: int = 0
    """Approximate number of rows of the imports."""


async def restore(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    incarnation: int,
    scratch: Path,
    arrangements: SharedArrangements,
    chooser: StepChooser,
    turns: HydrationLock,
    hydrating: Callable[[], None],
    *,
    writable: bool,
) -> ResumedHydration:
    """Hydrate if needed, then read the durable state. Raise what stores and engine raise.

    `hydrating` is called before contents are computed, to start work that may run beside that.
    Without `writable` (read-only) a view that needs hydration waits until another replica has
    written it.
    """
    name = (incarnation, 0)
    upper, as_of = await _start_of(persist, description, export)
    shards = [source.shard for source in description.imports]
    # Reserves the arrangements at the future `lo`, so that other views' compaction does not pass it
    # while this view is computed. They are filled later (`filling`): a view is readable before it
    # can be stepped.
    reserved = ImportArrangements(
        export.plan, shards, arrangements, upper if as_of is None else as_of + 1
    )
    try:
        engine.announce(export.plan, incarnation)
        while as_of is not None:
            if not writable:
                await persist.wait_upper(export.shard, upper)
            else:
                async with turns.turn(export.shard):
                    # The replica that held the lock before may have hydrated the view.
                    upper, as_of = await _start_of(persist, description, export)
                    if as_of is not None:
                        started = engine.clock.monotonic_ms()
                        hydrating()
                        await _hydrate(engine, persist, description, export, as_of, upper, name)
                        rows = await _rows(persist, description, as_of + 1)
                        chooser.recomputed(rows, engine.clock.monotonic_ms() - started)
            upper, as_of = await _start_of(persist, description, export)
        with suppress(JobTooLarge):  # the steps raise it again
            await engine.prepared()
        if is_empty(upper):
            nothing: tuple[dict[str, int], ...] = tuple({} for _ in description.imports)
            return ResumedHydration(upper, None, (), nothing)
        await move_holds(persist, description, export, upper)
        # Not on a thread: a cancelled call's result would be lost, and its files stay open.
        touched = StateLookups(
            export.plan,
            shards,
            arrangements,
            upper,
            scratch / str(incarnation),
            export.hidden_shards,
        )
        try:
            return await _resume(engine, persist, description, export, upper, name, touched)
        except BaseException:
            touched.close()
            raise
    finally:
        reserved.close()


async def _start_of(
    persist: PersistClient, description: DataflowDescription, export: ViewExport
) -> tuple[Frontier, Time | None]:
    """Return the output's upper, and the time to compute the view at.

    The time is None if the view resumes from the upper, or has ended.
    """
    # Read before the upper: another replica moves the upper before its holds, so a since beyond the
    # upper is a true gap.
    sinces = [(await persist.state(source.shard)).since for source in description.imports]
    upper = await persist.upper(export.shard)
    since = max(sinces, default=0)
    if is_empty(upper):
        return upper, None
    if upper == export.rebuilt_at:
        return upper, max(since, upper or description.as_of)
    return upper, since if since > upper - 1 else None


async def _hydrate(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    as_of: Time,
    upper: Time,
    name: tuple[int, int],
) -> None:
    """Compute the view at `as_of` and append it."""
    held: tuple[str, ...] = ()
    if upper > 0:
        reader_id = engine.job_id(*name, "errors")
        held = await errors_of(persist, export.shard, export.plan.output, upper - 1, reader_id)
    changes = [ErrorChange(text, as_of, -1) for text in held]
    first = upper if upper > 0 else description.as_of
    if as_of > first:
        gap = f"contents from {first} to {as_of} cannot be known: the inputs were compacted"
        changes += [ErrorChange(gap, first, 1), ErrorChange(gap, as_of, -1)]
    interval, imports = (upper, as_of + 1), description.imports
    rebuilt = 0 < upper == export.rebuilt_at
    try:
        if upper == 0 and export.plan.strata:
            whole = await first_parts(engine, persist, export, imports, as_of, name)
            # An upper mismatch is no error: another replica has hydrated the view.
            await commit_parts(persist, export, interval, whole.parts, changes, whole.extra)
            return
        deltas = await recompute(
            engine, persist, export, imports, as_of, upper, name, rebuilt=rebuilt
        )
    except (DefiniteError, JobTooLarge) as error:
        text = truncated(held_text(error), engine.settings.error_text_bytes_max)
        deltas = empty_deltas(export.plan)
        changes.append(ErrorChange(text, as_of, 1))
    output, hidden = deltas.output, deltas.hidden
    await commit(persist, export, interval, output, hidden, changes, rebuilt=rebuilt)


async def _resume(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    upper: Time,
    name: tuple[int, int],
    touched: StateLookups,
) -> ResumedHydration:
    plan = export.plan
    reader_id = engine.job_id(*name, "resume")
    output_errors = await errors_of(persist, export.shard, plan.output, upper - 1, reader_id)
    source_errors = [
        await _error_sums(persist, source.shard, source.schema, upper - 1, reader_id)
        for source in description.imports
    ]
    for index, (shard, state) in enumerate(zip(export.hidden_shards, plan.hidden, strict=True)):
        parts = scanned(persist, shard, state.schema, upper - 1, reader_id)
        async with aclosing(parts):
            async for rows in parts:
                await engine.clock.run_blocking(partial(touched.insert, f"h{index}", rows))
    await engine.clock.run_blocking(touched.merge)
    rows = await _rows(persist, description, upper)
    return ResumedHydration(upper, touched, output_errors, tuple(source_errors), rows)


async def _rows(persist: PersistClient, description: DataflowDescription, before: Time) -> int:
    """Return about how many rows the imports have before a time: the number of stored updates."""
    states = [await persist.state(source.shard) for source in description.imports]
    return sum(b.rows for state in states for b in state.batches if b.lower < before)


async def errors_of(
    persist: PersistClient, shard: ShardId, schema: TableSchema, as_of: Time, reader_id: str
) -> tuple[str, ...]:
    """Return the errors that a shard holds at `as_of`. Raise `ReadBelowSince` and
    `StorageError`."""
    return errors_held(await _error_sums(persist, shard, schema, as_of, reader_id))


async def _error_sums(
    persist: PersistClient, shard: ShardId, schema: TableSchema, as_of: Time, reader_id: str
) -> dict[str, int]:
    """Return the sums of a shard's error updates at `as_of`."""
    state = await persist.state(shard)
    if not any(part.has_errors for batch in state.batches for part in batch.parts):
        return {}
    tables = []
    # Reads only the parts that hold errors.
    async with aclosing(
        scanned(persist, shard, schema, as_of, reader_id, errors_only=True)
    ) as parts:
        async for updates in parts:
            _, errors = split_errors(updates)
            if errors is not None:
                tables.append(errors)
    return error_sums(tables)
