"""Objects in a bucket as files: lists them page by page and downloads them to the local disk.

Theory of operation. A scan lists all objects below the URL and keeps the first new ones, in order
(`object_listing`). Files are read from the local disk, so the files of a batch are first downloaded
into a folder below the reader's scratch folder. It is deleted after the batch (after a crash,
together with the scratch folder at the next start).

Limits: `PENDING_MAX` objects per scan; `source_spool_bytes_max` on disk; `FETCHES_AT_ONCE`
concurrent downloads, each with one piece of `PIECE_BYTES` in memory.
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
"""Maximum number of objects in one copy."""
_NEEDED: Final = "list and read (on S3: s3:ListBucket, s3:GetObject)"
_SUFFIXES: Final = re.compile(r"(?:\.[A-Za-z0-9]{1,16}){0,2}$")
"""Suffixes that tell readers how a file is compressed."""
_NEVER_AGAIN: Final = "write each object once, under a unique name"


class BucketLocation:
    """Lists and downloads the objects below a URL."""

    def __init__(
        self,
        url: str,
        pattern: str,
        recursive: bool,
        around: ConnectorContext,
        opened: Opener = BucketStore.open,
    ) -> None:
        """Raise `InvalidUsage` for a URL that the service may not read.

        `opened` opens a bucket; tests replace it.
        """
        settings = around.settings
        self._location = allowed_bucket(url, settings.source_buckets, "source_buckets", "read")
        self._pattern = pattern
        self._recursive = recursive
        self._around = around
        self._opened = opened
        self._store: BucketStore | None = None
        """Opened at the first use, then kept."""
        self._spools = 0
        """Number of download folders made so far; names the next one."""

    async def check(self) -> None:
        """Do nothing: the constructor has checked the URL."""

    def ledger_at(self, position: str | None) -> IngestedObjects:
        """Return the ledger stored in a position; an empty one for None."""
        return IngestedObjects() if position is None else IngestedObjects.of(position)

    # -- listing ----------------------------------------------------------------------------------

    async def scan(self, taken: FileLedger) -> ListingResult:
        """List all objects below the URL, and compare them with the ledger."""
        assert isinstance(taken, IngestedObjects), "its own"
        looking = BucketScan(taken)
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                looking.see(page)
        seen = looking.done()
        late = "appeared too late (2,000 newer objects were ingested before it); write it again"
        return ListingResult(
            seen.new,
            seen.taken,
            seen.behind,
            seen.behind_bytes,
            seen.newest,
            (
                FileNotice(late, [f"an object in {self._location}"] * seen.late),
                FileNotice("changed after it was ingested", [file.name for file in seen.changed]),
            ),
        )

    async def list_all(self) -> list[FoundFile]:
        """Return all objects below the URL in order, or the single object that the URL names."""
        if self._location.path:
            store = await self._open()
            try:
                one = await store.head(self._location.prefix)
            except StorageError as error:
                raise _unreachable(error) from None
            # An empty object represents a folder and contains no data.
            if one is not None and one.size:
                *above, _ = self._location.path
                return list(self._found("/".join([*above, ""]), "*", [one]))
        files: list[FoundFile] = []
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                files += page
                if len(files) > LISTED_MAX:
                    raise InvalidUsage(
                        f"more than {LISTED_MAX} objects {self._pattern} in {self._location}: "
                        "narrow the pattern or path to copy some of them at a time"
                    )
        return sorted(files)

    async def manifest(self) -> CopyManifest | None:
        """Read the manifest of the copy at this URL; None if there is none."""
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
        """Return as many files as fit the limits and the spool, from the first one on, but at least
        one."""
        most = min(bytes_max, self._around.settings.source_spool_bytes_max)
        return first_batch(files, files_max, most)

    @asynccontextmanager
    async def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AsyncIterator[Sequence[FoundFile]]:
        """Download the files, and yield them with their local paths."""
        most = self._around.settings.source_spool_bytes_max
        for file in files:
            if file.size > most:
                raise MalformedFile(
                    f"{file.path} is too large to download: {file.size} bytes (limit {most}, "
                    "source_spool_bytes_max)",
                    file.path,
                )
        self._spools += 1
        folder = self._around.scratch / f"spool-{self._spools}"
        try:
            yield await self._fetch(files, folder)
        finally:
            await self._to_its_end(lambda: shutil.rmtree(folder, ignore_errors=True))

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """Return None: each download is conditional on the listed version."""
        return None

    async def _fetch(self, files: Sequence[FoundFile], folder: Path) -> list[FoundFile]:
        store = await self._open()
        here = [
            file._replace(path=str(folder / f"{number:06}{_SUFFIXES.search(file.name)[0]}"))  # type: ignore[index]
            for number, file in enumerate(files)
        ]
        # One iterator shared by all workers: each takes the next file.
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
                    f"cannot write {folder}: {error.strerror or error}",
                    "free space on the disk of the state directory, or lower batch_bytes_max",
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
        # Each request is conditional on the listed version, so the file is either read in full in
        # that version, or the download fails.
        for start in range(0, file.size, PIECE_BYTES):
            data = await store.piece(of, start, min(start + PIECE_BYTES, file.size))
            if data is None:
                raise SourceUnreachable(
                    f"{file.path} changed while it was being read", _NEVER_AGAIN
                )
            await self._to_its_end(lambda: _append(to, data))  # noqa: B023 - done in this round

    async def _to_its_end(self, function: Callable[[], object]) -> None:
        # A thread cannot be cancelled, and the folder must not be removed before its last write.
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
    """Return the location that a path or URL names: a folder, or a path in a bucket.

    Raises `InvalidUsage` for a bucket that the service may not read. A folder is checked when it is
    first used.
    """
    if is_bucket(path):
        return BucketLocation(path, pattern, recursive, around, opened)
    return FolderLocation(path, pattern, recursive, around)
