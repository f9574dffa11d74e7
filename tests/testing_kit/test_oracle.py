"""The oracle: SQLite answers, compared as bags."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import pytest

from actors.errors import DefiniteError, QueryRejected
from actors.plan.schema import Column, Schema
from actors.testing.oracle import Oracle, differences, run_query

T = Schema((Column("a", "int"), Column("d", "decimal(6,2)"), Column("b", "boolean")))


def test_contents_at_each_time_count_copies() -> None:
    oracle = Oracle({"t": T})
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
    total = Schema((Column("s", "decimal(16,2)"),))
    assert oracle.contents("select sum(d) as s from t", total, 2) == {(Decimal("0.20"),): 1}


def test_division_is_sparks() -> None:
    output = Schema((Column("r", "double"),))
    tables = {"t": (T, Counter({(1, None, None): 1}))}
    assert run_query("select a / 2 as r from t", tables, output) == {(0.5,): 1}
    with pytest.raises(DefiniteError):
        run_query("select a / 0 as r from t", tables, output)
    with pytest.raises(DefiniteError):
        run_query("select cast('x' as int) as r from t", tables, output)
    with pytest.raises(QueryRejected):
        run_query("select nothing from t", tables, output)


def test_bags_compare_with_tolerance_for_floats_only() -> None:
    assert differences(Counter({(1, 0.1 + 0.2): 2}), Counter({(1, 0.3): 2})) == []
    assert differences(Counter({(None, 0.3): 1}), Counter({(1, 0.3): 1})) != []
    (wrong,) = differences(Counter({("x", 1.0): 2}), Counter({("x", 1.0): 1}))
    assert (wrong.row, wrong.expected, wrong.found) == (("x", 1.0), 2, 1)
    assert differences(Counter(), Counter({(1,): -1}))[0].found == -1
    off = Counter({(Decimal("1.01"),): 1}), Counter({(Decimal("1.02"),): 1})
    assert differences(*off) == []
    assert len(differences(*off, exact_decimals=True)) == 2
