"""Plans a read in Spark's driver: chooses the time, takes leases, and divides it into tasks.

Loading fixes the shard and the time, so that a DataFrame shows the same time however often it runs,
and takes a lease that keeps this time readable. Planning, which happens once per run, takes a lease
on the parts and passes it to the tasks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from random import SystemRandom
from typing import Final

import anyio
import msgspec
import pyarrow as pa

from actors.durable.persist.attach import open_blobs, open_documents, suggest_names
from actors.durable.persist.catalog_objects import CATALOG, objects_of, shard_of
from actors.durable.persist.location import BlobStore, ConsensusStore
from actors.durable.persist.part_filter import PartFilter, PartVerdict
from actors.durable.persist.shard import BatchPart, ShardState, shard_key
from actors.durable.persist.split_leases import SplitLease, SplitLeases
from actors.engine.spark.source.options import ReadOptions
from actors.engine.spark.source.pushed_filters import ColumnCheck, conditions_of
from actors.engine.spark.source.read_tasks import (
    ReadTask,
    SuspectHashes,
    direct,
    divide_tasks,
    summing,
)
from actors.engine.spark.source.rows import (
    ReadWindow,
    SchemaHistory,
    errors_of,
    negative_hashes,
    refuse_errors,
    updates_of,
)
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import (
    CorruptData,
    DeadlineExceeded,
    InvalidUsage,
    ReadBelowSince,
    ReadTooFarAhead,
)
from actors.runtime.kernel import SystemClock
from actors.runtime.progress import EMPTY, Frontier, ShardId, Time, format_frontier
from actors.runtime.settings import Settings

_ATTEMPTS_MAX: Final = 16
"""Maximum number of attempts to lease a time of a shard whose since is advancing."""


class LoadedFrame(msgspec.Struct, frozen=True):
    """The read of a DataFrame, fixed when the DataFrame is made."""

    options: ReadOptions
    settings: Settings
    shard: ShardId
    schema: TableSchema
    as_of: Time
    """Time of the rows; for changes, the last time of a batch read."""
    start: Time
    """Time at which changes start."""
    name: str
    """Name of its leases."""

    def shown(self) -> str:
        """Return the name of the object and its shard, for messages."""
        return f"{self.options.object} (shard {self.shard})" if self.options.object else self.shard


class PlannedRead(msgspec.Struct, frozen=True):
    """A planned read: everything that its tasks need in addition to their own `ReadTask`."""

    loaded: LoadedFrame
    window: ReadWindow
    checks: tuple[ColumnCheck, ...]
    handed: SplitLease | None
    """The lease that the tasks share; None if there are no tasks."""
    schemas: SchemaHistory


class OpenedPlace(msgspec.Struct, frozen=True):
    """The stores of a place, opened for one call."""

    consensus: ConsensusStore
    blob: BlobStore
    leases: SplitLeases


@asynccontextmanager
async def open_stores(options: ReadOptions, settings: Settings) -> AsyncGenerator[OpenedPlace]:
    """Open the stores of a place. Raises `InvalidUsage`, `StateDirectoryError`, `StorageError`."""
    clock = SystemClock()
    blob = await open_blobs(options.place, settings, clock)
    consensus = await open_documents(options.place, settings, clock, SystemRandom())
    try:
        yield OpenedPlace(consensus, blob, SplitLeases(consensus, blob, settings, clock))
    finally:
        with anyio.CancelScope(shield=True):
            await consensus.close()


def fresh_name() -> str:
    """Return a unique name for the leases of one read."""
    return f"spark-{SystemRandom().getrandbits(64):016x}"


async def find_shard(stores: OpenedPlace, options: ReadOptions) -> ShardId:
    """Return the shard that the options name. Raises `UnknownObject`, `CorruptData`,
    `StorageError`."""
    if options.shard is None:
        assert options.object is not None
        return shard_of(objects_of(await stores.consensus.head(CATALOG)), options.object)
    if await stores.consensus.head(shard_key(options.shard)) is None:
        prefix = shard_key("")
        keys = await stores.consensus.list_keys(prefix)
        names = [key.removeprefix(prefix) for key in keys]
        raise InvalidUsage(
            f"no shard {options.shard!r} in {options.place.shown()};"
            f" {suggest_names(options.shard, names, 'shards')}"
        )
    return options.shard


async def load(options: ReadOptions, settings: Settings) -> LoadedFrame:
    """Fix the shard and the time, and lease the time. Raises `UnknownObject`, `ReadBelowSince`,
    `ReadTooFarAhead`, `DeadlineExceeded`, `InvalidUsage`, `StorageError`."""
    async with open_stores(options, settings) as stores:
        shard = await find_shard(stores, options)
        for attempt in range(_ATTEMPTS_MAX):
            state, upper = await _sealed(stores, settings, options, shard)
            as_of = options.as_of if options.as_of is not None else min(upper, EMPTY) - 1
            start = options.start if isinstance(options.start, int) else state.since
            # A stream may resume from its checkpoint although its `start` is below the since by
            # now. The stream's reader checks `start` when it uses it.
            held = max(start, state.since) if options.changes else as_of
            loaded = LoadedFrame(options, settings, shard, state.schema, as_of, start, fresh_name())
            try:
                await stores.leases.hold_load(shard, loaded.name, held)
            except ReadBelowSince:
                # The since advanced meanwhile: retry, unless the user asked for exactly this time.
                asked = None if options.changes else options.as_of
                if asked is not None or attempt == _ATTEMPTS_MAX - 1:
                    raise
            else:
                return loaded
        raise AssertionError("the last attempt raises")


async def _sealed(
    stores: OpenedPlace, settings: Settings, options: ReadOptions, shard: ShardId
) -> tuple[ShardState, Frontier]:
    """Return the shard's state once the wanted time is sealed."""
    waited_ms = 0
    while True:
        state, upper = await stores.leases.look(shard)
        wanted = state.since if options.as_of is None else options.as_of
        if options.as_of is not None and options.as_of < state.since:
            raise ReadBelowSince(
                f"asOf {options.as_of} of shard {shard} is below its since {state.since}: its"
                " contents at that time are no longer available"
            )
        if upper > wanted or (options.changes and options.as_of is None):
            return state, upper
        if waited_ms >= options.wait_ms:
            newest = (
                "nothing is sealed yet" if upper <= state.since else f"the newest is {upper - 1}"
            )
            what = f"time {wanted} of shard {shard} is not sealed, its upper is"
            text = f"{what} {format_frontier(upper)} ({newest})"
            if options.wait_ms:
                raise DeadlineExceeded(f"{text} after {waited_ms} ms (option waitMs)")
            raise ReadTooFarAhead(
                f"{text}: choose an earlier time, or set how long to wait with option waitMs"
            )
        pause_ms = min(settings.store_poll_ms, options.wait_ms - waited_ms)
        await anyio.sleep(pause_ms / 1000)
        waited_ms += pause_ms


async def plan(
    loaded: LoadedFrame, window: ReadWindow, checks: Sequence[ColumnCheck], name: str
) -> tuple[PlannedRead, list[ReadTask]]:
    """Lease the parts, and return tasks that together return each wanted row exactly once. Raises
    `ReadBelowSince`, `ViewInError`, `CorruptData`, `StorageError`."""
    options, settings = loaded.options, loaded.settings
    async with open_stores(options, settings) as stores:
        # Updates below `raise_to` are raised to it anyway, so a since up to there may have merged
        # them.
        since = window.lower if window.lower > 0 else window.raise_to
        state, handed = await stores.leases.take(loaded.shard, name, since)
        try:
            schemas = SchemaHistory.of(state)
            await _refuse_errors(stores.blob, loaded, state, window)
            parts = wanted_parts(state, loaded.schema, window, checks)
            tasks = await _tasks(stores.blob, loaded, schemas, parts, window, checks)
            handed = await stores.leases.shared(handed, len(tasks))
        except BaseException:
            with anyio.CancelScope(shield=True):
                # No task will drop the lease of a plan that failed.
                await stores.leases.drop(handed)
            raise
        return PlannedRead(loaded, window, tuple(checks), handed if tasks else None, schemas), tasks


def wanted_parts(
    state: ShardState, schema: TableSchema, window: ReadWindow, checks: Sequence[ColumnCheck]
) -> list[BatchPart]:
    """Return the parts that may contain wanted updates. `schema`: the schema that was loaded."""
    parts = [part for batch in state.batches for part in batch.parts if window.wants(part)]
    conditions = conditions_of(checks, schema)
    if not conditions:
        return parts
    pruned = PartFilter(schema, conditions)
    return [part for part in parts if pruned.verdict(part) is PartVerdict.KEEP]


async def _refuse_errors(
    blob: BlobStore, loaded: LoadedFrame, state: ShardState, window: ReadWindow
) -> None:
    """Raise `ViewInError` if the view is in error at the end of the window."""
    errors: list[pa.Table] = []
    for batch in state.batches:
        for part in batch.parts:
            if part.has_errors and part.time_min < window.upper:
                data = await read_part(blob, part)
                errors.append(errors_of(part, data, SchemaHistory.of(state), window.upper))
    refuse_errors(errors, loaded.shown())


async def _tasks(
    blob: BlobStore,
    loaded: LoadedFrame,
    schemas: SchemaHistory,
    parts: Sequence[BatchPart],
    window: ReadWindow,
    checks: Sequence[ColumnCheck],
) -> list[ReadTask]:
    options = loaded.options
    if not parts:
        return []
    retracting = [part for part in parts if part.retracts]
    if not retracting:
        return direct(parts, options.partition_bytes)
    if sum(part.rows for part in parts) <= options.sum_rows_max:
        return summing(parts)
    suspects, any_ = SuspectHashes(), False
    for part in retracting:
        data = await read_part(blob, part)
        hashes = negative_hashes(updates_of(part, data, schemas, loaded.schema, window, checks))
        if hashes is not None:
            suspects.add(hashes)
            any_ = True
    # The parts contain no retractions in the window.
    if not any_:
        return direct(parts, options.partition_bytes)
    return divide_tasks(parts, suspects, options.partition_bytes, options.sum_rows_max)


async def read_part(blob: BlobStore, part: BatchPart) -> bytes:
    """Return the bytes of a part under a lease. Raises `CorruptData` if they are missing."""
    if part.inline is not None:
        return part.inline
    data = await blob.get(part.key)
    if data is None:
        raise CorruptData(
            f"blob {part.key} is missing, although a shard refers to it: run `penstock shard"
            " verify`, and restore the file from a backup",
            determinate=True,
        )
    return data
