"""Resolved plans: what they mean (SQLite as the judge), their shapes, and what is refused."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import view_corpus  # type: ignore[import-not-found]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.views.explain import explain_tree
from actors.model.plan.relational import (
    AggregationNode,
    DistinctNode,
    FilterNode,
    JoinNode,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    UnionAll,
    ViewPlan,
    WindowCall,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.relational_text import render
from actors.model.plan.relational_walk import inputs_of, nodes
from actors.model.plan.schema import TableSchema
from actors.testing.analysis import analyze
from actors.testing.oracle import differences, run_query
from actors.testing.parsed.build import build, probe_texts
from actors.testing.parsed.parse import read_tables
from actors.testing.parsed.resolve import resolve
from actors.testing.parsed.trees import UnsupportedConstruct, factored, reads, text, tree_of
from suite_lanes import examples  # type: ignore[import-not-found]
from tests.kit import tpch

TABLES: dict[str, TableSchema] = view_corpus.TABLES


def plan_of(sql: str, tables: dict[str, TableSchema] = TABLES) -> ViewPlan:
    tree, reason, inputs = read_tables(sql, tables)
    assert tree is not None, reason
    output = analyze(sql, {name: tables[name] for name in inputs})

    resolved = resolve(tree, inputs, tables)
    types = {text: analyze(text, tables) for text in probe_texts(resolved, inputs)}
    return ViewPlan(inputs, build(resolved, inputs, output, types), output)


@cache
def portable(name: str) -> ViewPlan:
    """The plan of a query of the corpus."""
    return plan_of(view_corpus.PORTABLE[name])


def tree_text(sql: str) -> list[str]:
    """The lines of the tree."""
    return explain_tree(plan_of(sql)).splitlines()


# What a plan means


def rows(schema: TableSchema) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    whole = st.integers(-1, 2)
    word = st.sampled_from("xpz")
    kinds = {"int": whole, "bigint": whole, "string": word}
    cells = [
        st.one_of(st.none(), kinds[column.type]) if column.nullable else kinds[column.type]
        for column in schema.columns
    ]
    return st.lists(st.tuples(*cells), max_size=5)


CONTENTS = st.fixed_dictionaries({name: rows(TABLES[name]) for name in ("a", "b", "c", "d")})


@pytest.mark.parametrize("name", view_corpus.PORTABLE)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
@given(contents=CONTENTS)
def test_the_plan_means_the_query(name: str, contents: dict[str, list[tuple[Any, ...]]]) -> None:
    sql = view_corpus.PORTABLE[name]
    plan = portable(name)
    tables = {name: (TABLES[name], Counter(contents[name])) for name in plan.inputs}
    expected = run_query(sql, tables, plan.output)
    written = render(plan.root, plan.inputs)
    assert differences(expected, run_query(written, tables, plan.output)) == [], written


# What every plan keeps to


def expressions(node: Plan) -> list[str]:
    """All texts over the columns of a node's inputs."""
    match node:
        case FilterNode():
            return [node.predicate]
        case ProjectNode():
            return [column.expression for column in node.columns]
        case JoinNode() | OuterJoin() | SemiJoin():
            sides = [side for e in node.equal for side in (e.left, e.right)]
            return sides + list(node.residual)
        case AggregationNode():
            found = [key.expression for key in node.keys]
            return found + [call.argument for call in node.calls if call.argument is not None]
        case DistinctNode():
            return [column.expression for column in node.columns]
        case _:
            return []


def check_types(node: Plan) -> None:
    match node:
        case AggregationNode():
            assert all(key.type for key in node.keys)
            assert all(call.type and call.argument_type for call in node.calls)
        case DistinctNode():
            assert all(column.type for column in node.columns)
            assert tuple(column.name for column in node.columns) == columns_of(node.input)
        case UnionAll():
            assert len({columns_of(each) for each in node.inputs}) == 1
            assert all(isinstance(each, ProjectNode) for each in node.inputs)


def check_joins(node: Plan) -> None:
    match node:
        case JoinNode():
            assert len(node.inputs) > 1
            assert not any(isinstance(each, JoinNode) for each in node.inputs)
            owner = {c: i for i, each in enumerate(node.inputs) for c in columns_of(each)}
            assert all(owner[e.left] != owner[e.right] for e in node.equal)
        case OuterJoin() | SemiJoin():
            left, right = set(columns_of(node.left)), set(columns_of(node.right))
            assert all(e.left in left and e.right in right for e in node.equal)
            assert not isinstance(node, OuterJoin) or node.kind in ("left", "full")


def check_made_once(plan: ViewPlan) -> None:
    """No two nodes make a column of the same id, but the inputs of a union."""
    made: Counter[str] = Counter()
    unions = set()
    for node in nodes(plan.root):
        match node:
            case ScanNode():
                made.update(columns_of(node))
            case ProjectNode():
                made.update(c.name for c in node.columns if c.name != c.expression)
            case AggregationNode():
                made.update(columns_of(node))
            case UnionAll():
                unions |= set(columns_of(node))
    made.subtract(column.name for column in plan.root.columns)
    assert [name for name, n in made.items() if n > 1 and name not in unions] == []


@pytest.mark.parametrize("name", view_corpus.PORTABLE)
def test_the_plan_is_well_formed(name: str) -> None:
    plan = portable(name)
    read: set[str] = set()
    for node in nodes(plan.root):
        known = {name for each in inputs_of(node) for name in columns_of(each)}
        mine = {name for written in expressions(node) for name in reads(written)}
        assert mine <= known, (node, mine - known)
        read |= mine
        check_types(node)
        check_joins(node)
    check_made_once(plan)
    scanned = {
        c for node in nodes(plan.root) if isinstance(node, ScanNode) for c in columns_of(node)
    }
    assert scanned <= read
    names = [column.name for column in plan.root.columns]
    assert names == list(plan.output.names)


# Shapes


def test_predicates_of_an_inner_join_go_to_the_input_they_read() -> None:
    sql = (
        "select a.g, b.w from a, b where a.k = b.k and a.v > 0 and b.w > a.v and b.c + 1 = a.k * 2"
    )
    assert tree_text(sql) == [
        "Project g = i0_g, w = i1_w",
        "  Join i0_k = i1_k and c1 = c0 where (i1_w > i0_v)",
        "    Project i0_k, i0_g, i0_v, c0 = i0_k * 2",
        "      Filter (i0_v > 0)",
        "        Scan a(i0_k = k, i0_g = g, i0_v = v)",
        "    Project i1_k, i1_w, c1 = i1_c + 1",
        "      Scan b(i1_k = k, i1_c = c, i1_w = w)",
    ]


def test_predicates_never_pass_a_null_padded_side() -> None:
    sql = "select a.g, b.w from a left join b on a.k = b.k and a.v > 1 and b.c > 2 "
    assert tree_text(sql + "where a.g = 'x' and b.w > 3 and b.w > a.v") == [
        "Project g = i0_g, w = i1_w",
        "  Filter (i1_w > 3) AND (i1_w > i0_v)",
        "    OuterJoin left i0_k = i1_k where (i0_v > 1)",
        "      Filter (i0_g = 'x')",
        "        Scan a(i0_k = k, i0_g = g, i0_v = v)",
        "      Filter (i1_c > 2)",
        "        Scan b(i1_k = k, i1_c = c, i1_w = w)",
    ]


def test_predicates_of_a_full_join_stay_where_they_are() -> None:
    found = tree_text(
        "select a.v, b.w from a full join b on a.k = b.k and a.v > 1 and b.w > 1 where a.g = 'x'"
    )
    assert found[1:3] == [
        "  Filter (i0_g = 'x')",
        "    OuterJoin full i0_k = i1_k where (i0_v > 1) AND (i1_w > 1)",
    ]
    assert not any("Filter" in line for line in found[3:])


def test_what_a_padded_side_computes_is_computed_below() -> None:
    found = tree_text(
        "select a.k, q.one from a left join (select k, 1 as one from b) q on a.k = q.k"
    )
    assert found[1:] == [
        "  OuterJoin left i0_k = i1_k",
        "    Scan a(i0_k = k)",
        "    Project i1_k, c0 = 1",
        "      Scan b(i1_k = k)",
    ]


def test_a_right_join_is_a_left_one_turned_around() -> None:
    found = tree_text("select a.v, b.w from a right join b on a.k = b.k and b.w > 0 and a.v > 0")
    assert found[1:] == [
        "  OuterJoin left i1_k = i0_k where (i1_w > 0)",
        "    Scan b(i1_k = k, i1_w = w)",
        "    Filter (i0_v > 0)",
        "      Scan a(i0_k = k, i0_v = v)",
    ]


def test_exists_and_in_are_semi_joins() -> None:
    sql = "select v from a where g = 'x' and not exists (select 1 from b where b.k = a.k "
    sql += "and b.w > a.v and b.c = 1 and a.v > 0) and k in (select c from c where name = 'p')"
    assert tree_text(sql) == [
        "Project v = i0_v",
        "  SemiJoin semi i0_k = i1_c",
        "    SemiJoin anti i0_k = i2_k where (i0_v > 0) AND (i2_w > i0_v)",
        "      Filter (i0_g = 'x')",
        "        Scan a(i0_k = k, i0_g = g, i0_v = v)",
        "      Filter (i2_c = 1)",
        "        Scan b(i2_k = k, i2_c = c, i2_w = w)",
        "    Filter (i1_name = 'p')",
        "      Scan c(i1_c = c, i1_name = name)",
    ]


def test_union_branches_are_cast_to_the_common_type_and_flat() -> None:
    sql = "select x from (select k as x, v from a union all select w, 1 from b union all "
    assert tree_text(sql + "select c, 2 from c) q") == [
        "Project x = u2",
        "  UnionAll",
        "    Project u2 = CAST(i1_k AS bigint)",
        "      Scan a(i1_k = k)",
        "    Project u2 = i2_w",
        "      Scan b(i2_w = w)",
        "    Project u2 = CAST(i0_c AS bigint)",
        "      Scan c(i0_c = c)",
    ]


def test_union_is_one_distinct_of_all_branches() -> None:
    found = tree_text("select distinct g from a union select name from c union select g from a")
    assert [line.strip().split()[0] for line in found].count("Distinct") == 1
    assert sum("Scan" in line for line in found) == 3


def test_having_is_a_filter_and_unused_calls_are_left_out() -> None:
    found = tree_text(
        "select s + 1 as s1 from (select g, sum(v) as s, avg(v) as m from a group by g "
        "having max(k) > 1) q"
    )
    assert found[1:3] == [
        "  Filter (a2 > 1)",
        "    Aggregate by (k0 = i0_g: string) a0 = sum(i0_v): bigint, a2 = max(i0_k): int "
        "[incremental, with a reserve]",
    ]


def test_a_global_aggregate_keeps_its_row() -> None:
    found = tree_text("select a.k from a cross join (select sum(w) as s from b) q")
    assert any("Aggregate by () a0 = sum" in line for line in found)


def test_a_table_expression_used_twice_has_columns_of_its_own() -> None:
    plan = plan_of(
        "with q as (select g, count(*) as n from a group by g) "
        "select x.n from q x join q y on x.g = y.g and x.n < y.n"
    )
    scans = [node for node in nodes(plan.root) if isinstance(node, ScanNode)]
    assert [scan.columns for scan in scans] == [(("i0_g", "g"),), (("i0b_g", "g"),)]


def test_the_argument_of_a_call_carries_what_spark_said() -> None:
    plan = plan_of("select count(id) as n, count(distinct x) as m, sum(t) as s from d")
    calls = next(node.calls for node in nodes(plan.root) if isinstance(node, AggregationNode))
    assert [(c.argument, c.argument_type, c.argument_nullable) for c in calls] == [
        (None, "bigint", False),
        ("i0_x", "int", False),
        ("i0_t", "string", True),
    ]
    assert [c.distinct for c in calls] == [False, True, False]


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("(a = b AND c) OR (b = a AND d)", ["a = b", "c OR d"]),
        ("(a AND b) OR a", ["a"]),
        ("((a AND b) OR (a AND c)) AND d", ["a", "b OR c", "d"]),
        ("(a AND (b OR c) AND d) OR (a AND (b OR c) AND e)", ["a", "b OR c", "d OR e"]),
        ("a OR b", ["a OR b"]),
    ],
)
def test_what_all_branches_share_is_pulled_out(written: str, parts: list[str]) -> None:
    assert [text(part) for part in factored(tree_of(written))] == parts


# What is refused


@pytest.mark.parametrize(("sql", "reason"), view_corpus.UNSUPPORTED.items())
def test_the_reason_names_the_construct(sql: str, reason: str) -> None:
    tree, _, inputs = read_tables(sql, TABLES)
    with pytest.raises(UnsupportedConstruct, match=reason.replace("(", r"\(")):
        resolve(tree, inputs, TABLES)
        plan_of(sql)


def test_a_name_without_meaning_is_not_guessed() -> None:
    tree, _, inputs = read_tables("select `count(1)` as n from (select count(*) from a) q", TABLES)
    with pytest.raises(UnsupportedConstruct, match="does not resolve"):
        resolve(tree, inputs, TABLES)


def test_tables_that_multiply_are_bounded() -> None:
    parts = ["q0 as (select k from a)"]
    parts += [
        f"q{n} as (select x.k from q{n - 1} x join q{n - 1} y on x.k = y.k)" for n in range(1, 9)
    ]
    tree, _, inputs = read_tables(f"with {', '.join(parts)} select k from q8", TABLES)
    with pytest.raises(UnsupportedConstruct, match="occurrences"):
        resolve(tree, inputs, TABLES)


# TPC-H


@pytest.mark.parametrize("name", tpch.QUERIES)
def test_tpch_resolves(name: str) -> None:
    plan = plan_of(tpch.QUERIES[name], tpch.SCHEMAS)
    for node in nodes(plan.root):
        check_types(node)
        check_joins(node)
        if isinstance(node, JoinNode):
            # Every input hangs on an equality.
            assert len(node.equal) >= len(node.inputs) - 1


def test_tpch_q19_joins_by_the_key_of_all_branches() -> None:
    lines = explain_tree(plan_of(tpch.QUERIES["q19"], tpch.SCHEMAS)).splitlines()
    assert lines[2].startswith("    Join i1_p_partkey = i0_l_partkey where (")
    assert "i0_l_shipmode IN ('AIR', 'AIR REG')" in lines[3]


@pytest.mark.parametrize("kept", [True, False])
def test_a_window_is_keyed_unless_its_first_rows_are_kept(kept: bool) -> None:
    scan = plan_of("select k, v from a").root
    key = columns_of(scan)[0]
    call = WindowCall("w", "row_number()", "", "int", True, "first")
    window = WindowFunctions(scan, (key,), (), (call,), tuple((c, "int") for c in columns_of(scan)))
    above = FilterNode(window, "(w <= 3)" if kept else "(w <> 3)")
    plan = msgspec.structs.replace(plan_of("select k from a"), root=above)
    text = "incremental, with a reserve" if kept else "keyed: touched partitions are recomputed"
    assert explain_tree(plan).splitlines()[1].endswith(f"[{text}]")
