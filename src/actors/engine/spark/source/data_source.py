"""Implements the data source in Spark's Python API: batch reads, and changes as a stream."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from actors.durable.persist.shard import ShardState
from actors.durable.persist.split_leases import consumer_hold
from actors.engine.spark.source.options import CHANGE_COLUMNS, NEWEST, SNAPSHOT, read_options
from actors.engine.spark.source.planning import (
    LoadedFrame,
    OpenedPlace,
    fresh_name,
    load,
    open_stores,
    plan,
)
from actors.engine.spark.source.pushed_filters import ColumnCheck, checks_of
from actors.engine.spark.source.reading import ShardPartition, read
from actors.engine.spark.source.rows import ReadWindow
from actors.engine.spark.spark_releases import installed_version, shape_options, stream_limits
from actors.model.plan.schema import TableSchema, quote
from actors.runtime.errors import InvalidUsage, PenstockError, ReadBelowSince
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import EMPTY, Frontier, Time
from actors.runtime.settings import load as load_settings

# -- changes as a stream ---------------------------------------------------------------------------

_SHAPE: Final = shape_options()
_LIMITS: Final[Any] = stream_limits()
_AvailableNow: Any = _LIMITS.SupportsTriggerAvailableNow


class ChangesReader(DataSourceStreamReader, _AvailableNow):  # type: ignore[misc]
    """Reads the changes of one stream: ``readStream.format("penstock").option("changes", "true")``.
    Spark keeps one reader for the whole life of the stream, and sends copies of it to tasks.

    An offset is a frontier: ``{"time": t}`` means that all changes below `t` were read. A batch
    from `s` to `e` contains the changes with ``s <= time < e``, the same each time it is requested,
    as long as the since is not later than `s`; so Spark's checkpoints make the stream exactly-once.
    The first batch of a stream that starts with a snapshot has ``{"time": s, "snapshot": true}`` as
    its start: all rows at `s`, as changes at `s`, and the changes after it.

    The since is held by a durable hold of the `consumer`, which advances when Spark commits.
    Without a consumer it is held by a lease that is renewed whenever Spark asks for the newest
    offset, and that ends with the stream. If the since has passed the offset nevertheless, the read
    raises `ReadBelowSince`: changes are never skipped silently.
    """

    def __init__(self, loaded: LoadedFrame, shape: pa.Schema) -> None:
        self._loaded = loaded
        self._shape = shape
        # The upper at which the stream ends; None until `prepareForTriggerAvailableNow`.
        self._until: Frontier | None = None
        # Name of the stream's lease.
        self._name = fresh_name()
        self._held_ms = float("-inf")
        """Time of the last write of the lease, on the monotonic clock."""
        self._told: dict[str, Any] | None = None
        """The last offset returned, for a Spark that does not say which offset it has."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Return the offset at which a stream without a checkpoint starts."""
        self._told = anyio.run(self._initial)
        return self._told

    async def _initial(self) -> dict[str, Any]:
        loaded = self._loaded
        async with open_stores(loaded.options, loaded.settings) as stores:
            state, upper = await stores.leases.look(loaded.shard)
        start = loaded.options.start
        if start == NEWEST:
            return self._offset(max(upper, state.since))
        if start == SNAPSHOT:
            return self._offset(max(loaded.start, state.since)) | {"snapshot": True}
        if loaded.start < state.since:
            raise ReadBelowSince(
                f"startingTime {start} of {loaded.shown()} is below its since {state.since}: older"
                " changes have been merged; start at a later time, or with the snapshot"
            )
        return self._offset(loaded.start)

    def _offset(self, time: Frontier) -> dict[str, Any]:
        # With the shard, so that a checkpoint cannot be used for another one.
        return {"time": time, "shard": self._loaded.shard}

    def _time(self, offset: dict[str, Any]) -> Frontier:
        time, shard = offset.get("time"), offset.get("shard", self._loaded.shard)
        if not isinstance(time, int):
            raise InvalidUsage(
                f"the checkpoint has the offset {offset!r}, which is not from this source: use a"
                " separate checkpoint for this query"
            )
        if shard != self._loaded.shard:
            raise InvalidUsage(
                f"the checkpoint is for shard {shard}, but this query reads"
                f" {self._loaded.shown()}, which is another object or was created again: use a new"
                " checkpoint for this query"
            )
        return time

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: Any = None
    ) -> dict[str, Any]:
        """Return the upper of what is sealed, or an earlier offset if the limit requires it. Before
        Spark 4.2 neither argument is given."""
        given = self._told if start is None else start
        self._told = (
            anyio.run(self._first) if given is None else anyio.run(self._latest, given, limit)
        )
        return self._told

    async def _latest(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        begin = self._time(start)
        async with open_stores(self._loaded.options, self._loaded.settings) as stores:
            # The first of these needs the number of rows.
            beyond = begin if isinstance(limit, _LIMITS.ReadMaxRows) else EMPTY
            state, upper = await self._looked(stores, begin, beyond)
            if upper <= begin:
                # Spark asks again immediately, a hundred times per second.
                await anyio.sleep(self._loaded.settings.store_poll_ms / 1000)
                state, upper = await self._looked(stores, begin, beyond)
            await self._hold(stores, state, begin, moved=False)
        if isinstance(limit, _LIMITS.ReadMaxRows):
            upper = _limited(state, begin, upper, limit.max_rows)
        return start if upper <= begin else self._offset(upper)

    async def _first(self) -> dict[str, Any]:
        """Return the upper for a stream that resumes from a checkpoint, whose offset an older Spark
        does not pass."""
        async with open_stores(self._loaded.options, self._loaded.settings) as stores:
            state, upper = await self._looked(stores, EMPTY, EMPTY)
            # The checkpoint is at or below it; a read that starts below the since is then refused.
            begin = max(upper, state.since)
            await self._hold(stores, state, begin, moved=False)
        return self._offset(begin)

    async def _looked(
        self, stores: OpenedPlace, begin: Time, beyond: Frontier
    ) -> tuple[ShardState, Frontier]:
        state, upper = await stores.leases.look(self._loaded.shard, beyond)
        if state.since > begin:
            raise self._passed(begin, state.since)
        return state, upper if self._until is None else min(upper, self._until)

    def _passed(self, begin: Time, since: Time) -> ReadBelowSince:
        keep = "start again with a new checkpoint"
        if self._loaded.options.consumer is None:
            keep += " and set option consumer, whose durable hold keeps unread changes"
        return ReadBelowSince(
            f"changes of {self._loaded.shown()} from {begin} on have been merged: its since is"
            f" {since}; {keep}"
        )

    async def _hold(
        self, stores: OpenedPlace, state: ShardState, begin: Time, *, moved: bool
    ) -> None:
        """Hold the since at `begin`, by the consumer's hold or else by a lease."""
        loaded = self._loaded
        if loaded.options.consumer is not None:
            held = state.holds.get(consumer_hold(loaded.options.consumer))
            # A hold advances only once Spark has committed (`moved`).
            if held is None or held > begin or (moved and held < begin):
                await stores.leases.hold(loaded.shard, loaded.options.consumer, begin)
            return
        now = SystemClock().monotonic_ms()
        # A lease is written when it advances, and after a quarter of its time.
        if moved or now - self._held_ms > loaded.settings.reader_lease_ms / 4:
            await stores.leases.hold_stream(loaded.shard, self._name, begin)
            self._held_ms = now

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """Return the limit of a batch: about as many rows as option maxRowsPerBatch says, cut at
        the end of an append."""
        most = self._loaded.options.batch_rows_max
        return _LIMITS.ReadAllAvailable() if most is None else _LIMITS.ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the upper: from now on no later offset is returned."""
        self._until = anyio.run(self._upper)

    async def _upper(self) -> Frontier:
        async with open_stores(self._loaded.options, self._loaded.settings) as stores:
            return (await stores.leases.look(self._loaded.shard))[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return tasks for the changes between two offsets, always the same changes."""
        begin, upper = self._time(start), self._time(end)
        if upper <= begin:
            return []
        lower = 0 if start.get("snapshot") else begin
        window = ReadWindow(lower, upper, begin, True)
        try:
            planned, tasks = anyio.run(partial(plan, self._loaded, window, (), fresh_name()))
        except ReadBelowSince:
            raise self._passed(begin, anyio.run(self._since)) from None
        return [ShardPartition(n, task, planned) for n, task in enumerate(tasks)]

    async def _since(self) -> Time:
        async with open_stores(self._loaded.options, self._loaded.settings) as stores:
            return (await stores.leases.look(self._loaded.shard))[0].since

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of a task. Called in an executor."""
        assert isinstance(partition, ShardPartition)
        return read(partition.planned, partition.task, partition.number, self._shape)

    def commit(self, end: dict[str, Any]) -> None:
        """Advance the hold or lease to an offset: nothing below it will be requested again."""
        anyio.run(self._commit, self._time(end))

    async def _commit(self, end: Time) -> None:
        async with open_stores(self._loaded.options, self._loaded.settings) as stores:
            state, _ = await stores.leases.look(self._loaded.shard)
            await self._hold(stores, state, end, moved=True)

    def stop(self) -> None:
        """Drop the lease; the hold of a consumer stays."""
        # It is negative infinity until a lease is written.
        if self._held_ms > 0:
            anyio.run(self._drop_lease)

    async def _drop_lease(self) -> None:
        with suppress(PenstockError):  # The lease expires.
            async with open_stores(self._loaded.options, self._loaded.settings) as stores:
                await stores.leases.drop_stream(self._loaded.shard, self._name)


def _limited(state: ShardState, begin: Time, upper: Frontier, rows_max: int) -> Frontier:
    """Return the end of a batch of about `rows_max` rows, and at least one append."""
    end, rows = None, 0
    for batch in state.batches:
        rows += sum(part.rows for part in batch.parts if part.time_max >= begin)
        if batch.upper > begin:
            if end is not None and rows > rows_max:
                return min(end, upper)
            end = batch.upper
    return upper


# -- batch reads -----------------------------------------------------------------------------------

_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_PADDED: Final = re.compile(r"\b(?:var)?char\s*\(\s*\d+\s*\)")


class PenstockDataSource(DataSource):  # type: ignore[misc]
    """``spark.read.format("penstock")``: the rows of a table or view at one time. See
    docs/guides/spark-source.md for its options and errors."""

    # The read, once it is loaded.
    _loaded: LoadedFrame | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("penstock")``."""
        return "penstock"

    def schema(self) -> str:
        """Return the columns; for changes, also `_time` and `_diff`."""
        # The time is fixed here: Spark calls this when the DataFrame is made, and keeps this
        # object.
        loaded = self._load()
        columns = ddl(loaded.schema)
        if loaded.options.changes:
            taken = {name.lower() for name in loaded.schema.names} & set(CHANGE_COLUMNS)
            if taken:
                raise InvalidUsage(
                    f"{loaded.shown()} has a column named {', '.join(sorted(taken))}, so its"
                    " changes cannot be read: rename the column in a view"
                )
            columns += "".join(f", {name} bigint not null" for name in CHANGE_COLUMNS)
        return columns

    def _load(self) -> LoadedFrame:
        if self._loaded is None:
            options = read_options(self.options)
            self._loaded = anyio.run(load, options, load_settings())
        return self._loaded

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of rows, or of the changes up to a time."""
        loaded = self._load()
        check_shape(loaded, schema)
        # Spark rejects a reader that takes filters if its pushdown is off; this Python worker of
        # Spark's runs only if it is on.
        caller = sys._getframe(1).f_globals
        spec = caller.get("__spec__")
        pushes = _PUSHDOWN_WORKER in (caller.get("__name__"), getattr(spec, "name", None))
        return (FilteringReader if pushes else PenstockReader)(loaded, schema)

    def streamReader(self, schema: StructType) -> ChangesReader:  # noqa: N802 - Spark's name
        """Return a reader of changes as a stream."""
        loaded = self._load()
        if not loaded.options.changes:
            raise InvalidUsage(
                "a stream can only read changes, with columns _time and _diff: add"
                ' .option("changes", "true")'
            )
        if loaded.options.as_of is not None:
            raise InvalidUsage(
                "a stream does not end at a given time: remove option asOf, or stop it with"
                " .trigger(availableNow=True)"
            )
        if loaded.options.batch_rows_max is not None and not _LIMITS.known:
            raise InvalidUsage(
                "option maxRowsPerBatch needs Spark 4.2 or later, and this is PySpark"
                f" {installed_version()}: remove it"
            )
        check_shape(loaded, schema)
        return ChangesReader(loaded, shape_of(schema))


def ddl(schema: TableSchema) -> str:
    """Return the columns as Spark's DDL; CHAR and VARCHAR are plain strings for a reader."""
    return ", ".join(
        f"{quote(column.name)} {_PADDED.sub('string', column.type)}"
        + ("" if column.nullable else " not null")
        for column in schema.columns
    )


def shape_of(schema: StructType) -> pa.Schema:
    """Return the schema of the batches that Spark accepts."""
    return to_arrow_schema(schema, **_SHAPE)


def check_shape(loaded: LoadedFrame, schema: StructType) -> None:
    """Raise `InvalidUsage` if a schema given by the user is not that of the shard."""
    wanted = [*loaded.schema.names, *(CHANGE_COLUMNS if loaded.options.changes else ())]
    if schema.fieldNames() != wanted:
        raise InvalidUsage(
            f"{loaded.shown()} has the columns {', '.join(wanted)}, but the given schema has"
            f" {', '.join(schema.fieldNames())}: remove .schema(…)"
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
                f"{loaded.shown()} has the columns {ddl(loaded.schema)}, but the given schema"
                f" has {field.name} {field.dataType.simpleString()}{null}: remove .schema(…), and"
                " cast the loaded columns"
            )


class PenstockReader(DataSourceReader):  # type: ignore[misc]
    """A batch read: the rows as of a timestamp, or the changes up to one."""

    def __init__(self, loaded: LoadedFrame, schema: StructType) -> None:
        self._loaded = loaded
        self._shape = shape_of(schema)
        # Filters that Spark has pushed down.
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
        # Spark's own partition, for a read without tasks.
        if not isinstance(partition, ShardPartition):
            return iter(())
        return read(partition.planned, partition.task, partition.number, self._shape)


class FilteringReader(PenstockReader):
    """A `PenstockReader` for sessions in which Spark pushes filters down."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802 - Spark's name
        """Use the filters that are understood; return all of them, since Spark checks them
        again."""
        self._checks = checks_of(filters, self._loaded.schema)
        return filters


def window_of(loaded: LoadedFrame) -> ReadWindow:
    """Return the window of a batch read. Raises `InvalidUsage`."""
    options = loaded.options
    if not options.changes:
        return ReadWindow.contents(loaded.as_of)
    if options.start == NEWEST:
        raise InvalidUsage(
            "startingTime newest is not supported in a batch read: give the time at which the"
            " changes start"
        )
    lower = 0 if options.start == SNAPSHOT else loaded.start
    return ReadWindow(lower, max(lower, loaded.as_of + 1), loaded.start, True)
