"""A cache of decoded parts. Concurrent readers of a part share one read and one decoding.

All dataflows of one source need the same part at about the same time, and a view on a view needs
what was just written. The first reader reads the part, and concurrent ones wait for it. Parts that
this process writes are cached as they are written.

Invariants: the cached tables, including their overhead, take at most `bytes_max` bytes; the least
recently used are evicted first. A part never changes, so no entry is ever stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import anyio
import pyarrow as pa

from actors.durable.persist.shard import BatchPart
from actors.runtime.threshold_probes import DECODED_EVICTION, DECODED_ROOM

LARGEST_SHARE: Final = 8
TABLE_BYTES: Final = 1024
CHUNK_BYTES: Final = 256
"""Approximate overhead, measured, of a table and of a chunk of a column, in addition to the
values."""

Key: TypeAlias = str | bytes


class DecodedParts:
    """Decoded parts, limited by size."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._tables: OrderedDict[Key, tuple[pa.Table, int]] = OrderedDict()
        """Tables and their sizes, least recently used first."""
        self._reading: dict[Key, anyio.Event] = {}
        """Parts that are being read; the event is set at the end."""

    @property
    def bytes(self) -> int:
        """Return the size of the cached tables in bytes."""
        return self._bytes

    @property
    def rows(self) -> int:
        """Return the number of rows in all cached tables."""
        return sum(table.num_rows for table, _ in self._tables.values())

    async def get(self, part: BatchPart, read: Callable[[], Awaitable[pa.Table]]) -> pa.Table:
        """Return the part's updates: from the cache, from a concurrent read, or by `read`. Raises
        what `read` raises."""
        key = _key(part)
        while True:
            found = self._tables.get(key)
            if found is not None:
                self._tables.move_to_end(key)
                return found[0]
            reading = self._reading.get(key)
            if reading is None:
                break
            await reading.wait()
            if key not in self._tables:
                # The other reader failed or was cancelled, or the table is too large to cache. An
                # error is raised only to its own caller.
                return await read()
        event = self._reading[key] = anyio.Event()
        try:
            table = await read()
            self.put(part, table)
            return table
        finally:
            del self._reading[key]
            event.set()

    def put(self, part: BatchPart, table: pa.Table) -> None:
        """Cache a part's updates. `table` must not be a slice of a larger one."""
        key = _key(part)
        size = held_bytes(key, table)
        if key in self._tables:
            return
        # One large table would evict all small ones.
        if DECODED_ROOM.crossed(size > self._bytes_max // LARGEST_SHARE):
            return
        self._tables[key] = table, size
        self._bytes += size
        while DECODED_EVICTION.crossed(self._bytes > self._bytes_max):
            _, (_, gone) = self._tables.popitem(last=False)
            self._bytes -= gone

    def drop(self, key: Key) -> None:
        """Evict a deleted part."""
        gone = self._tables.pop(key, None)
        if gone is not None:
            self._bytes -= gone[1]


def held_bytes(key: Key, table: pa.Table) -> int:
    """Return approximately the memory that a cached table takes, including its complete buffers."""
    chunks = len(table.to_batches()) * table.num_columns
    inline = len(key) if isinstance(key, bytes) else 0
    return int(table.get_total_buffer_size() + TABLE_BYTES + CHUNK_BYTES * chunks + inline)


def _key(part: BatchPart) -> Key:
    """Return the part's key, or the bytes of an inline part."""
    return part.key if part.inline is None else part.inline
