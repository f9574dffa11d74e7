"""Several replicas maintain the same views over the same shards, and race for every step."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.dataflow.machine import DataflowMachine, check_machine
from actors.kernel import ActorSystem, SystemClock
from actors.persist import PersistClient
from actors.plan.schema import TableColumn, TableSchema
from actors.settings import Settings
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.maintain import EngineCaller
from actors.testing.oracle import QueryOracle, differences
from actors.testing.stage import ScriptStage
from actors.views.compile import compile_view

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
    "ranked": "select k, g, rank() over (order by v, k, g) as r from a",
}
SETTINGS = Settings(standby_ms=20, hold_downgrade_ms=1, retry_delay_ms_min=1, retry_delay_ms_max=50)
STEPS = 14


class Place:
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
            for table in TABLES:
                for _ in range(dice.randrange(3)):
                    row, diff = self.change(table)
                    self.oracle.add(time, table, row, diff)
                    updates.setdefault(table, []).append((row, time, diff))
        await self.stage.write(updates, self.upper)

    def change(self, table: str) -> tuple[tuple[Any, ...], int]:
        dice, rows = self.dice, self.rows[table]
        if rows and dice.random() < 0.4:
            return rows.pop(dice.randrange(len(rows))), -1
        k, v = dice.randrange(3), dice.choice((1, 2, 3, 4, 0))
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
            rows = self.oracle.contents("select k, g, v from a", TABLES["a"], time)
            if any(row[2] == 0 for row in rows):
                return None
        return self.oracle.contents(VIEWS[name], output, time)


async def raced(scratch: Path, seed: int, names: list[str]) -> None:
    """One run."""
    dice = random.Random(seed)
    with anyio.fail_after(200):
        async with ActorSystem(seed=seed) as system:
            persist = await PersistClient.in_memory(SETTINGS, SystemClock())
            executor: Any = system.spawn(lambda: InMemoryExecutor(EngineControls()), "engine")
            analyze = EngineCaller(executor, "t").analyze()
            plans = {name: await compile_view(VIEWS[name], TABLES, analyze) for name in names}
            stage = ScriptStage(system, executor, persist, scratch, SETTINGS, "race")
            await stage.open(TABLES, plans)
            place = Place(stage, {name: plan.output for name, plan in plans.items()}, dice)
            await place.write()
            for _ in range(dice.choice((2, 2, 3))):
                await place.join()
            for _ in range(STEPS):
                await place.write()
                chance = dice.random()
                if chance < 0.2 and len(place.names) > 1:
                    await place.leave()
                elif chance < 0.4 and len(place.names) < 3:
                    await place.join()
                elif chance < 0.7:
                    await stage.wait_each(place.upper)
            await stage.wait_each(place.upper)
            # Whoever is left has to go on from what it read of the others.
            while len(place.names) > 1:
                await place.leave()
                await place.write()
                await stage.wait_each(place.upper)
            await place.check()
            await stage.stop()
        await persist.close()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(6))
async def test_racing_replicas_keep_every_view_right(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: Counter[str] = Counter()
    handle = DataflowMachine.handle

    def counted(self: DataflowMachine, event: Any) -> Any:
        handled[type(event).__name__] += 1
        effects = handle(self, event)
        check_machine(self)
        return effects

    monkeypatch.setattr(DataflowMachine, "handle", counted)
    names = random.Random(f"views {seed}").sample(sorted(VIEWS), 5)
    await raced(tmp_path, seed, names)
    assert handled["UpperMismatched"] > 0
    assert handled["ReplicaFollowed"] > 0
