"""The in-memory engine: answers the executor's messages in pure Python, without Spark.

Steps run the delta nodes (`nodes`). `ComputeDifference` runs the query's text on SQLite (`oracle`),
which shares no code with the nodes. `AnalyzeStatement` types queries with `analysis`. So everything
above the engine can be tested without a JVM, with correct answers.

Hooks for tests: `EngineControls` holds jobs of a kind until they are released, fails the next ones,
and counts the jobs run. A held job can be canceled: its caller gets `OperationCanceled`
immediately.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import localcontext
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.durable.persist.schemas import read_as
from actors.engine.spark.bucket_reading import bucket_spec, open_bucket, open_part
from actors.model.plan.delta import TO, DeltaPlan, aggregate_below_unions
from actors.model.plan.input_names import InputKind
from actors.model.plan.job_log import JobLog
from actors.model.plan.jobs import (
    AnalyzeStatement,
    Answer,
    BucketObject,
    CancelChildJob,
    CancelJob,
    ComputeDifference,
    EngineCondition,
    ExecutorMessage,
    ForgetPlan,
    InspectEngine,
    InspectJobs,
    Job,
    JobRows,
    LocateConnect,
    ParseText,
    PlanPrepared,
    PreparePlan,
    RehearseSteps,
    RowsDone,
    RunStep,
    SelectContents,
    kind_of,
)
from actors.model.plan.schema import DIFF, TIME, TableSchema, arrow_type
from actors.model.plan.updates import advance, between, from_ipc, to_ipc
from actors.model.protocol.api import TIME_ZONE
from actors.runtime.errors import (
    DefiniteError,
    EngineUnavailable,
    InvalidUsage,
    OperationCanceled,
    PenstockError,
)
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem, ReplySlot, RunningEffect
from actors.runtime.settings import Settings
from actors.testing.analysis import analyzed, parsed
from actors.testing.expressions import WIDE
from actors.testing.nodes import NodeRelation, NodeRunner, consolidated, frozen
from actors.testing.oracle import ordered_rows, run_query

"""The column whose bits say to which deltas a row belongs (see `DeltaPlan`)."""


class EngineControls:
    """A test's controls of the engine, shared by reference with the actor."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of jobs started, by kind (``RunStep``, ``ComputeDifference``, …)."""
        self.jobs: list[Job] = []
        """Jobs started, in order."""
        self._holds: dict[str, anyio.Event] = {}
        """Events that held kinds wait for, by kind; set and removed by `release`."""
        self._failures: dict[str, list[PenstockError]] = {}
        """Errors with which the next jobs fail, by kind."""
        self._begun: dict[str, anyio.Event] = {}
        """Events for `wait_started`, by kind; set and removed at the next job."""

    def hold(self, kind: str) -> None:
        """Make jobs of that kind wait until `release`."""
        self._holds.setdefault(kind, anyio.Event())

    def release(self, kind: str) -> None:
        """Let held jobs of that kind continue."""
        event = self._holds.pop(kind, None)
        if event is not None:
            event.set()

    def fail_next(self, kind: str, error: PenstockError) -> None:
        """Make the next job of that kind fail with `error`. Several failures of one kind queue
        up."""
        self._failures.setdefault(kind, []).append(error)

    async def wait_started(self, kind: str, count: int = 1) -> None:
        """Wait until `count` jobs of that kind have started in total."""
        while self.counts[kind] < count:
            await self._begun.setdefault(kind, anyio.Event()).wait()

    def begin(self, job: Job) -> None:
        """Record a job. Raises the next failure queued for its kind."""
        kind = kind_of(job)
        self.counts[kind] += 1
        self.jobs.append(job)
        event = self._begun.pop(kind, None)
        if event is not None:
            event.set()
        failures = self._failures.get(kind)
        if failures:
            raise failures.pop(0)

    async def held(self, job: Job) -> None:
        """Wait while jobs of that kind are held."""
        while (event := self._holds.get(kind_of(job))) is not None:
            await event.wait()


class _Finished(msgspec.Struct, frozen=True):
    job_id: str
    answer: Answer | PenstockError


class InMemoryExecutor(Actor[Any]):
    """Answers `Run` and `CancelJob` as the Spark executor does."""

    def __init__(self, controls: EngineControls | None = None) -> None:
        self.controls = controls or EngineControls()
        self._plans: dict[str, DeltaPlan] = {}
        """Prepared plans, by dataflow."""
        self._running: dict[str, tuple[RunningEffect, ReplySlot[Answer]]] = {}
        """Running jobs by id, each with its effect and the slot for its answer."""
        self._log = JobLog(256)

    async def receive(self, message: ExecutorMessage | _Finished) -> None:
        """Handle one message."""
        if isinstance(message, _Finished):
            self._running.pop(message.job_id, None)
            self._log.ended(message.job_id, self.ctx.monotonic_ms(), message.answer)
        elif isinstance(message, InspectJobs):
            message.reply.set(self._log.notes(self.ctx.monotonic_ms()))
        elif isinstance(message, InspectEngine):
            message.reply.set(EngineCondition("up"))
        elif isinstance(message, LocateConnect):
            message.reply.fail(
                EngineUnavailable("the in-memory engine does not support Spark Connect")
            )
        elif isinstance(message, CancelJob):
            self._cancel(message.job_id)
        elif isinstance(message.job, CancelChildJob):
            self._cancel(message.job.job_id)
        elif isinstance(message.job, ForgetPlan):
            self.controls.begin(message.job)
            self._plans.pop(message.job.dataflow, None)
            if message.reply is not None:
                message.reply.set(PlanPrepared(message.job.job_id))
        else:
            self._start(message.job, message.reply)

    def describe(self) -> str:
        """Return the numbers of running jobs and known plans."""
        return f"{len(self._running)} jobs, {len(self._plans)} plans"

    def _cancel(self, job_id: str) -> None:
        found = self._running.pop(job_id, None)
        if found is not None:
            effect, reply = found
            effect.cancel()
            self._log.ended(job_id, self.ctx.monotonic_ms(), OperationCanceled.__name__)
            reply.fail(OperationCanceled(f"job {job_id} was canceled"))

    def plan_of(self, job: PreparePlan) -> DeltaPlan:
        """Return the plan to prepare. A test may override this to use a mutated plan."""
        return job.plan

    def _start(self, job: Job, reply: ReplySlot[Answer]) -> None:
        if isinstance(job, PreparePlan):
            self._plans[job.dataflow] = self.plan_of(job)  # immediately: following jobs may use it

        self._log.asked(job, self.ctx.now_ms(), self.ctx.monotonic_ms())
        self._log.started(job.job_id, self.ctx.monotonic_ms())

        async def run() -> _Finished:
            try:
                self.controls.begin(job)
                await self.controls.held(job)
                # In a thread, like Spark: a join of many rows must not block anything else.
                answer = await self.ctx.clock.run_blocking(lambda: self.answer(job))
                reply.set(answer)
                return _Finished(job.job_id, answer)
            except PenstockError as error:
                reply.fail(error)
                return _Finished(job.job_id, error)

        effect = self.ctx.effect(run, done=lambda finished: finished)
        self._running[job.job_id] = (effect, reply)

    def answer(self, job: Job) -> Answer:
        """Return the job's answer. Raises the errors that a job may fail with."""
        with localcontext(WIDE):
            return self._answer(job)

    def _answer(self, job: Job) -> Answer:
        if isinstance(job, AnalyzeStatement):
            return analyzed(job)
        if isinstance(job, ParseText):
            return parsed(job)
        if isinstance(job, PreparePlan):
            _check(job.plan)
            return PlanPrepared(job.job_id)
        if isinstance(job, RehearseSteps):
            return PlanPrepared(job.job_id)
        if isinstance(job, RunStep):
            plan = self._plans.get(job.dataflow)
            if plan is None:
                raise InvalidUsage(f"dataflow {job.dataflow!r} was not prepared")
            try:
                made = run_step(plan, job)
            except DefiniteError:
                if job.lo > 0:
                    raise
                made = run_step(aggregate_below_unions(plan), job)
            return _done(job.job_id, subtract_old(plan, made, job))
        if isinstance(job, ComputeDifference):
            return _done(job.job_id, run_difference(job))
        if isinstance(job, SelectContents):
            return _done(job.job_id, run_select(job))
        raise InvalidUsage(f"the in-memory engine cannot run {type(job).__name__}")


def _done(job_id: str, table: pa.Table) -> RowsDone:
    return RowsDone(job_id, table.num_rows, to_ipc(table))


def _check(plan: DeltaPlan) -> None:
    """Run the strata on empty inputs, as a preparation does, and check the output's types."""
    made = run_strata(plan, {}, 0, len(plan.strata) - 1, 1, 2)
    if made is None:
        return
    found = dict(made.columns)
    for column in plan.made_columns:
        kind = found.get(column.name)
        if kind is None or arrow_type(kind) != arrow_type(column.type):
            raise InvalidUsage(f"the plan returns {column.name} as {kind}, not {column.type}")


def run_step(plan: DeltaPlan, job: RunStep) -> pa.Table:
    """Return the updates that a step makes."""
    inputs = {name: relation_of(rows) for name, rows in job.inputs.items()}
    made = run_strata(plan, inputs, job.first, job.last, job.lo, job.hi, job.optimistic)
    if made is None:
        raise InvalidUsage(f"the plan has no strata {job.first} to {job.last}")
    return table_of(made)


def subtract_old(plan: DeltaPlan, made: pa.Table, job: RunStep) -> pa.Table:
    """Return what a step made, minus the old contents that its job names."""
    if not job.old:
        return made
    names = [column.name for column in plan.made_columns]
    bits = made[TO].to_pylist() if plan.hidden else [0] * made.num_rows
    signed = []
    for delta, old in zip(plan.deltas, job.old, strict=True):
        places = {name: place for place, name in enumerate(delta.names)}
        values = [list(map(frozen, made[name].to_pylist())) for name in delta.names]
        rows = zip(*values, strict=True) if values else iter([()] * made.num_rows)
        diffs = zip(rows, made[DIFF].to_pylist(), bits, strict=True)
        own = [(tuple(row), diff) for row, diff, to in diffs if to & delta.bit == delta.bit]
        own += [(row, -diff) for row, _, diff in relation_of(old).updates]
        for row, diff in own:
            filled = (
                delta.bit if n == TO else row[places[n]] if n in places else None for n in names
            )
            signed.append((tuple(filled), job.hi - 1, diff))
    columns = tuple((column.name, column.type) for column in plan.made_columns)
    return table_of(NodeRelation(columns, consolidated(signed)))


def run_strata(
    plan: DeltaPlan,
    inputs: Mapping[str, NodeRelation],
    first: int,
    last: int,
    lo: int,
    hi: int,
    optimistic: bool = False,
) -> NodeRelation | None:
    """Return the output of stratum `last`, or None if there is none. Missing inputs are empty. With
    `optimistic` the output of a stratum that rarely produces rows is taken to be empty."""
    if last >= len(plan.strata):
        return None
    runner = NodeRunner({**_empty_inputs(plan, first), **inputs}, lo, hi)
    made = None
    for index in range(first, last + 1):
        made = runner.run(plan.strata[index].node)
        if optimistic and plan.strata[index].seldom and index < last:
            made = NodeRelation(made.columns, [])
        runner.inputs[InputKind.RESULT.text(index)] = made
    return made


def _empty_inputs(plan: DeltaPlan, first: int) -> dict[str, NodeRelation]:
    """Return every input of the strata from `first` on, without rows."""

    def empty(schema: TableSchema) -> NodeRelation:
        return NodeRelation(tuple((c.name, c.type) for c in schema.columns), [])

    found: dict[str, NodeRelation] = {}
    for name in plan.input_names():
        schema = plan.input_schema(name)
        assert schema is not None, f"the plan names {name}"
        found[name] = empty(schema)
    # Columns of an earlier stratum's output are those of its node, run over empty inputs.
    runner = NodeRunner(found, 1, 2)
    for index in range(first):
        columns = runner.run(plan.strata[index].node).columns
        name = InputKind.RESULT.text(index)
        found[name] = runner.inputs[name] = NodeRelation(columns, [])
    return found


def run_difference(job: ComputeDifference) -> pa.Table:
    """Return the updates that turn `old` into the query's result."""
    result = run_query(job.sql, _contents(job.tables), job.output)
    old = [] if job.old is None else relation_of(job.old).updates
    signed = [(row, job.time, count) for row, count in result.items()]
    signed += [(row, job.time, -diff) for row, _, diff in old]
    columns = tuple((column.name, column.type) for column in job.output.columns)
    return table_of(NodeRelation(columns, consolidated(signed)))


def run_select(job: SelectContents) -> pa.Table:
    """Return the query's rows in its order."""
    # The functions here only work in UTC; other zones are refused.
    if any(value != "UTC" for name, value in job.conf if name == TIME_ZONE):
        raise InvalidUsage("the in-memory engine computes only in UTC")
    rows = ordered_rows(job.sql, _contents(job.tables), job.output)
    columns = tuple((column.name, column.type) for column in job.output.columns)
    table = table_of(NodeRelation(columns, [(row, 0, 1) for row in rows]))
    return table.drop_columns([TIME, DIFF])


def _contents(
    tables: Sequence[tuple[str, JobRows]],
) -> dict[str, tuple[TableSchema, Counter[tuple[Any, ...]]]]:
    found = {}
    for name, rows in tables:
        contents: Counter[tuple[Any, ...]] = Counter()
        for row, _, diff in relation_of(rows).updates:
            contents[row] += diff
        found[name] = (rows.schema, contents)
    return found


def relation_of(rows: JobRows) -> NodeRelation:
    """Read the rows given to a job."""
    columns = tuple((column.name, column.type) for column in rows.schema.columns)
    shape = rows.schema.arrow_updates()
    tables = []
    if rows.arrow is not None:
        tables.append(from_ipc(rows.arrow))
    if rows.arrow_file is not None:
        with pa.ipc.open_file(Path(rows.arrow_file)) as reader:
            tables.append(reader.read_all())
    parts = [*map(_part, rows.files), *map(_object, rows.objects)]
    # As in Spark, columns that an older file lacks are NULL.
    whole = [read_as("a part", part, rows.schema) for part in parts]
    tables += [between(part, rows.lower, rows.upper) for part in whole]
    updates: list[tuple[tuple[Any, ...], int, int]] = []
    for table in tables:
        plain = table.select(shape.names).cast(shape)
        if rows.advance_to is not None:
            plain = advance(plain, rows.advance_to)
        values = [list(map(frozen, plain[name].to_pylist())) for name in rows.schema.names]
        rest = zip(plain[TIME].to_pylist(), plain[DIFF].to_pylist(), strict=True)
        rowwise = zip(*values, strict=True) if values else iter([()] * plain.num_rows)
        updates += [(tuple(row), t, d) for row, (t, d) in zip(rowwise, rest, strict=True)]
    return NodeRelation(columns, updates)


def _object(part: BucketObject) -> pa.Table:
    kind, _, bucket = part.bucket.partition("://")
    store = open_bucket(bucket_spec(kind, bucket, os.environ, 5_000, 1))
    with open_part(store, part.key, part.bytes) as file:
        return file.read(use_threads=False)


def _part(path: str) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read(use_threads=False)


def table_of(relation: NodeRelation) -> pa.Table:
    """Return a relation as an updates table."""
    arrays: list[pa.Array] = []
    fields: list[pa.Field] = []
    for index, (name, kind) in enumerate(relation.columns):
        wanted = arrow_type(kind)
        values = [row[index] for row, _, _ in relation.updates]
        if pa.types.is_map(wanted):
            values = [value if value is None else list(map(tuple, value)) for value in values]
        fields.append(pa.field(name, wanted))
        arrays.append(pa.array(values, wanted))
    for name, position in ((TIME, 1), (DIFF, 2)):
        fields.append(pa.field(name, pa.int64()))
        arrays.append(pa.array([update[position] for update in relation.updates], pa.int64()))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def in_memory_engine(
    controls: EngineControls | None = None,
) -> Callable[[ActorSystem, Settings, Path], ActorAddress[ExecutorMessage]]:
    """Return a `Service`'s `engine` argument that starts an `InMemoryExecutor`."""

    def start(
        system: ActorSystem, settings: Settings, scratch: Path
    ) -> ActorAddress[ExecutorMessage]:
        address: ActorAddress[Any] = system.spawn(lambda: InMemoryExecutor(controls), "engine")
        return address

    return start
