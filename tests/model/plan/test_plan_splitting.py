"""Strata divided and cut into pieces: the same rows, smaller plans. Without Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import (
    DeltaPlan,
    FilterRows,
    NamedInput,
    Node,
    PairRows,
    SelectColumns,
    UnionRows,
    columns_of,
)
from actors.model.plan.plan_splitting import children, divide_strata, nodes, split_statements
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import PenstockError
from actors.testing.analysis import analyze_in_memory
from actors.testing.nodes import NodeRelation, NodeRunner, consolidated
from actors.testing.nodes import Update as Row
from actors.testing.view_scripts import parse_script, random_value
from tests.kit.fuzz import make_case

D0 = NamedInput("d0", ("k",))


def wide(node: Node, steps: int = 5) -> Node:
    for step in range(steps):
        node = FilterRows(node, f"k <> {step}")
    return node


def doubled(node: Node) -> Node:
    """Both sides of a join the same."""
    other = SelectColumns(node, (NamedExpression("j", "k"),))
    return SelectColumns(PairRows(node, other, (("k", "j"),)), (NamedExpression("k", "k"),))


def test_what_occurs_twice_is_a_stratum_of_its_own() -> None:
    made, places = divide_strata([doubled(wide(D0)), wide(NamedInput("r0", ("k",)), 1)])
    assert made == (wide(D0), doubled(NamedInput("r0", ("k",))), wide(NamedInput("r1", ("k",)), 1))
    assert places == (1, 2)


def test_little_that_occurs_twice_stays_where_it_is() -> None:
    small = doubled(wide(D0, 1))
    assert divide_strata([small]) == ((small,), (0,))


def test_terms_without_rows_count_nothing() -> None:
    node = UnionRows((wide(D0), wide(NamedInput("d1", ("k",)))))
    assert nodes(node, {"d0": 1}) == 6
    assert nodes(node, {"d0": 1, "d1": 1}) == 12
    assert nodes(PairRows(D0, wide(NamedInput("d1", ("k",))), ()), {"d0": 1}) == 0


def test_a_plan_that_doubles_with_each_stratum_is_cut() -> None:
    inputs_ = [wide(D0), *(NamedInput(f"r{index}", ("k",)) for index in range(7))]
    strata = tuple(map(doubled, inputs_))
    assert split_statements(strata, 0, 7, {"d0"}, 10_000) == [tuple(range(8))]
    found = split_statements(strata, 0, 7, {"d0"}, 60)
    assert [piece[-1] for piece in found] == sorted({piece[-1] for piece in found})
    assert found[-1][-1] == 7
    assert len(found) > 1
    assert sorted(index for piece in found for index in piece) == list(range(8))


@pytest.mark.parametrize(("size", "alone"), [(23, True), (22, False)])
def test_what_several_pieces_would_compute_is_one(size: int, alone: bool) -> None:
    """Stratum 2 is run by itself, for the last one is too large: both would compute stratum 0, and
    do where it is a small part of what a statement may have."""
    base = NamedInput("r0", ("k",))
    strata = (
        wide(D0, size - 1),
        *(
            SelectColumns(wide(base, 50), (NamedExpression("k", f"k + {number}"),))
            for number in range(2)
        ),
        UnionRows((NamedInput("r1", ("k",)), NamedInput("r2", ("k",)))),
    )
    shared = [(0,), (2,), (1, 3)] if alone else [(0, 2), (0, 1, 3)]
    assert split_statements(strata, 0, 3, {"d0"}, 90) == shared


def test_a_node_of_many_columns_counts_as_several() -> None:
    narrow, broad = (
        SelectColumns(D0, tuple(NamedExpression(f"c{number}", "k") for number in range(count)))
        for count in (31, 64)
    )
    assert (nodes(narrow, {"d0": 1}), nodes(broad, {"d0": 1})) == (2, 5)
    strata = (broad, FilterRows(NamedInput("r0", columns_of(broad)), "c0 > 1"))
    assert split_statements(strata, 0, 1, {"d0"}, 5) == [(0,), (1,)]


def rows(
    schema: TableSchema, pick: random.Random, times: Sequence[int], *, state: bool
) -> NodeRelation:
    kinds = tuple((column.name, column.type) for column in schema.columns)
    found: list[Row] = []
    for _ in range(pick.randint(0, 6)):
        values = tuple(random_value(kind, pick) for _, kind in kinds)
        found.append((values, pick.choice(times), 1 if state else pick.choice((1, 1, -1))))
    return NodeRelation(kinds, found)


def inputs(plan: DeltaPlan, pick: random.Random) -> dict[str, NodeRelation]:
    found: dict[str, NodeRelation] = {}
    for index, schema in enumerate(plan.input_schemas):
        found[f"d{index}"] = rows(schema, pick, (5, 6, 7), state=False)
        found[f"s{index}"] = rows(schema, pick, (4,), state=True)
    for index, hidden in enumerate(plan.hidden):
        found[f"h{index}"] = rows(hidden.schema, pick, (4,), state=True)
    for index, covered in enumerate(plan.covered):
        found[f"k{index}"] = found[f"d{covered.input_index}"]
    return found


def in_order(strata: Sequence[Node], given: Mapping[str, NodeRelation]) -> list[Row]:
    runner = NodeRunner(given, 5, 8)
    for index, node in enumerate(strata):
        runner.inputs[f"r{index}"] = runner.run(node)
    return sorted(consolidated(runner.inputs[f"r{len(strata) - 1}"].updates), key=repr)


def in_pieces(
    strata: tuple[Node, ...], given: Mapping[str, NodeRelation], nodes_max: int
) -> list[Row]:
    filled = {name for name, relation in given.items() if relation.updates}
    known = dict(given)
    for piece in split_statements(strata, 0, len(strata) - 1, filled, nodes_max):
        runner = NodeRunner(known, 5, 8)
        for index in piece:
            runner.inputs[f"r{index}"] = runner.run(strata[index])
        known[f"r{piece[-1]}"] = runner.inputs[f"r{piece[-1]}"]
    return sorted(consolidated(known[f"r{len(strata) - 1}"].updates), key=repr)


async def plans(seed: int, scripts: int) -> list[DeltaPlan]:
    found: list[DeltaPlan] = []
    for number in range(scripts):
        case = make_case(seed, number)
        tables = dict(parse_script(case.text()).tables)
        for name, sql in case.views:
            plan = await compile_view(sql, tables, analyze_in_memory)
            tables[name] = plan.output
            found += [plan] if plan.strata else []
    return found


def all_nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from all_nodes(child)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("seed", range(3))
async def test_divided_and_cut_strata_make_the_same_rows(seed: int) -> None:
    pick = random.Random(seed)
    compared = fewer = 0
    for plan in await plans(seed, 12):
        given = inputs(plan, pick)
        strata = [stratum.node for stratum in plan.strata]
        made, places = divide_strata(strata)
        assert places[-1] == len(made) - 1
        written = sum(len(list(all_nodes(node))) for node in strata)
        fewer += sum(len(list(all_nodes(node))) for node in made) < written
        try:
            wanted = in_order(strata, given)
        except PenstockError:
            continue  # rows at random may be what no expression bears
        assert in_order(made, given) == wanted
        for nodes_max in (1, 20, 60):
            assert in_pieces(made, given, nodes_max) == wanted
        compared += 1
    assert compared > 20
    assert fewer > 10
