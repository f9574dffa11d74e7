"""Locations of files: a local folder or a path in a bucket, behind one interface.

Theory of operation. A `FileLocation` lists files (`scan`, `list_all`), makes them readable on the
local disk (`opened_locally`), and keeps a `FileLedger` of the files that were ingested. Readers
keep the listed `FoundFile`s and read the ones that `opened_locally` yields; for a folder these are
the same.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from actors.connectors.sources.file_listing import (
    FoundFile,
    IngestedFiles,
    ListingScope,
    allowed,
    allowed_roots,
    first_batch,
    listed,
    scan,
    unchanged,
)
from actors.connectors.sources.file_reading import FileReader, MalformedFile
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.model.plan.copy_manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    CopyManifest,
    decode_manifest,
)
from actors.runtime.errors import InvalidUsage


class FileLedger(Protocol):
    """The files ingested so far. Immutable."""

    @property
    def exports(self) -> tuple[str, ...]:
        """Return the names of the exports that contain them."""
        ...

    def holding(self, exports: tuple[str, ...]) -> Self:
        """Return the same ledger, with these exports."""
        ...

    def plus(self, files: Sequence[FoundFile]) -> Self:
        """Return the ledger with these files added."""
        ...

    def position(self) -> str:
        """Return the ledger as a source position."""
        ...


class FileNotice(NamedTuple):
    """A warning about files. If `repeated`, each scan reports all of them, not only new ones."""

    kind: str
    names: Sequence[str]
    repeated: bool = False


class ListingResult(NamedTuple):
    """Result of scanning a location for new files."""

    new: Sequence[FoundFile]
    """New files, in order. Only the first ones if there are very many."""
    taken: FileLedger
    """The given ledger, updated by this scan."""
    behind: int = 0
    """Number of new files that are not in `new`, followed by their total size."""
    behind_bytes: int = 0
    newest: str = ""
    """Name of the last new file; "" if there is none."""
    notices: tuple[FileNotice, ...] = ()


class FileLocation(Protocol):
    """The location of the files of one source or one copy.

    Methods raise `SourceUnreachable` if the location cannot be listed or read at the moment, and
    `InvalidUsage` if the service may not read it.
    """

    async def check(self) -> None:
        """Check that the place may be read."""
        ...

    def ledger_at(self, position: str | None) -> FileLedger:
        """Return the ledger stored in a position; an empty one for None. Raises `InvalidUsage` for
        an invalid position."""
        ...

    async def scan(self, taken: FileLedger) -> ListingResult:
        """Scan for files that are not in the ledger."""
        ...

    async def list_all(self) -> list[FoundFile]:
        """Return all files, in order."""
        ...

    async def manifest(self) -> CopyManifest | None:
        """Return the manifest of the copy at this location; None if there is none.

        Raises `InvalidUsage` if the manifest file has invalid contents.
        """
        ...

    def first_batch(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """Return as many files as fit the limits, from the first one on, but at least one."""
        ...

    def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AbstractAsyncContextManager[Sequence[FoundFile]]:
        """Yield the same files with a `path` that is readable while the block lasts.

        Raises `MalformedFile` for a file that is too large to download.
        """
        ...

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """Return the path of a file that may have been read in a version other than the listed one;
        None if there is none."""
        ...


class LocationReader:
    """Reads files of any location. Errors name a file by its path or URL at the location."""

    def __init__(self, reader: FileReader, place: FileLocation) -> None:
        self._reader = reader
        self._location = place

    async def pieces(self, files: Sequence[FoundFile]) -> AsyncGenerator[pa.Table, None]:
        """Yield the rows of these files in pieces of bounded size, as `FileReader.pieces` does."""
        async with self._location.opened_locally(files) as local:
            try:
                async with aclosing(self._reader.pieces(local)) as pieces:
                    async for piece in pieces:
                        yield piece
            except MalformedFile as error:
                raise restore_paths(error, files, local) from None


def restore_paths(
    error: MalformedFile, files: Sequence[FoundFile], local: Sequence[FoundFile]
) -> MalformedFile:
    """Return the error with local paths replaced by paths at the location."""
    path = {here.path: file.path for file, here in zip(files, local, strict=True)}
    return MalformedFile(
        restore_paths_in_text(str(error), files, local),
        None if error.path is None else path.get(error.path, error.path),
    )


def restore_paths_in_text(text: str, files: Sequence[FoundFile], local: Sequence[FoundFile]) -> str:
    """Return a text with local paths replaced by paths at the location."""
    for outside, here in zip(files, local, strict=True):
        if outside.path != here.path:
            # Spark writes a path in any of three forms.
            for form in (f"file://{here.path}", f"file:{here.path}", here.path):
                text = text.replace(form, outside.path)
    return text


class FolderLocation:
    """A local folder; for a copy, also a single file."""

    def __init__(self, path: str, pattern: str, recursive: bool, around: ConnectorContext) -> None:
        self._path = path
        self._pattern = pattern
        self._recursive = recursive
        self._clock = around.clock
        self._roots = allowed_roots(around.settings)

    async def check(self) -> None:
        """Raise `InvalidUsage` if the folder is not below source_dirs."""
        await self._location()

    def ledger_at(self, position: str | None) -> IngestedFiles:
        """Return the ledger stored in a position; an empty one for None."""
        return IngestedFiles() if position is None else IngestedFiles.of(position)

    async def scan(self, taken: FileLedger) -> ListingResult:
        """List the folder, and compare the files with the ledger."""
        assert isinstance(taken, IngestedFiles), "its own"
        place, looked_ns = await self._location(), taken.looked_ns
        try:
            found = await self._clock.run_blocking(lambda: scan(place, taken, looked_ns))
        except OSError as error:
            raise SourceUnreachable(
                f"cannot list folder {self._path}: {error.strerror or error}",
                "check that it exists and that the service may list it",
            ) from None
        late = "appeared too late, or its inode changed; touch it to have it ingested"
        return ListingResult(
            found.new,
            taken.plus(found.changed, found.looked_ns),
            newest=found.new[-1].name if found.new else "",
            notices=(
                FileNotice(late, found.late),
                FileNotice("changed after it was ingested", [file.name for file in found.changed]),
                FileNotice("is a link to a file outside source_dirs", found.refused, repeated=True),
            ),
        )

    async def list_all(self) -> list[FoundFile]:
        """Return all files of the folder in order, or the single file."""
        try:
            return await self._clock.run_blocking(self._list_all)
        except OSError as error:
            raise SourceUnreachable(
                f"cannot read {self._path}: {error.strerror or error}"
            ) from None

    async def manifest(self) -> CopyManifest | None:
        """Read the manifest of the copy in this folder; None if there is none."""
        return await self._clock.run_blocking(self._manifest)

    def _manifest(self) -> CopyManifest | None:
        path = os.path.join(allowed(self._path, self._roots), MANIFEST)
        try:
            with open(path, "rb") as file:
                text = file.read(MANIFEST_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnreachable(f"cannot read {path}: {error.strerror or error}") from None
        return decode_manifest(text, path)

    def _list_all(self) -> list[FoundFile]:
        roots = self._roots
        real = allowed(self._path, roots)
        if os.path.isdir(real):
            place = ListingScope(real, roots, self._pattern, self._recursive)
        else:
            # Raises for a missing path. Listing its folder would just not include it.
            os.stat(real)
            place = ListingScope(os.path.dirname(real), roots)
        refused: list[str] = []
        files = sorted(listed(place, refused))
        if not os.path.isdir(real):
            files = [file for file in files if file.path == real]
        if refused:
            raise InvalidUsage(f"{refused[0]} is a link to a file outside source_dirs")
        return files

    def first_batch(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """Return as many files as fit the limits, from the first one on, but at least one."""
        return first_batch(files, files_max, bytes_max)

    @asynccontextmanager
    async def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AsyncIterator[Sequence[FoundFile]]:
        """Yield the files unchanged: they are read in place."""
        yield files

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """Compare the files' sizes and times with the listing; return the path of one that
        changed."""
        return await self._clock.run_blocking(lambda: unchanged(files))

    async def _location(self) -> ListingScope:
        path, roots = self._path, self._roots
        real = await self._clock.run_blocking(lambda: allowed(path, roots))
        return ListingScope(real, roots, self._pattern, self._recursive)
