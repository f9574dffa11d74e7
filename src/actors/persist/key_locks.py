"""Locks of documents, by their keys."""

from __future__ import annotations

from collections.abc import Sequence

import anyio


class KeyLocks:
    """Several locks, always taken in the order of their keys; unused ones are forgotten."""

    def __init__(self, locks: dict[str, anyio.Lock], keys: Sequence[str]) -> None:
        self._locks = locks
        self._keys = sorted(keys)
        self._taken: list[tuple[str, anyio.Lock]] = []

    async def __aenter__(self) -> None:
        try:
            for key in self._keys:
                lock = self._locks.get(key)
                if lock is None:
                    lock = self._locks[key] = anyio.Lock()
                try:
                    lock.acquire_nowait()
                except anyio.WouldBlock:
                    await lock.acquire()
                self._taken.append((key, lock))
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        while self._taken:
            key, lock = self._taken.pop()
            lock.release()
            if not lock.locked():  # else who waited longest has it
                self._locks.pop(key, None)
