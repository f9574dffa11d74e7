"""Computes a view in full at one time, and the difference to its stored contents.

This is used by hydration, by opaque views at every time, and by views in error. An incremental view
is computed from scratch by its own strata, an opaque one by Spark's own query. In both cases the
engine computes the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

import pyarrow as pa

from actors.durable.persist import PersistClient
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import ComputeDifference, JobRows
from actors.model.plan.updates import advance, concat, consolidate, negate
from actors.model.protocol.compute import ShardImport, ViewExport
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.commit import shards_of
from actors.replica.dataflow.contents import contents, scanned, split_errors
from actors.replica.dataflow.engine import EngineClient, MadeFiles
from actors.replica.dataflow.step import StepDeltas, full_step, written_deltas
from actors.runtime.errors import DefiniteError, JobTooLarge
from actors.runtime.progress import Frontier, Time
from actors.runtime.settings import Settings


class RecomputeSuspension:
    """Pause before a view that was too large for the engine is computed in full again.

    During the pause its steps keep the error that it holds. Each failure doubles the pause.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failures = 0
        """Number of consecutive failures."""
        self._until_ms = 0.0
        """Monotonic time at which the pause ends."""
        self._text = ""
        """Text of the last failure."""

    @property
    def active(self) -> bool:
        """Return whether the last attempt to compute the view failed."""
        return self._failures > 0

    def begin(self, text: str, now_ms: float) -> None:
        """Start a pause, which is longer than the previous one."""
        self._failures += 1
        self._until_ms = now_ms + self._settings.engine_killer_retry_ms(self._failures)
        self._text = text

    def check(self, now_ms: float) -> None:
        """Raise `JobTooLarge` during the pause."""
        if self._failures and now_ms < self._until_ms:
            raise JobTooLarge(self._text)

    def end(self) -> None:
        """End the suspension, because the view was computed."""
        self._failures = 0


def output_error_text(error: Exception) -> str:
    """Return the text under which an output holds an error: its message, prefixed with the class
    name for a `JobTooLarge`."""
    return f"{type(error).__name__}: {error}" if isinstance(error, JobTooLarge) else str(error)


def find_job_too_large(texts: tuple[str, ...]) -> str:
    """Return the text of a `JobTooLarge` among errors that an output holds, or ""."""
    prefix = f"{JobTooLarge.__name__}: "
    return next((t.removeprefix(prefix) for t in texts if t.startswith(prefix)), "")


async def recompute(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    imports: Sequence[ShardImport],
    as_of: Time,
    upper: Time,
    name: tuple[int, int],
    *,
    rebuilt: bool = False,
    folders: AnswerFolders,
) -> StepDeltas:
    """Return the difference from the stored contents below `upper` to the query's result at
    `as_of`.

    Executors may write a large difference into `folders`. If the view is `rebuilt`, its hidden
    states are still empty. All updates have the time `as_of`.

    Wait until every import's upper is beyond `as_of`. Raise `DefiniteError` if an import holds an
    error there or the data make the query fail, `ReadBelowSince`, and the errors of the stores and
    the engine.
    """
    async with AsyncExitStack() as stack:
        inputs = await open_contents(stack, engine, persist, imports, as_of, name)
        old = []
        for shard, delta in zip(shards_of(export), export.plan.deltas, strict=True):
            # A view that is rebuilt keeps its output, but its hidden states start empty.
            empty = not upper or (rebuilt and shard != export.shard)
            if empty:
                old.append(JobRows(delta.schema))
                continue
            reader_id = engine.job_id(*name, f"old{len(old)}")
            given = contents(persist, engine, shard, delta.schema, upper - 1, reader_id)
            old.append((await stack.enter_async_context(given)).rows)
        if not export.plan.strata:
            return await _difference(engine, export.plan, inputs, old[0], as_of, name, folders)
        # Use the view's own strata: later steps then retract bit-identical rows, and the hidden
        # state is rebuilt as well.
        return await full_step(
            engine, export.plan, inputs, as_of, name, tuple(old) if upper else (), folders
        )


def chain_differences(before: StepDeltas, after: StepDeltas, time: Time) -> StepDeltas:
    """Return the differences in `before`, followed by the difference from there to `after`.

    Args:
        before: Differences at earlier times to the stored contents.
        after: Difference at `time` to the stored contents.
        time: Later than all times in `before`.
    """

    def joined(earlier: pa.Table, later: pa.Table) -> pa.Table:
        return consolidate(concat([earlier, later, negate(advance(earlier, time))], later.schema))

    pairs = zip(before.hidden, after.hidden, strict=True)
    hidden = tuple(joined(*pair) for pair in pairs)
    spark_ms, wait_ms = before.spark_ms + after.spark_ms, before.wait_ms + after.wait_ms
    return StepDeltas(
        joined(before.output, after.output), hidden, spark_ms, after.prepared, wait_ms
    )


async def open_contents(
    stack: AsyncExitStack,
    engine: EngineClient,
    persist: PersistClient,
    imports: Sequence[ShardImport],
    as_of: Time,
    name: tuple[int, int],
) -> list[JobRows]:
    """Return the contents of all imports at `as_of`, leased until `stack` closes.

    Raise `DefiniteError` if one of them holds an error there.
    """
    inputs: list[JobRows] = []
    for index, imported in enumerate(imports):
        reader_id = engine.job_id(*name, f"input{index}")
        given = await stack.enter_async_context(
            contents(persist, engine, imported.shard, imported.schema, as_of, reader_id)
        )
        if given.errors:
            raise DefiniteError(given.errors[0])
        inputs.append(given.rows)
    return inputs


async def _difference(
    engine: EngineClient,
    plan: DeltaPlan,
    inputs: Sequence[JobRows],
    old: JobRows,
    as_of: Time,
    name: tuple[int, int],
    folders: AnswerFolders,
) -> StepDeltas:
    made = await engine.run_into_files(
        ComputeDifference(
            job_id=engine.job_id(*name, "whole"),
            sql=plan.sql,
            tables=tuple(zip(plan.inputs, inputs, strict=True)),
            output=plan.output,
            time=as_of,
            old=old,
            conf=plan.conf,
            into_bucket=folders.places,
        )
    )
    if isinstance(made, MadeFiles):
        return await written_deltas(plan, folders, made)
    output = await engine.clock.run_blocking(
        lambda: consolidate(concat([made.rows], plan.output.arrow_updates()))
    )
    return StepDeltas(output, (), made.spark_ms, wait_ms=made.wait_ms)


async def taken_difference(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    as_of: Time,
    start: tuple[Frontier, Time],
    reader_id: str,
) -> pa.Table:
    """Return the updates that turn the output's contents below its upper into those of the taken
    shard.

    These are the difference at the first time, then the shard's own updates up to `as_of`, so the
    contents are exact at each of these times. `start` contains the upper and the first time. Raise
    `ReadBelowSince` and `StorageError`.
    """
    schema = export.plan.output
    shape = schema.arrow_updates()
    tables: list[pa.Table] = []
    upper, first = start
    for shard, last in ((export.taken_shard, as_of), (export.shard, upper - 1)):
        if last < 0:
            continue  # it never had contents
        async with aclosing(scanned(persist, shard, schema, last, reader_id)) as parts:
            async for updates in parts:
                plain = concat([split_errors(updates)[0]], shape)
                tables.append(plain if shard == export.taken_shard else negate(plain))

    return await engine.clock.run_blocking(
        lambda: consolidate(advance(concat(tables, shape), first))
    )
