"""Places of files: a folder of the machine, or a place in a bucket, with one interface for both.

Theory of operation. A `FileLocation` lists files (`scan`, `list_all`), makes them readable on the
disk (`opened_locally`), and keeps a `FileLedger` of the files taken. Readers keep the listed
`FoundFile`s, and read those that `opened_locally` yields: for a folder they are the same.
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
    """The files taken so far; immutable."""

    @property
    def exports(self) -> tuple[str, ...]:
        """Return the exports that hold them."""
        ...

    def holding(self, exports: tuple[str, ...]) -> Self:
        """Return the same files, held by these exports."""
        ...

    def plus(self, files: Sequence[FoundFile]) -> Self:
        """Return the ledger with these files taken, too."""
        ...

    def position(self) -> str:
        """Return the position of a source, as text."""
        ...


class FileNotice(NamedTuple):
    """A warning about files. If `repeated`, each scan reports all of them, not only new ones."""

    kind: str
    names: Sequence[str]
    repeated: bool = False


class ListingResult(NamedTuple):
    """Result of a scan."""

    new: Sequence[FoundFile]
    """New files in order; only the first ones, when they are very many."""
    taken: FileLedger
    """The ledger given, updated by this scan."""
    behind: int = 0
    """Number of new files beyond `new`; then their bytes."""
    behind_bytes: int = 0
    newest: str = ""
    """Name of the last new file."""
    notices: tuple[FileNotice, ...] = ()


class FileLocation(Protocol):
    """The place of the files of one source, or of one copy. Methods raise `SourceUnreachable` when
    it cannot be listed or read just now, `InvalidUsage` when it may not be read."""

    async def check(self) -> None:
        """Check that the place may be read."""
        ...

    def ledger_at(self, position: str | None) -> FileLedger:
        """Return the ledger of a position; None: of no files. Raises `InvalidUsage`."""
        ...

    async def scan(self, taken: FileLedger) -> ListingResult:
        """Scan for files that are not in the ledger."""
        ...

    async def list_all(self) -> list[FoundFile]:
        """Return all files, in order."""
        ...

    async def manifest(self) -> CopyManifest | None:
        """Return the manifest of the copy at the place; None if there is none. Raises
        `InvalidUsage` for a file of that name with other contents."""
        ...

    def first_batch(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """Return the first files that fit the limits: at least one."""
        ...

    def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AbstractAsyncContextManager[Sequence[FoundFile]]:
        """Yield the same files with a readable `path`, valid as long as the block lasts. Raises
        `MalformedFile` for a file that is too large to be downloaded."""
        ...

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """Return the path of a file that may have been read in another version than listed; None:
        none."""
        ...


class LocationReader:
    """Reads files of any place; errors name files by their path or URL at the place."""

    def __init__(self, reader: FileReader, place: FileLocation) -> None:
        self._reader = reader
        self._location = place

    async def pieces(self, files: Sequence[FoundFile]) -> AsyncGenerator[pa.Table, None]:
        """See `FileReader.pieces`."""
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
    """Return the error with local paths replaced by those at the place."""
    path = {here.path: file.path for file, here in zip(files, local, strict=True)}
    return MalformedFile(
        restore_paths_in_text(str(error), files, local),
        None if error.path is None else path.get(error.path, error.path),
    )


def restore_paths_in_text(text: str, files: Sequence[FoundFile], local: Sequence[FoundFile]) -> str:
    """Return a text with local paths replaced by those at the place."""
    for outside, here in zip(files, local, strict=True):
        if outside.path != here.path:
            # Spark writes paths in any of three forms.
            for form in (f"file://{here.path}", f"file:{here.path}", here.path):
                text = text.replace(form, outside.path)
    return text


class FolderLocation:
    """A folder; for a copy, also a single file. See `FileLocation`."""

    def __init__(self, path: str, pattern: str, recursive: bool, around: ConnectorContext) -> None:
        self._path = path
        self._pattern = pattern
        self._recursive = recursive
        self._clock = around.clock
        self._roots = allowed_roots(around.settings)

    async def check(self) -> None:
        """See `FileLocation`."""
        await self._location()

    def ledger_at(self, position: str | None) -> IngestedFiles:
        """See `FileLocation`."""
        return IngestedFiles() if position is None else IngestedFiles.of(position)

    async def scan(self, taken: FileLedger) -> ListingResult:
        """See `FileLocation`."""
        assert isinstance(taken, IngestedFiles), "its own"
        place, looked_ns = await self._location(), taken.looked_ns
        try:
            found = await self._clock.run_blocking(lambda: scan(place, taken, looked_ns))
        except OSError as error:
            raise SourceUnreachable(
                f"the folder {self._path} cannot be listed: {error.strerror or error}",
                "it must be there, and the service may list it",
            ) from None
        late = "came too late, or its inode was changed; touch it to have it taken"
        return ListingResult(
            found.new,
            taken.plus(found.changed, found.looked_ns),
            newest=found.new[-1].name if found.new else "",
            notices=(
                FileNotice(late, found.late),
                FileNotice("was changed after it was taken", [file.name for file in found.changed]),
                FileNotice("is a link that leads out of source_dirs", found.refused, repeated=True),
            ),
        )

    async def list_all(self) -> list[FoundFile]:
        """See `FileLocation`."""
        try:
            return await self._clock.run_blocking(self._list_all)
        except OSError as error:
            raise SourceUnreachable(
                f"{self._path} cannot be read: {error.strerror or error}"
            ) from None

    async def manifest(self) -> CopyManifest | None:
        """See `FileLocation`."""
        return await self._clock.run_blocking(self._manifest)

    def _manifest(self) -> CopyManifest | None:
        path = os.path.join(allowed(self._path, self._roots), MANIFEST)
        try:
            with open(path, "rb") as file:
                text = file.read(MANIFEST_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SourceUnreachable(f"{path} cannot be read: {error.strerror or error}") from None
        return decode_manifest(text, path)

    def _list_all(self) -> list[FoundFile]:
        roots = self._roots
        real = allowed(self._path, roots)
        if os.path.isdir(real):
            place = ListingScope(real, roots, self._pattern, self._recursive)
        else:
            # Raises for a path that does not exist: the listing of its folder would just lack it.
            os.stat(real)
            place = ListingScope(os.path.dirname(real), roots)
        refused: list[str] = []
        files = sorted(listed(place, refused))
        if not os.path.isdir(real):
            files = [file for file in files if file.path == real]
        if refused:
            raise InvalidUsage(f"{refused[0]} is a link that leads out of source_dirs")
        return files

    def first_batch(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """See `FileLocation`."""
        return first_batch(files, files_max, bytes_max)

    @asynccontextmanager
    async def opened_locally(
        self, files: Sequence[FoundFile]
    ) -> AsyncIterator[Sequence[FoundFile]]:
        """See `FileLocation`: files are read where they are."""
        yield files

    async def find_changed(self, files: Sequence[FoundFile]) -> str | None:
        """See `FileLocation`: size and time are compared with the listing."""
        return await self._clock.run_blocking(lambda: unchanged(files))

    async def _location(self) -> ListingScope:
        path, roots = self._path, self._roots
        real = await self._clock.run_blocking(lambda: allowed(path, roots))
        return ListingScope(real, roots, self._pattern, self._recursive)
