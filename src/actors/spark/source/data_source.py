"""The data source as Spark's Python API wants it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import anyio
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from actors.errors import InvalidUsage
from actors.plan.schema import TableSchema
from actors.settings import load as load_settings
from actors.spark.source.filters import ColumnCheck, checks_of
from actors.spark.source.options import CHANGE_COLUMNS, NEWEST, SNAPSHOT, wish_of
from actors.spark.source.planning import LoadedFrame, fresh_name, load, plan
from actors.spark.source.reading import ShardPartition, read
from actors.spark.source.rows import ReadWindow
from actors.spark.source.streaming import ChangesReader

_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_PADDED: Final = re.compile(r"\b(?:var)?char\s*\(\s*\d+\s*\)")


class PenstockDataSource(DataSource):  # type: ignore[misc]
    """``spark.read.format("penstock")``: the rows of a table or view at one time. Its options and
    errors are described in docs/spark-source.md."""

    _loaded: LoadedFrame | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("penstock")``."""
        return "penstock"

    def schema(self) -> str:
        """Return the columns, and `_time` and `_diff` of changes."""
        # The time is settled here: Spark calls this when the DataFrame is made, and keeps this
        # object.
        loaded = self._load()
        columns = ddl(loaded.schema)
        if loaded.wish.changes:
            taken = {name.lower() for name in loaded.schema.names} & set(CHANGE_COLUMNS)
            if taken:
                raise InvalidUsage(
                    f"{loaded.shown()} has a column {', '.join(sorted(taken))} of its own: its"
                    " changes cannot be read so; rename it in a view"
                )
            columns += "".join(f", {name} bigint not null" for name in CHANGE_COLUMNS)
        return columns

    def _load(self) -> LoadedFrame:
        if self._loaded is None:
            wish = wish_of(self.options)
            self._loaded = anyio.run(load, wish, load_settings())
        return self._loaded

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of rows, or of the changes up to a time."""
        loaded = self._load()
        check_shape(loaded, schema)
        # Spark refuses a reader that takes filters where its pushdown is off; this worker of
        # Spark's runs only where it is on.
        caller = sys._getframe(1).f_globals
        spec = caller.get("__spec__")
        pushes = _PUSHDOWN_WORKER in (caller.get("__name__"), getattr(spec, "name", None))
        return (FilteringReader if pushes else PenstockReader)(loaded, schema)

    def streamReader(self, schema: StructType) -> ChangesReader:  # noqa: N802 - Spark's name
        """Return a reader of changes as a stream."""
        loaded = self._load()
        if not loaded.wish.changes:
            raise InvalidUsage(
                "a stream is of changes, with columns _time and _diff: add"
                ' .option("changes", "true")'
            )
        if loaded.wish.as_of is not None:
            raise InvalidUsage(
                "a stream goes on and on: leave option asOf out, or stop with"
                " .trigger(availableNow=True)"
            )
        check_shape(loaded, schema)
        return ChangesReader(loaded, shape_of(schema))


def ddl(schema: TableSchema) -> str:
    """Return the columns as Spark's DDL; padded and bounded text is plain text to a reader."""
    return ", ".join(
        f"`{column.name.replace('`', '``')}` {_PADDED.sub('string', column.type)}"
        + ("" if column.nullable else " not null")
        for column in schema.columns
    )


def shape_of(schema: StructType) -> pa.Schema:
    """Return the schema of the batches that Spark accepts."""
    return to_arrow_schema(schema, timezone="UTC")


def check_shape(loaded: LoadedFrame, schema: StructType) -> None:
    """Raise `InvalidUsage` for a schema that a user gave and that is not the shard's."""
    wanted = [*loaded.schema.names, *(CHANGE_COLUMNS if loaded.wish.changes else ())]
    if schema.fieldNames() != wanted:
        raise InvalidUsage(
            f"{loaded.shown()} has the columns {', '.join(wanted)}, the schema given has"
            f" {', '.join(schema.fieldNames())}: leave .schema(…) out"
        )
    shape = shape_of(schema)
    kinds = [
        *loaded.schema.arrow().types,
        *([pa.int64()] * (len(wanted) - len(loaded.schema.names))),
    ]
    nullable = {column.name: column.nullable for column in loaded.schema.columns}
    for field, given, kind in zip(schema, shape, kinds, strict=True):
        differs = given.type != kind and not pa.types.is_nested(kind)
        if differs or (not field.nullable and nullable.get(field.name, False)):
            null = "" if field.nullable else " not null"
            raise InvalidUsage(
                f"{loaded.shown()} has the columns {ddl(loaded.schema)}, the schema given has"
                f" {field.name} {field.dataType.simpleString()}{null}: leave .schema(…) out, and"
                " cast what was loaded"
            )


class PenstockReader(DataSourceReader):  # type: ignore[misc]
    """A batch read: rows at a time, or changes up to it."""

    def __init__(self, loaded: LoadedFrame, schema: StructType) -> None:
        self._loaded = loaded
        self._shape = shape_of(schema)
        self._checks: list[ColumnCheck] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Acquire the lease on the parts, and return the tasks."""
        loaded = self._loaded
        planned, tasks = anyio.run(
            partial(plan, loaded, window_of(loaded), self._checks, fresh_name())
        )
        return [ShardPartition(n, task, planned) for n, task in enumerate(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of a task. Called in an executor."""
        if not isinstance(partition, ShardPartition):  # Spark's own, for a read without tasks
            return iter(())
        return read(partition.planned, partition.task, partition.number, self._shape)


class FilteringReader(PenstockReader):
    """A `PenstockReader` for sessions whose filters Spark pushes down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Use the filters that are understood; return all, which Spark checks again."""
        self._checks = checks_of(filters, self._loaded.schema)
        return filters


def window_of(loaded: LoadedFrame) -> ReadWindow:
    """Return the window of a batch read. Raises `InvalidUsage`."""
    wish = loaded.wish
    if not wish.changes:
        return ReadWindow.contents(loaded.as_of)
    if wish.start == NEWEST:
        raise InvalidUsage("changes of a batch read begin somewhere: startingTime newest is an end")
    lower = 0 if wish.start == SNAPSHOT else loaded.start
    return ReadWindow(lower, max(lower, loaded.as_of + 1), loaded.start, True)
