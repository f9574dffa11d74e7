"""A dataflow with its surroundings: persist in memory, real listen and fetch tasks, an engine.

The fake engine's answers are made in Python from the job's own rows, so that a test can make
it fail where it likes. Everything runs on one loop without delays: `run_blocking` runs inline.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.plan.delta import DeltaPlan, NamedInput, PlanStratum, StateLookup, UnionRows
from actors.model.plan.jobs import (
    CancelJob,
    ComputeDifference,
    ForgetPlan,
    Job,
    JobProgress,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RehearseSteps,
    RowsDone,
    SubmitJob,
)
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import (
    advance,
    between,
    concat,
    consolidate,
    empty_updates,
    from_ipc,
    negate,
    to_ipc,
)
from actors.model.protocol.compute import (
    DataflowDescription,
    Export,
    ShardImport,
    StatusResponse,
    SubscribeBatch,
    ViewExport,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    DataflowProgress,
    DataflowScheduled,
    EmitBatch,
    InputStarted,
    InstallUpdates,
    StartInputs,
    StopInputs,
    UpdatesInstalled,
    WritesAllowed,
)
from actors.replica.dataflow.dataflow import DataflowActor
from actors.replica.dataflow.events import DataflowPhase
from actors.runtime.errors import (
    DefiniteError,
    PenstockError,
)
from actors.runtime.kernel import Actor, ActorAddress, ActorClock, ActorSystem, SystemClock
from actors.runtime.settings import Settings

SETTINGS = Settings(retry_delay_ms_min=1, retry_delay_ms_max=4, hold_downgrade_ms=1, standby_ms=20)
NUMBERS = TableSchema((TableColumn("a", "bigint"),))
PAIRS = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "bigint")))
JOINED = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("v", "bigint"), TableColumn("w", "bigint"))
)

Row = tuple[Any, ...]


def table(schema: TableSchema, *rows: Row) -> pa.Table:
    """Updates written as (columns…, time, diff)."""
    names = [*schema.names, TIME, DIFF]
    return pa.Table.from_pylist(
        [dict(zip(names, row, strict=True)) for row in rows], schema=schema.arrow_updates()
    )


def listed(updates: pa.Table) -> list[Row]:
    """Rows, sorted."""
    rows = [tuple(row.values()) for row in updates.to_pylist()]
    return sorted(rows, key=repr)


class InlineClock(SystemClock):
    """Blocking calls run in place."""

    async def run_blocking(self, function: Callable[[], Any]) -> Any:
        await anyio.lowlevel.checkpoint()
        return function()


# -- the engine ------------------------------------------------------------------------------------


def rows_of(rows: JobRows) -> pa.Table:
    assert not rows.files, "the tests' rows are small, and their blobs in memory"
    return empty_updates(rows.schema) if rows.arrow is None else from_ipc(rows.arrow)


def doubled(job: StepJob) -> pa.Table:
    """The view ``select 2 * a from numbers``; 13 is bad luck."""
    delta = rows_of(job.inputs["d0"]) if "d0" in job.inputs else table(NUMBERS)
    found = consolidate(delta).to_pylist()
    if any(row["a"] == 13 and row[DIFF] > 0 for row in found):
        raise DefiniteError("13 cannot be doubled")
    return table(NUMBERS, *((2 * row["a"], row[TIME], row[DIFF]) for row in found))


def joined(job: StepJob) -> pa.Table:
    """``left join right using (k)``, from deltas and touched state."""
    given = {name: rows_of(rows).to_pylist() for name, rows in job.inputs.items()}
    d0, d1, s0, s1 = (given.get(name, []) for name in ("d0", "d1", "s0", "s1"))
    made = []
    for left, right in [*pairs(d0, s1), *pairs(d0, d1), *pairs(s0, d1)]:
        if left["k"] == right["k"]:
            time = max(left[TIME], right[TIME])
            made.append((left["k"], left["v"], right["v"], time, left[DIFF] * right[DIFF]))
    return table(JOINED, *made)


def pairs(left: list[Any], right: list[Any]) -> Any:
    return itertools.product(left, right)


def difference(job: ComputeDifference) -> pa.Table:
    """The opaque view ``select max(a) from numbers``."""
    (name, rows) = job.tables[0]
    assert name == "numbers"
    sums: dict[int, int] = {}
    for row in rows_of(rows).to_pylist():
        sums[row["a"]] = sums.get(row["a"], 0) + row[DIFF]
    present = [a for a, count in sums.items() if count > 0]
    if 13 in present:
        raise DefiniteError("13 is no number")
    made = [(max(present, default=None), job.time, 1)]
    if job.old is not None:
        made += [(row["a"], job.time, -row[DIFF]) for row in rows_of(job.old).to_pylist()]
    return consolidate(table(NUMBERS, *made))


def answer_of(view: Callable[[StepJob], pa.Table], job: StepJob | ComputeDifference) -> pa.Table:
    """What the engine answers, by a view without hidden states."""
    if isinstance(job, ComputeDifference):
        return difference(job)
    made = view(job)
    made = concat([made, *(negate(rows_of(old)) for old in job.old)], made.schema)
    return consolidate(advance(made, job.hi - 1)) if job.old else made


class FakeExecutor(Actor[Any]):
    """Answers at once, unless told to fail or to keep a job."""

    def __init__(self, view: Callable[[StepJob], pa.Table]) -> None:
        self.view = view
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.failures: list[PenstockError] = []
        self.watchers: list[Any] = []
        self.keep = False
        self.kept = anyio.Event()
        self.changed = anyio.Event()

    def tell(self, tasks_done: int, tasks: int) -> None:
        """How far the last job is."""
        self.watchers[-1].reply(JobProgress(self.jobs[-1].job_id, tasks_done, tasks))

    async def receive(self, message: Any) -> None:
        self.changed.set()
        self.changed = anyio.Event()
        if isinstance(message, CancelJob):
            self.cancelled.append(message.job_id)
            return
        assert isinstance(message, SubmitJob)
        job, reply = message.job, message.reply
        if isinstance(job, RehearseSteps):
            reply.set(PlanPrepared(job.job_id))
            return
        self.watchers.append(message.watcher)
        if isinstance(job, PreparePlan):
            reply.set(PlanPrepared(job.job_id))
        elif isinstance(job, StepJob | ComputeDifference):
            self.jobs.append(job)
            if self.keep:
                self.kept.set()
            elif self.failures:
                reply.fail(self.failures.pop(0))
            else:
                self._answer(job, reply)
        else:
            assert isinstance(job, ForgetPlan)

    def _answer(self, job: StepJob | ComputeDifference, reply: Any) -> None:
        try:
            rows = answer_of(self.view, job)
        except DefiniteError as error:
            reply.fail(error)
        else:
            reply.set(RowsDone(job.job_id, rows.num_rows, to_ipc(rows), spark_ms=2.0))


# -- a worker --------------------------------------------------------------------------------------


class FakeWorker(Actor[Any]):
    """Starts real tasks; installs, emits and keeps what it hears."""

    def __init__(self, index: int, house: House) -> None:
        self.index = index
        self.house = house
        self.installs: list[InstallUpdates] = []
        self.batches: list[SubscribeBatch] = []
        self.progress: list[int] = []
        self.statuses: list[StatusResponse] = []
        self.tasks: list[ActorAddress[Any]] = []

    async def receive(self, message: Any) -> None:
        house = self.house
        match message:
            case StartInputs(incarnation=incarnation):
                for task in self.tasks:
                    await self.ctx.stop_child(task)
                self.tasks.clear()
                for input_index, imported in enumerate(house.description.imports):
                    self._start(incarnation, input_index, imported)
            case StopInputs():
                for task in self.tasks:
                    await self.ctx.stop_child(task)
                self.tasks.clear()
            case InstallUpdates():
                self.installs.append(message)
                house.address.send_nowait(
                    UpdatesInstalled(
                        message.dataflow, message.incarnation, self.index, message.upper
                    )
                )
            case EmitBatch():
                self.batches.append(message.batch)
                house.address.send_nowait(
                    BatchEmitted(message.dataflow, message.incarnation, message.batch.upper)
                )
            case DataflowProgress():
                self.progress.append(message.output)
            case StatusResponse():
                self.statuses.append(message)
        house.news.set()
        house.news = anyio.Event()

    def _start(self, incarnation: int, input_index: int, imported: ShardImport) -> None:
        house = self.house
        id_, consumer = house.description.id, house.address
        name = f"{incarnation}-{input_index}"
        fetch = self.ctx.spawn(
            lambda: FetchTask(
                house.persist,
                imported.schema,
                id_,
                incarnation,
                input_index,
                consumer,
                house.settings,
            ),
            f"fetch-{name}",
        )
        self.tasks.append(fetch)
        listen: ActorAddress[Any] | None = None
        if self.index == input_index % len(house.workers):
            listen = self.ctx.spawn(
                lambda: ListenTask(
                    house.persist, imported, id_, incarnation, input_index, consumer, house.settings
                ),
                f"listen-{name}",
            )
            self.tasks.append(listen)
        consumer.send_nowait(InputStarted(id_, incarnation, self.index, input_index, fetch, listen))


class House:
    """One dataflow with its surroundings."""

    def __init__(
        self,
        system: ActorSystem,
        persist: PersistClient,
        scratch: Path,
        description: DataflowDescription,
        *,
        view: Callable[[StepJob], pa.Table] = doubled,
        workers: int = 1,
        settings: Settings = SETTINGS,
        name: str = "flow",
        engine: Actor[Any] | None = None,
        arrangements: SharedArrangements | None = None,
    ) -> None:
        self.system = system
        self.persist = persist
        self.description = description
        self.settings = settings
        self.news = anyio.Event()
        self.executor = FakeExecutor(view)
        self.workers = [FakeWorker(index, self) for index in range(workers)]
        executor = system.spawn(lambda: engine or self.executor, f"{name}-executor")
        addresses = tuple(
            system.spawn(lambda worker=worker: worker, f"{name}-worker-{worker.index}")  # type: ignore[misc]
            for worker in self.workers
        )
        self.addresses = addresses
        self.actor: DataflowActor

        def make() -> DataflowActor:
            self.actor = DataflowActor(
                description,
                addresses,
                executor,
                persist,
                settings,
                scratch / name,
                arrangements=arrangements,
            )
            return self.actor

        self.address: ActorAddress[Any] = system.spawn(make, name)

    async def start(self) -> None:
        await self.address.send(WritesAllowed())
        await self.address.send(DataflowScheduled())

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for news until the condition holds."""
        with anyio.fail_after(200):
            while not holds():
                await self.news.wait()

    def rests_in(self, state: DataflowPhase) -> bool:
        return self.actor._machine.state is state

    async def reported(self, frontier: int) -> None:
        await self.until(lambda: max(self.workers[0].progress, default=0) >= frontier)

    async def status(self, state: str) -> StatusResponse:
        statuses = self.workers[0].statuses
        await self.until(lambda: any(status.state == state for status in statuses))
        return next(status for status in statuses if status.state == state)

    async def stop(self) -> None:
        """The dataflow, then the workers with their tasks."""
        for address in (self.address, *self.addresses):
            cell = self.system.cells[address.path]
            cell.request_stop()
            with anyio.fail_after(200):
                await cell.stopped.wait()


@asynccontextmanager
async def surroundings(
    directory: Path | None = None,
    settings: Settings = SETTINGS,
    clock: ActorClock | None = None,
) -> AsyncIterator[tuple[ActorSystem, PersistClient]]:
    """A system and a store: in memory, or in `directory`."""
    clock = clock or InlineClock()
    async with ActorSystem(clock=clock, seed=1) as system:
        if directory is None:
            persist = await PersistClient.in_memory(settings, clock)
        else:
            persist = await PersistClient.open(directory, settings, clock)
        try:
            yield system, persist
        finally:
            await system.stop()
            await persist.close()


async def shard(persist: PersistClient, name: str, schema: TableSchema) -> None:
    assert await persist.create_shards([NewShard(name, schema, holds={"retain": 0})])


async def write(persist: PersistClient, name: str, upper: int, updates: pa.Table) -> None:
    """Appends up to `upper`."""
    parts = await persist.write_parts(name, updates) if updates.num_rows else ()
    lower = (await persist.state(name)).upper
    outcome = await persist.append([ShardAppend(name, lower, upper, tuple(parts))])
    assert isinstance(outcome, AppendCommitted)


async def contents(persist: PersistClient, name: str, schema: TableSchema, as_of: int) -> list[Row]:
    """(columns…, weight) at a time, errors as their text."""
    reader = await persist.open_reader(name, f"test-{as_of}")
    try:
        parts, _ = await reader.snapshot(as_of)
        sums: dict[Row, int] = {}
        for part in parts:
            for row in between(await persist.fetch(part, schema), 0, as_of + 1).to_pylist():
                error = row.get(ERROR)
                key = (error,) if error is not None else tuple(row[n] for n in schema.names)
                sums[key] = sums.get(key, 0) + row[DIFF]
        return sorted(((*key, count) for key, count in sums.items() if count), key=repr)
    finally:
        await reader.close()


def view_description(
    plan: DeltaPlan, imports: list[tuple[str, TableSchema]], as_of: int
) -> DataflowDescription:
    return DataflowDescription(
        "u9",
        "view",
        tuple(ShardImport(name, schema) for name, schema in imports),
        ViewExport(plan, "out"),
        as_of,
    )


def numbers_plan(mode: str = "incremental") -> DeltaPlan:
    stratum = PlanStratum((), NamedInput("d0", ("a",)), ("d0",))
    strata = (stratum,) if mode == "incremental" else ()
    return DeltaPlan(("numbers",), (NUMBERS,), NUMBERS, "select 2 * a", mode, "", strata)


def join_plan() -> DeltaPlan:
    lookups = (
        StateLookup("s1", ("k",), (("d0", ("k",)),)),
        StateLookup("s0", ("k",), (("d1", ("k",)),)),
    )
    names = ("d0", "d1", "s0", "s1")
    stratum = PlanStratum(
        lookups, UnionRows(tuple(NamedInput(name, ("k", "v")) for name in names)), names
    )
    return DeltaPlan(("l", "r"), (PAIRS, PAIRS), JOINED, "", "incremental", "", (stratum,))


async def numbers_house(
    system: ActorSystem, persist: PersistClient, scratch: Path, mode: str = "incremental"
) -> House:
    """The view over `numbers`, which holds 1 and 2 at time 3 and has upper 5."""
    await shard(persist, "numbers", NUMBERS)
    await shard(persist, "out", NUMBERS)
    await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1), (2, 3, 1)))
    description = view_description(numbers_plan(mode), [("numbers", NUMBERS)], 4)
    return House(system, persist, scratch, description)


async def pass_through(
    system: ActorSystem,
    persist: PersistClient,
    scratch: Path,
    export: Export,
    *,
    workers: int = 1,
    until: int | None = None,
) -> House:
    """An export of `numbers`, which holds 1 and 2 at time 3 and has upper 5."""
    await shard(persist, "numbers", NUMBERS)
    await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1), (2, 3, 1)))
    imports = (ShardImport("numbers", NUMBERS),)
    description = DataflowDescription("t1", "export", imports, export, 4, until)
    house = House(system, persist, scratch, description, workers=workers)
    await house.address.send(DataflowScheduled())
    return house


def emitted(batches: list[SubscribeBatch]) -> list[Row]:
    return [row for b in batches if b.arrow is not None for row in listed(from_ipc(b.arrow))]
