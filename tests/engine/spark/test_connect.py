"""The general path over Spark Connect: a server of its own process, which sees our folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connect_server import ConnectServer, running_server  # type: ignore[import-not-found]
from engine_child import ChildProcess, ipc, job_id, table_of  # type: ignore[import-not-found]
from joined_view import (  # type: ignore[import-not-found]
    DIFFERENCE,
    LEFT,
    check_differences,
    check_large_step,
    check_maintained,
    rows_of,
    write_parts,
)
from pyspark.sql.connect.session import SparkSession

from actors.doors.client.client import Client
from actors.engine.spark import connect
from actors.engine.spark.child import EXIT_SPARK_GONE
from actors.engine.spark.java import JavaHome
from actors.engine.spark.jobs import JobTicket
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.remote import open_remote
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    NamedInput,
    PlanStratum,
    SelectColumns,
)
from actors.model.plan.jobs import (
    AnalyzeStatement,
    CancelChildJob,
    ComputeDifference,
    JobFailed,
    JobRows,
    ParseText,
    PlanPrepared,
    PreparePlan,
    QueryAnalyzed,
    QueryFiles,
    RowsDone,
    RunStep,
)
from actors.model.plan.jobs import SelectContents as PlainSelect
from actors.model.plan.relational import AggregationNode, NamedExpression, ProjectNode, ScanNode
from actors.model.plan.relational_walk import nodes
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import DefiniteError, EngineUnavailable, QueryRejected
from actors.runtime.settings import Settings
from actors.service import Service

pytestmark = [pytest.mark.spark, pytest.mark.second]

LONG = TableSchema((TableColumn("x", "bigint"),))
ODD = TableSchema((TableColumn("x", "int", False),))
FOREVER = "SELECT sum(hash(a.id * b.id)) AS x FROM range(10000000) a CROSS JOIN range(10000000) b"
TABLES = (("l", LEFT), ("odd ` name", ODD), ("query", LEFT))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ConnectServer]:
    with running_server(tmp_path_factory.mktemp("connect"), java) as made:
        yield made


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, server: ConnectServer, java: JavaHome
) -> Iterator[ChildProcess]:
    settings = Settings(
        spark_master=server.url, engine_jobs_in_flight_max=2, engine_inline_bytes_max=64 * 1024
    )
    made = ChildProcess(tmp_path_factory.mktemp("engine"), settings, java)
    yield made
    made.close()


@pytest.fixture(scope="module")
def blind(
    tmp_path_factory: pytest.TempPathFactory, server: ConnectServer
) -> Iterator[ChildProcess]:
    """An engine without a Java of its own to read plans with."""
    settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
    made = ChildProcess(tmp_path_factory.mktemp("blind"), settings, None)
    yield made
    made.close()


def analyze(
    engine: ChildProcess,
    text: str,
    conf: tuple[tuple[str, str], ...] = (),
    *,
    translate: bool = False,
) -> Any:
    return engine.ask(AnalyzeStatement(job_id(), TABLES, text, conf, translate))


def test_the_child_says_what_it_reached(engine: ChildProcess) -> None:
    assert engine.ready.spark_version.startswith("4.")
    assert (engine.ready.java_version, engine.ready.jvm_pid) == ("", 0)


# -- analysis -----------------------------------------------------------------------------------


def test_analysis_names_types_nullability_and_sources(engine: ChildProcess) -> None:
    answer = analyze(engine, "SELECT k, count(*), avg(v) AS a, array(s) AS l FROM l GROUP BY k, s")
    assert answer.schema.columns == (
        TableColumn("k", "bigint"),
        TableColumn("count(1)", "bigint", False),
        TableColumn("a", "double"),
        TableColumn("l", "array<string>", False),
    )
    assert (answer.inputs, answer.volatility) == (("l",), None)
    odd = analyze(engine, "SELECT x FROM `odd `` name`;")
    assert (odd.schema.columns, odd.inputs) == ((TableColumn("x", "int", False),), ("odd ` name",))
    twice = analyze(engine, "SELECT k, K AS k FROM L -- the same name twice")
    assert (twice.schema.names, twice.inputs) == (("k", "k"), ("l",))
    steps = "WITH l AS (SELECT k FROM query) SELECT k, TIMESTAMP '2020-01-01 00:00:00' AS u FROM l"
    told = analyze(engine, steps)
    assert [column.type for column in told.schema.columns] == ["bigint", "timestamp"]
    assert told.inputs == ("query",)


def test_a_plan_is_read_by_our_own_spark(engine: ChildProcess, blind: ChildProcess) -> None:
    """Under the session's settings; without Java the reason says so, and the rest is told."""
    text = "SELECT q.k, count(*) AS n FROM query q JOIN l ON q.k = l.k AND l.v > 1 GROUP BY q.k"
    told, unread = (analyze(each, text, translate=True) for each in (engine, blind))
    assert isinstance(told.translation.root, ProjectNode)
    assert {
        each.input_index for each in nodes(told.translation.root) if isinstance(each, ScanNode)
    } == {
        0,
        1,
    }
    assert unread.translation.root is None
    assert "unless the engine has its own Java: this test has none" in unread.translation.reason
    assert (told.schema, told.inputs) == (unread.schema, unread.inputs)
    assert told.inputs == ("query", "l")
    for ansi in ("true", "false"):
        conf = (("spark.sql.ansi.enabled", ansi),)
        root = analyze(engine, "SELECT sum(v) AS s FROM l", conf, translate=True).translation.root
        assert [each.ansi for each in nodes(root) if isinstance(each, AggregationNode)] == [
            ansi == "true"
        ]


def test_what_only_the_server_knows_is_not_read(
    engine: ChildProcess, blind: ChildProcess, server: ConnectServer
) -> None:
    """A table of the server's own is refused, whatever it is named; a function is not read."""
    session = SparkSession(server.url)
    session.sql("CREATE TABLE theirs AS SELECT 1L AS k").collect()
    try:
        for each in (engine, blind):
            for name in ("theirs", "default.theirs", "spark_catalog.default.theirs"):
                refused = analyze(each, f"SELECT l.k FROM l JOIN {name} t ON l.k = t.k")
                assert isinstance(refused, JobFailed), refused
                assert (
                    "spark_catalog.default.theirs, which is not a table of the service"
                    in refused.text
                )
    finally:
        session.sql("DROP TABLE theirs").collect()
        session.stop()


@pytest.mark.parametrize(
    ("written", "call"),
    [
        ("rand()", "rand()"),
        ("current_date", "current_date()"),
        ("`v` + unix_timestamp( )", "unix_timestamp()"),
        ("CAST('now' AS timestamp) > x.at", "the literal 'now'"),
        ("transform(array(1), x -> rand())", "rand()"),
    ],
)
def test_what_is_volatile_is_told_by_words_without_a_plan(
    blind: ChildProcess, written: str, call: str
) -> None:
    text = f"SELECT {written} AS a FROM (SELECT v, now AS at FROM (SELECT *, v AS now FROM l)) x"
    answer = analyze(blind, text.replace(" > x.at", " IS NULL"))
    assert isinstance(answer, QueryAnalyzed), answer
    assert answer.volatility is not None
    assert answer.volatility.call == call


def test_words_that_are_no_calls(blind: ChildProcess) -> None:
    text = "SELECT first(s) AS a, 'rand() now' AS b, max(v) AS `rand()` -- now()\n FROM l"
    assert analyze(blind, text).volatility is None


@pytest.mark.parametrize("name", ["nowhere", "`no where`", "made.made", "parquet.`/etc`"])
def test_a_name_that_nobody_has_is_told(engine: ChildProcess, name: str) -> None:
    assert analyze(engine, f"SELECT * FROM l, {name}").missing.replace("`", "") == name.replace(
        "`", ""
    )


@pytest.mark.parametrize(
    "text",
    [
        "SELECT rand() AS r FROM l",
        "SELECT rand(42) AS r FROM l",
        "SELECT count(*) AS c FROM l WHERE rand() > 0.5",
        "SELECT s FROM l WHERE k IN (SELECT id FROM range(3) WHERE randn(1) > 0.5)",
        "SELECT monotonically_increasing_id() AS i FROM l",
        "SELECT uuid() AS u FROM l ORDER BY u LIMIT 2",
        "SELECT k FROM l GROUP BY k HAVING max(v) > rand(3)",
    ],
)
def test_what_is_not_deterministic(engine: ChildProcess, text: str) -> None:
    answer = analyze(engine, text)
    assert isinstance(answer, QueryAnalyzed), answer
    assert answer.volatility is not None


def test_a_restricted_query_is_checked_by_our_own_spark(
    engine: ChildProcess, blind: ChildProcess, server: ConnectServer
) -> None:
    """And refused without it: a server shows no plans."""

    def asked(each: ChildProcess, text: str) -> Any:
        return each.ask(AnalyzeStatement(job_id(), TABLES, text, restricted=True))

    assert asked(engine, "SELECT max(k) AS k FROM l").inputs == ("l",)
    assert asked(engine, "SELECT * FROM csv.`/etc/hostname`").missing == "`csv`.`/etc/hostname`"
    session = SparkSession(server.url)
    session.sql("CREATE FUNCTION IF NOT EXISTS theirs(x INT) RETURNS INT RETURN x").collect()
    session.sql("CREATE TABLE own_of_theirs AS SELECT 1L AS k").collect()
    try:
        # The server is not asked, which would tell that it is there.
        assert asked(engine, "SELECT * FROM own_of_theirs").missing == "`own_of_theirs`"
        for text in ("SELECT reflect('a', 'b') AS v", "SELECT theirs(1) AS v"):
            for each in (engine, blind):
                assert asked(each, text).code == "AccessDenied", text
    finally:
        session.sql("DROP FUNCTION theirs").collect()
        session.sql("DROP TABLE own_of_theirs").collect()
        session.stop()
    refused = asked(blind, "SELECT max(k) AS k FROM l")
    assert refused.code == "AccessDenied"
    assert "plans are not visible" in refused.text
    assert engine.ask(ParseText(job_id(), "SELECT f(1) FROM u")).unknown == ("f",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SELECT nope FROM l", "UNRESOLVED_COLUMN"),
        ("SELEC v FROM l", "PARSE_SYNTAX_ERROR"),
        ("SELECT 1) UNION ALL SELECT (2", "PARSE_SYNTAX_ERROR"),
        ("CREATE TABLE made (a int)", "expected a query"),
        ("CREATE VIEW made AS SELECT 1", "expected a query"),
        ("DROP VIEW l", "expected a query"),
        ("SET spark.sql.ansi.enabled = false", "expected a query"),
        ("SET", "expected a query"),
        ("RESET", "expected a query"),
        ("INSERT INTO l VALUES (1, 1, 'a')", "expected a query"),
        ("EXPLAIN SELECT 1", "expected a query"),
        ("SELECT array(INTERVAL '1' DAY) AS i", "cannot be answered"),
    ],
)
def test_what_analysis_refuses(engine: ChildProcess, text: str, words: str) -> None:
    answer = analyze(engine, text)
    assert isinstance(answer, JobFailed), answer
    assert answer.code == "QueryRejected"
    assert words in answer.text
    assert "\tat " not in answer.text
    assert "Project" not in answer.text
    assert len(answer.text) < 1000


def test_no_refused_command_has_run(engine: ChildProcess) -> None:
    for text in ("CREATE TABLE made AS SELECT 1 AS a", "CREATE DATABASE made"):
        assert "expected a query" in analyze(engine, text).text
    tables = engine.ask(QueryFiles(job_id(), "SELECT CAST('' AS bigint) AS x", ()))
    assert tables.code == "DefiniteError"  # ANSI is on, as it was
    assert analyze(engine, "SELECT * FROM made").missing == "`made`"


def test_a_setting_that_spark_refuses(engine: ChildProcess) -> None:
    for name, value in (("spark.sql.shuffle.partitions", "many"), ("spark.driver.memory", "1g")):
        answer = analyze(engine, "SELECT 1", conf=((name, value),))
        assert (answer.code, name in answer.text) == ("QueryRejected", True)


def test_settings_and_names_of_jobs_do_not_meet(engine: ChildProcess) -> None:
    wanted = {}
    for number in range(8):
        ansi, name = number % 2 == 0, f"c{number}"
        sql = f"SELECT CAST('x' AS bigint) AS x FROM t WHERE {name} = 1"
        given = rows_of(TableSchema((TableColumn(name, "int"),)), [(1, 1, 1)])
        conf = (("spark.sql.ansi.enabled", str(ansi).lower()),)
        job = ComputeDifference(job_id(), sql, (("t", given),), LONG, 50, conf=conf)
        wanted[job.job_id] = ansi
        engine.send(job)
    for _ in wanted:
        answer = engine.receive()
        if wanted[answer.job_id]:
            assert isinstance(answer, JobFailed)
            assert answer.code == "DefiniteError"
        else:
            assert table_of(answer).to_pylist() == [{"x": None, TIME: 50, DIFF: 1}]


# -- steps, differences, queries ----------------------------------------------------------------


@pytest.mark.long
def test_a_join_and_aggregate_is_maintained(engine: ChildProcess) -> None:
    """Its small steps by plans of the JVM beside the server."""
    assert check_maintained(engine) == [False, True, True, True]


@pytest.mark.long
def test_it_is_maintained_without_a_java_here(blind: ChildProcess) -> None:
    assert check_maintained(blind) == [False] * 4


def test_a_prepared_step_has_the_servers_settings(engine: ChildProcess) -> None:
    """The server lets the last of two equal keys win, where Spark's default is an error."""
    twice = "element_at(map_from_arrays(array(s, s), array('first', 'last')), s)"
    (stratum,) = COPY.strata
    named = (NamedExpression("v", "v"), NamedExpression("s", twice))
    node = ConsolidateRows(SelectColumns(NamedInput("d0", LEFT.names), named))
    plan = msgspec.structs.replace(COPY, strata=(msgspec.structs.replace(stratum, node=node),))
    assert isinstance(engine.ask(PreparePlan(job_id(), "map", plan)), PlanPrepared)
    for lo in (0, 3, 5):
        given = {"d0": rows_of(LEFT, [(1, 7, "key", lo, 1)])}
        answer = engine.ask(RunStep(job_id(), "map", 0, 0, given, lo, lo + 1))
        assert isinstance(answer, RowsDone), answer
        assert answer.prepared == (lo > 0)
        assert table_of(answer).to_pylist() == [{"v": 7, "s": "last", TIME: lo, DIFF: 1}]


def test_a_prepared_step_is_canceled(engine: ChildProcess) -> None:
    (stratum,) = COPY.strata
    inner = "aggregate(sequence(1, 5000), x, (b, y) -> (b + y) % 7)"
    long = f"aggregate(sequence(1, 20000), 0, (a, x) -> (a + {inner}) % 7)"
    named = (NamedExpression("v", long), NamedExpression("s", "s"))
    node = ConsolidateRows(SelectColumns(NamedInput("d0", LEFT.names), named))
    plan = msgspec.structs.replace(COPY, strata=(msgspec.structs.replace(stratum, node=node),))
    assert isinstance(engine.ask(PreparePlan(job_id(), "long", plan)), PlanPrepared)
    step = RunStep(job_id(), "long", 0, 0, {"d0": rows_of(LEFT, [(1, 7, "key", 3, 1)])}, 3, 4)
    engine.send(step)
    engine.send(CancelChildJob(step.job_id))
    answer = engine.receive()
    assert isinstance(answer, JobFailed)
    assert answer.code == "OperationCanceled"


def test_a_large_step_reads_parts_by_their_path(engine: ChildProcess, tmp_path: Path) -> None:
    assert check_large_step(engine, tmp_path) > 0


def test_a_difference_over_parts_and_over_inline_rows(engine: ChildProcess, tmp_path: Path) -> None:
    assert check_differences(engine, tmp_path) == [DIFFERENCE, DIFFERENCE]


def test_rows_of_a_large_part_and_of_a_message_are_one_input(
    engine: ChildProcess, tmp_path: Path
) -> None:
    assert isinstance(engine.ask(PreparePlan(job_id(), "union", COPY)), PlanPrepared)
    inline = [(n, n % 7, f"s{n}", 3 + n % 5, 1) for n in range(9)]
    _, large = write_parts(tmp_path, inline, 99)
    given = JobRows(LEFT, arrow=ipc(LEFT, inline), files=(large,), upper=100)
    answer = engine.ask(RunStep(job_id(), "union", 0, 0, {"d0": given}, 0, 100))
    assert isinstance(answer, RowsDone), answer
    found = Counter(zip(*table_of(answer).to_pydict().values(), strict=True))
    read = pq.read_table(large).to_pylist()
    wanted = Counter((v, s, time, 1) for _, v, s, time, _ in inline)
    wanted += Counter((row["v"], row["s"], row[TIME], row[DIFF]) for row in read)
    assert found == wanted


def test_a_part_that_the_server_does_not_see(engine: ChildProcess) -> None:
    assert isinstance(engine.ask(PreparePlan(job_id(), "far", COPY)), PlanPrepared)
    rows = JobRows(LEFT, files=("s3://bucket/part.parquet", "hdfs://nowhere/part.parquet"))
    answer = engine.ask(RunStep(job_id(), "far", 0, 0, {"d0": rows}, 0, 9))
    assert isinstance(answer, JobFailed)
    assert answer.code == "EngineLost"


VALUES = TableSchema((TableColumn("v", "int"), TableColumn("s", "string")))
COPY = DeltaPlan(
    ("l",), (LEFT,), VALUES, "", "incremental", "",
    (PlanStratum((), ConsolidateRows(SelectColumns(NamedInput("d0", LEFT.names),
                                    (NamedExpression("v", "v"), NamedExpression("s", "s")))), ()),),
)  # fmt: skip


def test_rows_too_many_for_each_call(engine: ChildProcess, tmp_path: Path) -> None:
    """Sent ahead of the call: inline, and from a file; and the answer comes as a file."""
    assert isinstance(engine.ask(PreparePlan(job_id(), "copy", COPY)), PlanPrepared)
    dice = random.Random(8)
    rows = [(n, n % 7, dice.randbytes(40).hex(), 3 + n % 5, 1) for n in range(60_000)]
    data = ipc(LEFT, rows)
    assert len(data) > 4 * 1024 * 1024
    path = tmp_path / "rows.arrow"
    path.write_bytes(data)
    for given in (JobRows(LEFT, arrow=data), JobRows(LEFT, arrow_file=str(path), advance_to=5)):
        answer = engine.ask(RunStep(job_id(), "copy", 0, 0, {"d0": given}, 0, 9))  # never prepared
        assert isinstance(answer, RowsDone), answer
        assert (answer.arrow, answer.prepared) == (None, False)
        found = table_of(answer)
        times = [max(row[3], given.advance_to or 0) for row in rows]
        assert sorted(zip(*found.to_pydict().values(), strict=True)) == sorted(
            (v, s, time, 1) for (_, v, s, _, _), time in zip(rows, times, strict=True)
        )


def test_an_error_of_the_data_is_the_views(engine: ChildProcess) -> None:
    given = rows_of(LEFT, [(1, 1, "word", 1, 1), (2, 1, "7", 1, 1)])
    for sql, condition in (
        ("SELECT sum(CAST(s AS bigint)) AS x FROM l GROUP BY k", "CAST_INVALID_INPUT"),
        ("SELECT k DIV (v - 1) AS x FROM l", "DIVIDE_BY_ZERO"),
        ("SELECT CAST(raise_error(s) AS bigint) AS x FROM l", "USER_RAISED_EXCEPTION"),
        ("SELECT (SELECT id FROM range(3)) AS x FROM l", "SCALAR_SUBQUERY_TOO_MANY_ROWS"),
    ):
        answer = engine.ask(ComputeDifference(job_id(), sql, (("l", given),), LONG, 50))
        assert isinstance(answer, JobFailed), answer
        assert (answer.code, condition in answer.text) == ("DefiniteError", True), answer
        assert "\tat " not in answer.text
        assert len(answer.text) < 1500


def test_a_query_has_its_own_columns_and_order(engine: ChildProcess, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"k": [1, 1, 2], "v": [10, None, 30]}), path)
    sql = "SELECT k, sum(v) AS s FROM t GROUP BY k ORDER BY s DESC"
    answer = engine.ask(QueryFiles(job_id(), sql, (("t", str(path)),)))
    assert table_of(answer).to_pylist() == [{"k": 2, "s": 30}, {"k": 1, "s": 10}]
    refused = engine.ask(QueryFiles(job_id(), "SELECT nothing FROM t", (("t", str(path)),)))
    assert refused.code == "QueryRejected"


def select(sql: str, rows: list[Any], *output: TableColumn) -> PlainSelect:
    """A job over contents; `into_files` as clients' queries ask for it."""
    tables = (("t", rows_of(LEFT, rows)),)
    return PlainSelect(job_id(), sql, tables, TableSchema(output), into_files=True)


def test_a_select_sums_up_contents_and_keeps_the_order(engine: ChildProcess) -> None:
    rows = [(1, 5, "a", 3, 1), (2, 6, "b", 3, 2), (3, None, None, 4, 1), (1, 5, "a", 4, -1)]
    v, k = TableColumn("v", "int"), TableColumn("k", "bigint")
    answer = engine.ask(select("SELECT v, k FROM t ORDER BY k DESC", rows, v, k))
    wanted = [{"v": None, "k": 3}, {"v": 6, "k": 2}, {"v": 6, "k": 2}]
    assert table_of(answer).to_pylist() == wanted
    assert answer.files is None, "what the server writes is not seen here"
    # Names that Spark makes up, and one name twice: the job says what the columns are called.
    twice = (TableColumn("n", "bigint", False), TableColumn("n_1", "bigint", False))
    answer = engine.ask(select("SELECT count(*), count(v) FROM t", rows, *twice))
    assert table_of(answer).to_pylist() == [{"n": 3, "n_1": 2}]


def test_what_a_select_may_not_do(engine: ChildProcess) -> None:
    rows = [(1, 1, "a", 1, 1)]
    x = TableColumn("x", "bigint")
    for sql, code in (
        ("SELECT 1 div (k - 1) AS x FROM t", "DefiniteError"),
        ("SELECT nothing AS x FROM t", "QueryRejected"),
        ("SELECT s AS x FROM t", "QueryRejected"),
    ):
        answer = engine.ask(select(sql, rows, x))
        assert isinstance(answer, JobFailed), sql
        assert answer.code == code, answer


@pytest.mark.long
def test_a_select_whose_answer_is_larger_than_the_server_collects(engine: ChildProcess) -> None:
    rows = [(n, n, "x" * 20, 1, 1) for n in range(2_000)]
    o = (TableColumn("k", "bigint"), TableColumn("s", "string"))
    answer = engine.ask(select("SELECT a.k, b.s FROM t a CROSS JOIN t b", rows, *o))
    assert isinstance(answer, JobFailed), answer
    assert answer.code == "InvalidUsage"
    assert "spark.driver.maxResultSize" in answer.text
    answer = engine.ask(select("SELECT k, s FROM t ORDER BY k LIMIT 1", rows, *o))
    assert table_of(answer).to_pylist() == [{"k": 0, "s": "x" * 20}], "the session is good"


# -- cancels ------------------------------------------------------------------------------------


def test_cancel_while_running_and_before_the_start(engine: ChildProcess) -> None:
    running = [QueryFiles(job_id(), FOREVER, ()) for _ in range(2)]
    waiting = QueryFiles(job_id(), FOREVER, ())
    for job in (*running, waiting):  # the child has two threads
        engine.send(job)
    for job in (waiting, *running):
        engine.send(CancelChildJob(job.job_id))
    answers = [engine.receive() for _ in range(3)]
    assert all(isinstance(a, JobFailed) and a.code == "OperationCanceled" for a in answers), answers
    for _ in range(3):  # the sessions are good, and so are the server's two cores
        answer = engine.ask(
            QueryFiles(job_id(), "SELECT sum(id) AS x FROM range(0, 1000, 1, 2)", ())
        )
        assert table_of(answer).to_pylist() == [{"x": 499_500}]


@pytest.mark.long
def test_a_child_whose_reader_has_ended_ends(
    server: ConnectServer, java: JavaHome, tmp_path: Path
) -> None:
    """The next one begins anew: a JVM that is gone is not looked for in the middle of a job."""
    settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
    child = ChildProcess(tmp_path / "child", settings, java)
    try:
        assert analyze(child, "SELECT k FROM l", translate=True).translation.root is not None
        found = subprocess.run(
            ["pgrep", "-P", str(child.process.pid), "java"], capture_output=True, check=True
        )
        os.kill(int(found.stdout), signal.SIGKILL)
        child.send(AnalyzeStatement(job_id(), TABLES, "SELECT v FROM l", (), True))
        assert child.process.wait(250) == EXIT_SPARK_GONE
    finally:
        child.close()


@pytest.mark.parametrize("home", ["/nowhere"])
def test_a_java_that_does_not_run_is_told(server: ConnectServer, tmp_path: Path, home: str) -> None:
    settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
    nothing = JavaHome(Path(home), 17, "JAVA_HOME")
    child = ChildProcess(tmp_path / "child", settings, nothing, archive=tmp_path / "none")
    try:
        for _ in range(2):
            told = analyze(child, "SELECT k FROM l", translate=True).translation
            assert "it did not start in 3 attempts" in told.reason
    finally:
        child.close()


@pytest.mark.long
def test_a_java_that_fails_once_is_started_again(
    server: ConnectServer, java: JavaHome, tmp_path: Path
) -> None:
    """As one does that found no memory: views made later are not opaque for it."""
    home, failed = tmp_path / "java", tmp_path / "failed"
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(
        f"#!/bin/sh\n[ -e {failed} ] || {{ touch {failed}; exit 1; }}\n"
        f'exec {java.home}/bin/java "$@"\n'
    )
    program.chmod(0o755)
    settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
    failing = JavaHome(home, java.version, "JAVA_HOME")
    child = ChildProcess(tmp_path / "child", settings, failing, archive=tmp_path / "none")
    try:
        told = analyze(child, "SELECT k FROM l", translate=True).translation
        assert failed.exists()
        assert told.root is not None, told.reason
    finally:
        child.close()


# -- the end ------------------------------------------------------------------------------------


def test_the_child_ends_with_its_parent_and_its_server_goes_on(
    server: ConnectServer, tmp_path: Path
) -> None:
    settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
    child = ChildProcess(tmp_path / "one", settings, None)
    child.send(QueryFiles(job_id(), FOREVER, ()))
    child.socket.close()
    assert child.process.wait(200) == 0
    other = ChildProcess(tmp_path / "two", settings, None)
    answer = other.ask(QueryFiles(job_id(), "SELECT sum(id) AS x FROM range(0, 1000, 1, 2)", ()))
    assert table_of(answer).to_pylist() == [{"x": 499_500}]
    other.close()


# -- sessions -----------------------------------------------------------------------------------


class Inside:
    """An engine in this process: no JVM is needed for it."""

    def __init__(self, server: ConnectServer, folder: Path) -> None:
        settings = Settings(spark_master=server.url, engine_jobs_in_flight_max=1)
        self.engine = open_remote(settings, folder)
        self.slot = self.engine.slot()
        self._plan = PreparedPlan(COPY)

    def copy(self, rows: list[Any]) -> list[Any]:
        """What a step that copies `rows` makes of them."""
        job = RunStep(job_id(), "copy", 0, 0, {"d0": rows_of(LEFT, rows)}, 0, 9)
        answer = self.engine.run(self.slot, JobTicket(job, job.job_id, self._plan), "pool")
        return sorted(tuple(row.values()) for row in table_of(answer).to_pylist())

    def session(self) -> Any:
        return self.slot.sessions.get(COPY.conf, small=True).session


@pytest.fixture
def inside(server: ConnectServer, tmp_path: Path) -> Iterator[Inside]:
    made = Inside(server, tmp_path)
    yield made
    made.engine.end()


def test_a_job_whose_session_the_server_has_closed(inside: Inside) -> None:
    """It does so with sessions that were idle for long: the job is done in a new one."""
    assert inside.copy([(1, 5, "a", 1, 1)]) == [(5, "a", 1, 1)]
    first = inside.session()
    first.client.release_session()
    assert inside.copy([(2, 6, "b", 2, 1)]) == [(6, "b", 2, 1)]
    assert inside.session() is not first
    assert not inside.engine.lost()


def test_a_session_that_keeps_too_much_gives_way(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "SENT_AHEAD_BYTES", 1000)
    monkeypatch.setattr(connect, "KEPT_BYTES_MAX", 100_000)
    rows = [(n, n, f"{n:020}", 1, 1) for n in range(1000)]
    seen = []
    for _ in range(5):
        assert inside.copy(rows) == [(n, f"{n:020}", 1, 1) for n in range(1000)]
        seen.append(inside.session())
    assert 1 < len({id(session) for session in seen}) < 5
    assert [session.is_stopped for session in (seen[0], seen[-1])] == [True, False]


@pytest.mark.filterwarnings("ignore:.*RETRIES_EXCEEDED")
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"spark_conf": {"spark.executor.memory": "1g"}}, "spark.executor.memory"),
        ({"spark_conf": {"spark.sql.shuffle.partitions": "many"}}, "shuffle.partitions"),
        ({"spark_master": "sc://127.0.0.1:1/;x-key=hush"}, "sc://127.0.0.1:1: .*refused"),
    ],
)
def test_why_there_is_no_session(
    server: ConnectServer, tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    settings = Settings(**({"spark_master": server.url} | more))
    with pytest.raises(EngineUnavailable, match=words) as caught:
        open_remote(settings, tmp_path)
    assert "hush" not in str(caught.value)


def test_a_server_of_another_release(
    server: ConnectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.9.0")
    told = r"is Spark 4\.\d\.\d+, but PySpark 4\.9\.0 is .* pip install 'pyspark==4\.\d\.\*'"
    with pytest.raises(EngineUnavailable, match=told):
        open_remote(Settings(spark_master=server.url), tmp_path)


def test_without_the_packages_that_it_needs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.modules['grpc'] = None; import actors.engine.spark.remote")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert "pip install 'penstock-views[connect]'" in ended.stderr.splitlines()[-1]


# -- the service --------------------------------------------------------------------------------

VIEW = """
SELECT c.name, count(*) AS n, sum(f.delay) AS delay, max(f.delay) AS most
FROM flights f JOIN carriers c ON f.carrier = c.carrier GROUP BY c.name
"""


@pytest.mark.long
async def test_a_service_whose_spark_is_behind_a_server(
    server: ConnectServer, tmp_path: Path
) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        spark_master=server.url,
        engine_jobs_in_flight_max=2,
        maintenance_ms=20,
        peek_deadline_ms=400_000,
    )
    with anyio.fail_after(550):
        async with Service(settings) as service, await Client.connect(service.address) as client:
            flights = {"id": "bigint", "carrier": "string", "delay": "bigint"}
            await client.create_table("flights", flights, ["id"])
            await client.create_table(
                "carriers", {"carrier": "string", "name": "string"}, ["carrier"]
            )
            await client.insert("carriers", [{"carrier": "U", "name": "United"}])
            await client.create_materialized_view("late", VIEW)
            rows = [{"id": n, "carrier": "UX"[n % 3 == 0], "delay": n} for n in range(9)]
            first = await client.insert("flights", rows)
            await client.insert("carriers", [{"carrier": "X", "name": "Ex"}])
            await client.update("flights", [{"id": 8, "delay": 1}])
            last = await client.delete("flights", [{"id": 0}])
            then, now = (
                await client.peek("late", as_of=first),
                await client.peek("late", as_of=last),
            )
            assert then.to_pylist() == [{"name": "United", "n": 6, "delay": 27, "most": 8}]
            assert sorted(now.to_pylist(), key=lambda row: str(row["name"])) == [
                {"name": "Ex", "n": 2, "delay": 9, "most": 6},
                {"name": "United", "n": 6, "delay": 20, "most": 7},
            ]
            # The commit is readable before the step's status has come.
            while "last step" not in (told := await client.explain("late")):
                pass
            assert "last step: prepared" in told
            assert "opaque" not in told
            await query(client, first, last)


async def query(client: Client, first: int, last: int) -> None:
    """What no view keeps is answered by the server, at each time."""
    sql = """
        SELECT l.name, f.id, l.n FROM late l JOIN carriers c ON c.name = l.name
        JOIN flights f ON f.carrier = c.carrier WHERE f.id % 2 = 0 ORDER BY f.id DESC
    """
    for time, ids, n in ((first, [8, 4, 2], {6}), (last, [8, 6, 4, 2], {2, 6})):
        batches = [batch async for batch in client.query(sql, as_of=time)]
        found = pa.Table.from_batches(batches)
        assert found["id"].to_pylist() == ids
        assert set(found["n"].to_pylist()) == n
    many = "SELECT a.id * 10 + b.id AS x FROM flights a CROSS JOIN flights b ORDER BY x"
    found = pa.Table.from_batches([batch async for batch in client.query(many, as_of=last)])
    assert found["x"].to_pylist() == [10 * a + b for a in range(1, 9) for b in range(1, 9)]
    for wrong, kind in (("nothing", QueryRejected), ("1 div (id - 8)", DefiniteError)):
        with pytest.raises(kind):
            async for _ in client.query(f"SELECT {wrong} AS x FROM flights GROUP BY id"):
                pass
