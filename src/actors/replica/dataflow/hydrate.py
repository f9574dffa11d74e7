"""Restores a view from its durable state, and hydrates it first if needed.

The upper U of the output shard decides:

- U is 0: the view is *fresh*. It is computed in full at the `as_of` and appended as [0, as_of + 1)
  at time `as_of`.
- The view's plan has changed: the view is computed in full at U, and its hidden state starts there;
  or it takes the contents that a view with the new plan has computed alongside it.
- Otherwise the view *resumes* at lo = U. Imports are read from U - 1, which the view's own durable
  holds keep readable. If a since has nevertheless passed U - 1, the view is recomputed at the
  earliest readable time and the difference is appended there. The times in between can no longer be
  known and hold an error, so a read there is refused rather than wrong.

Finally the hidden state, and the errors of the imports and the output, are read into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import PersistClient
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import DataflowDescription, ViewExport
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.commit import ErrorChange, commit, commit_parts, move_holds
from actors.replica.dataflow.contents import (
    error_sums,
    errors_held,
    scanned,
    split_errors,
    truncated,
)
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.first_contents import first_parts
from actors.replica.dataflow.policy import StepChooser
from actors.replica.dataflow.recompute import output_error_text, recompute, taken_difference
from actors.replica.dataflow.state_lookups import ImportArrangements, StateLookups
from actors.replica.dataflow.step import empty_deltas
from actors.runtime.errors import ERROR_TEXT_BYTES_MAX, DefiniteError, InvalidUsage, JobTooLarge
from actors.runtime.progress import Frontier, ShardId, Time, is_empty

log = logging.getLogger("penstock.dataflow")


class ResumedHydration(msgspec.Struct, frozen=True):
    """State with which a new incarnation starts."""

    lo: Frontier
    touched: StateLookups | None
    output_errors: tuple[str, ...]
    """Errors that the output holds at ``lo - 1``."""
    input_errors: tuple[dict[str, int], ...]
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
    hydrating: Callable[[], None],
    *,
    writable: bool,
) -> ResumedHydration:
    """Hydrate the view if needed, then read its durable state. Raise the errors of the stores and
    the engine.

    `hydrating` is called before contents are computed, to start work that may run at the same time.
    If the view is not `writable` (read-only) and needs hydration, wait until another replica has
    written it.
    """
    name = (incarnation, 0)
    upper, as_of = await _find_start(persist, description, export)
    shards = [imported.shard for imported in description.imports]
    # Reserve the arrangements at the future `lo`, so that other views' compaction does not pass it
    # while this view is computed. They are filled later, like its own: a view can be read before it
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
                started = engine.clock.monotonic_ms()
                hydrating()
                await _hydrate(engine, persist, description, export, as_of, upper, name)
                rows = await _rows(persist, description, as_of + 1)
                # Adopting existing contents does not tell what computing them would cost.
                if not (export.taken_shard and upper == export.rebuilt_at):
                    chooser.recomputed(rows, engine.clock.monotonic_ms() - started)
            upper, as_of = await _find_start(persist, description, export)
        with suppress(JobTooLarge, InvalidUsage):  # the steps raise it again
            await engine.prepared()
        if is_empty(upper):
            nothing: tuple[dict[str, int], ...] = tuple({} for _ in description.imports)
            return ResumedHydration(upper, None, (), nothing)
        await move_holds(persist, description, export, upper)
        # Not on a thread: the result of a cancelled call would be lost, and its files would stay
        # open.
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


async def _find_start(
    persist: PersistClient, description: DataflowDescription, export: ViewExport
) -> tuple[Frontier, Time | None]:
    """Return the output's upper, and the time at which to compute the view.

    The time is None if the view resumes from the upper, or has ended.
    """
    # Read the sinces before the upper: another replica advances the upper before its holds, so a
    # since beyond the upper is a real gap.
    sinces = [(await persist.state(imported.shard)).since for imported in description.imports]
    upper = await persist.upper(export.shard)
    since = max(sinces, default=0)
    if is_empty(upper):
        return upper, None
    if upper == export.rebuilt_at:
        if export.taken_shard:
            # No one appends to the shard any more: it was handed over with the hidden states.
            return upper, await persist.upper(export.taken_shard) - 1
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
    if export.taken_shard and upper == export.rebuilt_at:
        first = upper or description.as_of
        await _append_taken(engine, persist, export, as_of, (upper, first), held, name)
        return
    changes = [ErrorChange(text, as_of, -1) for text in held]
    first = upper if upper > 0 else description.as_of
    if as_of > first:
        gap = f"contents from {first} to {as_of} are not available: the inputs were compacted"
        changes += _gap(first, as_of, gap)
    interval, imports = (upper, as_of + 1), description.imports
    rebuilt = 0 < upper == export.rebuilt_at
    try:
        if upper == 0 and export.plan.strata:
            with engine.failures.judged():
                whole = await first_parts(engine, persist, export, imports, as_of, name)
            # An upper mismatch is not an error: another replica has hydrated the view.
            await commit_parts(persist, export, interval, whole.parts, changes, whole.extra)
            return
        with AnswerFolders(persist, export) as folders, engine.failures.judged():
            deltas = await recompute(
                engine,
                persist,
                export,
                imports,
                as_of,
                upper,
                name,
                rebuilt=rebuilt,
                folders=folders,
            )
    except (DefiniteError, JobTooLarge) as error:
        text = truncated(output_error_text(error), ERROR_TEXT_BYTES_MAX)
        deltas = empty_deltas(export.plan)
        changes.append(ErrorChange(text, as_of, 1))
    await commit(
        persist,
        export,
        interval,
        deltas.output,
        deltas.hidden,
        changes,
        deltas.written,
        rebuilt=rebuilt,
    )


def _gap(lower: Time, upper: Time, text: str) -> list[ErrorChange]:
    """Return the changes of an error that exists at the times in `[lower, upper)`."""
    return [ErrorChange(text, lower, 1), ErrorChange(text, upper, -1)]


async def _append_taken(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    as_of: Time,
    start: tuple[Frontier, Time],
    held: Sequence[str],
    name: tuple[int, int],
) -> None:
    """Append the contents of the taken shard up to `as_of`, replacing the view's earlier contents.

    The hidden states are already in place. `start` is the output's upper, from which the append
    starts, and the first time that is read.
    """
    upper, first = start
    changes = [ErrorChange(text, first, -1) for text in held]
    assert export.taken_shard is not None, "the caller has checked it"
    since = (await persist.state(export.taken_shard)).since
    if since > first:
        # The view stopped before the view that replaces it started.
        changes += _gap(
            first, since, f"the view was not updated from {first} until it was replaced"
        )
    output = await taken_difference(
        engine, persist, export, as_of, start, engine.job_id(*name, "taken")
    )
    alone = msgspec.structs.replace(export, hidden_shards=())
    # An upper mismatch is not an error: another replica has already appended them.
    await commit(persist, alone, (upper, as_of + 1), output, (), changes)


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
    input_errors = [
        await _error_sums(persist, imported.shard, imported.schema, upper - 1, reader_id)
        for imported in description.imports
    ]
    rows = await _rows(persist, description, upper)
    return ResumedHydration(upper, touched, output_errors, tuple(input_errors), rows)


async def _rows(persist: PersistClient, description: DataflowDescription, before: Time) -> int:
    """Return about how many rows the imports have before a time: the number of stored updates."""
    states = [await persist.state(imported.shard) for imported in description.imports]
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
    # Read only the parts that contain errors.
    async with aclosing(
        scanned(persist, shard, schema, as_of, reader_id, errors_only=True)
    ) as parts:
        async for updates in parts:
            _, errors = split_errors(updates)
            if errors is not None:
                tables.append(errors)
    return error_sums(tables)
