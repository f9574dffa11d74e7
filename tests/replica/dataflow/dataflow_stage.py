"""A dataflow between probes: its workers, its listen and fetch tasks, its engine.

The engine's answers are made in Python from the job's own rows; the tasks describe and fetch
what a test wrote. The store is real, and in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    SETTINGS,
    answer_of,
    doubled,
    numbers_plan,
    shard,
    table,
    view_description,
    write,
)

from actors.durable.persist import PersistClient
from actors.fetch_task import cut
from actors.model.plan.jobs import (
    ComputeDifference,
    Job,
    PlanPrepared,
    PreparePlan,
    RehearseSteps,
    RowsDone,
    SubmitJob,
)
from actors.model.plan.jobs import RunStep as StepJob
from actors.model.plan.schema import TIME
from actors.model.plan.updates import to_ipc
from actors.model.protocol.compute import DataflowDescription, StatusResponse
from actors.model.protocol.internal import (
    DataflowProgress,
    DataflowScheduled,
    DescribedPart,
    FetchFailed,
    FetchPart,
    InputStarted,
    PartFetched,
    PartsDescribed,
    StartInputs,
    StartListen,
    WritesAllowed,
)
from actors.replica.dataflow.dataflow import DataflowActor
from actors.runtime.errors import DefiniteError, PenstockError
from actors.testing.isolation import ActorIsolation
from actors.testing.peer_probes import PeerProbe

WAIT_MS_MAX = 1000
"""Virtual time that a dataflow is given to come to something: retries take a few of these."""


class Part(msgspec.Struct, frozen=True):
    """What the tasks know of a part."""

    time_min: int
    time_max: int


class Shards:
    """The inputs' contents as their tasks see them; every write goes to the store too."""

    def __init__(self, persist: PersistClient) -> None:
        self.persist = persist
        self.writes: dict[str, list[tuple[int, int, pa.Table]]] = {}
        """(lower, upper, updates) by shard."""
        self.flows: list[Flow] = []

    async def write(self, name: str, upper: int, updates: pa.Table) -> None:
        await write(self.persist, name, upper, updates)
        kept = self.writes.setdefault(name, [])
        kept.append((kept[-1][1] if kept else 0, upper, updates))
        for flow in self.flows:
            flow.written(name)


class Listening:
    """A probe that plays the listen task of one input."""

    def __init__(self, flow: Flow, incarnation: int, input_index: int) -> None:
        self.flow = flow
        self.incarnation = incarnation
        self.input_index = input_index
        self.name = flow.description.imports[input_index].shard
        self.frontier: int | None = None
        self.probe = flow.stage.probe(f"{flow.name}-listen-{incarnation}-{input_index}")
        self.probe.set_action(StartListen, self.start)

    def start(self, message: StartListen) -> None:
        self.snapshot_at = message.as_of if message.snapshot else None
        self.frontier = message.as_of + 1
        if self.snapshot_at is None or not self.describe_snapshot():
            self.describe()

    def describe_snapshot(self) -> bool:
        """Whether it must wait: the shard has not come so far."""
        as_of = self.snapshot_at
        upper = self.flow.shards.writes[self.name][-1][1]
        if as_of is None:
            return False
        if upper <= as_of:
            return True
        self.snapshot_at = None
        self.tell(0, as_of + 1, snapshot=True)
        self.describe()
        return True

    def describe(self) -> None:
        upper = self.flow.shards.writes[self.name][-1][1]
        if self.frontier is not None and upper > self.frontier:
            lower, self.frontier = self.frontier, upper
            self.tell(lower, upper, snapshot=False)

    def written(self) -> None:
        if self.frontier is not None and not self.describe_snapshot():
            self.describe()

    def tell(self, lower: int, upper: int, *, snapshot: bool) -> None:
        parts = []
        for low, high, updates in self.flow.shards.writes[self.name]:
            if updates.num_rows and low < upper and high > lower:
                key = f"{self.name}[{lower},{upper})#{low}"
                self.flow.parts[key] = updates
                times = updates[TIME].to_pylist()
                part = Part(min(times), max(times))
                rows, size = updates.num_rows, updates.nbytes
                parts.append(
                    DescribedPart(key, self.name, part, lower, upper, size, rows, snapshot=snapshot)
                )
        self.flow.subject.reply(
            PartsDescribed(
                self.flow.description.id,
                self.incarnation,
                self.input_index,
                tuple(parts),
                lower,
                upper,
                snapshot,
            )
        )


class Flow:
    """One dataflow between probes."""

    def __init__(
        self,
        stage: ActorIsolation,
        shards: Shards,
        scratch: Path,
        description: DataflowDescription,
        *,
        view: Callable[[StepJob], pa.Table] = doubled,
        workers: int = 1,
        name: str = "flow",
    ) -> None:
        self.stage = stage
        self.shards = shards
        self.name = name
        self.description = description
        self.view = view
        self.parts: dict[str, pa.Table] = {}
        self.fetch_failures: list[PenstockError] = []
        self.listening: list[Listening] = []
        self.jobs: list[Job] = []
        self.failures: list[PenstockError] = []
        self.kept: list[SubmitJob] = []
        self.rehearsals: list[str] | None = None
        """Where it is a list, rehearsals come into it and do not end."""
        self.keep = False
        self.executor = stage.probe(f"{name}-executor")
        self.executor.set_action(SubmitJob, self._run)
        self.workers = [stage.probe(f"{name}-worker-{index}") for index in range(workers)]
        for index, worker in enumerate(self.workers):
            worker.set_action(StartInputs, partial(self._start_inputs, index))
        addresses = tuple(worker.address for worker in self.workers)
        self.subject = stage.start(
            lambda: DataflowActor(
                description,
                addresses,
                self.executor.address,
                shards.persist,
                SETTINGS,
                scratch / name,
            ),
            name,
        )
        shards.flows.append(self)

    # what the neighbours do

    def _start_inputs(self, worker: int, message: StartInputs) -> None:
        self.listening = [
            each for each in self.listening if each.incarnation == message.incarnation
        ]
        for input_index in range(len(self.description.imports)):
            inc = message.incarnation
            fetch = self.stage.probe(f"{self.name}-fetch-{worker}-{inc}-{input_index}")
            fetch.set_action(FetchPart, partial(self._fetch, inc, input_index))
            listen: PeerProbe | None = None
            if worker == input_index % len(self.workers):
                self.listening.append(Listening(self, inc, input_index))
                listen = self.listening[-1].probe
            self.subject.reply(
                InputStarted(
                    self.description.id,
                    inc,
                    worker,
                    input_index,
                    fetch.address,
                    None if listen is None else listen.address,
                )
            )

    def _fetch(self, incarnation: int, input_index: int, message: FetchPart) -> None:
        part, id_ = message.part, self.description.id
        if self.fetch_failures:
            error = self.fetch_failures.pop(0)
            answer: Any = FetchFailed(id_, incarnation, input_index, message.time, part.key, error)
        else:
            updates = cut(self.parts[part.key], part)
            answer = PartFetched(id_, incarnation, input_index, message.time, part.key, updates)
        self.subject.reply(answer)

    def _run(self, run: SubmitJob) -> None:
        job = run.job
        if isinstance(job, RehearseSteps) and self.rehearsals is not None:
            self.rehearsals.append(job.job_id)  # and never answered
        elif isinstance(job, PreparePlan | RehearseSteps):
            run.reply.set(PlanPrepared(job.job_id))
        elif isinstance(job, StepJob | ComputeDifference):
            self.jobs.append(job)
            if self.keep:
                self.kept.append(run)
            elif self.failures:
                run.reply.fail(self.failures.pop(0))
            else:
                self._answer(job, run.reply)

    def _answer(self, job: StepJob | ComputeDifference, reply: Any) -> None:
        try:
            rows = answer_of(self.view, job)
        except DefiniteError as error:
            reply.fail(error)
        else:
            reply.set(RowsDone(job.job_id, rows.num_rows, to_ipc(rows), spark_ms=2.0))

    def written(self, name: str) -> None:
        for listening in self.listening:
            if listening.name == name:
                listening.written()

    # what a test does and sees

    def told(self, kind: type[Any]) -> list[Any]:
        """What worker 0 was told so far."""
        return [message for message in self.workers[0].received if isinstance(message, kind)]

    @property
    def progress(self) -> list[int]:
        """The outputs told, each once in a row; 0 is none."""
        told = [message.output for message in self.told(DataflowProgress)]
        return [output for output, _ in groupby(told) if output]

    async def start(self) -> None:
        await self.subject.send(WritesAllowed())
        await self.subject.send(DataflowScheduled())

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Lets time go on, if it must, until the condition holds."""
        for _ in range(WAIT_MS_MAX):
            await self.stage.idle()
            if holds():
                return
            await self.stage.advance(1)
        raise self.stage.failed(f"{self.name}: expected {what}")

    async def reported(self, frontier: int) -> None:
        await self.until(lambda: max(self.progress, default=0) >= frontier, f"output {frontier}")

    async def status(self, state: str) -> StatusResponse:
        def found() -> list[StatusResponse]:
            return [status for status in self.told(StatusResponse) if status.state == state]

        await self.until(lambda: bool(found()), f"status {state}")
        return found()[0]

    async def rests_in(self, state: str) -> None:
        def last() -> str:
            return str(self.told(StatusResponse)[-1].state)

        await self.until(lambda: last() == state, f"rest in {state}")

    async def stop(self) -> None:
        self.shards.flows.remove(self)
        await self.subject.stop()


@asynccontextmanager
async def surroundings(stage: ActorIsolation) -> AsyncIterator[Shards]:
    persist = await PersistClient.in_memory(SETTINGS, stage.clock)
    shards = Shards(persist)
    yield shards
    for flow in list(shards.flows):
        await flow.stop()
    await persist.close()


async def numbers_flow(
    stage: ActorIsolation, shards: Shards, scratch: Path, mode: str = "incremental"
) -> Flow:
    """The view over `numbers`, which holds 1 and 2 at time 3 and has upper 5."""
    await shard(shards.persist, "numbers", NUMBERS)
    await shard(shards.persist, "out", NUMBERS)
    await shards.write("numbers", 5, table(NUMBERS, (1, 2, 1), (2, 3, 1)))
    description = view_description(numbers_plan(mode), [("numbers", NUMBERS)], 4)
    return Flow(stage, shards, scratch, description)


@asynccontextmanager
async def hydrated_numbers(
    stage: ActorIsolation, scratch: Path, mode: str = "incremental"
) -> AsyncIterator[Flow]:
    """Yield the view of `numbers_flow` when it has reported 5."""
    async with surroundings(stage) as shards:
        flow = await numbers_flow(stage, shards, scratch, mode)
        await flow.start()
        await flow.reported(5)
        yield flow
