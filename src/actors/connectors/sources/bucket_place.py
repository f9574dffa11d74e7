"""A place in a bucket whose objects are files: listed page by page, downloaded into a spool.

Theory of operation. A scan lists all objects below the URL and keeps the first new ones in order
(`object_listing`). Files are read from the local disk, so those of a batch are downloaded first,
into a folder of the batch below the reader's scratch folder, which is deleted with the batch (or,
after a kill, with the scratch folder at the next start).

Bounds: `PENDING_MAX` objects of a scan; `source_spool_bytes_max` on disk; `FETCHES_AT_ONCE`
downloads at a time, each with a piece of `PIECE_BYTES` in memory.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import struct
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from fnmatch import fnmatchcase
from heapq import heappush, heappushpop, nlargest
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import msgspec

from actors.connectors.sources.file_listing import HASH_BYTES, FoundFile, first_batch, hash_of
from actors.connectors.sources.file_places import (
    FileLedger,
    FileNotice,
    FilesPlace,
    FolderPlace,
    ListingResult,
)
from actors.connectors.sources.file_reading import MalformedFile
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
from actors.runtime.threshold_probes import LISTED_FILES

# -- Finds the new objects of a bucket, by a position of bounded size. Pure ------------------------
# Theory of operation. As with files (`file_listing`), objects are taken in the order of (time of
# the last write, hash of the name). The position remembers the last `RECENT_MAX` of those taken,
# each with a tag of its size and version; the greatest forgotten one is the *low mark*. An object
# is new when it is not remembered and lies beyond the low mark.
#
# Objects that are reported and not taken:
# - *changed*: remembered with another tag: it was written again after it was taken. It is reported
#   once, and counts with its new time from then on. (Written again with the same bytes it only gets
#   its new time.)
# - *late*: at or below the low mark, and never taken: a store may date an object at the beginning
#   of a long upload.
#
# Invariant: a reader that takes objects in order never moves the mark beyond one that was listed
# and is not taken yet: no forgotten object is greater than the last one taken.


RECENT_MAX: Final = 2_000
PENDING_MAX: Final = 10_000
"""Most new objects that one scan returns, in order; the next scan finds those after them."""
TAG_BYTES: Final = 4
_ENTRY: Final = struct.Struct(f">{HASH_BYTES}sq{TAG_BYTES}s")


class _Written(msgspec.Struct, frozen=True):
    """A position as JSON."""

    low_ns: int
    low_hash: bytes
    forgotten: int
    objects: str
    exports: tuple[str, ...]


class TakenObjects(NamedTuple):
    """The objects taken so far."""

    low: tuple[int, bytes] = (-(1 << 63), b"")
    forgotten: int = 0
    """Number of objects that may lie at or below the low mark without any being late."""
    recent: Mapping[bytes, tuple[int, bytes]] = {}
    """Hash of the name → time of the last write, tag."""
    exports: tuple[str, ...] = ()
    """The exports that hold the objects."""

    def position(self) -> str:
        """Return the position of a source, as text."""
        entries = b"".join(_ENTRY.pack(name, at, tag) for name, (at, tag) in self.recent.items())
        objects = base64.b64encode(entries).decode()
        written = _Written(*self.low, self.forgotten, objects, self.exports)
        return msgspec.json.encode(written).decode()

    @classmethod
    def of(cls, position: str) -> TakenObjects:
        """Parse the text of `position`. Raises `InvalidUsage`."""
        try:
            found = msgspec.json.decode(position, type=_Written)
            entries = _ENTRY.iter_unpack(base64.b64decode(found.objects, validate=True))
            recent = {name: (at, tag) for name, at, tag in entries}
        except (msgspec.DecodeError, ValueError, struct.error) as error:
            raise InvalidUsage(
                f"{position[:100]!r} is not a position of a source of objects: {error}"
            ) from None
        return cls((found.low_ns, found.low_hash), found.forgotten, recent, found.exports)

    def holding(self, exports: tuple[str, ...]) -> TakenObjects:
        """Return the same objects, held by these exports."""
        return self._replace(exports=exports)

    def verdict(self, file: FoundFile) -> str:
        """Return ``new``, ``taken``, ``touched`` (the same, with another time), ``changed``, or
        ``old``: forgotten, or late."""
        known = self.recent.get(file.hash)
        if known is None:
            return "new" if file.key > self.low else "old"
        if known[1] != tag_of(file):
            return "changed"
        return "taken" if known[0] == file.modified_ns else "touched"

    def plus(self, files: Sequence[FoundFile]) -> TakenObjects:
        """Return the objects taken with these added."""
        added = {file.hash: (file.modified_ns, tag_of(file)) for file in files}
        recent, low, forgotten = dict(self.recent) | added, self.low, self.forgotten
        if LISTED_FILES.crossed(len(recent) > RECENT_MAX):
            keys = [(at, name) for name, (at, _) in recent.items()]
            kept = {name for _, name in nlargest(RECENT_MAX, keys)}
            low = max(low, *(key for key in keys if key[1] not in kept))
            forgotten += len(recent) - len(kept)
            recent = {name: known for name, known in recent.items() if name in kept}
        return self._replace(low=low, forgotten=forgotten, recent=recent)


def tag_of(file: FoundFile) -> bytes:
    """Return a short hash that differs between two versions of an object."""
    version = file.version
    named = [file.size] if version is None else [file.size, version.e_tag, version.version]
    if version is None or (version.e_tag is None and version.version is None):
        named.append(file.modified_ns)  # the store tells no version
    return hashlib.blake2b(msgspec.json.encode(named), digest_size=TAG_BYTES).digest()


class BucketListing(NamedTuple):
    """Result of a scan of a bucket."""

    new: tuple[FoundFile, ...]
    """New objects in order, `PENDING_MAX` at most."""
    behind: int
    """Number of new objects beyond `new`."""
    behind_bytes: int
    newest: str
    """Name of the last new object; "" if there is none."""
    changed: tuple[FoundFile, ...]
    late: int
    taken: TakenObjects
    """The objects taken, updated by this scan."""


class BucketScan:
    """One scan, object by object; bounded memory."""

    def __init__(self, taken: TakenObjects) -> None:
        self._taken = taken
        self._new: list[_Reversed] = []
        """A heap whose first element is the greatest object."""
        self._count = 0
        self._bytes = 0
        self._last: FoundFile | None = None
        self._old = 0
        self._changed: list[FoundFile] = []
        self._touched: list[FoundFile] = []

    def see(self, files: Iterable[FoundFile]) -> None:
        """Add some more listed objects."""
        for file in files:
            verdict = self._taken.verdict(file)
            if verdict == "new":
                self._count += 1
                self._bytes += file.size
                if self._last is None or file > self._last:
                    self._last = file
                if len(self._new) < PENDING_MAX:
                    heappush(self._new, _Reversed(file))
                else:
                    heappushpop(self._new, _Reversed(file))
            elif verdict == "changed":
                self._changed.append(file)
            elif verdict == "touched":
                self._touched.append(file)
            elif verdict == "old":
                self._old += 1

    def done(self) -> BucketListing:
        """Return the result when all objects were seen."""
        new = tuple(sorted(each.file for each in self._new))
        # Late objects cannot be told from forgotten ones, but counted: at or below the mark there
        # are no more taken objects than `forgotten`. A removed object may hide a late one.
        late = max(0, self._old - self._taken.forgotten)
        taken = self._taken._replace(forgotten=self._old)
        return BucketListing(
            new,
            self._count - len(new),
            self._bytes - sum(file.size for file in new),
            "" if self._last is None else self._last.name,
            tuple(self._changed),
            late,
            taken.plus([*self._changed, *self._touched]),
        )


class _Reversed:
    """A file that sorts in reverse order."""

    __slots__ = ("file",)

    def __init__(self, file: FoundFile) -> None:
        self.file = file

    def __lt__(self, other: _Reversed) -> bool:
        return self.file.key > other.file.key


def data_objects(
    url: str, prefix: str, pattern: str, recursive: bool, objects: Iterable[ListedObject]
) -> Iterator[FoundFile]:
    """Yield the objects below a prefix (``""``, or it ends with ``/``) that are data: of this
    pattern, with a name in which no part begins with ``.`` or ``_``, and not empty (tools put empty
    objects where they mean folders). `url` is that of the bucket."""
    for each in objects:
        name = each.key[len(prefix) :]
        parts = name.split("/")
        if (
            not each.key.startswith(prefix)
            or not each.size
            or any(part[:1] in ("", ".", "_") for part in parts)
            or (len(parts) > 1 and not recursive)
            or not fnmatchcase(parts[-1], pattern)
        ):
            continue
        yield FoundFile(
            each.modified_ns,
            hash_of(name),
            name,
            f"{url}/{each.key}",
            each.size,
            each.modified_ns,
            each.version,
        )


FETCHES_AT_ONCE: Final = 4
LISTED_MAX: Final = 100_000
"""Most objects that one copy may have."""
_NEEDED: Final = "list and read (on S3: s3:ListBucket, s3:GetObject)"
_SUFFIXES: Final = re.compile(r"(?:\.[A-Za-z0-9]{1,16}){0,2}$")
"""Suffixes that tell readers a file's compression."""
_NEVER_AGAIN: Final = "write objects once, each under a name of its own"


class BucketPlace:
    """Lists and downloads objects below a URL. See `FilesPlace`."""

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
        self._place = allowed_bucket(url, settings.source_buckets, "source_buckets", "read")
        self._pattern = pattern
        self._recursive = recursive
        self._around = around
        self._opened = opened
        self._store: BucketStore | None = None
        self._spools = 0

    async def check(self) -> None:
        """See `FilesPlace`: the constructor has checked already."""

    def begun(self, position: str | None) -> TakenObjects:
        """See `FilesPlace`."""
        return TakenObjects() if position is None else TakenObjects.of(position)

    # -- listing ----------------------------------------------------------------------------------

    async def look(self, taken: FileLedger) -> ListingResult:
        """See `FilesPlace`."""
        assert isinstance(taken, TakenObjects), "its own"
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
                FileNotice(late, [f"an object in {self._place}"] * seen.late),
                FileNotice("was changed after it was taken", [file.name for file in seen.changed]),
            ),
        )

    async def every(self) -> list[FoundFile]:
        """See `FilesPlace`. The URL may be that of a single object, too."""
        if self._place.path:
            store = await self._open()
            try:
                one = await store.head(self._place.prefix)
            except StorageError as error:
                raise _unreachable(error) from None
            # An empty object represents a folder; it is no data.
            if one is not None and one.size:
                *above, _ = self._place.path
                return list(self._found("/".join([*above, ""]), "*", [one]))
        files: list[FoundFile] = []
        async with aclosing(self._pages()) as pages:
            async for page in pages:
                files += page
                if len(files) > LISTED_MAX:
                    raise InvalidUsage(
                        f"there are more than {LISTED_MAX} objects {self._pattern} in "
                        f"{self._place}: copy some of them at a time, by pattern or path"
                    )
        return sorted(files)

    async def manifest(self) -> CopyManifest | None:
        """See `FilesPlace`."""
        store = await self._open()
        try:
            found = await store.get("/".join((*self._place.path, MANIFEST)), MANIFEST_BYTES_MAX)
        except StorageError as error:
            raise _unreachable(error) from None
        return None if found is None else decode_manifest(found.data, f"{self._place}/{MANIFEST}")

    async def _pages(self) -> AsyncGenerator[list[FoundFile], None]:
        store = await self._open()
        prefix = self._place.prefix
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
        url = f"{self._place.kind}://{self._place.bucket}"
        return data_objects(url, prefix, pattern, self._recursive, objects)

    async def _open(self) -> BucketStore:
        if self._store is None:
            kind, bucket = self._place.kind, self._place.bucket
            settings = self._around.settings
            try:
                self._store = await self._around.clock.run_blocking(
                    lambda: self._opened(kind, bucket, settings)
                )
            except StorageError as error:
                raise _unreachable(error) from None
        return self._store

    # -- downloads --------------------------------------------------------------------------------

    def first(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """See `FilesPlace`."""
        most = min(bytes_max, self._around.settings.source_spool_bytes_max)
        return first_batch(files, files_max, most)

    @asynccontextmanager
    async def brought(self, files: Sequence[FoundFile]) -> AsyncIterator[Sequence[FoundFile]]:
        """See `FilesPlace`: files are downloaded."""
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

    async def changed(self, files: Sequence[FoundFile]) -> str | None:
        """See `FilesPlace`: None, since each download is conditional on the listed version."""
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
        bucket = f"{self._place.kind}://{self._place.bucket}/"
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


def open_place(
    path: str,
    pattern: str,
    recursive: bool,
    around: ConnectorContext,
    opened: Opener = BucketStore.open,
) -> FilesPlace:
    """Return the place that a path or URL names: a folder, or a place in a bucket. Raises
    `InvalidUsage` for a bucket that may not be read; a folder is looked up when it is first
    used."""
    if is_bucket(path):
        return BucketPlace(path, pattern, recursive, around, opened)
    return FolderPlace(path, pattern, recursive, around)
