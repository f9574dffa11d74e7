"""Locks on documents by key, and waiters for their changes, within one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import anyio

from actors.runtime.kernel.mailbox import LatchedFlag

# An `anyio.Lock` costs five times as much, and every change of a document takes one.
Held: TypeAlias = dict[str, deque[LatchedFlag]]
"""Locks that are held, and the waiters for each."""


class KeyLocks:
    """Several locks, always taken in the order of their keys. Unused locks are forgotten."""

    def __init__(self, held: Held, keys: Sequence[str]) -> None:
        self._held = held
        # Every holder takes them in this order, so there are no deadlocks.
        self._keys = sorted(keys)
        self._taken: list[str] = []
        """Keys whose locks this object holds."""

    async def __aenter__(self) -> None:
        try:
            for key in self._keys:
                waiting = self._held.get(key)
                if waiting is None:
                    self._held[key] = deque()
                else:
                    await self._turn(key, waiting)
                self._taken.append(key)
        except BaseException:
            self._release()
            raise

    async def _turn(self, key: str, waiting: deque[LatchedFlag]) -> None:
        turn = LatchedFlag()
        waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # cancelled after receiving the lock; `_release` passes it on
                self._taken.append(key)
            else:
                waiting.remove(turn)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        while self._taken:
            key = self._taken.pop()
            waiting = self._held[key]
            if waiting:
                waiting.popleft().set()
            else:
                del self._held[key]


# -- waiters ---------------------------------------------------------------------------------------


class DocumentWaiters:
    """Events by document key."""

    def __init__(self) -> None:
        # Dicts, not sets, so that waiters wake in the order in which they came, in every process.
        self._events: dict[str, dict[anyio.Event, None]] = {}

    def wake(self, key: str) -> None:
        """Wake the waiters for a document that changed."""
        for event in self._events.get(key, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake all waiters, because the owner is closing."""
        for key in self._events:
            self.wake(key)

    async def wait(self, keys: Sequence[str]) -> None:
        """Wait until one of the documents changes."""
        # Registered without an await after the caller's check, so no change is missed in between.
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
