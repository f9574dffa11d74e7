"""Writes rows as Parquet objects of a bucket, in Spark's executors.

This module is sent to them by value, like `bucket_reading`. Each attempt of a task writes under its
own names, and only the names that a finished attempt returns count: Spark uses the answer of a
single attempt of each task. Objects of other attempts are never named, and are collected as
orphans.
"""

from __future__ import annotations

import io
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.engine.spark.bucket_reading import failed, open_bucket, shaped, why_of

OBJECT_BYTES_MAX: Final = 64 << 20
"""Total size of a task's open objects above which the largest is closed. They are in memory until
then."""
GROUP_ROWS: Final = 128 * 1024
TIME: Final = "__time"
WRITTEN: Final = (
    "name string, rows bigint, size bigint, checksum bigint, footer binary, delta int,"
    " time_min bigint, time_max bigint"
)
"""Columns of what a task returns: one row per object."""
_SHAPE: Final = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.int64()),
        ("footer", pa.binary()),
        ("delta", pa.int32()),
        ("time_min", pa.int64()),
        ("time_max", pa.int64()),
    ]
)


class ObjectCut(NamedTuple):
    """The rows and columns of a task that go into objects of one kind."""

    prefix: str
    """Prefix of the objects' keys."""
    columns: tuple[str, ...]
    """Columns of the task's rows, in the order of `shape`."""
    shape: bytes
    """Columns and types of the objects, as an Arrow schema."""
    mark: str
    bit: int
    """Rows with this bit set in the column `mark` are written; 0 for all rows."""


class ObjectWriter:
    """Writes the rows of one cut as objects."""

    def __init__(self, store: Any, cut: ObjectCut) -> None:
        # Descriptions of the objects written so far.
        self.made: list[dict[str, Any]] = []
        self._store = store
        self._cut = cut
        self._shape = pa.ipc.read_schema(pa.py_buffer(cut.shape))
        # Batches that are not written to the open object yet, and their number of rows.
        self._waiting: list[pa.RecordBatch] = []
        self._rows = 0
        self._begin()

    @property
    def size(self) -> int:
        """Return the size of the object that is being written."""
        return self._sink.tell()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch that belong to this cut."""
        cut = self._cut
        if cut.bit:
            marks = batch.column(cut.mark)
            bits = pc.bit_wise_and(marks, pa.scalar(cut.bit, marks.type))
            batch = batch.filter(pc.not_equal(bits, pa.scalar(0, marks.type)))
        if not batch.num_rows:
            return
        columns = [batch.column(name) for name in cut.columns]
        named = pa.RecordBatch.from_arrays(columns, names=self._shape.names)
        self._waiting.append(shaped(named, self._shape))
        if sum(each.num_rows for each in self._waiting) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the open object, if there is one."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
            made = put_object(self._store, self._cut.prefix, self._sink, self._rows)
            # Readers skip objects that have no row at the times that they want.
            low, high = min(self._times), max(self._times)
            self.made.append(made | {"time_min": low, "time_max": high})
        self._begin()

    def _begin(self) -> None:
        self._sink, self._rows = io.BytesIO(), 0
        self._times: list[int] = []
        """Minimum and maximum time of each batch in the open object."""
        self._writer: pq.ParquetWriter | None = None

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._sink,
                self._shape,
                compression="zstd",
                write_page_checksum=True,
                store_schema=True,
            )
        table = pa.Table.from_batches(self._waiting, self._shape)
        self._writer.write_table(table, row_group_size=GROUP_ROWS)
        self._rows += table.num_rows
        self._times += pc.min_max(table.column(TIME)).as_py().values()
        self._waiting.clear()


def write_task(
    spec: str, cuts: Sequence[ObjectCut], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as objects of each cut, and yield a row per object. Raises
    `BucketUnreadable`."""
    store = open_bucket(spec)
    writers = [ObjectWriter(store, cut) for cut in cuts]
    for batch in batches:
        for writer in writers:
            writer.add(batch)
        while sum(writer.size for writer in writers) > OBJECT_BYTES_MAX:
            max(writers, key=lambda writer: writer.size).close()
    for writer in writers:
        writer.close()
    made = [row | {"delta": n} for n, writer in enumerate(writers) for row in writer.made]
    yield from pa.Table.from_pylist(made, _SHAPE).to_batches()


def put_object(store: Any, prefix: str, sink: io.BytesIO, rows: int) -> dict[str, Any]:
    """Write one object under a unique name, and return its description. Raises
    `BucketUnreadable`."""
    name, data = f"{uuid.uuid4().hex}.parquet", sink.getvalue()
    try:
        store.put(prefix + name, data)
    except Exception as error:  # noqa: BLE001 - its text may hold a secret
        raise failed(f"write {prefix}{name}", why_of(error)) from None
    footer = io.BytesIO()
    pq.read_metadata(io.BytesIO(data)).write_metadata_file(footer)
    return {
        "name": name,
        "rows": rows,
        "size": len(data),
        "checksum": zlib.crc32(data),
        "footer": footer.getvalue(),
    }
