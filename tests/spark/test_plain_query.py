"""The Query job: plain Spark over Parquet files as they are; and the cores of a local master."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]

from actors.plan.jobs import JobFailed, Query
from actors.spark.session import local_cores


def test_cores_of_a_local_master() -> None:
    assert local_cores("local") == 1
    assert local_cores("local[3]") == 3
    assert local_cores("local[4,2]") == 4
    assert local_cores("local[*]") >= 1


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_query_has_its_own_columns_and_no_others(child: ChildProcess, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"k": [1, 1, 2], "v": [10, None, 30]}), path)
    sql = "SELECT k, sum(v) AS s FROM t GROUP BY k ORDER BY k"
    answer = child.ask(Query(job_id(), sql, (("t", str(path)),)))
    assert table_of(answer).to_pylist() == [{"k": 1, "s": 10}, {"k": 2, "s": 30}]
    refused = child.ask(Query(job_id(), "SELECT nothing FROM t", (("t", str(path)),)))
    assert isinstance(refused, JobFailed)
    assert refused.code == "QueryRejected"
