"""FetchTask: reads the described parts of one input of a dataflow, on one worker.

Theory of operation. The task reads the part of each `FetchPart` from the blob store, as an effect.
At most `fetches_in_flight_max` fetches run at a time, over at most
`inflight_bytes_per_dataflow_max` bytes of parts; a larger part is fetched alone. Further requests
wait in order, and the listen task's credit bounds them.

Every request gets one answer, `PartFetched` or `FetchFailed`, **with the time that was requested**.
Answers arrive in any order. The dataflow counts them per time, so a success never hides a failure.
A failed fetch does not stop the task, but the dataflow never completes the time of a failed part.

A read from a failing store is tried at most `fetch_attempts_max` times, with exponential backoff
and jitter.

`PartFetched` contains exactly the updates of the part's interval: for a listened part those with
``lower <= time < upper``, for a snapshot part all below `upper`, advanced to ``upper - 1``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

import msgspec
import pyarrow as pa

from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import advance, between
from actors.model.protocol.internal import (
    DescribedPart,
    FetchFailed,
    FetchMessage,
    FetchPart,
    PartFetched,
)
from actors.runtime.errors import PenstockError, is_retriable
from actors.runtime.kernel import Actor, ActorAddress, with_jitter
from actors.runtime.progress import TIME_MIN, ObjectId
from actors.runtime.settings import Settings
from actors.runtime.spans import span_below
from actors.runtime.telemetry import FETCH, TRACEPARENT
from actors.runtime.threshold_probes import FETCH_BUDGET, FETCHES

LOOP_ROWS_MAX = 20_000
"""Parts with at most this many rows are cut on the event loop, in 0.1 ms. For such small parts,
handing the work to a thread doubles the time (November 2026)."""

if TYPE_CHECKING:
    from actors.durable.persist import PersistClient


class _Job(msgspec.Struct, frozen=True, gc=False):
    """A request, waiting or running; `attempt` counts from 1."""

    fetch: FetchPart
    attempt: int = 1
    traceparent: str | None = None


class _Done(msgspec.Struct, frozen=True, gc=False):
    """The part of a job was read."""

    job: _Job
    updates: pa.Table


class _Failed(msgspec.Struct, frozen=True, gc=False):
    """One attempt of a job failed."""

    job: _Job
    error: PenstockError


_Message: TypeAlias = FetchMessage | _Job | _Done | _Failed


class FetchTask(Actor[_Message]):
    """Receives `FetchPart`; sends `PartFetched` and `FetchFailed` to `consumer`."""

    def __init__(
        self,
        persist: PersistClient,
        schema: TableSchema,
        dataflow: ObjectId,
        incarnation: int,
        input_index: int,
        consumer: ActorAddress[Any],
        settings: Settings,
    ) -> None:
        self._persist = persist
        self._schema = schema
        self._dataflow = dataflow
        self._incarnation = incarnation
        self._index = input_index
        self._consumer = consumer
        self._settings = settings
        self._waiting: deque[_Job] = deque()
        """Requests that wait for room, oldest first."""
        self._running = 0
        """Number of jobs in progress, those between two attempts included."""
        self._running_bytes = 0
        """Bytes of the parts of these jobs."""
        self._retrying = 0
        """Number of these jobs that wait for their next attempt."""

    async def receive(self, message: _Message) -> None:
        """Handle one message."""
        match message:
            case FetchPart():
                self._waiting.append(_Job(message, traceparent=TRACEPARENT.get()))
            case _Job():  # the backoff is over: retry in the slot that the job kept
                self._retrying -= 1
                self._run(message)
            case _Done(job=job, updates=updates):
                self._finish(job)
                self._consumer.reply(
                    PartFetched(
                        dataflow=self._dataflow,
                        incarnation=self._incarnation,
                        input_index=self._index,
                        time=job.fetch.time,
                        key=job.fetch.part.key,
                        updates=updates,
                    )
                )
            case _Failed(job=job, error=error):
                self._failed(job, error)
            case _:
                assert_never(message)
        self._start_waiting()

    def _start_waiting(self) -> None:
        limits = self._settings
        while self._waiting and not FETCHES.crossed(self._running >= limits.fetches_in_flight_max):
            size = self._waiting[0].fetch.part.bytes
            fits = self._running_bytes + size <= limits.inflight_bytes_per_dataflow_max
            # A part larger than the whole budget is fetched alone.
            if self._running and FETCH_BUDGET.crossed(not fits):
                return
            job = self._waiting.popleft()
            self._running += 1
            self._running_bytes += size
            self._run(job)

    def _run(self, job: _Job) -> None:
        part = job.fetch.part

        async def read() -> pa.Table:
            with span_below(job.traceparent, FETCH) as opened:
                if opened is not None:
                    interval = (part.lower, part.upper)
                    opened.describe(part.shard, self._dataflow, *interval, part.rows, part.bytes)
                updates = await self._persist.fetch(part.part, self._schema)
                if updates.num_rows <= LOOP_ROWS_MAX:
                    return cut(updates, part)
                return await self.ctx.clock.run_blocking(lambda: cut(updates, part))

        def failed(error: Exception) -> _Failed:
            if isinstance(error, PenstockError):
                return _Failed(job, error)
            raise error  # a bug: the actor crashes

        self.ctx.effect(read, done=lambda updates: _Done(job, updates), failed=failed)

    def _finish(self, job: _Job) -> None:
        self._running -= 1
        self._running_bytes -= job.fetch.part.bytes

    def _failed(self, job: _Job, error: PenstockError) -> None:
        # A retry cannot bring back a missing or damaged part.
        if is_retriable(error) and job.attempt < self._settings.fetch_attempts_max:
            self._retrying += 1
            again = _Job(job.fetch, job.attempt + 1, job.traceparent)
            delay_ms = self._settings.retry_delay_ms(job.attempt)
            self.ctx.after(with_jitter(delay_ms, self.ctx.random), again)
            return
        self._finish(job)
        self._consumer.reply(
            FetchFailed(
                dataflow=self._dataflow,
                incarnation=self._incarnation,
                input_index=self._index,
                time=job.fetch.time,
                key=job.fetch.part.key,
                error=error,
            )
        )

    def describe(self) -> str:
        """Describe the fetches in progress and those that wait, for operators."""
        if not self._running:
            return "idle"
        return (
            f"fetching {self._running} parts ({self._running_bytes} bytes, "
            f"{self._retrying} between attempts), {len(self._waiting)} waiting"
        )


def cut(updates: pa.Table, part: DescribedPart) -> pa.Table:
    """Return the updates in the description's interval; a snapshot's are advanced to
    ``upper - 1``."""
    if part.snapshot:
        return advance(between(updates, TIME_MIN, part.upper), part.upper - 1)
    if part.lower <= part.part.time_min and part.part.time_max < part.upper:
        return updates
    return between(updates, part.lower, part.upper)
