"""Writes rows as Parquet objects of a bucket, in Spark's executors.

Sent to them by value, like `bucket_reading`. Each attempt of a task writes under names of its own,
and only the names that a finished attempt returns count: Spark takes the answer of one attempt of
each task. What others wrote is never named, and collected as orphans.
"""

from __future__ import annotations

import io
import uuid
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from actors.spark.bucket_reading import failed, open_bucket, shaped, why_of

OBJECT_BYTES_MAX: Final = 64 << 20
"""Size beyond which rows go into a further object; each is in memory until it is written."""
GROUP_ROWS: Final = 128 * 1024
WRITTEN: Final = "name string, rows bigint, size bigint, checksum bigint, footer binary"
"""Columns of what a task returns: one row for each object."""
_SHAPE: Final = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("checksum", pa.int64()),
        ("footer", pa.binary()),
    ]
)


def write_task(
    spec: str, prefix: str, shape: bytes, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as objects whose keys begin with `prefix`; yield a row for each.

    `shape`: the columns and types of the objects, as an Arrow schema. Raises `BucketUnreadable`.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(shape))
    store = open_bucket(spec)
    waiting: list[pa.RecordBatch] = []
    made: list[dict[str, Any]] = []
    sink, writer, rows = io.BytesIO(), None, 0

    def flush() -> None:
        nonlocal writer, rows
        if not waiting:
            return
        if writer is None:
            writer = pq.ParquetWriter(
                sink, schema, compression="zstd", write_page_checksum=True, store_schema=True
            )
        table = pa.Table.from_batches(waiting, schema)
        writer.write_table(table, row_group_size=GROUP_ROWS)
        rows += table.num_rows
        waiting.clear()

    def close() -> None:
        nonlocal sink, writer, rows
        flush()
        if writer is not None:
            writer.close()
            made.append(put_object(store, prefix, sink.getvalue(), rows))
        sink, writer, rows = io.BytesIO(), None, 0

    for batch in batches:
        if batch.num_rows:
            waiting.append(shaped(batch, schema))
        if sum(each.num_rows for each in waiting) >= GROUP_ROWS:
            flush()
        if sink.tell() > OBJECT_BYTES_MAX:
            close()
    close()
    yield from pa.Table.from_pylist(made, _SHAPE).to_batches()


def put_object(store: Any, prefix: str, data: bytes, rows: int) -> dict[str, Any]:
    """Write one object under a name of its own; return what describes it. Raises
    `BucketUnreadable`."""
    name = f"{uuid.uuid4().hex}.parquet"
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
