"""Writes Parquet files in a folder or bucket: an object's changes continuously, or its contents
once.

Theory of operation. A commit is a manifest, ``_manifests/N.json``: the next number, the interval of
times, and the files that contain its updates. Files are written and made durable first. The
manifest is written last, if its number is still free (`sink_storage`). So only one of two writers
gets a number, and the other gets `WriterFenced`. The newest manifest contains the durable upper.

Files of changes have the object's columns, `_time` and `_diff`, with one row per update. Files of
contents have the object's columns, with as many copies of a row as there are.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec
import pyarrow as pa

from actors.connectors.sinks.formats import (
    FILE_BYTES_TARGET,
    OutputFiles,
    check_columns,
    of_changes,
)
from actors.connectors.sinks.sink import SinkStatistics
from actors.connectors.sinks.sink_storage import SinkStorage
from actors.connectors.sinks.sink_threads import SinkThreads
from actors.connectors.sources.source import SourceUnreachable
from actors.model.plan.copy_manifest import WrittenFile
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import EMPTY, Frontier, ObjectId
from actors.runtime.settings import Settings

MANIFESTS: Final = "_manifests"
VERSION: Final = 1
"""Version of the manifests' format."""
_ATTEMPTS_MAX: Final = 20


class ParquetConfig(msgspec.Struct, frozen=True, tag="parquet", tag_field="kind"):
    """Configuration: files in `folder`, which is below `sink_dir`, or a URL at or below one of
    `sink_buckets`."""

    folder: str
    once: bool = False
    """True to write the contents once, False to write changes continuously."""
    creation: str = ""
    """Distinguishes this sink from an earlier one with the same id. Set when the sink is
    created."""


class BatchManifest(msgspec.Struct, frozen=True):
    """One commit. Paths are relative to the folder that contains `_manifests`."""

    version: int
    sink: ObjectId
    creation: str
    writer: str
    number: int
    holds: str
    """``changes`` or ``contents``."""
    lower: Frontier | None
    """Lower bound of the batch's times; in the first batch, the time of the contents. None if there
    are none yet."""
    upper: Frontier | None
    """Frontier up to which everything is written; None if nothing is."""
    ended: bool
    """True if no more batches will follow."""
    schema: tuple[TableColumn, ...]
    rows: int
    bytes: int
    files: tuple[WrittenFile, ...]


class ParquetSink:
    """Writes the files of one folder; implements `SinkConnector`."""

    def __init__(
        self,
        config: ParquetConfig,
        storage: SinkStorage,
        sink: ObjectId,
        token: str,
        settings: Settings,
        clock: ActorClock,
    ) -> None:
        """Make a sink. `token` is a unique name of this writer, used in the names of its files."""
        self.once = config.once
        self._sink = sink
        self._creation = config.creation
        self._token = token
        self._storage = storage
        self._threads = SinkThreads(
            clock, settings.sink_deadline_ms, storage.where, private=storage.private
        )
        self._staging = storage.staging(token)
        self._schema: TableSchema
        self._shape: pa.Schema
        self._number = 0
        """Number of the newest manifest."""
        self._upper: Frontier | None = None
        """Durable upper; None if nothing was committed yet."""
        self._files: OutputFiles | None = None
        """Files of the current batch; None before its first piece."""
        self._counts = SinkStatistics()

    @property
    def keeps_times(self) -> bool:
        """Return True for changes, False for contents."""
        return not self.once

    def statistics(self) -> SinkStatistics:
        """Return the counters since `open`."""
        return self._counts

    # -- open -------------------------------------------------------------------------------------

    async def check(self, schema: TableSchema) -> None:
        """Check the columns, and that the folder is empty or belongs to this sink.

        Raises `InvalidUsage` and `SourceUnreachable`.
        """
        self._check_columns(schema)
        await self._threads.run(self._newest, "check the folder")

    def _check_columns(self, schema: TableSchema) -> None:
        check_columns(schema, "a Parquet file", changes=not self.once)
        self._schema = schema
        self._shape = schema.arrow() if self.once else of_changes(schema)

    async def open(self, schema: TableSchema) -> Frontier | None:
        """Fence earlier writers by adding a manifest, and return the durable upper.

        Raises `SourceUnreachable`, `InvalidUsage` and `WriterFenced`.
        """
        self._check_columns(schema)
        await self._threads.run(self._begin, "open the folder")
        await self._threads.run(
            # Only safe now: `_begin` took the next number, so no earlier writer can commit its
            # files.
            lambda: self._staging.remove_orphans(self._upper),
            "remove uncommitted files",
        )
        return self._upper

    def _begin(self) -> None:
        self._newest()
        # Not before `_newest` has checked that the folder contains no other files.
        self._storage.begin(MANIFESTS)
        for _ in range(_ATTEMPTS_MAX):
            newest = self._newest()
            self._number = 0 if newest is None else newest.number
            self._upper = None if newest is None else newest.upper
            if self._add(self._manifest(self._upper, self._upper, [])):
                self._storage.tidy(MANIFESTS)
                return
        raise SourceUnreachable(
            f"{self._storage.where}: other writers opened it {_ATTEMPTS_MAX} times while it was "
            "being opened"
        )

    def _newest(self) -> BatchManifest | None:
        """Return the newest manifest; None if there is none. Raises `InvalidUsage` if the folder
        contains anything else."""
        newest = self._storage.newest(MANIFESTS)
        if newest is None:
            other = self._storage.other_than(MANIFESTS)
            if other is not None:
                raise InvalidUsage(
                    f"{self._storage.where} contains other files ({other}): choose another folder"
                )
            return None
        return self._read(f"{MANIFESTS}/{newest}")

    def _read(self, name: str) -> BatchManifest:
        path = f"{self._storage.where}/{name}"
        document = self._storage.read(name)
        if document is None:
            raise StorageError(f"{path} was removed while it was being read", determinate=True)
        try:
            found = msgspec.json.decode(document.data, type=BatchManifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"invalid sink manifest {path}: {error}") from None
        if (found.sink, found.creation) != (self._sink, self._creation):
            raise InvalidUsage(
                f"{self._storage.where} belongs to another sink ({found.sink}): choose another "
                "folder"
            )
        if found.schema != self._schema.columns or found.holds != self._holds:
            raise InvalidUsage(
                f"{self._storage.where} contains {found.holds} with different columns or of a "
                "different kind than the sink writes: choose another folder"
            )
        return found

    @property
    def _holds(self) -> str:
        return "contents" if self.once else "changes"

    # -- batches ----------------------------------------------------------------------------------

    def _manifest(
        self, lower: Frontier | None, upper: Frontier | None, files: list[WrittenFile]
    ) -> BatchManifest:
        return BatchManifest(
            VERSION,
            self._sink,
            self._creation,
            self._token,
            self._number + 1,
            self._holds,
            lower,
            upper,
            upper is not None and upper >= EMPTY,
            self._schema.columns,
            sum(file.rows for file in files),
            sum(file.bytes for file in files),
            tuple(files),
        )

    def _add(self, manifest: BatchManifest) -> bool:
        """Write a manifest; return False if its number is taken."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        name = f"{MANIFESTS}/{manifest.number:020d}.json"
        if not self._storage.write_new(name, text, self._token):
            return False
        self._number = manifest.number
        return True

    async def write(self, updates: pa.Table) -> None:
        """Write a piece of the batch to files. Raises `SourceUnreachable`, and `InvalidUsage` for a
        value that cannot be written."""
        await self._threads.run(lambda: self._write(updates), "write a piece")
        staged = self._counts.rows_staged + updates.num_rows
        self._counts = msgspec.structs.replace(self._counts, rows_staged=staged)

    def _write(self, updates: pa.Table) -> None:
        if self._files is None:
            place = self._staging.place(self._upper)
            self._files = OutputFiles(place, self._shape, "parquet", FILE_BYTES_TARGET)
        if self.once:
            self._files.add(updates)
            return
        rows = updates.select([*self._schema.names, TIME, DIFF])
        self._files.append(rows.rename_columns(self._shape.names))

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Commit the batch and `upper` with the next manifest. Raises `SourceUnreachable` and
        `WriterFenced`."""
        files, self._files = self._files, None
        written = [] if files is None else await self._threads.run(files.finish, "write files")
        manifest = self._manifest(lower, upper, written)
        if not await self._threads.run(lambda: self._add(manifest), "write a manifest"):
            with suppress(SourceUnreachable):
                await self._threads.run(self._staging.remove_staged, "remove uncommitted files")
            raise WriterFenced(
                f"another writer of this sink has taken over {self._storage.where} (manifest "
                f"{manifest.number})",
                determinate=True,
            )
        self._staging.committed()
        self._upper = upper
        self._counts = msgspec.structs.replace(
            self._counts,
            rows_staged=0,
            rows_committed=self._counts.rows_committed + self._counts.rows_staged,
            bytes_committed=self._counts.bytes_committed + manifest.bytes,
            commits=self._counts.commits + 1,
        )

    async def close(self) -> None:
        """Release all resources. The next `open` removes uncommitted files."""
        files, self._files = self._files, None
        if not self._threads.given_up:
            if files is not None:
                with suppress(pa.ArrowException, OSError):  # no manifest names them
                    files.abandon()
            self._staging.close()
