"""Blobs that no state names: results on their way to one reader.

They are in a folder of their own. Their names start with the process name of their writer, so that
a service can remove those of earlier processes (`clear`). Orphan collection removes those older
than `stash_orphan_ms`. The last four bytes of a blob are the CRC32C of the rest.
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
        """Number of keys made by `fresh`."""

    def key(self, name: str) -> str:
        """Return the key of a new blob. `name` must be unique in this process."""
        return f"{STASH_FOLDER}/{self._writer}-{name}"

    def fresh(self) -> str:
        """Return a key for a new blob, numbered by this object."""
        self._count += 1
        return self.key(f"n{self._count:08x}")

    async def set(self, key: str, data: bytes) -> None:
        """Write a blob. Raises `StoreFull` and `StorageError`."""
        await self._blob.set(_checked(key), data + _checksum(data))

    async def get(self, key: str) -> bytes | None:
        """Return a blob; None if it was removed. Raises `InvalidUsage`, `CorruptData` and
        `StorageError`."""
        found = await self._blob.get(_checked(key))
        if found is None:
            return None
        data, end = found[:-CHECKSUM_BYTES], found[-CHECKSUM_BYTES:]
        if end != _checksum(data):
            raise CorruptData(
                f"blob {key}: {len(data)} bytes with CRC32C {_checksum(data).hex()}, expected "
                f"CRC32C {end.hex()}; read again",
                determinate=True,
            )
        return data

    async def delete(self, keys: Iterable[str]) -> list[str]:
        """Remove blobs. Return those that could not be removed now."""
        left = []
        for key in keys:
            try:
                await self._blob.delete(_checked(key))
            except StorageError:
                left.append(key)
        return left

    async def clear(self) -> int:
        """Remove the blobs of other processes, and return their number. Raises `StorageError`."""
        # Own blobs stay, because this process may still serve them.
        own = self.key("")
        found = [info.key for info in await self._blob.list_keys(f"{STASH_FOLDER}/")]
        others = [key for key in found if not key.startswith(own)]
        return len(others) - len(await self.delete(others))


def _checksum(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "big")


def _checked(key: str) -> str:
    """Return the key. Raises `InvalidUsage` for a key outside the stash."""
    # The key comes from a peer, so it must not name anything else in the store.
    if not key.startswith(f"{STASH_FOLDER}/"):
        raise InvalidUsage(f"{key!r} is not in the stash")
    return key
