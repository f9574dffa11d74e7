"""Where durable bytes live: the two stores that everything in this room stands on.

**Blob** keeps immutable objects by key. A key is written once; `set` is atomic (a reader sees
all of it or nothing) and durable when it returns; deleting what is absent succeeds. **Consensus**
keeps small documents by key, each with a seqno, one more at every change.
`compare_and_set` changes several keys at once, all or none, durable when it returns; it answers
False, having changed nothing, when one key is not at the seqno expected of it. Both are
linearizable.

*A key that was deleted and is created again* starts at the seqno that its creator says (`first`,
0 unless it is said). Where somebody may still remember the document of before, a seqno that both
documents reach would make the new one pass for the old one, and a change of the old one would
overwrite it. So whoever creates such a key draws `first` at random from `FIRST_BITS`: shards do.

Keys of documents are text of 1 to 300 bytes in UTF-8, without NUL. Not every store changes several
keys at once: one that does not has `several_at_once` False, and raises `OneKeyOnly` for more than
one, having changed nothing.

Errors are a `StorageError`. **Determinate**: the operation surely did not happen.
**Indeterminate**: it may have happened, now or later; the caller must read again before it
decides. Reading changes nothing, so a failed read is always determinate. A cancelled
`compare_and_set` counts as indeterminate.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import msgspec

from actors.errors import InvalidUsage
from actors.errors import storage_error as storage_error


class VersionedData(msgspec.Struct, frozen=True):
    """A document and how often it was changed."""

    seqno: int
    data: bytes


class Cas(msgspec.Struct, frozen=True):
    """One key of a compare-and-set: `expected` None means absent, `data` None means delete."""

    key: str
    expected: int | None
    data: bytes | None
    first: int = 0
    """Seqno of a document that this creates."""
    kept: bool = False
    """It is only compared, and stays as it is."""

    @property
    def seqno(self) -> int:
        """Of the document as this leaves it."""
        return self.first if self.expected is None else self.expected + 1


class BlobInfo(msgspec.Struct, frozen=True):
    """What a listing tells of one blob."""

    key: str
    bytes: int
    modified_ms: int
    """Wall clock of the last write, milliseconds since the epoch."""


class Blob(Protocol):
    """Immutable objects by key ``folder/name``."""

    async def get(self, key: str) -> bytes | None:
        """The object, or None. Raises `StorageError`."""
        ...

    async def set(self, key: str, data: bytes) -> None:
        """Writes a new object, durable on return. Raises `StorageError`, `StoreFull`."""
        ...

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Moves a file in, durable on return: its size and crc32. Raises as `set` does."""
        ...

    async def delete(self, key: str) -> bool:
        """Removes an object; whether it was there. Raises `StorageError`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """All objects whose key starts with `prefix`, by key. Raises `StorageError`."""
        ...

    def path(self, key: str) -> str | None:
        """The object's path in a file system that Spark can read, if there is one."""
        ...


class Consensus(Protocol):
    """Small documents by key, changed by compare-and-set."""

    async def head(self, key: str) -> VersionedData | None:
        """The document, or None. Raises `StorageError`."""
        ...

    async def compare_and_set(self, ops: Sequence[Cas]) -> bool:
        """All or none; False on a mismatch. Raises `StorageError`, `StoreFull`, `InvalidUsage`,
        `OneKeyOnly`."""
        ...

    async def list_keys(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, in order. Raises `StorageError`."""
        ...

    async def close(self) -> None:
        """Releases the store."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A `Consensus` that says which keys others changed."""

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Keys that other clients changed, from now on, until the store is closed; None: any may
        have (at the beginning, and when some may not have been heard of). Who hears of a key reads
        it as it was then, or newer. A hint: nothing that must be right may depend on it."""
        ...


class OneKeyOnly(InvalidUsage):
    """This store changes one key at a time; several at once are for SQLite and PostgreSQL."""


FIRST_BITS: Final = 48
"""Of a seqno that is drawn at random, so that no two documents of one key meet."""
KEY_BYTES_MAX: Final = 300
"""Of a document's key."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}")


def check_name(name: str) -> str:
    """The name itself if it can be part of a blob key. Raises `InvalidUsage`."""
    if not _NAME.fullmatch(name):
        raise InvalidUsage(
            f"{name!r} cannot name a shard or blob: use letters, digits, '_', '-', '.', '=',"
            " at most 200, not starting with '-', '.' or '='"
        )
    return name


def check_blob_key(key: str) -> tuple[str, str]:
    """Its folder and its name. Raises `InvalidUsage`."""
    folder, _, name = key.partition("/")
    return check_name(folder), check_name(name)


def check_key(key: str) -> str:
    """The key itself if a document can have it. Raises `InvalidUsage`."""
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


def check_ops(ops: Sequence[Cas]) -> None:
    """Raises `InvalidUsage` for a set without keys, with one key twice, or with a key that none
    can be."""
    keys = [check_key(op.key) for op in ops]
    if not keys:
        raise InvalidUsage("a compare-and-set needs at least one key")
    if len(set(keys)) < len(keys):
        raise InvalidUsage(f"a compare-and-set names a key twice: {', '.join(sorted(keys))}")


def several_at_once(consensus: Consensus) -> bool:
    """Whether the store changes several keys at once."""
    return getattr(consensus, "several_at_once", True)
