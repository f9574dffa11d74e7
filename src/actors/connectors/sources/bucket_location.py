"""A place in a bucket whose objects are files: listed page by page, downloaded into a spool.

Theory of operation. A scan lists all objects below the URL and keeps the first new ones in order
(`object_listing`). Files are read from the local disk, so those of a batch are downloaded first,
into a folder of the batch below the reader's scratch folder, which is deleted with the batch (or,
after a kill, with the scratch folder at the next start).

Bounds: `PENDING_MAX` objects of a scan; `source_spool_bytes_max` on disk; `FETCHES_AT_ONCE`
downloads at a time, each with a piece of `PIECE_BYTES` in memory.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio

from actors.connectors.sources.file_listing import FoundFile, first_batch
from actors.connectors.sources.file_locations import (
    FileLedger,
    FileLocation,
    FileNotice,
    FolderLocation,
    ListingResult,
)
from actors.connectors.sources.file_reading import MalformedFile
from actors.connectors.sources.object_listing import BucketScan, IngestedObjects, data_objects
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.durable.object_store.bucket_errors import hint_for
from actors.durable.object_store.bucket_paths import allowed_bucket, is_bucket
from actors.durable.object_store.bucket_store import (
    PIECE_BYTES,
    BucketStore,
    ListedObject,
    ObjectVersion,
    Opener,
)
from actors.model.plan.copy_manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    CopyManifest,
    decode_manifest,
)
from actors.runtime.errors import InvalidUsage, PenstockError, StorageError

FETCHES_AT_ONCE: Final = 4
LISTED_MAX: Final = 100_000
"""Most objects that one copy may have."""
_NEEDED: Final = "list and read (on S3: s3:ListBucket, s3:GetObject)"
_SUFFIXES: Final = re.compile(r"(?:\.[A-Za-z0-9]{1,16}){0,2}$")
"""Suffixes that tell readers a file's compression."""
_NEVER_AGAIN: Final = "write objects once, each under a name of its own"


class BucketLocation:
    """Lists and downloads objects below a URL. See `FileLocation`."""

    def __init__(
        self,
        url: str,
        pattern: str,
        recursive: bool,
        around: ConnectorContext,
        opened: Opener = BucketStore.open,
    ) -> None:
        """Make a place. Raises `InvalidUsage` for a URL that may not be read."""
        settings = around.settings
        self._location = allowed_bucket(url, settings.source_buckets, "source_buckets", "read")
        self._pattern = pattern
        self._recursive = recursive
        self._around = around
        self._opened = opened
        self._store: BucketStore | None = None
        self._spools = 0

    async def check(self) -> None:
        """See `FileLocation`: the constructor has checked already."""

    def ledger_at(self, position: str | None) -> IngestedObjects:
        """See `FileLocation`."""
        return IngestedObjects() if position is None else IngestedObjects.of(position)

    # -- listing ----------------------------------------------------------------------------------

    async def scan(self, taken: FileLedger) -> ListingResult:
        """See `FileLocation`."""
        assert isinstance(taken, IngestedObjects), "its own"
        looking = BucketScan(taken)
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                looking.see(page)
        seen = looking.done()
        late = "came too late (it is older than 2,000 that were taken before it); write it again"
        return ListingResult(
            seen.new,
            seen.taken,
            seen.behind,
            seen.behind_bytes,
            seen.newest,
            (
                FileNotice(late, [f"an object in {self._location}"] * seen.late),
                FileNotice("was changed after it was taken", [file.name for file in seen.changed]),
            ),
        )

    async def list_all(self) -> list[FoundFile]:
        """See `FileLocation`. The URL may be that of a single object, too."""
        if self._location.path:
            store = await self._open()
            try:
                one = await store.head(self._location.prefix)
            except StorageError as error:
                raise _unreachable(error) from None
            # An empty object represents a folder; it is no data.
            if one is not None and one.size:
                *above, _ = self._location.path
                return list(self._found("/".join([*above, ""]), "*", [one]))
        files: list[FoundFile] = []
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                files += page
                if len(files) > LISTED_MAX:
                    raise InvalidUsage(
                        f"there are more than {LISTED_MAX} objects {self._pattern} in "
                        f"{self._location}: copy some of them at a time, by pattern or path"
                    )
        return sorted(files)

    async def manifest(self) -> CopyManifest | None:
        """See `FileLocation`."""
        store = await self._open()
        try:
            found = await store.get("/".join((*self._location.path, MANIFEST)), MANIFEST_BYTES_MAX)
        except StorageError as error:
            raise _unreachable(error) from None
        return (
            None if found is None else decode_manifest(found.data, f"{self._location}/{MANIFEST}")
        )

    async def _pages(self) -> AsyncGenerator[list[FoundFile], None]:
        store = await self._open()
        prefix = self._location.prefix
        try:
            async with aclosing(store.pages(prefix)) as pages:
                async for page in pages:
                    below = f"{prefix}/" if prefix else ""
                    yield list(self._found(below, self._pattern, page))
        except StorageError as error:
            raise _unreachable(error) from None

    def _found(
        self, prefix: str, pattern: str, objects: Sequence[ListedObject]
    ) -> Iterator[FoundFile]:
        url = f"{self._location.kind}://{self._location.bucket}"
        return data_objects(url, prefix, pattern, self._recursive, objects)

    async def _open(self) -> BucketStore:
        if self._store is None:
            kind, bucket = self._location.kind, self._location.bucket
            settings = self._around.settings
            try:
                self._store = await self._around.clock.run_blocking(
                    lambda: self._opened(kind, bucket, settings)
                )
            except StorageError as error:
                raise _unreachable(error) from None
        return self._store

    # -- downloads --------------------------------------------------------------------------------

    def first_batch(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """See `FileLocation`."""
        most = min(bytes_max, self._around.settings.source_spool_bytes_max)
        return first_batch(files, files_max, most)

    @asynccontextmanager
    async def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AsyncIterator[Sequence[FoundFile]]:
        """See `FileLocation`: files are downloaded."""
        most = self._around.settings.source_spool_bytes_max
        for file in files:
            if file.size > most:
                raise MalformedFile(
                    f"{file.path} has {file.size} bytes, and at most {most} are fetched at a time "
                    "(source_spool_bytes_max)",
                    file.path,
                )
        self._spools += 1
        folder = self._around.scratch / f"spool-{self._spools}"
        try:
            yield await self._fetch(files, folder)
        finally:
            await self._to_its_end(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """See `FileLocation`: None, since each download is conditional on the listed version."""
        return None

    async def _fetch(self, files: Sequence[FoundFile], folder: Path) -> list[FoundFile]:
        store = await self._open()
        here = [
            file._replace(path=str(folder / f"{number:06}{_SUFFIXES.search(file.name)[0]}"))  # type: ignore[index]
            for number, file in enumerate(files)
        ]
        # One iterator for all workers: each takes the next file that none has taken.
        left = iter(list(zip(files, here, strict=True)))
        failure: PenstockError | None = None

        async def work() -> None:
            nonlocal failure
            try:
                for file, local in left:
                    await self._fetch_one(store, file, Path(local.path))
            except StorageError as error:
                failure = _unreachable(error)
            except SourceUnreachable as error:
                failure = error
            except OSError as error:
                failure = SourceUnreachable(
                    f"{folder} cannot be written: {error.strerror or error}",
                    "make room on the disk of the state directory, or lower batch_bytes_max",
                )
            if failure is not None:
                group.cancel_scope.cancel()

        await self._to_its_end(lambda: folder.mkdir(parents=True))
        async with anyio.create_task_group() as group:
            for _ in range(min(FETCHES_AT_ONCE, len(files))):
                group.start_soon(work)
        if failure is not None:
            raise failure
        return here

    async def _fetch_one(self, store: BucketStore, file: FoundFile, to: Path) -> None:
        bucket = f"{self._location.kind}://{self._location.bucket}/"
        of = ListedObject(
            file.path.removeprefix(bucket),
            file.size,
            file.modified_ns,
            file.version or ObjectVersion(None, None),
        )
        # Each piece is requested on the condition that the object is still the listed version: the
        # file read is that one, whole, or this fails.
        for start in range(0, file.size, PIECE_BYTES):
            data = await store.piece(of, start, min(start + PIECE_BYTES, file.size))
            if data is None:
                raise SourceUnreachable(f"{file.path} was changed while it was read", _NEVER_AGAIN)
            await self._to_its_end(lambda: _append(to, data))  # noqa: B023 - done in this round

    async def _to_its_end(self, function: Callable[[], object]) -> None:
        # A thread cannot be cancelled: the folder may be removed only after the last write.
        with anyio.CancelScope(shield=True):
            await self._around.clock.run_blocking(function)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _unreachable(error: StorageError) -> SourceUnreachable:
    return SourceUnreachable(str(error), hint_for(str(error), _NEEDED))


def open_location(
    path: str,
    pattern: str,
    recursive: bool,
    around: ConnectorContext,
    opened: Opener = BucketStore.open,
) -> FileLocation:
    """Return the place that a path or URL names: a folder, or a place in a bucket. Raises
    `InvalidUsage` for a bucket that may not be read; a folder is looked up when it is first
    used."""
    if is_bucket(path):
        return BucketLocation(path, pattern, recursive, around, opened)
    return FolderLocation(path, pattern, recursive, around)
