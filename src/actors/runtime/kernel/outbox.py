"""An outbox: messages that their receiver has not acknowledged. Pure.

Theory of operation. At most `messages_max` messages, and about `bytes_max` bytes, are in flight;
the others wait here, in order. A newer message with the key of a waiting one replaces it or is
merged with it, so the number of keys bounds the queue.

Each message in flight has a unique serial number and is acknowledged by it, in any order. All
messages belong to one connection, named by its nonce; acknowledgements of an earlier connection are
ignored. The `receipt` of a message is returned exactly once, when the message is acknowledged or
dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from actors.runtime.progress import Nonce

M = TypeVar("M")
T = TypeVar("T")


class CoalescingOutbox(Generic[M, T]):
    """A window of unacknowledged messages and a queue of waiting ones.

    `T` is the type of a receipt. Subclasses define which messages are merged (`key`, `merged`) and
    how large they are (`size`).
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self.nonce: Nonce | None = None
        """The connection to which the messages go; None while there is none."""
        self._waiting: OrderedDict[Hashable, tuple[M, T | None]] = OrderedDict()
        """Messages that wait for room, oldest first, with their receipts."""
        self._in_flight: dict[int, tuple[int, T | None]] = {}
        """Size and receipt of each message in flight, by serial."""
        self._in_flight_bytes = 0
        """Total size of the messages in flight."""
        self._serial = 0
        """The last serial given out; it never goes back."""
        self._unkeyed = 0
        """Number of messages without a key so far, used as their keys."""

    def key(self, message: M) -> Hashable | None:
        """Return the key under which a message replaces or merges with an older one; None if it
        never does."""
        raise NotImplementedError

    def merged(self, old: M, new: M) -> M:
        """Return the message that stands for two messages with the same key."""
        return new

    def size(self, message: M) -> int:
        """Return the approximate size of a message in bytes."""
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
        """Drop all messages and switch to another connection, or to none.

        Returns the receipts of the dropped messages.
        """
        receipts = [receipt for _, receipt in self._in_flight.values() if receipt is not None]
        receipts += [receipt for _, receipt in self._waiting.values() if receipt is not None]
        self._waiting.clear()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        # The window starts empty. Serials are not reset, so that no old acknowledgement matches.
        self.nonce = nonce
        return receipts

    def push(self, message: M, receipt: T | None = None) -> None:
        """Queue a message, or merge it with a waiting one of its key."""
        key = self.key(message)
        if key is None:
            # Subclasses do not use numbers as keys, so this message merges with no other.
            self._unkeyed += 1
            key = self._unkeyed
        old = self._waiting.get(key)
        if old is not None:
            message = self.merged(old[0], message)
        self._waiting[key] = (message, receipt)

    def take(self) -> list[tuple[int, M]]:
        """Take the messages that may be sent now, oldest first, each with its serial (from 1)."""
        out: list[tuple[int, M]] = []
        while self._waiting and self._has_room():
            _, (message, receipt) = self._waiting.popitem(last=False)
            # Keep only the size, so that the message can be freed as soon as it is sent.
            size = self.size(message)
            self._serial += 1
            self._in_flight[self._serial] = (size, receipt)
            self._in_flight_bytes += size
            out.append((self._serial, message))
        return out

    def _has_room(self) -> bool:
        if not self._in_flight:
            return True  # even a message larger than the window must be sent eventually
        return len(self._in_flight) < self._messages_max and self._in_flight_bytes < self._bytes_max

    def acknowledge(self, nonce: Nonce, serials: Iterable[int]) -> list[T]:
        """Remove acknowledged messages and return their receipts."""
        receipts: list[T] = []
        if nonce != self.nonce:
            return receipts
        for serial in serials:
            # It was acknowledged before, or dropped by `switch`.
            if serial not in self._in_flight:
                continue
            size, receipt = self._in_flight.pop(serial)
            self._in_flight_bytes -= size
            if receipt is not None:
                receipts.append(receipt)
        return receipts
