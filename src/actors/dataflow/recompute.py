"""Computes a view whole at one time, and the difference to its persisted contents.

Used by hydration, by opaque views at every time, and by views in error. An incremental view is
computed from scratch by its own strata; the difference to the persisted contents is taken in Arrow.
An opaque view runs Spark's own query, and the engine takes the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

import msgspec
import pyarrow as pa

from actors.dataflow.contents import contents, scanned, split_errors
from actors.dataflow.engine import EngineClient
from actors.dataflow.step import StepDeltas, whole_step
from actors.errors import DefiniteError, JobTooLarge
from actors.persist import PersistClient
from actors.plan.jobs import ComputeDifference, JobRows
from actors.plan.schema import TIME, TableSchema
from actors.plan.updates import advance, concat, consolidate, negate, set_column
from actors.progress import ShardId, Time
from actors.protocol.compute import ShardImport, ViewExport
from actors.settings import Settings

# -- Suspends the computation of a view that is too large for the engine ---------------------------


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
) -> StepDeltas:
    """Return the difference from the persisted contents below `upper` to the query's result at
    `as_of`.

    If the view is `rebuilt`, its hidden states are empty so far. All updates have the time `as_of`.
    Waits until every import's upper is beyond it. Raises `DefiniteError` if an import holds an
    error there or the data make the query fail, `ReadBelowSince`, and the stores' and the engine's
    errors.
    """
    async with AsyncExitStack() as stack:
        inputs = await open_contents(stack, engine, persist, imports, as_of, name)
        if not export.plan.strata:
            return await _difference(engine, persist, export, inputs, as_of, upper, name, stack)
        # By the view's own strata: later steps then retract rows with the same bits, and the hidden
        # state is rebuilt too.
        deltas = await whole_step(engine, export.plan, inputs, as_of, name)
    reader_id = engine.job_id(*name, "old")
    output = await _less_old(
        engine, persist, export.shard, export.plan.output, deltas.output, upper, as_of, reader_id
    )
    if rebuilt:
        return msgspec.structs.replace(deltas, output=output)
    states = zip(export.hidden_shards, export.plan.hidden, deltas.hidden, strict=True)
    hidden = [
        await _less_old(engine, persist, shard, state.schema, delta, upper, as_of, reader_id)
        for shard, state, delta in states
    ]
    return msgspec.structs.replace(deltas, output=output, hidden=tuple(hidden))


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
    persist: PersistClient,
    export: ViewExport,
    inputs: Sequence[JobRows],
    as_of: Time,
    upper: Time,
    name: tuple[int, int],
    stack: AsyncExitStack,
) -> StepDeltas:
    plan = export.plan
    old: JobRows | None = None
    if upper > 0:
        reader_id = engine.job_id(*name, "old")
        given = await stack.enter_async_context(
            contents(persist, engine, export.shard, plan.output, upper - 1, reader_id)
        )
        old = given.rows
    made = await engine.run(
        ComputeDifference(
            job_id=engine.job_id(*name, "whole"),
            sql=plan.sql,
            tables=tuple(zip(plan.inputs, inputs, strict=True)),
            output=plan.output,
            time=as_of,
            old=old,
            conf=plan.conf,
        )
    )
    output = await engine.clock.run_blocking(
        lambda: consolidate(concat([made.rows], plan.output.arrow_updates()))
    )
    return StepDeltas(output, (), made.spark_ms, wait_ms=made.wait_ms)


async def taken_difference(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    as_of: Time,
    upper: Time,
    reader_id: str,
) -> pa.Table:
    """Return the updates that turn the output's contents below `upper` into those of the taken
    shard: the difference at `upper`, then the shard's own updates up to `as_of`.

    So the contents are exact at each of these times. Raises `ReadBelowSince` and `StorageError`.
    """
    schema = export.plan.output
    shape = schema.arrow_updates()
    tables: list[pa.Table] = []
    for shard, last in ((export.taken_shard, as_of), (export.shard, upper - 1)):
        async with aclosing(scanned(persist, shard, schema, last, reader_id)) as parts:
            async for updates in parts:
                plain = concat([split_errors(updates)[0]], shape)
                tables.append(plain if shard == export.taken_shard else negate(plain))

    return await engine.clock.run_blocking(
        lambda: consolidate(advance(concat(tables, shape), upper))
    )


async def _less_old(
    engine: EngineClient,
    persist: PersistClient,
    shard: ShardId,
    schema: TableSchema,
    new: pa.Table,
    upper: Time,
    as_of: Time,
    reader_id: str,
) -> pa.Table:
    """Return `new` minus the shard's contents below `upper`, at time `as_of`."""
    if upper == 0:
        return new
    shape = schema.arrow_updates()
    tables = [new]
    async with aclosing(scanned(persist, shard, schema, upper - 1, reader_id)) as parts:
        async for updates in parts:
            plain, _ = split_errors(updates)
            tables.append(negate(concat([plain], shape)))

    def subtract() -> pa.Table:
        whole = concat(tables, shape)
        times = pa.repeat(pa.scalar(as_of, pa.int64()), whole.num_rows)
        return consolidate(set_column(whole, TIME, times))

    return await engine.clock.run_blocking(subtract)
