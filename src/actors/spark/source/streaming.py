"""Changes as a stream: ``spark.readStream.format("penstock").option("changes", "true")``.

An offset is a frontier: ``{"time": t}`` says that all changes below `t` were read. A batch from `s`
to `e` holds the changes with ``s <= time < e``, exactly and every time it is asked for, as long as
the since is no later than `s`; so Spark's checkpoints make it exactly once. The first batch of a
stream that begins with a snapshot has ``{"time": s, "snapshot": true}`` as its start: all rows at
`s`, as changes at `s`, and the changes after it.

The since is kept by a durable hold of the `consumer`, moved when Spark commits; without one, by a
lease that is renewed whenever Spark asks for the newest offset, and that ends with the stream. If
the since has passed the offset all the same, the read raises `ReadBelowSince`: no change is left
out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from actors.errors import InvalidUsage, PenstockError, ReadBelowSince
from actors.kernel import SystemClock
from actors.persist.handed import consumer_hold
from actors.persist.shard import ShardState
from actors.progress import EMPTY, Frontier, Time
from actors.spark.source.options import NEWEST, SNAPSHOT
from actors.spark.source.planning import LoadedFrame, OpenedPlace, fresh_name, open_stores, plan
from actors.spark.source.reading import ShardPartition, read
from actors.spark.source.rows import ReadWindow


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads the changes of one stream. Spark keeps one for its whole life, and sends copies of it
    to tasks."""

    def __init__(self, loaded: LoadedFrame, shape: pa.Schema) -> None:
        self._loaded = loaded
        self._shape = shape
        self._until: Frontier | None = None
        self._name = fresh_name()
        self._held_ms = float("-inf")
        """Time of the last write of the lease, on the monotonic clock."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Return the offset at which a stream without a checkpoint begins."""
        return anyio.run(self._initial)

    async def _initial(self) -> dict[str, Any]:
        loaded = self._loaded
        async with open_stores(loaded.wish, loaded.settings) as stores:
            state, upper = await stores.leases.look(loaded.shard)
        start = loaded.wish.start
        if start == NEWEST:
            return self._offset(max(upper, state.since))
        if start == SNAPSHOT:
            return self._offset(max(loaded.start, state.since)) | {"snapshot": True}
        if loaded.start < state.since:
            raise ReadBelowSince(
                f"startingTime {start} of {loaded.shown()} lies below its since {state.since}:"
                " changes from then on are no longer told apart; begin later, or with the snapshot"
            )
        return self._offset(loaded.start)

    def _offset(self, time: Frontier) -> dict[str, Any]:
        # With the shard, so that no checkpoint is taken for that of another one.
        return {"time": time, "shard": self._loaded.shard}

    def _time(self, offset: dict[str, Any]) -> Frontier:
        time, shard = offset.get("time"), offset.get("shard", self._loaded.shard)
        if not isinstance(time, int):
            raise InvalidUsage(
                f"the checkpoint has the offset {offset!r}, which is none of this source: give this"
                " query a checkpoint of its own"
            )
        if shard != self._loaded.shard:
            raise InvalidUsage(
                f"the checkpoint is of shard {shard}, and {self._loaded.shown()} is read here:"
                " another object, or one that was made anew; give this query a checkpoint of its"
                " own"
            )
        return time

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the upper of what is sealed, or an earlier offset if the limit demands it."""
        return anyio.run(self._latest, start, limit)

    async def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = self._time(start)
        async with open_stores(self._loaded.wish, self._loaded.settings) as stores:
            beyond = begin if isinstance(limit, ReadMaxRows) else EMPTY  # rows are to be counted
            state, upper = await self._looked(stores, begin, beyond)
            if upper <= begin:
                # Spark asks again at once, a hundred times a second.
                await anyio.sleep(self._loaded.settings.store_poll_ms / 1000)
                state, upper = await self._looked(stores, begin, beyond)
            await self._hold(stores, state, begin, moved=False)
        if isinstance(limit, ReadMaxRows):
            upper = _limited(state, begin, upper, limit.max_rows)
        return start if upper <= begin else self._offset(upper)

    async def _looked(
        self, stores: OpenedPlace, begin: Time, beyond: Frontier
    ) -> tuple[ShardState, Frontier]:
        state, upper = await stores.leases.look(self._loaded.shard, beyond)
        if state.since > begin:
            raise self._passed(begin, state.since)
        return state, upper if self._until is None else min(upper, self._until)

    def _passed(self, begin: Time, since: Time) -> ReadBelowSince:
        keep = "start anew with a new checkpoint"
        if self._loaded.wish.consumer is None:
            keep += ", with option consumer, whose durable hold keeps what is not read yet"
        return ReadBelowSince(
            f"changes of {self._loaded.shown()} from {begin} on are no longer told apart: its since"
            f" is {since}; {keep}"
        )

    async def _hold(
        self, stores: OpenedPlace, state: ShardState, begin: Time, *, moved: bool
    ) -> None:
        """Keep the since at `begin`, by the consumer's hold or else by a lease."""
        loaded = self._loaded
        if loaded.wish.consumer is not None:
            held = state.holds.get(consumer_hold(loaded.wish.consumer))
            # A hold advances only when Spark has committed (`moved`).
            if held is None or held > begin or (moved and held < begin):
                await stores.leases.hold(loaded.shard, loaded.wish.consumer, begin)
            return
        now = SystemClock().monotonic_ms()
        # A lease is written when it moves and when a quarter of its time is over.
        if moved or now - self._held_ms > loaded.settings.reader_lease_ms / 4:
            await stores.leases.hold_stream(loaded.shard, self._name, begin)
            self._held_ms = now

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a batch: about so many rows as option maxRowsPerBatch says, cut where
        appends end."""
        most = self._loaded.wish.batch_rows_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the upper: no later offset is given from now on."""
        self._until = anyio.run(self._upper)

    async def _upper(self) -> Frontier:
        async with open_stores(self._loaded.wish, self._loaded.settings) as stores:
            return (await stores.leases.look(self._loaded.shard))[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return tasks for the changes between two offsets; the same changes whenever it is
        asked."""
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
        async with open_stores(self._loaded.wish, self._loaded.settings) as stores:
            return (await stores.leases.look(self._loaded.shard))[0].since

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of a task. Called in an executor."""
        assert isinstance(partition, ShardPartition)
        return read(partition.planned, partition.task, partition.number, self._shape)

    def commit(self, end: dict[str, Any]) -> None:
        """Advance the hold or lease to an offset: nothing below it will be asked for again."""
        anyio.run(self._commit, self._time(end))

    async def _commit(self, end: Time) -> None:
        async with open_stores(self._loaded.wish, self._loaded.settings) as stores:
            state, _ = await stores.leases.look(self._loaded.shard)
            await self._hold(stores, state, end, moved=True)

    def stop(self) -> None:
        """Drop the lease; the hold of a consumer stays."""
        # It is negative infinity while no lease was written.
        if self._held_ms > 0:
            anyio.run(self._let_go)

    async def _let_go(self) -> None:
        with suppress(PenstockError):  # it expires
            async with open_stores(self._loaded.wish, self._loaded.settings) as stores:
                await stores.leases.drop_stream(self._loaded.shard, self._name)


def _limited(state: ShardState, begin: Time, upper: Frontier, rows_max: int) -> Frontier:
    """Return the end of a batch of about so many rows, and of one append at least."""
    end, rows = None, 0
    for batch in state.batches:
        rows += sum(part.rows for part in batch.parts if part.time_max >= begin)
        if batch.upper > begin:
            if end is not None and rows > rows_max:
                return min(end, upper)
            end = batch.upper
    return upper
