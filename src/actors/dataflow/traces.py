"""The traces that a dataflow's steps belong to.

Theory of operation. What a listen task describes comes in the context of its span, if changes of
a sampled trace are in it; the context is noted by source and interval. A step takes those of its
own interval: the first is its parent, the others, and the appends that they came from, are its
links. The step's span is open from its cut until it is installed, over several stages; whatever
else ends the step ends it too, so that no child is left without its parent. Parts are fetched,
and stages run, in the context that they belong to.

The start of a dataflow (`restoring`) belongs to the trace of who let it run, until it has its
first contents; what a restart or a reconnection starts again was asked for by nobody.

Bounded: a source's last `NOTES_MAX` descriptions, and `LINKS_MAX` links. Nothing is noted, and
nothing costs, while no trace is sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.dataflow.costs import Measures
from actors.dataflow.events import Step
from actors.dataflow.gather import Piece
from actors.persist import PersistClient
from actors.progress import Frontier, Time
from actors.protocol.compute import DataflowDescription, SubscribeBatch
from actors.protocol.internal import Described
from actors.spans import Opened, begin, carrying, span_below
from actors.telemetry import HYDRATION, PREPARED, ROWS_OUT, SPARK_MS, STEP, TRACEPARENT
from actors.tracing.trail import NOTES_MAX

T = TypeVar("T")


class StepTraces:
    """Of one dataflow."""

    def __init__(self, persist: PersistClient, description: DataflowDescription) -> None:
        self._persist = persist
        self._description = description
        self._notes: deque[tuple[int, Time, Frontier, str]] = deque(maxlen=NOTES_MAX)
        """(source, lower, upper, context) of what was described."""
        self._step: tuple[int, int] | None = None
        self._opened: Opened | None = None
        self._scheduled: str | None = None
        """The context in which the dataflow was let run, until it has its first contents."""

    @property
    def here(self) -> str | None:
        """The context of the step at hand."""
        return None if self._opened is None else self._opened.traceparent

    def scheduled(self) -> None:
        """Notes the context in which the suspension ends."""
        self._scheduled = TRACEPARENT.get()

    def restoring(
        self, incarnation: int, run: Callable[[], Awaitable[T]]
    ) -> Callable[[], Awaitable[T]]:
        """The start of an incarnation: a hydration, in the context that asked for it."""
        parent = self._scheduled
        if parent is None:
            return run
        named = (self._description.id, self._description.name, incarnation)

        async def traced() -> T:
            with span_below(parent, HYDRATION, *named):
                result = await run()
            self._scheduled = None
            return result

        return traced

    def described(self, message: Described) -> None:
        """Notes the context in which it came."""
        traceparent = TRACEPARENT.get()
        if traceparent is not None and message.parts:
            self._notes.append((message.source, message.lower, message.upper, traceparent))

    def of(self, source: int, piece: Piece) -> str | None:
        """The context in which a part is to be fetched."""
        for noted, lower, upper, traceparent in self._notes:
            if noted == source and piece.lower < upper and lower < piece.upper:
                return traceparent
        return None

    def begin(self, step: Step) -> None:
        """The step is cut. One that is tried again goes on with its span."""
        name = (step.incarnation, step.number)
        if name == self._step:
            return
        self.end()
        self._step = name
        if not self._notes:
            return
        mine = [context for _, lower, _, context in self._notes if lower < step.hi]
        if not mine:
            return
        described = self._description
        appends = [
            context
            for source in described.imports
            for context in self._persist.trail.between(source.shard, step.lo, step.hi)
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
        """A stage, run in the context of the step at hand."""
        here = self.here
        if here is None:
            return run

        async def traced() -> T:
            with carrying(here):
                return await run()

        return traced

    def sign(self, batch: SubscribeBatch) -> SubscribeBatch:
        """A batch that says from which step it is."""
        here = self.here
        if here is None:
            return batch
        return SubscribeBatch(batch.lower, batch.upper, batch.arrow, batch.error, here)

    def installed(self, step: Step | None, measures: Measures) -> None:
        """The step is done, and with it what was noted of changes below its `hi`."""
        if step is None or not (self._notes or self._opened):
            return
        if self._opened is not None:
            self._opened.note(ROWS_OUT, measures.rows_out)
            self._opened.note(SPARK_MS, round(measures.spark_ms, 3))
            self._opened.note(PREPARED, measures.prepared)
        self.end()
        left = [note for note in self._notes if note[2] > step.hi]
        self._notes = deque(left, maxlen=NOTES_MAX)

    def end(self) -> None:
        """The step is over, or there is none any more."""
        opened, self._opened, self._step = self._opened, None, None
        if opened is not None:
            opened.end()
