"""Plain Spark: the Query job over Parquet files as they are, the Select job over contents, clients'
queries on a service that has Spark; and the cores of a local master."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.doors.client.rows import expand
from actors.engine.spark.session import local_cores
from actors.model.plan.jobs import JobFailed, JobRows, QueryFiles, RowsDone, SelectContents
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.errors import DefiniteError, QueryRejected
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives
from query_corpus import COLUMNS, rows_of, sql_of  # type: ignore[import-not-found]

T = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "string")))
PAIR_BYTES = 16
QUERIES = 14
QUERIES_OF_PROOF = 200
"""Drawn queries, beside `TRAPS`."""


def test_cores_of_a_local_master() -> None:
    assert local_cores("local") == 1
    assert local_cores("local[3]") == 3
    assert local_cores("local[4,2]") == 4
    assert local_cores("local[*]") >= 1


@pytest.mark.spark
@pytest.mark.long
def test_a_query_has_its_own_columns_and_no_others(child: ChildProcess, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"k": [1, 1, 2], "v": [10, None, 30]}), path)
    sql = "SELECT k, sum(v) AS s FROM t GROUP BY k ORDER BY k"
    answer = child.ask(QueryFiles(job_id(), sql, (("t", str(path)),)))
    assert table_of(answer).to_pylist() == [{"k": 1, "s": 10}, {"k": 2, "s": 30}]
    refused = child.ask(QueryFiles(job_id(), "SELECT nothing FROM t", (("t", str(path)),)))
    assert isinstance(refused, JobFailed)
    assert refused.code == "QueryRejected"


@pytest.mark.spark
@pytest.mark.long
def test_a_select_sums_up_contents_and_keeps_the_order(child: ChildProcess) -> None:
    updates = pa.table(
        {
            "k": pa.array([1, 2, 2, 3, 1], pa.int64()),
            "v": ["a", "b", "b", None, "a"],
            TIME: pa.array([5] * 5, pa.int64()),
            DIFF: pa.array([1, 1, 1, 1, -1], pa.int64()),
        }
    )
    tables = (("t", JobRows(T, arrow=to_ipc(updates))),)
    sql = "SELECT v, k FROM t ORDER BY k DESC"
    output = TableSchema((TableColumn("v", "string"), TableColumn("k", "bigint")))
    answer = child.ask(SelectContents(job_id(), sql, tables, output, into_files=True))
    rows = [{"v": None, "k": 3}, {"v": "b", "k": 2}, {"v": "b", "k": 2}]
    assert table_of(answer).to_pylist() == rows
    failing = SelectContents(
        job_id(), "SELECT 1 div (k - 3) AS x FROM t", tables, TableSchema(T.columns[:1])
    )
    refused = child.ask(failing)
    assert isinstance(refused, JobFailed)
    assert refused.code == "DefiniteError"


@pytest.mark.spark
@pytest.mark.long
def test_a_large_select_goes_into_files_that_keep_the_order(
    child: ChildProcess, tmp_path: Path
) -> None:
    count = 1_000_000
    path = tmp_path / "t.parquet"
    values = np.random.default_rng(3).integers(0, 1 << 62, count)
    ones = np.ones(count, np.int64)
    pq.write_table(pa.table({"x": values, TIME: ones, DIFF: ones}), path)
    assert path.stat().st_size > child.settings.engine_collected_bytes_max
    schema = TableSchema((TableColumn("x", "bigint"),))
    tables = (("t", JobRows(schema, files=(str(path),))),)
    sql = "SELECT x FROM t ORDER BY x"
    answer = child.ask(SelectContents(job_id(), sql, tables, schema, into_files=True))
    assert isinstance(answer, RowsDone)
    assert answer.files is not None
    assert answer.rows == sum(file.rows for file in answer.files) == count
    found = np.concatenate([pq.read_table(file.path)["x"].to_numpy() for file in answer.files])
    assert (found == np.sort(values)).all()
    for file in answer.files:
        Path(file.path).unlink()


TRAPS = (
    "SELECT K, T.n AS `a b`, S FROM T ORDER BY k",
    "SELECT * FROM t WHERE f > 1 ORDER BY k",
    "SELECT k, f FROM t WHERE 0 = f ORDER BY k",
    "SELECT f, k FROM t WHERE f <> 0 ORDER BY f DESC, k",
    "SELECT k FROM t WHERE NOT s IS NULL AND s < 'bc' ORDER BY s DESC NULLS FIRST, k LIMIT 5",
    "SELECT k, f FROM t ORDER BY f, k",
    "SELECT k, f FROM t ORDER BY f DESC NULLS FIRST, k LIMIT 12 OFFSET 3",
)
"""Names in other cases, NaN, zeros with a sign, infinities, NULLs in order."""


@pytest.mark.spark
@pytest.mark.long
def test_a_large_answer_over_small_inputs_goes_into_files_too(child: ChildProcess) -> None:
    count = 800
    assert count * count * PAIR_BYTES > child.settings.engine_collected_bytes_max
    ones = np.ones(count, np.int64)
    updates = pa.table({"k": np.arange(count), "v": ["x"] * count, TIME: ones, DIFF: ones})
    tables = (("t", JobRows(T, arrow=to_ipc(updates))),)
    output = TableSchema((TableColumn("k", "bigint"), TableColumn("o", "bigint")))
    sql = "SELECT a.k, b.k AS o FROM t a CROSS JOIN t b ORDER BY a.k, o DESC"
    answer = child.ask(SelectContents(job_id(), sql, tables, output, into_files=True))
    assert isinstance(answer, RowsDone)
    assert answer.files is not None
    found = pa.concat_tables([pq.read_table(file.path) for file in answer.files])
    assert (found["k"].to_numpy() == np.repeat(np.arange(count), count)).all()
    assert (found["o"].to_numpy() == np.tile(np.arange(count)[::-1], count)).all()
    for file in answer.files:
        Path(file.path).unlink()


async def _all(pieces: Any) -> pa.Table:
    async with aclosing(pieces):
        return expand(pa.concat_tables([piece async for piece in pieces]))


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.timeout(1800)
async def test_a_client_s_queries_by_spark_equal_its_reads(tmp_path: Path, whole: bool) -> None:
    dice = random.Random(5)
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        spark_master="local[2]",
        peek_deadline_ms=400_000,
    )
    with anyio.fail_after(1_700):
        async with (
            Service(for_short_lives(settings)) as service,
            await Client.connect(service.address) as client,
        ):
            await client.create_table("t", COLUMNS, ["k"])
            await client.insert("t", rows_of(dice))
            await client.create_materialized_view("w", "SELECT s, count(*) AS n FROM t GROUP BY s")
            await client.delete("t", [{"k": k} for k in range(0, 40, 7)])
            floats = [float("nan"), -0.0, float("inf"), float("-inf")]
            strange = [{"k": 1000 + n, "f": f} for n, f in enumerate(floats)]
            time = await client.insert("t", strange)
            await client.wait_for("w", time)
            drawn = range(QUERIES_OF_PROOF if whole else QUERIES)
            asked = [(sql, True) for sql in TRAPS] + [sql_of(dice) for _ in drawn]
            for number, (sql, ordered) in enumerate(asked):
                read = await _all(client._queried(sql, None, None))
                made = await _all(client._queried(sql, None, None, engine=True))
                assert read.schema.equals(made.schema), (number, sql)
                left, right = (
                    [repr(tuple(row.values())) for row in table.to_pylist()]
                    for table in (read, made)
                )
                assert left == right if ordered else Counter(left) == Counter(right), sql
            joined = (
                "SELECT w.s, sum(w.n) AS n FROM t JOIN w ON t.s <=> w.s GROUP BY w.s ORDER BY n"
            )
            batches = [batch async for batch in client.query(joined, as_of=time)]
            counts = Counter((await client.peek("t", time))["s"].to_pylist())
            found = pa.Table.from_batches(batches)
            assert sorted(found["n"].to_pylist()) == sorted(n * n for n in counts.values())
            assert found["n"].to_pylist() == sorted(found["n"].to_pylist())
            for wrong, kind in (("nothing", QueryRejected), ("1 div 0", DefiniteError)):
                with pytest.raises(kind):
                    async for _ in client.query(f"SELECT {wrong} AS x FROM t"):
                        pass
