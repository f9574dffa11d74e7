"""Rows are read here or left to Spark by what they take decoded, not by the size of their file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.engine.spark.bucket_parts import BucketParts
from actors.engine.spark.rows import load
from actors.model.plan.jobs import JobRows
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("aid", "bigint"), TableColumn("filler", "string")))

PARTS = BucketParts(Settings())
BYTES_MAX = 4 << 20


def part(folder: Path, rows: int, filler: str) -> str:
    table = pa.table(
        {"aid": range(rows), "filler": [filler] * rows, "__time": [1] * rows, "__diff": [1] * rows},
        schema=SCHEMA.arrow_updates(),
    )
    path = folder / f"part-{rows}.parquet"
    pq.write_table(table, path, compression="zstd")
    return str(path)


def test_a_small_file_of_many_rows_is_left_to_spark(tmp_path: Path) -> None:
    path = part(tmp_path, 100_000, " " * 84)
    assert Path(path).stat().st_size < BYTES_MAX // 4
    loaded = load(JobRows(SCHEMA, files=(path,)), PARTS, BYTES_MAX)
    assert loaded.files == (path,)
    assert loaded.table.num_rows == 0
    # About: the estimate is made from the first rows.
    assert loaded.bytes == pytest.approx(100_000 * (8 + 84 + 4 + 16), rel=0.1)


def test_files_that_are_small_each_and_large_together_are_left_to_spark(tmp_path: Path) -> None:
    path = part(tmp_path, 20_000, " " * 84)
    assert load(JobRows(SCHEMA, files=(path,)), PARTS, BYTES_MAX).table.num_rows == 20_000
    together = load(JobRows(SCHEMA, files=(path, path)), PARTS, BYTES_MAX)
    assert together.files == (path, path)
    assert together.table.num_rows == 0


def test_small_rows_are_read_here(tmp_path: Path) -> None:
    paths = (part(tmp_path, 3, "a"), part(tmp_path, 0, ""))
    loaded = load(JobRows(SCHEMA, files=paths), PARTS, BYTES_MAX)
    assert loaded.files == ()
    assert loaded.table["aid"].to_pylist() == [0, 1, 2]
    assert loaded.bytes == loaded.table.nbytes
