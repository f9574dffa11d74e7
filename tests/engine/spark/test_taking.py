"""Files from outside, read by Spark itself: its modes, its inference, its words for faults."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]

from actors.connectors.sources.file_reading import reads_like_spark
from actors.model.plan.jobs import InferFiles, JobFailed, QueryAnalyzed, RowsDone, TakeFiles
from actors.model.plan.schema import TableColumn, TableSchema

pytestmark = pytest.mark.spark

AB = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string")))
HEADER = (("header", "true"), ("mode", "FAILFAST"))
LARGE = 1 << 40


def take(
    child: ChildProcess,
    paths: Sequence[Path],
    kind: str,
    options: tuple[tuple[str, str], ...] = (),
    read: TableSchema = AB,
    **more: Any,
) -> Any:
    names = more.pop("keep", read.names)
    files = tuple(str(path) for path in paths)
    return child.ask(TakeFiles(job_id(), files, kind, read, names, options, **more))


def rows(answer: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table_of(answer).to_pylist()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name says partition, with names that say pattern."""
    made = tmp_path / "day=7"
    made.mkdir()
    (made / "one.csv").write_text("a,b\n1,x\n2,\n")
    (made / "t w*o{1}[2]%20.csv").write_text("a,b\n3,z\n")
    (made / "t wo.csv").write_text("a,b\n9,not asked for\n")
    with gzip.open(made / "three.csv.gz", "wt") as file:
        file.write("a,b\n4,w\n")
    (made / "bad one.csv").write_text("a,b\n5,x\nfive,y\n")
    (made / "bad.json").write_text('{"a": 1}\n{"a": "x"}\n')
    return made


def test_paths_are_taken_literally(child: ChildProcess, folder: Path) -> None:
    names = ["one.csv", "t w*o{1}[2]%20.csv", "three.csv.gz"]
    answer = take(child, [folder / name for name in names], "csv", HEADER)
    found = sorted(rows(answer), key=lambda row: row["a"])
    assert [(row["a"], row["b"]) for row in found] == [(1, "x"), (2, None), (3, "z"), (4, "w")]
    only = take(child, [folder / "one.csv"], "csv", HEADER, keep=("b",))
    assert rows(only) == [{"b": "x"}, {"b": None}]


def test_large_answers_are_files(child: ChildProcess, folder: Path) -> None:
    answer = take(child, [folder / "one.csv"], "csv", HEADER, bytes=LARGE)
    assert isinstance(answer, RowsDone)
    assert answer.files
    found = pa.concat_tables([pq.read_table(file.path) for file in answer.files])
    assert found.schema.types == AB.arrow().types
    assert found["a"].to_pylist() == [1, 2]
    for path in answer.paths():
        Path(path).unlink()


@pytest.mark.parametrize("size", [0, LARGE])
def test_a_malformed_file_is_named(child: ChildProcess, folder: Path, size: int) -> None:
    bad = folder / "bad one.csv"
    answer = take(child, [folder / "one.csv", bad], "csv", HEADER, bytes=size)
    assert isinstance(answer, JobFailed)
    assert answer.code == "DefiniteError"
    assert answer.text.startswith(f"{bad}: [MALFORMED_RECORD_IN_PARSING"), answer.text
    number = TableSchema((TableColumn("a", "bigint"),))
    fast = (("mode", "FAILFAST"),)
    answer = take(child, [folder / "bad.json"], "json", fast, number, bytes=size)
    assert isinstance(answer, JobFailed)
    assert answer.text.startswith(f"{folder / 'bad.json'}: [MALFORMED_RECORD"), answer.text


def test_the_modes_are_those_of_spark(child: ChildProcess, folder: Path) -> None:
    bad = [folder / "bad one.csv"]
    permissive = take(child, bad, "csv", (("header", "true"), ("mode", "PERMISSIVE")))
    assert rows(permissive) == [{"a": 5, "b": "x"}, {"a": None, "b": "y"}]
    dropped = take(child, bad, "csv", (("header", "true"), ("mode", "DROPMALFORMED")))
    assert rows(dropped) == [{"a": 5, "b": "x"}]
    corrupt = TableSchema((*AB.columns, TableColumn("_corrupt_record", "string")))
    kept = take(child, bad, "csv", (("header", "true"), ("mode", "PERMISSIVE")), corrupt)
    assert [row["_corrupt_record"] for row in rows(kept)] == [None, "five,y"]


def test_parquet_that_does_not_fit_is_named(child: ChildProcess, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["text"], "b": ["x"]}), tmp_path / "type.parquet")
    (tmp_path / "torn.parquet").write_text("no such thing")
    pq.write_table(pa.table({"A": [1]}), tmp_path / "fine.parquet")
    assert rows(take(child, [tmp_path / "fine.parquet"], "parquet")) == [{"a": 1, "b": None}]
    for name in ("type", "torn"):
        paths = [tmp_path / "fine.parquet", tmp_path / f"{name}.parquet"]
        answer = take(child, paths, "parquet")
        assert isinstance(answer, JobFailed)
        assert (answer.code, answer.text.split(": ")[0]) == ("DefiniteError", str(paths[1]))


def test_columns_are_inferred(child: ChildProcess, folder: Path) -> None:
    def infer(name: str, kind: str, *options: tuple[str, str]) -> Any:
        return child.ask(InferFiles(job_id(), (str(folder / name),), kind, options))

    found = infer("one.csv", "csv", ("header", "true"), ("inferSchema", "true"))
    assert isinstance(found, QueryAnalyzed)
    assert [(c.name, c.type) for c in found.schema.columns] == [("a", "int"), ("b", "string")]
    found = infer("bad.json", "json")
    assert [(c.name, c.type) for c in found.schema.columns] == [("a", "string")]
    pq.write_table(pa.table({"n": pa.array([1], pa.int16())}), folder / "n.parquet")
    found = infer("n.parquet", "parquet")
    assert [(c.name, c.type) for c in found.schema.columns] == [("n", "smallint")]


EVERY = TableSchema(
    (
        TableColumn("flag", "boolean"),
        TableColumn("tiny", "tinyint"),
        TableColumn("small", "smallint"),
        TableColumn("whole", "int"),
        TableColumn("large", "bigint"),
        TableColumn("single", "float"),
        TableColumn("exact", "double"),
        TableColumn("money", "decimal(12,2)"),
        TableColumn("wide", "decimal(38,10)"),
        TableColumn("text", "string"),
        TableColumn("data", "binary"),
        TableColumn("day", "date"),
        TableColumn("moment", "timestamp"),
        TableColumn("local", "timestamp_ntz"),
    )
)
VALUES: dict[str, list[Any]] = {
    "flag": [True, False],
    "tiny": [-128, 127],
    "small": [-(1 << 15), (1 << 15) - 1],
    "whole": [-(1 << 31), (1 << 31) - 1],
    "large": [-(1 << 63), (1 << 63) - 1],
    "single": [float("-inf"), 1.5],
    "exact": [-0.0, 1e300],
    "text": ["", "ä€😀"],
    "data": [b"", b"\x00\xff"],
    "day": [-719162, 2932896],
    "moment": [-62135596800000000, 253402300799999999],
    "local": [-62135596800000000, 253402300799999999],
}


@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_what_is_read_without_spark_is_what_spark_reads(
    child: ChildProcess, tmp_path: Path, version: str
) -> None:
    """For every type that is held to be beyond doubt, at its ends."""
    shape = EVERY.arrow()
    columns = []
    for field in shape:
        values = VALUES.get(field.name)
        if values is None:
            text = ["-9999999999.99", "9999999999.99"] if field.name == "money" else ["-1", "1e27"]
            array = pa.array(text).cast(field.type)
        else:
            plain = {"day": pa.int32(), "moment": pa.int64(), "local": pa.int64()}
            array = pa.array(values, plain.get(field.name, field.type)).cast(field.type)
        columns.append(pa.concat_arrays([array, pa.nulls(1, field.type)]))
    table = pa.Table.from_arrays(columns, schema=shape)
    path = tmp_path / "every.parquet"
    pq.write_table(table, path, version=version)
    assert reads_like_spark(str(path), shape)
    with pq.ParquetFile(path) as file:
        here = file.read().cast(shape)
    there = table_of(take(child, [path], "parquet", read=EVERY))
    assert there.equals(here)
    assert here.equals(table)


def test_columns_come_in_the_order_that_is_wanted(child: ChildProcess, folder: Path) -> None:
    """The columns of a CSV file have their order, a table has another."""
    found = take(child, [folder / "one.csv"], "csv", HEADER, keep=("b", "a"))
    assert rows(found) == [{"b": "x", "a": 1}, {"b": None, "a": 2}]
    assert list(rows(found)[0]) == ["b", "a"]
