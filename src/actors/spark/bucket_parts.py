"""Parts in a bucket as frames that Spark reads itself, without a copy on the service's disk.

Where Spark has a connector of its own (S3A) and it can read a part, it reads Parquet by that; else
it reads by our data source (`bucket_source`). Footers are read here: they tell how large the rows
are, how to cut them into tasks, and whether any of them retracts.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from actors.errors import StorageError
from actors.plan.jobs import BucketFolder, BucketObject, ObjectDone
from actors.plan.schema import DIFF, TIME
from actors.settings import Settings
from actors.spark.bucket_reading import BucketUnreadable, bucket_spec, plan_tasks, read_footers
from actors.spark.bucket_source import (
    FORMAT,
    SCAN_OPTION,
    STORE_OPTION,
    TASKS_OPTION,
    register,
    write_objects,
)
from actors.spark.failures import is_gone, short_text
from actors.spark.fragments import quote

if TYPE_CHECKING:
    from actors.spark.bridge import SessionBridge

S3A_CLASS: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_FOOTERS_MAX: Final = 8_192
"""Footers that are remembered: a part never changes."""


class BucketPartScan(msgspec.Struct, frozen=True):
    """Parts of a bucket that Spark is to read, and what their footers say."""

    parts: BucketParts
    objects: tuple[BucketObject, ...]
    footers: tuple[dict[str, Any], ...]
    name: str
    """Name by which a plan's scans of them are known."""
    columns: frozenset[str] | None = None
    """Columns that are fetched, where others are NULL as nothing reads them; None: all."""

    @property
    def bytes(self) -> int:
        """Return about how many bytes the rows take decoded (at least 1)."""
        return max(1, sum(sum(footer["groups"]) for footer in self.footers))

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Return the least and the greatest diff; None if a footer does not tell. No rows at all
        have the diff 1."""
        filled = [footer for footer in self.footers if footer["rows"]]
        if any(footer["low"] is None for footer in filled):
            return None
        lows, highs = (tuple(each[name] for each in filled) for name in ("low", "high"))
        return min(lows, default=1), max(highs, default=1)

    def retracting(self) -> BucketPartScan | None:
        """Return the parts that hold a negative diff, or may; None if there are none."""
        pairs = [
            pair
            for pair in zip(self.objects, self.footers, strict=True)
            if pair[1]["rows"] and (pair[1]["low"] is None or pair[1]["low"] < 0)
        ]
        if not pairs:
            return None
        objects, footers = zip(*pairs, strict=True)
        return msgspec.structs.replace(self, objects=objects, footers=footers)

    def frame(self, bridge: SessionBridge, struct: StructType) -> DataFrame:
        """Return the rows as they are stored, with these columns by name."""
        if self.columns is None:
            return self.parts.frame(bridge, struct, self)
        kept = [field for field in struct.fields if field.name in self.columns]
        found = self.parts.frame(bridge, StructType(kept or struct.fields[-1:]), self)
        names = set(found.columns)
        return found.selectExpr(
            *(
                quote(field.name)
                if field.name in names
                else f"CAST(NULL AS {field.dataType.simpleString()}) AS {quote(field.name)}"
                for field in struct.fields
            )
        )


class BucketParts:
    """Access of one engine to parts in buckets: how they are read, and footers that were read."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._footers: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._connects: bool | None = None
        """True if Spark's own connector reads parts; None: not known yet."""

    def scan(self, objects: Sequence[BucketObject]) -> BucketPartScan:
        """Read the footers of parts. Raises `StorageError`."""
        found: dict[str, dict[str, Any]] = {}
        missing: dict[str, list[BucketObject]] = {}
        for each in objects:
            known = self._footers.get((each.bucket, each.key))
            if known is None:
                missing.setdefault(each.bucket, []).append(each)
            else:
                found[each.key] = known
        for bucket, some in missing.items():
            pairs = [(each.key, each.bytes) for each in some]
            try:
                read = read_footers(self._spec(bucket), pairs, DIFF)
            except BucketUnreadable as error:
                raise StorageError(str(error), determinate=True) from None
            for each, footer in zip(some, read, strict=True):
                found[each.key] = self._footers[bucket, each.key] = footer
        while len(self._footers) > _FOOTERS_MAX:
            self._footers.popitem(last=False)
        footers = tuple(found[each.key] for each in objects)
        return BucketPartScan(self, tuple(objects), footers, uuid.uuid4().hex)

    def frame(self, bridge: SessionBridge, struct: StructType, scan: BucketPartScan) -> DataFrame:
        """Return the rows of parts as they are stored, with these columns by name."""
        first = scan.objects[0]
        if first.kind == "s3" and self._uses_connector(bridge, struct, first):
            reader = bridge.session.read.schema(struct).options(**_s3a_options())
            return reader.parquet(*map(_s3a_url, scan.objects))
        if not bridge.reads_buckets:
            register(bridge.session)
            bridge.reads_buckets = True
        tasks = plan_tasks(
            [(each.key, each.bytes) for each in scan.objects],
            [footer["groups"] for footer in scan.footers],
            self._settings.engine_scan_task_bytes,
            bridge.cores(),
        )
        options = {
            STORE_OPTION: self._spec(first.bucket),
            TASKS_OPTION: json.dumps(tasks),
            SCAN_OPTION: scan.name,
        }
        return bridge.session.read.format(FORMAT).schema(struct).options(**options).load()

    def write(
        self, found: DataFrame, folder: BucketFolder, time: int, shape: pa.Schema
    ) -> tuple[ObjectDone, ...]:
        """Run the query and have the executors write its rows, all at `time`, as objects with the
        columns of `shape`. Raises Spark's own errors."""
        columns = [quote(name) for name in shape.names if name != TIME]
        rows = found.selectExpr(*columns, f"{time}L AS {TIME}")
        written = write_objects(rows, self._spec(folder.bucket), folder.prefix, shape)
        return tuple(
            ObjectDone(row.name, row.rows, row.size, row.checksum, bytes(row.footer))
            for row in written
        )

    def _spec(self, bucket: str) -> str:
        kind, _, name = bucket.partition("://")
        settings = self._settings
        return bucket_spec(
            kind,
            name,
            os.environ,
            settings.store_request_timeout_ms,
            settings.store_request_retries_max,
        )

    def _uses_connector(
        self, bridge: SessionBridge, struct: StructType, part: BucketObject
    ) -> bool:
        """Return whether Spark's own connector reads parts: tried once, on one part."""
        if self._connects is None:
            self._connects = bridge.has_class(S3A_CLASS) and _reads(bridge, struct, part)
        return self._connects


def _reads(bridge: SessionBridge, struct: StructType, part: BucketObject) -> bool:
    """Return whether Spark reads a part by S3A, which may be there without credentials."""
    reader = bridge.session.read.schema(struct).options(**_s3a_options())
    try:
        reader.parquet(_s3a_url(part)).limit(1).collect()
    except Exception as error:
        if is_gone(error):
            raise
        text = short_text(str(error))[:300]
        print(f"parts are read by our data source: S3A does not: {text}", file=sys.stderr)
        return False
    return True


def _s3a_url(part: BucketObject) -> str:
    return f"s3a://{part.bucket.partition('://')[2]}/{part.key}"


def _s3a_options() -> dict[str, str]:
    """Return where S3A finds buckets, as the service's own library does by its environment."""
    options = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    if endpoint:
        virtual = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true")
        options = {
            "fs.s3a.endpoint": endpoint,
            "fs.s3a.path.style.access": "false" if virtual else "true",
            "fs.s3a.connection.ssl.enabled": str(not endpoint.startswith("http://")).lower(),
        }
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return options | ({"fs.s3a.endpoint.region": region} if region else {})
