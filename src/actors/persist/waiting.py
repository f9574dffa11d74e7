"""Who waits for which documents to change, within this process."""

from __future__ import annotations

from collections.abc import Sequence

import anyio


class Waiters:
    """Events by document key. A wait begins in the same turn in which the caller looked at the
    documents, so that no change falls in between."""

    def __init__(self) -> None:
        # Dicts, not sets: they wake in the order in which they came, in every process.
        self._events: dict[str, dict[anyio.Event, None]] = {}

    def wake(self, key: str) -> None:
        """The document changed."""
        for event in self._events.get(key, ()):
            event.set()

    def wake_all(self) -> None:
        """The owner closes."""
        for key in self._events:
            self.wake(key)

    async def wait(self, keys: Sequence[str]) -> None:
        """Until one of the documents changes."""
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
