"""Writes answers that are too large to be collected into Parquet files, where the rows are.

Such an answer passes neither through the driver's heap nor through this process. A grouping usually
makes few rows of many, so its answer is collected first. If it turns out to have too many rows or
bytes (`spark.driver.maxResultSize`), the query runs once more, into files.
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
"""Answers of up to so many rows are always collected."""
_NARROW: Final = (NumericType, BooleanType, DateType, TimestampType, TimestampNTZType)
_NARROW_BYTES: Final = 8
_WIDE_BYTES: Final = 64
"""Assumed size of a value whose type has no fixed size."""
_ANSWER_SHARE: Final = 2
"""Factor by which an answer of unknown size may exceed `collected_bytes_max`."""


class FilesNotVisible(Exception):
    """Rows that Spark wrote into files are not in those that are seen here."""

    def __init__(self, rows: int, written: int, out: Path) -> None:
        super().__init__(
            f"of {written} rows that Spark wrote below {out}, {rows} are seen here: its executors"
            " have another file system"
        )


class AnswerTooLarge(Exception):
    """An answer has more rows than are collected."""

    def __init__(self, rows_max: int) -> None:
        super().__init__(f"it has more than {rows_max} rows, which are not collected")


def answer_rows_max(schema: StructType, collected_bytes_max: int) -> int:
    """Return how many rows of these columns are collected at most.

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
    """Return whether all rows of a node come out of groupings, so that they are probably few."""
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
    """Return whether a collection failed because the answer is too large."""
    return isinstance(error, AnswerTooLarge) or _TOO_LARGE in str(error)


def write_files(found: DataFrame, time: int | None, out: Path) -> tuple[FileDone, ...]:
    """Run the query into files, all rows at `time` (None: without a time), in the order of the
    files and of the rows in each. Raises Spark's own errors, and `FilesNotVisible`.

    The files lie in `out`, and are removed by their reader; they hold no metadata of Spark's.
    """
    name = uuid.uuid4().hex
    folder = out / f"{name}{PARTS_SUFFIX}"
    try:
        timed = time is not None
        rows = found.withColumn(TIME, lit(time).cast("bigint")) if timed else found
        # A cluster on this machine may have another file system, as in a container: its files would
        # be missing silently. So the rows are counted while they are written.
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
        # With Spark's own files in it (checksums, `_SUCCESS`).
        shutil.rmtree(folder, ignore_errors=True)


def _in_driver(found: DataFrame) -> bool:
    """Return whether the tasks of a query run in the driver's JVM."""
    return str(found.sparkSession.sparkContext.master).startswith("local")


def read_back(files: Sequence[FileDone], wanted: pa.Schema) -> pa.Table:
    """Return the rows of files that `write_files` made, in the types `wanted`, and remove these."""
    try:
        parts = [pq.read_table(file.path).select(wanted.names).cast(wanted) for file in files]
    finally:
        for file in files:
            Path(file.path).unlink()
    return pa.concat_tables(parts) if parts else wanted.empty_table()
