"""Tasks by which Spark's executors read and write parts of a bucket.

Their functions are sent by value, with all of `bucket_reading` and `bucket_writing`: executors need
pyarrow and obstore, and not this package. Where the bucket is and which pieces a task reads go
along: they hold no secret.

They are functions over Arrow batches, and no data source in Python: for each frame of one, Spark
starts further Python processes beside its driver to plan it, which takes a second or two, and it
knows nothing of its size.
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
"""Size of a row of the frame that tasks are made of, as Spark estimates it."""


def read_pieces(
    session: Any,
    store: str,
    tasks: Sequence[Sequence[Any]],
    struct: StructType,
    size: tuple[int, int],
    window: TimeWindow | None,
    name: str,
) -> DataFrame:
    """Return the rows of pieces as a frame of one partition for each task.

    Args:
        session: A session, classic or behind Spark Connect.
        store: Where the bucket is (`bucket_reading.bucket_spec`).
        tasks: The pieces of each task (`bucket_reading.plan_tasks`).
        struct: The columns, found by name.
        size: Rows of all pieces, and about how many bytes they take decoded.
        window: The times that are wanted; None: all rows as they are stored.
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
    # A range of as many rows as the pieces have, of which each partition keeps its first: by it
    # Spark knows how large the rows are, and broadcasts no table for being a few tasks.
    numbers = session.range(0, len(given) * span, 1, max(1, len(given)))
    return numbers.where(f"id % {span}L = 0").mapInArrow(read, struct)


def _span(tasks: int, rows: int, data: int, *, columns: int) -> int:
    """Return the rows of one partition of the range; Spark takes a column for 8 bytes or more."""
    return max(1, -(-max(rows, data // (_ROW_BYTES * columns)) // max(1, tasks)))


def write_objects(rows: DataFrame, store: str, cuts: Sequence[ObjectCut]) -> list[Any]:
    """Run the query and write its rows as objects of each cut; return a row of
    `bucket_writing.WRITTEN` for each object. Raises Spark's own errors."""
    send_by_value()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return write_task(store, cuts, batches)

    # Rows that tasks return come here from one attempt of each.
    found: list[Any] = rows.mapInArrow(write, WRITTEN).collect()
    return found


def send_by_value() -> None:
    """Have these modules sent to executors, whose Python need not have this package."""
    for module in (bucket_reading, bucket_writing, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
