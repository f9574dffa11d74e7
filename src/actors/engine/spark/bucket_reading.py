"""Reads Parquet parts of a bucket: their rows in Spark's executors, and their footers where a read
is planned.

Executors need not have this package installed. This module is sent to them by value
(`bucket_tasks`), so it imports nothing from `actors`, and imports obstore only in the functions
that use it. Credentials come from the environment of the process that reads.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

UNREADABLE: Final = "PENSTOCK_BUCKET"
"""Mark in the text of each error of this module, by which `failures` recognises it in Spark's
errors."""
PASSED_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": (
        "AWS_ENDPOINT",
        "AWS_ENDPOINT_URL",
        "AWS_DEFAULT_REGION",
        "AWS_REGION",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        "AWS_SKIP_SIGNATURE",
        "AWS_UNSIGNED_PAYLOAD",
        "AWS_REQUEST_PAYER",
    ),
    "gs": ("GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ENDPOINT",
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURE_SKIP_SIGNATURE",
    ),
}
"""Variables of the service's environment that locate a bucket. None of them is a secret."""
ALLOW_HTTP: Final = {
    "s3": "AWS_ALLOW_HTTP",
    "gs": "GOOGLE_ALLOW_HTTP",
    "az": "AZURE_ALLOW_HTTP",
}
BATCH_ROWS_MAX: Final = 65_536
"""Maximum number of rows in a batch for Spark."""
FOOTERS_AT_ONCE: Final = 8
TASK_BYTES_MIN: Final = 4 << 20
"""Decoded size from which a separate task pays."""
_STATUS: Final = re.compile(r"status code(?:\x1b\[\d+m|\D)*?(\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_VALUE_BYTES_MIN: Final = 4
_FOREVER: Final = 1 << 62
"""`actors.model.plan.jobs.NO_UPPER`."""


class BucketUnreadable(Exception):
    """Raised if an object of a bucket cannot be read. Its text contains no secret."""


def failed(what: str, why: str) -> BucketUnreadable:
    """Return the error for an operation that failed."""
    return BucketUnreadable(f"{UNREADABLE}: {what}: {why}")


def bucket_spec(
    kind: str, bucket: str, environment: Mapping[str, str], timeout_ms: int, retries: int
) -> str:
    """Return a description of how to open a bucket, as JSON without secrets: its location, and
    limits for requests."""
    config = {}
    for name in PASSED_VARIABLES[kind]:
        value = environment.get(name, "")
        # An address may contain a password: then each executor needs it in its own environment.
        if value and urlsplit(value).username is None:
            config[name.lower()] = value
    return json.dumps(
        {
            "kind": kind,
            "bucket": bucket,
            "config": config,
            "http": environment.get(ALLOW_HTTP[kind], "").lower() in ("1", "true"),
            "timeout_ms": timeout_ms,
            "retries": retries,
        },
        sort_keys=True,
    )


def open_bucket(spec: str) -> Any:
    """Open the bucket of a `bucket_spec`, with the credentials in this process's environment. Sends
    no request. Raises `BucketUnreadable`."""
    given = json.loads(spec)
    where = f"{given['kind']}://{given['bucket']}"
    try:
        from obstore import store as stores
    except ImportError as error:
        release = ".".join(map(str, sys.version_info[:3]))
        raise failed(
            f"open {where}",
            f"the Python of Spark's executors ({sys.executable}, {release}) lacks obstore"
            f" ({error}): run pip install obstore pyarrow there, or set spark.pyspark.python in"
            " spark_conf to a Python that has both",
        ) from None
    limit = timedelta(milliseconds=given["timeout_ms"])
    options: dict[str, Any] = {
        "config": given["config"],
        "client_options": {"timeout": limit, "allow_http": given["http"]},
        "retry_config": {
            "max_retries": given["retries"],
            "retry_timeout": limit * (given["retries"] + 1),
        },
    }
    kinds = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}
    try:
        return kinds[given["kind"]](given["bucket"], **options)
    except Exception as error:  # noqa: BLE001 - its text may hold a secret
        raise failed(f"open {where}", why_of(error)) from None


def why_of(error: BaseException) -> str:
    """Return the reason of the library's error: its numbers, codes and class, but none of its
    texts, which may contain signed URLs or keys."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    said = " ".join(found[1] for found in (status, code) if found is not None)
    if isinstance(error, FileNotFoundError):
        return f"it does not exist ({said})" if said else "it does not exist"
    if said.startswith(("401", "403")):
        return f"the credentials in the environment of this Spark process do not permit it ({said})"
    return f"{type(error).__name__} ({said})" if said else type(error).__name__


class BucketFile(io.RawIOBase):
    """An object of a bucket as a file that is read in ranges."""

    def __init__(self, store: Any, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._size = store, key, size
        # The position of the next read.
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position and return it."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = begin + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes from the position on. Raises `BucketUnreadable`."""
        left = max(0, self._size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        try:
            data = bytes(self._store.get_range(self._key, start=self._at, length=size))
        except Exception as error:  # noqa: BLE001 - its text may hold a secret
            raise failed(f"read {self._key}", why_of(error)) from None
        if len(data) != size:
            raise failed(f"read {self._key}", f"{len(data)} bytes received instead of {size}")
        self._at += size
        return data


def open_part(store: Any, key: str, size: int) -> pq.ParquetFile:
    """Open a Parquet object, which reads its footer. Raises `BucketUnreadable`."""
    try:
        # A damaged byte is an error here, as in Spark's own reader.
        return pq.ParquetFile(
            BucketFile(store, key, size), page_checksum_verification=True, pre_buffer=True
        )
    except (pa.ArrowException, OSError) as error:
        raise failed(f"read the footer of {key}", str(error)) from None


class TimeWindow(NamedTuple):
    """The wanted times of stored rows: those from `lower` to below `upper`. Times before
    `advance_to` count as `advance_to`, unless that is None."""

    column: str
    lower: int
    upper: int
    advance_to: int | None

    def holds(self, low: int | None, high: int | None) -> bool:
        """Return whether all rows with times from `low` to `high` (None: not known) are within the
        window."""
        return (self.lower <= 0 or (low is not None and self.lower <= low)) and (
            self.upper >= _FOREVER or (high is not None and high < self.upper)
        )

    def applied(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows within the window, with the times that they have there."""
        times = batch.column(batch.schema.get_field_index(self.column))
        wanted = pc.and_(pc.greater_equal(times, self.lower), pc.less(times, self.upper))
        kept = batch.filter(wanted)
        if self.advance_to is None:
            return kept
        number = kept.schema.get_field_index(self.column)
        moved = pc.max_element_wise(kept.column(number), pa.scalar(self.advance_to, pa.int64()))
        return kept.set_column(number, kept.schema.field(number), moved)


def read_task(
    spec: str, pieces: Iterable[Any], shape: pa.Schema, window: TimeWindow | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of pieces that are within a window (None: all, as stored). A piece is (key,
    size, numbers of row groups or None for all).

    The columns are those of `shape`, found by name; one that a part lacks is NULL. Raises
    `BucketUnreadable`.
    """
    store = open_bucket(spec)
    for key, size, groups in pieces:
        with open_part(store, key, size) as file:
            known = set(file.schema_arrow.names)
            here = [name for name in shape.names if name in known]
            if window is not None and window.column not in here:
                here.append(window.column)
            try:
                for batch in file.iter_batches(
                    BATCH_ROWS_MAX, row_groups=groups, columns=here, use_threads=False
                ):
                    yield shaped(batch if window is None else window.applied(batch), shape)
            except (pa.ArrowException, OSError) as error:
                raise failed(f"read {key}", str(error)) from None


def shaped(batch: pa.RecordBatch, shape: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of `shape`; those that it lacks are NULL."""
    columns = []
    for field in shape:
        number = batch.schema.get_field_index(field.name)
        if number < 0:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(number)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=shape)


def read_footers(
    spec: str, objects: Sequence[tuple[str, int]], columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Read the footers of objects (key, size), several at a time. Return for each `rows`; `groups`,
    the approximate decoded size of each row group; and `bounds`, the minimum and maximum of each of
    `columns` over all rows, None if a row group lacks them. Raises `BucketUnreadable`."""
    store = open_bucket(spec)

    def read(each: tuple[str, int]) -> dict[str, Any]:
        with open_part(store, *each) as file:
            return footer_of(file.metadata, columns)

    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as threads:
        return list(threads.map(read, objects))


def footer_of(footer: pq.FileMetaData, columns: Sequence[str]) -> dict[str, Any]:
    """Return what `read_footers` returns for a single footer."""
    groups: list[int] = []
    told: dict[str, list[Any]] = {name: [] for name in columns}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        # The footer counts a repeated value only once.
        least = group.num_rows * group.num_columns * _VALUE_BYTES_MIN
        groups.append(max(group.total_byte_size, least))
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema in told:
                told[chunk.path_in_schema].append(chunk.statistics)
    return {
        "rows": footer.num_rows,
        "groups": groups,
        "bounds": {name: _bounds_of(each, len(groups)) for name, each in told.items()},
    }


def _bounds_of(statistics: Sequence[Any], count: int) -> tuple[Any, Any] | None:
    """Return the bounds over all of `count` row groups; None if one of them lacks bounds."""
    known = [each for each in statistics if each is not None and each.has_min_max]
    if not known or len(known) < count:
        return None
    return min(each.min for each in known), max(each.max for each in known)


def plan_tasks(
    objects: Sequence[tuple[str, int]],
    groups: Sequence[Sequence[int]],
    task_bytes_max: int,
    cores: int,
) -> list[list[Any]]:
    """Return the tasks of a read, each a list of pieces (key, size, numbers of row groups or None).

    Small objects share a task, and large ones are divided between row groups. `groups`: the decoded
    sizes of the row groups of each object. `cores`: the maximum number of tasks if there are few
    rows.

    >>> plan_tasks([("a", 1), ("b", 1), ("c", 9)], [[5], [5], [6, 6, 6]], 12, 1)
    [[('a', 1, None), ('b', 1, None)], [('c', 9, [0, 1])], [('c', 9, [2])]]
    """
    total = sum(map(sum, groups))
    share = max(TASK_BYTES_MIN, -(-total // max(1, cores)))
    limit = max(1, min(task_bytes_max, share))
    tasks: list[list[Any]] = []
    room = 0
    for (key, size), sizes in zip(objects, groups, strict=True):
        start = 0
        while start < len(sizes):
            end, taken = start, 0
            while end < len(sizes) and (end == start or taken + sizes[end] <= limit):
                taken += sizes[end]
                end += 1
            whole = (start, end) == (0, len(sizes))
            piece = (key, size, None if whole else list(range(start, end)))
            if not tasks or taken > room:
                tasks.append([])
                room = limit
            tasks[-1].append(piece)
            room -= taken
            start = end
    return tasks
