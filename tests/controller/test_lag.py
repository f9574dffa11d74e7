"""How old an object is said to be: while what it is made of is further, and else not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.controller.catalog.catalog import CatalogObject, CatalogSnapshot
from actors.controller.frontiers import ObjectFrontiers
from actors.controller.reads.status import lag_ms
from actors.plan.schema import TableColumn, TableSchema
from actors.progress import EMPTY
from actors.protocol.compute import Frontiers

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
UPPERS = {
    "table": 100,
    "source": 250,
    "early": 200,
    "late": 250,
    "done": EMPTY,
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
        entry("over_table", "view", "table"),
        entry("over_source", "view", "late"),
        entry("over_both", "view", "table", "early"),
        entry("over_view", "index", "over_both"),
        entry("over_done", "view", "done"),
        entry("new", "view", "table", as_of=95),
        entry("empty", "view", "table"),
        entry("sink", "sink", "over_view"),
    )
)


@pytest.mark.parametrize(
    ("id_", "behind"),
    [
        ("table", 0),
        ("source", 0),
        ("early", 0),
        ("over_table", 210),
        ("over_source", 80),
        ("over_both", 220),
        ("over_view", 230),
        ("over_done", 0),
        ("new", 205),
        ("empty", 0),
        ("sink", 235),
    ],
)
def test_it_ages_while_a_table_that_it_is_made_of_is_further(id_: str, behind: int) -> None:
    frontiers = SimpleNamespace(
        upper=lambda each: UPPERS[each.id], missing_since=lambda table, upper: upper
    )
    state: Any = SimpleNamespace(catalog=CATALOG, frontiers=frontiers, oracle_now=lambda: 300)
    assert lag_ms(state, CATALOG.by_id(id_)) == behind


def test_a_write_after_a_long_rest_is_missing_since_it_came() -> None:
    frontiers = ObjectFrontiers(50)
    view, table, source = (CATALOG.by_id(id_) for id_ in ("over_table", "table", "late"))
    frontiers.track(view, 0)
    state: Any = SimpleNamespace(
        catalog=CATALOG, frontiers=frontiers, oracle_now=lambda: 1_000_020
    )  # fmt: skip
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
