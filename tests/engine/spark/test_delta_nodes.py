"""Every delta node on Spark against the model, on small random rows rich in NULLs."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Context, Decimal, localcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_model import Model, Updates, consolidated  # type: ignore[import-not-found]
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    ipc,
    job_id,
    table_of,
    updates,
)

from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    ConsolidateRows,
    DeltaPlan,
    ExpandRows,
    FilterRows,
    GenerateRows,
    HiddenState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    RecomputeRows,
    ReduceGroups,
    SelectColumns,
    UnionRows,
    WindowColumn,
    WindowLayer,
)
from actors.model.plan.jobs import (
    ForgetPlan,
    JobFailed,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RunStep,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc

pytestmark = pytest.mark.spark

LEFT = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("v", "int"), TableColumn("s", "string"))
)
RIGHT = TableSchema((TableColumn("k", "bigint"), TableColumn("w", "decimal(12,2)")))
LO, HI = 10, 20

LEFT_IN = SelectColumns(
    NamedInput("d0", ("k", "v", "s")),
    (NamedExpression("a_k", "k"), NamedExpression("a_v", "v"), NamedExpression("a_s", "s")),
)
LEFT_OLD = SelectColumns(
    NamedInput("s0", ("k", "v", "s")),
    (NamedExpression("a_k", "k"), NamedExpression("a_v", "v"), NamedExpression("a_s", "s")),
)
RIGHT_IN = SelectColumns(
    NamedInput("d1", ("k", "w")), (NamedExpression("b_k", "k"), NamedExpression("b_w", "w"))
)
RIGHT_OLD = SelectColumns(
    NamedInput("s1", ("k", "w")), (NamedExpression("b_k", "k"), NamedExpression("b_w", "w"))
)
MEASURES = (
    AdditiveMeasure("m_c", "count", "a_v", "bigint"),
    AdditiveMeasure("m_s", "sum", "a_v", "decimal(38,0)"),
)
HIDDEN = TableSchema(
    (
        TableColumn("g", "string"),
        TableColumn("n", "bigint"),
        TableColumn("m_c", "bigint"),
        TableColumn("m_s", "decimal(38,0)"),
    )
)
MEANINGS = {
    "a_v > 1": lambda row: None if row["a_v"] is None else row["a_v"] > 1,
    "a_v + 1": lambda row: None if row["a_v"] is None else row["a_v"] + 1,
    "upper(a_s)": lambda row: None if row["a_s"] is None else row["a_s"].upper(),
    "a_v < b_w": lambda row: (
        None if row["a_v"] is None or row["b_w"] is None else row["a_v"] < row["b_w"]
    ),
    "explode(array_compact(array(a_k, a_v)))": lambda row: [
        (value,) for value in (row["a_k"], row["a_v"]) if value is not None
    ],
    "row_number()": lambda rows: range(1, len(rows) + 1),
    "count(a_v)": lambda rows: [sum(row["a_v"] is not None for row in rows)] * len(rows),
}


def random_left(random_: random.Random, count: int, times: tuple[int, int]) -> list[Any]:
    return [
        (
            random_.choice([None, 1, 2, 3]),
            random_.choice([None, 0, 1, 2, 5]),
            random_.choice([None, "x", "X", "y"]),
            random_.randrange(*times),
            random_.choice([1, 1, 1, -1, 2, -3]),
        )
        for _ in range(count)
    ]


def random_right(random_: random.Random, count: int, times: tuple[int, int]) -> list[Any]:
    return [
        (
            random_.choice([None, 1, 2, 3]),
            random_.choice([None, Decimal("0.50"), Decimal("2.00")]),
            random_.randrange(*times),
            random_.choice([1, 1, -1]),
        )
        for _ in range(count)
    ]


def as_model(schema: TableSchema, rows: list[Any]) -> Updates:
    return [(dict(zip(schema.names, row[:-2], strict=True)), row[-2], row[-1]) for row in rows]


def rows_of(schema: TableSchema, rows: list[Any]) -> JobRows:
    return JobRows(schema, arrow=ipc(schema, rows))


def plan_of(
    *nodes: Node, hidden: tuple[HiddenState, ...] = (), output: TableSchema | None = None
) -> DeltaPlan:
    return DeltaPlan(
        inputs=("l", "r"),
        input_schemas=(LEFT, RIGHT),
        output=output or TableSchema(()),
        sql="",
        mode="incremental",
        reason="",
        strata=tuple(PlanStratum((), node, ()) for node in nodes),
        hidden=hidden,
    )


def from_table(table: Any) -> Updates:
    return [
        ({k: v for k, v in row.items() if k not in (TIME, DIFF)}, row[TIME], row[DIFF])
        for row in table.to_pylist()
    ]


class Lab:
    """Runs one plan on Spark and in the model."""

    def __init__(
        self, child: ChildProcess, *nodes: Node, hidden: TableSchema | None = None
    ) -> None:
        self.child = child
        self.nodes = nodes
        self.name = job_id()
        # The declared output is not what these plans make: only steps are of interest here.
        kept = () if hidden is None else (HiddenState(hidden, ()),)
        answer = child.ask(PreparePlan(job_id(), self.name, plan_of(*nodes, hidden=kept)))
        assert isinstance(answer, JobFailed)
        assert answer.code == "QueryRejected"

    def check(self, inputs: dict[str, tuple[TableSchema, list[Any]]], lo: int = LO) -> Updates:
        last = len(self.nodes) - 1
        given = {name: rows_of(schema, rows) for name, (schema, rows) in inputs.items()}
        step = RunStep(job_id(), self.name, 0, last, given, lo, HI)
        found = from_table(table_of(self.child.ask(step)))
        model_inputs = {name: as_model(schema, rows) for name, (schema, rows) in inputs.items()}
        model = Model(model_inputs, MEANINGS, lo, HI)
        for index, node in enumerate(self.nodes):
            model_inputs[f"r{index}"] = model.run(node)
        wanted = model_inputs[f"r{last}"]
        assert consolidated(found) == consolidated(wanted)
        if isinstance(self.nodes[-1], ConsolidateRows):
            assert len(found) == len(consolidated(found))
        return found


LINEAR = ConsolidateRows(
    UnionRows(
        (
            SelectColumns(
                FilterRows(LEFT_IN, "a_v > 1"),
                (NamedExpression("a_v", "a_v + 1"), NamedExpression("up", "upper(a_s)")),
            ),
            SelectColumns(
                LEFT_IN, (NamedExpression("up", "upper(a_s)"), NamedExpression("a_v", "a_v"))
            ),
        )
    )
)
JOIN = ConsolidateRows(
    UnionRows(
        (
            PairRows(LEFT_IN, UnionRows((RIGHT_OLD, RIGHT_IN)), (("a_k", "b_k"),), None),
            PairRows(LEFT_OLD, RIGHT_IN, (("a_k", "b_k"),), None),
        )
    )
)
RESIDUAL = PairRows(LEFT_IN, RIGHT_IN, (("a_k", "b_k"),), "a_v < b_w")
CROSS = PairRows(LEFT_IN, RIGHT_IN, (), None)
REDUCE = ReduceGroups(LEFT_IN, (NamedExpression("g", "upper(a_s)"),), MEASURES)
EXPAND = ExpandRows(LEFT_IN, "tag", 3)
GENERATE = GenerateRows(LEFT_IN, "explode(array_compact(array(a_k, a_v)))", False, ("e",))
PADDED = GenerateRows(LEFT_IN, "explode(array_compact(array(a_k, a_v)))", True, ("e",))
CALLS = (
    WindowColumn("place", "row_number()", ("a_v", "a_s", "a_k"), ""),
    WindowColumn("present", "count(a_v)", (), ""),
)
WINDOWS = ConsolidateRows(RecomputeRows(LEFT_OLD, LEFT_IN, ("a_k",), CALLS))
ISLANDS = WindowLayer(
    (
        NamedExpression("a_k", "a_k"),
        NamedExpression("a_v", "a_v"),
        NamedExpression("up", "upper(a_s)"),
        NamedExpression("place", "place"),
    ),
    ("a_k", "up"),
    (WindowColumn("again", "row_number()", ("a_v", "place"), ""),),
)
LAYERS = ConsolidateRows(RecomputeRows(LEFT_OLD, LEFT_IN, ("a_k",), CALLS, (ISLANDS,)))
ONE_WINDOW = ConsolidateRows(RecomputeRows(LEFT_OLD, LEFT_IN, (), CALLS))
HIDDEN_IN = NamedInput("h0", HIDDEN.names)
KEYED = AccumulateTotals(NamedInput("r0", HIDDEN.names), HIDDEN_IN, ("g",), ("m_c", "m_s"))
GLOBAL_NAMES = ("n", "m_c", "m_s")
GLOBAL = AccumulateTotals(
    ReduceGroups(LEFT_IN, (), MEASURES), NamedInput("h0", GLOBAL_NAMES), (), ("m_c", "m_s")
)
GLOBAL_HIDDEN = TableSchema(HIDDEN.columns[1:])


@pytest.mark.parametrize(
    "node",
    [
        LINEAR,
        JOIN,
        RESIDUAL,
        CROSS,
        REDUCE,
        EXPAND,
        GENERATE,
        PADDED,
        WINDOWS,
        LAYERS,
        ONE_WINDOW,
    ],
    ids=lambda n: type(n).__name__,
)
def test_nodes_equal_the_model(child: ChildProcess, node: Node) -> None:
    lab = Lab(child, node)
    made = []
    for seed in range(4):
        random_ = random.Random(seed)
        found = lab.check(
            {
                "d0": (LEFT, random_left(random_, 12, (LO, HI))),
                "s0": (LEFT, random_left(random_, 12, (0, LO))),
                "d1": (RIGHT, random_right(random_, 8 if seed else 0, (LO, HI))),
                "s1": (RIGHT, random_right(random_, 8, (0, LO))),
            }
        )
        made.append(len(found))
    assert min(made[1:]) > 0


def hidden_rows(random_: random.Random) -> list[Any]:
    return [
        (group, random_.randrange(1, 5), 2, Decimal(random_.randrange(9)), 3, 1)
        for group in (None, "X", "Y", "UNTOUCHED")
        if random_.random() < 0.7
    ]


@pytest.mark.parametrize("times", [(LO, HI), (14, 15)], ids=["many times", "one time"])
@pytest.mark.parametrize("lo", [0, LO])
def test_aggregate_in_two_strata(child: ChildProcess, lo: int, times: tuple[int, int]) -> None:
    lab = Lab(child, REDUCE, ConsolidateRows(KEYED), hidden=HIDDEN)
    groups = set()
    for seed in range(4):
        random_ = random.Random(seed)
        hidden = hidden_rows(random_) if lo else []
        left = random_left(random_, 15, times)
        found = lab.check({"d0": (LEFT, left), "h0": (HIDDEN, hidden)}, lo)
        groups |= {row["g"] for row, _, _ in found}
    assert groups == {None, "X", "Y"}


@pytest.mark.parametrize("times", [(LO, HI), (14, 15)], ids=["many times", "one time"])
def test_groups_come_and_go(child: ChildProcess, times: tuple[int, int]) -> None:
    """DISTINCT: only the first row of a group and the last one show."""
    names = ("g", "n")
    counts = TableSchema((TableColumn("g", "string"), TableColumn("n", "bigint")))
    rows = ReduceGroups(LEFT_IN, (NamedExpression("g", "upper(a_s)"),), ())
    flips = AccumulateTotals(
        NamedInput("r0", names), NamedInput("h0", names), ("g",), (), flips=True
    )
    lab = Lab(child, rows, flips, hidden=counts)
    diffs = set()
    for seed in range(4):
        random_ = random.Random(seed)
        there = [group for group in (None, "X", "Y") if random_.random() < 0.6]
        hidden = [(group, random_.randrange(1, 4), 3, 1) for group in there]
        found = lab.check({"d0": (LEFT, random_left(random_, 15, times)), "h0": (counts, hidden)})
        diffs |= {diff for _, _, diff in found}
    assert diffs - {0} == {1, -1}


def test_hidden_rows_may_be_history(child: ChildProcess) -> None:
    """Updates that add up to the group's row serve as well as the row itself."""
    lab = Lab(child, REDUCE, ConsolidateRows(KEYED), hidden=HIDDEN)
    hidden = [("X", 5, 2, Decimal(9), 3, 1), ("X", 5, 2, Decimal(9), 4, -1)]
    hidden.append(("X", 7, 3, Decimal(4), 4, 1))
    found = lab.check({"d0": (LEFT, [(1, 2, "x", 15, 1)]), "h0": (HIDDEN, hidden)})
    assert sorted((row["n"], diff) for row, _, diff in found) == [(7, -1), (8, 1)]


def test_strata_one_by_one_equal_both_at_once(child: ChildProcess) -> None:
    lab = Lab(child, REDUCE, ConsolidateRows(KEYED), hidden=HIDDEN)
    random_ = random.Random(5)
    left, hidden = random_left(random_, 15, (LO, HI)), hidden_rows(random_)
    inputs = {"d0": (LEFT, left), "h0": (HIDDEN, hidden)}
    whole = lab.check(inputs)
    first = RunStep(job_id(), lab.name, 0, 0, {"d0": rows_of(LEFT, left)}, LO, HI)
    made = table_of(child.ask(first))
    given = {"r0": JobRows(HIDDEN, arrow=to_ipc(made)), "h0": rows_of(HIDDEN, hidden)}
    second = table_of(child.ask(RunStep(job_id(), lab.name, 1, 1, given, LO, HI)))
    assert consolidated(from_table(second)) == consolidated(whole)


def test_global_aggregate(child: ChildProcess) -> None:
    lab = Lab(child, ConsolidateRows(GLOBAL), hidden=GLOBAL_HIDDEN)
    for seed in range(3):
        random_ = random.Random(seed)
        left = random_left(random_, 6, (LO, HI))
        lab.check({"d0": (LEFT, left)}, 0)
        for rows in (left, random_left(random_, 6, (14, 15))):
            lab.check({"d0": (LEFT, rows), "h0": (GLOBAL_HIDDEN, [(0, 0, Decimal(0), 3, 1)])})
    # All rows leave: the row of the empty aggregate stays.
    found = lab.check(
        {"d0": (LEFT, [(1, 2, "x", 12, -1)]), "h0": (GLOBAL_HIDDEN, [(1, 1, Decimal(2), 3, 1)])}
    )
    assert [(row["n"], time, diff) for row, time, diff in found if diff > 0] == [(0, 12, 1)]


def test_global_aggregate_of_nothing_has_a_row_from_hydration_on(child: ChildProcess) -> None:
    lab = Lab(child, ConsolidateRows(GLOBAL), hidden=GLOBAL_HIDDEN)
    empty = {"n": 0, "m_c": 0, "m_s": Decimal(0)}
    assert lab.check({}, 0) == [(empty, HI - 1, 1)]
    assert lab.check({"h0": (GLOBAL_HIDDEN, [(0, 0, Decimal(0), 3, 1)])}) == []


def test_a_large_step_equals_the_small_one(child: ChildProcess, tmp_path: Path) -> None:
    """The same rows as inline Arrow and as (large) Parquet files with more than is wanted."""
    random_ = random.Random(3)
    wanted = random_left(random_, 15, (LO, HI))
    others = random_left(random_, 15, (0, LO)) + random_left(random_, 5, (HI, HI + 5))
    right = random_right(random_, 8, (0, LO))
    lab = Lab(child, JOIN)
    small = lab.check({"d0": (LEFT, wanted), "s1": (RIGHT, right)})
    path = tmp_path / "part.parquet"
    pq.write_table(updates(LEFT, wanted + others), path)
    padding = tmp_path / "padding.parquet"  # makes the parts too large to be read by the child
    noise = [(7, n, random_.randbytes(60).hex(), HI + 1, 1) for n in range(60_000)]
    pq.write_table(updates(LEFT, noise), padding, compression="none", use_dictionary=False)
    for files in ((str(path),), (str(path), str(padding))):
        given = {
            "d0": JobRows(LEFT, files=files, lower=LO, upper=HI),
            "s1": rows_of(RIGHT, right),
        }
        found = table_of(child.ask(RunStep(job_id(), lab.name, 0, 0, given, LO, HI)))
        assert consolidated(from_table(found)) == consolidated(small)


def test_advance_and_error_rows(child: ChildProcess, tmp_path: Path) -> None:
    lab = Lab(child, ConsolidateRows(LEFT_IN))
    table = updates(LEFT, [(1, 1, "x", 3, 1), (1, 1, "x", 5, 1), (2, 2, "y", 12, 1)])
    table = table.append_column("__error", pa.array([None, None, "bad"], pa.string()))
    path = tmp_path / "part.parquet"
    pq.write_table(table, path)
    rows = JobRows(LEFT, files=(str(path),), lower=0, upper=HI, advance_to=11)
    found = from_table(table_of(child.ask(RunStep(job_id(), lab.name, 0, 0, {"d0": rows}, LO, HI))))
    assert found == [({"a_k": 1, "a_v": 1, "a_s": "x"}, 11, 2)]


def test_decimals_keep_their_digits_under_any_weight(child: ChildProcess) -> None:
    wide = TableSchema((TableColumn("k", "bigint"), TableColumn("w", "decimal(38,18)")))
    node = ReduceGroups(
        SelectColumns(NamedInput("d1", ("k", "w")), (NamedExpression("b_w", "w"),)),
        (),
        (AdditiveMeasure("m", "sum", "b_w", "decimal(38,18)"),),
    )
    plan = DeltaPlan(("r", "w"), (RIGHT, wide), TableSchema(()), "", "incremental", "",
                     (PlanStratum((), node, ()),))  # fmt: skip
    name = job_id()
    child.ask(PreparePlan(job_id(), name, plan))
    values = [Decimal("1.000000000000000001"), Decimal("-7.123456789012345678")]
    values.append(Decimal("12345678901234567.000000000000000003"))
    rows = [(1, value, 11, diff) for value in values for diff in (3, -1, 5, 1)]
    step = RunStep(job_id(), name, 0, 0, {"d1": rows_of(wide, rows)}, LO, HI)
    with localcontext(Context(prec=60)):
        wanted = sum(value * 8 for value in values)
    assert table_of(child.ask(step)).to_pylist()[0]["m"] == wanted


def test_rows_keep_their_bits(child: ChildProcess) -> None:
    floats = TableSchema((TableColumn("k", "bigint"), TableColumn("w", "double")))
    node = ConsolidateRows(NamedInput("d1", ("w",)))
    for root in (node, FilterRows(node, "true")):  # consolidated in Arrow, and by Spark
        plan = DeltaPlan(("r", "w"), (RIGHT, floats), TableSchema(()), "", "incremental", "",
                         (PlanStratum((), root, ()),))  # fmt: skip
        name = job_id()
        child.ask(PreparePlan(job_id(), name, plan))
        rows: list[Any] = [(1, -0.0, 11, 1), (1, 0.0, 11, -1), (1, float("nan"), 11, 1)]
        rows += [(1, float("nan"), 11, 1), (1, None, 11, 1)]
        step = RunStep(job_id(), name, 0, 0, {"d1": rows_of(floats, rows)}, LO, HI)
        found = table_of(child.ask(step)).to_pylist()
        assert sorted((str(row["w"]), row[DIFF]) for row in found) == [
            ("-0.0", 1), ("0.0", -1), ("None", 1), ("nan", 2),
        ]  # fmt: skip


def test_every_storable_type_passes_through(child: ChildProcess) -> None:
    kinds = {
        "a": ("boolean", True),
        "b": ("tinyint", 1),
        "c": ("smallint", 2),
        "d": ("float", 1.5),
        "e": ("binary", b"\x00\xff"),
        "f": ("date", dt.date(2013, 1, 1)),
        "g": ("timestamp", dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)),
        "h0": ("timestamp_ntz", dt.datetime(2013, 1, 1, 5)),  # noqa: DTZ001 - it has no zone
        "i": ("array<string>", ["x", None]),
        "j": ("struct<x:int,y:string>", {"x": 1, "y": None}),
        "k": ("map<string,int>", [("x", 1)]),
        "l": ("varchar(9)", "text"),
    }
    schema = TableSchema(tuple(TableColumn(name, kind) for name, (kind, _) in kinds.items()))
    node = ConsolidateRows(NamedInput("d0", schema.names))
    plan = DeltaPlan(("t",), (schema,), schema, "", "incremental", "", (PlanStratum((), node, ()),))
    name = job_id()
    answer = child.ask(PreparePlan(job_id(), name, plan))
    assert isinstance(answer, PlanPrepared), answer
    row = tuple(value for _, value in kinds.values())
    nulls = tuple(None for _ in kinds)
    given = updates(schema, [(*row, 11, 1), (*row, 11, 1), (*nulls, 12, 1)])
    step = RunStep(job_id(), name, 0, 0, {"d0": JobRows(schema, arrow=to_ipc(given))}, LO, HI)
    found = table_of(child.ask(step))
    assert found.schema.equals(schema.arrow_updates())
    assert sorted(found.to_pylist(), key=lambda r: r[TIME]) == [
        {**{n: v for n, (_, v) in kinds.items()}, TIME: 11, DIFF: 2},
        {**dict.fromkeys(kinds), TIME: 12, DIFF: 1},
    ]


def test_forgotten_and_unknown_plans(child: ChildProcess) -> None:
    lab = Lab(child, RESIDUAL)
    child.send(ForgetPlan(job_id(), lab.name))
    answer = child.ask(RunStep(job_id(), lab.name, 0, 0, {}, LO, HI))
    assert (answer.code, lab.name in answer.text) == ("UnknownObject", True)
