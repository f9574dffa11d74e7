"""The general path on a standalone cluster: two executors, which share a folder with the driver."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

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
from standalone_cluster import WORKERS, Cluster, running_cluster  # type: ignore[import-not-found]

from actors.plan.delta import (
    Accumulate,
    Consolidate,
    DeltaPlan,
    Hidden,
    Input,
    Measure,
    Node,
    Pair,
    Reduce,
    Select,
    Stratum,
    Union,
)
from actors.plan.jobs import (
    Analyze,
    Analyzed,
    Cancel,
    Difference,
    JobFailed,
    Prepare,
    Prepared,
    Rows,
    RowsDone,
    Step,
)
from actors.plan.relational import Named
from actors.plan.schema import DIFF, TIME, Column, Schema
from actors.settings import Settings
from actors.spark.java import JavaHome
from actors.spark.session import on_loopback, spark_conf

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

LEFT = Schema((Column("k", "bigint"), Column("v", "int"), Column("s", "string")))
RIGHT = Schema((Column("k", "bigint"), Column("w", "decimal(12,2)")))
GROUPS = Schema((Column("g", "string"), Column("n", "bigint"), Column("m", "decimal(38,2)")))
TO = Column("__to", "int")
LONG = Schema((Column("x", "bigint"),))
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
"""What runs for a minute is not worth the second compiler."""
FOREVER = "SELECT sum(hash(a.id * b.id)) AS x FROM range(10000000) a CROSS JOIN range(10000000) b"


def left(name: str) -> Node:
    made = (Named("a_k", "k"), Named("a_v", "v"), Named("a_s", "s"))
    return Select(Input(name, LEFT.names), made)


def right(name: str) -> Node:
    return Select(Input(name, RIGHT.names), (Named("b_k", "k"), Named("b_w", "w")))


def pair(one: str, other: str) -> Node:
    return Pair(left(one), right(other), (("a_k", "b_k"),), "a_v < b_w")


def named(columns: tuple[str, ...], prefix: str) -> tuple[Named, ...]:
    return tuple(Named(f"{prefix}{name}", name) for name in columns)


JOINED = Union((pair("d0", "s1"), pair("s0", "d1"), pair("d0", "d1")))
CONTRIBUTIONS = Reduce(
    JOINED, (Named("g", "upper(a_s)"),), (Measure("m", "sum", "b_w", "decimal(38,2)"),)
)
TOTALS = Accumulate(Input("r0", GROUPS.names), Input("h0", GROUPS.names), ("g",), ("m",))
BOTH = (*named(GROUPS.names, "o_"), *named(GROUPS.names, "h0_"), Named("__to", "3"))
PLAN = DeltaPlan(
    sources=("l", "r"),
    source_schemas=(LEFT, RIGHT),
    output=GROUPS,
    sql="",
    mode="incremental",
    reason="",
    strata=(
        Stratum((), CONTRIBUTIONS, ()),
        Stratum((), Consolidate(Select(TOTALS, BOTH)), ()),
    ),
    hidden=(Hidden(GROUPS, ("g",)),),
)
MEANINGS = {
    "a_v < b_w": lambda row: (
        None if row["a_v"] is None or row["b_w"] is None else row["a_v"] < row["b_w"]
    ),
    "upper(a_s)": lambda row: None if row["a_s"] is None else row["a_s"].upper(),
    "3": lambda row: 3,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), java) as made:
        yield made


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, java: JavaHome, cluster: Cluster
) -> Iterator[ChildProcess]:
    settings = Settings(
        spark_master=cluster.url,
        spark_driver_memory="512m",
        spark_conf={
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.sql.shuffle.partitions": "2",
        },
        engine_jobs_in_flight_max=2,
    )
    made = ChildProcess(tmp_path_factory.mktemp("engine"), settings, java)
    try:
        cluster.master.wait_for("Launching executor .* on worker", WORKERS)
        yield made
    finally:
        made.close()
    # the driver was killed, not stopped: its executors must not stay for that
    cluster.master.wait_for("Removing app")


class History:
    """The updates of a table: rows come, and rows that are there go."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self.schema = schema
        self.rows: list[Any] = []
        self._there: list[tuple[Any, ...]] = []
        self._random = random.Random(seed)

    def grow(self, lo: int, hi: int) -> list[Any]:
        """Updates at times in ``[lo, hi)``, in the order of time."""
        made = []
        for time in sorted(self._random.choices(range(lo, hi), k=12)):
            if self._there and self._random.random() < 0.35:
                at = self._random.randrange(len(self._there))
                made.append((*self._there.pop(at), time, -1))
            else:
                row = tuple(self._value(column) for column in self.schema.columns)
                self._there.append(row)
                made.append((*row, time, 1))
        self.rows += made
        return made

    def _value(self, column: Column) -> Any:
        if self._random.random() < 0.15:
            return None
        if column.type == "string":
            return self._random.choice(["x", "X", "y", "ä"])
        if column.type.startswith("decimal"):
            return Decimal(self._random.randrange(900)) / 100
        return self._random.randrange(4)


def as_model(schema: Schema, rows: list[Any]) -> Updates:
    return [(dict(zip(schema.names, row[:-2], strict=True)), row[-2], row[-1]) for row in rows]


def from_table(table: Any) -> Updates:
    return [
        ({k: v for k, v in row.items() if k not in (TIME, DIFF)}, row[TIME], row[DIFF])
        for row in table.to_pylist()
    ]


def rows_of(schema: Schema, rows: list[Any]) -> Rows:
    return Rows(schema, arrow=ipc(schema, rows))


def modeled(inputs: dict[str, tuple[Schema, list[Any]]], lo: int, hi: int) -> Counter[Any]:
    given = {name: as_model(schema, rows) for name, (schema, rows) in inputs.items()}
    model = Model(given, MEANINGS, lo, hi)
    for index, stratum in enumerate(PLAN.strata):
        given[f"r{index}"] = model.run(stratum.node)
    return Counter(consolidated(given["r1"]))


def view_of(lefts: list[Any], rights: list[Any]) -> Counter[Any]:
    """The view from scratch: (g, n, m) → 1, from whole contents."""
    counts: Counter[Any] = Counter()
    sums: Counter[Any] = Counter()
    for k, v, s, _, one in lefts:
        for key, w, _, other in rights:
            if None not in (k, key, v, w) and k == key and v < w:
                group = None if s is None else s.upper()
                counts[group] += one * other
                sums[group] += w * one * other
    return Counter({(group, n, sums[group]): 1 for group, n in counts.items() if n})


def test_a_join_and_aggregate_is_maintained(engine: ChildProcess) -> None:
    answer = engine.ask(Prepare(job_id(), "view", PLAN))
    assert isinstance(answer, Prepared), answer
    lefts, rights = History(LEFT, 1), History(RIGHT, 2)
    hidden: list[Any] = []
    for lo in range(0, 40, 10):
        old = {"s0": list(lefts.rows), "s1": list(rights.rows), "h0": list(hidden)}
        new = {"d0": lefts.grow(lo, lo + 10), "d1": rights.grow(lo, lo + 10)}
        schemas = {"s0": LEFT, "d0": LEFT, "s1": RIGHT, "d1": RIGHT, "h0": GROUPS}
        inputs = {name: (schemas[name], rows) for name, rows in (old | new).items()}
        given = {name: rows_of(schema, rows) for name, (schema, rows) in inputs.items()}
        answer = engine.ask(Step(job_id(), "view", 0, 1, given, lo, lo + 10))
        assert isinstance(answer, RowsDone), answer
        assert not answer.prepared  # executors need not see the driver's files
        found = from_table(table_of(answer))
        assert consolidated(found) == modeled(inputs, lo, lo + 10)
        hidden += [
            (row["h0_g"], row["h0_n"], row["h0_m"], time, diff)
            for row, time, diff in found
            if row[TO.name] == 3
        ]
        held: Counter[Any] = Counter()
        for row in hidden:
            held[row[:3]] += row[-1]
        assert +held == view_of(lefts.rows, rights.rows)
        assert all(weight >= 0 for weight in held.values())
    assert len(+held) > 2


def padding(schema: Schema, time: int) -> list[Any]:
    """Rows at a time that no job asks for, enough to make parts too large for the driver."""
    assert schema == LEFT
    random_ = random.Random(5)
    return [(7, n, random_.randbytes(60).hex(), time, 1) for n in range(50_000)]


def write_parts(folder: Path, rows: list[Any], later: int) -> tuple[str, ...]:
    part, large = folder / "part.parquet", folder / "large.parquet"
    pq.write_table(updates(LEFT, rows), part)
    noise = updates(LEFT, padding(LEFT, later))
    pq.write_table(noise, large, compression="none", use_dictionary=False)
    assert large.stat().st_size > 4 * 1024 * 1024
    return str(part), str(large)


def test_a_large_step_reads_parts_from_the_shared_folder(
    engine: ChildProcess, tmp_path: Path
) -> None:
    assert isinstance(engine.ask(Prepare(job_id(), "large", PLAN)), Prepared)
    lefts, rights = History(LEFT, 3).grow(0, 10), History(RIGHT, 4).grow(0, 10)
    files = write_parts(tmp_path, lefts, 99)
    given = {"d0": Rows(LEFT, files=files, lower=0, upper=10), "d1": rows_of(RIGHT, rights)}
    answer = engine.ask(Step(job_id(), "large", 0, 1, given, 0, 10))
    found = consolidated(from_table(table_of(answer)))
    assert found == modeled({"d0": (LEFT, lefts), "d1": (RIGHT, rights)}, 0, 10)
    assert not answer.prepared
    assert found


def test_a_difference_over_parts_and_over_inline_rows(engine: ChildProcess, tmp_path: Path) -> None:
    output = Schema((Column("s", "string"), Column("c", "bigint")))
    rows: list[Any] = [(1, 1, "a", 1, 1), (1, 1, "a", 3, 2), (2, 2, "a", 2, 1), (2, 2, "a", 5, -1)]
    rows.append((3, None, None, 4, 1))
    files = write_parts(tmp_path, rows, 99)
    old = rows_of(output, [("a", 2, 7, 1), ("gone", 1, 7, 2)])
    sql = "SELECT s, count(*) FROM t GROUP BY s"
    for given in (Rows(LEFT, files=files, lower=0, upper=50), rows_of(LEFT, rows)):
        answer = engine.ask(Difference(job_id(), sql, (("t", given),), output, 50, old))
        found = {(r["s"], r["c"], r[TIME], r[DIFF]) for r in table_of(answer).to_pylist()}
        assert found == {
            ("a", 3, 50, 1), ("a", 2, 50, -1), (None, 1, 50, 1), ("gone", 1, 50, -2),
        }  # fmt: skip


def test_analysis_and_what_it_refuses(engine: ChildProcess) -> None:
    texts = ("SELECT k, count(*) AS c FROM l GROUP BY k", "SELECT rand() AS r FROM l")
    answer = engine.ask(Analyze(job_id(), (("l", LEFT),), texts))
    assert isinstance(answer, Analyzed), answer
    assert answer.schemas[0].columns == (Column("k", "bigint"), Column("c", "bigint", False))
    assert answer.deterministic == (True, False)
    for text in ("SELECT nope FROM l", "DROP VIEW l"):
        refused = engine.ask(Analyze(job_id(), (("l", LEFT),), (text,)))
        assert (refused.code, bool(refused.text)) == ("QueryRejected", True)


def test_an_executors_error_of_the_data_is_the_views(engine: ChildProcess) -> None:
    sql = "SELECT sum(CAST(s AS bigint)) AS x FROM l GROUP BY k"
    given = rows_of(LEFT, [(1, 1, "word", 1, 1), (2, 1, "7", 1, 1)])
    answer = engine.ask(Difference(job_id(), sql, (("l", given),), LONG, 50))
    assert isinstance(answer, JobFailed)
    assert (answer.code, "CAST_INVALID_INPUT" in answer.text) == ("DefiniteError", True)
    assert len(answer.text) < 1500


def test_cancel_frees_the_executors(engine: ChildProcess) -> None:
    given = (("l", rows_of(LEFT, [(1, 1, "a", 1, 1)])),)
    running = [Difference(job_id(), FOREVER, given, LONG, 50) for _ in range(2)]
    for job in running:
        engine.send(job)
    for job in running:
        engine.send(Cancel(job.job_id))
    answers = [engine.receive() for _ in running]
    assert all(isinstance(a, JobFailed) and a.code == "Canceled" for a in answers), answers
    sql = "SELECT sum(id) AS x FROM range(0, 1000, 1, 2)"  # a task for each core of the cluster
    answer = engine.ask(Difference(job_id(), sql, given, LONG, 50))
    assert table_of(answer).to_pylist() == [{"x": 499_500, TIME: 50, DIFF: 1}]


def test_tasks_ran_on_the_executors(engine: ChildProcess, cluster: Cluster) -> None:
    assert isinstance(engine.ask(Analyze(job_id(), (), ("SELECT 1",))), Analyzed)
    sql = "SELECT sum(id) AS x FROM range(0, 1000, 1, 8)"
    table_of(engine.ask(Difference(job_id(), sql, (), LONG, 50)))
    logs = cluster.executor_logs()
    assert len(logs) == WORKERS
    assert any("Running task" in log for log in logs)


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
