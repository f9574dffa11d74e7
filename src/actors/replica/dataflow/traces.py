"""Finds the traces to which a dataflow's steps belong.

Theory of operation. If a listen task's description contains changes of a sampled trace, it carries
the context of its span, which is recorded by input and interval. A step takes the contexts of its
own interval: the first becomes its parent; the others, and the appends they came from, become its
links. The span of a step is open from its cut until it is installed, over several stages. Parts are
fetched, and stages run, in the context to which they belong.

The first start of a dataflow (`restoring`) belongs to the trace of the command that scheduled it.

Memory is bounded: only the last `NOTES_MAX` descriptions are recorded, and none while no trace is
sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.durable.persist import PersistClient
from actors.model.protocol.compute import DataflowDescription, StatusResponse, SubscribeBatch
from actors.model.protocol.internal import PartsDescribed
from actors.replica.dataflow.dataflow_input import PartInterval
from actors.replica.dataflow.events import DataflowStep
from actors.runtime.progress import Frontier, Time
from actors.runtime.spans import OpenSpan, begin, span_below, use_context
from actors.runtime.telemetry import HYDRATION, PREPARED, ROWS_OUT, SPARK_MS, STEP, TRACEPARENT
from actors.runtime.tracing.append_traces import NOTES_MAX

T = TypeVar("T")


class StepTraces:
    """Traces of one dataflow's steps."""

    def __init__(self, persist: PersistClient, description: DataflowDescription) -> None:
        self._persist = persist
        self._description = description
        self._notes: deque[tuple[int, Time, Frontier, str]] = deque(maxlen=NOTES_MAX)
        """(input, lower, upper, context) of each recorded description."""
        self._step: tuple[int, int] | None = None
        """(incarnation, number) of the step whose span is open."""
        self._opened: OpenSpan | None = None
        """The open span, if the step belongs to a sampled trace."""
        self._scheduled: str | None = None
        """Context of the schedule command, until the dataflow has its first contents."""

    @property
    def here(self) -> str | None:
        """Return the context of the current step."""
        return None if self._opened is None else self._opened.traceparent

    def scheduled(self) -> None:
        """Remember the trace context of the command that scheduled this dataflow."""
        self._scheduled = TRACEPARENT.get()

    def restoring(
        self, incarnation: int, run: Callable[[], Awaitable[T]]
    ) -> Callable[[], Awaitable[T]]:
        """Return `run` wrapped in a hydration span, in the context of the schedule command."""
        parent = self._scheduled
        if parent is None:
            return run
        named = (self._description.id, self._description.name, incarnation)

        async def traced() -> T:
            with span_below(parent, HYDRATION, *named):
                result = await run()
            # No one requested later restarts, so they belong to no trace.
            self._scheduled = None
            return result

        return traced

    def described(self, message: PartsDescribed) -> None:
        """Record the context of a description."""
        traceparent = TRACEPARENT.get()
        if traceparent is not None and message.parts:
            self._notes.append((message.input_index, message.lower, message.upper, traceparent))

    def of(self, input_index: int, piece: PartInterval) -> str | None:
        """Return the context in which a part should be fetched."""
        for noted, lower, upper, traceparent in self._notes:
            if noted == input_index and piece.lower < upper and lower < piece.upper:
                return traceparent
        return None

    def begin(self, step: DataflowStep) -> None:
        """Open the span of a step that was cut. A retried step keeps its span."""
        name = (step.incarnation, step.number)
        if name == self._step:
            return
        self.end()
        self._step = name
        # Nothing is recorded, so no trace is sampled.
        if not self._notes:
            return
        mine = [context for _, lower, _, context in self._notes if lower < step.hi]
        if not mine:
            return
        described = self._description
        appends = [
            context
            for imported in described.imports
            for context in self._persist.trail.between(imported.shard, step.lo, step.hi)
        ]
        self._opened = begin(
            STEP,
            described.id,
            described.name,
            step.number,
            step.incarnation,
            step.lo,
            step.hi,
            sum(table.num_rows for tables in step.deltas for table in tables),
            parent=mine[0],
            links=(*mine[1:], *appends),
        )

    def inside(self, run: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return a stage that runs in the context of the current step."""
        here = self.here
        if here is None:
            return run

        async def traced() -> T:
            with use_context(here):
                return await run()

        return traced

    def sign(self, batch: SubscribeBatch) -> SubscribeBatch:
        """Return the batch with the context of its step."""
        here = self.here
        if here is None:
            return batch
        return SubscribeBatch(batch.lower, batch.upper, batch.arrow, batch.error, here)

    def installed(self, step: DataflowStep | None, status: StatusResponse) -> None:
        """End the step's span, and forget descriptions of changes below its `hi`."""
        if step is None or not (self._notes or self._opened):
            return
        if self._opened is not None:
            self._opened.note(ROWS_OUT, status.rows_out)
            self._opened.note(SPARK_MS, round(status.spark_ms, 3))
            self._opened.note(PREPARED, status.prepared)
        self.end()
        # A description may extend beyond this step.
        left = [note for note in self._notes if note[2] > step.hi]
        self._notes = deque(left, maxlen=NOTES_MAX)

    def end(self) -> None:
        """End the step's span, if one is open."""
        opened, self._opened, self._step = self._opened, None, None
        if opened is not None:
            opened.end()
