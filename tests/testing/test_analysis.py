"""Schemas of queries without Spark."""

from __future__ import annotations

import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import QueryRejected
from actors.testing.analysis import analyze

TABLES = {
    "t": TableSchema(
        (
            TableColumn("a", "int", False),
            TableColumn("g", "string"),
            TableColumn("d", "decimal(10,2)"),
        )
    ),
    "u": TableSchema((TableColumn("a", "int", False), TableColumn("y", "bigint"))),
}


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("select a, d from t", [("a", "int", False), ("d", "decimal(10,2)", True)]),
        ("select t.*, y from t join u using (a)", 4),
        ("select * from t join u using (a)", 4),
        ("select u.a from t left join u on t.a = u.a", [("a", "int", True)]),
        ("select g, sum(a) as s, avg(d) as m, count(*) as n from t group by g", 4),
        ("select avg(d) as m from t", [("m", "decimal(14,6)", True)]),
        ("select sum(d) as s from t", [("s", "decimal(20,2)", True)]),
        ("select a from t union all select y from u", [("a", "bigint", True)]),
        ("with q(x) as (select a from t) select x + 1 as y from q", [("y", "int", True)]),
        ("select rank() over (order by a) as r from t", [("r", "int", False)]),
        ("select a as b, b + 1 as c from t", [("b", "int", False), ("c", "int", True)]),
        ("select a from t where exists (select 1 from u where u.a = t.a)", [("a", "int", False)]),
        ("select * from u full join t using (a)", 4),
        ("select stddev(a) as s, any(a > 1) as b, mean(d) as m from t", 3),
        (
            "select a, max(g) as m, count(distinct g, d) as c from t group by a",
            [("a", "int", False), ("m", "string", True), ("c", "bigint", False)],
        ),
        ("select a from t left anti join u using (a)", [("a", "int", False)]),
        ("select min(y) filter (where y > 1) as m from u", [("m", "bigint", True)]),
        ("select y from u union select a from t", [("y", "bigint", True)]),
        ("select q.n from t left join (select a, count(*) as n from u group by a) q using (a)", 1),
    ],
)
def test_schemas(sql: str, columns: list[tuple[str, str, bool]] | int) -> None:
    found = analyze(sql, TABLES).columns
    if isinstance(columns, int):
        assert len(found) == columns
    else:
        assert [(c.name, c.type, c.nullable) for c in found] == columns


@pytest.mark.parametrize(
    "sql",
    [
        "select x from t",
        "select a from t join u on true",
        "select a from nothing",
        "select a from t where sum(a) > 1",
        "select from from",
        "select a + g from t where g",
    ],
)
def test_refusals(sql: str) -> None:
    with pytest.raises(QueryRejected):
        analyze(sql, TABLES)


def test_columns_of_using_come_first() -> None:
    found = analyze("select * from (select d, a from t) q full join u using (a)", TABLES).columns
    assert [(c.name, c.type, c.nullable) for c in found] == [
        ("a", "int", True),
        ("d", "decimal(10,2)", True),
        ("y", "bigint", True),
    ]


@pytest.mark.parametrize("clause", ["LIMIT 1L", "OFFSET (2L)", "limit CAST(NULL AS bigint)"])
def test_a_number_of_rows_is_an_int(clause: str) -> None:
    """As on Spark, where a parameter of another type would fail."""
    with pytest.raises(QueryRejected, match="LIMIT_LIKE"):
        analyze(f"SELECT a FROM t {clause}", {"t": TableSchema((TableColumn("a", "int"),))})
