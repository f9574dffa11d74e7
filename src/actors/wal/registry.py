"""The connections of one timeline: receivers of log by slot, and the feedback for their proposers.

Every receiver has a slot, the lowest that is free. It is *voting* until its proposer announces that
it is elected, then *streaming*. The timeline's own recovery from a peer also has a slot, but does
not count as streaming. Each receiver also has a *feed*, through which its proposer gets the
positions of the log's consumers.

Invariants: as many slots are taken as guards are open; ``streaming <= count``; a slot's number is
less than the greatest number of receivers there ever were at the same time.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import msgspec

from actors.wal.messages import PageserverFeedback

T = TypeVar("T")
FEEDBACK_MAX: Final = 8


class ValueWatch(Generic[T]):
    """Holds one value, with one writer and any number of waiting tasks, all on one event loop.

    The tasks see the newest value, and may miss values in between.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of the waiting tasks."""

    @property
    def value(self) -> T:
        """Return the newest value."""
        return self._value

    def set(self, value: T) -> None:
        """Set the value, and wake up all waiting tasks unless it is the same."""
        if value == self._value:
            return
        self._value = value
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, holds: Callable[[T], bool]) -> T:
        """Wait for a value for which `holds` returns True, and return that value."""
        while not holds(self._value):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                # The task was cancelled before `set` took the future out of the list.
                if not future.done() or future.cancelled():
                    self._waiting = [each for each in self._waiting if each is not future]
        return self._value


class ReceiverStage(enum.Enum):
    """State of a receiver's proposer."""

    VOTING = "voting"
    STREAMING = "streaming"


class ReceiverState(msgspec.Struct, frozen=True):
    """One receiver, for status reports."""

    slot: int
    connection: str | None
    """None for a recovery from a peer."""
    stage: ReceiverStage


class SlotGuard:
    """A taken slot. A context manager that releases it."""

    def __init__(self, registry: ReceiverRegistry, slot: int) -> None:
        self._registry = registry
        self.slot = slot
        """The slot; -1 once it has been released."""

    def streaming(self) -> None:
        """Mark the slot's proposer as elected."""
        self._registry.moved(self.slot)

    def release(self) -> None:
        """Release the slot. Idempotent."""
        if self.slot >= 0:
            self._registry.release_slot(self.slot)
            self.slot = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ReceiverRegistry:
    """The receivers of one timeline."""

    def __init__(self) -> None:
        self._slots: list[ReceiverState | None] = []
        """State of each slot; None if it is free."""
        self.counts: ValueWatch[int] = ValueWatch(0)
        """Number of receivers, to wait for."""

    def register(self, connection: str | None) -> SlotGuard:
        """Take the lowest free slot."""
        slot = next((i for i, state in enumerate(self._slots) if state is None), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        self._slots[slot] = ReceiverState(slot, connection, ReceiverStage.VOTING)
        self.counts.set(self.count)
        return SlotGuard(self, slot)

    def moved(self, slot: int) -> None:
        """Mark a slot's proposer as elected."""
        state = self._slots[slot]
        assert state is not None, "its guard is open"
        self._slots[slot] = ReceiverState(slot, state.connection, ReceiverStage.STREAMING)

    def release_slot(self, slot: int) -> None:
        """Release a guard's slot."""
        assert self._slots[slot] is not None, "its guard was open"
        self._slots[slot] = None
        self.counts.set(self.count)

    @property
    def receivers(self) -> list[ReceiverState]:
        """Return all receivers, by slot."""
        return [state for state in self._slots if state is not None]

    @property
    def count(self) -> int:
        """Return the number of taken slots."""
        return len(self.receivers)

    @property
    def streaming(self) -> int:
        """Return the number of proposers that have announced their election, without recoveries."""
        return sum(
            # A recovery from a peer has no connection.
            state.stage is ReceiverStage.STREAMING and state.connection is not None
            for state in self.receivers
        )


class ReceiverFeed:
    """Feedback that waits for one receiver's proposer. `wake` is called when an empty feed gets
    feedback."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._waiting: deque[PageserverFeedback] = deque(maxlen=FEEDBACK_MAX)
        """Feedback that the writer has not taken yet, oldest first."""

    def offer(self, feedback: PageserverFeedback) -> None:
        """Add feedback without waiting."""
        first = not self._waiting
        # This may drop the oldest of `FEEDBACK_MAX`: each feedback includes what the earlier ones
        # said.
        self._waiting.append(feedback)
        if first:
            self._wake()

    def take(self) -> list[PageserverFeedback]:
        """Remove and return all feedback, oldest first."""
        found = list(self._waiting)
        self._waiting.clear()
        return found


class TimelineFeeds:
    """The feeds of a timeline."""

    def __init__(self) -> None:
        self._feeds: list[ReceiverFeed] = []
        """The open feeds."""

    def open(self, wake: Callable[[], object]) -> ReceiverFeed:
        """Open a feed."""
        feed = ReceiverFeed(wake)
        self._feeds.append(feed)
        return feed

    def close(self, feed: ReceiverFeed) -> None:
        """Close a feed. Idempotent."""
        self._feeds = [each for each in self._feeds if each is not feed]

    def broadcast(self, feedback: PageserverFeedback) -> None:
        """Add feedback to all feeds."""
        for feed in self._feeds:
            feed.offer(feedback)
