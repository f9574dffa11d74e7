"""The blocking calls to a bucket that sinks and copies need, based on obstore.

Credentials and errors are handled as in `bucket_store`. Every request has a time limit and a
limited number of retries, except for `put_if`, which tries once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from actors.durable.object_store.bucket_errors import translate_errors
from actors.durable.object_store.bucket_paths import BucketPath
from actors.durable.object_store.bucket_store import (
    PAGE_KEYS,
    PIECES_AT_ONCE,
    FetchedObject,
    ObjectVersion,
    open_store,
    piece_bytes,
    put_mode,
    read_pieces,
)
from actors.runtime.errors import StorageError
from actors.runtime.settings import Settings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore.store import ObjectStore

READ_AHEAD_BYTES: Final = 1 << 20


class BucketCalls:
    """The objects at and below one path of a bucket. Names are relative to the path."""

    def __init__(self, store: ObjectStore, once: ObjectStore, place: BucketPath) -> None:
        self._store = store
        self._once = once
        """The same store without retries."""
        self._place = place

    @classmethod
    def open(cls, place: BucketPath, settings: Settings) -> BucketCalls:
        """Open the bucket without sending a request. Raises `StorageError`."""
        with translate_errors("open", str(place), determinate=True):
            retries = settings.copy_request_retries_max
            store = open_store(place.kind, place.bucket, settings, retries)
            return cls(store, open_store(place.kind, place.bucket, settings, 0), place)

    def get(self, name: str, bytes_max: int) -> FetchedObject | None:
        """Return an object; None if it does not exist. Raises `StorageError`, in particular for an
        object larger than `bytes_max`."""
        with translate_errors("read", self._of(name), determinate=True):
            try:
                result = self._store.get(self._place.key(name))
            except FileNotFoundError as error:
                _check_bucket(error)
                return None
            size = result.meta["size"]
            if size > bytes_max:
                text = f"{self._of(name)} is too large: {size} bytes (limit {bytes_max})"
                raise StorageError(text, determinate=True)
            version = ObjectVersion(result.meta.get("e_tag"), result.meta.get("version"))
            return FetchedObject(bytes(result.bytes()), version)

    def put_if(self, name: str, data: bytes, expected: ObjectVersion | None) -> bool:
        """Write an object if the existing one has this version (None: if none exists). Return
        whether it was written. Raises `StorageError`, indeterminate unless the error says
        otherwise."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with translate_errors("write", self._of(name), determinate=False, once=True):
            try:
                # No retries: after a lost answer, a second attempt would find the first one's
                # object.
                mode = put_mode(expected)
                self._once.put(self._place.key(name), data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def upload(self, name: str, path: Path, bytes_total: int, stopped: Event) -> None:
        """Upload a file as an object, in pieces if it is large. Raises `StorageError`, and
        `UploadStopped` once `stopped` is set."""
        key, piece = self._place.key(name), piece_bytes(bytes_total)
        with translate_errors("write", self._of(name), determinate=False):
            if bytes_total <= piece:
                self._store.put(key, path.read_bytes(), use_multipart=False)
                return
            # The library aborts a multipart upload only if its source raises an error, so
            # `read_pieces` raises one when it is stopped.
            pieces = read_pieces(path, piece, stopped, None)
            self._store.put(key, pieces, chunk_size=piece, max_concurrency=PIECES_AT_ONCE)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the path. Raises `StorageError`."""
        with translate_errors("list", str(self._place), determinate=True):
            found = self._store.list_with_delimiter(self._place.prefix)
            return [each.rstrip("/").rpartition("/")[2] for each in found["common_prefixes"]]

    def delete(self, names: list[str]) -> None:
        """Delete objects; missing ones are ignored. Raises `StorageError`."""
        for start in range(0, len(names), PAGE_KEYS):
            keys = [self._place.key(name) for name in names[start : start + PAGE_KEYS]]
            with translate_errors("remove files of", str(self._place), determinate=False):
                try:
                    self._store.delete(keys)
                except FileNotFoundError as error:
                    _check_bucket(error)

    def names(self, folder: str = "", after: str = "") -> Iterator[list[str]]:
        """Yield the names of all objects in a folder and its subfolders that sort after `after`, in
        order, in pages of at most `PAGE_KEYS`. Raises `StorageError`."""
        where = self._place.key(folder) if folder else self._place.prefix
        offset = self._place.key(after) if after else None
        with translate_errors("list", self._of(folder), determinate=True):
            stream = iter(self._store.list(where, offset=offset, chunk_size=PAGE_KEYS))
        beginning = len(self._place.prefix) + 1
        while True:
            with translate_errors("list", self._of(folder), determinate=True):
                page: list[Any] = list(next(stream, []))
            if not page:
                return
            # An object whose key is the path itself is not below it.
            yield [each["path"][beginning:] for each in page if len(each["path"]) > beginning]

    def reader(self, name: str) -> io.BufferedReader:
        """Open an object as a seekable file. Raises `StorageError`, possibly later while
        reading."""
        with translate_errors("read", self._of(name), determinate=True):
            size = self._store.head(self._place.key(name))["size"]
        return io.BufferedReader(_Reader(self, name, size), READ_AHEAD_BYTES)

    def part(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes ``start <= n < end`` of an object. Raises `StorageError`."""
        with translate_errors("read", self._of(name), determinate=True):
            return bytes(self._store.get_range(self._place.key(name), start=start, end=end))

    def _of(self, name: str) -> str:
        return f"{self._place}/{name}" if name else str(self._place)


def _check_bucket(error: FileNotFoundError) -> None:
    """Re-raise the error if the bucket itself does not exist."""
    if "NoSuchBucket" in str(error):
        raise error


class _Reader(io.RawIOBase):
    """An object as a raw Python file."""

    def __init__(self, calls: BucketCalls, name: str, size: int) -> None:
        self._calls = calls
        self._name = name
        self._size = size
        self._at = 0
        """Position of the next byte to read."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        end = min(self._size, self._at + view.nbytes)
        if end <= self._at:
            return 0
        data = self._calls.part(self._name, self._at, end)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
