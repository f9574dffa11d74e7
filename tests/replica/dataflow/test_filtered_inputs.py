"""Views whose inputs leave out parts that hold no row for them: right at every time; proved."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.durable.persist import BatchPart, PersistClient
from actors.durable.persist.part_filter import PartPruner
from actors.engine.views.compile import compile_view
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.engine import EngineControls, InMemoryExecutor
from actors.testing.maintain import EngineCaller
from actors.testing.oracle import QueryOracle, differences
from actors.testing.stage import ScriptStage

TABLES = {
    "a": TableSchema(
        (TableColumn("k", "int"), TableColumn("g", "string"), TableColumn("v", "int"))
    ),
    "b": TableSchema((TableColumn("k", "int"), TableColumn("w", "bigint"))),
}
FILTERED = {
    "linear": "select k, v + 1 as v1 from a where v > 6",
    "ranged": "select k, g from a where v between 2 and 3 and g = 'x'",
    "chosen": "select k, v from a where k in (1, 9) and v is not null",
    "unknown": "select k from a where v is null",
    "grouped": "select g, count(*) as n, sum(v) as s from a where k < 2 group by g",
    "united": "select k from a where v > 8 union all select k from a where v < 1",
    "inner": "select k from (select k, v as z from a where v > 3) t where z < 5",
    "guarded": "select k, 12 div v as x from a where v > 4",
}
WHOLE = {
    "joined": "select a.g, b.w from a join b on a.k = b.k where a.v > 8",
    "either": "select k, v from a where v > 8 or k = 1",
}
VIEWS = FILTERED | WHOLE
SETTINGS = Settings(
    inline_part_bytes_max=1,
    batches_per_shard_max=6,
    filter_audit_one_in=1,
    hold_downgrade_ms=1,
    retry_delay_ms_min=1,
    retry_delay_ms_max=50,
)
"""Every part is a blob, and every one that is left out is audited."""


async def test_views_stay_right_while_parts_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[str] = []
    discards = PartPruner.discards

    def noted(self: PartPruner, part: BatchPart) -> bool:
        found = discards(self, part)
        left_out.extend([str(self)] if found else [])
        return found

    monkeypatch.setattr(PartPruner, "discards", noted)
    dice = random.Random(7)
    oracle = QueryOracle(TABLES)
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}

    def change(table: str) -> tuple[tuple[Any, ...], int]:
        held = rows[table]
        if held and dice.random() < 0.4:
            return held.pop(dice.randrange(len(held))), -1
        k, v = dice.randrange(4), dice.choice((None, *range(10)))
        row = (k, dice.choice("xy"), v) if table == "a" else (k, v)
        held.append(row)
        return row, 1

    with anyio.fail_after(100):
        async with ActorSystem(seed=7) as system:
            persist = await PersistClient.in_memory(SETTINGS, SystemClock())
            executor: Any = system.spawn(lambda: InMemoryExecutor(EngineControls()), "engine")
            analyze = EngineCaller(executor, "t").analyze()
            plans = {name: await compile_view(sql, TABLES, analyze) for name, sql in VIEWS.items()}
            stage = ScriptStage(system, executor, persist, tmp_path, SETTINGS, "filtered")
            await stage.open(TABLES, plans)
            await stage.write({}, 1)
            await stage.start(0)
            for time in range(1, 25):
                made: dict[str, list[Any]] = {}
                for table in dice.sample(sorted(TABLES), dice.randrange(1, 3)):
                    row, diff = change(table)
                    oracle.add(time, table, row, diff)
                    made.setdefault(table, []).append((row, time, diff))
                await stage.write(made, time + 1)
                if dice.random() < 0.5:
                    await stage.wait_each(time + 1)
            await stage.wait_each(25)
            times = list(range(25))
            for name, plan in plans.items():
                found = await stage.contents(name, times)
                for time in times:
                    wanted: Counter[Any] = oracle.contents(VIEWS[name], plan.output, time)
                    held = found[time]
                    assert held is not None, (name, time)
                    assert differences(wanted, held) == [], (name, time, wanted, held)
            await stage.stop()
        await persist.close()
    assert len(set(left_out)) == len(FILTERED), sorted(set(left_out))
