"""A single row that a table is only compared with: what of the table its change reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.engine.views.delta import DerivedPlan, derive
from actors.engine.views.rule_range_lookup import drop_unread_columns
from actors.model.plan.delta import columns_of
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    FilterNode,
    GroupKey,
    JoinNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    UnionAll,
    ValuesNode,
    ViewPlan,
)
from actors.model.plan.relational import columns_of as columns_of_plan
from actors.model.plan.schema import TableColumn, TableSchema

KEYED = TableSchema((TableColumn("k", "int"), TableColumn("x", "int")), ("k", "x"))
PAIRS = ScanNode(0, (("i0_k", "k"), ("i0_x", "x")))
TYPES = (("i0_k", "int"), ("i0_x", "int"))
OTHER = ScanNode(0, (("i0b_k", "k"), ("i0b_x", "x")))
THIRD = ScanNode(0, (("i0c_k", "k"),))
SUM = AggregationNode(PAIRS, (), (AggregateCall("a0", "sum", "i0_x", "bigint", "int"),))
BESIDE_TYPES = (("i0b_k", "int"), ("i0b_x", "int"), ("a0", "bigint"), *TYPES)


def beside(
    *tests: str, equal: tuple[ColumnEquality, ...] = (), inputs: tuple[Plan, ...] = ()
) -> JoinNode:
    """Rows beside the sum of all."""
    return JoinNode(inputs or (OTHER, SUM), equal, tests, BESIDE_TYPES)


def derived(plan: Plan, read: str) -> DerivedPlan:
    return derive(
        ViewPlan(("t",), ProjectNode(plan, (NamedExpression("k", read),)), KEYED), (KEYED,)
    )


def ranges_of(made: DerivedPlan) -> list[tuple[str, ...]]:
    """The columns of each range; its bounds are made by the run that it waits for."""
    found = list[tuple[str, ...]]()
    for stratum in made.strata:
        for each in stratum.ranges:
            (lookup,) = (one for one in stratum.lookups if one.number == each.lookup)
            ((origin, _),) = lookup.origins
            assert set(each.bounds) <= set(columns_of(made.strata[int(origin[1:])].node))
            assert len(each.bounds) == len(each.columns)
            found.append(each.columns)
    return found


@pytest.mark.parametrize(
    ("test", "bounds"),
    [
        ("(CAST(i0b_x AS bigint) < a0)", 1),
        ("(a0 >= CAST(i0b_x AS bigint))", 1),
        ("i0b_x < a0", 1),
        ("(i0b_x) < (a0)", 0),
        ("i0b_x BETWEEN a0 AND CAST(a0 AS bigint)", 2),
        ("(i0b_x < (a0 - INTERVAL '2' DAY))", 1),
        ("(i0b_x = a0)", 0),
        ("(i0b_x < a0) OR (i0b_k > a0)", 0),
        ("((i0b_x < a0) OR (i0b_k > a0))", 0),
        ("NOT (i0b_x < a0)", 0),
        ("((i0b_x + 1) < a0)", 0),
        ("(i0b_x < (a0 * 2))", 0),
        ("(a0 < (a0 - INTERVAL '2' DAY))", 0),
        ("(i0b_k < i0b_x)", 0),
        ("(if((i0b_k < i0b_x), i0b_x, i0b_k) < a0)", 0),
        ("(i0b_x < a0 < a0)", 0),
    ],
)
def test_a_bound_reads_a_range_and_anything_else_reads_all(test: str, bounds: int) -> None:
    made = derived(beside(test), "i0b_k")
    assert ranges_of(made) == ([("x",) * bounds] if bounds else [])
    what = "a range" if bounds else "all"
    assert made.reason == f"{what} of t is read when the single row joined with it changes"


def test_one_predicate_that_is_no_comparison_reads_all() -> None:
    assert ranges_of(derived(beside("i0b_x < a0", "i0b_k > a0"), "i0b_k")) == [("x", "k")]
    assert not ranges_of(derived(beside("i0b_x < a0", "((i0b_k + a0) > 3)"), "i0b_k"))
    assert ranges_of(derived(beside("i0b_x < a0", "((i0b_k + i0b_x) > 3)"), "i0b_k")) == [("x",)]
    assert not ranges_of(derived(beside("i0b_x < a0", "NOT (i0b_k > a0)"), "i0b_k"))
    equal = (ColumnEquality("i0b_k", "a0"),)
    assert not ranges_of(derived(beside("i0b_x < a0", equal=equal), "i0b_k"))


def test_two_tables_compared_with_one_row_are_read_whole() -> None:
    third = ScanNode(0, (("i0_k", "k"), ("i0_x", "x")))
    single = AggregationNode(OTHER, (), (AggregateCall("a0", "sum", "i0b_x", "bigint", "int"),))
    fourth = ScanNode(0, (("i0c_k", "k"), ("i0c_x", "x")))
    inputs = (third, single, fourth)
    assert not ranges_of(derived(beside("i0_x < a0", "i0c_x < a0", inputs=inputs), "i0_k"))
    equal = (ColumnEquality("i0_k", "i0c_k"),)
    made = derived(beside("i0c_x < a0", inputs=inputs, equal=equal), "i0_k")
    assert ranges_of(made) == [("x",)]
    made = derived(beside("i0_x < a0", "i0c_x < a0", inputs=inputs, equal=equal), "i0_k")
    assert not ranges_of(made)
    equal = (ColumnEquality("i0_k", "a0"),)
    made = derived(beside("i0c_x < a0", inputs=inputs, equal=equal), "i0_k")
    assert not ranges_of(made)


def test_only_a_table_beside_a_changing_row_has_a_range() -> None:
    grouped = AggregationNode(PAIRS, (GroupKey("k0", "i0_k", "int"),), SUM.calls)
    assert not ranges_of(derived(beside("i0b_x < a0", inputs=(OTHER, grouped)), "i0b_k"))
    constant = ValuesNode((GroupKey("v0", "v0", "int"),), "VALUES (1)", "inline(array(struct(1)))")
    assert not ranges_of(derived(beside("i0b_x < v0", inputs=(OTHER, constant)), "i0b_k"))
    never = AggregationNode(constant, (), (AggregateCall("a0", "sum", "v0", "bigint", "int"),))
    assert not ranges_of(derived(beside("i0b_x < a0", inputs=(OTHER, never)), "i0b_k"))
    groups = AggregationNode(
        OTHER, (GroupKey("k1", "i0b_k", "int"),), (AggregateCall("a1", "count", None, "bigint"),)
    )
    assert not ranges_of(derived(beside("a1 < a0", inputs=(groups, SUM)), "k1"))


def test_a_bound_that_is_read_above_reads_all() -> None:
    assert not ranges_of(derived(beside("i0b_x < a0"), "a0"))
    assert not ranges_of(derived(beside("i0b_x < a0"), "i0b_k + a0"))


COUNT = AggregateCall("a1", "count", None, "bigint")


@pytest.mark.parametrize(
    ("above", "ranged"),
    [
        (lambda join: AggregationNode(join, (GroupKey("k0", "i0b_k", "int"),), (COUNT,)), True),
        (lambda join: AggregationNode(join, (GroupKey("k0", "a0", "bigint"),), (COUNT,)), False),
        (
            lambda join: AggregationNode(
                join, (GroupKey("k0", "i0b_k", "int"),), (AggregateCall("a1", "max", "a0",
                "bigint"),)
            ),
            False,
        ),
        (lambda join: FilterNode(join, "i0b_k > 0"), True),
        (lambda join: FilterNode(join, "a0 > 0"), False),
        (lambda join: SemiJoin(join, THIRD, True, (ColumnEquality("i0b_k", "i0c_k"),)), True),
        (lambda join: SemiJoin(join, THIRD, True, (ColumnEquality("a0", "i0c_k"),)), False),
        (
            lambda join: SemiJoin(
                join, THIRD, False, (ColumnEquality("i0b_k", "i0c_k"),), ("i0c_k < a0",)
            ),
            False,
        ),
        (lambda join: OuterJoin(join, THIRD, "left", (ColumnEquality("i0b_k", "i0c_k"),)), True),
        (lambda join: DistinctNode(join, (GroupKey("i0b_k", "i0b_k", "int"),)), False),
    ],
)  # fmt: skip
def test_a_single_row_is_dropped_where_nothing_above_reads_it(
    above: Callable[[Plan], Plan], ranged: bool
) -> None:
    plan = above(beside("i0b_x < a0", inputs=(OTHER, FilterNode(SUM, "a0 > 0"))))
    read = "k0" if isinstance(plan, AggregationNode) else "i0b_k"
    dropped = drop_unread_columns(ProjectNode(plan, (NamedExpression("k", read),)))
    below = dropped
    while not isinstance(below, JoinNode):
        assert isinstance(
            below, ProjectNode | AggregationNode | FilterNode | SemiJoin | OuterJoin | DistinctNode
        )
        dropped = below
        below = below.left if isinstance(below, SemiJoin | OuterJoin) else below.input
    assert isinstance(dropped, ProjectNode) == ranged
    if ranged:
        assert columns_of_plan(dropped) == ("i0b_k", "i0b_x")


def test_what_is_compared_with_no_single_row_stays_as_it_is() -> None:
    grouped = AggregationNode(PAIRS, (GroupKey("k0", "i0_k", "int"),), SUM.calls)
    for join in (
        beside("i0b_k < i0b_x"),
        beside("i0b_x < i0_x", inputs=(OTHER, PAIRS)),
        beside("i0b_x < a0", inputs=(OTHER, grouped)),
    ):
        plan = ProjectNode(FilterNode(join, "i0b_k > 0"), (NamedExpression("k", "i0b_k"),))
        assert drop_unread_columns(plan) == plan
    # A projection directly above drops it itself, wherever it stands.
    plan = ProjectNode(beside("i0b_x < a0"), (NamedExpression("k", "i0b_k"),))
    assert drop_unread_columns(plan) == plan
    for below in (UnionAll((plan, plan)), DistinctNode(plan, (GroupKey("k", "k", "int"),))):
        assert drop_unread_columns(below) == below
    inner = AggregationNode(beside("i0b_x < a0"), (GroupKey("k0", "i0b_k", "int"),), (COUNT,))
    union = UnionAll((inner, inner))
    made = drop_unread_columns(union)
    assert isinstance(made, UnionAll)
    assert made != union
    limited = drop_unread_columns(DistinctNode(inner, (GroupKey("k0", "k0", "int"),)))
    assert isinstance(limited, DistinctNode)
    assert limited.input != inner
    renamed = ProjectNode(
        ProjectNode(PAIRS, (NamedExpression("n", "i0_k"),)), (NamedExpression("k", "n"),)
    )
    assert drop_unread_columns(renamed) == renamed


def test_what_is_read_is_known_through_joins() -> None:
    join = beside("i0b_x < a0")
    half = SemiJoin(join, THIRD, True, (ColumnEquality("i0b_k", "i0c_k"),))
    for above in (half, JoinNode((half, PAIRS), (ColumnEquality("i0b_k", "i0_k"),))):
        made = drop_unread_columns(ProjectNode(above, (NamedExpression("k", "i0b_k"),)))
        assert made != ProjectNode(above, (NamedExpression("k", "i0b_k"),))
        # All columns of what is made distinct are read.
        distinct = DistinctNode(above, (GroupKey("i0b_k", "i0b_k", "int"),))
        assert drop_unread_columns(distinct) == distinct
    # Of rows without columns there is nothing to drop.
    other = AggregationNode(PAIRS, (), (AggregateCall("a9", "max", "i0_x", "int", "int"),))
    counted = AggregationNode(beside("a9 < a0", inputs=(other, SUM)), (), (COUNT,))
    assert drop_unread_columns(counted) == counted
