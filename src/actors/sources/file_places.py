"""Where files are: a folder of the machine, or a place in a bucket; one face for both.

Theory of operation. A `FilesPlace` tells what is there (`look`, `every`), brings files to where
they can be read (`brought`), and knows which were taken: what that means is the place's own, told
as a `Ledger`. Who reads files holds on to the `FoundFile`s that the place has told, and reads
those that it brings: for a folder they are the same.

`BroughtReader` reads files of any place: errors name them as they are known outside.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.copy_manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, decode_manifest
from actors.sources.file_listing import (
    FoundFile,
    Place,
    Taken,
    allowed,
    allowed_roots,
    first_batch,
    listed,
    scan,
    unchanged,
)
from actors.sources.file_reading import FileReader, Malformed
from actors.sources.source import Unreachable
from actors.sources.surroundings import Surroundings


class Ledger(Protocol):
    """Which files were taken; never changed, only replaced."""

    @property
    def exports(self) -> tuple[str, ...]:
        """Which exports hold them."""
        ...

    def holding(self, exports: tuple[str, ...]) -> Self:
        """The same, held by these exports."""
        ...

    def plus(self, files: Sequence[FoundFile]) -> Self:
        """With these taken too."""
        ...

    def position(self) -> str:
        """As a source's position."""
        ...


class Told(NamedTuple):
    """What people should know of some files; `anew`: each look tells all of them."""

    kind: str
    names: Sequence[str]
    anew: bool = False


class Look(NamedTuple):
    """What a look has found."""

    new: Sequence[FoundFile]
    """In order; the first of them, when they are very many."""
    taken: Ledger
    """The ledger given, also knowing what this look has seen."""
    behind: int = 0
    """How many new ones there are behind these, and their bytes."""
    behind_bytes: int = 0
    newest: str = ""
    """The last of all, by name."""
    told: tuple[Told, ...] = ()


class FilesPlace(Protocol):
    """Where the files of one source, or of one copy, are. Raises `Unreachable` where it cannot be
    listed or read just now, `InvalidUsage` where it may not be."""

    async def check(self) -> None:
        """Whether it may be read."""
        ...

    def begun(self, position: str | None) -> Ledger:
        """What was taken by a position; None: nothing. Raises `InvalidUsage`."""
        ...

    async def look(self, taken: Ledger) -> Look:
        """What is new since then."""
        ...

    async def every(self) -> list[FoundFile]:
        """All files that are there, in order."""
        ...

    async def manifest(self) -> Manifest | None:
        """The manifest of the copy that lies there; None: there is none. Raises `InvalidUsage`
        for a file of that name that is something else."""
        ...

    def first(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """The first of them: at least one, and no more than may be brought at a time."""
        ...

    def brought(
        self, files: Sequence[FoundFile]
    ) -> AbstractAsyncContextManager[Sequence[FoundFile]]:
        """The same files, where they can be read (`path`), as long as the block lasts. Raises
        `Malformed` for one that cannot be brought, ever."""
        ...

    async def changed(self, files: Sequence[FoundFile]) -> str | None:
        """The path of a file of which something else may have been read than what was told; None:
        there is none."""
        ...


class BroughtReader:
    """Reads files of a place."""

    def __init__(self, reader: FileReader, place: FilesPlace) -> None:
        self._reader = reader
        self._place = place

    async def pieces(self, files: Sequence[FoundFile]) -> AsyncGenerator[pa.Table, None]:
        """See `FileReader.pieces`."""
        async with self._place.brought(files) as brought:
            try:
                async with aclosing(self._reader.pieces(brought)) as pieces:
                    async for piece in pieces:
                        yield piece
            except Malformed as error:
                raise named_outside(error, files, brought) from None


def named_outside(
    error: Malformed, files: Sequence[FoundFile], brought: Sequence[FoundFile]
) -> Malformed:
    """The error, with the names that the files have where they come from."""
    path = {here.path: file.path for file, here in zip(files, brought, strict=True)}
    return Malformed(
        text_outside(str(error), files, brought),
        None if error.path is None else path.get(error.path, error.path),
    )


def text_outside(text: str, files: Sequence[FoundFile], brought: Sequence[FoundFile]) -> str:
    """A text likewise."""
    for outside, here in zip(files, brought, strict=True):
        if outside.path != here.path:
            for form in (f"file://{here.path}", f"file:{here.path}", here.path):
                text = text.replace(form, outside.path)
    return text


class FolderPlace:
    """A folder; or, for a copy, one file. See `FilesPlace`."""

    def __init__(self, path: str, pattern: str, recursive: bool, around: Surroundings) -> None:
        self._path = path
        self._pattern = pattern
        self._recursive = recursive
        self._clock = around.clock
        self._roots = allowed_roots(around.settings)

    async def check(self) -> None:
        """See `FilesPlace`."""
        await self._place()

    def begun(self, position: str | None) -> Taken:
        """See `FilesPlace`."""
        return Taken() if position is None else Taken.of(position)

    async def look(self, taken: Ledger) -> Look:
        """See `FilesPlace`."""
        assert isinstance(taken, Taken), "its own"
        place, looked_ns = await self._place(), taken.looked_ns
        try:
            found = await self._clock.run_blocking(lambda: scan(place, taken, looked_ns))
        except OSError as error:
            raise Unreachable(
                f"the folder {self._path} cannot be listed: {error.strerror or error}",
                "it must be there, and the service may list it",
            ) from None
        late = "came too late, or its inode was changed; touch it to have it taken"
        return Look(
            found.new,
            taken.plus(found.changed, found.looked_ns),
            newest=found.new[-1].name if found.new else "",
            told=(
                Told(late, found.late),
                Told("was changed after it was taken", [file.name for file in found.changed]),
                Told("is a link that leads out of source_dirs", found.refused, anew=True),
            ),
        )

    async def every(self) -> list[FoundFile]:
        """See `FilesPlace`."""
        try:
            return await self._clock.run_blocking(self._every)
        except OSError as error:
            raise Unreachable(f"{self._path} cannot be read: {error.strerror or error}") from None

    async def manifest(self) -> Manifest | None:
        """See `FilesPlace`."""
        return await self._clock.run_blocking(self._manifest)

    def _manifest(self) -> Manifest | None:
        path = os.path.join(allowed(self._path, self._roots), MANIFEST)
        try:
            with open(path, "rb") as file:
                text = file.read(MANIFEST_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Unreachable(f"{path} cannot be read: {error.strerror or error}") from None
        return decode_manifest(text, path)

    def _every(self) -> list[FoundFile]:
        roots = self._roots
        real = allowed(self._path, roots)
        if os.path.isdir(real):
            place = Place(real, roots, self._pattern, self._recursive)
        else:
            os.stat(real)
            place = Place(os.path.dirname(real), roots)
        refused: list[str] = []
        files = sorted(listed(place, refused))
        if not os.path.isdir(real):
            files = [file for file in files if file.path == real]
        if refused:
            raise InvalidUsage(f"{refused[0]} is a link that leads out of source_dirs")
        return files

    def first(
        self, files: Sequence[FoundFile], files_max: int, bytes_max: int
    ) -> Sequence[FoundFile]:
        """See `FilesPlace`."""
        return first_batch(files, files_max, bytes_max)

    @asynccontextmanager
    async def brought(self, files: Sequence[FoundFile]) -> AsyncIterator[Sequence[FoundFile]]:
        """See `FilesPlace`: they are there."""
        yield files

    async def changed(self, files: Sequence[FoundFile]) -> str | None:
        """See `FilesPlace`: they are looked at again."""
        return await self._clock.run_blocking(lambda: unchanged(files))

    async def _place(self) -> Place:
        path, roots = self._path, self._roots
        real = await self._clock.run_blocking(lambda: allowed(path, roots))
        return Place(real, roots, self._pattern, self._recursive)
