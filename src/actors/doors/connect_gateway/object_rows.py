"""Rows of the service's objects, at one time, as relations for Spark.

Contents up to `connect_inline_bytes_max` are read here and travel inside the plan. Larger ones are
lent: their parts are leased, and a job of the engine makes a global temporary view over them
(`plan.jobs.LendContents`), which sums the weights of equal rows. A lent view, its leases and its
hold last as long as the operation that reads it.
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
"""Prefix of the names of lent views."""


class OpenedRows(msgspec.Struct, frozen=True):
    """Relations of objects, by name. `lent`: some of them read parts of shards."""

    relations: Mapping[str, ProtoMessage]
    lent: bool


class ObjectRows:
    """Opens rows of objects."""

    def __init__(
        self,
        settings: Settings,
        clock: ActorClock,
        client: SharedClient,
        persist: PersistClient | None,
        executor: ActorAddress[ExecutorMessage] | None,
        scratch: Path,
    ) -> None:
        """Take the environment. Without `persist` and `executor` nothing can be lent."""
        self._settings = settings
        self._clock = clock
        self._client = client
        self._persist = persist
        self._executor = executor
        self._scratch = scratch
        self._numbers = itertools.count(1)

    def empty(self, names: ObjectNames, keys: Mapping[str, int]) -> OpenedRows:
        """Return relations without rows: enough for Spark to analyse a plan."""
        return OpenedRows({key: empty_relation(_schema(names, key)) for key in keys}, False)

    async def open(
        self,
        stack: AsyncExitStack,
        names: ObjectNames,
        keys: Mapping[str, int],
        time: Time,
        role: str,
    ) -> OpenedRows:
        """Return relations of objects at `time`, which may be used until `stack` closes.

        `keys` says how often the plan holds each: a relation inside it is there as often; `role`
        for whom the service's relations about itself are read. Raises
        `ViewInError`, `ReadBelowSince`, `DeadlineExceeded`, and the engine's errors.
        """
        made: dict[str, ProtoMessage] = {}
        left, lent = self._settings.connect_inline_bytes_max, False
        for key, uses in keys.items():
            schema, entry = _schema(names, key), names.entry(key)
            rows = await self._read(key, None if entry is None else time, left // uses, role)
            # The limit is of the plan, in which a relation is as often as its name.
            if rows is not None:
                left -= rows.nbytes * uses
                made[key] = rows_relation(schema, rows)
            elif entry is None:
                limit = self._settings.connect_inline_bytes_max
                raise InvalidUsage(
                    f"{key} has more than {limit} bytes (connect_inline_bytes_max): read less of it"
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
        # Left early, the read is cancelled at the service.
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
        """Return a relation that reads the object's own parts."""
        persist, executor, shard = self._persist, self._executor, entry.shard
        if persist is None or executor is None or shard is None:
            raise InvalidUsage(f"{entry.name} is too large for connect_inline_bytes_max")
        name = f"{VIEW_PREFIX}{next(self._numbers)}"
        await stack.enter_async_context(_held(persist, entry, f"connect/{name}", time))
        engine = EngineClient(executor, self._clock, self._settings, self._scratch / name, name)
        given = await stack.enter_async_context(
            contents(persist, engine, shard, entry.schema, time, engine.job_id(0, 0, "lend"))
        )
        # Error or correct, never wrong: a view with an error has no rows to be read.
        if given.errors:
            raise ViewInError(f"{entry.name}: {given.errors[0]}")
        # Before the job is sent: a view that it makes and does not answer for is dropped, too.
        stack.push_async_callback(self._return, executor, name)
        await run_job(executor, LendContents(f"{name}/lend", name, given.rows))
        return lent_relation(name)

    # An engine that has died has taken the view with it, so a failure is no news.
    async def _return(self, executor: ActorAddress[ExecutorMessage], name: str) -> None:
        with contextlib.suppress(PenstockError):
            await run_job(executor, ReturnContents(f"{name}/return", name))


@contextlib.asynccontextmanager
async def _held(
    persist: PersistClient, entry: CatalogObject, holder: str, time: Time
) -> AsyncIterator[None]:
    """Hold an object's history at a time meanwhile. Raises `ReadBelowSince`."""
    shard = entry.shard
    assert shard is not None, entry.name
    try:
        # Hold first, then read the since: in the other order a compaction could come in between.
        with contextlib.suppress(ReadBelowSince):
            await persist.set_holds([(shard, holder, time)])
        since = (await persist.state(shard)).since
        if time < since:
            raise ReadBelowSince(
                f"{entry.kind} {entry.name} cannot be read at {time}: its history begins at {since}"
            )
        yield
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(PenstockError):
            await persist.drop_hold(shard, holder)


async def run_job(executor: ActorAddress[ExecutorMessage], job: Job) -> Answer:
    """Run a job of the engine; cancel it if this call is cancelled. Raises the job's errors."""

    def submit(reply: ReplySlot[Answer]) -> ExecutorMessage:
        return SubmitJob(job, reply)

    try:
        return await executor.ask(submit)
    except anyio.get_cancelled_exc_class():
        # Best effort: a job that is not canceled ends by itself.
        with contextlib.suppress(PenstockError):
            executor.send_nowait(CancelJob(job.job_id))
        raise


def _schema(names: ObjectNames, key: str) -> TableSchema:
    schema = names.schemas.get(key)
    if schema is None:
        raise UnknownObject(f"there is no table or view named {key!r}")
    return schema
