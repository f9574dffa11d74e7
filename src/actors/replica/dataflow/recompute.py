"""Computes a view whole at one time, and the difference to its persisted contents.

Used by hydration, by opaque views at every time, and by views in error. An incremental view is
computed from scratch by its own strata, an opaque one by Spark's own query; either way the engine
takes the difference.
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
    """Pause before a view that was too large for the engine is computed whole again.

    Meanwhile its steps keep the error that it holds. Each failure doubles the pause.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failures = 0
        self._until_ms = 0.0
        self._text = ""

    @property
    def begun(self) -> bool:
        """Return whether the last attempt to compute the view failed."""
        return self._failures > 0

    def begin(self, text: str, now_ms: float) -> None:
        """Begin a pause, longer than the last one."""
        self._failures += 1
        self._until_ms = now_ms + self._settings.engine_killer_retry_ms(self._failures)
        self._text = text

    def check(self, now_ms: float) -> None:
        """Raise `JobTooLarge` while the pause lasts."""
        if self._failures and now_ms < self._until_ms:
            raise JobTooLarge(self._text)

    def end(self) -> None:
        """End the suspension: the view could be computed."""
        self._failures = 0


def held_text(error: Exception) -> str:
    """Return the text under which an output holds an error: its message, or `JobTooLarge` with its
    name."""
    return f"{type(error).__name__}: {error}" if isinstance(error, JobTooLarge) else str(error)


def find_held(texts: tuple[str, ...]) -> str:
    """Return the text of a held `JobTooLarge`, or the empty text."""
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
    """Return the difference from the persisted contents below `upper` to the query's result at
    `as_of`. Executors may write a large one into `folders`.

    If the view is `rebuilt`, its hidden states are empty so far. All updates have the time `as_of`.
    Waits until every import's upper is beyond it. Raises `DefiniteError` if an import holds an
    error there or the data make the query fail, `ReadBelowSince`, and the stores' and the engine's
    errors.
    """
    async with AsyncExitStack() as stack:
        inputs = await open_contents(stack, engine, persist, imports, as_of, name)
        old = []
        for shard, delta in zip(shards_of(export), export.plan.deltas, strict=True):
            # A view that is rebuilt keeps its output, and its hidden states begin anew.
            empty = not upper or (rebuilt and shard != export.shard)
            if empty:
                old.append(JobRows(delta.schema))
                continue
            reader_id = engine.job_id(*name, f"old{len(old)}")
            given = contents(persist, engine, shard, delta.schema, upper - 1, reader_id)
            old.append((await stack.enter_async_context(given)).rows)
        if not export.plan.strata:
            return await _difference(engine, export.plan, inputs, old[0], as_of, name, folders)
        # By the view's own strata: later steps then retract rows with the same bits, and the hidden
        # state is rebuilt too.
        return await full_step(
            engine, export.plan, inputs, as_of, name, tuple(old) if upper else (), folders
        )


def chain_differences(before: StepDeltas, after: StepDeltas, time: Time) -> StepDeltas:
    """Return the appended differences, followed by the one from there to `after`.

    Args:
        before: The differences at earlier times to what is persisted.
        after: The difference at `time` to what is persisted.
        time: Later than all of `before`.
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
    begun: tuple[Frontier, Time],
    reader_id: str,
) -> pa.Table:
    """Return the updates that turn the output's contents below its upper into those of the taken
    shard: the difference at the first time, then the shard's own updates up to `as_of`. `begun`:
    the upper, and that time.

    So the contents are exact at each of these times. Raises `ReadBelowSince` and `StorageError`.
    """
    schema = export.plan.output
    shape = schema.arrow_updates()
    tables: list[pa.Table] = []
    upper, first = begun
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
