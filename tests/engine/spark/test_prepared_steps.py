"""Prepared steps: never stale, and what is refused is right all the same."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import prepared_lab  # type: ignore[import-not-found]
import pytest
from delta_model import Model, Updates, consolidated  # type: ignore[import-not-found]
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    ipc,
    job_id,
    table_of,
)

import actors
from actors.engine.spark.java import JavaHome
from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    ConsolidateRows,
    DeltaPlan,
    ExpandRows,
    FilterRows,
    GenerateRows,
    HiddenState,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    RecomputeGroups,
    ReduceGroups,
    SelectColumns,
    SparkCall,
    UnionRows,
    WeighRows,
)
from actors.model.plan.jobs import (
    CancelChildJob,
    ForgetPlan,
    JobFailed,
    JobRows,
    LikelyRun,
    PlanPrepared,
    PreparePlan,
    RehearseSteps,
    RowsDone,
    RunStep,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives
from actors.testing.patience import PROGRAM_S
from suite_lanes import examples  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

FACTS = TableSchema((TableColumn("k", "bigint"), TableColumn("K", "int"), TableColumn("v", "int")))
NAMES = TableSchema((TableColumn("k", "bigint"), TableColumn("n n", "string")))
GROUPS = TableSchema((TableColumn("j", "int"), TableColumn("g", "string")))
SCHEMAS = {"d0": FACTS, "s0": FACTS, "d1": NAMES, "s1": NAMES, "d2": GROUPS, "s2": GROUPS}
HIDDEN = TableSchema(
    (TableColumn("g", "string"), TableColumn("n", "bigint"), TableColumn("m", "decimal(38,0)"))
)
SOURCES = (FACTS, NAMES, GROUPS)
CONF = (("spark.sql.caseSensitive", "true"),)
LO, HI = 10, 20
STEPS = max(8, examples(20))
MEANINGS = {
    "a_v > 2": lambda row: None if row["a_v"] is None else row["a_v"] > 2,
    "a_v + 1": lambda row: None if row["a_v"] is None else row["a_v"] + 1,
}


def facts(name: str, prefix: str) -> SelectColumns:
    """The facts without the column that differs from another by its case alone."""
    return SelectColumns(
        NamedInput(name, ("k", "v")),
        (NamedExpression(f"{prefix}_k", "k"), NamedExpression(f"{prefix}_v", "v")),
    )


def groups(name: str) -> SelectColumns:
    return SelectColumns(
        NamedInput(name, ("j", "g")), (NamedExpression("c_j", "j"), NamedExpression("c_g", "g"))
    )


def names(name: str) -> SelectColumns:
    return SelectColumns(
        NamedInput(name, ("k", "n n")),
        (NamedExpression("b_k", "k"), NamedExpression("b_n", "`n n`")),
    )


ON_K = (("a_k", "b_k"),)
ON_J = (("a_v", "c_j"),)
STATELESS = ConsolidateRows(
    SelectColumns(FilterRows(facts("d0", "a"), "a_v > 2"), (NamedExpression("x", "a_v + 1"),))
)
MEASURES = (AdditiveMeasure("m", "sum", "a_v", "decimal(38,0)"),)
TOTAL = AccumulateTotals(
    NamedInput("r0", HIDDEN.names), NamedInput("h0", HIDDEN.names), ("g",), ("m",)
)
THREE = UnionRows(
    (
        PairRows(PairRows(facts("d0", "a"), names("s1"), ON_K), groups("s2"), ON_J),
        PairRows(PairRows(facts("s0", "a"), names("d1"), ON_K), groups("s2"), ON_J),
        PairRows(PairRows(facts("d0", "a"), names("d1"), ON_K), groups("s2"), ON_J),
        PairRows(PairRows(facts("s0", "a"), names("s1"), ON_K), groups("d2"), ON_J),
    )
)
SELF = ConsolidateRows(
    UnionRows(
        (
            PairRows(facts("d0", "a"), facts("s0", "z"), (("a_k", "z_k"),), "a_v < z_v"),
            PairRows(facts("s0", "a"), facts("d0", "z"), (("a_k", "z_k"),), "a_v < z_v"),
            PairRows(facts("d0", "a"), facts("d0", "z"), (("a_k", "z_k"),), "a_v < z_v"),
        )
    )
)
UNION = ConsolidateRows(
    UnionRows(
        (
            SelectColumns(facts("d0", "a"), (NamedExpression("x", "a_k"),)),
            SelectColumns(names("d1"), (NamedExpression("x", "b_k"),)),
        )
    )
)
CROSS = ConsolidateRows(PairRows(facts("d0", "a"), groups("s2"), ()))
MEANINGS |= {
    "a_v < z_v": lambda row: (
        None if row["a_v"] is None or row["z_v"] is None else row["a_v"] < row["z_v"]
    ),
    "`n n`": lambda row: row["n n"],
}
PLANS: dict[str, tuple[Node, ...]] = {
    "stateless": (STATELESS,),
    "aggregate": (
        ReduceGroups(facts("d0", "a"), (NamedExpression("g", "a_k"),), MEASURES),
        ConsolidateRows(TOTAL),
    ),
    "three": (
        ReduceGroups(THREE, (NamedExpression("g", "c_g"),), MEASURES),
        ConsolidateRows(TOTAL),
    ),
    "self": (SELF,),
    "union": (UNION,),
    "cross": (CROSS,),
}


def plan_of(*nodes: Node, hidden: TableSchema = HIDDEN) -> DeltaPlan:
    return DeltaPlan(
        inputs=("f", "n", "g"),
        input_schemas=SOURCES,
        output=TableSchema(()),
        sql="",
        mode="incremental",
        reason="",
        strata=tuple(PlanStratum((), node, ()) for node in nodes),
        hidden=(HiddenState(hidden, ()),),
        conf=CONF,
    )


def random_value(random_: random.Random, column: TableColumn) -> Any:
    if random_.random() < 0.15:
        return None
    if column.type == "string":
        return random_.choice(["x", "y", "0", "1", "ä" * random_.randrange(1, 9)])
    return random_.randrange(5)


def random_rows(
    random_: random.Random, schema: TableSchema, count: int, times: tuple[int, int]
) -> list[Any]:
    return [
        (
            *(random_value(random_, column) for column in schema.columns),
            random_.randrange(*times),
            random_.choice([1, 1, 1, -1, 2]),
        )
        for _ in range(count)
    ]


def random_inputs(random_: random.Random, group: TableSchema) -> dict[str, list[Any]]:
    inputs = {
        name: random_rows(
            random_,
            schema,
            random_.choice([0, 1, 6, 12]),
            (LO, HI) if name[0] == "d" else (0, LO),
        )
        for name, schema in SCHEMAS.items()
    }
    inputs["d0"] = inputs["d0"] or [(1, 1, 3, LO, 1)]
    keys: list[Any] = random_.sample([None, 0, 1, 2, 3], random_.randrange(4))
    if group.columns[0].type == "string":
        keys = random_.sample([None, "x", "y", "0"], random_.randrange(4))
    inputs["h0"] = [
        (key, random_.randrange(1, 9), Decimal(random_.randrange(99)), 0, 1) for key in keys
    ]
    return inputs


def as_model(schema: TableSchema, rows: list[Any]) -> Updates:
    return [(dict(zip(schema.names, row[:-2], strict=True)), row[-2], row[-1]) for row in rows]


def from_table(table: Any) -> Updates:
    return [
        ({k: v for k, v in row.items() if k not in (TIME, DIFF)}, row[TIME], row[DIFF])
        for row in table.to_pylist()
    ]


def made_in_python(
    nodes: tuple[Node, ...], schemas: Mapping[str, TableSchema], inputs: Mapping[str, list[Any]]
) -> Any:
    given = {name: as_model(schemas[name], rows) for name, rows in inputs.items()}
    model = Model(given, MEANINGS, LO, HI)
    for index, node in enumerate(nodes):
        given[f"r{index}"] = model.run(node)
    return consolidated(given[f"r{len(nodes) - 1}"])


def prepare(child: ChildProcess, plan: DeltaPlan) -> str:
    name = job_id()
    # The declared output is not what these plans make: only steps are of interest here.
    assert isinstance(child.ask(PreparePlan(job_id(), name, plan)), JobFailed)
    return str(name)


def step(
    child: ChildProcess, name: str, last: int, inputs: Mapping[str, JobRows], lo: int = LO
) -> RowsDone:
    answer = child.ask(RunStep(job_id(), name, 0, last, dict(inputs), lo, HI))
    assert isinstance(answer, RowsDone), answer
    return answer


def rows_of(schema: TableSchema, rows: list[Any]) -> JobRows:
    return JobRows(schema, arrow=ipc(schema, rows))


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ChildProcess]:
    """A child to which two rows are many, and most steps too large to be small."""
    settings = Settings(
        spark_master="local[1]", engine_jobs_in_flight_max=1, engine_inline_bytes_max=300
    )
    made = ChildProcess(
        tmp_path_factory.mktemp("compiling"),
        for_short_lives(settings),
        java,
        constants={"prepared_steps.INTERPRETED_ROWS_MAX": 2},
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def few_plans(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ChildProcess]:
    """A child that keeps few plans, and ends with this file's tests."""
    settings = Settings(
        spark_master="local[1]",
        engine_jobs_in_flight_max=1,
        prepared_plans_max=3,
        prepared_plans_per_dataflow_max=2,
    )
    made = ChildProcess(tmp_path_factory.mktemp("few_plans"), for_short_lives(settings), java)
    yield made
    made.close()


@pytest.fixture(params=["child", pytest.param("compiling", marks=pytest.mark.second)])
def engine(request: pytest.FixtureRequest) -> ChildProcess:
    """Each kind of plan: with operators that are interpreted, and that are compiled."""
    found: ChildProcess = request.getfixturevalue(request.param)
    return found


# -- never stale --------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_executed_again_has_the_new_rows(engine: ChildProcess, kind: str) -> None:
    child = engine
    nodes = PLANS[kind]
    group = HIDDEN
    if kind == "aggregate":
        group = TableSchema((TableColumn("g", "bigint"), *HIDDEN.columns[1:]))
    name = prepare(child, plan_of(*nodes, hidden=group))
    schemas = SCHEMAS | {"h0": group}
    random_ = random.Random(kind)
    last = len(nodes) - 1
    for number in range(STEPS):
        inputs = random_inputs(random_, group)
        given = {n: rows_of(schemas[n], rows) for n, rows in inputs.items()}
        answer = step(child, name, last, given)
        assert answer.prepared
        found = consolidated(from_table(table_of(answer)))
        assert found == made_in_python(nodes, schemas, inputs), number
        if number % 8 == 1:  # at time 0 nothing is prepared
            anew = step(child, name, last, given, lo=0)
            assert not anew.prepared
            assert consolidated(from_table(table_of(anew))) == found


MATCHES: dict[str, Node] = {kind: MatchState(facts("d0", "a"), names("s1"), kind, ON_K) for kind in
           ("left", "full", "semi", "anti")}  # fmt: skip
OLD = facts("s0", "a")
CALLS = (SparkCall("most", "max(a_v)", "int"), SparkCall("kinds", "count(DISTINCT a_v)", "bigint"))
OTHERS: dict[str, Node] = MATCHES | {
    "null-safe": PairRows(facts("d0", "a"), names("s1"), (), None, ON_K),
    "weighed": WeighRows(facts("d0", "a"), "-1"),
    "expanded": ExpandRows(facts("d0", "a"), "tag", 3),
    "recomputed": RecomputeGroups(OLD, facts("d0", "a"), ("a_k",), CALLS),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_kind_of_node_is_prepared_and_right(
    engine: ChildProcess, child: ChildProcess, kind: str
) -> None:
    name, small = (
        prepare(each, plan_of(ConsolidateRows(OTHERS[kind]))) for each in (engine, child)
    )
    random_ = random.Random(kind)
    schemas = SCHEMAS | {"h0": HIDDEN}
    for _ in range(8):
        inputs = random_inputs(random_, HIDDEN)
        for state in ("s0", "s1"):  # of positive weight
            inputs[state] = [(*row[:-1], abs(row[-1])) for row in inputs[state]]
        inputs["d0"] = [(*row[:-1], 1) for row in inputs["d0"]]
        given = {n: rows_of(schemas[n], rows) for n, rows in inputs.items()}
        again, anew = step(engine, name, 0, given), step(child, small, 0, given, lo=0)
        assert (again.prepared, anew.prepared) == (True, False)
        found = consolidated(from_table(table_of(again)))
        assert found == consolidated(from_table(table_of(anew)))


FIRST = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
STRUCTS = [{"x": 1, "y": None}, {"x": None, "y": [None, {"z": None}]}]
EVERY_TYPE: dict[str, tuple[str, list[Any]]] = {
    "a": ("boolean", [True, False]),
    "A": ("tinyint", [1, -128]),
    "c;,{}()\n\t=": ("smallint", [2, 32767]),
    "d": ("float", [1.5, -0.0]),
    "e": ("binary", [b"\x00\xff", b""]),
    "f": ("date", [dt.date(2013, 1, 1), dt.date(1, 1, 1)]),
    "g": ("timestamp", [dt.datetime(2013, 1, 1, 5, 0, 0, 7, dt.UTC), FIRST]),
    "h": ("timestamp_ntz", [dt.datetime(2013, 1, 1, 5), dt.datetime(9999, 1, 1)]),  # noqa: DTZ001
    "i": ("array<string>", [["x", None], []]),
    "j": ("struct<x:int,y:array<struct<z:date>>>", STRUCTS),
    "k": ("map<string,int>", [[("x", 1)], [("y", None)]]),
    "l": ("varchar(9)", ["text", ""]),
    "m": ("decimal(38,18)", [Decimal("1.000000000000000001"), Decimal("-0.5")]),
    "n": ("decimal(9,2)", [Decimal("0.01"), Decimal("-9999999.99")]),
    "o": ("double", [float("inf"), 5e-324]),
    "p": ("decimal(18,0)", [Decimal(10**17), Decimal(-1)]),
}  # fmt: skip


def schema_of_every_type() -> TableSchema:
    return TableSchema(tuple(TableColumn(name, kind) for name, (kind, _) in EVERY_TYPE.items()))


def row_of_every_type(random_: random.Random) -> tuple[Any, ...]:
    return tuple(random_.choice([None, *values]) for _, values in EVERY_TYPE.values())


def test_every_type_passes_through_slots(child: ChildProcess) -> None:
    schema = schema_of_every_type()
    node = ConsolidateRows(NamedInput("d0", schema.names))
    strata = (PlanStratum((), node, ()),)
    plan = DeltaPlan(("t",), (schema,), schema, "", "incremental", "", strata, (), CONF)
    name = job_id()
    child.ask(PreparePlan(job_id(), name, plan))
    random_ = random.Random(1)
    for _ in range(10):
        rows = [
            (*row_of_every_type(random_), LO + number, 1)
            for number in range(random_.randrange(1, 9))
        ]
        given = {"d0": JobRows(schema, arrow=ipc(schema, rows))}
        again, anew = step(child, name, 0, given), step(child, name, 0, given, lo=0)
        assert (again.prepared, anew.prepared) == (True, False)
        found = sorted(repr(row) for row in table_of(again).to_pylist())
        assert found == sorted(repr(row) for row in table_of(anew).to_pylist())
        assert len(found) == len(rows)


@pytest.mark.long
def test_without_the_look_at_its_plan_a_step_is_stale_and_with_it_executions_are_right(
    tmp_path: Path, java: JavaHome
) -> None:
    """The one thing that keeps these tests honest: an exchange, executed again, is wrong."""
    source_folder = str(Path(next(iter(actors.__path__))).parent)
    environment = os.environ | {"JAVA_HOME": str(java.home), "PYTHONPATH": source_folder}
    done = subprocess.run(
        [sys.executable, prepared_lab.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps = prepared_lab.STEPS
    assert found["sound"] == [0, steps]
    assert found["refused"][:2] == [0, 0]
    assert "'Exchange" in found["refused"][2][0]
    wrong, prepared = found["blind"]
    assert prepared == steps
    assert wrong > steps / 2
    done = found["executions"]
    # Each step has the rows of its own plan and of this step, whatever runs beside it; no job of
    # Spark's is run for it.
    assert done["alone"] == [[True, True]] * 5
    assert done["stages"] == [0] * 5
    # An error of the data is its own, and the plan is made anew.
    assert done["failing"] == ["DefiniteError"]
    assert done["after"] == [[True, True]]
    assert len(done["free"]) >= 5 * steps
    assert {tuple(answer) for answer in done["free"]} == {(True, True)}
    # A step that is cancelled takes nobody's rows with it.
    others = [answer for answer in done["canceled"] if answer != "OperationCanceled"]
    assert steps / 2 < len(others) < len(done["canceled"])
    assert {tuple(answer) for answer in others} <= {(True, True), (False, True)}
    # An execution knows its own session's settings, and leaves nothing behind.
    assert found["told"] == {
        "format": "SlotFileFormat",
        "twice": True,
        "refused": [
            "the answer takes more than spark.driver.maxResultSize",
            "the plan has 2 partitions",
        ],
        "left": [None, False],
    }


# -- what is refused, and what happens to it -----------------------------------------------------


GIVEN = {"d0": rows_of(FACTS, [(1, 1, 3, LO, 1)]), "s2": rows_of(GROUPS, [(1, "x", 0, 1)])}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (
            SelectColumns(facts("d0", "a"), (NamedExpression("x", "rand() >= 0"),)),
            "not deterministic",
        ),
        (
            SelectColumns(facts("d0", "a"), (NamedExpression("x", "now() > DATE'2020-01-01'"),)),
            "the clock",
        ),
        (
            FilterRows(facts("d0", "a"), "a_k IN (SELECT c_j FROM VALUES (1) AS v(c_j))"),
            "a node of kind",
        ),
        (FilterRows(facts("d0", "a"), "a_k >= (SELECT min(id) FROM range(9))"), "Subquery"),
    ],
)
def test_what_a_plan_would_keep_is_refused_once_and_right(
    child: ChildProcess, node: Node, reason: str
) -> None:
    name = prepare(child, plan_of(ConsolidateRows(node)))
    for _ in range(3):
        answer = step(child, name, 0, GIVEN)
        assert not answer.prepared
        assert table_of(answer).num_rows == 1
    lines = [line for line in child.log.read_text().splitlines() if line.startswith(f"{name}:")]
    assert len(lines) == 1
    assert "planned at each step" in lines[0]
    assert reason.lower() in lines[0].lower()


def test_a_large_answer_comes_by_files_with_every_type(child: ChildProcess) -> None:
    """Few rows that become many would not fit on the driver's heap."""
    schema = schema_of_every_type()
    node = GenerateRows(NamedInput("d0", schema.names), "explode(sequence(1, 4))", False, ("copy",))
    strata = (PlanStratum((), node, ()),)
    plan = DeltaPlan(("t",), (schema,), schema, "", "incremental", "", strata, (), CONF)
    name = job_id()
    child.ask(PreparePlan(job_id(), name, plan))
    random_ = random.Random(2)
    rows = [(*row_of_every_type(random_), LO + number % 3, 1) for number in range(6_000)]

    def answer(some: list[Any]) -> Counter[str]:
        made = step(child, name, 0, {"d0": rows_of(schema, some)}, lo=0)
        return Counter(map(repr, table_of(made).to_pylist()))

    told = child.log.read_text().count("is written to files")
    whole = answer(rows)
    assert child.log.read_text().count("is written to files") == told + 1
    assert whole == sum((answer(rows[at : at + 2_000]) for at in (0, 2_000, 4_000)), Counter())
    assert child.log.read_text().count("is written to files") == told + 1
    assert whole.total() == 4 * len(rows)


def test_rows_beyond_a_slot_go_the_general_path(child: ChildProcess) -> None:
    name = prepare(child, plan_of(CROSS))
    assert step(child, name, 0, GIVEN).prepared
    long = rows_of(GROUPS, [(1, "x" * child.settings.prepared_slot_bytes_max, 0, 1)])
    assert not step(child, name, 0, GIVEN | {"s2": long}).prepared
    assert step(child, name, 0, GIVEN).prepared


def slots_of(child: ChildProcess) -> set[Path]:
    return set((child.scratch / "child" / "slots").glob("*"))


def test_variants_are_few_bounded_and_dropped(child: ChildProcess) -> None:
    before = slots_of(child)
    name = prepare(child, plan_of(*PLANS["three"]))
    random_ = random.Random(7)
    for _ in range(12):  # state may be there or not
        inputs = random_inputs(random_, HIDDEN)
        schemas = SCHEMAS | {"h0": HIDDEN}
        given = {
            n: rows_of(schemas[n], rows) for n, rows in inputs.items() if n not in ("d1", "d2")
        }
        assert step(child, name, 1, given).prepared
    made = slots_of(child) - before
    assert len(made) <= 2  # changes at one time, and at several
    for folder in made:
        read = {path.stem for path in folder.iterdir()}
        assert read == {"d0", "s1", "s2", "h0"}  # nothing of terms whose input did not change
    child.send(ForgetPlan(job_id(), name))
    assert isinstance(child.ask(RunStep(job_id(), name, 0, 1, {}, LO, HI)), JobFailed)
    assert slots_of(child) - before == set()


def test_the_least_recently_used_variant_goes_first(few_plans: ChildProcess) -> None:
    child = few_plans
    rows = {n: rows_of(SCHEMAS[n], random_rows(random.Random(1), SCHEMAS[n], 3, (LO, HI)))
            for n in ("d0", "d1")}  # fmt: skip
    first, second = prepare(child, plan_of(UNION)), prepare(child, plan_of(UNION))
    for given in ({"d0": rows["d0"]}, {"d1": rows["d1"]}, rows, {"d0": rows["d0"]}):
        assert step(child, first, 0, given).prepared
        assert len(slots_of(child)) <= 2
    for given in ({"d0": rows["d0"]}, {"d1": rows["d1"]}):
        assert step(child, second, 0, given).prepared
    assert len(slots_of(child)) == 3
    wanted = consolidated(from_table(table_of(step(child, first, 0, rows, lo=0))))
    assert consolidated(from_table(table_of(step(child, first, 0, rows)))) == wanted


def test_a_rehearsed_plan_is_there_and_a_step_waits_for_it(child: ChildProcess) -> None:
    before = slots_of(child)
    name = prepare(child, plan_of(*PLANS["aggregate"], hidden=HIDDEN))
    runs = tuple(LikelyRun(0, 1, ("d0",), one_time) for one_time in (True, False))
    rehearsal = RehearseSteps(job_id(), name, runs)
    assert child.ask(rehearsal) == PlanPrepared(rehearsal.job_id)
    made = slots_of(child) - before
    assert len(made) == 2
    for times in ((LO, LO + 1), (LO, HI)):
        rows = random_rows(random.Random(3), SCHEMAS["d0"], 12, times)
        answer = step(child, name, 1, {"d0": rows_of(SCHEMAS["d0"], rows)})
        anew = step(child, name, 1, {"d0": rows_of(SCHEMAS["d0"], rows)}, lo=0)
        assert answer.prepared
        assert consolidated(from_table(table_of(answer))) == consolidated(
            from_table(table_of(anew))
        )
    assert slots_of(child) - before == made
    child.send(ForgetPlan(job_id(), name))


@pytest.mark.long
def test_a_step_uses_a_wider_plan_until_its_own_pays(tmp_path: Path, java: JavaHome) -> None:
    """One of more changes and of several times serves it, with the same rows."""
    settings = for_short_lives(Settings(spark_master="local[1]"))
    child = ChildProcess(tmp_path, settings, java, constants={"prepared_steps.WIDER_USES_MAX": 2})
    for plan, last, inputs in (("union", 0, "d0 d1"), ("three", 1, "d0 d1 d2 s0 s1 s2")):
        name = prepare(child, plan_of(*PLANS[plan]))
        before = slots_of(child)
        changes = tuple(each for each in inputs.split() if each[0] == "d")
        all_changes = LikelyRun(0, last, changes, False)
        assert isinstance(child.ask(RehearseSteps(job_id(), name, (all_changes,))), PlanPrepared)
        made = slots_of(child)
        assert len(made - before) == 1
        own = LikelyRun(0, last, ("d0",), True)
        for turn in range(5):
            given = {}
            for each in ("d0", *(each for each in inputs.split() if each[0] != "d")):
                times = (LO, LO + 1) if each == "d0" else (0, LO)
                rows = random_rows(random.Random(turn), SCHEMAS[each], 9, times)
                given[each] = rows_of(SCHEMAS[each], rows)
            answer = step(child, name, last, given)
            anew = step(child, name, last, given, lo=0)
            assert answer.prepared
            assert consolidated(from_table(table_of(answer))) == consolidated(
                from_table(table_of(anew))
            )
            assert answer.frequent == (own if turn == 2 else None)
            if turn == 2:
                assert slots_of(child) == made
                child.ask(RehearseSteps(job_id(), name, (own,)))
                assert len(slots_of(child) - made) == 1
    child.close()


# -- failures and cancels -----------------------------------------------------------------------


def test_an_error_of_the_data_is_the_answer_and_the_next_step_is_right(
    child: ChildProcess,
) -> None:
    before = slots_of(child)
    node = ConsolidateRows(
        SelectColumns(facts("d0", "a"), (NamedExpression("x", "6 div (a_v - 3)"),))
    )
    name = prepare(child, plan_of(node))
    good = {"d0": rows_of(FACTS, [(1, 1, 5, LO, 1)])}
    for _ in range(2):
        answer = step(child, name, 0, good)
        assert (answer.prepared, table_of(answer)["x"].to_pylist()) == (True, [3])
        failed = child.ask(RunStep(job_id(), name, 0, 0, GIVEN, LO, HI))
        assert (failed.code, "DIVIDE_BY_ZERO" in failed.text) == ("DefiniteError", True)
        assert slots_of(child) - before == set()
    answer = step(child, name, 0, good)
    assert (answer.prepared, table_of(answer)["x"].to_pylist()) == (True, [3])


def test_a_canceled_step_takes_its_slots_along(few_plans: ChildProcess) -> None:
    """Its thread ends at the next row that a join makes (`CancelChecks`)."""
    child = few_plans
    before = slots_of(child)
    node: Node = facts("d0", "a")
    for letter in "bcde":
        other = SelectColumns(facts("d0", letter), (NamedExpression(f"{letter}_v", f"{letter}_v"),))
        node = PairRows(node, other, ())
    name = prepare(
        child,
        plan_of(ReduceGroups(node, (), (AdditiveMeasure("m", "sum", "a_v + e_v", "bigint"),))),
    )
    few = {"d0": rows_of(FACTS, [(1, 1, 2, LO, 1)])}
    assert table_of(step(child, name, 0, few))["m"].to_pylist() == [4]
    many = rows_of(FACTS, [(1, 1, 2, LO, 1)] * 900)  # 900 ** 5 pairs
    job = RunStep(job_id(), name, 0, 0, {"d0": many}, LO, HI)
    (folder,) = slots_of(child) - before
    os.utime(folder / "d0.arrow", ns=(0, 0))
    child.send(job)
    while (folder / "d0.arrow").stat().st_mtime_ns == 0:
        pass  # until the step has filled its slot
    child.send(CancelChildJob(job.job_id))
    answer = child.receive()
    assert (answer.job_id, answer.code) == (job.job_id, "OperationCanceled")
    assert slots_of(child) - before == set()
    answer = step(child, name, 0, few)
    assert (answer.prepared, table_of(answer)["m"].to_pylist()) == (True, [4])
