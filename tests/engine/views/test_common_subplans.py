"""Parts of a plan that say the same: which they are, and that one operator serves all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.engine.views.common_subplans import CommonSubplans, shape_of
from actors.engine.views.delta import DerivedPlan, derive
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    FilterNode,
    GroupKey,
    JoinNode,
    NamedExpression,
    Plan,
    ProjectNode,
    ScanNode,
    UnionAll,
    ViewPlan,
    WindowCall,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.schema import TableColumn, TableSchema

PAIRS = TableSchema((TableColumn("k", "int"), TableColumn("x", "int"), TableColumn("i0_y", "int")))


def scan(number: int, *own: str, input_index: int = 0) -> ScanNode:
    return ScanNode(input_index, tuple((f"i{number}_{name}", name) for name in own or ("k", "x")))


def totals(n: int, **changes: str) -> AggregationNode:
    """Sums by key, with ids of their own."""
    below: Plan = FilterNode(scan(n), changes.get("where", f"(i{n}_x > 1)").replace("N", str(n)))
    key = GroupKey(f"k{n}", changes.get("key", f"i{n}_k").replace("N", str(n)), "int")
    argument = changes.get("argument", f"i{n}_x").replace("N", str(n))
    call = AggregateCall(f"a{n}", changes.get("function", "sum"), argument, "bigint", "int")
    return AggregationNode(below, (key,), (call,))


def beside(left: AggregationNode, right: AggregationNode) -> ProjectNode:
    """Both by their keys."""
    keys = left.keys[0].name, right.keys[0].name
    types = tuple((id_, "bigint") for each in (left, right) for id_ in columns_of(each))
    plan = JoinNode((left, right), (ColumnEquality(*keys),), (), types)
    return ProjectNode(
        plan, (NamedExpression("k", keys[0]), NamedExpression("x", right.calls[0].name))
    )


def derived(root: ProjectNode) -> DerivedPlan:
    output = TableSchema(tuple(TableColumn(name, "bigint") for name in columns_of(root)))
    return derive(ViewPlan(("t",), root, output), (PAIRS,))


def test_what_is_said_twice_has_one_state() -> None:
    assert [state.keys for state in derived(beside(totals(1), totals(2))).hidden] == [("k1",)]
    common = CommonSubplans(beside(totals(1), totals(2)))
    assert len(common.shared) == 1
    join = common.root.input if isinstance(common.root, ProjectNode) else None
    assert isinstance(join, JoinNode)
    first, again = join.inputs
    assert isinstance(again, ProjectNode)
    assert again.input is first
    assert again.columns == (NamedExpression("k2", "k1"), NamedExpression("a2", "a1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"where": "(iN_x > 2)"},
        {"where": "(iN_k > 1)"},
        {"key": "iN_x"},
        {"argument": "iN_k"},
        {"function": "count"},
    ],
)
def test_what_differs_anywhere_is_kept_apart(changes: dict[str, str]) -> None:
    root = beside(totals(1), totals(2, **changes))
    assert not CommonSubplans(root).shared
    assert len(derived(root).hidden) == 2


def test_an_id_is_no_name_of_a_table() -> None:
    """A table may have columns that are called as ids are."""
    one = DistinctNode(ScanNode(0, (("i0_x", "i0_y"), ("i0_y", "x"))), ())
    other = DistinctNode(ScanNode(0, (("i1_x", "i0_y"), ("i1_y", "x"))), ())
    third = DistinctNode(ScanNode(0, (("i1_x", "x"), ("i1_y", "i0_y"))), ())
    assert shape_of(one) == shape_of(other) != shape_of(third)
    other = DistinctNode(ScanNode(1, (("i1_x", "i0_y"), ("i1_y", "x"))), ())
    assert shape_of(one) != shape_of(other)


def test_literals_and_fields_are_no_ids() -> None:
    def filtered(number: int, text: str) -> FilterNode:
        return FilterNode(scan(number), text.replace("N", str(number)))

    for text in (
        "(iN_k = 'i1_k')",
        "(iN_k = `i1_k`)",
        "(iN_k.i1_k > 1)",
        "CAST(iN_k AS struct<i1_k: int>)",
    ):
        assert shape_of(filtered(1, text)) == shape_of(filtered(2, text))
        renamed = text.replace("i1_k", "i2_k")
        assert shape_of(filtered(1, text)) != shape_of(filtered(2, renamed))


def test_a_unions_columns_go_by_their_ids() -> None:
    def union(first: ScanNode, second: ScanNode) -> UnionAll:
        return UnionAll((first, second))

    straight = union(
        ScanNode(0, (("u0", "k"), ("u1", "x"))), ScanNode(1, (("u0", "k"), ("u1", "x")))
    )
    crossed = union(
        ScanNode(0, (("u2", "k"), ("u3", "x"))), ScanNode(1, (("u3", "k"), ("u2", "x")))
    )
    like = union(ScanNode(0, (("u2", "k"), ("u3", "x"))), ScanNode(1, (("u2", "k"), ("u3", "x"))))
    assert shape_of(straight) == shape_of(like) != shape_of(crossed)


def windows(number: int, frame: str = "") -> WindowFunctions:
    call = WindowCall(f"w{number}", "row_number()", frame, "int", True)
    types = ((f"i{number}_k", "int"), (f"i{number}_x", "int"))
    return WindowFunctions(scan(number), (f"i{number}_k",), (f"i{number}_x ASC",), (call,), types)


def above(window: WindowFunctions) -> WindowFunctions:
    """A second window over a projection of a first one."""
    key, value, made = columns_of(window)
    below = ProjectNode(
        window,
        (
            NamedExpression(key, key),
            NamedExpression(made, made),
            NamedExpression(f"c{made}", f"{value} + 1"),
        ),
    )
    call = WindowCall(f"v{made}", f"sum(c{made})", "", "bigint", False)
    types = tuple((each.name, "int") for each in below.columns)
    return WindowFunctions(below, (key,), (), (call,), types)


@pytest.mark.parametrize(
    ("plans", "shared"),
    [
        ((windows(1), windows(2)), True),
        # A rule sees a filter and its window, or windows one on another, as one.
        ((FilterNode(windows(1), "(w1 = 1)"), FilterNode(windows(2), "(w2 = 2)")), False),
        ((FilterNode(windows(1), "(w1 = 1)"), FilterNode(windows(2), "(w2 = 1)")), True),
        ((above(windows(1)), windows(2)), False),
        ((above(windows(1)), above(windows(2))), True),
    ],
)
def test_windows_are_shared_with_what_is_looked_at_with_them(
    plans: tuple[Plan, Plan], shared: bool
) -> None:
    left, right = plans
    keys = columns_of(left)[0], columns_of(right)[0]
    root = ProjectNode(JoinNode(plans, (ColumnEquality(*keys),)), (NamedExpression("k", keys[0]),))
    assert bool(CommonSubplans(root).shared) == shared


def test_rows_as_they_are_need_no_sharing() -> None:
    plan = JoinNode((scan(1), scan(2)), (ColumnEquality("i1_k", "i2_k"),))
    root = ProjectNode(plan, (NamedExpression("k", "i1_k"),))
    common = CommonSubplans(root)
    assert common.root == root
    assert not common.shared


@pytest.mark.parametrize("make", [lambda: totals(1), lambda: DistinctNode(totals(1), ())])
def test_parts_of_a_common_part_are_not_looked_at_again(make: Callable[[], Plan]) -> None:
    """The largest common part counts, and stands in the plan as it is."""
    inner = make()
    union = UnionAll((inner, make(), make()))
    common = CommonSubplans(union)
    assert isinstance(common.root, UnionAll)
    first, second, third = common.root.inputs
    assert len(common.shared) == 1
    assert first == inner
    for other in (second, third):
        assert isinstance(other, ProjectNode)
        assert other.input is first


def test_a_filter_keeps_nothing_from_being_shared_but_over_a_window() -> None:
    left, right = FilterNode(totals(1), "(a1 > 1)"), FilterNode(totals(2), "(a2 > 2)")
    root = ProjectNode(
        JoinNode((left, right), (ColumnEquality("k1", "k2"),)), (NamedExpression("k", "k1"),)
    )
    common = CommonSubplans(root)
    assert len(common.shared) == 1


def over(number: int, below: Plan) -> WindowFunctions:
    key = columns_of(below)[0]
    call = WindowCall(f"w{number}", "row_number()", "", "int", True)
    return WindowFunctions(below, (key,), (), (call,), tuple((c, "int") for c in columns_of(below)))


@pytest.mark.parametrize("filtered", [False, True])
def test_what_a_window_is_over_is_shared(filtered: bool) -> None:
    window: Plan = over(1, totals(1))
    window = FilterNode(window, "(w1 = 1)") if filtered else over(3, window)
    plan = JoinNode((window, totals(2)), (ColumnEquality("k1", "k2"),))
    common = CommonSubplans(ProjectNode(plan, (NamedExpression("k", "k1"),)))
    assert len(common.shared) == 1
    projected = ProjectNode(
        over(1, totals(1)), (NamedExpression("k1", "k1"), NamedExpression("w1", "w1"))
    )
    chain = JoinNode((over(3, projected), totals(2)), (ColumnEquality("k1", "k2"),))
    assert len(CommonSubplans(ProjectNode(chain, (NamedExpression("k", "k1"),))).shared) == 1
    grouped = ProjectNode(totals(1), (NamedExpression("k1", "k1"), NamedExpression("w1", "a1")))
    single = JoinNode(
        (over(3, grouped), ProjectNode(totals(2), (NamedExpression("k2", "k2"),))),
        (ColumnEquality("k1", "k2"),),
    )
    assert len(CommonSubplans(ProjectNode(single, (NamedExpression("k", "k1"),))).shared) == 1
