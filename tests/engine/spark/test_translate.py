"""The rendering of plans without Spark: columns, hints, and what is refused."""

from __future__ import annotations

import pytest

from actors.engine.spark.translate import PlanTranslator, SessionRelation, leaves, times_diff
from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    FilterRows,
    GenerateRows,
    NamedInput,
    Node,
    PairRows,
    RecomputeRows,
    ReduceGroups,
    SelectColumns,
    TopCovered,
    WindowColumn,
    WindowLayer,
    columns_of,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema, quote
from actors.runtime.errors import InvalidUsage

SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("a b", "char(3)")))
SOURCE = NamedInput("d0", ("k", "a b"))
OTHER = SelectColumns(NamedInput("s1", ("k",)), (NamedExpression("j", "k"),))
PAIR = PairRows(SOURCE, OTHER, (("k", "j"),))


def translator(*, small: bool, size: int = 10, changes: int = 10) -> PlanTranslator:
    relations = {
        "d0": SessionRelation(SCHEMA, "__d0", changes),
        "s1": SessionRelation(SCHEMA, "__s1", size),
    }
    return PlanTranslator(relations, lambda node: {}, interval=(1, 2), small=small)


def test_columns_and_leaves() -> None:
    assert columns_of(PAIR) == ("k", "a b", "j")
    assert list(leaves(PAIR)) == ["d0", "s1"]
    reduce = ReduceGroups(
        PAIR, (NamedExpression("g", "j"),), (AdditiveMeasure("m", "sum", "k", "bigint"),)
    )
    assert columns_of(reduce) == ("g", "n", "m")
    total = AccumulateTotals(reduce, NamedInput("h", ("g", "n", "m")), ("g",), ("m",))
    assert columns_of(total) == ("g", "n", "m")
    assert list(leaves(total)) == ["d0", "s1", "h"]


def test_small_steps_have_no_exchange_and_large_ones_broadcast_what_is_small() -> None:
    assert "COALESCE(1), SHUFFLE_HASH(__r)" in translator(small=True).text(PAIR)
    large = translator(small=False, size=1 << 30).text(PAIR)
    assert "BROADCAST(__l)" in large
    assert "COALESCE" not in large
    assert "BROADCAST" not in translator(small=False, size=1 << 30, changes=1 << 30).text(PAIR)


def test_an_input_without_rows_is_an_empty_select() -> None:
    empty = PlanTranslator(
        {"d0": SessionRelation(SCHEMA)}, lambda node: {}, interval=(1, 2), small=True
    )
    text = empty.text(SOURCE)
    assert "CAST(NULL AS string) AS `a b`" in text
    assert "WHERE false" in text


def test_a_predicate_that_is_one_name_is_no_alias() -> None:
    assert ") AS __t WHERE (\nflag\n)" in translator(small=True).text(FilterRows(SOURCE, "flag"))


def test_what_is_before_an_edge_is_found_by_its_rank() -> None:
    """Spark sums a frame up to the last row anew for each row: a large step would take for ever."""
    text = translator(small=False).text(TopCovered(SOURCE, OTHER, ("k",), ("`a b` DESC",)))
    assert "rank() OVER (PARTITION BY `k` ORDER BY `a b` DESC)" in text
    assert "FOLLOWING" not in text


@pytest.mark.parametrize("outer", [False, True])
def test_a_generator_stands_beside_the_rows_that_it_is_applied_to(outer: bool) -> None:
    node = GenerateRows(SOURCE, "posexplode(array(k))", outer, ("p", "c d"))
    assert columns_of(node) == ("k", "a b", "p", "c d")
    word = "OUTER " if outer else ""
    text = translator(small=True).text(node)
    assert f"LATERAL VIEW {word}posexplode(array(k)) __e AS `p`, `c d`" in text


def test_a_windows_partition_is_one_side_of_one_time() -> None:
    """Rows before and after a change stand in one relation."""
    call = WindowColumn("n", "ntile(2)", ("`a b` DESC", "k"), "")
    node = RecomputeRows(NamedInput("s1", ("k", "a b")), SOURCE, ("k",), (call,))
    assert columns_of(node) == ("k", "a b", "n")
    assert list(leaves(node)) == ["s1", "d0"]
    over = "ntile(2) OVER (PARTITION BY `k`, __time, __diff ORDER BY `a b` DESC, k) AS `n`"
    assert over in translator(small=True).text(node)
    whole = RecomputeRows(node.old, SOURCE, (), (WindowColumn("n", "count(k)", (), "ROWS 1"),))
    text = translator(small=True).text(whole)
    assert "count(k) OVER (PARTITION BY __time, __diff ROWS 1) AS `n`" in text


def test_windows_one_on_another_are_over_the_same_rows() -> None:
    call = WindowColumn("n", "ntile(2)", ("k",), "")
    layer = WindowLayer(
        (NamedExpression("k", "k"), NamedExpression("m", "n % 2")),
        ("k", "m"),
        (WindowColumn("c", "count(1)", (), ""),),
    )
    node = RecomputeRows(NamedInput("s1", ("k", "a b")), SOURCE, ("k",), (call,), (layer,))
    assert columns_of(node) == ("k", "m", "c")
    text = translator(small=True).text(node)
    assert text.count("ntile(2)") == 1
    assert "n % 2\n AS `m`, __time, __diff FROM" in text
    assert "count(1) OVER (PARTITION BY `k`, `m`, __time, __diff) AS `c`" in text


@pytest.mark.parametrize(
    "node",
    [
        NamedInput("d0", ("nope",)),
        ReduceGroups(SOURCE, (), (AdditiveMeasure("m", "max", "k", "bigint"),)),
    ],
)
def test_what_cannot_be_is_refused_by_name(node: Node) -> None:
    with pytest.raises(InvalidUsage, match=r"nope|max"):
        translator(small=True).text(node)


def test_quoting_and_products() -> None:
    assert quote("a`b") == "`a``b`"
    assert times_diff("v", None) == "v * __diff"
    assert "decimal(19,0)" in times_diff("v", "decimal(38,2)")
    assert "% CAST(1 AS decimal(1,0))" in times_diff("v", "decimal(38,18)")
