"""Provides the rows of the service's objects, at a single timestamp, as relations for Spark.

Contents up to `connect_inline_bytes_max` are read here and sent inside the plan. Larger contents
are lent: their parts are leased, and a job of the engine creates a global temporary view over them
(`plan.jobs.LendContents`), which consolidates equal rows. A lent view, its leases and its hold last
as long as the operation that reads it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

import anyio
import msgspec
import pyarrow as pa

from actors.control.controller.catalog.catalog import CatalogObject
from actors.doors.connect_gateway.object_catalog import ObjectNames, SharedClient
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.row_messages import empty_relation, lent_relation, rows_relation
from actors.durable.persist import PersistClient
from actors.model.plan.jobs import (
    Answer,
    CancelJob,
    ExecutorMessage,
    Job,
    LendContents,
    ReturnContents,
    SubmitJob,
)
from actors.model.plan.schema import TableSchema
from actors.replica.dataflow.contents import contents
from actors.replica.dataflow.engine import EngineClient
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    UnknownObject,
    ViewInError,
)
from actors.runtime.kernel import ActorAddress, ActorClock, ReplySlot
from actors.runtime.progress import Time
from actors.runtime.settings import Settings

VIEW_PREFIX: Final = "penstock_rows_"
"""Prefix for the names of lent views."""


class OpenedRows(msgspec.Struct, frozen=True):
    """Relations by object name. `lent`: at least one of them reads a lent view."""

    relations: Mapping[str, ProtoMessage]
    lent: bool


class ObjectRows:
    """Opens the rows of objects for plans."""

    def __init__(
        self,
        settings: Settings,
        clock: ActorClock,
        client: SharedClient,
        persist: PersistClient | None,
        executor: ActorAddress[ExecutorMessage] | None,
        scratch: Path,
    ) -> None:
        """Set up the reads. Without `persist` or `executor`, nothing can be lent."""
        self._settings = settings
        self._clock = clock
        self._client = client
        self._persist = persist
        self._executor = executor
        self._scratch = scratch
        self._numbers = itertools.count(1)

    def empty(self, names: ObjectNames, keys: Mapping[str, int]) -> OpenedRows:
        """Return empty relations, which suffice for Spark to analyze a plan."""
        return OpenedRows({key: empty_relation(_schema(names, key)) for key in keys}, False)

    async def open(
        self,
        stack: AsyncExitStack,
        names: ObjectNames,
        keys: Mapping[str, int],
        time: Time,
        role: str,
    ) -> OpenedRows:
        """Return relations for objects at `time`, which are valid until `stack` closes.

        `keys` maps each object to how often the plan names it, and thus contains its rows. `role`
        reads the service's relations about itself. Raises `ViewInError`, `ReadBelowSince`,
        `DeadlineExceeded`, and the engine's errors.
        """
        made: dict[str, ProtoMessage] = {}
        left, lent = self._settings.connect_inline_bytes_max, False
        for key, uses in keys.items():
            schema, entry = _schema(names, key), names.entry(key)
            rows = await self._read(key, None if entry is None else time, left // uses, role)
            # The limit applies to the plan, which contains the rows once per use.
            if rows is not None:
                left -= rows.nbytes * uses
                made[key] = rows_relation(schema, rows)
            elif entry is None:
                limit = self._settings.connect_inline_bytes_max
                raise InvalidUsage(
                    f"{key} exceeds {limit} bytes (connect_inline_bytes_max): restrict the query"
                )
            else:
                made[key], lent = await self._lend(stack, entry, time), True
        return OpenedRows(made, lent)

    async def _read(
        self, key: str, time: Time | None, bytes_max: int, role: str
    ) -> pa.Table | None:
        """Return the rows of an object; None if they are larger than `bytes_max`."""
        tables: list[pa.Table] = []
        size = 0
        # Leaving the loop early cancels the read at the service.
        async with (
            self._client.reader_of(key, role) as client,
            aclosing(client.peek_batches(key, time)) as pieces,
        ):
            async for piece in pieces:
                tables.append(piece)
                size += piece.nbytes
                if size > bytes_max:
                    return None
        return pa.concat_tables(tables)

    # -- lending -------------------------------------------------------------------------------

    async def _lend(self, stack: AsyncExitStack, entry: CatalogObject, time: Time) -> ProtoMessage:
        """Lend an object's contents, and return a relation that reads them."""
        persist, executor, shard = self._persist, self._executor, entry.shard
        if persist is None or executor is None or shard is None:
            raise InvalidUsage(f"{entry.name} exceeds connect_inline_bytes_max: restrict the query")
        name = f"{VIEW_PREFIX}{next(self._numbers)}"
        await stack.enter_async_context(_held(persist, entry, f"connect/{name}", time))
        engine = EngineClient(executor, self._clock, self._settings, self._scratch / name, name)
        given = await stack.enter_async_context(
            contents(persist, engine, shard, entry.schema, time, engine.job_id(0, 0, "lend"))
        )
        # A view that contains an error must not be read.
        if given.errors:
            raise ViewInError(f"{entry.name}: {given.errors[0]}")
        # Register the cleanup before sending the job, to drop the view even if the answer is lost.
        stack.push_async_callback(self._return, executor, name)
        await run_job(executor, LendContents(f"{name}/lend", name, given.rows))
        return lent_relation(name)

    # Ignore failures: if the engine died, the view is gone as well.
    async def _return(self, executor: ActorAddress[ExecutorMessage], name: str) -> None:
        with contextlib.suppress(PenstockError):
            await run_job(executor, ReturnContents(f"{name}/return", name))


@contextlib.asynccontextmanager
async def _held(
    persist: PersistClient, entry: CatalogObject, holder: str, time: Time
) -> AsyncIterator[None]:
    """Hold an object's history at a time within the block. Raises `ReadBelowSince`."""
    shard = entry.shard
    assert shard is not None, entry.name
    try:
        # Set the hold first, then read the since: otherwise a compaction could intervene.
        with contextlib.suppress(ReadBelowSince):
            await persist.set_holds([(shard, holder, time)])
        since = (await persist.state(shard)).since
        if time < since:
            raise ReadBelowSince(
                f"{entry.kind} {entry.name} cannot be read at {time}: its history starts at {since}"
            )
        yield
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(PenstockError):
            await persist.drop_hold(shard, holder)


async def run_job(executor: ActorAddress[ExecutorMessage], job: Job) -> Answer:
    """Run a job of the engine, and cancel it if this call is canceled. Raises the job's errors."""

    def submit(reply: ReplySlot[Answer]) -> ExecutorMessage:
        return SubmitJob(job, reply)

    try:
        return await executor.ask(submit)
    except anyio.get_cancelled_exc_class():
        # Best effort: if this fails, the job ends on its own.
        with contextlib.suppress(PenstockError):
            executor.send_nowait(CancelJob(job.job_id))
        raise


def _schema(names: ObjectNames, key: str) -> TableSchema:
    schema = names.schemas.get(key)
    if schema is None:
        raise UnknownObject(f"table or view {key!r} does not exist")
    return schema
