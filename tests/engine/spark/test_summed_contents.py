"""Contents of parts that hold a row and its deletion: a row that is gone makes nothing raise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    job_id,
    table_of,
    updates,
)

from actors.engine.spark.java import JavaHome
from actors.model.plan.delta import (
    DeltaPlan,
    FilterRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    SelectColumns,
    UnionRows,
    WeighRows,
)
from actors.model.plan.jobs import (
    NO_UPPER,
    ComputeDifference,
    JobFailed,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RunStep,
)
from actors.model.plan.jobs import SelectContents as SelectRows
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives

pytestmark = pytest.mark.spark

TEXTS = TableSchema((TableColumn("s", "string"), TableColumn("f", "double")))
NUMBERS = TableSchema((TableColumn("n", "int"), TableColumn("f", "double")))
NODE = SelectColumns(
    NamedInput("d0", ("s", "f")),
    (NamedExpression("n", "CAST(`s` AS int)"), NamedExpression("f", "f")),
)
PLAN = DeltaPlan(
    ("t",), (TEXTS,), NUMBERS, "select cast(s as int) as n, f from t", "incremental", "",
    (PlanStratum((), NODE, ("d0",)),),
)  # fmt: skip
WORDS = TableSchema((TableColumn("s", "string"),))
LEFT, RIGHT = NamedInput("d0", ("s",)), NamedInput("d1", ("s",))
NUMBERED = SelectColumns(RIGHT, (NamedExpression("m", "`s`"),))
BEYOND = "CAST(`s` AS int) >= 7"
BY_NUMBER = (("CAST(`s` AS int)", "CAST(`m` AS int)"),)
BEYOND_SQL = "select s from t where cast(s as int) >= 7"
MANY = 8_000
"""Rows beyond each limit of the child `reading`."""


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ChildProcess]:
    """A child that leaves the smallest file to Spark; larger ones are several partitions."""
    settings = Settings(
        spark_master="local[2]", engine_inline_bytes_max=1, prepared_slot_bytes_max=64 * 1024
    )
    made = ChildProcess(tmp_path_factory.mktemp("reading"), for_short_lives(settings), java)
    yield made
    made.close()


@pytest.fixture(params=[0, pytest.param(MANY, marks=pytest.mark.second)], ids=["few", "many"])
def more(request: pytest.FixtureRequest) -> int:
    """How many rows there are beside those of a test."""
    count: int = request.param
    return count


@pytest.fixture
def engine(request: pytest.FixtureRequest, more: int) -> ChildProcess:
    """A child that reads few rows itself, or one that lets Spark read many."""
    found: ChildProcess = request.getfixturevalue("reading" if more else "child")
    return found


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "still there"])
def test_a_row_that_is_gone_raises_nothing(
    engine: ChildProcess, tmp_path: Path, more: int, gone: bool
) -> None:
    padding = [(str(number), number + 0.25, 1, 1) for number in range(more)]
    parts: list[pa.Table] = [
        updates(TEXTS, [("seven", -0.0, 1, 1), ("7", 0.5, 1, 2), *padding]),
        updates(TEXTS, [("seven", -0.0, 2, -1), ("7", 0.5, 2, -1)] if gone else [("8", 1.0, 2, 2)]),
    ]
    files = []
    for number, part in enumerate(parts):
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(part, files[-1], compression="none", use_dictionary=False)
    name = job_id()
    assert isinstance(engine.ask(PreparePlan(job_id(), name, PLAN)), PlanPrepared)
    rows = JobRows(TEXTS, files=tuple(files), advance_to=4)
    answer = engine.ask(RunStep(job_id(), name, 0, 0, {"d0": rows}, 0, 5, at_once=True))
    if not gone:
        assert isinstance(answer, JobFailed)
        assert "CAST_INVALID_INPUT" in answer.text
        return
    found = table_of(answer).to_pylist()
    assert len(found) == more + 1
    assert {"n": 7, "f": 0.5, "__time": 4, "__diff": 1} in found


ABOVE: dict[str, Node] = {
    "a filter": FilterRows(LEFT, BEYOND),
    "a filter of a union": FilterRows(UnionRows((LEFT, WeighRows(RIGHT, "-1"))), BEYOND),
    "a filter of what is computed": FilterRows(
        SelectColumns(LEFT, (NamedExpression("s", "`s`"),)), BEYOND
    ),
    "a join": SelectColumns(PairRows(LEFT, NUMBERED, BY_NUMBER), (NamedExpression("s", "`s`"),)),
    "a semi join": MatchState(LEFT, NUMBERED, "semi", BY_NUMBER),
}


@pytest.mark.parametrize("name", ABOVE)
def test_what_stands_above_sees_no_row_that_is_gone(
    engine: ChildProcess, tmp_path: Path, name: str, more: int
) -> None:
    """Spark filters before it sums up, if it may, and the filter raises for such a row."""
    given = [("seven", 1, 1), ("7", 1, 2), ("5", 1, 1)]
    padding = [(str(10 + number), 1, 1) for number in range(more)]
    deleted = [("seven", 2, -1)]
    parts = {
        "d0": [given + padding, deleted],
        "d1": [[("7", 1, 1), ("seven", 1, 1), *padding], deleted],
    }
    if "union" in name:
        parts = {"d0": [given + padding], "d1": [[("seven", 1, 1)]]}
    inputs: dict[str, JobRows] = {}
    for index, tables in parts.items():
        files = [str(tmp_path / f"{index}-{number}.parquet") for number in range(len(tables))]
        for path, table in zip(files, tables, strict=True):
            pq.write_table(updates(WORDS, table), path, compression="none", use_dictionary=False)
        inputs[index] = JobRows(WORDS, files=tuple(files), advance_to=4)
    plan = DeltaPlan(
        ("t", "u"), (WORDS, WORDS), WORDS, "select s from t", "incremental", "",
        (PlanStratum((), ABOVE[name], ("d0", "d1")),),
    )  # fmt: skip
    view = job_id()
    assert isinstance(engine.ask(PreparePlan(job_id(), view, plan)), PlanPrepared)
    answer = engine.ask(RunStep(job_id(), view, 0, 0, inputs, 0, 5, at_once=True))
    assert not isinstance(answer, JobFailed), answer.text
    found = table_of(answer)
    assert set(found["s"].to_pylist()) == {"7", *(row[0] for row in padding)}
    assert sum(found["__diff"].to_pylist()) == 2 + more


@pytest.mark.sampled(every=3)
def test_a_query_over_contents_sees_no_row_that_is_gone(
    engine: ChildProcess, tmp_path: Path, more: int
) -> None:
    padding = [(str(10 + number), 1, 1) for number in range(more)]
    tables = [[("seven", 1, 1), ("7", 1, 1), *padding], [("seven", 2, -1)]]
    files = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    for path, table in zip(files, tables, strict=True):
        pq.write_table(updates(WORDS, table), path, compression="none", use_dictionary=False)
    given = (("t", JobRows(WORDS, files=tuple(files), advance_to=4)),)
    for job in (
        ComputeDifference(job_id(), BEYOND_SQL, given, WORDS, 5),
        SelectRows(job_id(), BEYOND_SQL, given, WORDS),
    ):
        answer = engine.ask(job)
        assert not isinstance(answer, JobFailed), answer.text
        found = table_of(answer)["s"].to_pylist()
        assert Counter(found) == Counter(["7", *(row[0] for row in padding)])
    wrong = "select s from t where cast(concat('x', s) as int) = 1"
    answer = engine.ask(SelectRows(job_id(), wrong, given, WORDS))
    assert isinstance(answer, JobFailed)
    assert "CAST_INVALID_INPUT" in answer.text


KEYED = TableSchema(
    (TableColumn("k", "int", False), TableColumn("s", "string"), TableColumn("x", "double")), ("k",)
)
BAG = TableSchema((TableColumn("s", "string"), TableColumn("x", "double"), TableColumn("n", "int")))
NESTED = TableSchema((TableColumn("m", "map<string,int>"), TableColumn("n", "int")))
VALUES: dict[str, list[Any]] = {
    "string": [None, "", "a", "b "],
    "double": [None, 0.0, -0.0, float("nan"), 1.5],
    "int": [None, 1, 2],
    "map<string,int>": [None, {}, {"a": 1}, {"a": None}],
}


def drawn_history(schema: TableSchema, dice: random.Random) -> list[list[tuple[Any, ...]]]:
    """Parts of updates whose sums are never negative: a keyed table has a row of each key."""
    held: Counter[str] = Counter()
    rows: dict[str, tuple[Any, ...]] = {}
    by_key: dict[Any, str] = {}
    parts: list[list[tuple[Any, ...]]] = []
    time = 0
    for _ in range(dice.choice([1, 3, 5])):
        part: list[tuple[Any, ...]] = []
        for _ in range(dice.choice([1, 8, 25])):
            time += dice.choice([0, 1])
            present = [name for name, count in held.items() if count > 0]
            if present and dice.random() < 0.35:
                name = dice.choice(present)
                held[name] -= 1
                part.append((*rows[name], time, -1))
                by_key.pop(rows[name][0] if schema.key else None, None)
                continue
            row = tuple(
                dice.randrange(12) if not c.nullable else dice.choice(VALUES[c.type])
                for c in schema.columns
            )
            if schema.key and row[0] in by_key:
                continue
            name = repr(row)
            rows[name] = row
            by_key[row[0] if schema.key else None] = name
            weight = 1 if schema.key else dice.choice([1, 1, 3])
            held[name] += weight
            part.append((*row, time, weight))
        parts.append(part)
    return parts


@pytest.fixture(
    scope="module",
    params=[True, False],
    ids=["few rows", "many rows"],
)
def scanning(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, java: JavaHome
) -> Iterator[ChildProcess]:
    """A child that leaves the smallest file to Spark, or to which any rows are many, besides."""
    if request.param:
        yield request.getfixturevalue("reading")
        return
    settings = for_short_lives(Settings(spark_master="local[2]", engine_inline_bytes_max=1))
    constants = {
        "bridge.BATCH_ROWS": 2,
        "bridge.LOCAL_BYTES_MAX": 0,
        "difference.REPEATED_ROWS_MAX": 0,
        "stored_contents.BROADCAST_BYTES_MAX": 0,
    }
    made = ChildProcess(tmp_path_factory.mktemp("scanning"), settings, java, constants=constants)
    yield made
    made.close()


@pytest.mark.second
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("schema", [KEYED, BAG, NESTED], ids=["keyed", "bag", "map"])
def test_contents_are_the_sums_of_all_updates(
    scanning: ChildProcess, tmp_path: Path, schema: TableSchema
) -> None:
    for seed in range(6):
        dice = random.Random(seed)
        parts = drawn_history(schema, dice)
        as_of = dice.choice([1, 10, 1_000])
        files, inline = [], updates(schema, [])
        for number, part in enumerate(parts):
            if number == 2:
                inline = updates(schema, [row for row in part if row[-2] <= as_of])
                continue
            files.append(str(tmp_path / f"{seed}-{number}.parquet"))
            pq.write_table(updates(schema, part), files[-1])
        upper = as_of + 1 if as_of < 1_000 else NO_UPPER
        given = JobRows(schema, to_ipc(inline), files=tuple(files), upper=upper, advance_to=as_of)
        wanted: Counter[str] = Counter()
        for row in (row for part in parts for row in part):
            if row[-2] <= as_of:
                wanted[repr(as_read(row[:-2]))] += row[-1]
        answer = scanning.ask(SelectRows(job_id(), "select * from t", (("t", given),), schema))
        assert not isinstance(answer, JobFailed), answer.text
        rows = table_of(answer).to_pylist()
        found = Counter(repr(as_read(tuple(row[name] for name in schema.names))) for row in rows)
        assert found == +wanted, seed


def as_read(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row with its map as Arrow reads it."""
    return tuple(sorted(each.items()) if isinstance(each, dict) else each for each in row)
