"""Ingests the files of a folder or of a path in a bucket: each new file once, as a whole, in order.

Theory of operation. The source scans its folder, reads the new files in order, as many at a time as
`batch_files_max` and `batch_bytes_max` allow, and returns a mark. The position records which files
were ingested (`file_listing`, `object_listing`). It becomes durable together with their rows, so
each file is in the table exactly once, no matter when the service crashes.

Rules for the folder, and likewise for a bucket:
- Files are renamed into the folder when complete, and not written again. A batch with a file that
  changed while it was being read is discarded and read again.
- A file that appears too late, or changed after it was ingested, is not ingested. It is reported as
  a warning (`SourceLag.notes`).
- At a malformed file, the source stops (`MalformedFile`, which names the file). Files before it are
  ingested, and it is retried until it is repaired or removed. Options of Spark's readers can make
  them accept such records.
- Removing a file does not retract its rows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import anyio
import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources.bucket_location import open_location
from actors.connectors.sources.file_listing import FoundFile
from actors.connectors.sources.file_locations import (
    FileLedger,
    FileLocation,
    FileNotice,
    LocationReader,
    restore_paths_in_text,
)
from actors.connectors.sources.file_reading import (
    INFER_FILES,
    FileReader,
    Format,
    MalformedFile,
    check_columns,
    check_options,
    infer,
)
from actors.connectors.sources.generators import at_least, select_exports
from actors.connectors.sources.source import (
    ConnectorContext,
    Given,
    PositionMark,
    RowsWithdrawn,
    SourceConfig,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceRows,
    SourceUnreachable,
)
from actors.durable.object_store.bucket_paths import bucket_path, is_bucket
from actors.durable.object_store.bucket_store import BucketStore, Opener
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import without_user

EXPORT: Final = "rows"
WARNED_NAMES_MAX: Final = 3


class FilesConfig(SourceConfig, frozen=True, kw_only=True, tag="files"):
    """Configuration of a source of files in one format."""

    folder: str
    """Absolute path, or URL of a path in a bucket (s3://bucket/path, gs://…, az://container/…)."""
    format: Format
    columns: tuple[TableColumn, ...] = ()
    """Columns of the files (in order, for CSV without a header). Empty: Spark infers them from the
    first files when the source is created."""
    options: dict[str, str] = msgspec.field(default_factory=dict)
    """Options of Spark's reader for the format."""
    pattern: str = "*"
    """Shell pattern that file names must match."""
    recursive: bool = False
    """True to include subfolders."""
    poll_ms: int = 1_000
    """Interval in ms between scans of the folder."""
    batch_files_max: int = 1_000
    """Maximum number of files in one transaction."""
    batch_bytes_max: int = 256 * 1024 * 1024
    """Maximum number of bytes in one transaction, unless a single file is larger."""

    def check(self) -> None:
        """Raise `InvalidUsage`, which names the invalid option."""
        at_least(self, poll_ms=10, batch_files_max=1, batch_bytes_max=1)
        check_options(self.format, self.options)
        check_columns(self.columns)
        if is_bucket(self.folder):
            bucket_path(self.folder)
        elif not self.folder.startswith("/"):
            raise InvalidUsage(
                f"invalid folder {without_user(self.folder)!r}: expected an absolute path or the "
                "URL of a bucket"
            )


class FilesSource:
    """Ingests the files of one location; implements `connectors.sources.source.SourceConnector`."""

    def __init__(
        self, config: FilesConfig, around: ConnectorContext, opened: Opener = BucketStore.open
    ) -> None:
        self._config = config
        self._around = around
        self._opened = opened
        self._location: FileLocation
        # Reads the files; None if the export was dropped.
        self._reader: LocationReader | None = None
        # The files ingested so far, up to the last mark.
        self._taken: FileLedger
        # True until the mark that fills the export.
        self._first = False
        # New files found by the last scan and not yet read, in order.
        self._pending: Sequence[FoundFile] = ()
        # Number and bytes of new files that the last scan found beyond `_pending`.
        self._behind = 0
        self._behind_bytes = 0
        # Name of the newest file found.
        self._newest = ""
        # The files being read, the generator of their rows (None between batches), and the number
        # of pieces returned.
        self._batch: Sequence[FoundFile] = ()
        self._pieces: AsyncGenerator[pa.Table, None] | None = None
        self._given = 0
        # True after `SourceIdle` until new files are found.
        self._quiet = False
        # Number of files, and the last names, for each kind of warning.
        self._warnings: dict[str, tuple[int, list[str]]] = {}

    # -- open -------------------------------------------------------------------------------------

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Return the export, with its columns inferred if they are not declared. Raises
        `InvalidUsage` and `SourceUnreachable`."""
        await self._opens()
        schema = check_columns(self._config.columns)
        if not schema.columns:
            found = await self._location.scan(self._location.ledger_at(None))
            if not found.new:
                raise InvalidUsage(
                    f"no file in {self._config.folder} to infer columns from: declare columns, or "
                    "add a file"
                )
            schema = await self._inferred(found.new)
        exports = select_exports((SourceExport(EXPORT, schema),), wanted)
        left_out = exports and len(exports[0].schema.columns) < len(schema.columns)
        if left_out and self._config.format == "csv" and not self._config.columns:
            raise InvalidUsage(
                "CSV files without declared columns are read by position: declare all columns to "
                "leave one out"
            )
        return exports

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Return the columns to add, as declared; files ingested from then on are read with them.
        Raises `InvalidUsage`."""
        declared = check_columns(self._config.columns)
        left_out = [each.name for each in columns if _names(declared, each.name)]
        if left_out:
            raise InvalidUsage(
                f"the source declares {', '.join(left_out)}, but this table leaves them out: drop "
                "the table and add it to the source again, which reads all files that still exist"
            )
        check_columns((*export.schema.columns, *columns))
        return tuple(columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Start after a position; None starts with no files ingested. Raises `InvalidUsage` and
        `SourceUnreachable`."""
        await self._opens()
        came = self._location.ledger_at(position)
        names = tuple(export.name for export in exports)
        if any(name != EXPORT for name in names):
            raise InvalidUsage(
                f"a source of files has only the table {EXPORT!r}, not {', '.join(names)}"
            )
        if exports and (exports[0].is_new or EXPORT not in came.exports):
            came = self._location.ledger_at(None)  # no export contains the files ingested so far
        self._first = EXPORT not in came.exports
        self._taken = came.holding(names)
        if exports:
            keep = exports[0].schema
            declared = check_columns(self._config.columns)
            further = tuple(c for c in keep.columns if not _names(declared, c.name))
            read = TableSchema((*declared.columns, *further))
            config = self._config
            reader = FileReader(config.format, config.options, read, keep, self._around)
            self._reader = LocationReader(reader, self._location)

    async def _opens(self) -> None:
        config = self._config
        config.check()
        self._location = open_location(
            config.folder, config.pattern, config.recursive, self._around, self._opened
        )
        await self._location.check()

    async def _inferred(self, files: Sequence[FoundFile]) -> TableSchema:
        config = self._config
        files = self._location.first_batch(files, INFER_FILES, config.batch_bytes_max)
        async with self._location.opened_locally(files) as local:
            try:
                return await infer(config.format, config.options, local, self._around)
            except InvalidUsage as error:
                raise InvalidUsage(restore_paths_in_text(str(error), files, local)) from None

    async def close(self) -> None:
        """Stop reading the current batch."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            with suppress(RuntimeError):  # it is still running, in a `next` that was cancelled
                await pieces.aclose()

    async def forget(self) -> None:
        """Do nothing: there are no external resources."""

    async def taken(self, position: str) -> None:
        """Do nothing: files stay where they are, so there is nothing to acknowledge."""

    def lag(self) -> SourceLag:
        """Return the last known lag. `known` names the newest file that is not ingested yet."""
        count = len(self._pending) + self._behind
        known = self._newest if self._pending else ""
        if count > 1:
            known += f", and {count - 1} before it"
        texts = []
        for kind, (count, names) in self._warnings.items():
            more = f" and {count - len(names)} more" if count > len(names) else ""
            texts.append(f"{kind}: {', '.join(names)}{more}")
        return SourceLag(
            known=known,
            bytes_behind=self._behind_bytes + sum(file.size for file in self._pending),
            notes=tuple(texts),
        )

    # -- read -------------------------------------------------------------------------------------

    async def next(self) -> Given:
        """Return the next rows or event. Raises `SourceUnreachable`, and `MalformedFile` for a file
        that cannot be read."""
        if self._reader is None:
            await anyio.sleep_forever()
        while True:
            if self._pieces is not None:
                given = await self._advance(self._pieces)
                if given is not None:
                    return given
            elif self._pending:
                config = self._config
                files_max, bytes_max = config.batch_files_max, config.batch_bytes_max
                self._begin(self._location.first_batch(self._pending, files_max, bytes_max))
            else:
                await self._look()
                if self._pending:
                    self._quiet = False
                elif self._first:
                    # For an empty folder, a mark without files fills the export.
                    return self._marked()
                elif not self._quiet:
                    self._quiet = True
                    return SourceIdle()
                else:
                    await anyio.sleep(self._config.poll_ms / 1000)

    def _begin(self, files: Sequence[FoundFile]) -> None:
        assert self._reader is not None
        self._batch, self._given = files, 0
        self._pieces = self._reader.pieces(files)

    async def _advance(self, pieces: AsyncGenerator[pa.Table, None]) -> Given | None:
        """Return the next piece of the batch, or its mark; None if another batch was started."""
        try:
            piece = await anext(pieces, None)
        except MalformedFile as error:
            shorter = self._before(error.path)
            if not shorter:
                raise
            given = self._given
            self._begin(shorter)
            # Withdraw the rows returned so far, because some may belong to the malformed file. The
            # files before it are read again and become durable.
            return RowsWithdrawn(EXPORT) if given else None
        if piece is not None:
            self._given += 1
            diffs = pa.array(np.ones(piece.num_rows, np.int64))
            updates = piece.append_column(pa.field(DIFF, pa.int64()), diffs)
            return SourceRows(EXPORT, updates, snapshot=self._first)
        other = await self._location.find_changed(self._batch)
        if other is not None:
            raise SourceUnreachable(
                f"{other} changed while it was being read",
                "write files elsewhere, or under a name that starts with _, and rename them when "
                "complete",
            )
        return self._marked()

    def _before(self, path: str | None) -> Sequence[FoundFile]:
        """Return the files of the batch before the malformed one; the first half if it is not known
        which one is malformed."""
        for number, file in enumerate(self._batch):
            if file.path == path:
                return self._batch[:number]
        return self._batch[: len(self._batch) // 2]

    def _marked(self) -> PositionMark:
        files, self._batch, self._pieces = self._batch, (), None
        filled = (EXPORT,) if self._first else ()
        self._pending = self._pending[len(files) :]
        self._taken = self._taken.plus(files)
        if not self._pending and not self._behind:
            self._first = False
        newest = max((file.modified_ns for file in files), default=None)
        return PositionMark(
            self._taken.position(),
            outside_ms=None if newest is None else newest // 1_000_000,
            messages=len(files),
            filled=filled,
        )

    # -- scan -------------------------------------------------------------------------------------

    async def _look(self) -> None:
        found = await self._location.scan(self._taken)
        self._pending, self._taken = found.new, found.taken
        self._behind, self._behind_bytes = found.behind, found.behind_bytes
        self._newest = found.newest
        for notice in found.notices:
            self._warn(notice)

    def _warn(self, notice: FileNotice) -> None:
        """Record a warning for `SourceLag.notes`."""
        count, known = (0, []) if notice.repeated else self._warnings.get(notice.kind, (0, []))
        if notice.names:
            shown = [*known, *notice.names][-WARNED_NAMES_MAX:]
            self._warnings[notice.kind] = (count + len(notice.names), shown)
        elif notice.repeated:
            self._warnings.pop(notice.kind, None)


def _names(schema: TableSchema, name: str) -> bool:
    """Return whether the schema has a column with this name; case-insensitive, as in Spark."""
    return name.lower() in {each.lower() for each in schema.names}
