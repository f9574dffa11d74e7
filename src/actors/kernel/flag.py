"""Something that happens once, and may be waited for. Smaller than an event: most nobody awaits."""

from __future__ import annotations

import asyncio


class Flag:
    """Down, then up for good."""

    __slots__ = ("_up", "_waiters")

    def __init__(self) -> None:
        self._up = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Whether it is up."""
        return self._up

    def set(self) -> None:
        """Raises it."""
        self._up = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Waits until it is up."""
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
