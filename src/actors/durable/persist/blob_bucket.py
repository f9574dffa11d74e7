"""Blobs as objects in a bucket (S3, Google, Azure), or in any store that obstore supports.

An object exists completely or not at all: up to `PIECE_BYTES` are written by one request, larger
objects by a multipart upload. Objects never change, so pieces from several requests fit together.

Requests and bytes in flight are limited (`store_requests_in_flight_max`,
`store_bytes_in_flight_max`); callers beyond that wait in order. Every request has a deadline, and
the library retries it after growing random pauses.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio

from actors.durable.object_store.bucket_store import (
    PIECE_BYTES,
    PIECES_AT_ONCE,
    BucketStore,
    ListedObject,
)
from actors.durable.persist.location import BlobInfo, check_blob_key
from actors.runtime.errors import InvalidUsage, StorageError, storage_error
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import BUCKET_PIECE, BUCKET_READ

_PIECES_READ_AT_ONCE: Final = 4
"""Maximum number of concurrent range requests for one object."""
_LOOKS_MAX: Final = 3
"""Maximum number of attempts to read an object that is replaced while it is being read. None of our
clients replaces objects."""


class BucketBlob:
    """A `BlobStore` below a prefix of a bucket. The prefix is ``""`` or ends with a slash."""

    def __init__(
        self,
        store: BucketStore,
        prefix: str,
        settings: Settings,
        clock: ActorClock,
        url: str = "",
    ) -> None:
        """Make a store. `url` is that of the bucket, without a path; empty if other processes
        cannot reach it."""
        self._store = store
        self._url = url
        self._prefix = prefix
        self._clock = clock
        self._requests = anyio.Semaphore(settings.store_requests_in_flight_max)
        self._bytes = ByteBudget(settings.store_bytes_in_flight_max)

    async def get(self, key: str) -> bytes | None:
        """Return the object; None if it does not exist. Raises `StorageError`."""
        place = self._place(key)
        for _ in range(_LOOKS_MAX):
            async with self._bytes.take(PIECE_BYTES), self._requests:
                begun = await self._store.begin(place, PIECE_BYTES)
            if begun is None:
                return None
            found, data = begun
            if BUCKET_READ.crossed(data is None):
                async with self._bytes.take(found.size):
                    # In pieces, so that a request's time limit has the same meaning for all sizes.
                    data = await self._in_pieces(found)
            if data is not None:
                return data
        raise StorageError(
            f"could not read blob {key}: another program keeps replacing it", determinate=True
        )

    async def _in_pieces(self, found: ListedObject) -> bytes | None:
        """Read an object with range requests; None if it was replaced or deleted meanwhile."""
        starts = deque(range(0, found.size, PIECE_BYTES))
        data = bytearray(found.size)
        gone = False

        async def fetch() -> None:
            nonlocal gone
            while starts and not gone:
                start = starts.popleft()
                end = min(start + PIECE_BYTES, found.size)
                async with self._requests:
                    piece = await self._store.piece(found, start, end)
                if piece is None:
                    gone = True
                else:
                    data[start:end] = piece

        await _side_by_side([fetch] * _PIECES_READ_AT_ONCE)
        return None if gone else bytes(data)

    async def set(self, key: str, data: bytes) -> None:
        """Write a new object. Raises `StorageError`."""
        place = self._place(key)

        async def write() -> None:
            if not BUCKET_PIECE.crossed(len(data) > PIECE_BYTES):
                await self._store.put(place, data)
            else:
                await self._store.upload(place, bytes(data), len(data))

        async with self._bytes.take(len(data)), self._requests:
            await self._written(place, len(data), write)

    async def adopt(self, key: str, path: Path) -> tuple[int, int]:
        """Upload a file as an object, and remove the file. Raises `StorageError`, and then keeps
        the file."""
        place = self._place(key)
        try:
            size = (await self._clock.run_blocking(path.stat)).st_size
        except OSError as error:
            raise storage_error(f"take over {path} as blob {key}", error) from error
        checksum = 0

        def seen(piece: bytes) -> None:
            nonlocal checksum
            checksum = zlib.crc32(piece, checksum)

        async def write() -> None:
            if not BUCKET_PIECE.crossed(size > PIECE_BYTES):
                data = await self._clock.run_blocking(path.read_bytes)
                seen(data)
                await self._store.put(place, data)
            else:
                await self._store.upload(place, path, size, seen)

        async with self._bytes.take(min(size, PIECE_BYTES * (PIECES_AT_ONCE + 1))), self._requests:
            await self._written(place, size, write)
        with suppress(OSError):  # only a scratch file; the blob is durable
            await self._clock.run_blocking(path.unlink)
        return size, checksum

    async def _written(self, place: str, size: int, write: Callable[[], Awaitable[None]]) -> None:
        """Run the write. After a failure, check whether the object exists anyway."""
        try:
            await write()
        except StorageError as error:
            refused = error.determinate and size <= PIECE_BYTES
            if refused:
                raise
            # A key is written only once, so an object of the right size under it is this one. If it
            # does not exist, the write may still land, so the failure is indeterminate.
            with suppress(StorageError):
                found = await self._store.head(place)
                if found is not None and found.size == size:
                    return
            raise StorageError(str(error), determinate=False) from None
        except OSError as error:
            raise storage_error(f"write {place}", error) from error

    async def delete(self, key: str) -> bool:
        """Remove an object. Return whether it existed. Raises `StorageError`."""
        place = self._place(key)
        async with self._requests:
            # Stores do not say whether a delete removed anything. Two concurrent deletes may both
            # return True.
            if await self._store.head(place) is None:
                return False
            await self._store.delete([place])
            return True

    async def list_keys(self, prefix: str = "") -> list[BlobInfo]:
        """Return objects whose keys start with `prefix`, sorted by key. Raises `StorageError`."""
        folder, slash, _ = prefix.partition("/")
        below = self._prefix + (folder if slash else "")
        found = []
        async with self._requests:
            async for page in self._store.pages(below.rstrip("/")):
                found += [info for each in page if (info := self._info(each, prefix)) is not None]
        return sorted(found, key=lambda info: info.key)

    def _info(self, each: ListedObject, prefix: str) -> BlobInfo | None:
        """Return the listed blob; None for an object outside `prefix`, or whose name is not a blob
        key."""
        key = each.key.removeprefix(self._prefix)
        try:
            check_blob_key(key)
        except InvalidUsage:
            return None
        if not key.startswith(prefix):
            return None
        return BlobInfo(key, each.size, each.modified_ns // 1_000_000)

    def path(self, key: str) -> None:
        """Return None: an object has no path."""
        check_blob_key(key)

    def place(self, key: str) -> tuple[str, str] | None:
        """Return the URL of the bucket and the object's key in it; None without a URL."""
        key = self._place(key)
        return (self._url, key) if self._url else None

    def _place(self, key: str) -> str:
        folder, name = check_blob_key(key)
        return f"{self._prefix}{folder}/{name}"


class ByteBudget:
    """A semaphore of bytes, first come, first served. A request above the limit takes all of it."""

    def __init__(self, bytes_max: int) -> None:
        self._whole = bytes_max
        self._free = bytes_max
        """Bytes that are not taken."""
        self._waiting: deque[tuple[int, anyio.Event]] = deque()
        """Requests that wait, in order."""

    @property
    def free(self) -> int:
        """Return the number of bytes that are not taken."""
        return self._free

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes while the block runs."""
        size = min(size, self._whole)
        await self._wait(size)
        try:
            yield
        finally:
            self._free += size
            self._admit()

    async def _wait(self, size: int) -> None:
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        mine = (size, anyio.Event())
        self._waiting.append(mine)
        try:
            await mine[1].wait()
        except BaseException:
            # Cancelled right after it was admitted: return the bytes.
            if mine[1].is_set():
                self._free += size
            else:
                self._waiting.remove(mine)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, admitted = self._waiting.popleft()
            self._free -= size
            admitted.set()


async def _side_by_side(tasks: list[Callable[[], Awaitable[None]]]) -> None:
    """Run the tasks concurrently. The first `StorageError` cancels the rest, and is raised
    unwrapped."""
    failures: list[StorageError] = []
    async with anyio.create_task_group() as group:

        async def run(task: Callable[[], Awaitable[None]]) -> None:
            try:
                await task()
            except StorageError as error:
                # Collected manually, because a task group would wrap it in an exception group.
                failures.append(error)
                group.cancel_scope.cancel()

        for task in tasks:
            group.start_soon(run, task)
    if failures:
        raise failures[0]
