"""Removes blobs that no state names: what killed processes wrote and never appended, and results in
the stash that nobody took.

What is written and not yet named looks the same as what is left. Of this process's own it is known
(`PartStore.pending`); of others' nothing is, so a blob goes only when it was seen unnamed twice,
the grace apart. *The grace is measured by our own monotonic clock, between two listings of ours*:
no clock of a store is compared with one of ours, and neither may differ, or jump, to any harm. The
first listing of a process therefore removes nothing. Before a blob is removed its shard's state is
read from the store: what another process has appended meanwhile is named by it.

Who writes a part beside others that collect names it within half of the grace, or is refused
(`part_store.py`): all processes need the same `blob_orphan_grace_ms`. What is left to luck is a
request of theirs that the store carries out more than the other half later.
"""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from actors.errors import StorageError, UnknownObject
from actors.kernel import Clock
from actors.persist.location import Blob
from actors.persist.machine import Machine
from actors.persist.part_store import PartStore
from actors.persist.reader import LeaseBook
from actors.persist.stashed import FOLDER
from actors.progress import ShardId
from actors.settings import Settings


class Suspects:
    """Blobs that were unnamed in every listing since the first that had them: pure."""

    def __init__(self, grace_ms: int) -> None:
        self._grace_ms = grace_ms
        self._since: dict[str, float] = {}

    def seen(self, keys: Iterable[str], now_ms: float) -> list[str]:
        """A whole listing's unnamed blobs, at a monotonic time: those whose grace is over."""
        before = self._since
        self._since = {key: before.get(key, now_ms) for key in keys}
        limit = now_ms - self._grace_ms
        return [key for key, since in self._since.items() if since <= limit]


class Orphans:
    """The collection of one process; one at a time."""

    def __init__(
        self,
        machine: Machine,
        parts: PartStore,
        blob: Blob,
        book: LeaseBook,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._machine = machine
        self._parts = parts
        self._blob = blob
        self._book = book
        self._clock = clock
        self._unnamed = Suspects(settings.blob_orphan_grace_ms)
        self._stashed = Suspects(settings.stash_orphan_ms)
        self._one = anyio.Lock()

    async def collect(self) -> int:
        """Looks once; how many blobs it removed. Raises `StorageError`."""
        async with self._one:
            self._parts.give_up()
            now = self._clock.monotonic_ms()
            keys = [info.key for info in await self._blob.list_keys()]
            stash = f"{FOLDER}/"
            stashed = self._stashed.seen((key for key in keys if key.startswith(stash)), now)
            count = len(await self._parts.delete(stashed))
            folders: dict[ShardId, list[str]] = {}
            for key in keys:
                if not key.startswith(stash):
                    folders.setdefault(key.partition("/")[0], []).append(key)
            unnamed: list[str] = []
            for shard, found in folders.items():
                unnamed += await self._unnamed_of(shard, found)
            due: dict[ShardId, list[str]] = {}
            for key in self._unnamed.seen(unnamed, now):
                due.setdefault(key.partition("/")[0], []).append(key)
            for shard, found in due.items():
                count += await self._remove(shard, found)
            return count

    async def _unnamed_of(self, shard: ShardId, keys: list[str]) -> list[str]:
        """By what this process knows of the shard: a first look."""
        try:
            named = (await self._machine.state(shard)).blob_keys()
        except UnknownObject:
            named = set()
        except StorageError:
            return []  # what cannot be read names who knows what
        return [key for key in keys if key not in named and not self._parts.pending(key)]

    async def _remove(self, shard: ShardId, keys: list[str]) -> int:
        try:
            # After the listing: what was appended since then is named by this state.
            state = await self._machine.refresh(shard)
        except StorageError:
            return 0
        named = set() if state is None else state.blob_keys()
        used = self._book.used(keys)
        # Looked at again, one by one: any may be claimed while others are deleted.
        gone = (
            key
            for key in keys
            if key not in named and key not in used and not self._parts.pending(key)
        )
        return len(await self._parts.delete(gone))
