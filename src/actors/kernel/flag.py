"""A one-time event. Smaller than `asyncio.Event`, as most flags are never awaited."""

from __future__ import annotations

import asyncio


class LatchedFlag:
    """An event that is set once, and stays set."""

    __slots__ = ("_up", "_waiters")

    def __init__(self) -> None:
        self._up = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._up

    def set(self) -> None:
        """Set it, and wake the waiters."""
        self._up = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set."""
        if self._up:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None and waiter in self._waiters:
                self._waiters.remove(waiter)
