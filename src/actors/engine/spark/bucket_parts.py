"""Reads parts in a bucket as frames of Spark, without copying them to the service's disk.

If Spark has a connector of its own (S3A) that can read the parts, it reads Parquet through that;
else it reads them in tasks of this package (`bucket_tasks`). Footers are read here: they tell how
large the rows are, how to divide them into tasks, and whether any of them are retractions. Columns
that, according to the footers, have the same value in all rows are not fetched.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from actors.engine.spark.bucket_reading import (
    BucketUnreadable,
    TimeWindow,
    bucket_spec,
    plan_tasks,
    read_footers,
)
from actors.engine.spark.bucket_tasks import read_pieces, write_objects
from actors.engine.spark.bucket_writing import ObjectCut
from actors.engine.spark.failures import is_gone, short_text
from actors.model.plan.delta import TO, DeltaColumns
from actors.model.plan.jobs import NO_UPPER, BucketFolder, BucketObject, ObjectDone
from actors.model.plan.schema import DIFF, TIME, quote
from actors.runtime.errors import StorageError
from actors.runtime.settings import Settings

if TYPE_CHECKING:
    from actors.engine.spark.bridge import SessionBridge

SCAN_TASK_BYTES: Final = 64 * 1024 * 1024
"""Maximum decoded size of the parts in a bucket that one task of Spark reads."""

S3A_CLASS: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"
_FOOTERS_MAX: Final = 8_192
"""Maximum number of footers that are cached. A part never changes."""


class BucketPartScan(msgspec.Struct, frozen=True):
    """Parts of a bucket that Spark will read, and what their footers say."""

    parts: BucketParts
    objects: tuple[BucketObject, ...]
    footers: tuple[dict[str, Any], ...]
    name: str
    """Name by which a plan's scans of the parts are known."""
    columns: frozenset[str] | None = None
    """The columns to fetch; all others are NULL, since nothing reads them. None for all."""

    @property
    def bytes(self) -> int:
        """Return the approximate decoded size of the rows, at least 1."""
        return max(1, sum(sum(footer["groups"]) for footer in self.footers))

    @property
    def rows(self) -> int:
        """Return the number of stored rows."""
        return sum(footer["rows"] for footer in self.footers)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Return the minimum and maximum diff; None if a footer does not contain them. Without any
        rows, both are 1."""
        return self.bounds_of(DIFF) if self.rows else (1, 1)

    def bounds_of(self, column: str) -> tuple[int, int] | None:
        """Return the minimum and maximum time or diff of all rows; None if not known."""
        filled = [footer["bounds"][column] for footer in self.footers if footer["rows"]]
        if not filled or None in filled:
            return None
        lows, highs = zip(*filled, strict=True)
        return min(lows), max(highs)

    def retracting(self) -> BucketPartScan | None:
        """Return the parts that have, or may have, a negative diff; None if there are none."""
        pairs = [
            pair
            for pair in zip(self.objects, self.footers, strict=True)
            if pair[1]["rows"] and (pair[1]["bounds"][DIFF] or (-1,))[0] < 0
        ]
        if not pairs:
            return None
        objects, footers = zip(*pairs, strict=True)
        return msgspec.structs.replace(self, objects=objects, footers=footers)

    def frame(self, bridge: SessionBridge, struct: StructType, window: TimeWindow) -> DataFrame:
        """Return the rows within the window, with these columns by name."""
        fixed = self._fixed(window)
        fetched = [
            field
            for field in struct.fields
            if field.name not in fixed and (self.columns is None or field.name in self.columns)
        ]
        if not fetched:  # Some column must tell how many rows there are.
            del fixed[DIFF]
            fetched = [field for field in struct.fields if field.name == DIFF]
        found = self.parts.frame(bridge, StructType(fetched), self, window)
        names = {field.name for field in fetched}
        return found.selectExpr(
            *(
                quote(field.name)
                if field.name in names
                else f"{fixed.get(field.name) or _null_of(field)} AS {quote(field.name)}"
                for field in struct.fields
            )
        )

    def _fixed(self, window: TimeWindow) -> dict[str, str]:
        """Return the columns that have the same value in all rows within the window, with the
        values as literals."""
        fixed = {}
        if self.bounds == (1, 1):
            fixed[DIFF] = "1L"
        times = self.bounds_of(TIME)
        moved = window.advance_to
        if moved is not None and times is not None and min(times[1], window.upper - 1) <= moved:
            fixed[TIME] = f"{moved}L"
        return fixed


def _null_of(field: StructField) -> str:
    return f"CAST(NULL AS {field.dataType.simpleString()})"


class BucketParts:
    """An engine's access to parts in buckets: how they are read, and the footers read so far."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Footers by store and key, the least recently used first.
        self._footers: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._connects: bool | None = None
        """True if Spark's own connector reads parts; None if not known yet."""

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
                read = read_footers(self._spec(bucket), pairs, (TIME, DIFF))
            except BucketUnreadable as error:
                raise StorageError(str(error), determinate=True) from None
            for each, footer in zip(some, read, strict=True):
                found[each.key] = self._footers[bucket, each.key] = footer
        while len(self._footers) > _FOOTERS_MAX:
            self._footers.popitem(last=False)
        footers = tuple(found[each.key] for each in objects)
        name = f"penstock_parts_{uuid.uuid4().hex}"
        return BucketPartScan(self, tuple(objects), footers, name)

    def frame(
        self, bridge: SessionBridge, struct: StructType, scan: BucketPartScan, window: TimeWindow
    ) -> DataFrame:
        """Return the rows of parts within the window, with these columns by name."""
        first = scan.objects[0]
        if first.kind == "s3" and self._uses_connector(bridge, struct, first):
            stored = struct if TIME in struct.names else StructType(struct.fields).add(TIME, "long")
            reader = bridge.session.read.schema(stored).options(**_s3a_options())
            found = reader.parquet(*map(_s3a_url, scan.objects))
            return wanted_rows(found, window, struct.names)
        tasks = plan_tasks(
            [(each.key, each.bytes) for each in scan.objects],
            [footer["groups"] for footer in scan.footers],
            SCAN_TASK_BYTES,
            bridge.cores(),
        )
        low, high = scan.bounds_of(TIME) or (None, None)
        moves = window.advance_to is not None and TIME in struct.names
        return read_pieces(
            bridge.session,
            self._spec(first.bucket),
            tasks,
            struct,
            (scan.rows, scan.bytes),
            window if moves or not window.holds(low, high) else None,
            scan.name,
        )

    def write(
        self,
        found: DataFrame,
        folders: Sequence[BucketFolder],
        time: int | None,
        deltas: Sequence[DeltaColumns],
    ) -> tuple[ObjectDone, ...]:
        """Run the query and have the executors write its rows, all at `time` (None: at their own
        times), as objects. The rows of each delta, with exactly its columns, go into the folder at
        the same position. All folders are in one bucket. Raises Spark's own errors."""
        rows = found if time is None else found.drop(TIME).selectExpr("*", f"{time}L AS {TIME}")
        cuts = [
            ObjectCut(
                folder.prefix,
                (*delta.names, TIME, DIFF),
                delta.schema.arrow_updates().serialize().to_pybytes(),
                TO,
                delta.bit,
            )
            for folder, delta in zip(folders, deltas, strict=True)
        ]
        written = write_objects(rows, self._spec(folders[0].bucket), cuts)
        return tuple(ObjectDone(**row.asDict() | {"footer": bytes(row.footer)}) for row in written)

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
        """Return whether Spark's own connector reads parts; tried once, on a single part."""
        if self._connects is None:
            self._connects = bridge.has_class(S3A_CLASS) and _reads(bridge, struct, part)
        return self._connects


def wanted_rows(found: DataFrame, window: TimeWindow, names: Sequence[str]) -> DataFrame:
    """Return the stored rows that are within a window, at the times that they have there, with the
    columns `names`."""
    # Tests that every row passes are left out: a text without constants of its own is compiled only
    # once.
    if window.lower > 0:
        found = found.where(f"{TIME} >= {window.lower}L")
    if window.upper < NO_UPPER:
        found = found.where(f"{TIME} < {window.upper}L")
    if window.advance_to is None:
        return found.select(*map(quote, names))
    raised = f"greatest({TIME}, {window.advance_to}L) AS {TIME}"
    return found.selectExpr(*(raised if name == TIME else quote(name) for name in names))


def _reads(bridge: SessionBridge, struct: StructType, part: BucketObject) -> bool:
    """Return whether Spark can read a part through S3A, which may be installed but lack
    credentials."""
    reader = bridge.session.read.schema(struct).options(**_s3a_options())
    try:
        reader.parquet(_s3a_url(part)).limit(1).collect()
    except Exception as error:
        if is_gone(error):
            raise
        text = short_text(str(error))[:300]
        print(f"parts are read in Penstock's own tasks, because S3A fails: {text}", file=sys.stderr)
        return False
    return True


def _s3a_url(part: BucketObject) -> str:
    return f"s3a://{part.bucket.partition('://')[2]}/{part.key}"


def _s3a_options() -> dict[str, str]:
    """Return the settings by which S3A finds buckets, as the service's own library does by its
    environment."""
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
