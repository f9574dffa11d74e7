"""The two stores that this package stands on, as protocols.

**Blob** keeps immutable objects by key. A key is written once; `set` is atomic (a reader sees all
of it or nothing) and durable when it returns; deleting an absent key succeeds. **Consensus** keeps
small documents by key, each with a seqno, one more at every change. `compare_and_set` changes
several keys at once, all or none, durable when it returns; it answers False, having changed
nothing, when one key is not at its expected seqno. Both are linearizable.

*A key that was deleted and is created again* starts at its creator's seqno (`CompareAndSet.first`,
0 by default). A client that remembers the deleted document would take the new one for it once the
seqnos meet (ABA), and overwrite it. So the creator of such a key draws `first` at random from
`FIRST_BITS`: shards do.

Errors are a `StorageError`. **Determinate**: the operation surely did not happen.
**Indeterminate**: it may have happened, now or later; the caller must read again before it decides.
A failed read is always determinate. A cancelled `compare_and_set` counts as indeterminate.
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
    """One key of a compare-and-set: `expected` None means absent, `data` None means delete."""

    key: str
    expected: int | None
    data: bytes | None
    first: int = 0
    """Seqno of a document that this creates."""
    kept: bool = False
    """True if the key is only compared, and not changed."""

    @property
    def seqno(self) -> int:
        """Return the seqno of the document after this change."""
        return self.first if self.expected is None else self.expected + 1


class BlobInfo(msgspec.Struct, frozen=True):
    """One blob in a listing."""

    key: str
    bytes: int
    modified_ms: int
    """Wall clock of the last write, milliseconds since the epoch."""


STASH_FOLDER: Final = "_stash"
"""Folder of the blobs that nobody reads after their writer's process has ended."""


class BlobStore(Protocol):
    """Immutable objects by key ``folder/name``."""

    async def get(self, key: str) -> bytes | None:
        """Return the object, or None. Raises `StorageError`."""
        ...

    async def set(self, key: str, data: bytes) -> None:
        """Write a new object, durable on return unless it is in `STASH_FOLDER`. Raises
        `StorageError`, `StoreFull`."""
        ...

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Move a file in, durable on return; return its size and crc32. Raises as `set` does."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove an object; return whether it existed. Raises `StorageError`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return all objects whose key starts with `prefix`, by key. Raises `StorageError`."""
        ...

    def path(self, key: str) -> str | None:
        """Return the object's path in a file system that Spark can read, if there is one."""
        ...

    def place(self, key: str) -> tuple[str, str] | None:
        """Return the URL of the bucket (``s3://bucket``) and the object's key in it, if it is in
        one."""
        ...


class ConsensusStore(Protocol):
    """Small documents by key, changed by compare-and-set."""

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None. Raises `StorageError`."""
        ...

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none; return False on a mismatch. Raises `StorageError`, `StoreFull`,
        `InvalidUsage`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return all keys that start with `prefix`, in order. Raises `StorageError`."""
        ...

    async def close(self) -> None:
        """Release the store."""
        ...


@runtime_checkable
class WatchedConsensus(Protocol):
    """A `ConsensusStore` that notifies of changes by other clients."""

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Yield keys that other clients changed, from now on, until the store is closed; None: any
        key may have changed (at the beginning, and after lost notifications).

        A read after a key was yielded returns that change, or a newer one. A hint: correctness must
        not depend on it.
        """
        ...


class SnapshotConsensus(ConsensusStore, Protocol):
    """A `ConsensusStore` that reads all documents at one instant."""

    async def snapshot(self) -> list[tuple[str, VersionedData]]:
        """Return all documents as they were at one instant, by key. Raises `StorageError`."""
        ...


FIRST_BITS: Final = 48
"""Bits of a random seqno, so that no two documents of one key meet."""
KEY_BYTES_MAX: Final = 300
"""Bound of a document's key, which is text in UTF-8 without NUL."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}")


def check_name(name: str) -> str:
    """Return the name if it can be part of a blob key. Raises `InvalidUsage`."""
    if not _NAME.fullmatch(name):
        raise InvalidUsage(
            f"{name!r} cannot name a shard or blob: use letters, digits, '_', '-', '.', '=',"
            " at most 200, not starting with '-', '.' or '='"
        )
    return name


def check_blob_key(key: str) -> tuple[str, str]:
    """Return the folder and the name of a blob key. Raises `InvalidUsage`."""
    folder, _, name = key.partition("/")
    return check_name(folder), check_name(name)


def check_key(key: str) -> str:
    """Return the key if a document can have it. Raises `InvalidUsage`."""
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = 0  # half of a surrogate pair
    if not 0 < size <= KEY_BYTES_MAX or "\0" in key:
        raise InvalidUsage(
            f"{key!a} cannot be a document's key: give text of 1 to {KEY_BYTES_MAX} bytes in UTF-8,"
            " without NUL"
        )
    return key


def check_ops(ops: Sequence[CompareAndSet]) -> None:
    """Raise `InvalidUsage` for a set without keys, with one key twice, or with an invalid key."""
    keys = [check_key(op.key) for op in ops]
    if not keys:
        raise InvalidUsage("a compare-and-set needs at least one key")
    if len(set(keys)) < len(keys):
        raise InvalidUsage(f"a compare-and-set names a key twice: {', '.join(sorted(keys))}")
