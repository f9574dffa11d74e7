"""The asynchronous calls to a bucket, based on obstore, for `persist` and sources. Sinks and copies
make blocking calls in threads (`bucket_calls`).

Credentials, region and endpoint come only from the process's environment, as the store's own tools
read them. Every request has a time limit and a limited number of retries. Every call ends within
the sum of those, even if the store never responds.

A large file is uploaded in pieces (a multipart upload) with bounded memory. Pieces left by a
crashed process must be removed by the bucket's lifecycle rules.
"""

from __future__ import annotations

import calendar
import math
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import msgspec

from actors.durable.object_store.bucket_errors import translate_errors
from actors.runtime.errors import StorageError
from actors.runtime.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

R = TypeVar("R")

PIECE_BYTES: Final = 8 << 20
PIECES_AT_ONCE: Final = 2
PIECES_MAX: Final = 9_000
"""Maximum number of pieces of one file; S3 allows 10,000."""
PAGE_KEYS: Final = 1_000
GIVE_UP_S: Final = 5.0
"""Grace period for a cancelled upload, or for removing a copy's files."""
_ALLOW_HTTP: Final = {
    "s3": "AWS_ALLOW_HTTP",
    "gs": "GOOGLE_ALLOW_HTTP",
    "az": "AZURE_ALLOW_HTTP",
}


class ObjectVersion(msgspec.Struct, frozen=True):
    """Version of an object, as the store identifies it."""

    e_tag: str | None
    version: str | None


class FetchedObject(msgspec.Struct, frozen=True):
    """An object's bytes and its version."""

    data: bytes
    version: ObjectVersion


class ListedObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    key: str
    size: int
    modified_ns: int
    """The store's time of the last write (Unix time). Many stores only have whole seconds."""
    version: ObjectVersion


def open_store(kind: str, bucket: str, settings: Settings, retries: int) -> ObjectStore:
    """Open the library's store for a bucket of kind s3, gs or az. Sends no request, but blocks for
    some ms. Raises the library's errors."""
    from obstore import store as stores

    timeout_ms = settings.copy_request_timeout_ms
    client: Any = {
        "timeout": timedelta(milliseconds=timeout_ms),
        "connect_timeout": timedelta(milliseconds=min(timeout_ms, settings.connect_timeout_ms)),
        # An explicit value overrides the environment's, so the environment is read here.
        "allow_http": allows_http(kind),
    }
    retry: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(milliseconds=timeout_ms * (retries + 1)),
        "backoff": {
            "init_backoff": timedelta(milliseconds=settings.retry_delay_ms_min),
            "max_backoff": timedelta(milliseconds=settings.retry_delay_ms_max),
            "base": 2,
        },
    }
    given: Any = {"client_options": client, "retry_config": retry}
    match kind:
        case "s3":
            return stores.S3Store(bucket, **given)
        case "gs":
            return stores.GCSStore(bucket, **given)
        case _:
            return stores.AzureStore(bucket, **given)


def allows_http(kind: str) -> bool:
    """Return whether the service's environment allows a store without TLS."""
    return os.environ.get(_ALLOW_HTTP[kind], "").lower() in ("1", "true")


class BucketStore:
    """One bucket. Keys are complete paths in it. `where` names it in errors."""

    def __init__(self, store: ObjectStore, once: ObjectStore, where: str, limits: Settings) -> None:
        self._store = store
        self._once = once
        """The same store without retries."""
        self._where = where
        timeout_s = limits.copy_request_timeout_ms / 1000
        pause_s = limits.retry_delay_ms_max / 1000
        self._try_s = timeout_s + pause_s
        self._request_s = self._try_s * (limits.copy_request_retries_max + 1)

    @classmethod
    def open(cls, kind: str, bucket: str, settings: Settings) -> BucketStore:
        """Open a bucket of kind s3, gs or az. Sends no request, but blocks for some ms. Raises
        `StorageError`."""
        where = f"{kind}://{bucket}"
        with translate_errors("open", where, determinate=True):
            store = open_store(kind, bucket, settings, settings.copy_request_retries_max)
            return cls(store, open_store(kind, bucket, settings, 0), where, settings)

    async def get(self, key: str, bytes_max: int) -> FetchedObject | None:
        """Return an object; None if it does not exist. Raises `StorageError`, in particular for an
        object larger than `bytes_max`."""
        with translate_errors("read", self._of(key), determinate=True):
            try:
                with anyio.fail_after(self._request_s):
                    result = await self._store.get_async(key)
                    if result.meta["size"] > bytes_max:
                        text = f"{self._of(key)} is too large: {result.meta['size']} bytes"
                        raise StorageError(f"{text} (limit {bytes_max})", determinate=True)
                    data = bytes(await result.bytes_async())
            except FileNotFoundError as error:
                # A missing bucket looks like a missing object; only the code distinguishes them.
                if "NoSuchBucket" in str(error):
                    raise
                return None
            meta = result.meta
            return FetchedObject(data, ObjectVersion(meta.get("e_tag"), meta.get("version")))

    async def begin(self, key: str, bytes_max: int) -> tuple[ListedObject, bytes | None] | None:
        """Return an object's listing, and its bytes unless there are more than `bytes_max`; None if
        it does not exist. Raises `StorageError`."""
        with translate_errors("read", self._of(key), determinate=True):
            try:
                with anyio.fail_after(self._request_s):
                    result = await self._store.get_async(key)
                    found = listed(result.meta)
                    small = found.size <= bytes_max
                    return found, bytes(await result.bytes_async()) if small else None
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    async def put(self, key: str, data: bytes) -> None:
        """Write an object. Raises `StorageError`, indeterminate unless the store refused the first
        request."""

        async def put() -> None:
            try:
                with translate_errors("write", self._of(key), determinate=False, once=True):
                    await self._once.put_async(key, data, use_multipart=False)
                    return
            except StorageError as error:
                if error.determinate:
                    raise
            # Retrying is safe, because it writes the same bytes under the same key.
            await self._store.put_async(key, data, use_multipart=False)

        await self._to_its_end(key, put, threading.Event(), self._request_s + self._try_s)

    async def upload(
        self, key: str, source: Path | bytes, bytes_total: int, seen: Seen | None = None
    ) -> None:
        """Upload a file (or bytes) as an object, piece by piece.

        `seen` is called with each piece once, in order, in a thread. Raises `StorageError`. A
        cancelled upload is aborted within `GIVE_UP_S`.
        """
        piece = piece_bytes(bytes_total)
        stopped = threading.Event()

        async def put() -> None:
            # The library aborts a multipart upload only if its source raises an error, so
            # `read_pieces` raises one when it is stopped.
            pieces = read_pieces(source, piece, stopped, seen)
            await self._store.put_async(
                key, pieces, chunk_size=piece, max_concurrency=PIECES_AT_ONCE
            )

        await self._to_its_end(key, put, stopped, self._request_s * (bytes_total // piece + 3))

    async def _to_its_end(
        self,
        key: str,
        put: Callable[[], Awaitable[None]],
        stopped: threading.Event,
        limit_s: float,
    ) -> None:
        async def translated() -> None:
            with translate_errors("write", self._of(key), determinate=False):
                await put()

        try:
            await run_to_its_end(translated, stopped, limit_s)
        except TimeoutError:
            text = f"could not write {self._of(key)}: the store did not respond"
            raise StorageError(text, determinate=False) from None

    async def pages(self, prefix: str) -> AsyncGenerator[list[ListedObject], None]:
        """Yield all objects below a prefix (``""`` for the whole bucket), in pages of at most
        `PAGE_KEYS`. Raises `StorageError`."""
        with translate_errors("list", self._of(prefix), determinate=True):
            stream = self._store.list(prefix or None, chunk_size=PAGE_KEYS)
        while True:
            with translate_errors("list", self._of(prefix), determinate=True):
                with anyio.fail_after(self._request_s):
                    page = await anext(stream, None)
                if page is None:
                    return
                found = [listed(each) for each in page]
            yield found

    async def head(self, key: str) -> ListedObject | None:
        """Return the listing of one object; None if it does not exist. Raises `StorageError`."""
        with translate_errors("look at", self._of(key), determinate=True):
            try:
                with anyio.fail_after(self._request_s):
                    return listed(await self._store.head_async(key))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    async def piece(self, of: ListedObject, start: int, end: int) -> bytes | None:
        """Return the bytes ``start <= n < end`` of an object as it was listed; None if it was
        replaced or deleted. Raises `StorageError`."""
        from obstore.exceptions import PreconditionError

        options: Any = {"range": (start, end)}
        if of.version.e_tag is not None:
            options["if_match"] = of.version.e_tag
        if of.version.version is not None:
            options["version"] = of.version.version
        with translate_errors("read", self._of(of.key), determinate=True):
            try:
                with anyio.fail_after(self._request_s):
                    result = await self._store.get_async(of.key, options=options)
                    data = bytes(await result.bytes_async())
            except PreconditionError:
                return None
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            meta = result.meta
            same = meta["size"] == of.size and len(data) == end - start
            if (
                of.version.e_tag is None
            ):  # compare whole seconds, because many listings are no more precise
                second = 1_000_000_000
                same = same and listed(meta).modified_ns // second == of.modified_ns // second
            return data if same else None

    async def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones are ignored. Raises `StorageError`."""
        for start in range(0, len(keys), 1_000):
            some = keys[start : start + 1_000]
            with translate_errors("remove files of", self._where, determinate=False):
                try:
                    with anyio.fail_after(self._request_s):
                        await self._store.delete_async(some)
                except FileNotFoundError as error:
                    if "NoSuchBucket" in str(error):
                        raise

    def _of(self, key: str) -> str:
        return f"{self._where}/{key}"


def put_mode(expected: ObjectVersion | None) -> Any:
    """Return the library's mode for a write over this version (None: only if no object exists)."""
    if expected is None:
        return "create"
    given = {"e_tag": expected.e_tag, "version": expected.version}
    return {name: value for name, value in given.items() if value is not None}


def piece_bytes(bytes_total: int) -> int:
    """Return the size of the pieces in which a file of this size is uploaded."""
    # Larger pieces for a file that would otherwise exceed the maximum number of pieces.
    return max(PIECE_BYTES, -(-bytes_total // PIECES_MAX))


class UploadStopped(Exception):
    """The upload was cancelled."""


async def run_to_its_end(
    work: Callable[[], Awaitable[R]], stopped: threading.Event, limit_s: float = math.inf
) -> R:
    """Await a call that must not be cut off, and return its result.

    If the caller is cancelled, set `stopped`, so that the call ends early, and wait for at most
    `GIVE_UP_S`. Raises `TimeoutError` after that, or after `limit_s`.
    """
    result: list[R] = []
    failure: BaseException | None = None
    ended = False
    async with anyio.create_task_group() as group:
        shield = anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s)

        async def stop_when_canceled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not ended:
                    stopped.set()
                    shield.deadline = min(shield.deadline, anyio.current_time() + GIVE_UP_S)

        group.start_soon(stop_when_canceled)
        # Shielded: a cancelled call continues for up to `GIVE_UP_S`, so that its outcome is known
        # and the store can discard the pieces.
        with shield:
            try:
                result.append(await work())
            except anyio.get_cancelled_exc_class():
                raise
            # Stored, because the group would wrap it. Panics of native code are not `Exception`s.
            except BaseException as error:  # noqa: BLE001
                failure = error
        ended = True
        group.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint()
    if shield.cancelled_caught:
        raise TimeoutError
    if failure is not None:
        raise failure
    return result[0]


Seen = Callable[[bytes], None]
"""Callback that receives each piece."""


def read_pieces(
    source: Path | bytes, piece: int, stopped: threading.Event, seen: Seen | None
) -> Iterator[bytes]:
    """Yield the pieces of a file. Runs in threads of the library."""
    with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        while data := file.read(piece):
            if stopped.is_set():
                raise UploadStopped
            if seen is not None:
                seen(data)
            yield data


def listed(meta: Any) -> ListedObject:
    """Convert the library's metadata of an object."""
    at = meta["last_modified"]
    modified_ns = calendar.timegm(at.utctimetuple()) * 1_000_000_000 + at.microsecond * 1_000
    version = ObjectVersion(meta.get("e_tag"), meta.get("version"))
    return ListedObject(meta["path"], meta["size"], modified_ns, version)


Opener = Callable[[str, str, Settings], BucketStore]
"""Opens a bucket, given its kind, its name and the settings."""
