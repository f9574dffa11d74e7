"""Parts in a bucket are read by Spark where they are, and mean what the same files mean."""

from __future__ import annotations

import datetime as dt
import sys
import zlib
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from connect_server import running_server  # type: ignore[import-not-found]
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st

import s3_server  # type: ignore[import-not-found]
from actors.engine.spark.java import JavaHome
from actors.model.plan.delta import DeltaPlan, HiddenState, NamedInput, PlanStratum, SelectColumns
from actors.model.plan.jobs import (
    BucketFolder,
    BucketObject,
    ComputeDifference,
    JobFailed,
    JobRows,
    ObjectDone,
    PlanPrepared,
    PreparePlan,
    RowsDone,
    RunStep,
    SelectContents,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import concat, consolidate, negate, set_column, to_ipc
from actors.replica.dataflow.step import split_deltas
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives
from suite_lanes import examples  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

TYPES = {
    "k": "bigint",
    "s": "string",
    "d": "decimal(12,2)",
    "t": "timestamp",
    "l": "array<int>",
    "m": "map<string,int>",
    "r": "struct<a:int,b:string>",
    "b": "binary",
    "f": "double",
}
COLUMNS = tuple(TableColumn(name, kind) for name, kind in TYPES.items())
WIDE = TableSchema(COLUMNS)
NARROW = TableSchema(COLUMNS[:3])
"""Of a part that was written before the last columns were added."""
LONG = TableSchema((TableColumn("n", "bigint"),))
LISTED = DeltaPlan(
    ("t",), (WIDE,), WIDE, "", "incremental", "",
    (PlanStratum((), NamedInput("d0", WIDE.names), ()),),
)  # fmt: skip
KEYS = TableSchema((TableColumn("key", "bigint"), TableColumn("text", "string")))
STATEFUL = DeltaPlan(
    ("t",), (WIDE,), WIDE, "", "incremental", "",
    (
        PlanStratum(
            (),
            SelectColumns(
                NamedInput("d0", WIDE.names),
                (
                    *(NamedExpression(f"o_{name}", f"`{name}`") for name in WIDE.names),
                    NamedExpression("h0_key", "`k`"),
                    NamedExpression("h0_text", "`s`"),
                    NamedExpression("h1_key", "-`k`"),
                    NamedExpression("h1_text", "CAST(NULL AS string)"),
                    # Of every kind: rows of one delta, of several, and of none.
                    # The last bit is that of strata which seldom make a row.
                    NamedExpression("__to", "CAST(coalesce(`k`, 0) % 16 AS int)"),
                ),
            ),
            (),
        ),
    ),
    (HiddenState(KEYS, ("key",)), HiddenState(KEYS, ("key",))),
)  # fmt: skip
"""A view whose rows go into three shards."""
MANY = 20_000
"""Rows that no driver is to collect."""


@pytest.fixture(scope="module")
def s3() -> Iterator[s3_server.S3]:
    with s3_server.serving() as served:
        yield served


@pytest.fixture(scope="module")
def bucket(s3: s3_server.S3) -> str:
    return str(s3.new_bucket())


def bucket_child(
    folder: Path, java: JavaHome, s3: s3_server.S3, conf: dict[str, str], **env: str
) -> ChildProcess:
    """A child whose Spark may read the bucket, and reads files of any size itself."""
    variables = s3_server.variables(s3) | {"PYSPARK_PYTHON": sys.executable} | env
    settings = for_short_lives(bucket_settings(conf))
    constants = {"bucket_parts.SCAN_TASK_BYTES": 200_000}
    return ChildProcess(folder, settings, java, constants=constants, **variables)


def bucket_settings(conf: dict[str, str], spark_master: str = "local[2]") -> Settings:
    return Settings(
        spark_master=spark_master,
        spark_conf=conf,
        engine_jobs_in_flight_max=2,
        engine_inline_bytes_max=1,
        store_request_timeout_ms=60_000,
        store_request_retries_max=1,
        engine_collected_bytes_max=1_000_000,
    )


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, java: JavaHome, s3: s3_server.S3, events: Path
) -> Iterator[ChildProcess]:
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    made = bucket_child(tmp_path_factory.mktemp("engine"), java, s3, conf)
    answer = made.ask(PreparePlan(job_id(), "listed", LISTED))
    assert isinstance(answer, PlanPrepared), answer
    answer = made.ask(PreparePlan(job_id(), "stateful", STATEFUL))
    assert isinstance(answer, PlanPrepared), answer
    yield made
    made.close()


def value_of(name: str, number: int) -> Any:
    if number % 5 == 4:
        return None
    return {
        "k": number,
        "s": f"é{number}",
        "d": Decimal(number).scaleb(-2),
        "t": dt.datetime(1969, 12, 31, 23, tzinfo=dt.UTC) + dt.timedelta(microseconds=number),
        "l": [number, None],
        "m": [("x", number)],
        "r": {"a": number, "b": None},
        "b": bytes([number % 256]),
        "f": -0.0 if number % 2 else float("nan"),
    }[name]


class PartWriter:
    """Writes parts both as files and as objects."""

    def __init__(self, folder: Path, s3: s3_server.S3, bucket: str) -> None:
        self._folder, self._s3, self._bucket = folder, s3, bucket
        self._count = 0

    def write(
        self, schema: TableSchema, rows: list[tuple[int, int, int]], group_rows: int = 100
    ) -> tuple[str, BucketObject]:
        """Write rows (number, time, diff)."""
        shape = schema.arrow_updates()
        columns: list[Any] = [[value_of(name, n) for n, _, _ in rows] for name in schema.names]
        columns += [[time for _, time, _ in rows], [diff for _, _, diff in rows]]
        arrays = [pa.array(each, field.type) for each, field in zip(columns, shape, strict=True)]
        self._count += 1
        path = self._folder / f"{self._count}.parquet"
        table = pa.Table.from_arrays(arrays, schema=shape)
        pq.write_table(table, path, compression="zstd", row_group_size=group_rows)
        key = f"x/blobs/s/{self._folder.name}-{self._count}.parquet"
        data = path.read_bytes()
        self._s3.ask("PUT", f"/{self._bucket}/{key}", data)
        return str(path), BucketObject(f"s3://{self._bucket}", key, len(data))


def plain(answer: Any) -> list[str]:
    rows: list[dict[str, Any]] = table_of(answer).to_pylist()
    return sorted(map(repr, rows))


UPDATES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([1, 1, 2, -1])), max_size=9
)


@pytest.mark.second
@settings(max_examples=examples(8), deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), UPDATES), min_size=1, max_size=3),
    st.integers(0, 4),
    st.integers(4, 11),
    st.sampled_from([None, 3, 9]),
    st.booleans(),
)
def test_objects_mean_what_files_mean(
    engine: ChildProcess,
    s3: s3_server.S3,
    bucket: str,
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[tuple[bool, list[tuple[int, int, int]]]],
    lower: int,
    upper: int,
    advance_to: int | None,
    narrow: bool,
) -> None:
    """Parts that lack columns or have more of them, later and earlier updates, raised times."""
    writer = PartWriter(tmp_path_factory.mktemp("parts"), s3, bucket)
    made = [writer.write(NARROW if few else WIDE, rows, 3) for few, rows in parts]
    limits: dict[str, Any] = {"lower": lower, "upper": upper, "advance_to": advance_to}
    files = JobRows(WIDE, files=tuple(path for path, _ in made), **limits)
    objects = JobRows(WIDE, objects=tuple(part for _, part in made), **limits)
    steps = [
        engine.ask(RunStep(job_id(), "listed", 0, 0, {"d0": rows}, 0, 20))
        for rows in (files, objects)
    ]
    assert plain(steps[0]) == plain(steps[1])
    schema = NARROW if narrow else WIDE
    sql = f"SELECT {', '.join(schema.names)} FROM t"
    found = []
    for rows in (files, objects):
        given_rows = JobRows(schema, files=rows.files, objects=rows.objects, **limits)
        tables = (("t", given_rows),)
        found.append(plain(engine.ask(SelectContents(job_id(), sql, tables, schema))))
    assert found[0] == found[1]


def test_large_parts_are_cut_and_only_wanted_columns_are_fetched(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path
) -> None:
    schema = TableSchema((TableColumn("k", "bigint"), TableColumn("s", "string")))
    _, part = PartWriter(tmp_path, s3, bucket).write(
        schema, [(n, 1, 1) for n in range(60_000)], 10_000
    )
    rows = JobRows(schema, objects=(part,), advance_to=5)
    s3.calls.clear()
    answer = engine.ask(
        ComputeDifference(job_id(), "SELECT count(k) AS n FROM t", (("t", rows),), LONG, 50)
    )
    assert table_of(answer).to_pylist() == [{"n": 48_000, TIME: 50, DIFF: 1}]
    assert len(s3.calls) > 6  # the footer, and row groups in several tasks


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("sql", "whole"),
    [
        ("SELECT count(k) AS n FROM t", False),
        ("SELECT max(k) AS n FROM t WHERE d > 1 AND k < 100000", False),
        ("SELECT count(a.k) AS n FROM t a JOIN t b ON a.k = b.k WHERE b.d IS NOT NULL", False),
        ("SELECT count(*) AS n FROM t WHERE k > (SELECT max(k) FROM t) - 50", False),
        ("SELECT count(*) AS n FROM t WHERE k > (SELECT count(s) FROM t) - 50", True),
        ("SELECT count(*) AS n FROM t a WHERE EXISTS (SELECT 1 FROM t b WHERE b.s = 'x')", True),
        ("SELECT count(DISTINCT s) AS n FROM t", True),
        ("SELECT count(*) AS n FROM (SELECT DISTINCT * FROM t)", True),
    ],
)
def test_columns_that_a_query_does_not_read_are_not_fetched(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path, sql: str, *, whole: bool
) -> None:
    """Column `s` is damaged: who reads it fails."""
    path, part = PartWriter(tmp_path, s3, bucket).write(NARROW, [(n, 1, 1) for n in range(90)])
    column = pq.read_metadata(path).row_group(0).column(1)
    data = bytearray(Path(path).read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    tables = (("t", JobRows(NARROW, files=(path,))),)
    wanted = engine.ask(SelectContents(job_id(), sql, tables, LONG))
    s3.ask("PUT", f"/{bucket}/{part.key}", bytes(data))
    tables = (("t", JobRows(NARROW, objects=(part,))),)
    found = engine.ask(SelectContents(job_id(), sql, tables, LONG))
    if whole:
        assert (found.code, part.key in found.text) == ("EngineLost", True), found
    else:
        assert plain(found) == plain(wanted)


@pytest.mark.long
def test_executors_write_a_large_answer_as_objects(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path
) -> None:
    """What the objects hold is what would come by the driver, at the time of the answer."""
    writer = PartWriter(tmp_path, s3, bucket)
    _, part = writer.write(WIDE, [(n, 1, 1 + n % 2) for n in range(MANY)], 5_000)
    given_rows = {"d0": JobRows(WIDE, objects=(part,), advance_to=0)}
    step = RunStep(job_id(), "listed", 0, 0, given_rows, 0, 8, True)
    wanted = table_of(engine.ask(step)).to_pylist()
    folders = (BucketFolder(f"s3://{bucket}", "x/blobs/v/n-1-"),)
    step = RunStep(job_id(), "listed", 0, 0, given_rows, 0, 8, True, into_bucket=folders)
    answer = engine.ask(step)
    assert isinstance(answer, RowsDone), answer
    assert answer.objects
    tables = [object_of(s3, bucket, folders[0], each) for each in answer.objects]
    assert all(table.schema.equals(WIDE.arrow_updates()) for table in tables)
    found = pa.concat_tables(tables).to_pylist()
    assert answer.rows == len(found) == MANY
    assert {row[TIME] for row in found} == {7}
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", ["step", "whole", "difference"])
def test_executors_cut_a_large_answer_into_the_objects_of_each_shard(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path, kind: str
) -> None:
    """As the service cuts what comes by the driver."""
    _, part = PartWriter(tmp_path, s3, bucket).write(
        WIDE, [(n, 1 + n % 7, 1 + n % 2) for n in range(MANY)], 5_000
    )
    given_rows = {"d0": JobRows(WIDE, objects=(part,), advance_to=None if kind == "step" else 0)}
    lo, whole = (1, False) if kind == "step" else (0, True)
    step = RunStep(job_id(), "stateful", 0, 0, given_rows, lo, 8, whole)
    deltas = split_deltas(STATEFUL, table_of(engine.ask(step)))
    wanted = [deltas[0], *deltas[1]]
    old: tuple[JobRows, ...] = ()
    if kind == "difference":
        # Of each some rows as they are, some of another weight, and one that is gone.
        kept = [reweighed(rows) for rows in wanted]
        schemas = [delta.schema for delta in STATEFUL.deltas]
        old = tuple(JobRows(s, to_ipc(rows)) for s, rows in zip(schemas, kept, strict=True))
        wanted = [
            consolidate(concat([rows, negate(less)], rows.schema))
            for rows, less in zip(wanted, kept, strict=True)
        ]
    places = tuple(BucketFolder(f"s3://{bucket}", f"x/blobs/{kind}{n}/n-1-") for n in range(3))
    step = RunStep(
        job_id(), "stateful", 0, 0, given_rows, lo, 8, whole,
        optimistic=kind == "step", into_bucket=places, old=old,
    )  # fmt: skip
    answer = engine.ask(step)
    assert isinstance(answer, RowsDone), answer
    assert answer.objects
    for number, rows in enumerate(wanted):
        assert rows.num_rows > 5_000
        mine = [each for each in answer.objects if each.delta == number]
        tables = [object_of(s3, bucket, places[number], each) for each in mine]
        found = consolidate(pa.concat_tables(tables))
        assert sum(each.rows for each in mine) == found.num_rows
        assert found.schema.equals(STATEFUL.deltas[number].schema.arrow_updates())
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, rows.to_pylist()))
    # Rows of strata that seldom make one: the run was in vain.
    assert any(each.delta == 3 for each in answer.objects) == (kind == "step")


def reweighed(rows: pa.Table) -> pa.Table:
    """Contents like these, with other weights and fewer rows."""
    few = rows.slice(0, 4_000)
    weights = pa.array([1 + n % 3 for n in range(few.num_rows)], pa.int64())
    return set_column(few, DIFF, weights)


def object_of(s3: s3_server.S3, bucket: str, place: BucketFolder, made: ObjectDone) -> pa.Table:
    """The rows of an object, which is as its description says."""
    data = s3.get(bucket, place.prefix + made.name)
    assert (len(data), zlib.crc32(data)) == (made.size, made.checksum)
    table = pq.read_table(pa.BufferReader(data))
    times = pc.min_max(table[TIME]).as_py()
    assert (times["min"], times["max"]) == (made.time_min, made.time_max)
    assert pq.read_metadata(pa.BufferReader(made.footer)).num_rows == made.rows == table.num_rows
    return table


@pytest.mark.second
def test_executors_write_the_large_difference_of_a_query(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path
) -> None:
    writer = PartWriter(tmp_path, s3, bucket)
    _, part = writer.write(WIDE, [(n, 1, 1 + n % 2) for n in range(MANY)], 5_000)
    path, _ = writer.write(WIDE, [(n, 1, 1) for n in range(MANY - 500)])
    tables = (("t", JobRows(WIDE, objects=(part,))),)
    old = JobRows(WIDE, files=(path,))
    sql = "SELECT * FROM t"
    wanted = engine.ask(ComputeDifference(job_id(), sql, tables, WIDE, 9, old))
    place = BucketFolder(f"s3://{bucket}", "x/blobs/query/n-1-")
    answer = engine.ask(
        ComputeDifference(job_id(), sql, tables, WIDE, 9, old, into_bucket=(place,))
    )
    assert isinstance(answer, RowsDone), answer
    assert answer.objects
    found = pa.concat_tables([object_of(s3, bucket, place, each) for each in answer.objects])
    assert found.num_rows == answer.rows > MANY // 3
    assert sorted(map(repr, found.to_pylist())) == plain(wanted)


@settings(max_examples=examples(8), deadline=None)
@given(UPDATES, st.lists(UPDATES, min_size=3, max_size=3), st.booleans())
def test_the_difference_to_old_contents_is_one_for_each_shard(
    engine: ChildProcess,
    tmp_path_factory: pytest.TempPathFactory,
    new: list[tuple[int, int, int]],
    old: list[list[tuple[int, int, int]]],
    in_spark: bool,
) -> None:
    folder = tmp_path_factory.mktemp("old")

    def rows(schema: TableSchema, given_rows: list[tuple[int, int, int]], name: str) -> Any:
        names = ["k", "s"] if schema == KEYS else schema.names
        columns: list[Any] = [[value_of(name, n) for n, _, _ in given_rows] for name in names]
        columns += [[time for _, time, _ in given_rows], [diff for _, _, diff in given_rows]]
        shape = schema.arrow_updates()
        arrays = [pa.array(each, field.type) for each, field in zip(columns, shape, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=shape)
        if not in_spark:
            return table, JobRows(schema, to_ipc(table))
        pq.write_table(table, folder / name)
        return table, JobRows(schema, files=(str(folder / name),))

    _, given_rows = rows(WIDE, new, "new")
    pairs = enumerate(zip(STATEFUL.deltas, old, strict=True))
    given_old = [rows(delta.schema, each, f"old{n}") for n, (delta, each) in pairs]
    jobs = [
        RunStep(job_id(), "stateful", 0, 0, {"d0": given_rows}, 0, 8, True, old=less)
        for less in ((), tuple(each for _, each in given_old))
    ]
    whole, found = (split_deltas(STATEFUL, table_of(engine.ask(job))) for job in jobs)
    for made, less, difference in zip(
        (whole[0], *whole[1]), (table for table, _ in given_old), (found[0], *found[1]), strict=True
    ):
        # At the time of the answer, whatever the times of the old contents.
        signed = concat([made, negate(less)], made.schema)
        times = pa.repeat(pa.scalar(7, pa.int64()), signed.num_rows)
        wanted = consolidate(set_column(signed, TIME, times))
        assert difference.schema.equals(made.schema)
        assert sorted(map(repr, difference.to_pylist())) == sorted(map(repr, wanted.to_pylist()))


def test_a_part_that_is_gone_is_no_error_of_the_data(
    engine: ChildProcess, s3: s3_server.S3, bucket: str, tmp_path: Path
) -> None:
    _, part = PartWriter(tmp_path, s3, bucket).write(NARROW, [(1, 1, 1)])
    job = ComputeDifference(
        job_id(), "SELECT count(*) AS n FROM t", (("t", JobRows(NARROW, objects=(part,))),), LONG, 5
    )
    assert table_of(engine.ask(job)).num_rows == 1  # its footer is known from now on
    s3.ask("DELETE", f"/{bucket}/{part.key}")
    for rule in (lambda _: None, lambda _: "fail", lambda _: "deny"):
        s3.rule = rule
        try:
            failed = engine.ask(job)
        finally:
            s3.rule = lambda _: None
        assert isinstance(failed, JobFailed)
        assert failed.code == "EngineLost", failed
        assert part.key in failed.text
        assert s3_server.SECRET not in failed.text
        assert s3_server.KEY_ID not in failed.text


def test_no_secret_is_in_the_event_log_or_in_a_log(engine: ChildProcess, events: Path) -> None:
    """After the tests above, whose queries are in it."""
    files = [path for path in events.rglob("*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in [*files, engine.log]]
    assert any("penstock_parts" in text for text in texts)
    for text in texts:
        assert s3_server.SECRET not in text
        assert s3_server.KEY_ID not in text


@pytest.mark.long
def test_behind_spark_connect_the_server_reads_and_writes_the_bucket(
    tmp_path: Path, java: JavaHome, s3: s3_server.S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With credentials and a Python of its own; this service shares no folder with it."""
    writer = PartWriter(tmp_path, s3, bucket)
    made = [writer.write(NARROW, [(3, 2, 1), (4, 2, -1)]), writer.write(WIDE, [(4, 1, 1)])]
    rows = JobRows(WIDE, objects=tuple(part for _, part in made), advance_to=5, upper=6)
    _, many = writer.write(WIDE, [(n, 1, 1) for n in range(40_000)], 10_000)
    given_rows = {"d0": JobRows(WIDE, objects=(many,), advance_to=0)}
    folders = (BucketFolder(f"s3://{bucket}", "x/blobs/c/n-1-"),)
    s3_server.point_to(monkeypatch, s3)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with running_server(tmp_path / "server", java) as server:
        settings = bucket_settings({}, spark_master=server.url)
        engine = ChildProcess(tmp_path / "engine", settings, java, **s3_server.variables(s3))
        try:
            sql = f"SELECT {', '.join(WIDE.names)} FROM t"
            answer = engine.ask(SelectContents(job_id(), sql, (("t", rows),), WIDE))
            assert [row["k"] for row in table_of(answer).to_pylist()] == [3]
            assert isinstance(engine.ask(PreparePlan(job_id(), "listed", LISTED)), PlanPrepared)
            step = RunStep(job_id(), "listed", 0, 0, given_rows, 0, 8, True, into_bucket=folders)
            answer = engine.ask(step)
            assert isinstance(answer, RowsDone), answer
            assert answer.objects
            assert sum(each.rows for each in answer.objects) == answer.rows == 40_000
            keys = {key for key in s3.keys(bucket) if key.startswith(folders[0].prefix)}
            assert keys == {folders[0].prefix + each.name for each in answer.objects}
        finally:
            engine.close()


@pytest.mark.long
def test_a_python_that_lacks_what_is_needed_is_named(
    tmp_path: Path, java: JavaHome, s3: s3_server.S3, bucket: str
) -> None:
    """No error of the view's data: it goes on when the Python is there."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "obstore.py").write_text("raise ImportError('no obstore here')\n")
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}/bare:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    engine = bucket_child(tmp_path / "engine", java, s3, {}, PYSPARK_PYTHON=str(script))
    try:
        _, part = PartWriter(tmp_path, s3, bucket).write(NARROW, [(1, 1, 1)])
        rows = JobRows(NARROW, objects=(part,))
        job = ComputeDifference(job_id(), "SELECT count(*) AS n FROM t", (("t", rows),), LONG, 5)
        failed = engine.ask(job)
        assert (failed.code, "pip install obstore" in failed.text) == ("EngineLost", True), failed
    finally:
        engine.close()
