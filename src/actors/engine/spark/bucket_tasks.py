"""Tasks in which Spark's executors read and write parts of a bucket.

Their functions are sent by value, together with `bucket_reading` and `bucket_writing`: executors
need pyarrow and obstore, but not this package. The location of the bucket and the pieces of each
task are sent along; they contain no secrets.

The tasks are functions over Arrow batches rather than a Python data source: for each frame of a
data source, Spark starts additional Python processes on the driver to plan it, which takes a second
or two, and Spark does not learn the size of the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from actors.engine.spark import bucket_reading, bucket_writing
from actors.engine.spark.bucket_reading import TimeWindow, read_task
from actors.engine.spark.bucket_writing import WRITTEN, ObjectCut, write_task
from actors.engine.spark.spark_releases import shape_options

_SHAPE: Final = shape_options()
_ROW_BYTES: Final = 8
"""Size of a row, as Spark estimates it, of the frame from which tasks are made."""


def read_pieces(
    session: Any,
    store: str,
    tasks: Sequence[Sequence[Any]],
    struct: StructType,
    size: tuple[int, int],
    window: TimeWindow | None,
    name: str,
) -> DataFrame:
    """Return the rows of pieces as a frame with one partition per task.

    Args:
        session: A session, classic or behind Spark Connect.
        store: The bucket's location (`bucket_reading.bucket_spec`).
        tasks: The pieces of each task (`bucket_reading.plan_tasks`).
        struct: The columns, found by name.
        size: Number of rows of all pieces, and their approximate decoded size.
        window: The wanted times; None for all rows as stored.
        name: Name by which a plan's reads of these pieces are known.
    """
    send_by_value()
    shape = to_arrow_schema(struct, **_SHAPE)
    given = [list(pieces) for pieces in tasks]
    span = _span(len(given), *size, columns=len(struct.fields))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_task(store, given[number // span], shape, window)

    read.__name__ = name
    # A range with as many rows as the pieces have, of which each partition keeps the first. It
    # tells Spark how large the rows are, so that it does not broadcast a table because it has few
    # tasks.
    numbers = session.range(0, len(given) * span, 1, max(1, len(given)))
    return numbers.where(f"id % {span}L = 0").mapInArrow(read, struct)


def _span(tasks: int, rows: int, data: int, *, columns: int) -> int:
    """Return the number of rows in one partition of the range. Spark counts at least 8 bytes per
    column."""
    return max(1, -(-max(rows, data // (_ROW_BYTES * columns)) // max(1, tasks)))


def write_objects(rows: DataFrame, store: str, cuts: Sequence[ObjectCut]) -> list[Any]:
    """Run the query and write its rows as objects of each cut. Return a row of
    `bucket_writing.WRITTEN` for each object. Raises Spark's own errors."""
    send_by_value()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return write_task(store, cuts, batches)

    # The rows that tasks return arrive from a single attempt of each task.
    found: list[Any] = rows.mapInArrow(write, WRITTEN).collect()
    return found


def send_by_value() -> None:
    """Have these modules sent to executors by value, since their Python need not have this
    package."""
    for module in (bucket_reading, bucket_writing, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
