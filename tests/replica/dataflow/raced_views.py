"""Views that one or several replicas maintain, and what they hold by the oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from written_answers import WritableBlob, WritingExecutor  # type: ignore[import-not-found]

from actors.durable.persist import PersistClient
from actors.durable.persist.memory_stores import MemoryConsensus
from actors.engine.views.compile import compile_view
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.maintain import EngineCaller
from actors.testing.oracle import QueryOracle, differences
from actors.testing.stage import ScriptStage

TABLES = {
    "a": TableSchema(
        (TableColumn("k", "int"), TableColumn("g", "string"), TableColumn("v", "int"))
    ),
    "b": TableSchema((TableColumn("k", "int"), TableColumn("w", "bigint"))),
}
VIEWS = {
    "linear": "select k, v + 1 as v1 from a where v > 0",
    "joined": "select a.g, b.w from a join b on a.k = b.k",
    "grouped": "select g, count(*) as n, sum(v) as s, avg(v) as m from a group by g",
    "extremes": "select g, min(v) as lo, max(v) as hi from a group by g",
    "distinct_of": "select distinct k, g from a",
    "outer_of": "select a.k, b.w from a left join b on a.k = b.k",
    "grouped_join": "select b.w, count(*) as n from a join b on a.k = b.k group by b.w",
    "fails": "select k, 12 div v as x from a",
    "grouped_fails": "select g, sum(12 div v) as x from a group by g",
    "joined_fails": "select a.g, b.w + 12 div a.v as x from a join b on a.k = b.k",
    "extremes_fails": "select g, max(12 div v) as hi, min(v) as lo from a group by g",
    "distinct_fails": "select distinct g, 12 div v as x from a",
    "ranked": "select k, g, rank() over (order by v, k, g) as r from a",
}
SETTINGS = Settings(standby_ms=20, hold_downgrade_ms=1, retry_delay_ms_min=1, retry_delay_ms_max=50)


class RacedViews:
    """A stage with several replicas, and what its views should hold."""

    def __init__(
        self, stage: ScriptStage, outputs: dict[str, TableSchema], dice: random.Random
    ) -> None:
        self.stage, self.outputs, self.dice = stage, outputs, dice
        self.oracle = QueryOracle(TABLES)
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self.upper = 0
        self.names: list[str] = []
        self.count = 0
        self.known: dict[str, int] = {}
        self.zeros = 0.2
        """Chance that a written row makes some views fail."""
        self.mended = 0.0
        """Chance that the next change takes such a row back."""

    async def join(self) -> None:
        """One replica more."""
        self.count += 1
        self.names.append(f"r{self.count}")
        await self.stage.start(0, SETTINGS, self.names[-1])

    async def leave(self) -> None:
        """The oldest replica is stopped, wherever it stands."""
        del self.names[0]
        await self.stage.stop(len(self.outputs))

    async def write(self) -> None:
        """Some times on, with changes of both tables."""
        dice, lower = self.dice, self.upper
        self.upper += dice.randrange(1, 4)
        updates: dict[str, list[Any]] = {}
        for time in range(lower, self.upper):
            self.known = {table: len(rows) for table, rows in self.rows.items()}
            for table in TABLES:
                for _ in range(dice.randrange(3)):
                    row, diff = self.change(table)
                    self.oracle.add(time, table, row, diff)
                    updates.setdefault(table, []).append((row, time, diff))
        await self.stage.write(updates, self.upper)

    def change(self, table: str) -> tuple[tuple[Any, ...], int]:
        dice, rows = self.dice, self.rows[table]
        # Rows of earlier times only: equal rows of one time are not summed up before a step.
        gone: int | None = None
        failing = [place for place in range(self.known[table]) if rows[place][-1] == 0]
        if failing and dice.random() < self.mended:
            gone = failing[0]
        elif self.known[table] and dice.random() < 0.4:
            gone = dice.randrange(self.known[table])
        if gone is not None:
            self.known[table] -= 1
            return rows.pop(gone), -1
        k, v = dice.randrange(3), 0 if dice.random() < self.zeros else dice.randrange(1, 5)
        row = (k, dice.choice("xy"), v) if table == "a" else (k, v)
        rows.append(row)
        return row, 1

    async def check(self) -> None:
        """Every view at every time, and at the last one nothing but the truth."""
        times = list(range(self.upper))
        for name, output in self.outputs.items():
            found = await self.stage.contents(name, times)
            failed = False
            for time in times:
                wanted = self.wanted(name, output, time)
                held = found[time]
                failed = failed or wanted is None
                if wanted is None:
                    assert held is None, (name, time, held)
                elif held is None:
                    # A view in error is computed at the last time of a step only.
                    assert failed, (name, time, wanted)
                else:
                    assert differences(wanted, held) == [], (name, time, wanted, held)
            assert (held is None) == (wanted is None), (name, "ends in error")

    def wanted(self, name: str, output: TableSchema, time: int) -> Counter[Any] | None:
        if name.endswith("fails"):
            read = "select a.k, a.g, a.v from a"
            if name == "joined_fails":
                read += " join b on a.k = b.k"
            rows = self.oracle.contents(read, TABLES["a"], time)
            if any(row[2] == 0 for row in rows):
                return None
        return self.oracle.contents(VIEWS[name], output, time)


@asynccontextmanager
async def raced_views(scratch: Path, seed: int, names: Sequence[str]) -> AsyncIterator[RacedViews]:
    """These views on stores in memory, checked and stopped in the end; no replica has joined.

    Executors write none, half or all of the answers into the store."""
    with anyio.fail_after(200):
        async with ActorSystem(seed=seed) as system:
            clock = SystemClock()
            blob, share = (
                WritableBlob(clock),
                random.Random(f"share {seed}").choice((0.0, 0.5, 1.0)),
            )
            persist = PersistClient(blob, MemoryConsensus(), SETTINGS, clock)
            engine = WritingExecutor(blob, seed, share)
            executor: Any = system.spawn(lambda: engine, "engine")
            analyze = EngineCaller(executor, "t").analyze()
            plans = {name: await compile_view(VIEWS[name], TABLES, analyze) for name in names}
            stage = ScriptStage(system, executor, persist, scratch, SETTINGS, "race")
            await stage.open(TABLES, plans)
            outputs = {name: plan.output for name, plan in plans.items()}
            views = RacedViews(stage, outputs, random.Random(seed))
            yield views
            await views.check()
            assert bool(engine.written) == bool(share)
            await stage.stop()
        await persist.close()
