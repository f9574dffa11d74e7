"""When idle tables are sealed although nobody writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.controller.catalog.catalog import (
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.controller.messages import TickTables
from actors.controller.tables.table_writer import ClockDue, TablesTicked, TableTicks
from actors.plan.delta import DeltaPlan, HiddenState
from actors.plan.schema import TableColumn, TableSchema

PAIRS = TableSchema((TableColumn("k", "bigint"),))
PLAN = DeltaPlan(("t",), (PAIRS,), PAIRS, "", "incremental", "")
CLOCKED = msgspec.structs.replace(PLAN, hidden=(HiddenState(PAIRS, ("k",), "k", "k"),))
NOW = 7_000


class FakeState:
    """What a part of the controller sees of it, noted down."""

    def __init__(self, plan: DeltaPlan | None) -> None:
        self.asked: list[type[Any]] = []
        self.timers: list[tuple[int, Any]] = []
        self.done: list[TablesTicked] = []
        self.settings = SimpleNamespace(clock_tick_ms=250)
        self.writer = SimpleNamespace(ask=self.asked.append)
        self.frontiers = SimpleNamespace(tables_upper=5_000, sealed_below=lambda _: 6_000)
        self.ctx = SimpleNamespace(now_ms=lambda: NOW, after=self._after, effect=self._effect)
        objects = [CatalogObject(id="u1", name="t", kind=TABLE, schema=PAIRS, shard="t")]
        if plan is not None:
            view = CatalogObject(
                id="u2", name="v", kind=VIEW, schema=PAIRS, shard="v", depends=("u1",), plan=plan
            )
            objects.append(view)
        self.catalog = CatalogSnapshot(tuple(objects), 3)

    def _after(self, delay_ms: int, message: Any) -> None:
        self.timers.append((delay_ms, message))

    def _effect(self, run: Any, done: Any, failed: Any) -> None:
        run()
        self.done.append(done(None))


def ticks(plan: DeltaPlan | None) -> tuple[FakeState, TableTicks]:
    state = FakeState(plan)
    made = TableTicks(state)  # type: ignore[arg-type]
    made.begin()
    return state, made


def test_a_view_that_follows_the_clock_has_the_tables_sealed() -> None:
    state, made = ticks(CLOCKED)
    assert state.timers == [(250, ClockDue())]
    made.clock_due()
    assert state.asked == [TickTables]
    made.clock_due()
    assert state.asked == [TickTables], "one is under way"
    state.frontiers.tables_upper = NOW + 1
    made.tick_ended(state.done.pop())
    made.clock_due()
    assert state.asked == [TickTables], "a write was there before"
    assert len(state.timers) == 4


@pytest.mark.parametrize("plan", [None, PLAN])
def test_where_none_does_an_idle_table_costs_nothing(plan: DeltaPlan | None) -> None:
    state, made = ticks(plan)
    made.clock_due()
    assert state.asked == []
    assert len(state.timers) == 2
    state.catalog = FakeState(CLOCKED).catalog
    made.clock_due()
    assert state.asked == [TickTables], "a view was made meanwhile"
