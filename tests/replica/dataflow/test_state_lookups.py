"""What a step looks up: which keys, how often, and what of it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
from dataflow_house import PAIRS, listed, table  # type: ignore[import-not-found]

from actors.durable.arrangement import SharedArrangements
from actors.model.plan.delta import (
    DeltaPlan,
    HiddenState,
    NamedInput,
    PlanStratum,
    StateLookup,
    UnionRows,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.replica.dataflow.state_lookups import StateLookups, StepLookups

Make: TypeAlias = Callable[..., StateLookups]


def plan_of(*lookups: StateLookup, hidden: tuple[HiddenState, ...] = ()) -> DeltaPlan:
    names = ("d0", "s0", "s1")
    stratum = PlanStratum(
        lookups, UnionRows(tuple(NamedInput(name, ("k", "v")) for name in names)), names
    )
    return DeltaPlan(
        ("l", "r"), (PAIRS, PAIRS), PAIRS, "", "incremental", "", (stratum,), hidden=hidden
    )


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Touched state at 5, the second import filled with some rows."""
    shared, made = SharedArrangements(tmp_path / "shared"), []

    def touched(plan: DeltaPlan, *rows: Any) -> StateLookups:
        found = StateLookups(plan, ["l", "r"], shared, 5, tmp_path / "own")
        made.append(found)
        for handle in found.imports.handles.values():
            filling = handle.claim()
            if filling is not None:
                filling.start(0)
                filling.insert(table(PAIRS, *(rows if handle.shard == "r" else ())))
                filling.publish(5)
        return found

    yield touched
    for found in made:
        found.close()
    assert shared.statistics() == []


def looked_up(touched: StateLookups, plan: DeltaPlan, *deltas: Any) -> StepLookups:
    tables = [table(PAIRS, *rows) for rows in deltas]
    lookups = StepLookups(touched, tables, 5, {})
    lookups.follow(plan.strata, whole_hidden=False)
    return lookups


def rows_of(lookups: StepLookups, name: str) -> list[Any]:
    found = lookups.rows(name)
    assert found is not None
    rows: list[Any] = listed(found)
    return rows


def test_rows_come_back_at_one_below_lo_consolidated(make: Make) -> None:
    plan = plan_of(StateLookup("s1", ("k",), (("d0", ("k",)),)))
    touched = make(plan, (1, 10, 2, 1), (1, 10, 3, 1), (1, 11, 2, 1), (1, 11, 4, -1), (2, 20, 1, 1))
    found = looked_up(touched, plan, [(1, 0, 5, 1)])
    assert rows_of(found, "s1") == [(1, 10, 4, 2)]
    assert touched.rows_read == 4, "what was copied, before it was consolidated"


def test_pairs_are_counted_by_key(make: Make) -> None:
    """Of three rows there, those with the keys of changes, as often as these come."""
    plan = plan_of(StateLookup("s1", ("k",), (("d0", ("k",)),)))
    touched = make(plan, (1, 10, 2, 1), (1, 11, 3, 1), (2, 12, 3, 1))
    few = looked_up(touched, plan, [(1, 0, 5, 1), (1, 1, 6, 1), (1, 2, 7, 1)])
    assert few.pairs == 3 * 2
    many = looked_up(touched, plan, [(1, 0, 5, 1), (1, 1, 6, 1), (2, 2, 7, 1), (3, 0, 8, 1)])
    assert many.pairs == 2 * 2 + 1


def test_a_key_that_comes_often_is_looked_up_once(make: Make) -> None:
    plan = plan_of(StateLookup("s1", ("k",), (("d0", ("k",)), ("d0", ("v",)))))
    touched = make(plan, *((k, v, 1, 1) for k in range(4) for v in range(5)))
    found = looked_up(touched, plan, [(1, 1, 5, 1)] * 50 + [(1, 2, 6, 1)] * 50)
    assert touched.rows_read == 10
    assert rows_of(found, "s1") == [(k, v, 4, 1) for k in (1, 2) for v in range(5)]


@pytest.mark.parametrize("nulls", [False, True])
def test_a_null_key_is_passed_over_where_it_cannot_match(make: Make, nulls: bool) -> None:
    """A skewed foreign key: the rows without one would all be fetched, for nothing."""
    plan = plan_of(StateLookup("s1", ("k",), (("d0", ("k",)),), nulls=nulls))
    touched = make(plan, *((None, v, 1, 1) for v in range(100)), (1, 7, 1, 1))
    found = looked_up(touched, plan, [(None, 0, 5, 1), (1, 0, 5, 1)])
    assert touched.rows_read == (101 if nulls else 1)
    assert (1, 7, 4, 1) in rows_of(found, "s1")


def test_of_several_key_columns_one_null_is_enough(make: Make) -> None:
    plan = plan_of(
        StateLookup("s1", ("k", "v"), (("d0", ("k", "v")), ("d0", ("k", ""))), nulls=False)
    )
    touched = make(plan, (1, None, 1, 1), (None, 1, 1, 1), (1, 1, 1, 1))
    found = looked_up(touched, plan, [(1, None, 5, 1), (None, 1, 5, 1), (1, 1, 5, 1)])
    assert rows_of(found, "s1") == [(1, 1, 4, 1)]
    assert touched.rows_read == 1


def test_an_origin_may_stand_for_null(make: Make) -> None:
    plan = plan_of(StateLookup("s1", ("k", "v"), (("d0", ("k", "")),)))
    touched = make(plan, (1, None, 1, 1), (1, 1, 1, 1), (2, None, 1, 1))
    assert rows_of(looked_up(touched, plan, [(1, 1, 5, 1)]), "s1") == [(1, None, 4, 1)]


def test_lookups_of_one_import_by_different_keys_give_a_row_once(make: Make) -> None:
    plan = plan_of(
        StateLookup("s1", ("k",), (("d0", ("k",)),)), StateLookup("s1", ("v",), (("d0", ("v",)),))
    )
    touched = make(plan, (1, 2, 1, 3), (1, 9, 1, 1), (9, 2, 1, 1), (9, 9, 1, 1))
    found = looked_up(touched, plan, [(1, 2, 5, 1)])
    assert rows_of(found, "s1") == [(1, 2, 4, 3), (1, 9, 4, 1), (9, 2, 4, 1)]


def test_a_lookup_without_a_key_takes_any_arrangement(make: Make) -> None:
    plan = plan_of(
        StateLookup("s1", (), (("d0", ()),)), StateLookup("s1", ("v",), (("d0", ("v",)),))
    )
    touched = make(plan, (1, 2, 1, 1), (3, 4, 1, 1))
    assert list(touched.imports.handles) == [("s1", ("v",))]
    found = looked_up(touched, plan, [(9, 9, 5, 1)])
    assert rows_of(found, "s1") == [(1, 2, 4, 1), (3, 4, 4, 1)]


def test_steps_move_imports_and_hidden_states(make: Make) -> None:
    groups = TableSchema((TableColumn("g", "bigint"), TableColumn("n", "bigint")))
    plan = plan_of(
        StateLookup("s1", ("k",), (("d0", ("k",)),)),
        StateLookup("h0", ("g",), (("d0", ("k",)),)),
        hidden=(HiddenState(groups, ("g",)),),
    )
    touched = make(plan, (1, 10, 1, 1))
    touched.hidden.insert("h0", table(groups, (1, 1, 3, 1)))
    assert touched.hidden.rows == 1
    new = [table(PAIRS), table(PAIRS, (1, 11, 6, 1))]
    touched.step(new, (table(groups, (1, 1, 6, -1), (1, 2, 6, 1), (5, 1, 6, 1)),), 8)
    assert touched.hidden.rows == 2
    assert touched.imports.ready
    touched.step((), (), 9)
    assert touched.imports.lo == 9
    tables = [table(PAIRS, (1, 0, 9, 1)), table(PAIRS)]
    lookups = StepLookups(touched, tables, 9, {})
    lookups.follow(plan.strata, whole_hidden=False)
    assert rows_of(lookups, "s1") == [(1, 10, 8, 1), (1, 11, 8, 1)]
    assert rows_of(lookups, "h0") == [(1, 2, 8, 1)]
    assert not touched.empty


def test_a_hidden_state_given_in_part_is_given_whole_to_a_later_run(make: Make) -> None:
    """The first run needs the groups of d0, a later one all of them: it must not be content."""
    groups = TableSchema((TableColumn("g", "bigint"), TableColumn("n", "bigint")))
    plan = plan_of(
        StateLookup("h0", ("g",), (("d0", ("k",)),)), hidden=(HiddenState(groups, ("g",)),)
    )
    touched = make(plan)
    touched.hidden.insert("h0", table(groups, (1, 1, 3, 1), (2, 7, 3, 1)))
    lookups = looked_up(touched, plan, [(1, 0, 5, 1)], [])
    assert rows_of(lookups, "h0") == [(1, 1, 4, 1)]
    for _ in range(2):
        lookups.follow(plan.strata, whole_hidden=True)
        assert rows_of(lookups, "h0") == [(1, 1, 4, 1), (2, 7, 4, 1)]


PLANNED = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("due", "bigint"), TableColumn("bucket", "bigint"))
)


@pytest.mark.parametrize("buckets_max", [1, 10_000])
def test_what_comes_due_is_found_at_its_time(
    make: Make, buckets_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.replica.dataflow.state_lookups.DUE_BUCKETS_MAX", buckets_max)
    plan = plan_of(hidden=(HiddenState(PLANNED, ("bucket",), "due", "bucket"),))
    touched = make(plan)
    planned = [(1, 900), (2, 1000), (2, 1000), (3, 2500), (4, 2999), (5, 3000), (6, 9000)]
    touched.hidden.insert(
        "h0", table(PLANNED, *((k, due, due // 1000, 3, 1) for k, due in planned))
    )
    touched.hidden.insert("h0", table(PLANNED, (4, 2999, 2, 4, -1)))
    found = touched.due(500, 3000)["c0"]
    assert [(k, at, n) for k, _, _, at, n in listed(found)] == [
        (1, 900, 1),
        (2, 1000, 2),
        (3, 2500, 1),
    ]
    assert not touched.due(500, 900)["c0"].num_rows
    lookups = StepLookups(touched, [table(PAIRS), table(PAIRS)], 500, touched.due(500, 901))
    assert rows_of(lookups, "c0") == [(1, 900, 0, 900, 1)]


def test_a_view_without_lookups_takes_no_place(make: Make) -> None:
    assert make(plan_of()).empty


def test_a_key_without_equality_is_scanned(tmp_path: Path) -> None:
    maps = TableSchema((TableColumn("m", "map<string,int>"),))
    stratum = PlanStratum(
        (StateLookup("s0", ("m",), (("d0", ("m",)),)),), NamedInput("d0", ("m",)), ("d0",)
    )
    plan = DeltaPlan(("l",), (maps,), maps, "", "incremental", "", (stratum,))
    touched = StateLookups(
        plan, ["l"], SharedArrangements(tmp_path / "shared"), 2, tmp_path / "own"
    )
    (handle,) = touched.imports.handles.values()
    assert handle.key == ()
    filling = handle.claim()
    assert filling is not None
    filling.start(0)
    row = {"m": [("a", 1)], "__time": 1, "__diff": 1}
    filling.insert(pa.Table.from_pylist([row], schema=maps.arrow_updates()))
    filling.publish(2)
    assert touched.find("s0", ("m",), []).num_rows == 1
    touched.close()
