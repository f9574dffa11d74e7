"""When idle tables are sealed although nobody writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from actors.control.controller.catalog.catalog import (
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.messages import TablesAdvanced, TickTables
from actors.control.controller.tables.table_ticks import ClockDue, TablesTicked, TableTicks
from actors.model.plan.delta import DeltaPlan, HiddenState
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.settings import Settings

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
        self.settings = Settings(
            clock_tick_ms=250, retain_history_ms=400_000, reclaim_ms=10_000, index_history_ms=1_000
        )
        self.writer = SimpleNamespace(ask=self.asked.append)
        self.frontiers = SimpleNamespace(tables_upper=5_000, sealed_below=lambda _: 6_000)
        self.now_ms = NOW
        self.ctx = SimpleNamespace(
            now_ms=lambda: self.now_ms, after=self._after, effect=self._effect
        )
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
def test_where_none_does_an_idle_table_costs_nothing_at_first(plan: DeltaPlan | None) -> None:
    state, made = ticks(plan)
    made.clock_due()
    assert state.asked == []
    assert len(state.timers) == 2
    state.catalog = FakeState(CLOCKED).catalog
    made.clock_due()
    assert state.asked == [TickTables], "a view was made meanwhile"


def test_idle_tables_are_sealed_until_their_last_write_is_no_longer_history() -> None:
    state, made = ticks(None)
    sealed: list[int] = []

    def pass_seconds(count: int) -> None:
        for _ in range(count):
            state.now_ms += 1_000
            made.clock_due()
            while state.done:
                state.frontiers.tables_upper = state.now_ms
                made.tables_advanced(TablesAdvanced(state.now_ms, wrote=False))
                made.tick_ended(state.done.pop())
                sealed.append(state.now_ms)

    pass_seconds(600)
    assert len(sealed) == 21, "a twentieth of the history at a time, and once more"
    assert sealed[-1] - 400_000 > 5_000
    sealed.clear()
    pass_seconds(600)
    assert sealed == []
    state.frontiers.tables_upper = written = state.now_ms
    made.tables_advanced(TablesAdvanced(written))
    pass_seconds(300)
    made.tables_advanced(TablesAdvanced(written))  # an older news
    pass_seconds(300)
    assert len(sealed) == 21
    # Of objects with other histories the longest counts.
    longer = msgspec.structs.replace(state.catalog.by_id("u1"), retain_history_ms=800_000)
    state.catalog = state.catalog.put(longer)
    pass_seconds(600)
    assert sealed[-1] - 800_000 > written


def test_where_there_are_no_tables_nothing_is_sealed() -> None:
    state, made = ticks(None)
    state.catalog = CatalogSnapshot((), 3)
    state.now_ms += 10_000_000
    made.clock_due()
    assert state.asked == []
