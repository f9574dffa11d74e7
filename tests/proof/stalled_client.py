"""The replica while its client stalls, or while there is none: it goes on, and memory is flat.

Run: ``python tests/proof/stalled_client.py [--minutes 10] [--variant stalled|absent]``. The cluster
(shards and engine in memory, two workers, a listener on loopback) and the table's writer are those
of ``controller_campaign.py``. A first controller creates indexes, a view and subscribes, and
leaves. *stalled*: the next one says Hello, CreateInstance, some of its dataflows and a peek, keeps
its connection alive, and does not come to InitializationComplete. *absent*: there is none. Both
under writes all the time. (``absent_client.py`` does the latter on Spark.)

Meanwhile every shard's upper must advance from sample to sample and stay close to the writes,
every index must take in what is written, and memory must be flat. Then the controller goes on (or
comes): every dataflow is as far as the writes at once, nothing is prepared, rendered or computed
twice, and every answer is right. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

import anyio
from controller_campaign import FINISH, House, house
from controller_script import (
    BASE_INDEX,
    PERMANENT,
    WORKERS,
    Controller,
    Store,
    Wrong,
    _Asked,
    compiled,
    shards_of,
)
from soak import resident_mb

from actors.model.plan.delta import DeltaPlan
from actors.model.protocol.compute import (
    AllowWrites,
    CreateInstance,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
)
from actors.replica.cluster import connect
from actors.replica.cluster.checked import CheckedClient
from actors.runtime.errors import PenstockError
from actors.runtime.settings import Settings

EARLY: Final = "early"
"""A peek that is asked before InitializationComplete."""
SAMPLES: Final = 60
PERIOD_S_MIN: Final = 0.5
BEHIND_MAX: Final = 200
"""Times that a shard or index may be behind the writes: ten seconds of them. A replica that stands
still is soon beyond it; a busy machine is not."""
GROWTH_MAX: Final = 1.1
"""Of memory, from the second quarter to the last."""
SECONDS_OF_MEMORY: Final = 120
"""A shorter run says nothing of growth."""


class Visitor(Controller):
    """A controller that can stop in the middle of what it says first."""

    async def begin(self, nonce: str) -> None:
        """Hello, one of the dataflows in the catalog, and a peek; then nothing."""
        self._views_max = 1
        await self._client.send(Hello(nonce))
        await self._client.send(CreateInstance(WORKERS))
        await self._create(self._described(self._entries[BASE_INDEX]))
        self._peeks[EARLY] = _Asked("t", 1, None, anyio.current_time())
        await self._client.send(Peek(EARLY, IndexTarget(BASE_INDEX), 1))

    async def complete(self) -> None:
        """The rest."""
        if not self._peeks:
            raise Wrong("a peek was answered before InitializationComplete")
        for entry in self._entries.values():
            if entry.id != BASE_INDEX:
                await self._create(self._described(entry))
        await self._client.send(InitializationComplete())
        await self._client.send(AllowWrites())

    async def prepare(self) -> None:
        """Something for the replica to do and to answer while nobody listens."""
        for _ in range(2):
            await self._subscribe()
        await self.wait_until("batches", lambda: all(s.upper for s in self._streams.values()))
        for _ in range(4):
            await self._peek()

    async def caught_up(self, time: int) -> None:
        """Every dataflow of the catalog is known to be past a time."""
        await self.wait_until(
            f"frontiers past {time}",
            lambda: all(self._frontiers.get(id_, 0) > time for id_ in self._entries),
        )


class Watch:
    """What is seen from outside, sample by sample."""

    def __init__(self, made: House, plan: DeltaPlan) -> None:
        self._made = made
        self._shards = [shards_of(0, plan)[0], *shards_of(0, plan)[1]]
        self._uppers: dict[str, int] = {}
        self._rows: Counter[str] = Counter()
        self.memory: list[float] = []
        self.wrong: list[str] = []
        self.behind_max = 0

    async def sample(self) -> None:
        """Looks once; `wrong` has what stood still."""
        made = self._made
        time = made.time
        self.memory.append(resident_mb(os.getpid()))
        for shard in self._shards:
            upper = (await made.persist.state(shard)).upper
            if upper <= self._uppers.get(shard, 0):
                self.wrong.append(f"{shard} stands still at {upper}; the writes are at {time}")
            self._uppers[shard] = upper
            self.behind_max = max(self.behind_max, time - upper + 1)
        rows: Counter[str] = Counter()
        for worker in (await made.cluster.statistics()).workers:
            for index in worker.indexes:
                rows[index.id] += index.rows
        # Nobody allows compaction, so what an index holds grows with what it has taken in.
        stuck = [id_ for id_, held in rows.items() if held <= self._rows[id_]]
        self.wrong += [f"{id_} took nothing in; the writes are at {time}" for id_ in stuck]
        self._rows = rows

    def verdict(self, seconds: float) -> list[str]:
        """All that was wrong."""
        found = self.wrong
        if self.behind_max > BEHIND_MAX:
            found.append(f"a shard was {self.behind_max} times behind the writes")
        if not self._rows:
            found.append("no index was seen")
        quarter = max(1, len(self.memory) // 4)
        early = median(self.memory[quarter : 2 * quarter] or self.memory)
        late = median(self.memory[-quarter:])
        print(
            f"memory: {early:.1f} MiB in the second quarter, {late:.1f} MiB in the last "
            f"({late / early:.3f}); at most {self.behind_max} times behind; "
            f"{self._rows.total()} updates in indexes",
            flush=True,
        )
        if seconds >= SECONDS_OF_MEMORY and late > early * GROWTH_MAX:
            found.append(f"memory grew from {early} to {late} MiB")
        return found


async def look_on(made: House, plan: DeltaPlan, seconds: float) -> list[str]:
    """Samples for so long; what was wrong."""
    watch = Watch(made, plan)
    period = max(PERIOD_S_MIN, seconds / SAMPLES)
    began, first = anyio.current_time(), made.time
    while anyio.current_time() - began < seconds:
        await anyio.sleep(period)
        await watch.sample()
        if len(watch.memory) % 10 == 0:
            print(f"time {made.time}, {watch.memory[-1]:.1f} MiB", flush=True)
    print(f"{made.time - first} writes in {seconds:.0f} s meanwhile", flush=True)
    return watch.verdict(seconds)


async def run(seconds: float, variant: str, folder: Path) -> list[str]:
    """The whole campaign; what was wrong."""
    plan, settings = await compiled(), Settings()
    catalog = folder / "catalog.json"
    async with house(folder / "cluster", catalog, 1) as made:

        async def visitor() -> tuple[CheckedClient, Visitor]:
            client = CheckedClient(await connect(f"127.0.0.1:{made.port}", settings), settings)
            return client, Visitor(client, Store(catalog), plan, Random(1))

        async with anyio.create_task_group() as group:
            client, first = await visitor()
            group.start_soon(first.hear)
            await first.introduce("first", 1)
            await first.ready()
            await first.prepare()
            group.cancel_scope.cancel()
        await client.close()

        async with anyio.create_task_group() as group:
            if variant == "stalled":
                client, second = await visitor()
                group.start_soon(second.hear)
                await second.begin("second")
            wrong = await look_on(made, plan, seconds)
            if variant == "absent":
                client, second = await visitor()
                group.start_soon(second.hear)
                await second.begin("second")
            began, time = anyio.current_time(), made.time
            await second.complete()
            await second.caught_up(time)
            print(f"caught up {(anyio.current_time() - began) * 1000:.0f} ms after", flush=True)
            await second.finish(FINISH)
            group.cancel_scope.cancel()
        await client.close()
        reused = (await made.cluster.statistics()).workers[0].dataflows_reused
        print(f"{reused} dataflows reused, {made.seen.steps} steps", flush=True)
        if reused < len(PERMANENT):
            wrong.append(f"only {reused} dataflows were reused")
        wrong += await made.check()
    return wrong


def main() -> int:
    """Prints what was wrong; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--variant", choices=("stalled", "absent"), default="stalled")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-stalled-") as folder:
        try:
            wrong = anyio.run(run, options.minutes * 60, options.variant, Path(folder))
        except BaseExceptionGroup as error:
            found, rest = error.split((Wrong, PenstockError))
            if rest is not None or found is None:
                raise
            wrong = [repr(found)]
    for line in wrong[:20]:
        print(f"WRONG: {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
