"""The two stores on which this package is built, as protocols.

**Blob** stores immutable objects by key. A key is written once. `set` is atomic (a reader sees all
of the object or nothing) and durable when it returns; deleting an absent key succeeds.
**Consensus** stores small documents by key, each with a seqno that every change increments.
`compare_and_set` changes several keys at once, all or none, durable when it returns. It returns
False, having changed nothing, if one key is not at its expected seqno. Both stores are
linearizable.

*A key that is deleted and created again* starts at a seqno that its creator chooses
(`CompareAndSet.first`, 0 by default). Otherwise a client that remembers the deleted document could
mistake the new one for it once the seqnos are equal (ABA), and overwrite it. So the creator of such
a key draws `first` at random from `FIRST_BITS`, as shards do.

Errors are `StorageError`s. **Determinate**: the operation certainly did not happen.
**Indeterminate**: it may have happened, or may happen later; the caller must read again before it
decides. A failed read is always determinate. A cancelled `compare_and_set` counts as indeterminate.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from actors.runtime.errors import InvalidUsage


class VersionedData(msgspec.Struct, frozen=True):
    """A document and its seqno."""

    seqno: int
    data: bytes


class CompareAndSet(msgspec.Struct, frozen=True):
    """One key of a compare-and-set. `expected` None means absent; `data` None means delete."""

    key: str
    expected: int | None
    data: bytes | None
    first: int = 0
    """Seqno of a document that this creates."""
    kept: bool = False
    """True if the key is only compared, not changed."""

    @property
    def seqno(self) -> int:
        """Return the seqno of the document after this change."""
        return self.first if self.expected is None else self.expected + 1


class BlobInfo(msgspec.Struct, frozen=True):
    """One blob in a listing."""

    key: str
    bytes: int
    modified_ms: int
    """Wall clock of the last write, in ms since the epoch."""


STASH_FOLDER: Final = "_stash"
"""Folder of blobs that nobody reads after their writer's process has ended."""


class BlobStore(Protocol):
    """Immutable objects by key ``folder/name``."""

    async def get(self, key: str) -> bytes | None:
        """Return the object; None if it does not exist. Raises `StorageError`."""
        ...

    async def set(self, key: str, data: bytes) -> None:
        """Write a new object. It is durable on return unless it is in `STASH_FOLDER`. Raises
        `StorageError` and `StoreFull`."""
        ...

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Move a file into the store, durable on return. Return its size and crc32. Raises the same
        errors as `set`."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove an object. Return whether it existed. Raises `StorageError`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return all objects whose keys start with `prefix`, sorted by key. Raises
        `StorageError`."""
        ...

    def path(self, key: str) -> str | None:
        """Return the object's path in a file system that Spark can read; None if it has none."""
        ...

    def place(self, key: str) -> tuple[str, str] | None:
        """Return the URL of the bucket (``s3://bucket``) and the object's key in it; None if it is
        not in a bucket."""
        ...


class ConsensusStore(Protocol):
    """Small documents by key, changed by compare-and-set."""

    async def head(self, key: str) -> VersionedData | None:
        """Return the document; None if it does not exist. Raises `StorageError`."""
        ...

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none; return False on a mismatch. Raises `StorageError`, `StoreFull`
        and `InvalidUsage`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return all keys that start with `prefix`, sorted. Raises `StorageError`."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...


@runtime_checkable
class WatchedConsensus(Protocol):
    """A `ConsensusStore` that notifies of changes by other clients."""

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Yield keys that other clients change from now on, until the store is closed. None means
        that any key may have changed (at the start, and after lost notifications).

        A read after a key was yielded returns that change or a newer one. Only a hint: correctness
        must not depend on it.
        """
        ...


class SnapshotConsensus(ConsensusStore, Protocol):
    """A `ConsensusStore` that can read all documents at one instant."""

    async def snapshot(self) -> list[tuple[str, VersionedData]]:
        """Return all documents as of one instant, sorted by key. Raises `StorageError`."""
        ...


FIRST_BITS: Final = 48
"""Number of bits of a random first seqno, so that no two documents with the same key share a
seqno."""
KEY_BYTES_MAX: Final = 300
"""Maximum length of a document's key, which is UTF-8 text without NUL."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}")


def check_name(name: str) -> str:
    """Return the name if it can be part of a blob key. Raises `InvalidUsage`."""
    if not _NAME.fullmatch(name):
        raise InvalidUsage(
            f"invalid name of a shard or blob {name!r}: use letters, digits, '_', '-', '.' and "
            "'=', at most 200 characters, not starting with '-', '.' or '='"
        )
    return name


def check_blob_key(key: str) -> tuple[str, str]:
    """Return the folder and the name in a blob key. Raises `InvalidUsage`."""
    folder, _, name = key.partition("/")
    return check_name(folder), check_name(name)


def check_key(key: str) -> str:
    """Return the key if it is valid for a document. Raises `InvalidUsage`."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = 0  # an unpaired surrogate
    if not 0 < size <= KEY_BYTES_MAX or "\0" in key:
        raise InvalidUsage(
            f"invalid document key {key!a}: expected 1 to {KEY_BYTES_MAX} bytes of UTF-8 without "
            "NUL"
        )
    return key


def check_ops(ops: Sequence[CompareAndSet]) -> None:
    """Raise `InvalidUsage` for a set without keys, with a duplicate key, or with an invalid key."""
    keys = [check_key(op.key) for op in ops]
    if not keys:
        raise InvalidUsage("a compare-and-set needs at least one key")
    if len(set(keys)) < len(keys):
        raise InvalidUsage(f"a compare-and-set names a key twice: {', '.join(sorted(keys))}")
