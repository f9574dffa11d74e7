"""A controller that is killed a hundred times, and the cluster that goes on: nothing is lost.

Run: ``python tests/proof/controller_campaign.py [--kills 100] [--seed 1] …``. This process holds
the cluster (shards and engine in memory, two workers, a listener on loopback) and writes to a
table all the time. The controller is a separate process (``controller_script.py``): it creates
and drops indexes, views and subscribes, compacts, peeks and follows, and checks every answer, for
the table's contents at a time are a formula. It is killed with SIGKILL at any moment, and the next
one goes on from the catalog that it left.

Checked here: no controller found an answer wrong or missing; every dataflow was rendered once and
its plan prepared once; no time of a view was computed twice; a reconciliation replaced
nothing; this process's memory is flat (the shards of a view go with it, so that the campaign
itself keeps nothing) and holds no connection of a dead controller; when the last controller has
dropped everything, nothing is left. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median
from subprocess import PIPE, Popen
from typing import Any, Final

import anyio
import msgspec
import pyarrow as pa
from controller_script import (
    BASE_VIEW,
    TABLE,
    WINDOW,
    WORKERS,
    Store,
    Wrong,
    compiled,
    inserted,
    shards_of,
    warm_up,
)
from soak import resident_mb

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import Answer, ComputeDifference, Job, PreparePlan, RunStep
from actors.model.plan.updates import concat, with_time
from actors.model.protocol.compute import DataflowDescription, ViewExport
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.cluster import actor_factory
from actors.replica.cluster.connection import ClusterConnection
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.engine import InMemoryExecutor
from actors.testing.patience import PATIENCE_S

SCRIPT: Final = Path(__file__).with_name("controller_script.py")
PERIOD_S: Final = 0.05
"""Between two writes."""
LAG: Final = 500
"""Times below its upper that a shard can be read: few, so that a run is soon past filling up."""
COMPACT_S: Final = 1.0
DECODED_BYTES: Final = 4 << 20
"""Of decoded parts that are kept: a cache that is soon full."""
RETAIN: Final = "retain"
START_S: Final = PATIENCE_S
"""For a controller to be ready: on a busy machine this finds what hangs, not what is slow."""
KILLS_OF_MEMORY: Final = 40
"""Fewer say nothing of growth."""
GROWTH_MAX: Final = 1.08
"""Of memory, from the second quarter to the last: what allocators keep moves it by some percent."""
VIEWS_PER_LIFE: Final = 4
"""On average; each has shards of its own, which are never used again."""
FINISH: Final = 60
"""Operations of the last controller, which ends by itself."""


class CountingExecutor(InMemoryExecutor):
    """Remembers what it computed."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def answer(self, job: Job) -> Answer:
        """The job's answer."""
        seen = self._seen
        match job:
            case PreparePlan(dataflow=dataflow):
                seen.prepared[dataflow] += 1
            case RunStep(dataflow=dataflow, first=first):
                seen.step((dataflow, first), job)
            case ComputeDifference():
                seen.repeated.append(f"the contents of a view were computed anew: {job.job_id}")
        self.controls.jobs.clear()  # they would grow
        return super().answer(job)


@dataclasses.dataclass
class Seen:
    """What the cluster was made to do."""

    prepared: Counter[str] = dataclasses.field(default_factory=Counter)
    rendered: Counter[str] = dataclasses.field(default_factory=Counter)
    uppers: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    repeated: list[str] = dataclasses.field(default_factory=list)
    stopped: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Views whose actor has stopped, for a while or for good, with their shards."""
    dropped: int = 0
    """Shards of views that are gone."""
    steps: int = 0
    whole: int = 0
    """Of the steps, those that computed a view whole."""

    def step(self, of: tuple[str, int], job: RunStep) -> None:
        """A step over ``lo <= time < hi``: none may begin before the last one ended. A view may
        choose to be computed whole at a new time, where that is cheaper than the step."""
        self.steps += 1
        self.whole += job.at_once
        last = self.uppers.get(of, 0)
        if job.hi <= last or (job.lo < last and not job.at_once):
            self.repeated.append(f"{of} computed [{job.lo}, {job.hi}) after [.., {last})")
        self.uppers[of] = job.hi

    def twice(self) -> list[str]:
        """What was done more than once."""
        found = self.repeated.copy()
        for what, counts in (("prepared", self.prepared), ("rendered", self.rendered)):
            found += [f"{name} was {what} {n} times" for name, n in counts.items() if n > 1]
        return found


class House:
    """The cluster, the table's writer, and who compacts."""

    def __init__(
        self, persist: PersistClient, cluster: WorkerCluster, port: int, seen: Seen, catalog: Path
    ) -> None:
        self.persist = persist
        self.cluster = cluster
        self.catalog = catalog
        self.port = port
        self.seen = seen
        self.time = 0
        self.slowest_s = 0.0

    async def write(self) -> None:
        """One time after the other, for ever."""
        while True:
            began = time.monotonic()
            await self._write_next()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await anyio.sleep(PERIOD_S)

    async def _write_next(self) -> None:
        now = self.time + 1
        updates = [with_time(_rows(now), now, 1)]
        if now > WINDOW:
            updates.append(with_time(_rows(now - WINDOW), now, -1))
        parts = await self.persist.write_parts("t", concat(updates, TABLE.arrow_updates()))
        lower = now if self.time else 0
        done = await self.persist.append([ShardAppend("t", lower, now + 1, tuple(parts))])
        if not isinstance(done, AppendCommitted):
            raise Wrong(f"the table's writer was not alone: {done}")
        self.time = now

    async def compact(self) -> None:
        """Lets go of what is old, as a controller's holds would."""
        uppers: dict[str, int] = {}
        while True:
            await anyio.sleep(COMPACT_S)
            await self._drop_shards()
            for shard in await self.persist.list_shards():
                upper = (await self.persist.state(shard)).upper
                if upper == uppers.get(shard, 0):
                    continue  # not in use, or no more
                uppers[shard] = upper
                if upper > LAG:
                    await self.persist.set_hold(shard, RETAIN, upper - LAG)
                await self.persist.maintain(shard)

    async def _drop_shards(self) -> None:
        """Those of views that no controller wants and that have stopped."""
        wanted = Store(self.catalog).catalog.entries
        gone = {id: shards for id, shards in self.seen.stopped.items() if id not in wanted}
        for id, shards in gone.items():
            del self.seen.stopped[id]
            if id != BASE_VIEW and await self.persist.drop_shards(shards):
                self.seen.dropped += len(shards)

    async def check(self) -> list[str]:
        """At the end, when all is dropped."""
        found = self.seen.twice()
        gc.collect()
        connections = [each for each in gc.get_objects() if isinstance(each, ClusterConnection)]
        if len(connections) > 1:  # the last one may be about to end
            found.append(f"{len(connections)} connections are still in memory")
        statistics = await self.cluster.statistics()
        for index, worker in enumerate(statistics.workers):
            if worker.rendered or worker.dropping or worker.peeks:
                found.append(f"worker {index} still holds {worker}")
            if worker.dataflows_replaced:
                found.append(f"worker {index} replaced {worker.dataflows_replaced}")
        return found


def _rows(at: int) -> pa.Table:
    columns = zip(*inserted(at), strict=True)
    return pa.table([pa.array(column, pa.int64()) for column in columns], schema=TABLE.arrow())


@asynccontextmanager
async def house(folder: Path, catalog: Path, views_max: int) -> AsyncIterator[House]:
    """Everything runs until the block ends."""
    settings = Settings(
        workers=WORKERS,
        maintenance_ms=100,
        index_history_ms=100,
        decoded_parts_bytes_max=DECODED_BYTES,
    )
    warm_up()
    seen, plan = Seen(), await compiled()
    async with ActorSystem() as system:
        persist = await PersistClient.in_memory(settings, SystemClock())
        await persist.create_shards(_shards(plan, views_max))
        executor = system.spawn(lambda: CountingExecutor(seen), "engine")
        below = actor_factory(persist, executor, settings, folder)

        def rendered(description: DataflowDescription, *rest: Any) -> Any:
            seen.rendered[description.id] += 1
            dataflow = below.dataflow(description, *rest)
            export = description.export
            if isinstance(export, ViewExport):
                shards = (export.shard, *export.hidden_shards)
                dataflow.on_stop = _then(dataflow.on_stop, description.id, shards, seen)  # type: ignore[method-assign]
            return dataflow

        factory = msgspec.structs.replace(below, dataflow=rendered)
        cluster = await WorkerCluster.start(
            system, settings, persist, executor, folder, factory=factory
        )
        listener = await cluster.listen("127.0.0.1:0")
        made = House(persist, cluster, listener.address.port, seen, catalog)
        async with anyio.create_task_group() as group:
            group.start_soon(made.write)
            group.start_soon(made.compact)
            try:
                yield made
            finally:
                group.cancel_scope.cancel()
        await listener.aclose()
        await system.stop()
        await persist.close()


def _then(
    stop: Callable[[], Coroutine[Any, Any, None]], id: str, shards: tuple[str, ...], seen: Seen
) -> Callable[[], Coroutine[Any, Any, None]]:
    """The end of a view's actor, and a note of it."""

    async def stopped() -> None:
        await stop()
        seen.stopped[id] = shards

    return stopped


def _shards(plan: DeltaPlan, views_max: int) -> list[NewShard]:
    """The table's, and those of all views that there may be."""
    found = [NewShard("t", TABLE, holds={RETAIN: 0})]
    for number in range(views_max):
        output, hidden = shards_of(number, plan)
        found.append(NewShard(output, plan.output, holds={RETAIN: 0}))
        for name, state in zip(hidden, plan.hidden, strict=True):
            found.append(NewShard(name, state.schema, holds={RETAIN: 0}))
    return found


class Lives:
    """The controllers, one after the other; the next one is started before it is needed."""

    def __init__(self, port: int, catalog: Path, seed: int, views_max: int, kills: int) -> None:
        self._arguments = [f"--port={port}", f"--catalog={catalog}", f"--views-max={views_max}"]
        self._seed = seed * 10_000
        self._left = kills
        self._next: Popen[str] | None = self._start()
        self.told: Counter[str] = Counter()

    def _start(self) -> Popen[str]:
        self._seed += 1
        finish = [] if self._left else [f"--finish={FINISH}"]
        command = [sys.executable, str(SCRIPT), *self._arguments, f"--seed={self._seed}", *finish]
        return Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    async def run_next(self, delay_s: float, *, unready: bool) -> bool:
        """One life: until it is killed, `delay_s` after it was ready (or was begun, if `unready`),
        or to its own end, when it was the last one; True for that."""
        process, self._next = self._next, None
        assert process is not None
        assert process.stdin is not None
        last = not self._left
        if not last:
            self._left -= 1
            self._next = self._start()
        ready = anyio.Event()
        try:
            process.stdin.write("go\n")
            process.stdin.flush()
            async with anyio.create_task_group() as group:
                group.start_soon(self._listen, process, ready)
                if not last:
                    with anyio.move_on_after(START_S):
                        if not unready:
                            await ready.wait()
                        await anyio.sleep(delay_s)
                    process.kill()
        finally:
            process.kill()
            status = await anyio.to_thread.run_sync(process.wait)
        if status != (0 if last else -signal.SIGKILL):
            raise Wrong(f"controller {self._seed} ended with status {status}")
        if not unready and not ready.is_set():
            raise Wrong(f"controller {self._seed} was not ready in {START_S} s")
        return last

    async def _listen(self, process: Popen[str], ready: anyio.Event) -> None:
        assert process.stdout is not None
        while line := await anyio.to_thread.run_sync(process.stdout.readline):
            word = line.strip()
            if word.startswith("WRONG"):
                raise Wrong(word)
            if word.startswith("ready"):
                ready.set()
            elif line.endswith("\n"):
                self.told[word] += 1

    def end(self) -> None:
        """Whoever waits to begin is not needed."""
        if self._next is not None:
            self._next.kill()
            self._next.wait()


async def run(kills: int, seed: int, life_s: float, folder: Path) -> list[str]:
    """The whole campaign; what was wrong."""
    dice, views_max = Random(seed), VIEWS_PER_LIFE * (kills + 2)
    memory: list[float] = []
    catalog = folder / "catalog.json"
    async with house(folder / "cluster", catalog, views_max) as made:
        lives = Lives(made.port, catalog, seed, views_max, kills)
        try:
            while True:
                unready = dice.random() < 0.25 and bool(memory)
                delay_s = dice.uniform(0.0, 0.15) if unready else dice.uniform(0.1, life_s)
                last = await lives.run_next(delay_s, unready=unready)
                memory.append(resident_mb(os.getpid()))
                if last:
                    break
                if len(memory) % 10 == 0:
                    print(
                        f"{len(memory)} kills, time {made.time}, {memory[-1]:.0f} MiB", flush=True
                    )
        finally:
            lives.end()
        wrong = await made.check()
        statistics = await made.cluster.statistics()
        reused = statistics.workers[0].dataflows_reused
        told = ", ".join(f"{what} {count}" for what, count in sorted(lives.told.items()))
        print(
            f"{kills} kills, {made.time} writes (slowest {made.slowest_s * 1000:.0f} ms), "
            f"{made.seen.steps} steps ({made.seen.whole} whole), {reused} dataflows reused, "
            f"{made.seen.dropped} shards dropped; {told}",
            flush=True,
        )
    if not lives.told["ok peek"] or not lives.told["ok batch"] or not lives.told["finished"]:
        wrong.append(f"too little was checked: {lives.told}")
    if kills and not reused:
        wrong.append("no dataflow was reused")
    if kills >= KILLS_OF_MEMORY:
        wrong += grown(memory)
    return wrong


def grown(memory: list[float]) -> list[str]:
    """Whether the last quarter is above the second."""
    quarter = len(memory) // 4
    early, late = median(memory[quarter : 2 * quarter]), median(memory[-quarter:])
    print(f"memory: {early:.0f} MiB in the second quarter, {late:.0f} MiB in the last", flush=True)
    return [] if late <= early * GROWTH_MAX else [f"memory grew from {early} to {late} MiB"]


def main() -> int:
    """Prints what was wrong; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--life-s", type=float, default=2.0, help="of a controller, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-controller-") as folder:
        try:
            wrong = anyio.run(run, options.kills, options.seed, options.life_s, Path(folder))
        except BaseExceptionGroup as error:
            found, rest = error.split(Wrong)
            if rest is not None or found is None:
                raise
            wrong = [repr(found)]
    for line in wrong[:20]:
        print(f"WRONG: {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
