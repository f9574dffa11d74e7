"""Copies files into a table: reads their rows once, all or nothing.

Theory of operation. `prepare` lists the files and checks everything that can be checked; `pieces`
reads them one batch after another. The caller stages the pieces and appends all of them at the end,
or none. No position is kept, so the same files can be copied again.

The path is a file, a folder, an object, or a path in a bucket (`file_locations`). A location that
contains a copy with its manifest is read the way the copy was written (`copied_files`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources.bucket_location import open_location
from actors.connectors.sources.copied_files import columns_of_copy
from actors.connectors.sources.file_listing import FoundFile
from actors.connectors.sources.file_locations import FileLocation, LocationReader
from actors.connectors.sources.file_reading import (
    FileReader,
    Format,
    MalformedFile,
    check_options,
)
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.durable.object_store.bucket_store import BucketStore, Opener
from actors.model.plan.copy_manifest import VERSION, CopyManifest
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.updates import from_ipc
from actors.runtime.errors import InvalidUsage

FILES_AT_ONCE: Final = 1_000
BYTES_AT_ONCE: Final = 256 * 1024 * 1024


class CopyFromConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to copy a file, or the files of a folder or bucket."""

    path: str
    """A path below `source_dirs`, or a URL at or below one of `source_buckets`."""
    format: Format
    columns: tuple[str, ...] = ()
    """Columns of the table that the files have, for CSV in their order; empty for all. The other
    columns get their defaults."""
    options: dict[str, str] = {}
    """Options of Spark's reader for the format."""
    pattern: str = "*"
    recursive: bool = False
    defaults: bytes = b""
    """Arrow IPC stream of one row with the columns' defaults. A column without one becomes NULL."""
    computed: tuple[str, ...] = ()
    """Columns whose defaults only Spark can compute; the files must have them."""


class FilesProgress(msgspec.Struct, frozen=True):
    """Progress of a copy. A file counts once it has been read completely."""

    files_done: int
    files: int
    bytes_done: int
    bytes: int
    rows: int


class OneshotCopy:
    """One copy into a table with the columns `target`."""

    def __init__(
        self,
        request: CopyFromConfig,
        target: TableSchema,
        around: ConnectorContext,
        opened: Opener = BucketStore.open,
    ) -> None:
        self._request = request
        self._target = target
        self._around = around
        self._opened = opened
        self._location: FileLocation
        # Manifest of the copy that is read; None for plain files.
        self._manifest: CopyManifest | None = None
        # The files to read, the number of those read completely, and the number of rows so far.
        self._files: list[FoundFile] = []
        self._done = 0
        self._rows = 0
        self._defaults: dict[str, pa.Scalar] = {}

    async def prepare(self) -> None:
        """List the files and check the request.

        Raises `InvalidUsage` for an invalid option or column, a path that may not be read, or if
        there are no files, and `SourceUnreachable`.
        """
        request = self._request
        check_options(request.format, request.options)
        absent = [name for name in request.columns if name not in self._target.names]
        if absent:
            raise InvalidUsage(f"the table has no column {', '.join(absent)}")
        if len(set(request.columns)) < len(request.columns):
            raise InvalidUsage(f"duplicate column names: {', '.join(request.columns)}")
        if request.defaults:
            given = from_ipc(request.defaults)
            self._defaults = {name: given[name][0] for name in given.column_names}
        must = self._missing(request.columns or self._target.names)
        if must:
            raise InvalidUsage(f"the files must have {must}")
        self._location = self._open_location(request.pattern, request.recursive)
        self._manifest = await self._location.manifest()
        if self._manifest is not None:
            self._files = await self._listed(self._manifest)
            return
        self._files = await self._location.list_all()
        if not self._files:
            raise InvalidUsage(f"no file matches {request.pattern} in {request.path}")

    def _open_location(self, pattern: str, recursive: bool) -> FileLocation:
        path = self._request.path
        return open_location(path, pattern, recursive, self._around, self._opened)

    async def _listed(self, manifest: CopyManifest) -> list[FoundFile]:
        """Return the files of a copy with a manifest. Raises `InvalidUsage`."""
        request = self._request
        found = f"{request.path} contains a copy of {manifest.object}"
        if manifest.version != VERSION:
            raise InvalidUsage(f"{found}, written by another release (version {manifest.version})")
        if request.format != manifest.format:
            raise InvalidUsage(f"{found} in format {manifest.format}: expected {request.format}")
        if request.options or request.columns or request.pattern != "*":
            raise InvalidUsage(
                f"{found}, which is read in full and as it was written: remove options, columns "
                "and pattern, or name a single file of it"
            )
        must = self._missing(columns_of_copy(manifest, self._target).names)
        if must:
            raise InvalidUsage(f"{found} without {must}")
        # The manifest may name files at any depth.
        self._location = self._open_location("*", recursive=True)
        there = {file.name: file for file in await self._location.list_all()}
        gone = [file.path for file in manifest.files if file.path not in there]
        if gone:
            raise InvalidUsage(
                f"{found}, but some of its files are missing: {', '.join(gone[:10])}"
            )
        return [there[file.path] for file in manifest.files]

    def _missing(self, names: Container[str]) -> str:
        """Return which required columns files with these columns lack, and the reason; "" if
        none."""
        absent = [column for column in self._target.columns if column.name not in names]
        must = [c.name for c in absent if not c.nullable and c.name not in self._defaults]
        if must:
            return f"{', '.join(must)}, which may not be NULL"
        computed = [c.name for c in absent if c.name in self._request.computed]
        return f"{', '.join(computed)}, whose defaults are computed only by SQL" if computed else ""

    def progress(self) -> FilesProgress:
        """Return the progress. Never waits."""
        done = self._files[: self._done]
        return FilesProgress(
            len(done),
            len(self._files),
            sum(file.size for file in done),
            sum(file.size for file in self._files),
            self._rows,
        )

    async def pieces(self) -> AsyncGenerator[pa.Table, None]:
        """Yield the rows: the table's columns and `DIFF`, which is always 1.

        They are valid only once the generator has ended without an error. Raises `MalformedFile`,
        which names the file, and `SourceUnreachable`.
        """
        names = self._request.columns or self._target.names
        columns = {column.name: column for column in self._target.columns}
        read = TableSchema(tuple(columns[name] for name in names))
        if self._manifest is not None:
            read = columns_of_copy(self._manifest, self._target)
        keep = TableSchema(tuple(c for c in self._target.columns if c.name in read.names))
        request = self._request
        files = FileReader(
            request.format,
            request.options,
            read,
            keep,
            self._around,
            copied=self._manifest is not None,
        )
        reader = LocationReader(files, self._location)
        while self._done < len(self._files):
            batch = self._location.first_batch(
                self._files[self._done :], FILES_AT_ONCE, BYTES_AT_ONCE
            )
            try:
                async with aclosing(reader.pieces(batch)) as pieces:
                    async for piece in pieces:
                        self._rows += piece.num_rows
                        yield self._whole(piece)
            except MalformedFile as error:
                raise await self._named(reader, batch, error) from None
            self._done += len(batch)
        # At the end: a file that changed after it was listed may have been read in two versions.
        other = await self._location.find_changed(self._files)
        if other is not None:
            raise SourceUnreachable(f"{other} changed while it was being copied: copy again")

    async def _named(
        self, reader: LocationReader, batch: Sequence[FoundFile], error: MalformedFile
    ) -> MalformedFile:
        """Return the error with the malformed file's name, found by reading halves of the batch
        again."""
        while error.path is None and len(batch) > 1:
            half = batch[: len(batch) // 2]
            try:
                async with aclosing(reader.pieces(half)) as pieces:
                    async for _ in pieces:
                        pass
                batch = batch[len(half) :]
                if len(batch) == 1:
                    return MalformedFile(f"{batch[0].path}: {error}", batch[0].path)
            except MalformedFile as found:
                batch, error = half, found
        return error

    def _whole(self, rows: pa.Table) -> pa.Table:
        shape = self._target.arrow()
        columns = [
            rows[field.name] if field.name in rows.column_names
            else pa.repeat(self._defaults.get(field.name, pa.scalar(None, field.type)), len(rows))
            for field in shape
        ]  # fmt: skip
        made = pa.Table.from_arrays(columns, schema=shape)
        ones = pa.array(np.ones(rows.num_rows, np.int64))
        return made.append_column(pa.field(DIFF, pa.int64()), ones)
