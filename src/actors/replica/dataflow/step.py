"""Computes a step of an incremental view: which strata run together, and with which inputs.

A stratum whose lookups need the output of another stratum must wait for it, so each has a separate
Spark run. The exception is a lookup in a hidden state that is small enough to be passed in full:
then both strata share a run. From scratch (`full_step`) every state is empty and all strata share
one run.

The output of the last stratum is split into deltas. Without hidden states, it is the view's delta.
With hidden states, the bits of ``__to`` say to which deltas a row belongs: the view's (columns
``o_…``) and those of the hidden states (``h{k}_…``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist import BatchPart
from actors.model.plan.delta import (
    INTERVAL,
    INTERVAL_SCHEMA,
    TO,
    DeltaColumns,
    DeltaPlan,
    PlanStratum,
    missed_later,
    narrow_schema,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import BucketFolder, JobRows, LikelyRun
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.nearby import nearby_rows
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema, spark_type
from actors.model.plan.updates import concat, consolidate, consolidate_if_smaller, to_ipc
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.engine import EngineClient, JobResult, MadeFiles
from actors.replica.dataflow.policy import StepDeclined
from actors.replica.dataflow.state_lookups import StateLookups, StepLookups
from actors.runtime.errors import DefiniteError
from actors.runtime.progress import Frontier, Time
from actors.runtime.threshold_probes import DUE_BYTES, STEP_PAIRS, TOUCHED_ROWS

WholeState: TypeAlias = Callable[[int], AbstractAsyncContextManager[JobRows]]
Weigh: TypeAlias = Callable[[int], bool]
"""Given a step's work (`StepDeltas.work`), returns whether to recompute the view in full
instead."""
CHANGED_TOGETHER_MAX: Final = 4
"""Maximum number of imports whose changes are planned together: a join of n changing imports has n
terms."""


class StepDeltas(msgspec.Struct, frozen=True):
    """Result of a step: the delta of the view and those of the hidden states, and the cost."""

    output: pa.Table
    hidden: tuple[pa.Table, ...] = ()
    spark_ms: float = 0.0
    prepared: bool = False
    """True if all runs executed a plan that was built before."""
    wait_ms: float = 0.0
    """Time in ms spent waiting for the engine and, within it, for other jobs; not part of
    `spark_ms`."""
    work: int = 0
    """Number of changes, plus about how many pairs they form with the rows that they looked up."""
    written: tuple[tuple[BatchPart, ...], ...] = ()
    """Parts of the output and of each hidden state, if the executors wrote them. Then `output` is
    empty, and `hidden` has the same rows as their parts."""

    @property
    def rows_out(self) -> int:
        """Return the number of the output's updates."""
        rows: int = self.output.num_rows
        return rows + sum(part.rows for each in self.written[:1] for part in each)

    @property
    def changed(self) -> bool:
        """Return whether there is any update."""
        return self.rows_out > 0 or any(rows.num_rows for rows in self.hidden)


def split_deltas(plan: DeltaPlan, wide: pa.Table) -> tuple[pa.Table, tuple[pa.Table, ...]]:
    """Split the last stratum's output into (output delta, hidden deltas), consolidated."""
    output, *hidden = (_delta(wide, each) for each in plan.deltas)
    return output, tuple(hidden)


def _delta(wide: pa.Table, delta: DeltaColumns) -> pa.Table:
    """Return one of the deltas, consolidated."""
    shape = delta.schema.arrow_updates()
    rows = wide.select([*delta.names, TIME, DIFF]).rename_columns(shape.names)
    if delta.bit:
        bits = pc.bit_wise_and(wide[TO], pa.scalar(delta.bit, wide[TO].type))
        rows = rows.filter(pc.not_equal(bits, 0))
    return consolidate(concat([rows], shape))


async def written_deltas(plan: DeltaPlan, folders: AnswerFolders, made: MadeFiles) -> StepDeltas:
    """Return the deltas that executors wrote, with their parts adopted.

    Raise `StorageError`; no part is left then.
    """
    parts = await folders.adopt(made.objects)
    hidden = await folders.hidden_rows(parts)
    output = plan.output.arrow_updates().empty_table()
    cost = made.spark_ms, False, made.wait_ms, 0
    return StepDeltas(output, hidden, *cost, written=tuple(map(tuple, parts)))


def empty_deltas(plan: DeltaPlan) -> StepDeltas:
    """Return deltas without changes."""
    hidden = tuple(state.schema.arrow_updates().empty_table() for state in plan.hidden)
    return StepDeltas(plan.output.arrow_updates().empty_table(), hidden)


def can_share_run(stratum: PlanStratum, made_here: Sequence[str], *, hidden_whole: bool) -> bool:
    """Return whether a stratum may share a run with the strata before it, which produce
    `made_here`."""
    for lookup in stratum.lookups:
        if hidden_whole and InputName.parse(lookup.target).kind is InputKind.HIDDEN:
            continue
        if any(name in made_here for name, _ in lookup.origins):
            return False
    return True


def last_stratum_of_run(
    plan: DeltaPlan, first: int, *, hidden_whole: bool, optimistic: bool
) -> int:
    """Return the last stratum of the run that starts with stratum `first`.

    With `optimistic`, a stratum that rarely produces rows is assumed to produce none.
    """
    last = first
    made_here: list[str] = []
    while last + 1 < len(plan.strata):
        if not (optimistic and plan.strata[last].seldom):
            made_here.append(InputKind.RESULT.text(last))
        if not can_share_run(plan.strata[last + 1], made_here, hidden_whole=hidden_whole):
            break
        last += 1
    # A run's inner outputs are lost, so the run must end before an output that later strata need
    # too.
    while missed_later(plan.strata, first, last, optimistic=optimistic):
        last -= 1
    return last


def input_names(plan: DeltaPlan, first: int, last: int, *, optimistic: bool = False) -> list[str]:
    """Return the inputs that strata `first` to `last` read and do not produce themselves.

    With `optimistic`, strata that rarely produce rows are assumed to produce none.
    """
    made_here = {InputKind.RESULT.text(index) for index in range(first, last + 1)}
    strata = plan.strata[first : last + 1]
    if optimistic:
        read = (name for s in strata if s is strata[-1] or not s.seldom for name in s.usual)
    else:
        read = (name for s in strata for name in s.inputs)
    return [name for name in dict.fromkeys(read) if name not in made_here]


def likely_runs(plan: DeltaPlan, *, hidden_whole: bool) -> list[LikelyRun]:
    """Return the runs of steps in which all imports and the clock changed at several times.

    Their plans also serve steps with fewer changes. With more than `CHANGED_TOGETHER_MAX` imports,
    return the runs in which one import changes.
    """
    found: dict[tuple[int, int, tuple[str, ...]], None] = {}
    optimistic = plan.optimistic
    covered = {
        InputKind.COVERED.text(n): InputKind.CHANGES.text(each.input_index)
        for n, each in enumerate(plan.covered)
    }
    origins = [InputKind.CHANGES.text(index) for index in range(len(plan.inputs))]
    clocks = [InputKind.DUE.text(k) for k, state in enumerate(plan.hidden) if state.due]
    together = [[*origins, *clocks]] if len(origins) <= CHANGED_TOGETHER_MAX else []
    for changes in together or [[each] for each in (*origins, *clocks)]:
        made, first = {*changes, *(k for k, d in covered.items() if d in changes)}, 0
        while first < len(plan.strata):
            last = last_stratum_of_run(
                plan, first, hidden_whole=hidden_whole, optimistic=optimistic
            )
            names = input_names(plan, first, last, optimistic=optimistic)
            changed = tuple(name for name in names if name in made)
            if changed:
                found[first, last, changed] = None
                made.add(InputKind.RESULT.text(last))
            first = last + 1
    return [LikelyRun(*run, False, optimistic) for run in found]


def interval_rows(lo: Time, hi: Frontier) -> JobRows:
    """Return the input that contains a step's interval."""
    shape = INTERVAL_SCHEMA.arrow_updates()
    row = pa.Table.from_pylist([{"lo": lo, "hi": hi, TIME: 0, DIFF: 1}], shape)
    return JobRows(schema=INTERVAL_SCHEMA, arrow=to_ipc(row))


def schema_of(plan: DeltaPlan, name: str, rows: pa.Table) -> TableSchema:
    """Return the schema of a named input, restricted to the columns that the rows have."""
    known = plan.input_schema(name)
    fields = [field for field in rows.schema if field.name not in (TIME, DIFF)]
    if known is not None:
        given = {field.name for field in fields}
        return TableSchema(tuple(column for column in known.columns if column.name in given))
    # The plan does not describe a stratum's output, so its types are taken from the Arrow columns.
    return TableSchema(tuple(TableColumn(field.name, spark_type(field.type)) for field in fields))


def _reads_alone(plan: DeltaPlan, lookups: StepLookups, last: int) -> bool:
    """Return whether the strata after the first, up to `last`, read changes only from the first."""
    first = InputKind.RESULT.text(0)
    names = (name for name in input_names(plan, 1, last) if name != first)
    changes = [lookups.rows(name) for name in names if InputName.parse(name).holds_changes]
    return not any(rows is not None and rows.num_rows for rows in changes)


async def _input_rows(
    engine: EngineClient, plan: DeltaPlan, lookups: StepLookups, name: str
) -> tuple[int | None, pa.Table | None]:
    """Return the number of the import whose state the input `name` is, or None, and the input's
    rows as far as they are known."""
    kind, number = InputName.parse(name)
    if kind is not InputKind.NEARBY:
        return number if kind is InputKind.STATE else None, lookups.rows(name)
    near = plan.nearby[number]
    rows = lookups.rows(InputKind.STATE.text(near.input_index))
    changes = lookups.rows(InputKind.CHANGES.text(near.input_index))
    if rows is None or changes is None:
        return near.input_index, None
    found = await engine.work(rows.num_rows, partial(nearby_rows, rows, changes, near))
    return near.input_index, found


async def _run_strata(
    engine: EngineClient,
    plan: DeltaPlan,
    lookups: StepLookups,
    run: tuple[int, int],
    interval: tuple[Time, Frontier],
    name: tuple[int, int],
    whole_state: WholeState,
    into_bucket: tuple[BucketFolder, ...],
    *,
    optimistic: bool,
) -> JobResult | MadeFiles | None:
    """Run the strata ``run[0]`` to ``run[1]``, whose lookups are done, and return their output.

    Return None if none of their inputs has changed, so that their output has not changed either.
    """
    (first, last), (lo, hi) = run, interval
    strata = plan.strata[first : last + 1]
    async with AsyncExitStack() as stack:
        inputs: dict[str, JobRows] = {}
        for input_name in input_names(plan, first, last, optimistic=optimistic):
            if input_name == INTERVAL:
                inputs[INTERVAL] = interval_rows(lo, hi)
                continue
            input_index, rows = await _input_rows(engine, plan, lookups, input_name)
            if rows is None or not rows.num_rows:
                continue
            if input_index is not None and TOUCHED_ROWS.crossed(
                rows.num_rows > engine.settings.lookup_rows_max
            ):
                given = whole_state(input_index)
                inputs[input_name] = await stack.enter_async_context(given)
                continue
            schema = narrow_schema(schema_of(plan, input_name, rows), input_name, strata)
            narrower = len(schema.names) + 2 < rows.num_columns
            rows = rows.select([*schema.names, TIME, DIFF])
            if narrower and InputName.parse(input_name).holds_changes:
                rows = await engine.work(rows.num_rows, partial(consolidate_if_smaller, rows))
            packed = await engine.pack(schema, rows)
            # The run reads the file, so remove it afterwards.
            stack.push_async_callback(engine.discard, packed)
            inputs[input_name] = packed
        if not any(InputName.parse(given_name).holds_changes for given_name in inputs):
            return None
        job_id = engine.job_id(*name, f"{first}-{last}")
        step = StepJob(
            job_id,
            engine.dataflow,
            first,
            last,
            inputs,
            lo,
            hi,
            optimistic=optimistic,
            into_bucket=into_bucket if last == len(plan.strata) - 1 else (),
        )
        return await engine.run_into_files(step)


async def delta_step(
    engine: EngineClient,
    plan: DeltaPlan,
    touched: StateLookups,
    deltas: Sequence[pa.Table],
    interval: tuple[Time, Frontier],
    name: tuple[int, int],
    whole_state: WholeState,
    folders: AnswerFolders,
    *,
    quiet: bool = False,
    divisible: bool = False,
    weigh: Weigh | None = None,
) -> StepDeltas:
    """Run the strata over the deltas ``lo <= time < hi`` and the state that they touch.

    Args:
        deltas: The used columns and rows of the imports' changes (`views.input_uses`).
        name: (incarnation, number).
        whole_state: Returns the full state of an import as files for Spark to scan; used if more
            than `lookup_rows_max` rows are touched.
        folders: Where executors may write a large answer.
        quiet: True if recent changes like these produced no output. Then the first stratum first
            runs alone, and if it produces no row, strata without other changes are skipped.
        divisible: True if the step may be shortened to fewer times.
        weigh: Called once the work of the first run is known; True declines the step.

    Raise the errors of the engine, the arrangements and the stores, `DefiniteError` for more times
    than fit, and `StepDeclined`.
    """
    lo, hi = interval
    due = await engine.clock.run_blocking(partial(touched.due, lo, hi)) if plan.temporal else {}
    due_bytes = sum(rows.nbytes for rows in due.values())
    bytes_max = engine.settings.inflight_bytes_per_dataflow_max
    if hi - lo > 1 and DUE_BYTES.crossed(due_bytes > bytes_max):
        # The machine halves the interval of a step that fails definitely.
        raise DefiniteError(
            f"too many bytes come due in [{lo}, {hi}): {due_bytes} (limit {bytes_max})"
        )
    changes = StepChanges(
        deltas, due, interval, name, quiet, divisible, weigh, whole_state, folders.places
    )
    optimistic = plan.optimistic
    try:
        made = await _step_once(engine, plan, touched, changes, optimistic=optimistic)
        void = optimistic and _is_void(plan, made)
    except DefiniteError:
        # The error may come from rows that the optimistic run left out.
        if not optimistic:
            raise
        void = True
    if void:
        # The step was already accepted, so the second run must not ask again.
        changes = changes._replace(weigh=None)
        made = await _step_once(engine, plan, touched, changes, optimistic=False)
    if made.files is not None:
        found = await written_deltas(plan, folders, made.files)
        return made.of(found.output, found.hidden, found.written)
    wide = made.rows
    if wide is None:
        empty = empty_deltas(plan)
        return made.of(empty.output, empty.hidden)
    output, hidden = await engine.work(wide.num_rows, lambda: split_deltas(plan, wide))
    return made.of(output, hidden)


class StepChanges(NamedTuple):
    """Changes of the imports and of the clock that a step covers, with its interval and name."""

    deltas: Sequence[pa.Table]
    due: Mapping[str, pa.Table]
    interval: tuple[Time, Frontier]
    name: tuple[int, int]
    quiet: bool
    divisible: bool
    weigh: Weigh | None
    whole_state: WholeState
    into_bucket: tuple[BucketFolder, ...]


class _StepOutput(msgspec.Struct):
    """Output of the last stratum, and the cost of all runs."""

    rows: pa.Table | None = None
    files: MadeFiles | None = None
    """Names what executors wrote instead of `rows`."""
    spark_ms: float = 0.0
    prepared: bool = True
    wait_ms: float = 0.0
    work: int = 0
    """Changes, plus the pairs that they form."""

    def of(
        self,
        output: pa.Table,
        hidden: tuple[pa.Table, ...],
        written: tuple[tuple[BatchPart, ...], ...] = (),
    ) -> StepDeltas:
        """Return a step's deltas with this cost attached."""
        cost = self.spark_ms, self.prepared, self.wait_ms, self.work
        return StepDeltas(output, hidden, *cost, written)


def _is_void(plan: DeltaPlan, made: _StepOutput) -> bool:
    """Return whether a stratum produced a row although the run assumed that it would not."""
    if made.files is not None:
        return any(each.delta == len(plan.deltas) for each in made.files.objects)
    wide = made.rows
    if wide is None:
        return False
    bit = pa.scalar(plan.seldom_bit, wide[TO].type)
    return bool(pc.any(pc.not_equal(pc.bit_wise_and(wide[TO], bit), 0)).as_py())


async def _step_once(
    engine: EngineClient,
    plan: DeltaPlan,
    touched: StateLookups,
    changes: StepChanges,
    *,
    optimistic: bool,
) -> _StepOutput:
    """Run all strata. With `optimistic`, assume that strata that rarely produce rows produce
    none."""
    deltas, due, (lo, hi), name, quiet, divisible, weigh, whole_state, into_bucket = changes
    pairs_max = engine.settings.step_pairs_max
    lookups = StepLookups(touched, deltas, lo, due)
    hidden_whole = touched.hidden_whole(engine.settings.hidden_rows_whole_max)
    count = sum(rows.num_rows for rows in (*deltas, *due.values()))
    whole = _StepOutput()

    async def run(first: int, last: int, *followed: PlanStratum) -> pa.Table | None:
        nonlocal weigh
        # Looking up what many changes touch takes longer than passing a small state in full.
        unknown = last > last_stratum_of_run(plan, first, hidden_whole=False, optimistic=optimistic)
        all_hidden = hidden_whole and (unknown or count > touched.hidden.rows)
        await engine.clock.run_blocking(partial(lookups.follow, followed, whole_hidden=all_hidden))
        whole.work = count + lookups.pairs
        if divisible and STEP_PAIRS.crossed(lookups.pairs > pairs_max):
            raise DefiniteError(
                f"too many pairs in [{lo}, {hi}): {lookups.pairs} (limit {pairs_max})"
            )
        if weigh is not None:
            # Ask only once: the first stratum may run alone before it runs with the others.
            asked, weigh = weigh, None
            if asked(whole.work):
                raise StepDeclined
        made = await _run_strata(
            engine, plan, lookups, (first, last), (lo, hi), name, whole_state, into_bucket,
            optimistic=optimistic,
        )  # fmt: skip
        if made is None:
            return None
        whole.spark_ms += made.spark_ms
        whole.wait_ms += made.wait_ms
        if isinstance(made, MadeFiles):
            whole.prepared, whole.files = False, made
            return None
        whole.prepared &= made.prepared
        return made.rows

    first = 0
    while first < len(plan.strata):
        last = last_stratum_of_run(plan, first, hidden_whole=hidden_whole, optimistic=optimistic)
        strata = plan.strata[first : last + 1]
        alone = 0
        if quiet and first == 0 < last and _reads_alone(plan, lookups, last):
            alone = 1
            rows = await run(0, 0, strata[0])
            if rows is None or not rows.num_rows:
                last = 0
        if last or not alone:
            rows = await run(first, last, *strata[alone:])
        if rows is not None:
            lookups.made(last, rows)
        whole.rows = rows
        first = last + 1
    return whole


def full_job(
    engine: EngineClient,
    plan: DeltaPlan,
    contents: Sequence[JobRows],
    as_of: Time,
    name: tuple[int, int],
    *,
    into_files: bool = False,
    into_bucket: tuple[BucketFolder, ...] = (),
    old: tuple[JobRows, ...] = (),
) -> StepJob:
    """Return the job that computes the view from scratch at `as_of`, in one run.

    The inputs' `contents` are passed as deltas, and every state is empty. With `into_files` a large
    answer comes as files; with `into_bucket` it comes as objects there, in one folder for each of
    the deltas. If `old` contents are given for the deltas, the answer is the difference to them.
    """
    last = len(plan.strata) - 1
    # Strata that rarely produce rows are assumed to produce none.
    names = input_names(plan, 0, last, optimistic=plan.optimistic)
    inputs = {each: contents[n] for each, n in plan.whole_inputs().items() if each in names}
    if INTERVAL in names:
        inputs[INTERVAL] = interval_rows(0, as_of + 1)
    job_id = engine.job_id(*name, "whole")
    return StepJob(
        job_id,
        engine.dataflow,
        0,
        last,
        inputs,
        0,
        as_of + 1,
        True,
        into_files,
        plan.optimistic,
        into_bucket,
        old,
    )


async def full_step(
    engine: EngineClient,
    plan: DeltaPlan,
    contents: Sequence[JobRows],
    as_of: Time,
    name: tuple[int, int],
    old: tuple[JobRows, ...],
    folders: AnswerFolders,
) -> StepDeltas:
    """Compute the view from scratch, split into output and hidden states, minus the `old`
    contents."""
    job = full_job(engine, plan, contents, as_of, name, into_bucket=folders.places, old=old)
    made = await engine.run_into_files(job)
    if isinstance(made, MadeFiles):
        return await written_deltas(plan, folders, made)
    output, hidden = await engine.clock.run_blocking(lambda: split_deltas(plan, made.rows))
    return StepDeltas(output, hidden, made.spark_ms, wait_ms=made.wait_ms)
