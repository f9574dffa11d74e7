"""The data source by which Spark's executors read parts of a bucket: `format("penstock_parts")`.

Its class is sent by value, with all of `bucket_reading`: executors need pyarrow and obstore, and
not this package. Where the bucket is and which tasks there are come as options, which Spark may
show: they hold no secret.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from actors.spark import bucket_reading, bucket_writing
from actors.spark.bucket_reading import read_task
from actors.spark.bucket_writing import WRITTEN, write_task
from actors.spark.spark_releases import shape_options

FORMAT: Final = "penstock_parts"
# A value, which executors are sent with the classes below: they need not have this package.
_SHAPE: Final = shape_options()
STORE_OPTION: Final = "store"
TASKS_OPTION: Final = "tasks"
SCAN_OPTION: Final = "scan"
"""Option that a plan's scan is known by."""


class BucketPartsTask(InputPartition):  # type: ignore[misc]
    """Pieces of parts that one task reads."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces


class BucketPartsReader(DataSourceReader):  # type: ignore[misc]
    """Reads the pieces that the options name, with the columns of a schema."""

    def __init__(self, store: str, tasks: str, schema: StructType) -> None:
        self._store, self._tasks = store, tasks
        self._shape = to_arrow_schema(schema, **_SHAPE)

    def partitions(self) -> list[InputPartition]:
        """Return one partition for each task."""
        return [BucketPartsTask(pieces) for pieces in json.loads(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of one task. Called in an executor."""
        return read_task(self._store, partition.pieces, self._shape)


class BucketPartsSource(DataSource):  # type: ignore[misc]
    """``spark.read.format("penstock_parts").schema(…)``: rows of parts, as they are stored."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "penstock_parts"

    def reader(self, schema: StructType) -> BucketPartsReader:
        """Return a reader of the columns of `schema`, which must be given."""
        return BucketPartsReader(self.options["store"], self.options["tasks"], schema)


def register(session: Any) -> None:
    """Register the data source with a session, classic or behind Spark Connect."""
    send_by_value()
    session.dataSource.register(BucketPartsSource)


def write_objects(rows: DataFrame, store: str, prefix: str, shape: pa.Schema) -> list[Any]:
    """Run the query and write its rows, with the columns of `shape`, as objects whose keys begin
    with `prefix`; return a row of `bucket_writing.WRITTEN` for each. Raises Spark's own errors."""
    send_by_value()
    columns = shape.serialize().to_pybytes()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return write_task(store, prefix, columns, batches)

    # Not a data source's writer: its messages go to Spark's driver, and not to this process, while
    # rows that tasks return come here from one attempt of each.
    found: list[Any] = rows.mapInArrow(write, WRITTEN).collect()
    return found


def send_by_value() -> None:
    """Have these modules sent to executors, whose Python need not have this package."""
    for module in (bucket_reading, bucket_writing, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
