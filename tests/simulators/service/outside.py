"""The external systems of a simulated service: sources that fail by faults, and sinks into memory.

Theory of operation. External systems outlive the service's lives: `SinksChecker` keeps one
`SinkWritten` per sink, with all data ever committed to it. A `MemorySink` keeps the rules of
`sinks.sink`: a batch and its upper become visible together; opening it fences off earlier writers.
At the instant of each commit its batch is compared with the truth (`SinksChecker`).

Operations are sites of faults: ``sink.open``, ``sink.commit``, ``source.open``, ``source.next``.
Each may fail before it happens, lose its answer (a commit), or take long.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import pyarrow as pa

from actors.connectors.factory import ConnectorFactory
from actors.connectors.sink_task import SinkTask
from actors.connectors.sinks.messages import SinkWork
from actors.connectors.sinks.sink import SinkConnector, SinkStatistics
from actors.connectors.sources.source import Given, SourceConnector, SourceExport, SourceUnreachable
from actors.connectors.storage_connectors import StorageConnectors as Reach
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import ExecutorMessage
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.model.protocol.storage import ConnectorConfiguration, SinkDescription
from actors.runtime.errors import WriterFenced
from actors.runtime.kernel import Actor, ActorAddress, ActorClock
from actors.runtime.progress import Frontier, ObjectId, ShardId
from actors.runtime.settings import Settings
from tests.simulators.service.faults import FAIL, LOST_ANSWER, FaultInjector
from tests.simulators.service.growth import GrowingSource, InnerSource
from tests.simulators.service.history import CheckerViolation, ShardHistories, Update
from tests.simulators.service.queries import Bag, trimmed

MEMORY: Final = "memory"
"""Kind of these sinks."""


class SinkWritten:
    """The data that one sink has made durable externally."""

    def __init__(self, id: ObjectId, shard: ShardId, as_of: Frontier = 0) -> None:
        self.id = id
        self.shard = shard
        self.as_of = as_of
        """Time at which the sink begins: no earlier change is ever written."""
        self.upper: Frontier | None = None
        self.contents: Bag = Counter()
        self.writer: MemorySink | None = None
        """The sink that may commit; others are fenced off."""
        self.commits = 0


class SinksChecker:
    """Checks that a sink commits exactly the object's changes between the two frontiers: batches
    follow one another without gap or repeat, and the committed contents are the object's as of the
    last time below the upper; if the sink keeps times, each update is at its own.

    Does not cover: sinks of objects that were dropped meanwhile, and latency.
    """

    def __init__(self, history: ShardHistories) -> None:
        self._history = history
        self.written: dict[ObjectId, SinkWritten] = {}

    def found(self, made: SinkDescription) -> SinkWritten:
        """Return the data that a sink has written."""
        new = SinkWritten(made.id, made.input.shard, made.as_of)
        return self.written.setdefault(made.id, new)

    def check(
        self, table: SinkWritten, lower: Frontier, upper: Frontier, batch: list[Update], times: bool
    ) -> None:
        """Check a batch that is about to become durable."""
        if upper <= lower or (table.upper is not None and lower != table.upper):
            raise CheckerViolation(
                f"sinks: {table.id} stands below {table.upper} and commits [{lower}, {upper})"
            )
        held = self._history.shards.get(table.shard)
        if held is None:
            return
        if upper > self._history.sealed(held):
            raise CheckerViolation(
                f"sinks: {table.id} commits up to {upper}, its object is not sealed"
            )
        contents = Counter(table.contents)
        for row, _, diff in batch:
            contents[row] += diff
        wanted = held.at(upper - 1)
        if Counter({row: n for row, n in contents.items() if n}) != wanted:
            raise CheckerViolation(
                f"sinks: {table.id} would hold {contents} below {upper}, not {wanted}"
            )
        if not times or table.upper is None:
            return
        found = _summed(batch)
        truth = _summed([each for each in held.updates if lower <= each[1] < upper])
        if found != truth:
            raise CheckerViolation(
                f"sinks: {table.id} commits {found} for [{lower}, {upper}): {truth}"
            )


def _summed(updates: Sequence[Update]) -> Counter[tuple[Any, int]]:
    found: Counter[tuple[Any, int]] = Counter()
    for row, time, diff in updates:
        found[row, time] += diff
    return Counter({at: n for at, n in found.items() if n})


async def _suffer(injector: FaultInjector, site: str) -> bool:
    """Carry out the fault of an operation, if it has one; return whether the answer is lost. Raises
    `SourceUnreachable`."""
    fault = injector.draw(site)
    if fault is None:
        return False
    if fault.delay_ms:
        await asyncio.sleep(fault.delay_ms / 1000)
    if fault.kind == FAIL:
        raise SourceUnreachable(f"{site}: failed on purpose", "wait")
    return fault.kind == LOST_ANSWER


class MemorySink:
    """A sink into memory; see `sinks.sink.SinkConnector`. About half of the sinks keep times, by
    their ids."""

    once = False

    def __init__(self, table: SinkWritten, checker: SinksChecker, world: Any) -> None:
        self._table = table
        self._checker = checker
        self._world = world
        self._batch: list[Update] = []
        self._counts = SinkStatistics()
        self.keeps_times = zlib.crc32(table.id.encode()) % 2 == 1

    async def check(self, schema: TableSchema) -> None:
        """Accept every schema."""

    async def open(self, schema: TableSchema) -> Frontier | None:
        """Fence off earlier writers, and return the upper."""
        await _suffer(self._world.injector, "sink.open")
        self._table.writer = self
        self._world.trace.note("sink", self._table.id, "opens at", self._table.upper)
        return self._table.upper

    async def write(self, updates: pa.Table) -> None:
        """Keep a piece of the batch."""
        columns = [updates[n].to_pylist() for n in updates.column_names if n not in (TIME, DIFF)]
        rows = (trimmed(row) for row in zip(*columns, strict=True))
        times, diffs = updates[TIME].to_pylist(), updates[DIFF].to_pylist()
        self._batch += zip(rows, times, diffs, strict=True)
        await asyncio.sleep(0)

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Commit all pieces and the upper at one instant."""
        lost = await _suffer(self._world.injector, "sink.commit")
        table = self._table
        if table.writer is not self:
            raise WriterFenced(f"{table.id}: another writes it now", determinate=True)
        self._world.trace.note("sink", table.id, "commits", lower, upper, len(self._batch))
        self._world.guarded(self._checker.check)(table, lower, upper, self._batch, self.keeps_times)
        for row, _, diff in self._batch:
            table.contents[row] += diff
        table.upper = upper
        table.commits += 1
        self._batch.clear()
        self._counts = SinkStatistics(commits=self._counts.commits + 1)
        await asyncio.sleep(0.001)
        if lost:
            raise SourceUnreachable("sink.commit: timed out on purpose", "wait")

    def statistics(self) -> SinkStatistics:
        """Return the number of commits."""
        return self._counts

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class FaultySource(InnerSource):
    """A source that is unreachable now and then."""

    def __init__(self, inner: SourceConnector, injector: FaultInjector) -> None:
        super().__init__(inner)
        self._injector = injector

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Open the inner source, if no fault strikes."""
        await _suffer(self._injector, "source.open")
        self._injector.trace.note("source opens at", position)
        await super().open(exports, position)

    async def next(self) -> Given:
        """Call the inner source, if no fault strikes."""
        await _suffer(self._injector, "source.next")
        return await super().next()


class SimulatedOutside(ConnectorFactory):
    """The service's access to these external systems. `world` is the simulation's."""

    def __init__(
        self,
        world: Any,
        settings: Settings,
        clock: ActorClock,
        random: Random,
        executor: ActorAddress[ExecutorMessage],
        scratch: Path,
    ) -> None:
        super().__init__(settings, clock, random, executor, scratch)
        self._world = world
        self._places = scratch
        self._numbers = 0

    def source(self, configuration: ConnectorConfiguration, id: ObjectId) -> SourceConnector:
        """Return the real source, with faults."""
        source = super().source(configuration, id)
        if configuration.kind == "counter":
            source = GrowingSource(source)
        return FaultySource(source, self._world.injector)

    def new_sink(self, kind: str, options: bytes) -> ConnectorConfiguration:
        """Return the configuration of a sink into memory, or of a real one."""
        if kind == MEMORY:
            return ConnectorConfiguration(MEMORY, b"")
        return super().new_sink(kind, options)

    def sink(self, configuration: ConnectorConfiguration, id: ObjectId) -> SinkConnector:
        """Return a sink for the checks at a creation: it is never written to."""
        return self._sink(SinkWritten(id, ""))

    def _sink(self, table: SinkWritten) -> SinkConnector:
        return MemorySink(table, self._world.sinks, self._world)

    def half(self, persist: PersistClient) -> Reach:
        """Return the same for the storage halves of the workers."""

        def sink_task(
            description: SinkDescription, number: int, owner: ActorAddress[Any]
        ) -> Actor[Any]:
            id_, shard = description.id, description.input.shard
            work = SinkWork(
                id_,
                description.name,
                shard,
                description.input.schema,
                cast(Any, description.configuration),  # only `make` looks at it
                description.as_of,
            )
            self._numbers += 1

            def make(*_: object) -> SinkConnector:
                return self._sink(self._world.sinks.found(description))

            return SinkTask(
                work,
                number,
                persist,
                self._settings,
                owner,
                self._places / f"sink-{id_}-{self._numbers}",
                writable=True,
                make=make,
            )

        return Reach(self.source, sink_task, self._places, self.oneshot)
