"""Consensus on a bucket: one object a key, written by conditional requests. One key at a time.

An object holds a document, its seqno, and a **nonce** drawn for this very write. A change reads the
object, compares its seqno, and writes the next one on condition that the object is still the
version that was read (If-Match; If-None-Match where there was none). The store decides, so of
racing writers one wins.

A deleted document is a **tombstone**: an object of a nonce alone. Tombstones stay.

Several keys in one set are not offered (`OneKeyOnly`): no conditional request spans two objects.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final, TypeVar

import anyio
import msgspec

from actors.durable.object_store.bucket_store import BucketStore, ObjectVersion
from actors.durable.persist.location import (
    CompareAndSet,
    OneKeyOnly,
    VersionedData,
    check_key,
    check_ops,
)
from actors.runtime.errors import CorruptData, ResourceClosed, StorageError, StoreBusy
from actors.runtime.kernel import with_jitter
from actors.runtime.settings import Settings

R = TypeVar("R")

_MAGIC: Final = b"pck1"
_NONCE_BYTES: Final = 16
_HEAD: Final = struct.Struct(">4s16sqI")
"""Magic, nonce, seqno, crc32 of nonce, seqno and document."""
_TOMBSTONE: Final = struct.Struct(">4s16sI")
"""Magic, nonce, crc32 of the nonce."""
_DOCUMENT_BYTES_MAX: Final = 256 * 1024 * 1024
_BUSY_MS: Final = 1_000
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]")


class _Seen(msgspec.Struct, frozen=True):
    """An object as it was read; `document` None: a tombstone."""

    version: ObjectVersion
    nonce: bytes
    document: VersionedData | None


class BucketConsensus:
    """A `ConsensusStore` below a prefix of a bucket (``""``, or ending in a slash)."""

    several_at_once: Final = False

    def __init__(self, store: BucketStore, prefix: str, settings: Settings, random: Random) -> None:
        self._store = store
        self._prefix = prefix
        self._settings = settings
        self._random = random
        self._requests = anyio.Semaphore(settings.store_requests_in_flight_max)
        self._under_way = 0
        self._idle = anyio.Event()
        self._closed = False

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None. Raises `StorageError`, `CorruptData`."""
        check_key(key)

        async def head() -> VersionedData | None:
            seen = await self._read(key)
            return None if seen is None else seen.document

        return await self._run(head)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return keys that start with `prefix`. Raises `StorageError`."""
        keys: list[str] = []

        async def list_all() -> None:
            async for page in self._store.pages(self._prefix.rstrip("/")):
                for each in page:
                    name = each.key.removeprefix(self._prefix)
                    # Tombstones are shorter than any document, so a listing need not read them.
                    key = _unescaped(name) if each.size >= _HEAD.size else None
                    if key is not None and key.startswith(prefix):
                        keys.append(key)

        await self._run(list_all)
        return sorted(keys)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change one key. Raises `OneKeyOnly`, `StorageError`, `CorruptData`."""
        check_ops(ops)
        if len(ops) > 1:
            raise OneKeyOnly(
                f"a bucket changes one key at a time, asked were {len(ops)}"
                f" ({', '.join(op.key for op in ops)}): use SQLite or PostgreSQL for consensus"
            )
        return await self._run(lambda: self._set(ops[0]))

    async def _set(self, op: CompareAndSet) -> bool:
        limits = self._settings
        for attempt in range(limits.store_request_retries_max + 1):
            seen = await self._read(op.key)
            held = None if seen is None else seen.document
            if (None if held is None else held.seqno) != op.expected:
                # A failed condition is no answer: stores say 409 for "ask again", too. Only a seqno
                # that was read between call and return, and differs, is a mismatch.
                return False
            if op.kept or (held is None and op.data is None):
                return True
            # An S3 ETag is the MD5 of the bytes: the nonce keeps two writes from having the same
            # version.
            nonce = self._random.getrandbits(_NONCE_BYTES * 8).to_bytes(_NONCE_BYTES, "big")
            body = _encoded(nonce, None if op.data is None else VersionedData(op.seqno, op.data))
            expected = None if seen is None else seen.version
            try:
                if await self._store.put_if(self._place(op.key), body, expected):
                    return True
            # 429 (Google allows about one change of an object a second): the store has done
            # nothing.
            except StoreBusy:
                if attempt == limits.store_request_retries_max:
                    raise
                await self._pause(attempt, _BUSY_MS)
                continue
            except StorageError as error:
                if error.determinate:
                    raise
                # Our nonce proves the write. Without it the write may still land, or be overwritten
                # already: indeterminate.
                if await self._is_there(op.key, nonce):
                    return True
                raise
            await self._pause(attempt)
        raise StorageError(
            f"could not change {op.key!r}: the bucket refuses every write, although nobody changes"
            " it",
            determinate=True,
        )

    async def _is_there(self, key: str, nonce: bytes) -> bool:
        try:
            seen = await self._read(key)
        except StorageError:
            return False
        return seen is not None and seen.nonce == nonce

    async def _pause(self, attempt: int, delay_ms_min: int = 0) -> None:
        delay_ms = max(delay_ms_min, self._settings.retry_delay_ms(attempt + 1))
        await anyio.sleep(with_jitter(delay_ms, self._random) / 1000)

    async def _read(self, key: str) -> _Seen | None:
        found = await self._store.get(self._place(key), _DOCUMENT_BYTES_MAX)
        return None if found is None else _decoded(key, found.data, found.version)

    async def _run(self, call: Callable[[], Awaitable[R]]) -> R:
        self._check_open()
        async with self._requests:
            self._check_open()
            self._under_way += 1
            try:
                return await call()
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the bucket's documents are closed")

    async def close(self) -> None:
        """Wait for requests under way, and refuse later ones."""
        self._closed = True
        while self._under_way:
            self._idle = anyio.Event()
            await self._idle.wait()

    def _place(self, key: str) -> str:
        return self._prefix + escaped(key)


def _encoded(nonce: bytes, document: VersionedData | None) -> bytes:
    # A tombstone, no delete: stores share no conditional delete, and a plain one could remove what
    # another writer created in between.
    if document is None:
        return _TOMBSTONE.pack(_MAGIC, nonce, zlib.crc32(nonce))
    checksum = _checksum(nonce, document.seqno, document.data)
    return _HEAD.pack(_MAGIC, nonce, document.seqno, checksum) + document.data


def _checksum(nonce: bytes, seqno: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(nonce + seqno.to_bytes(8, "big")))


def _decoded(key: str, body: bytes, version: ObjectVersion) -> _Seen:
    """Decode and verify an object. Raises `CorruptData`."""
    if body[:4] == _MAGIC and len(body) == _TOMBSTONE.size:
        _, nonce, checksum = _TOMBSTONE.unpack(body)
        if zlib.crc32(nonce) == checksum:
            return _Seen(version, nonce, None)
    elif body[:4] == _MAGIC and len(body) >= _HEAD.size:
        _, nonce, seqno, checksum = _HEAD.unpack_from(body)
        data = body[_HEAD.size :]
        if seqno >= 0 and _checksum(nonce, seqno, data) == checksum:
            return _Seen(version, nonce, VersionedData(seqno, data))
    raise CorruptData(
        f"document {key!r} in the bucket is not what was written: restore the object from a copy",
        determinate=True,
    )


def escaped(key: str) -> str:
    """Return a key as the last part of an object's name."""
    # Escapes "/" too: no key makes a folder, and no store respells these letters.
    return "".join(
        letter if _PLAIN.fullmatch(letter) else "".join(f"={byte:02X}" for byte in letter.encode())
        for letter in key
    )


def _unescaped(name: str) -> str | None:
    """Return the key; None for a name that is no key of ours."""
    try:
        raw = re.sub(
            rb"=([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), name.encode()
        ).decode()
    except UnicodeDecodeError:
        return None
    return raw if escaped(raw) == name else None
