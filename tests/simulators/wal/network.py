"""A queue of events in virtual milliseconds, and connections over a bad network.

Theory of operation. Nothing waits and nothing runs at the same time: all coming events are in the
queue, by time, then in the order in which they were queued. A `NetworkLink` is one connection
between one life of a proposer and one life of an acceptor. Messages on it arrive in order, each way
for itself, after a delay of their own; messages on different links may overtake each other. A
message that is lost breaks its link: earlier messages arrive, then both ends see the end. While two
nodes are partitioned, messages in flight stay there, and arrive when the partition is over; a
proposer gives such a link up after the keepalive, an acceptor never does. So a message may arrive
long after its proposer died, while a successor is at work: that is intended.

An end that closes receives no more from the link.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from actors.wal import codec_v3
from actors.wal.messages import AcceptorMessage, ProposerMessage
from tests.kit import proposer_v2

TO_ACCEPTOR: Final = 0
TO_PROPOSER: Final = 1
END: Final = None
"""Sent like a message: the other end is closed."""
CODECS: Final[dict[int, Any]] = {2: proposer_v2, 3: codec_v3}


class EventQueue:
    """A queue of events; see the module's docstring."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.count = 0
        """Number of events that happened."""
        self._serial = 0
        self._waiting: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when_ms: int, call: Callable[..., None], *given: Any) -> None:
        """Queue `call(*given)` for `when_ms`, or for now if that is past."""
        self._serial += 1
        heapq.heappush(self._waiting, (max(when_ms, self.now_ms), self._serial, call, given))

    def after(self, delay_ms: int, call: Callable[..., None], *given: Any) -> None:
        """Queue `call(*given)` in `delay_ms`."""
        self.at(self.now_ms + delay_ms, call, *given)

    def next(self, until_ms: int) -> bool:
        """Run the next event; return False when there is none up to `until_ms`."""
        if not self._waiting or self._waiting[0][0] > until_ms:
            self.now_ms = max(self.now_ms, until_ms)
            return False
        self.now_ms, _, call, given = heapq.heappop(self._waiting)
        self.count += 1
        call(*given)
        return True


class LinkEnd(Protocol):
    """The node at one end of a link."""

    def arrived(self, link: NetworkLink, message: Any) -> None:
        """Receive the next message of the other end."""
        ...

    def closed(self, link: NetworkLink) -> None:
        """Notice that the other end is closed, or that the link broke."""
        ...


class NetworkLink:
    """One connection; see the module's docstring."""

    __slots__ = ("_air", "_codec", "_dice", "_last_ms", "_network", "_stalled", "ends", "key")

    def __init__(
        self,
        network: LinkNetwork,
        key: tuple[int, int],
        acceptor: LinkEnd,
        proposer: LinkEnd,
        dice: random.Random,
        version: int,
    ) -> None:
        self._network = network
        self.key = key
        """(proposer, acceptor)."""
        self.ends: list[LinkEnd | None] = [acceptor, proposer]
        self._dice = dice
        self._codec = CODECS.get(version)
        self._air: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._last_ms = [0, 0]
        self._stalled = [0, 0]

    def send(self, way: int, message: ProposerMessage | AcceptorMessage) -> None:
        """Send towards the end `way`; a closed end sends nothing."""
        if self.ends[1 - way] is None:
            return
        if self._network.drop and self._dice.random() < self._network.drop:
            self._network.told("lost", self.key, way)
            self._put(TO_ACCEPTOR, END)
            self._put(TO_PROPOSER, END)
            return
        if self._codec is not None:
            encode = self._codec.encode_proposer if way == 0 else self._codec.encode_acceptor
            self._put(way, encode(message))
        else:
            self._put(way, message)

    def close(self, way: int) -> None:
        """Close the end `way`; the other one is notified behind all messages in flight."""
        if self.ends[way] is None:
            return
        self.ends[way] = None
        self._put(1 - way, END)

    def _put(self, way: int, item: Any) -> None:
        network = self._network
        delay = self._dice.randint(network.delay_ms_min, network.delay_ms_max)
        when = self._last_ms[way] = max(self._last_ms[way], network.events.now_ms + delay)
        self._air[way].append(item)
        network.events.at(when, self._arrive, way)

    def _arrive(self, way: int) -> None:
        if self.key in self._network.cut:
            self._stalled[way] += 1
            return
        item = self._air[way].popleft()
        end = self.ends[way]
        if end is None:
            return
        if item is END:
            self.ends[way] = None
            end.closed(self)
            self._network.forget(self)
            return
        if self._codec is not None:
            decode = self._codec.decode_proposer if way == 0 else self._codec.decode_acceptor
            item = decode(item)
        end.arrived(self, item)

    def healed(self) -> None:
        """Deliver the delayed messages."""
        for way in (TO_ACCEPTOR, TO_PROPOSER):
            late, self._stalled[way] = self._stalled[way], 0
            for _ in range(late):
                delay = self._dice.randint(0, self._network.delay_ms_max)
                now_ms = self._network.events.now_ms
                when = self._last_ms[way] = max(self._last_ms[way], now_ms + delay)
                self._network.events.at(when, self._arrive, way)

    def given_up(self) -> None:
        """Close the proposer's end, which was cut off for the keepalive."""
        end = self.ends[TO_PROPOSER]
        if end is not None and self.key in self._network.cut:
            self.close(TO_PROPOSER)
            end.closed(self)


class LinkNetwork:
    """All links, and the partitions between nodes."""

    def __init__(
        self,
        events: EventQueue,
        delay_ms: tuple[int, int],
        drop: float,
        keepalive_ms: int,
        told: Callable[..., None],
    ) -> None:
        self.events = events
        self.delay_ms_min, self.delay_ms_max = delay_ms
        self.drop = drop
        self.keepalive_ms = keepalive_ms
        self.told = told
        self.cut: set[tuple[int, int]] = set()
        """(proposer, acceptor) pairs that are partitioned."""
        self._links: list[NetworkLink] = []

    def link(
        self,
        key: tuple[int, int],
        acceptor: LinkEnd,
        proposer: LinkEnd,
        dice: random.Random,
        version: int,
    ) -> NetworkLink:
        """Return a new connection, open at both ends."""
        made = NetworkLink(self, key, acceptor, proposer, dice, version)
        self._links.append(made)
        return made

    def forget(self, link: NetworkLink) -> None:
        """Drop a link of which both ends are closed."""
        if link.ends == [None, None] and link in self._links:
            self._links.remove(link)

    def partition(self, keys: set[tuple[int, int]]) -> None:
        """Partition pairs; proposers give up links that are still cut off after the keepalive."""
        self.cut |= keys
        for link in self._links:
            if link.key in keys:
                self.events.after(self.keepalive_ms, link.given_up)

    def heal(self) -> None:
        """End all partitions."""
        self.cut.clear()
        for link in list(self._links):
            link.healed()
