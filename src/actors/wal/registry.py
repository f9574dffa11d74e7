"""Who is connected to one timeline: proposers that push the log, and what waits for them.

Theory of operation. Every receiver of log has a slot: the lowest that is free. Its guard gives
the slot back, once. A receiver is *voting* until it has been told that its proposer is elected;
from then on it is *streaming*. The timeline's own recovery from a peer may hold a slot, too; it
is no compute, and is not counted among those that stream.

Beside it stand the *feeds*: one for each receiver, through which its proposer hears how far
consumers of the log are. A feed holds the newest `FEEDBACK_MAX`; older ones are dropped, because
each says all that those before it said.

Invariants: as many slots are taken as guards are open; ``streaming <= count``; a slot's number is
less than the greatest number of receivers there ever were at a time.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from actors.wal.messages import PageserverFeedback
from actors.wal.watch import Watch

FEEDBACK_MAX: Final = 8


class Stage(enum.Enum):
    """How far a receiver's proposer is."""

    VOTING = "voting"
    STREAMING = "streaming"


class ReceiverState(msgspec.Struct, frozen=True):
    """One receiver, for people."""

    slot: int
    connection: str | None
    """None: recovery from a peer."""
    stage: Stage


class Guard:
    """A taken slot; a context manager that gives it back."""

    def __init__(self, registry: Registry, slot: int) -> None:
        self._registry = registry
        self.slot = slot

    def streaming(self) -> None:
        """The proposer says that it is elected."""
        self._registry.moved(self.slot)

    def release(self) -> None:
        """Gives the slot back. Twice is harmless."""
        if self.slot >= 0:
            self._registry.released(self.slot)
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


class Registry:
    """See the module."""

    def __init__(self) -> None:
        self._slots: list[ReceiverState | None] = []
        self.counts: Watch[int] = Watch(0)
        """How many there are, to be waited for."""

    def register(self, connection: str | None) -> Guard:
        """Takes the lowest free slot."""
        slot = next((i for i, state in enumerate(self._slots) if state is None), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
        self._slots[slot] = ReceiverState(slot, connection, Stage.VOTING)
        self.counts.set(self.count)
        return Guard(self, slot)

    def moved(self, slot: int) -> None:
        """A guard's proposer is elected."""
        state = self._slots[slot]
        assert state is not None, "its guard is open"
        self._slots[slot] = ReceiverState(slot, state.connection, Stage.STREAMING)

    def released(self, slot: int) -> None:
        """A guard gives its slot back."""
        assert self._slots[slot] is not None, "its guard was open"
        self._slots[slot] = None
        self.counts.set(self.count)

    @property
    def receivers(self) -> list[ReceiverState]:
        """All, by slot."""
        return [state for state in self._slots if state is not None]

    @property
    def count(self) -> int:
        """Taken slots."""
        return len(self.receivers)

    @property
    def streaming(self) -> int:
        """Those of proposers that are elected, as they say; without recovery."""
        return sum(
            state.stage is Stage.STREAMING and state.connection is not None
            for state in self.receivers
        )


class Feed:
    """What one receiver's proposer is still to hear. `wake` is called when something waits where
    nothing did."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._waiting: deque[PageserverFeedback] = deque(maxlen=FEEDBACK_MAX)

    def offer(self, feedback: PageserverFeedback) -> None:
        """Never waits; where `FEEDBACK_MAX` wait the oldest goes."""
        first = not self._waiting
        self._waiting.append(feedback)
        if first:
            self._wake()

    def take(self) -> list[PageserverFeedback]:
        """All that wait, the oldest first."""
        found = list(self._waiting)
        self._waiting.clear()
        return found


class Feeds:
    """All feeds of a timeline."""

    def __init__(self) -> None:
        self._feeds: list[Feed] = []

    def open(self, wake: Callable[[], object]) -> Feed:
        """One more."""
        feed = Feed(wake)
        self._feeds.append(feed)
        return feed

    def close(self, feed: Feed) -> None:
        """It hears no more. Twice is harmless."""
        self._feeds = [each for each in self._feeds if each is not feed]

    def broadcast(self, feedback: PageserverFeedback) -> None:
        """To all."""
        for feed in self._feeds:
            feed.offer(feedback)
