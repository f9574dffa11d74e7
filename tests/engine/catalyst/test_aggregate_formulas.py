"""Aggregates that no sum keeps: the texts of their formulas, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from actors.engine.catalyst.aggregate_formulas import formula_call, values_of_rows
from actors.engine.catalyst.blocks import ColumnBinding, WrittenExpression
from actors.engine.catalyst.expressions import ExpressionWriter
from actors.engine.catalyst.function_calls import FunctionNames
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import TreeNode, type_of
from actors.model.plan.relational import AggregateCall

AGGREGATES = "org.apache.spark.sql.catalyst.expressions.aggregate."
NAMES = FunctionNames(
    "".join(
        f"{name}\t{AGGREGATES}{kind}\n"
        for name, kind in (
            ("max_by", "MaxBy"),
            ("min_by", "MinBy"),
            ("collect_list", "CollectList"),
            ("bit_xor", "BitXorAgg"),
            ("covar_samp", "CovSample"),
            ("regr_avgx", "RegrAvgX"),
            ("try_sum", "TrySumExpressionBuilder"),
        )
    )
)


def column(number: int, kind: Any = "integer") -> TreeNode:
    fields = {"exprId": number, "name": "", "dataType": kind, "nullable": True}
    return TreeNode("AttributeReference", fields)


def call_of(
    kind: str, *arguments: TreeNode, condition: TreeNode | None = None, **fields: Any
) -> Any:
    inner = TreeNode(AGGREGATES + kind, {"type": "integer", **fields}, list(arguments))
    outer = {"mode": "Complete", "isDistinct": fields.pop("isDistinct", False), "type": "integer"}
    children = [inner] if condition is None else [inner, condition]
    outer |= {"aggregateFunction": 0, "filter": None if condition is None else 1}
    return TreeNode(AGGREGATES + "AggregateExpression", outer, children)


def write(node: TreeNode, more: Mapping[int, ColumnBinding]) -> WrittenExpression:
    def name(number: int) -> str:
        return more[number].id if number in more else f"i0_{number}"

    return WrittenExpression(ExpressionWriter(NAMES, name).write(node), frozenset(), type_of(node))


def formula_of(node: TreeNode, *others: TreeNode) -> AggregateCall:
    row = values_of_rows([node, *others], write)
    return formula_call(node, write, next(iter(row.values()), ()))


def chosen(call: AggregateCall) -> str:
    assert call.formula is not None
    return call.formula.chosen


def test_a_call_is_written_over_places() -> None:
    made = formula_of(call_of("MaxBy", column(1), column(2)))
    assert made.formula is not None
    assert made.formula.written == "max_by({0}, {1})"
    assert made.formula.arguments == ("i0_1", "i0_2")
    assert (made.function, made.argument) == ("max_by", "named_struct('c0', i0_1, 'c1', i0_2)")
    assert made.argument_type == "struct<c0:int,c1:int>"


def test_equal_arguments_share_a_place() -> None:
    made = formula_of(call_of("MaxBy", column(1), column(1)))
    assert made.formula is not None
    assert made.formula.written == "max_by({0}, {0})"
    assert made.argument == "i0_1"


def test_rows_that_are_equal_by_the_order_are_told_apart_by_the_value() -> None:
    pair = "CASE WHEN {1} IS NOT NULL THEN named_struct('o', {1}, 'v', {0}) END"
    assert chosen(formula_of(call_of("MaxBy", column(1), column(2)))) == f"(max({pair})).v"
    assert chosen(formula_of(call_of("MinBy", column(1), column(2)))) == f"(min({pair})).v"


def test_a_filter_is_one_more_argument() -> None:
    made = formula_of(call_of("BitXorAgg", column(1), condition=column(3, "boolean")))
    assert chosen(made) == "bit_xor({0}) FILTER (WHERE {1})"


def test_first_and_last_of_a_grouping_are_of_one_row() -> None:
    first = call_of("First", column(1), ignoreNulls=False)
    last = call_of("Last", column(2), ignoreNulls=False)
    fields = "'c0', {0}, 'c1', {1}"
    assert chosen(formula_of(first, last)) == f"(min(named_struct({fields}))).c0"
    fields = "'c0', {1}, 'c1', {0}"
    assert chosen(formula_call(last, write, (column(1), column(2)))) == (
        f"(max(named_struct({fields}))).c1"
    )


def test_what_passes_over_nulls_is_an_extreme() -> None:
    assert chosen(formula_of(call_of("First", column(1), ignoreNulls=True))) == "min({0})"
    assert chosen(formula_of(call_of("Last", column(1), ignoreNulls=True))) == "max({0})"


def test_lists_are_sorted() -> None:
    assert chosen(formula_of(call_of("CollectList", column(1)))) == "array_sort(collect_list({0}))"


def test_moments_are_summed_over_sorted_pairs_that_are_there() -> None:
    made = chosen(formula_of(call_of("CovSample", column(1), column(2))))
    assert made.count("array_sort(collect_list(CASE WHEN {0} IS NOT NULL AND {1} IS NOT NULL") == 2
    assert made.endswith("s -> CASE WHEN s.n > 1D THEN s.xy / (s.n - 1D) END)")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (call_of("CountMinSketchAgg", column(1), column(2)), "the aggregate CountMin"),
        (call_of("RegrAvgX", column(1), column(2, "decimal(9,2)")), "over dec"),
        (call_of("CollectList", column(1, "variant")), "over variant"),
        (
            call_of("Sum", column(1, "double"), evalContext={"evalMode": "TRY"}),
            "try_sum(double)",
        ),
    ],
    ids=["unknown", "no double", "unordered", "order of rows"],
)
def test_what_is_no_function_of_the_bag_is_refused(node: TreeNode, reason: str) -> None:
    with pytest.raises(NotRendered, match=reason.replace("(", r"\(").replace(")", r"\)")):
        formula_of(node)
