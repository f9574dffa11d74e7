"""Blobs that no state names: results on their way to one reader.

They live in a folder of their own, under names that begin with their writer's process name, so that
a service can remove those of earlier processes (`clear`); the collection of orphans removes those
older than `stash_orphan_ms`. The last four bytes of a blob are the CRC32C of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import google_crc32c

from actors.durable.persist.location import STASH_FOLDER, BlobStore
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError

CHECKSUM_BYTES: Final = 4


class StashedBlobs:
    """The stash folder of a blob store. `writer` names this process."""

    def __init__(self, blob: BlobStore, writer: str) -> None:
        self._blob = blob
        self._writer = writer
        self._count = 0

    def key(self, name: str) -> str:
        """Return the key of a new blob; `name` is unique in this process."""
        return f"{STASH_FOLDER}/{self._writer}-{name}"

    def fresh(self) -> str:
        """Return the key of a new blob, numbered here."""
        self._count += 1
        return self.key(f"n{self._count:08x}")

    async def set(self, key: str, data: bytes) -> None:
        """Write a blob. Raises `StoreFull`, `StorageError`."""
        await self._blob.set(_checked(key), data + _checksum(data))

    async def get(self, key: str) -> bytes | None:
        """Return a blob; None when it was removed. Raises `InvalidUsage`, `CorruptData`,
        `StorageError`."""
        found = await self._blob.get(_checked(key))
        if found is None:
            return None
        data, end = found[:-CHECKSUM_BYTES], found[-CHECKSUM_BYTES:]
        if end != _checksum(data):
            raise CorruptData(
                f"blob {key}: {len(data)} bytes with CRC32C {_checksum(data).hex()}, written were"
                f" bytes with {end.hex()}; read again",
                determinate=True,
            )
        return data

    async def delete(self, keys: Iterable[str]) -> list[str]:
        """Remove blobs; return those that could not be removed now."""
        left = []
        for key in keys:
            try:
                await self._blob.delete(_checked(key))
            except StorageError:
                left.append(key)
        return left

    async def clear(self) -> int:
        """Remove the blobs of other processes; return their number. Raises `StorageError`."""
        # Own blobs stay: this process may still serve them.
        own = self.key("")
        found = [info.key for info in await self._blob.list_keys(f"{STASH_FOLDER}/")]
        others = [key for key in found if not key.startswith(own)]
        return len(others) - len(await self.delete(others))


def _checksum(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "big")


def _checked(key: str) -> str:
    """Return the key. Raises `InvalidUsage` for one outside of the stash."""
    # A peer sends the key: it must not name anything else in the store.
    if not key.startswith(f"{STASH_FOLDER}/"):
        raise InvalidUsage(f"{key!r} is not in the stash")
    return key
