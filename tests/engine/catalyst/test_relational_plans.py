"""Relational plans of small trees: blocks of joins, groupings, rows made of rows, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from actors.engine.catalyst.function_calls import FunctionNames
from actors.engine.catalyst.plan_nodes import NotTranslated
from actors.engine.catalyst.plan_tree import TreeNode
from actors.engine.catalyst.relations import (
    SESSION_MARK,
    TABLE_METADATA,
    RelationalBuilder,
)
from actors.model.plan.relational import (
    ColumnEquality,
    ExpandNode,
    FilterNode,
    GenerateNode,
    GroupKey,
    JoinNode,
    LimitNode,
    NamedExpression,
    OuterJoin,
    ProjectNode,
    ScanNode,
    SemiJoin,
    UnionAll,
    ValuesNode,
)
from actors.model.plan.relational_text import render

EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
PLANS = "org.apache.spark.sql.catalyst.plans.logical."
NAMES = FunctionNames(f"explode\t{EXPRESSIONS}Explode\narray\t{EXPRESSIONS}CreateArray\n")
TABLES = (("k", "v"), ("k", "w"))
BOOLEAN = {"dataType": "boolean", "type": "boolean"}


def made(kind: str, /, *children: TreeNode, **fields: Any) -> TreeNode:
    return TreeNode(EXPRESSIONS + kind, fields, list(children))


def node(kind: str, /, *children: TreeNode, **fields: Any) -> TreeNode:
    return TreeNode(PLANS + kind, fields, list(children))


def column(number: int, kind: str = "integer", name: str = "", **fields: Any) -> TreeNode:
    fields = {"nullable": True, "metadata": {}, **fields}
    return made("AttributeReference", exprId=number, dataType=kind, name=name, **fields)


def literal(value: int) -> TreeNode:
    return made("Literal", value=str(value), dataType="integer")


def alias(number: int, inner: TreeNode, kind: str = "integer") -> TreeNode:
    return made("Alias", inner, exprId=number, name="x", child=0, type=kind)


def table(source: int, first: int, **fields: Any) -> TreeNode:
    output = [
        column(first + place, name=name, metadata={TABLE_METADATA: source}, **fields)
        for place, name in enumerate(TABLES[source])
    ]
    return node("LocalRelation", output=output)


def both(kind: str, left: TreeNode, right: TreeNode) -> TreeNode:
    return made(kind, left, right, **BOOLEAN)


def filtered(below: TreeNode, condition: TreeNode) -> TreeNode:
    return node("Filter", below, condition=condition)


def join(left: TreeNode, right: TreeNode, kind: str, condition: TreeNode | None) -> TreeNode:
    fields = {"settings": ()} if condition is not None else {"settings": ("condition",)}
    return node("Join", left, right, joinType=kind, condition=condition, **fields)


def project(below: TreeNode, *items: TreeNode) -> TreeNode:
    return node("Project", below, projectList=list(items))


def built(root: TreeNode, *names: str) -> ProjectNode:
    builder = RelationalBuilder(NAMES, dict(enumerate(TABLES)), ansi=True, zone="UTC")
    return builder.build(root, names)


A, B = table(0, 1), table(1, 3)
KEYS = both("EqualTo", column(1), column(3))


def text_of(root: TreeNode, *names: str) -> str:
    return render(built(root, *names), ("a", "b"))


def summed(number: int) -> TreeNode:
    inner = made("Sum", column(number), type="long", evalContext={"evalMode": "ANSI"})
    return made("AggregateExpression", inner, isDistinct=False, type="long", null=True)


def sort_of(below: TreeNode) -> TreeNode:
    order = made(
        "SortOrder",
        column(2),
        direction="Descending",
        nullOrdering="NullsLast",
        sameOrderExpressions=[],
        type="integer",
    )
    return node("Sort", below, order=[order])


def test_a_column_that_nobody_reads_is_left_out() -> None:
    assert built(project(A, column(2)), "v").input == ScanNode(0, (("i0_v", "v"),))


def test_two_visits_of_a_table_have_columns_of_their_own() -> None:
    twice = join(A, table(0, 5), "Inner", both("EqualTo", column(1), column(5)))
    plan = built(twice, "k", "v", "k2", "v2").input
    assert isinstance(plan, JoinNode)
    assert plan.equal == (ColumnEquality("i0_k", "i0b_k"),)


def test_a_chain_of_inner_joins_is_one_join_of_all_inputs() -> None:
    renamed = project(join(A, B, "Inner", KEYS), alias(9, column(1)), column(4))
    third = table(0, 20)
    plan = built(
        join(renamed, third, "Inner", both("EqualTo", column(9), column(20))),
        "k",
        "w",
        "k2",
        "v",
    ).input
    assert isinstance(plan, JoinNode)
    assert len(plan.inputs) == 3
    assert plan.equal == (ColumnEquality("i0_k", "i1_k"), ColumnEquality("i0_k", "i0b_k"))


def test_what_is_no_equality_of_two_inputs_is_the_residual() -> None:
    more = both("LessThan", column(2), column(4))
    plan = built(join(A, B, "Inner", both("And", KEYS, more)), "k", "v", "k2", "w").input
    assert isinstance(plan, JoinNode)
    assert plan.residual == ("(i0_v < i1_w)",)


@pytest.mark.parametrize(
    ("kind", "left_test", "right_test"),
    [
        ("LeftOuter", "residual", "filter"),
        ("RightOuter", "filter", "residual"),
        ("FullOuter", "residual", "residual"),
    ],
)
def test_what_one_side_decides_filters_only_the_side_that_is_padded(
    kind: str, left_test: str, right_test: str
) -> None:
    for number, name, where in ((2, "i0_v", left_test), (4, "i1_w", right_test)):
        condition = both("And", KEYS, both("GreaterThan", column(number), literal(3)))
        plan = built(join(A, B, kind, condition), "k", "v", "k2", "w").input
        assert isinstance(plan, OuterJoin)
        test = f"({name} > 3)"
        assert plan.residual == ((test,) if where == "residual" else ())
        filters = [each for each in (plan.left, plan.right) if isinstance(each, FilterNode)]
        assert [each.predicate for each in filters] == ([test] if where == "filter" else [])


def test_a_right_join_is_a_left_one_turned_around() -> None:
    plan = built(join(A, B, "RightOuter", KEYS), "k", "v", "k2", "w").input
    assert isinstance(plan, OuterJoin)
    assert (plan.kind, plan.equal) == ("left", (ColumnEquality("i1_k", "i0_k"),))


def test_semi_and_anti_joins_keep_the_left_columns() -> None:
    for kind, anti in (("LeftSemi", False), ("LeftAnti", True)):
        plan = built(join(A, B, kind, both("EqualNullSafe", column(1), column(3))), "k", "v").input
        assert isinstance(plan, SemiJoin)
        assert (plan.anti, plan.equal) == (anti, (ColumnEquality("i0_k", "i1_k", True),))


def test_a_test_of_the_left_alone_filters_it_but_under_an_anti_join() -> None:
    """Of an anti join such a test decides which rows cannot have a match."""
    condition = both("And", KEYS, both("GreaterThan", column(2), literal(3)))
    semi = built(join(A, B, "LeftSemi", condition), "k", "v").input
    anti = built(join(A, B, "LeftAnti", condition), "k", "v").input
    assert isinstance(semi, SemiJoin)
    assert isinstance(anti, SemiJoin)
    assert isinstance(semi.left, FilterNode)
    assert (semi.residual, anti.residual) == ((), ("(i0_v > 3)",))
    assert isinstance(anti.left, ScanNode)


def test_not_in_is_three_anti_joins_where_a_null_can_occur() -> None:
    """No match, no NULL on the right, and of a NULL on the left no row on the right at all."""
    unknown = both("Or", KEYS, made("IsNull", KEYS, **BOOLEAN))
    text = text_of(join(A, B, "LeftAnti", unknown), "k", "v")
    assert text.count("NOT EXISTS (") == 3
    assert all(test in text for test in ("WHERE i0_k = i1_k)", "WHERE c0 <=> i1_k)", "c1 = c2"))
    assert re.search(r"CAST\(NULL AS \w+\) AS c0", text)
    assert "CASE WHEN (i0_k IS NULL) THEN 1 END AS c1" in text


def test_a_grouping_without_aggregates_is_a_distinct() -> None:
    keys = node("Aggregate", A, groupingExpressions=[column(1)], aggregateExpressions=[column(1)])
    assert text_of(keys, "k").startswith("SELECT k0 AS `k` FROM (SELECT DISTINCT k0 FROM ")


def test_one_aggregate_that_stands_twice_is_computed_once() -> None:
    more = made("Add", summed(2), literal(1), type="long", evalContext={"evalMode": "ANSI"})
    grouped = node(
        "Aggregate",
        A,
        groupingExpressions=[column(1)],
        aggregateExpressions=[alias(9, summed(2), "long"), alias(10, more, "long")],
    )
    text = text_of(grouped, "s", "t")
    assert text.count("sum(") == 1
    assert "(a0 + 1) AS" in text


def test_a_union_has_columns_of_its_own() -> None:
    plan = built(node("Union", A, B, byName=False), "k", "v").input
    assert isinstance(plan, UnionAll)
    assert [each.columns[1] for each in plan.inputs if isinstance(each, ProjectNode)] == [
        NamedExpression("u1", "i0_v"),
        NamedExpression("u1", "i1_w"),
    ]


def test_a_limit_keeps_the_order_that_stands_below_a_projection() -> None:
    ordered = project(sort_of(A), column(1))
    local = node("LocalLimit", node("Offset", ordered, offsetExpr=literal(2)), limitExpr=literal(3))
    plan = built(node("GlobalLimit", local, limitExpr=literal(3)), "k").input
    found = plan.input if isinstance(plan, ProjectNode) else plan
    assert isinstance(found, LimitNode)
    assert (found.order, found.count, found.offset) == (("i0_v DESC NULLS LAST",), 3, 2)


def test_expansions_have_a_list_of_expressions_for_each_row() -> None:
    rows = [[column(1), literal(0)], [literal(7), literal(1)]]
    tree = node("Expand", A, output=[column(5), column(6)], projections=rows)
    plan = built(tree, "k", "g").input
    assert isinstance(plan, ExpandNode)
    assert plan.rows == (("i0_k", "0"), ("7", "1"))


@pytest.mark.parametrize("outer", [False, True])
def test_generators_keep_what_is_read_of_their_input(outer: bool) -> None:
    listed = {"type": "array", "elementType": "integer", "containsNull": True}
    generator = made("Explode", made("CreateArray", column(2), type=listed), type="integer")
    tree = node(
        "Generate",
        A,
        generator=generator,
        outer=outer,
        unrequiredChildIndex=[1],
        generatorOutput=[column(7)],
    )
    root = built(tree, "k", "e")
    assert root.columns == (NamedExpression("k", "i0_k"), NamedExpression("e", "g0"))
    assert isinstance(root.input, GenerateNode)
    assert (root.input.generator, root.input.outer) == ("explode(array(i0_v))", outer)


def test_rows_in_the_text_are_written_as_they_are() -> None:
    values = node("LocalRelation", output=[column(5)], rows=[[literal(7)], [literal(8)]])
    plan = built(values, "x").input
    assert plan == ValuesNode(
        (GroupKey("v0", "v0", "int", True),),
        "VALUES (7), (8)",
        "inline(array(named_struct('c0', 7), named_struct('c0', 8)))",
    )
    assert text_of(values, "x").endswith("FROM VALUES (7), (8) AS v(v0)) r1")
    numbers = built(node("Range", start=1, end=6, step=2, output=[column(5)]), "id").input
    assert isinstance(numbers, ValuesNode)
    assert numbers.generator == "explode(sequence(1L, 5L, 2L))"
    one = project(node("OneRowRelation", output=[]), alias(9, literal(3)))
    assert text_of(one, "x").endswith("FROM (SELECT 1 AS no_column) r1) r2")


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        (node("Tail", A), "LIMIT"),
        (
            node(
                "Aggregate",
                A,
                groupingExpressions=[column(1, metadata={SESSION_MARK: True})],
                aggregateExpressions=[column(1)],
            ),
            "session_window",
        ),
        (node("UnionLoop", A, B), "WITH RECURSIVE"),
        (node("MapElements", A), "the plan node MapElements"),
        (node("LocalRelation", output=[column(1)], rows=[]), "a constant table without rows"),
        (node("Range", start=0, end=20_000, step=1, output=[column(1)]), "of 20000 rows"),
        (node("Range", start=5, end=5, step=1, output=[column(1)]), "of 0 rows"),
        (node("Union", A, B, byName=True), "UNION BY NAME"),
        (project(A, column(99)), "a column of an outer query"),
        (join(A, B, "LeftSingle", KEYS), "may have two rows"),
        (node("GlobalLimit", A, limitExpr=column(1)), "a LIMIT that is not a number"),
    ],
    ids=lambda value: value.name if isinstance(value, TreeNode) else "",
)
def test_what_no_rule_knows_is_named(root: TreeNode, reason: str) -> None:
    with pytest.raises(NotTranslated, match=reason):
        built(root, "k", "v")


def test_other_columns_than_the_querys_are_refused() -> None:
    with pytest.raises(NotTranslated, match="a plan of 2 columns instead of 1"):
        built(A, "k")
