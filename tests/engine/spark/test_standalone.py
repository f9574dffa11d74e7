"""A standalone cluster: small steps in the driver, others on two executors that share a folder with
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    job_id,
    table_of,
)
from joined_view import (  # type: ignore[import-not-found]
    DIFFERENCE,
    LEFT,
    check_differences,
    check_large_step,
    check_maintained,
    rows_of,
)
from standalone_cluster import (  # type: ignore[import-not-found]
    WORKERS,
    Cluster,
    quick_java,
    running_cluster,
)

from actors.engine.spark.child import EXIT_SPARK_GONE
from actors.engine.spark.java import JavaHome
from actors.engine.spark.remote_address import on_loopback
from actors.engine.spark.session import spark_conf
from actors.engine.spark_executor import SparkExecutor
from actors.model.plan.jobs import (
    AnalyzeStatement,
    CancelChildJob,
    ComputeDifference,
    JobFailed,
    JobProgress,
    QueryAnalyzed,
    SubmitJob,
    VolatileCall,
)
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.kernel import ActorAddress, ActorSystem, ReplySlot
from actors.runtime.settings import Settings

pytestmark = [pytest.mark.spark, pytest.mark.long]

LONG = TableSchema((TableColumn("x", "bigint"),))
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
"""What runs for a minute is not worth the second compiler."""
SHUFFLED = "SELECT sum(id) AS x FROM range(0, 1000, 1, 2)"
FOREVER = "SELECT sum(hash(a.id * b.id)) AS x FROM range(10000000) a CROSS JOIN range(10000000) b"


def settings_of(cluster: Cluster, java: JavaHome) -> Settings:
    return Settings(
        spark_master=cluster.url,
        spark_driver_memory="512m",
        spark_conf={
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": quick_java(java),
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.sql.shuffle.partitions": "2",
        },
        engine_jobs_in_flight_max=2,
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), java) as made:
        yield made


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, java: JavaHome, cluster: Cluster
) -> Iterator[ChildProcess]:
    made = ChildProcess(tmp_path_factory.mktemp("engine"), settings_of(cluster, java), java)
    try:
        cluster.master.wait_for("Launching executor .* on worker", WORKERS)
        yield made
    finally:
        made.close()
    # the driver was killed, not stopped: its executors must not stay for that
    cluster.master.wait_for("Removing app")


def progress_of(engine: ChildProcess) -> JobProgress:
    """The next progress that it tells."""
    told = engine.receive_any()
    assert isinstance(told, JobProgress), told
    return told


def test_a_join_and_aggregate_is_maintained(engine: ChildProcess) -> None:
    assert check_maintained(engine) == [False, True, True, True]


def test_a_large_step_reads_parts_from_the_shared_folder(
    engine: ChildProcess, tmp_path: Path
) -> None:
    assert check_large_step(engine, tmp_path) > 0


def test_a_difference_over_parts_and_over_inline_rows(engine: ChildProcess, tmp_path: Path) -> None:
    assert check_differences(engine, tmp_path) == [DIFFERENCE, DIFFERENCE]


def test_analysis_and_what_it_refuses(engine: ChildProcess) -> None:
    def asked(text: str) -> Any:
        return engine.ask(AnalyzeStatement(job_id(), (("l", LEFT),), text))

    counted = asked("SELECT k, count(*) AS c FROM l GROUP BY k")
    assert counted.schema.columns == (TableColumn("k", "bigint"), TableColumn("c", "bigint", False))
    assert asked("SELECT rand() AS r FROM l").volatility == VolatileCall("rand()")
    for text in ("SELECT nope FROM l", "DROP VIEW l"):
        refused = asked(text)
        assert (refused.code, bool(refused.text)) == ("QueryRejected", True)


def test_an_executors_error_of_the_data_is_the_views(engine: ChildProcess) -> None:
    sql = "SELECT sum(CAST(s AS bigint)) AS x FROM l GROUP BY k"
    given = rows_of(LEFT, [(1, 1, "word", 1, 1), (2, 1, "7", 1, 1)])
    answer = engine.ask(ComputeDifference(job_id(), sql, (("l", given),), LONG, 50))
    assert isinstance(answer, JobFailed)
    assert (answer.code, "CAST_INVALID_INPUT" in answer.text) == ("DefiniteError", True)
    assert len(answer.text) < 1500


def test_cancel_frees_the_executors(engine: ChildProcess) -> None:
    given = (("l", rows_of(LEFT, [(1, 1, "a", 1, 1)])),)
    running = [ComputeDifference(job_id(), FOREVER, given, LONG, 50) for _ in range(2)]
    for job in running:
        engine.send(job)
    while progress_of(engine).executors != WORKERS:
        pass  # a further one is told when it comes
    for job in running:
        engine.send(CancelChildJob(job.job_id))
    answers = [engine.receive() for _ in running]
    assert all(isinstance(a, JobFailed) and a.code == "OperationCanceled" for a in answers), answers
    sql = "SELECT sum(id) AS x FROM range(0, 1000, 1, 2)"  # a task for each core of the cluster
    answer = engine.ask(ComputeDifference(job_id(), sql, given, LONG, 50))
    assert table_of(answer).to_pylist() == [{"x": 499_500, TIME: 50, DIFF: 1}]


def test_tasks_ran_on_the_executors(engine: ChildProcess, cluster: Cluster) -> None:
    assert isinstance(engine.ask(AnalyzeStatement(job_id(), (), "SELECT 1")), QueryAnalyzed)
    sql = "SELECT sum(id) AS x FROM range(0, 1000, 1, 8)"
    table_of(engine.ask(ComputeDifference(job_id(), sql, (), LONG, 50)))
    assert len(cluster.executor_logs("Running task")) == WORKERS


def test_the_child_ends_when_its_context_has_stopped(
    engine: ChildProcess, cluster: Cluster
) -> None:
    """The JVM lives on, but every job would fail in it for ever."""
    cluster.end_application()
    with pytest.raises(EOFError):
        while True:  # some may be done before the context has stopped
            engine.ask(ComputeDifference(job_id(), SHUFFLED, (), LONG, 50))
    assert engine.process.wait(200) == EXIT_SPARK_GONE


@pytest.mark.long
async def test_the_executor_goes_on_when_its_context_has_stopped(
    cluster: Cluster, tmp_path: Path, java: JavaHome
) -> None:
    """After the test above, which has left the cores to this one."""
    async with ActorSystem() as system:
        executor: ActorAddress[Any] = system.spawn(
            lambda: SparkExecutor(settings_of(cluster, java), tmp_path), "engine"
        )

        async def run(name: str) -> None:
            reply: ReplySlot[Any] = ReplySlot()
            await executor.send(SubmitJob(ComputeDifference(name, SHUFFLED, (), LONG, 50), reply))
            found = table_of(await reply.wait()).to_pylist()
            assert found == [{"x": 499_500, TIME: 50, DIFF: 1}]

        def lost(children: int) -> bool:
            return any(f"children lost {children}" in text for _, text in system.describe())

        await run("before")
        assert lost(0)
        await anyio.to_thread.run_sync(cluster.end_application)
        number = 0
        while not lost(1):  # some may be done before the context has stopped
            number += 1
            await run(f"after-{number}")


def test_a_job_without_executors_says_so(cluster: Cluster, tmp_path: Path, java: JavaHome) -> None:
    settings = settings_of(cluster, java)
    settings.spark_conf["spark.executor.memory"] = "1g"  # more than a worker has
    waiting = ChildProcess(tmp_path, settings, java)
    try:
        waiting.send(ComputeDifference(job_id(), SHUFFLED, (), LONG, 50))
        told = progress_of(waiting)
        assert (told.tasks_done, told.executors) == (0, 0)
        assert told.shown().endswith("tasks done, and Spark has no executors")
    finally:
        waiting.close()


@pytest.mark.parametrize(
    ("master", "here"),
    [
        ("local[2]", True),
        ("spark://127.0.0.1:7077", True),
        ("spark://localhost:7077", True),
        ("spark://10.0.0.7:7077", False),
        ("spark://127.0.0.1.example.org:7077", False),
        ("spark://localhost:7077,10.0.0.7:7077", False),
        ("yarn", False),
    ],
)
def test_the_driver_stays_on_loopback_when_all_of_spark_does(
    tmp_path: Path, master: str, here: bool
) -> None:
    conf = spark_conf(Settings(spark_master=master), tmp_path)
    assert on_loopback(master) is here
    assert (conf.get("spark.driver.host") == "127.0.0.1") is here
    assert (conf.get("spark.driver.bindAddress") == "127.0.0.1") is here
    other = Settings(spark_master=master, spark_conf={"spark.driver.host": "198.51.100.1"})
    assert spark_conf(other, tmp_path)["spark.driver.host"] == "198.51.100.1"
