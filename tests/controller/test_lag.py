"""How far an object is said to be behind: behind what it is made of, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.controller.catalog import Catalog, CatalogObject
from actors.controller.status import lag_ms
from actors.plan.schema import Column, Schema
from actors.progress import EMPTY

SCHEMA = Schema((Column("k", "bigint"),))
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


CATALOG = Catalog(
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
        ("over_table", 10),
        ("over_source", 30),
        ("over_both", 120),
        ("over_view", 130),
        ("over_done", 0),
        ("new", 5),
        ("empty", 0),
        ("sink", 135),
    ],
)
def test_it_is_behind_the_furthest_table_that_it_is_made_of(id_: str, behind: int) -> None:
    frontiers = SimpleNamespace(upper=lambda each: UPPERS[each.id])
    desk: Any = SimpleNamespace(catalog=CATALOG, frontiers=frontiers)
    assert lag_ms(desk, CATALOG.by_id(id_)) == behind
