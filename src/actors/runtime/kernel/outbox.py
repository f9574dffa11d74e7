"""Messages that their receiver has not acknowledged: bounded, ordered, coalesced. Pure.

Theory of operation. At most `messages_max` messages (and about `bytes_max` bytes) are in flight;
the rest wait here. A message that waits is replaced by a newer one of its key, or merged with it,
so the queue is bounded by the number of keys.

Each message in flight has a unique serial number, by which it is acknowledged, in any order.
Messages belong to one connection, by its nonce; an acknowledgement of a former one is ignored. A
message's `receipt` is returned exactly once: when the message was acknowledged, or dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from actors.runtime.progress import Nonce

M = TypeVar("M")
T = TypeVar("T")


class CoalescingOutbox(Generic[M, T]):
    """Queue of messages; `T` is the type of a receipt. Subclasses say which messages merge."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self.nonce: Nonce | None = None
        self._waiting: OrderedDict[Hashable, tuple[M, T | None]] = OrderedDict()
        self._in_flight: dict[int, tuple[int, T | None]] = {}
        self._in_flight_bytes = 0
        self._serial = 0
        self._unkeyed = 0

    def key(self, message: M) -> Hashable | None:
        """Return the key of messages of which the newest counts; None: it never merges."""
        raise NotImplementedError

    def merged(self, old: M, new: M) -> M:
        """Return what two messages of a key say together."""
        return new

    def size(self, message: M) -> int:
        """Return about how much memory a message holds."""
        return 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Return the number of messages that were sent and not acknowledged."""
        return len(self._in_flight)

    @property
    def sent(self) -> int:
        """Return the number of messages that were ever sent."""
        return self._serial

    def switch(self, nonce: Nonce | None) -> list[T]:
        """Drop all messages and switch to another connection (or none); return the dropped
        receipts."""
        receipts = [receipt for _, receipt in self._in_flight.values() if receipt is not None]
        receipts += [receipt for _, receipt in self._waiting.values() if receipt is not None]
        self._waiting.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        # The window starts empty. Serials go on, so that old acknowledgements match none.
        self.nonce = nonce
        return receipts

    def push(self, message: M, receipt: T | None = None) -> None:
        """Queue a message, or merge it into a waiting one."""
        key = self.key(message)
        if key is None:
            # A number is no key of a subclass, so this message meets no other.
            self._unkeyed += 1
            key = self._unkeyed
        old = self._waiting.get(key)
        if old is not None:
            message = self.merged(old[0], message)
        self._waiting[key] = (message, receipt)

    def take(self) -> list[tuple[int, M]]:
        """Return the messages to send now, oldest first, each with its serial (from 1)."""
        out: list[tuple[int, M]] = []
        while self._waiting and self._has_room():
            _, (message, receipt) = self._waiting.popitem(last=False)
            # Kept with the serial: the message itself is let go as soon as it is sent.
            size = self.size(message)
            self._serial += 1
            self._in_flight[self._serial] = (size, receipt)
            self._in_flight_bytes += size
            out.append((self._serial, message))
        return out

    def _has_room(self) -> bool:
        if not self._in_flight:
            return True  # even a message larger than the window must go some time
        return len(self._in_flight) < self._messages_max and self._in_flight_bytes < self._bytes_max

    def acknowledge(self, nonce: Nonce, serials: Iterable[int]) -> list[T]:
        """Remove messages that were acknowledged; return their receipts."""
        receipts: list[T] = []
        if nonce != self.nonce:
            return receipts
        for serial in serials:
            # It was acknowledged before, or belongs to what `switch` has dropped.
            if serial not in self._in_flight:
                continue
            size, receipt = self._in_flight.pop(serial)
            self._in_flight_bytes -= size
            if receipt is not None:
                receipts.append(receipt)
        return receipts
