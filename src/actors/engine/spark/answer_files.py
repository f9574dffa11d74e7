"""Writes answers that are too large to be collected into Parquet files, on the machines where the
rows are.

Such an answer passes neither through the driver's heap nor through this process. A grouping usually
makes few rows of many, so its answer is collected first. If it turns out to have too many rows or
bytes (`spark.driver.maxResultSize`), the query runs again, into files.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Observation
from pyspark.sql.functions import count, lit
from pyspark.sql.types import (
    BooleanType,
    DateType,
    NumericType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from actors.engine.spark.disk_watch import PARTS_SUFFIX
from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    ExpandRows,
    FilterRows,
    GenerateRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    RecomputeRows,
    ReduceGroups,
    RowLifetimes,
    SelectColumns,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
    WeighRows,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import FileDone
from actors.model.plan.schema import TIME

_TOO_LARGE: Final = "spark.driver.maxResultSize"


ANSWER_ROWS_MIN: Final = 1_000
"""Answers with at most this number of rows are always collected."""
_NARROW: Final = (NumericType, BooleanType, DateType, TimestampType, TimestampNTZType)
_NARROW_BYTES: Final = 8
_WIDE_BYTES: Final = 64
"""Assumed size of a value whose type has no fixed size."""
_ANSWER_SHARE: Final = 2
"""Factor by which an answer of unknown size may exceed `collected_bytes_max`."""


class FilesNotVisible(Exception):
    """Rows that Spark wrote into files are missing from the files that are visible here."""

    def __init__(self, rows: int, written: int, out: Path) -> None:
        super().__init__(
            f"Spark wrote {written} rows below {out}, but only {rows} are visible here: its"
            " executors use another file system"
        )


class AnswerTooLarge(Exception):
    """An answer has more rows than may be collected."""

    def __init__(self, rows_max: int) -> None:
        super().__init__(f"it has more than {rows_max} rows, the most that are collected")


def answer_rows_max(schema: StructType, collected_bytes_max: int) -> int:
    """Return the maximum number of rows with these columns that are collected.

    >>> from pyspark.sql.types import LongType, StringType
    >>> answer_rows_max(StructType().add("k", LongType()).add("s", StringType()), 32 << 20)
    932067
    >>> answer_rows_max(StructType().add("k", LongType()), 1)
    1000
    """
    width = sum(
        _NARROW_BYTES if isinstance(field.dataType, _NARROW) else _WIDE_BYTES
        for field in schema.fields
    )
    return max(ANSWER_ROWS_MIN, _ANSWER_SHARE * collected_bytes_max // max(1, width))


def makes_few_rows(node: Node, strata: Mapping[str, Node]) -> bool:
    """Return whether all rows of a node come out of groupings, so that there are probably few."""
    match node:
        case NamedInput():
            below = strata.get(node.name)
            # A hidden state has the rows of a grouping.
            if below is None:
                return InputName.parse(node.name).kind is InputKind.HIDDEN
            return makes_few_rows(below, strata)
        case ReduceGroups() | RecomputeGroups():
            return True
        case (
            FilterRows()
            | SelectColumns()
            | RowLifetimes()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
        ):
            return makes_few_rows(node.input, strata)
        case AccumulateTotals():
            return makes_few_rows(node.contributions, strata)
        case RecomputeRows() | TopCovered():
            return makes_few_rows(node.changes, strata)
        case TopGate():
            return makes_few_rows(node.input, strata)
        case TopShortage() | TopCandidates():
            return True
        case PairRows() | MatchState():
            return makes_few_rows(node.left, strata) and makes_few_rows(node.right, strata)
        case UnionRows():
            return all(makes_few_rows(child, strata) for child in node.inputs)


def too_large(error: Exception) -> bool:
    """Return whether collecting an answer failed because it is too large."""
    return isinstance(error, AnswerTooLarge) or _TOO_LARGE in str(error)


def write_files(found: DataFrame, time: int | None, out: Path) -> tuple[FileDone, ...]:
    """Run the query into files, with all rows at `time` (None: without a time). Return the files in
    the order of the answer, which is also the order of the rows in each. Raises Spark's own errors,
    and `FilesNotVisible`.

    The files are in `out`, and their reader removes them; they contain no metadata of Spark's.
    """
    name = uuid.uuid4().hex
    folder = out / f"{name}{PARTS_SUFFIX}"
    try:
        timed = time is not None
        rows = found.withColumn(TIME, lit(time).cast("bigint")) if timed else found
        # Even a cluster on this machine may use another file system, as in a container, and its
        # files would silently be missing here. So the rows are counted while they are written.
        written = None if _in_driver(found) else Observation()
        rows = rows if written is None else rows.observe(written, count(lit(1)).alias("rows"))
        rows.write.option("compression", "zstd").parquet(folder.resolve().as_uri())
        done = []
        for number, file in enumerate(sorted(folder.glob("part-*.parquet"))):
            seen = pq.read_metadata(file).num_rows
            if seen:
                kept = out / f"{name}-{number}.parquet"
                file.rename(kept)
                done.append(FileDone(str(kept), seen))
        made = sum(file.rows for file in done)
        if written is not None and written.get["rows"] != made:
            for each in done:
                Path(each.path).unlink()
            raise FilesNotVisible(made, written.get["rows"], out)
        return tuple(done)
    finally:
        # Including Spark's own files in it (checksums, `_SUCCESS`).
        shutil.rmtree(folder, ignore_errors=True)


def _in_driver(found: DataFrame) -> bool:
    """Return whether the tasks of a query run in the driver's JVM."""
    return str(found.sparkSession.sparkContext.master).startswith("local")


def read_back(files: Sequence[FileDone], wanted: pa.Schema) -> pa.Table:
    """Return the rows of files made by `write_files`, in the types `wanted`, and remove the
    files."""
    try:
        parts = [pq.read_table(file.path).select(wanted.names).cast(wanted) for file in files]
    finally:
        for file in files:
            Path(file.path).unlink()
    return pa.concat_tables(parts) if parts else wanted.empty_table()
