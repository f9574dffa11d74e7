"""Limits the connections of a listener that have not proved themselves yet. Pure.

A connection is unproven from its first packet until its peer has completed what the listener
requires, such as a login. Unproven connections have a separate limit, so that silent peers lock
nobody out: at the limit, the oldest unproven connection is dropped for a new one. But every
connection gets at least `SPARED_MS` to prove itself. During a flood, new connections wait that long
in the kernel's queue, so the flood cannot push out a login in progress.
"""

from __future__ import annotations

from typing import Final

SPARED_MS: Final = 25.0
"""Age in ms up to which an unproven connection is not dropped for a newer one."""


class UnprovenConnections:
    """The unproven connections of one listener, by number, the oldest first."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._admitted_ms: dict[int, float] = {}
        """Time of admission of each unproven connection by number, oldest first."""

    def __len__(self) -> int:
        """Return the number of unproven connections."""
        return len(self._admitted_ms)

    def __contains__(self, number: int) -> bool:
        """Return whether this connection is unproven."""
        return number in self._admitted_ms

    def wait_ms(self, now_ms: float) -> float:
        """Return how long the listener must wait before it accepts another connection, in ms."""
        if len(self._admitted_ms) < self._count_max:
            return 0.0
        oldest_ms = next(iter(self._admitted_ms.values()))
        return max(0.0, oldest_ms + SPARED_MS - now_ms)

    def admit(self, number: int, now_ms: float) -> list[int]:
        """Add a new connection. Return the connections removed for it, which must be dropped."""
        dropped = []
        while len(self._admitted_ms) >= self._count_max:
            dropped.append(self.oldest())
            self.remove(dropped[-1])
        self._admitted_ms[number] = now_ms
        return dropped

    def oldest(self) -> int:
        """Return the connection that has been unproven the longest. There must be one."""
        return next(iter(self._admitted_ms))

    def remove(self, number: int) -> None:
        """Remove a connection that has proved itself or ended. Does nothing if it is unknown."""
        self._admitted_ms.pop(number, None)
