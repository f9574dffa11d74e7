"""What a view's WHERE lets an input leave out: only what is surely the same without it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from actors.engine.views.compile import compile_view
from actors.engine.views.input_uses import InputUse, input_filter, input_uses
from actors.model.plan.delta import (
    DeltaPlan,
    FilterRows,
    NamedInput,
    Node,
    PlanStratum,
    StateLookup,
    UnionRows,
    inputs_below,
)
from actors.model.plan.nearby import CoveredChanges, NearbyRows, SortColumn
from actors.model.plan.schema import TableColumn, TableSchema
from actors.testing.analysis import analyze_in_memory

TABLES = {
    "t": TableSchema(
        (
            TableColumn("id", "bigint"),
            TableColumn("Name", "string"),
            TableColumn("n", "int"),
            TableColumn("ok", "boolean"),
            TableColumn("fare", "decimal(10,2)"),
            TableColumn("ratio", "double"),
            TableColumn("single", "float"),
            TableColumn("day", "date"),
            TableColumn("at", "timestamp"),
            TableColumn("odd `name", "int"),
        )
    ),
    "u": TableSchema((TableColumn("id", "bigint"), TableColumn("x", "int"))),
}


async def filter_of(sql: str, input_index: int = 0) -> str | None:
    found = input_filter(await compile_view(sql, TABLES, analyze_in_memory), input_index)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("select id from t where n > 5", "n > 5"),
        ("select id from t where n > 5L and cast(3 as bigint) > id", "n > 5 AND id < 3"),
        ("select id from t where day > cast('2013-01-02' as date)", "day > 2013-01-02"),
        ("select id from t where 5 > n and -3 <= id", "n < 5 AND id >= -3"),
        ("select id from t where Name = 'b' and n is not null", "Name = b AND n is not null"),
        ("select id from t where n in (1, 2) and n is null", "n in 1 2 AND n is null"),
        ("select id from t where n between 1 and 9", "n >= 1 AND n <= 9"),
        ("select id from t where fare >= 1.5 and fare < 7", "fare >= 1.50 AND fare < 7.00"),
        ("select id from t where ratio < 0.25 and ratio > 2", "ratio < 0.25 AND ratio > 2.0"),
        ("select id from t where day = date '2013-01-02'", "day = 2013-01-02"),
        ("select id from t where ok = true", "ok = True"),
        ("select id from t where `odd ``name` = 1", "odd `name = 1"),
        ("select n, count(*) as c from t where id > 1 group by n", "id > 1"),
        ("select q.k from (select 10 div n as k, id from t) q where q.id > 3", "id > 3"),
        ("select q.k from (select id as k, n as m from t where n > 1) q where q.m < 9", None),
        ("select id from t where n > 5 union all select id from t where n < 1", "n > 5 OR n < 1"),
    ],
)
async def test_conditions_that_every_use_shares(sql: str, wanted: str | None) -> None:
    found = await filter_of(sql)
    if wanted is None:  # one WHERE above the other, or both in one
        assert found in ("n > 1", "n > 1 AND n < 9")
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "sql",
    [
        "select id from t",
        "select id from t where n > 5 or id = 1",
        "select id from t where n <> 5",
        "select id from t where not n in (1, 2)",
        "select id from t where n > 5 and 10 div id > 1",
        "select id from t where n + 1 > 5",
        "select id from t where n > id",
        "select id from t where n > 5.5",
        "select id from t where n > 3000000000",
        "select id from t where n = null",
        "select id from t where n in (1, null)",
        "select id from t where fare > 1.234",
        "select id from t where single > 0.1",
        "select id from t where at > timestamp '2013-01-02 00:00:00'",
        "select id from t where Name like 'b%'",
        "select id from t where day = date '2013-02-30'",
        "select q.k from (select 10 div n as k, id from t) q where q.k > 3",
        "select id from t where n > 5 union all select id from t",
    ],
)
async def test_in_doubt_nothing_is_left_out(sql: str) -> None:
    assert await filter_of(sql) is None


async def test_a_source_whose_state_is_looked_up_is_read_whole() -> None:
    sql = "select t.id from t join u on t.id = u.id where t.n > 5 and u.x > 3"
    assert await filter_of(sql, 0) is None
    assert await filter_of(sql, 1) is None


async def uses_of(sql: str) -> tuple[InputUse, ...]:
    return input_uses(await compile_view(sql, TABLES, analyze_in_memory))


async def test_columns_are_those_that_anything_reads() -> None:
    """Of one whose PRIMARY KEY is not among them, none tells rows apart."""
    sql = "select t.n, sum(u.x) as s from t join u on t.id = u.id where t.ok group by t.n"
    t, u = await uses_of(sql)
    assert t.schema.names == ("id", "n", "ok")
    assert u.schema.names == ("id", "x")
    (counted,) = await uses_of("select count(*) as c from t")
    assert counted.schema.names == ("id",), "the first stands for the row"


async def test_state_and_changes_have_filters_of_their_own() -> None:
    sql = "select t.id, u.x from t join u on t.id = u.id where t.n > 5 and u.x is not null"
    t, u = await uses_of(sql)
    assert (str(t.changes), str(t.state)) == ("n > 5", "n > 5")
    assert (str(u.changes), str(u.state)) == ("x is not null", "x is not null")
    t, _ = await uses_of("select t.id from t join u on t.id = u.id where t.n + u.x > 5")
    assert (t.changes, t.state) == (None, None)


async def test_changes_are_filtered_narrowed_and_summed_up() -> None:
    (use,) = await uses_of("select id, n from t where n > 5")
    shape = TABLES["t"].arrow_updates()
    row = dict.fromkeys(shape.names) | {"id": 1, "n": 7, "__time": 3}
    rows = [
        row | {"Name": "a", "__diff": -1},  # an update of another column
        row | {"Name": "b", "__diff": 1},
        row | {"id": 2, "n": 5, "__diff": 1},
        row | {"id": 3, "n": 8, "__diff": 1},
        row | {"id": 3, "n": 8, "__time": 4, "__diff": -1},  # another time
    ]
    kept = use.kept(pa.Table.from_pylist(rows, shape)).to_pylist()
    assert sorted((each["id"], each["__time"], each["__diff"]) for each in kept) == [
        (3, 3, 1),
        (3, 4, -1),
    ]


# -- plans by hand --------------------------------------------------------------------------------

WIDE = TableSchema(tuple(TableColumn(name, "int", False) for name in "abcdefgh"), ("a",))
LARGE, SMALL = (FilterRows(NamedInput("d0", ("b",)), f"b {sign} 5") for sign in "><")


def plan_by_hand(node: Node, *lookups: StateLookup, **more: Any) -> DeltaPlan:
    stratum = PlanStratum(lookups, node, tuple({each.name for each in inputs_below(node)}))
    return DeltaPlan(("t",), (WIDE,), WIDE, "", "incremental", "", (stratum,), **more)


def test_columns_are_read_by_nodes_lookups_neighbours_and_edges() -> None:
    lookup = StateLookup("s0", ("c",), (("d0", ("d", "")), ("h0", ("h",))))
    near = NearbyRows(0, ("e",), (SortColumn("f"),), "rows", 1)
    covered = CoveredChanges(0, 0, ("g",), (SortColumn("b"),), ("x", "y"))
    of = plan_by_hand(NamedInput("d0", ("b",)), lookup, nearby=(near,), covered=(covered,))
    (use,) = input_uses(of)
    assert use.schema == TableSchema(WIDE.columns[1:7])
    (use,) = input_uses(plan_by_hand(NamedInput("d0", ("b", "a"))))
    assert use.schema == TableSchema(WIDE.columns[:2], ("a",))
    (use,) = input_uses(plan_by_hand(NamedInput("d0", ())))
    assert use.schema == TableSchema(WIDE.columns[:1], ("a",)), "what is only counted"


def test_neighbours_are_among_the_rows_that_changes_are_told_by() -> None:
    near = (NearbyRows(0, ("e",), (SortColumn("f"),), "rows", 1),)
    large = FilterRows(NamedInput("n0", ("b",)), "b > 5")
    (use,) = input_uses(plan_by_hand(UnionRows((LARGE, large)), nearby=near))
    assert (str(use.changes), str(use.state)) == ("b > 5", "b > 5")
    for both in (
        (LARGE, NamedInput("n0", ("b",))),
        (NamedInput("d0", ("b",)), large),
        (SMALL, large),
    ):
        (use,) = input_uses(plan_by_hand(UnionRows(both), nearby=near))
        assert (use.changes, use.state) == (None, None)
    (use,) = input_uses(
        plan_by_hand(UnionRows((SMALL, FilterRows(NamedInput("s0", ("b",)), "b > 5"))))
    )
    assert (str(use.changes), str(use.state)) == ("b < 5", "b > 5"), "without neighbours"


def test_changes_up_to_edges_are_changes() -> None:
    covered = (CoveredChanges(0, 0, ("b",), (SortColumn("b"),), ("x", "y")),)
    found = UnionRows((LARGE, FilterRows(NamedInput("k0", ("b",)), "b > 5")))
    (use,) = input_uses(plan_by_hand(found, covered=covered))
    assert str(use.changes) == "b > 5"
    (use,) = input_uses(plan_by_hand(UnionRows((LARGE, NamedInput("k0", ("b",)))), covered=covered))
    assert use.changes is None


def test_other_collations_compare_otherwise() -> None:
    conf = (("spark.sql.session.collation", "UNICODE_CI"),)
    (use,) = input_uses(plan_by_hand(LARGE, conf=conf))
    assert use.changes is None
