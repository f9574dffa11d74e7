"""The age of what a reader of an object sees, and the rule for faults."""

from __future__ import annotations

import itertools
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from actors.control.controller.catalog.catalog import CatalogObject, CatalogSnapshot
from actors.control.controller.frontiers import ObjectFrontiers
from actors.control.controller.object_conditions import condition_of, lag_ms, note_report, settle
from actors.control.controller.object_faults import ObjectFaults
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import ERROR_STATES, Frontiers
from actors.runtime.progress import EMPTY

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
UPPERS = {
    "table": 100,
    "source": 250,
    "early": 200,
    "late": 250,
    "done": EMPTY,
    "unfilled": 0,
    "over_table": 90,
    "over_source": 220,
    "over_both": 80,
    "over_view": 70,
    "over_done": 40,
    "new": 0,
    "empty": EMPTY,
    "sink": 65,
}


def entry(id_: str, kind: str, *depends: str, as_of: int = 0) -> CatalogObject:
    return CatalogObject(id=id_, name=id_, kind=kind, schema=SCHEMA, depends=depends, as_of=as_of)


CATALOG = CatalogSnapshot(
    (
        entry("table", "table"),
        entry("source", "source"),
        entry("early", "source table", "source"),
        entry("late", "source table", "source"),
        entry("done", "source table", "source"),
        entry("unfilled", "source table", "source"),
        entry("over_table", "view", "table"),
        entry("over_source", "view", "late"),
        entry("over_both", "view", "table", "early"),
        entry("over_view", "index", "over_both"),
        entry("over_done", "view", "done"),
        entry("new", "view", "table", as_of=95),
        entry("empty", "view", "table"),
        entry("sink", "sink", "over_view"),
        entry("plain", "plain view", "over_both", "late"),
    )
)


def state_of(now: int, frontiers: ObjectFrontiers) -> Any:
    return SimpleNamespace(
        catalog=CATALOG,
        frontiers=frontiers,
        faults=ObjectFaults(),
        oracle_now=lambda: now,
        ctx=SimpleNamespace(now_ms=lambda: now),
    )


@pytest.fixture
def state() -> Any:
    frontiers = ObjectFrontiers(UPPERS["table"])
    for each in CATALOG.objects:
        frontiers.track(each, UPPERS.get(each.id, 0), now_ms=45)
    return state_of(300, frontiers)


@pytest.mark.parametrize(
    ("id_", "behind"),
    [
        ("table", 0),
        ("source", 50),
        ("early", 100),
        ("late", 50),
        ("done", 0),
        ("unfilled", 255),
        ("over_table", 210),
        ("over_source", 80),
        ("over_both", 220),
        ("over_view", 230),
        ("over_done", 0),
        ("new", 255),
        ("empty", 0),
        ("sink", 235),
        ("plain", 220),
    ],
)
def test_the_age_is_that_of_what_a_reader_sees(state: Any, id_: str, behind: int) -> None:
    assert lag_ms(state, CATALOG.by_id(id_)) == behind


def test_what_a_source_has_not_read_yet_counts(state: Any) -> None:
    state.frontiers.note_behind("source", 7)
    aged = {id_: lag_ms(state, CATALOG.by_id(id_)) for id_ in ("late", "over_source", "over_table")}
    assert aged == {"late": 57, "over_source": 87, "over_table": 210}
    state.frontiers.note_behind("source", None)
    assert lag_ms(state, CATALOG.by_id("late")) == 50


def test_a_view_in_error_is_as_old_as_its_error(state: Any) -> None:
    view = CATALOG.by_id("empty")
    state.ctx.now_ms = lambda: 280
    note_report(state, view, "errored", "1/0")
    assert lag_ms(state, view) == 20


def test_a_write_after_a_long_rest_is_missing_since_it_came() -> None:
    frontiers = ObjectFrontiers(50)
    view, table, source = (CATALOG.by_id(id_) for id_ in ("over_table", "table", "late"))
    frontiers.track(view, 1, now_ms=0)
    state = state_of(1_000_020, frontiers)
    for upper in (101, 1_000_001, 1_000_011):
        assert frontiers.advance_tables(upper)
        assert not frontiers.advance_tables(upper)
    # Nothing is known of times before the first move.
    assert [frontiers.missing_since(table, upper) for upper in (50, 60)] == [50, 60]
    assert [frontiers.missing_since(table, upper) for upper in (101, 500)] == [1_000_000] * 2
    assert frontiers.missing_since(source, 101) == 101
    for upper, lag in ((101, 20), (1_000_001, 10), (1_000_011, 0)):
        frontiers.report(Frontiers(view.id, write=upper))
        assert lag_ms(state, view) == lag
    for upper in range(2_000_000, 2_030_000):
        frontiers.advance_tables(upper)
    assert frontiers.missing_since(table, 101) == 101
    assert frontiers.missing_since(table, 2_029_000) == 2_029_000


# -- faults ----------------------------------------------------------------------------------------


def test_a_fault_lasts_over_restarts_until_there_is_progress(
    state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.controller")
    table = CATALOG.by_id("late")
    for _ in range(3):  # the first and two retries
        note_report(state, table, "stalled", "no server", "start it")
        note_report(state, table, "starting", "")
    shown = condition_of(state, table, "starting")
    assert (shown.state, shown.text, shown.hint) == ("stalled", "no server", "start it")
    assert (shown.since_ms, shown.retries) == (300, 2)
    over = condition_of(state, CATALOG.by_id("plain"), "gathering", "slow")
    assert over.state == "gathering"
    assert over.text == "slow; waits for source table late, which is stalled"
    # It connects and fails at once: that is no progress.
    note_report(state, table, "running", "")
    assert state.faults.get("late").runs
    note_report(state, table, "stalled", "another")
    assert (state.faults.get("late").retries, state.faults.get("late").runs) == (3, False)
    note_report(state, table, "running", "")
    assert state.frontiers.sealed("late", 260)
    settle(state, table)
    assert state.faults.get("late") is None
    assert [record.getMessage() for record in caplog.records] == [
        "source table late is stalled: no server (start it)",
        "source table late runs again: it was stalled for 0.0 s",
    ]


def test_a_view_without_anything_to_do_runs_again(state: Any) -> None:
    view, behind = CATALOG.by_id("over_done"), CATALOG.by_id("over_table")
    for each in (view, behind):
        note_report(state, each, "frozen", "a lost part")
        note_report(state, each, "hydrating", "")
        assert state.faults.get(each.id) is not None
        note_report(state, each, "gathering", "")
    assert state.faults.get(view.id) is None
    # Its table has a change that it lacks.
    assert state.faults.get(behind.id) is not None


def test_each_fault_begins_once_and_is_over_once() -> None:
    """Drawn reports: changes alternate, and a fault is there exactly between them."""
    dice = random.Random(5)
    words = [*ERROR_STATES[:-1], "starting", "hydrating", "gathering", "running", "paused"]
    faults, upper, changes = ObjectFaults(), 0, []
    for now in range(4_000):
        upper += dice.random() < 0.3
        word = dice.choice(words)
        changes.append(faults.report("v", word, word, upper, now))
        known = faults.get("v")
        assert word not in ERROR_STATES or (known is not None and known.reason == word)
        changes.append(faults.settle("v", upper, idle=dice.random() < 0.1))
        told = [change for change in changes if change is not None]
        assert (faults.get("v") is not None) == bool(told and told[-1].kind == "began")
    for before, after in itertools.pairwise(told):
        if before.kind == after.kind:
            assert (before.kind, before.fault.state == after.fault.state) == ("began", False)
    assert sum(change.kind == "over" for change in told) > 50


def test_a_quarantined_object_stays_so_until_it_is_forgotten() -> None:
    faults = ObjectFaults()
    assert faults.report("v", "quarantined", "unknown", 0, 1) is not None
    for word in ("running", "stalled", "errored"):
        assert faults.report("v", word, "", 9, 2) is None
        assert faults.settle("v", 9, idle=True) is None
    fault = faults.get("v")
    assert fault is not None
    assert (fault.state, fault.since_ms) == ("quarantined", 1)
    faults.forget("v")
    assert faults.all() == ()
