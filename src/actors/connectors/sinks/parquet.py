"""Parquet files in a folder or a bucket: an object's changes as they come, or its contents once.

Theory of operation. A commit is a manifest, ``_manifests/N.json``: the next number, the interval of
times, and the files that hold it. Files are written and made durable first; the manifest is written
last, if its number is still free (`sink_storage`): so only one of two writers gets that number, and
the other is `WriterFenced`. The newest manifest has the durable upper.

Files of changes have the object's columns, `_time` and `_diff`, a row per update; those of contents
have the object's columns, and as many copies of a row as there are.
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
    """Files in `folder`: below `sink_dir`, or a URL at or below one of `sink_buckets`."""

    folder: str
    once: bool = False
    """True to write the contents once; else the changes, as they come."""
    creation: str = ""
    """Tells this sink from an earlier one of the same id; set when it is created."""


class BatchManifest(msgspec.Struct, frozen=True):
    """One commit. Paths are relative to the folder that holds `_manifests`."""

    version: int
    sink: ObjectId
    creation: str
    writer: str
    number: int
    holds: str
    """``changes`` or ``contents``."""
    lower: Frontier | None
    """Least time of the batch; in the first, that of the contents; None: there are none yet."""
    upper: Frontier | None
    """Upper up to which everything is there; None: nothing is there yet."""
    ended: bool
    """True if no more will come."""
    schema: tuple[TableColumn, ...]
    rows: int
    bytes: int
    files: tuple[WrittenFile, ...]


class ParquetSink:
    """Writes one folder. See `SinkConnector`."""

    def __init__(
        self,
        config: ParquetConfig,
        outlet: SinkStorage,
        sink: ObjectId,
        token: str,
        settings: Settings,
        clock: ActorClock,
    ) -> None:
        """Make a sink. `token`: a unique name of this writer, in the names of its files."""
        self.once = config.once
        self._sink = sink
        self._creation = config.creation
        self._token = token
        self._outlet = outlet
        self._threads = SinkThreads(
            clock, settings.sink_deadline_ms, outlet.where, private=outlet.private
        )
        self._staging = outlet.staging(token)
        self._schema: TableSchema
        self._shape: pa.Schema
        self._number = 0
        """Number of the newest manifest."""
        self._upper: Frontier | None = None
        self._files: OutputFiles | None = None
        self._counts = SinkStatistics()

    @property
    def keeps_times(self) -> bool:
        """Return True for changes, False for contents."""
        return not self.once

    def statistics(self) -> SinkStatistics:
        """See `SinkConnector`."""
        return self._counts

    # -- open -------------------------------------------------------------------------------------

    async def check(self, schema: TableSchema) -> None:
        """See `SinkConnector`."""
        self._check_columns(schema)
        await self._threads.run(self._newest, "look into the folder")

    def _check_columns(self, schema: TableSchema) -> None:
        check_columns(schema, "a Parquet file", changes=not self.once)
        self._schema = schema
        self._shape = schema.arrow() if self.once else of_changes(schema)

    async def open(self, schema: TableSchema) -> Frontier | None:
        """See `SinkConnector`."""
        self._check_columns(schema)
        await self._threads.run(self._begin, "open the folder")
        await self._threads.run(
            # Safe only now: `_begin` took the next number, so no earlier writer can commit its
            # files any more.
            lambda: self._staging.remove_orphans(self._upper),
            "remove what was not committed",
        )
        return self._upper

    def _begin(self) -> None:
        self._newest()
        # Only now: `_newest` has refused a folder with files of others.
        self._outlet.begin(MANIFESTS)
        for _ in range(_ATTEMPTS_MAX):
            newest = self._newest()
            self._number = 0 if newest is None else newest.number
            self._upper = None if newest is None else newest.upper
            if self._add(self._manifest(self._upper, self._upper, [])):
                self._outlet.tidy(MANIFESTS)
                return
        raise SourceUnreachable(
            f"{self._outlet.where}: others opened it {_ATTEMPTS_MAX} times while it was opened"
        )

    def _newest(self) -> BatchManifest | None:
        """Return the newest manifest. Raises `InvalidUsage` when the place holds anything else."""
        newest = self._outlet.newest(MANIFESTS)
        if newest is None:
            other = self._outlet.other_than(MANIFESTS)
            if other is not None:
                raise InvalidUsage(
                    f"{self._outlet.where} holds other files ({other}): choose another folder"
                )
            return None
        return self._read(f"{MANIFESTS}/{newest}")

    def _read(self, name: str) -> BatchManifest:
        path = f"{self._outlet.where}/{name}"
        document = self._outlet.read(name)
        if document is None:
            raise StorageError(f"{path} was removed meanwhile", determinate=True)
        try:
            found = msgspec.json.decode(document.data, type=BatchManifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"{path} is not the manifest of a sink: {error}") from None
        if (found.sink, found.creation) != (self._sink, self._creation):
            raise InvalidUsage(
                f"{self._outlet.where} holds what another sink ({found.sink}) wrote: choose "
                "another folder"
            )
        if found.schema != self._schema.columns or found.holds != self._holds:
            raise InvalidUsage(
                f"{self._outlet.where} holds {found.holds} of other columns than the sink is to "
                "write: choose another folder"
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
        """Write a manifest; return False when its number is taken."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        name = f"{MANIFESTS}/{manifest.number:020d}.json"
        if not self._outlet.write_new(name, text, self._token):
            return False
        self._number = manifest.number
        return True

    async def write(self, updates: pa.Table) -> None:
        """See `SinkConnector`."""
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
        """See `SinkConnector`."""
        files, self._files = self._files, None
        written = [] if files is None else await self._threads.run(files.finish, "write files")
        manifest = self._manifest(lower, upper, written)
        if not await self._threads.run(lambda: self._add(manifest), "write a manifest"):
            with suppress(SourceUnreachable):
                await self._threads.run(self._staging.remove_staged, "remove what it wrote")
            raise WriterFenced(
                f"another writer of this sink has taken over {self._outlet.where} (manifest "
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
        """See `SinkConnector`. Uncommitted files are removed by the next `open`."""
        files, self._files = self._files, None
        if not self._threads.given_up:
            if files is not None:
                with suppress(pa.ArrowException, OSError):  # no manifest names them
                    files.abandon()
            self._staging.close()
