"""In-memory blob and consensus stores, for tests and simulation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import anyio.lowlevel

from actors.durable.persist.location import (
    BlobInfo,
    CompareAndSet,
    VersionedData,
    check_blob_key,
    check_key,
    check_ops,
)
from actors.runtime.errors import storage_error
from actors.runtime.kernel import ActorClock


class MemoryConsensus:
    """A `ConsensusStore` that several clients of a test may share."""

    def __init__(self) -> None:
        self._documents: dict[str, VersionedData] = {}
        """Documents by key."""

    async def head(self, key: str) -> VersionedData | None:
        """Return the document; None if it does not exist."""
        return self._documents.get(check_key(key))

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none."""
        check_ops(ops)
        # Yield like any other store, so that tests meet the same interleavings.
        await anyio.lowlevel.checkpoint()
        for op in ops:
            held = self._documents.get(op.key)
            if (None if held is None else held.seqno) != op.expected:
                return False
        for op in ops:
            if op.kept:
                continue
            if op.data is None:
                self._documents.pop(op.key, None)
            else:
                self._documents[op.key] = VersionedData(op.seqno, op.data)
        return True

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, sorted."""
        return sorted(key for key in self._documents if key.startswith(prefix))

    async def snapshot(self) -> list[tuple[str, VersionedData]]:
        """Return all documents, sorted by key."""
        return sorted(self._documents.items())

    async def close(self) -> None:
        """Do nothing: memory needs no release."""


class MemoryBlob:
    """A `BlobStore` that several clients of a test may share."""

    def __init__(self, clock: ActorClock) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes, int]] = {}
        """Objects and their modification times, by key."""

    async def get(self, key: str) -> bytes | None:
        """Return the object; None if it does not exist."""
        found = self._objects.get(_checked(key))
        return None if found is None else found[0]

    def peek(self, key: str) -> bytes | None:
        """Return the object without waiting; None if it does not exist. For observers."""
        found = self._objects.get(key)
        return None if found is None else found[0]

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(self._objects)

    async def set(self, key: str, data: bytes) -> None:
        """Store a new object."""
        self._objects[_checked(key)] = (bytes(data), self._clock.now_ms())

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Read a file into memory and remove it. Raises `StorageError`."""

        def take() -> bytes:
            try:
                data = path.read_bytes()
                path.unlink()
            except OSError as error:
                raise storage_error(f"take over {path} as blob {key}", error) from error
            return data

        data = await self._clock.run_blocking(take)
        await self.set(key, data)
        return len(data), zlib.crc32(data)

    async def delete(self, key: str) -> bool:
        """Remove an object. Return whether it existed."""
        return self._objects.pop(_checked(key), None) is not None

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return objects whose keys start with `prefix`, sorted by key."""
        return [
            BlobInfo(key, len(data), modified)
            for key, (data, modified) in sorted(self._objects.items())
            if key.startswith(prefix)
        ]

    def path(self, key: str) -> None:
        """Return None: an object in memory has no path."""
        check_blob_key(key)

    def place(self, key: str) -> None:
        """Return None: an object in memory is not in a bucket."""
        check_blob_key(key)


def _checked(key: str) -> str:
    check_blob_key(key)
    return key
