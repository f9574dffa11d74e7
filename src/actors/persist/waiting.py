"""Waiters for changes of documents, within this process."""

from __future__ import annotations

from collections.abc import Sequence

import anyio


class DocumentWaiters:
    """Events by document key."""

    def __init__(self) -> None:
        # Dicts, not sets: waiters wake in the order in which they came, in every process.
        self._events: dict[str, dict[anyio.Event, None]] = {}

    def wake(self, key: str) -> None:
        """Wake the waiters of a document that changed."""
        for event in self._events.get(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake all waiters: the owner closes."""
        for key in self._events:
            self.wake(key)

    async def wait(self, keys: Sequence[str]) -> None:
        """Wait until one of the documents changes."""
        # Registered without a suspension after the caller's look: no change falls in between.
        event = anyio.Event()
        for key in keys:
            self._events.setdefault(key, {})[event] = None
        try:
            await event.wait()
        finally:
            for key in keys:
                waiting = self._events[key]
                waiting.pop(event, None)
                if not waiting:
                    del self._events[key]
