"""The oracle: SQLite answers, compared as bags."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import DefiniteError, QueryRejected
from actors.testing.oracle import QueryOracle, differences, run_query

T = TableSchema(
    (TableColumn("a", "int"), TableColumn("d", "decimal(6,2)"), TableColumn("b", "boolean"))
)


def test_contents_at_each_time_count_copies() -> None:
    oracle = QueryOracle({"t": T})
    oracle.add(1, "t", (1, Decimal("0.10"), True), 2)
    oracle.add(3, "t", (1, Decimal("0.10"), True), -1)
    oracle.add(3, "t", (None, None, None), 1)
    sql, output = "select * from t", T
    assert oracle.contents(sql, output, 0) == {}
    assert oracle.contents(sql, output, 2) == {(1, Decimal("0.10"), True): 2}
    assert oracle.contents(sql, output, 3) == {
        (1, Decimal("0.10"), True): 1,
        (None, None, None): 1,
    }
    total = TableSchema((TableColumn("s", "decimal(16,2)"),))
    assert oracle.contents("select sum(d) as s from t", total, 2) == {(Decimal("0.20"),): 1}


def test_division_is_sparks() -> None:
    output = TableSchema((TableColumn("r", "double"),))
    tables = {"t": (T, Counter({(1, None, None): 1}))}
    assert run_query("select a / 2 as r from t", tables, output) == {(0.5,): 1}
    with pytest.raises(DefiniteError):
        run_query("select a / 0 as r from t", tables, output)
    with pytest.raises(DefiniteError):
        run_query("select cast('x' as int) as r from t", tables, output)
    with pytest.raises(QueryRejected):
        run_query("select nothing from t", tables, output)


@pytest.mark.parametrize(
    ("a", "b", "rest"),
    [
        ("7", "3", 1),
        ("-7", "3", -1),
        ("7", "-3", 1),
        ("5", "1.5", 0.5),
        ("-5", "1.5", -0.5),
        ("4611686018427387905", "10", 5),
        ("1.0", "0.1", 0.0),
        ("null", "0", None),
    ],
)
def test_the_remainder_is_sparks(a: str, b: str, rest: object) -> None:
    """With the sign of the dividend, exact, and for numbers of two types, too."""
    output = TableSchema((TableColumn("r", "double"),))
    tables = {"t": (T, Counter({(1, None, None): 1}))}
    assert run_query(f"select {a} % {b} as r from t", tables, output) == {(rest,): 1}
    with pytest.raises(DefiniteError, match="DIVIDE_BY_ZERO"):
        run_query(f"select {a.replace('null', '1')} % 0 as r from t", tables, output)


def test_bags_compare_with_tolerance_for_floats_only() -> None:
    assert differences(Counter({(1, 0.1 + 0.2): 2}), Counter({(1, 0.3): 2})) == []
    assert differences(Counter({(None, 0.3): 1}), Counter({(1, 0.3): 1})) != []
    (wrong,) = differences(Counter({("x", 1.0): 2}), Counter({("x", 1.0): 1}))
    assert (wrong.row, wrong.expected, wrong.found) == (("x", 1.0), 2, 1)
    assert differences(Counter(), Counter({(1,): -1}))[0].found == -1
    off = Counter({(Decimal("1.01"),): 1}), Counter({(Decimal("1.02"),): 1})
    assert differences(*off) == []
    assert len(differences(*off, exact_decimals=True)) == 2


A = TableSchema((TableColumn("k", "int"), TableColumn("x", "int"), TableColumn("b", "boolean")))
CONTENTS: dict[str, tuple[TableSchema, Counter[tuple[object, ...]]]] = {
    "l": (A, Counter({(1, 2, True): 2, (1, 6, False): 1, (None, 3, None): 1, (4, None, True): 1})),
    "r": (A, Counter({(1, 7, True): 1, (None, 8, False): 1, (5, 9, None): 1})),
}


@pytest.mark.parametrize(
    ("sql", "kinds", "rows"),
    [
        (
            "select k, l.x, r.x as y from l full join r using (k)",
            ("int", "int", "int"),
            {(1, 2, 7): 2, (1, 6, 7): 1, (None, 3, None): 1, (4, None, None): 1}
            | {(None, None, 8): 1, (5, None, 9): 1},
        ),
        (
            "select l.x, r.x as y from l right join r on l.k <=> r.k and l.x < 5",
            ("int", "int"),
            {(2, 7): 2, (3, 8): 1, (None, 9): 1},
        ),
        ("select x from l left semi join r on l.k = r.k", ("int",), {(2,): 2, (6,): 1}),
        ("select x from l left anti join r on l.k = r.k", ("int",), {(3,): 1, (None,): 1}),
        ("select x from l where k in (select k from r)", ("int",), {(2,): 2, (6,): 1}),
        ("select x from l where k not in (select k from r)", ("int",), {}),
        (
            "select distinct k from l union select k from r",
            ("int",),
            {(k,): 1 for k in (1, 4, 5, None)},
        ),
        (
            "select k, stddev(x) as s, var_pop(x / 1) as v, every(b) as e, any(b) as a "
            "from l group by k",
            ("int", "double", "double", "boolean", "boolean"),
            {(1, (16 / 3) ** 0.5, 32 / 9, False, True): 1, (None, None, 0.0, None, None): 1}
            | {(4, None, None, True, True): 1},
        ),
        (
            "select count(distinct k, x) as c, count(k, x) as d, max(x) filter (where b) as m, "
            "max_by(k, x) as y from l",
            ("bigint", "bigint", "int", "int"),
            {(2, 3, 2, 1): 1},
        ),
        (
            "select n, count(*) as c from (select k, count(*) as n from l group by k) q group by n",
            ("bigint", "bigint"),
            {(3, 1): 1, (1, 2): 1},
        ),
        ("select greatest(k, x) as g from r where k is null", ("int",), {(8,): 1}),
    ],
)
def test_sqlite_answers_as_spark(sql: str, kinds: tuple[str, ...], rows: dict[object, int]) -> None:
    output = TableSchema(tuple(TableColumn(f"c{i}", kind) for i, kind in enumerate(kinds)))
    found = run_query(sql, CONTENTS, output)
    assert differences(Counter(rows), found) == []  # type: ignore[arg-type]


def test_divisions_inside_aggregates_raise_too() -> None:
    output = TableSchema((TableColumn("r", "double"),))
    with pytest.raises(DefiniteError):
        run_query("select stddev(x / 0) / 2 as r from l", CONTENTS, output)
