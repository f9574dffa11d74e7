"""A sink task on a stage: a sink that remembers and fails when told to, over stores that do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
from sink_house import SCHEMA, Update, settings_of, shard, tuples  # type: ignore[import-not-found]

from actors.connectors.sink_task import SinkTask
from actors.connectors.sinks.messages import (
    SinkEnded,
    SinkProgress,
    SinkStatus,
    SinkWork,
    StopSink,
)
from actors.connectors.sinks.parquet import ParquetConfig
from actors.connectors.sinks.sink import SinkStatistics
from actors.connectors.sources.source import SourceUnreachable
from actors.durable.persist import CompareAndSet, PersistClient, VersionedData
from actors.durable.persist.memory_stores import MemoryBlob, MemoryConsensus
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import PenstockError, StorageError
from actors.runtime.progress import Frontier
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation, SubjectActor


class Faults:
    """Counts operations, and fails the one of that number, before or after it was done."""

    def __init__(self) -> None:
        self.at = 0
        self.after = False
        self.done = 0
        self.armed = False

    def arm(self, at: int, after: bool) -> None:
        self.at, self.after, self.done, self.armed = at, after, 0, True

    def step(self, error: PenstockError, *, after: bool) -> None:
        """Called before and after each operation."""
        if not self.armed:
            return
        if not after:
            self.done += 1
        if self.done == self.at and self.after == after:
            self.armed = False
            raise error


class Outside:
    """What stands outside, whatever becomes of the sinks that write it."""

    def __init__(self) -> None:
        self.upper: Frontier | None = None
        self.batches: list[tuple[Frontier, Frontier, tuple[Update, ...]]] = []
        self.opened = 0
        self.faults = Faults()
        self.commit_gate = anyio.Event()
        self.commit_gate.set()
        self.committing = False

    @property
    def updates(self) -> list[Update]:
        return [update for _, _, rows in self.batches for update in rows]


class RememberingSink:
    """A `SinkConnector` into an `Outside`."""

    def __init__(self, outside: Outside, *, keeps_times: bool = True, once: bool = False) -> None:
        self.keeps_times = keeps_times
        self.once = once
        self.closed = False
        self._outside = outside
        self._staged: list[Update] = []
        self._number = 0
        self._counts = SinkStatistics()

    def _step(self, what: str, *, after: bool) -> None:
        self._outside.faults.step(SourceUnreachable(f"{what} failed", "wait"), after=after)

    async def check(self, schema: TableSchema) -> None:
        """Anything may be written."""

    async def open(self, schema: TableSchema) -> Frontier | None:
        self._step("open", after=False)
        self._outside.opened += 1
        self._number = self._outside.opened
        self._step("open", after=True)
        return self._outside.upper

    async def write(self, updates: pa.Table) -> None:
        self._step("write", after=False)
        assert updates.num_rows
        self._staged += tuples(updates)
        self._step("write", after=True)

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        outside = self._outside
        self._step("commit", after=False)
        outside.committing = True
        with anyio.CancelScope(shield=True):
            await outside.commit_gate.wait()
        outside.committing = False
        assert not self.closed
        assert self._number == outside.opened, "fenced"
        assert lower < upper
        assert outside.upper in (None, lower), "contiguous"
        outside.batches.append((lower, upper, tuple(self._staged)))
        outside.upper = upper
        rows = self._counts.rows_committed + len(self._staged)
        self._counts = SinkStatistics(0, rows, 0, self._counts.commits + 1)
        self._staged = []
        self._step("commit", after=True)

    def statistics(self) -> SinkStatistics:
        return self._counts

    async def close(self) -> None:
        self.closed = True


class FaultyConsensus(MemoryConsensus):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        error = StorageError("consensus failed", determinate=False)
        self._faults.step(error, after=False)
        done = await super().compare_and_set(ops)
        self._faults.step(error, after=True)
        return done

    async def head(self, key: str) -> VersionedData | None:
        self._faults.step(StorageError("consensus failed", determinate=True), after=False)
        return await super().head(key)


class FaultyBlob(MemoryBlob):
    def __init__(self, clock: Any, faults: Faults) -> None:
        super().__init__(clock)
        self._faults = faults

    async def get(self, key: str) -> bytes | None:
        self._faults.step(StorageError("blob failed", determinate=True), after=False)
        return await super().get(key)


class House:
    """A shard ``s``, what stands outside, and tasks between them, one after another."""

    def __init__(self, stage: ActorIsolation, place: Path, **changes: Any) -> None:
        self.stage = stage
        self.place = place
        self.settings: Settings = settings_of(place, **changes)
        self.outside = Outside()
        houses = sum("owner" in path for path in stage.system.cells)
        self.name = f"house{houses}"
        self.owner = stage.probe(f"{self.name}-owner")
        self.sinks: list[RememberingSink] = []
        self.number = 0
        self.upper: Frontier | None = None
        """Told last."""
        self.given: dict[str, Any] = {}

    async def stores(self, schema: TableSchema = SCHEMA, *, tables: bool = False) -> PersistClient:
        faults = self.outside.faults
        self.consensus = FaultyConsensus(faults)
        self.persist = PersistClient(
            FaultyBlob(self.stage.clock, faults), self.consensus, self.settings, self.stage.clock
        )
        self.schema = schema
        await shard(self.persist, schema, tables=tables)
        return self.persist

    def make(self, *_: Any) -> RememberingSink:
        self.sinks.append(RememberingSink(self.outside, **self.given))
        return self.sinks[-1]

    def start(
        self,
        as_of: int = 0,
        *,
        writable: bool = True,
        config: Any = None,
        real: bool = False,
    ) -> SubjectActor[Any]:
        self.number += 1
        self.upper = None
        work = SinkWork(
            "u1", "view", "s", self.schema, config or ParquetConfig("p", creation="c"), as_of
        )
        given: dict[str, Any] = {} if real else {"make": self.make}
        self.task = self.stage.start(
            lambda: SinkTask(
                work,
                self.number,
                self.persist,
                self.settings,
                self.owner.address,
                self.place / "scratch",
                writable=writable,
                **given,
            ),
            f"{self.name}-sink{self.number}",
        )
        return self.task

    async def stop(self) -> None:
        """Stops the task as its owner does; it says that it has ended."""
        await self.task.send(StopSink())
        assert (await self.told())[-1] == "ended: None"
        assert not self.task.running

    async def uppers(self) -> list[Frontier]:
        """Of the progress told since this was last asked; other messages are taken away."""
        return [each for each in await self.told() if isinstance(each, int)]

    async def told(self) -> list[Any]:
        """All that was told since this was last asked, progress as its upper when that moved."""
        await self.stage.idle()
        found: list[Any] = []
        for each in self.owner.received:
            assert each.number == self.number
            match each:
                case SinkProgress(upper=upper, input=heard):
                    assert heard >= upper
                    if upper != self.upper:
                        found.append(upper)
                    self.upper = upper
                case SinkStatus(status=status, error=error):
                    found.append(status if error is None else f"{status}: {error}")
                case SinkEnded(error=error):
                    found.append(f"ended: {error}")
        self.owner.received.clear()
        return found

    async def hold(self) -> int | None:
        return (await self.persist.state("s")).holds.get("sink/u1")
