"""What becomes of windows, limits, expansions and generators: the plan of their changes."""

from __future__ import annotations

import msgspec
import pytest

from actors.engine.views.compile import compile_view
from actors.engine.views.delta import derive
from actors.engine.views.explain import explain
from actors.engine.views.operators import DerivationContext
from actors.engine.views.rule_linear import ProjectOperator, ScanOperator
from actors.engine.views.rule_stored_rows import StoredRowsOperator
from actors.engine.views.rule_window import WindowOperator
from actors.model.plan.delta import ConsolidateRows, RecomputeRows, WindowColumn
from actors.model.plan.jobs import QueryAnalyzed, QueryTranslation
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    ExpandNode,
    GenerateNode,
    GroupKey,
    JoinNode,
    LimitNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    ValuesNode,
    ViewPlan,
    WindowCall,
    WindowFunctions,
)
from actors.model.plan.schema import TableColumn, TableSchema

KEYED = TableSchema(
    (TableColumn("k", "int"), TableColumn("x", "int"), TableColumn("l", "array<int>")), ("k", "x")
)
SCAN = ScanNode(0, (("i0_k", "k"), ("i0_x", "x"), ("i0_l", "l")))
PAIRS = ScanNode(0, (("i0_k", "k"), ("i0_x", "x")))
TYPES = (("i0_k", "int"), ("i0_x", "int"))


async def changes_of(plan: Plan, *columns: str) -> tuple[str, list[str]]:
    """The mode, and the nodes of all strata as `explain` tells them."""
    output = TableSchema(tuple(TableColumn(name, "int") for name in columns))
    root = ProjectNode(plan, tuple(NamedExpression(name, name) for name in columns))

    async def answer(*_: object, **__: object) -> QueryAnalyzed:
        return QueryAnalyzed("a", output, ("t",), translation=QueryTranslation(root))

    made = await compile_view("select 1 from t", {"t": KEYED}, answer)
    lines = explain(made).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("stratum 0"))
    return made.mode, lines[start:]


def ranks(keys: tuple[str, ...], *, by_row: bool) -> WindowFunctions:
    call = WindowCall("w0", "rank()", "", "int", by_row)
    return WindowFunctions(PAIRS, keys, ("i0_x DESC",), (call,), TYPES)


async def test_state_lookups_partitions_are_read_by_their_keys_and_computed_afresh() -> None:
    mode, lines = await changes_of(ranks(("i0_k",), by_row=False), "i0_k", "w0")
    assert mode == "keyed"
    assert "  lookup s0 of t by (k) from d0(k)" in lines
    assert any("RecomputeRows by (i0_k) w0 = rank()" in line for line in lines)


async def test_partitions_that_nothing_leads_to_are_kept_in_a_hidden_state() -> None:
    """A computed key cannot be sought in the table."""
    computed = (NamedExpression("c0", "i0_k % 2"), NamedExpression("i0_x", "i0_x"))
    call = WindowCall("w0", "rank()", "", "int", by_row=False)
    types = (("c0", "int"), ("i0_x", "int"))
    plan = WindowFunctions(ProjectNode(PAIRS, computed), ("c0",), ("i0_x",), (call,), types)
    mode, lines = await changes_of(plan, "c0", "w0")
    assert mode == "keyed"
    assert any("lookup h0 by (c0) from " in line for line in lines)
    assert not any("lookup s0" in line for line in lines)


@pytest.mark.parametrize("order", [(), ("i0_x DESC",)])
async def test_a_window_keeps_its_frame_and_gets_an_order_of_all_columns(
    order: tuple[str, ...],
) -> None:
    """A frame of ROWS without an order is not the whole partition."""
    frame = "ROWS BETWEEN 1 PRECEDING AND CURRENT ROW"
    call = WindowCall("w0", "count(1)", frame, "bigint", by_row=True)
    plan = WindowFunctions(PAIRS, ("i0_k",), order, (call,), TYPES)
    context = DerivationContext((KEYED,))
    made = WindowOperator(context, plan, ScanOperator(context, PAIRS)).delta()
    assert isinstance(made, ConsolidateRows)
    assert isinstance(made.input, RecomputeRows)
    assert made.input.calls == (WindowColumn("w0", "count(1)", (*order, "i0_x"), frame),)


async def test_one_partition_of_all_rows_is_read_whole() -> None:
    mode, lines = await changes_of(ranks((), by_row=False), "w0")
    assert mode == "opaque"
    assert "  lookup s0 of t: whole state" in lines


@pytest.mark.parametrize(
    ("count", "offset", "test"),
    [(3, 0, "rank <= 3"), (3, 2, "rank > 2 AND "), (None, 2, "rank > 2"), (0, 0, "rank <= 0")],
)
async def test_a_limit_is_the_filter_of_a_row_number(
    count: int | None, offset: int, test: str
) -> None:
    _, lines = await changes_of(LimitNode(PAIRS, ("i0_x",), count, offset, TYPES), "i0_x")
    (where,) = (line for line in lines if "Where" in line and "rank" in line)
    assert test in where
    assert any("RecomputeRows by () " in line and "row_number()" in line for line in lines)


async def test_a_limit_of_groups_beside_groups_reads_none_of_them_whole() -> None:
    """All rows are sought where there is a shortage alone, those without a match among them."""
    left = AggregationNode(
        PAIRS,
        (GroupKey("k0", "i0_k", "int"),),
        (AggregateCall("a0", "count", None, "bigint", ""),),
        True,
    )
    other = ScanNode(0, (("i0b_k", "k"), ("i0b_x", "x")))
    right = AggregationNode(
        other,
        (GroupKey("k1", "i0b_x", "int"),),
        (AggregateCall("a1", "count", None, "bigint", ""),),
        True,
    )
    types = (("k0", "int"), ("a0", "bigint"), ("k1", "int"), ("a1", "bigint"))
    joined = OuterJoin(left, right, "left", (ColumnEquality("k0", "k1"),), (), types)
    mode, lines = await changes_of(LimitNode(joined, ("k0",), 3, 0, types), "k0", "a1")
    assert mode == "incremental", lines


async def test_an_expansion_is_one_row_for_each_grouping_set() -> None:
    """Expressions that all sets share are not told apart by the tag."""
    columns = (
        GroupKey("e0", "e0", "int"),
        GroupKey("e1", "e1", "int"),
        GroupKey("e2", "e2", "bigint"),
    )
    rows = (("i0_k", "i0_x", "0L"), ("CAST(NULL AS int)", "i0_x", "1L"))
    grouped = AggregationNode(
        ExpandNode(PAIRS, columns, rows),
        (GroupKey("k0", "e0", "int"), GroupKey("k1", "e2", "bigint")),
        (AggregateCall("a0", "sum", "e1", "bigint", "int"),),
        True,
    )
    mode, lines = await changes_of(grouped, "k0", "a0")
    assert mode == "incremental"
    (expand,) = (place for place, line in enumerate(lines) if "Expand" in line)
    assert "below 2" in lines[expand]
    select = lines[expand - 1]
    assert "WHEN 0 THEN i0_k WHEN 1 THEN CAST(NULL AS int) END AS int)" in select
    assert "e1 = i0_x" in select


@pytest.mark.parametrize("outer", [False, True])
async def test_a_generator_is_applied_to_the_changes_alone(outer: bool) -> None:
    made = GenerateNode(SCAN, "explode(i0_l)", outer, (GroupKey("g0", "g0", "int"),))
    mode, lines = await changes_of(made, "i0_k", "g0")
    assert mode == "incremental"
    assert not any("lookup" in line for line in lines)
    word = "outer " if outer else ""
    assert any(line.strip() == f"Generate {word}explode(i0_l)" for line in lines)


def test_a_key_is_what_decides_over_a_match() -> None:
    other = ScanNode(0, (("i0b_k", "k"), ("i0b_x", "x")))
    wide = ScanNode(0, (("i0_k", "k"), ("i0_x", "x"), ("i0_l", "l")))
    plan = SemiJoin(
        wide,
        other,
        anti=True,
        equal=(ColumnEquality("i0_k", "i0b_k"),),
        residual=("(i0_x <> i0b_x)",),
        types=(*TYPES, ("i0_l", "array<int>"), ("i0b_k", "int"), ("i0b_x", "int")),
    )
    made = derive(
        ViewPlan(("t",), ProjectNode(plan, (NamedExpression("k", "i0_k"),)), KEYED), (KEYED,)
    )
    assert [len(state.keys) for state in made.hidden] == [2]
    assert made.mode == "incremental"


def test_rows_that_never_change_are_asked_for_once_and_ask_for_nothing() -> None:
    values = ValuesNode(
        (GroupKey("v0", "v0", "int"),), "VALUES (1)", "inline(array(named_struct('c', 1)))"
    )
    plan = JoinNode((PAIRS, values), (ColumnEquality("i0_k", "v0"),))
    made = derive(
        ViewPlan(("t",), ProjectNode(plan, (NamedExpression("k", "i0_k"),)), KEYED), (KEYED,)
    )
    assert made.mode == "incremental"
    assert [stratum.lookups for stratum in made.strata] == [()]


def test_what_cannot_be_sought_is_kept() -> None:
    grouped = AggregationNode(
        PAIRS,
        (GroupKey("k0", "i0_k", "int"),),
        (AggregateCall("a0", "max", "i0_x", "int", "int"),),
    )
    other = ScanNode(0, (("i0b_k", "k"), ("i0b_x", "x")))
    types = (("k0", "int"), ("a0", "int"), ("i0b_k", "int"), ("i0b_x", "int"))
    plan = JoinNode((grouped, other), (ColumnEquality("a0", "i0b_x"),), (), types)
    root = ProjectNode(plan, (NamedExpression("k", "k0"),))
    made = derive(ViewPlan(("t",), root, KEYED), (KEYED,))
    assert made.mode == "incremental"
    assert ("k0", "a0") in [state.keys for state in made.hidden]
    # Without types nothing can be kept: all groups are read.
    bare = msgspec.structs.replace(plan, types=())
    root = ProjectNode(bare, (NamedExpression("k", "k0"),))
    assert derive(ViewPlan(("t",), root, KEYED), (KEYED,)).mode == "opaque"


def test_floats_are_kept_as_text_and_not_sought() -> None:
    context = DerivationContext(
        (TableSchema((TableColumn("k", "int"), TableColumn("f", "double"))),)
    )
    below = ScanOperator(context, ScanNode(0, (("i0_k", "k"), ("i0_f", "f"))))
    kept = StoredRowsOperator(context, below, {"i0_k": "int", "i0_f": "double"})
    assert kept.seekable(("i0_k",))
    assert not kept.seekable(("i0_f",))
    kept.delta()
    hidden, _ = context.hidden[0]
    assert [column.type for column in hidden.schema.columns] == ["int", "string", "bigint"]


async def test_the_greatest_value_of_all_rows_is_that_of_a_first_row() -> None:
    call = AggregateCall("a0", "max", "i0_x", "int", "int")
    mode, lines = await changes_of(AggregationNode(PAIRS, (), (call,)), "a0")
    assert mode == "incremental"
    assert any("TopCandidates" in line for line in lines)


def single_rows(count: int) -> Plan:
    """Sums of all rows beside one another, and beside the rows."""
    sums = tuple(
        AggregationNode(PAIRS, (), (AggregateCall(f"a{n}", "sum", f"i0_x * {n}", "bigint", "int"),))
        for n in range(count)
    )
    types = (*TYPES, *((f"a{n}", "bigint") for n in range(count)))
    return JoinNode(
        (*sums, PAIRS),
        (ColumnEquality("i0_k", "a0", False), ColumnEquality("a1", "a2", True)),
        (),
        types,
    )


async def test_single_rows_beside_one_another_are_one_input() -> None:
    """A join of nine inputs has nine terms of nine: the plan grows with their number alone."""
    mode, few = await changes_of(single_rows(4), "i0_k", "a3")
    assert mode == "incremental"
    assert any("Where (a1 <=> a2)" in line for line in few), few
    assert any("rows = 4" in line for line in few)
    _, many = await changes_of(single_rows(8), "i0_k", "a3")
    assert len(many) < 2 * len(few)


def test_an_origin_that_nobody_looks_up_leads_nowhere() -> None:
    """A constant never changes, so no row of the table is looked up for its sake; that the table
    is looked up for another's sake gives it none either."""
    one = ValuesNode((), "", "")
    words = ValuesNode((GroupKey("v0", "v0", "int"),), "VALUES (1)", "inline(array(struct(1)))")
    inner = SemiJoin(PAIRS, one, False, (), (), TYPES)
    plan = SemiJoin(
        inner, words, False, (ColumnEquality("i0_x", "v0"),), (), (*TYPES, ("v0", "int"))
    )
    root = ProjectNode(plan, (NamedExpression("k", "i0_k"),))
    made = derive(ViewPlan(("t",), root, TableSchema((TableColumn("k", "int"),))), (KEYED,))
    looked_up: set[str] = set()
    for lookup in (each for stratum in made.strata for each in stratum.lookups):
        unknown = {name for name, _ in lookup.origins if name[0] in "sh"} - looked_up
        assert not unknown, f"{lookup.target} by rows of {unknown}"
        looked_up.add(lookup.target)
    assert {"s0", "h0"} <= looked_up


@pytest.mark.parametrize("kind", ["string", "decimal(8,2)", "decimal(8, 2)"])
def test_a_null_of_any_type_is_sought_as_null(kind: str) -> None:
    context = DerivationContext((KEYED,))
    made = (
        NamedExpression("n", f"CAST(NULL AS {kind})"),
        NamedExpression("k", "i0_k"),
        NamedExpression("c", "CAST(NULL AS int) + 1"),
    )
    rows = ProjectOperator(context, made, ScanOperator(context, PAIRS))
    rows.delta()
    assert rows.delta_origins(("k", "n")) == (("d0", ("k", "")),)
    assert rows.delta_origins(("c",)) is None
