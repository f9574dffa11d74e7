"""Writes a Delta Lake table in a folder or bucket: an object's changes, or its current contents.

Theory of operation. Data files are written and made durable first. Then one commit of the table
names them, and records the upper as an application transaction with the sink's id. So rows and
upper become visible together.

`changes`: each batch appends its updates, one row each, with `_time` and `_diff`. `current`: the
table equals the object's contents as of its upper; files that contain rows to be deleted are
rewritten without them (`delta_rewrite`).

Writers. `open` increments a second application transaction, the writer's number (a fencing token),
which each commit repeats. A writer that finds a commit of the sink with another number gets
`WriterFenced`.

The sink does not run OPTIMIZE or set table properties. It runs VACUUM only on tables of current
contents. The library writes checkpoints and cleans up the log.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.connectors.sinks.delta_rewrite import FileRewrites, TableFile, stats_of
from actors.connectors.sinks.formats import (
    FILE_BYTES_TARGET,
    SINK_DIFF_COLUMN,
    SINK_TIME_COLUMN,
    OutputFiles,
    check_columns,
    of_changes,
)
from actors.connectors.sinks.sink import SinkStatistics
from actors.connectors.sinks.sink_storage import SinkStorage
from actors.connectors.sinks.sink_threads import SinkThreads
from actors.connectors.sources.source import SourceUnreachable
from actors.model.plan.copy_manifest import WrittenFile
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.runtime.errors import InvalidUsage, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import Frontier, ObjectId
from actors.runtime.settings import Settings

if TYPE_CHECKING:
    from deltalake import DeltaTable
from actors.connectors.sinks.delta_log import WRITER, DeltaCommit, check_others, check_table, parsed

log = logging.getLogger("penstock.sinks")

_ATTEMPTS_MAX: Final = 20
"""Maximum attempts at one commit while other writers keep committing before it."""
_VACUUM_MS: Final = 3_600_000
_LOG: Final = "_delta_log"


class DeltaConfig(msgspec.Struct, frozen=True, tag="delta", tag_field="kind"):
    """Configuration: a table in `folder`, which is below `sink_dir`, or a URL at or below one of
    `sink_buckets`."""

    folder: str
    mode: Literal["changes", "current"] = "changes"
    retain_hours: int = 168
    """Hours for which a `current` table keeps files that it no longer names, for readers of old
    versions."""
    creation: str = ""
    """Distinguishes this sink from an earlier one with the same id. Set when the sink is
    created."""


class DeltaSink:
    """Writes one Delta table; implements `SinkConnector`."""

    once = False

    def __init__(
        self,
        config: DeltaConfig,
        storage: SinkStorage,
        sink: ObjectId,
        token: str,
        settings: Settings,
        clock: ActorClock,
    ) -> None:
        """Make a sink. `token` is a unique name of this writer, used in the names of its files."""
        self._contents = config.mode == "current"
        self._retain_hours = config.retain_hours
        self._storage = storage
        self._where = storage.where
        self._application = f"penstock/{sink}/{config.creation}"
        self._writers = f"{self._application}/writer"
        self._clock = clock
        what = f"Delta table {storage.where}"
        self._threads = SinkThreads(clock, settings.sink_deadline_ms, what, private=storage.private)
        self._token = token
        self._staging = storage.staging(token)
        self._table: DeltaTable
        # Latest known version of the table, and the number of this writer; set by `open` and
        # commits.
        self._version = -1
        self._writer = 0
        self._upper: Frontier | None = None
        """Durable upper; None if nothing was committed yet."""
        self._shape: pa.Schema
        self._rewrites: FileRewrites
        self._files: OutputFiles | None = None
        """Files of the current batch; None before its first piece."""
        self._vacuumed_ms = clock.monotonic_ms()
        """Monotonic time of the last vacuum."""
        self._counts = SinkStatistics()

    @property
    def keeps_times(self) -> bool:
        """Return True for `changes`, False for `current`."""
        return not self._contents

    def statistics(self) -> SinkStatistics:
        """Return the counters since `open`."""
        return self._counts

    # -- open -------------------------------------------------------------------------------------

    async def check(self, schema: TableSchema) -> None:
        """Check the columns, and that the folder is empty or contains this sink's table.

        Raises `InvalidUsage` and `SourceUnreachable`.
        """
        self._check_columns(schema)
        await self._threads.run(self._check, "check the table")

    def _check_columns(self, schema: TableSchema) -> None:
        check_columns(schema, "a Delta table", changes=not self._contents)
        self._shape = schema.arrow() if self._contents else of_changes(schema)
        self._rewrites = FileRewrites(self._staging, schema)

    def _check(self) -> bool:
        """Return whether the table exists. Raises `InvalidUsage` if the folder contains anything
        else."""
        _library()
        # The library's own check of a bucket (`is_deltatable`) holds the GIL.
        if not self._storage.numbered(_LOG):
            other = self._storage.other_than(_LOG)
            if other is not None:
                raise InvalidUsage(
                    f"{self._where} is not a Delta table and contains other files ({other}): "
                    "choose another folder"
                )
            return False
        table = self._load()
        if table.transaction_version(self._writers) is None:
            raise InvalidUsage(
                f"{self._where} contains a Delta table that this sink did not create: choose "
                "another folder"
            )
        self._check_table(table)
        return True

    async def open(self, schema: TableSchema) -> Frontier | None:
        """Create or load the table, fence earlier writers, and return the durable upper.

        Raises `SourceUnreachable`, `InvalidUsage` and `WriterFenced`.
        """
        self._check_columns(schema)
        await self._threads.run(self._begin, "open the table")
        await self._threads.run(
            # Only safe now: with the new number in the log, no earlier writer can commit its files.
            lambda: self._staging.remove_orphans(self._upper),
            "remove uncommitted files",
        )
        return self._upper

    def _begin(self) -> None:
        library = _library()
        if not self._check():
            self._storage.begin("")
            # Another writer may have created it; `_check` below accepts only a table of this sink.
            with suppress(library.exceptions.DeltaError):
                library.DeltaTable.create(
                    self._where,
                    self._shape,
                    mode="error",
                    storage_options=self._storage.options,
                    commit_properties=self._properties([(self._writers, 0)]),
                )
                self._storage.sync(_entry(0))
            self._check()
        for _ in range(_ATTEMPTS_MAX):
            self._table = table = self._load()
            self._version = table.version()
            self._check_table(table)
            if self._contents:
                check_others(self._since_ours(), self._where, contents=True)
            self._writer = (table.transaction_version(self._writers) or 0) + 1
            self._upper = table.transaction_version(self._application)
            if self._transact([], [(self._writers, self._writer)]):
                return
        raise SourceUnreachable(
            f"{self._where}: other writers committed {_ATTEMPTS_MAX} times while it was being "
            "opened"
        )

    def _load(self) -> DeltaTable:
        library = _library()
        try:
            table: DeltaTable = library.DeltaTable(
                self._where, storage_options=self._storage.options
            )
        except (library.exceptions.DeltaError, OSError) as error:
            raise self._error("read its log", error, determinate=True) from None
        return table

    def _refresh(self) -> None:
        library = _library()
        try:
            self._table.update_incremental()
        except (library.exceptions.DeltaError, OSError) as error:
            raise self._error("read its log", error, determinate=False) from None

    def _error(self, what: str, error: Exception | None, *, determinate: bool) -> StorageError:
        why = "" if error is None else f": {self._threads.error_text(error)}"
        return StorageError(f"could not {what}{why}", determinate=determinate)

    def _check_table(self, table: DeltaTable) -> None:
        features = table.protocol().writer_features or []
        there = pa.schema(table.schema().to_arrow())
        check_table(
            {field.name: str(field.type) for field in there},
            {field.name: str(field.type) for field in self._expected()},
            table.metadata().partition_columns,
            table.metadata().configuration,
            features,
            self._where,
            contents=self._contents,
        )

    def _expected(self) -> pa.Schema:
        """Return the sink's columns with the types that the library reports."""
        library = _library()
        arro = library.Schema.from_arrow(self._shape).to_arrow()
        return pa.schema(arro)

    # -- the log ----------------------------------------------------------------------------------

    def _commit_of(self, version: int) -> DeltaCommit | None:
        lines = self._storage.read(_entry(version))
        return None if lines is None else parsed(version, lines.data)

    def _ours(self, commit: DeltaCommit) -> bool:
        names = {each.app_id for each in commit.transactions}
        return bool(names & {self._application, self._writers})

    def _since_ours(self) -> list[DeltaCommit]:
        """Return the commits of others since the last one of this sink, newest first."""
        found: list[DeltaCommit] = []
        for version in range(self._version, -1, -1):
            commit = self._commit_of(version)
            if commit is None:
                raise InvalidUsage(
                    f"{self._where}: its log no longer contains the sink's last commit, so changes "
                    "by others since then are unknown: drop the sink, remove the table, and "
                    "create the sink again"
                )
            if self._ours(commit):
                break
            found.append(commit)
        return found

    def _properties(self, transactions: list[tuple[str, int]]) -> Any:
        library = _library()
        return library.CommitProperties(
            # No retries by the library: conflicts are examined here first. The library commits with
            # a link in a folder and with a conditional request in a bucket, so it never replaces a
            # version.
            max_commit_retries=0,
            custom_metadata={WRITER: self._token},
            app_transactions=[library.Transaction(*each) for each in transactions],
        )

    def _transact(self, actions: list[Any], transactions: list[tuple[str, int]]) -> bool:
        """Commit the version after the latest known one. Return False if others committed it and
        their commits do not conflict; the table is then at their version.

        Raises `WriterFenced`, `InvalidUsage` and `StorageError`.
        """
        library = _library()
        failure: Exception | None = None
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                commit_properties=self._properties(transactions),
            )
        except (library.exceptions.DeltaError, OSError, ValueError) as error:
            failure = error  # indeterminate: the log shows whether it happened
        before = self._version
        self._refresh()
        self._version = self._table.version()
        new = [self._commit_of(version) for version in range(before + 1, self._version + 1)]
        others: list[DeltaCommit] = []
        done = False
        for commit in new:
            if commit is None:
                raise StorageError(
                    f"versions after {before} are missing from the table's log", determinate=False
                )
            found = {(each.app_id, each.version) for each in commit.transactions}
            # The token and the transactions identify our own commit, whatever error the call
            # raised.
            if commit.writer == self._token and found == set(transactions):
                done = True
                self._staging.committed()
            elif self._ours(commit):
                raise WriterFenced(
                    f"another writer of this sink has taken over {self._where} (version "
                    f"{commit.version} of the table)",
                    determinate=not done,
                )
            elif not done:
                others.append(commit)
        if done:
            self._storage.sync(_entry(self._version))
            return True
        if not others:
            raise self._error("commit", failure, determinate=False)
        self._check_table(self._table)
        check_others(others, self._where, contents=self._contents)
        return False

    # -- batches ----------------------------------------------------------------------------------

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
        if self._contents:
            self._rewrites.remove(
                updates.filter(pc.less(updates[DIFF], pa.scalar(0, pa.int64()))), self._upper
            )
            self._files.add(updates.filter(pc.greater(updates[DIFF], pa.scalar(0, pa.int64()))))
            return
        names = [
            name for name in self._shape.names if name not in (SINK_TIME_COLUMN, SINK_DIFF_COLUMN)
        ]
        rows = updates.select([*names, TIME, DIFF]).rename_columns(self._shape.names)
        self._files.append(rows)

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Commit the batch and `upper` as one version of the table.

        Raises `SourceUnreachable`, `InvalidUsage` and `WriterFenced`.
        """
        files, self._files = self._files, None
        try:
            added = [] if files is None else await self._threads.run(files.finish, "write files")
            size = await self._commit(added, upper)
        except (WriterFenced, InvalidUsage):
            # Only removes files that no commit names; for the others, `_transact` has called
            # `committed`.
            if not self._threads.given_up:
                await self._threads.run(self._staging.remove_staged, "remove uncommitted files")
            raise
        self._upper = upper
        await self._threads.run(self._rewrites.forget, "remove temporary files")
        self._counts = msgspec.structs.replace(
            self._counts,
            rows_staged=0,
            rows_committed=self._counts.rows_committed + self._counts.rows_staged,
            bytes_committed=self._counts.bytes_committed + size,
            commits=self._counts.commits + 1,
        )
        await self._vacuum()

    async def _commit(self, added: list[WrittenFile], upper: Frontier) -> int:
        """Commit the files; return the number of bytes added."""
        transactions = [(self._application, upper), (self._writers, self._writer)]
        add = _library().AddAction
        for _ in range(_ATTEMPTS_MAX):
            actions = await self._threads.run(lambda: [self._add(each) for each in added], "add")
            if self._contents:
                actions += await self._rewritten()
            if await self._threads.run(partial(self._transact, actions, transactions), "commit"):
                return sum(action.size for action in actions if isinstance(action, add))
        raise SourceUnreachable(
            f"{self._where}: other writers committed {_ATTEMPTS_MAX} times before a batch could be "
            "committed",
            "make the other writers of the table commit less often",
        )

    async def _rewritten(self) -> list[Any]:
        """Return the actions that delete rows from the latest known version."""
        there = await self._threads.run(self._listed, "list the table's files")
        done = await self._rewrites.run(there, self._threads, self._upper)
        actions: list[Any] = []
        library, now = _library(), self._clock.now_ms()
        for file in done.removed:
            # Moving rows is not a data change: readers of the table's changes skip such files.
            moved = file.path in done.moved
            actions.append(library.RemoveAction(file.path, not moved, now, file.bytes))
        for written in done.added:
            add = await self._threads.run(
                partial(self._add, written, done.moved),
                "add",
            )
            actions.append(add)
        return actions

    def _listed(self) -> list[TableFile]:
        library = _library()
        try:
            table = pa.table(self._table.get_add_actions(flatten=True))
        except library.exceptions.DeltaError as error:
            raise self._error("list its files", error, determinate=True) from None
        return [TableFile.of(row) for row in table.to_pylist()]

    def _add(self, file: WrittenFile, moved: frozenset[str] = frozenset()) -> Any:
        return _library().AddAction(
            path=file.path,
            size=file.bytes,
            partition_values={},
            modification_time=self._clock.now_ms(),
            data_change=file.path not in moved,
            stats=self._stats(file),
        )

    def _stats(self, file: WrittenFile) -> str:
        with self._staging.reading(file.path) as source:
            return stats_of(source, file.rows)

    async def _vacuum(self) -> None:
        """Occasionally remove files that a table of current contents no longer names."""
        now = self._clock.monotonic_ms()
        if not self._contents or now - self._vacuumed_ms < _VACUUM_MS:
            return
        self._vacuumed_ms = now
        library = _library()

        def vacuum() -> None:
            try:
                self._table.vacuum(
                    retention_hours=self._retain_hours,
                    dry_run=False,
                    enforce_retention_duration=False,
                )
            except (library.exceptions.DeltaError, OSError) as error:
                log.warning(
                    "%s could not be vacuumed: %s", self._where, self._threads.error_text(error)
                )

        await self._threads.run(vacuum, "vacuum the table")

    async def close(self) -> None:
        """Release all resources. The next `open` removes uncommitted files."""
        files, self._files = self._files, None
        if not self._threads.given_up:
            if files is not None:
                with suppress(pa.ArrowException, OSError):  # no commit names them
                    files.abandon()
            self._staging.close()


def _entry(version: int) -> str:
    """Return the path of a version in the log, relative to the table's folder."""
    return f"{_LOG}/{version:020d}.json"


def _library() -> Any:
    """Import the `deltalake` package with the modules used here. Raises `InvalidUsage` if it is not
    installed."""
    try:
        import deltalake
        import deltalake.exceptions
        import deltalake.transaction
    except ImportError:
        raise InvalidUsage(
            "a sink of kind delta needs the package deltalake, which is not installed: pip "
            "install 'penstock-views[delta]'"
        ) from None
    return _Library(deltalake)


class _Library:
    """The `deltalake` library together with names from its modules."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.exceptions = library.exceptions
        self.AddAction = library.transaction.AddAction
        self.RemoveAction = library.transaction.RemoveAction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)
