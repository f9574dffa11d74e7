"""The shards of one source: those of its exports, and the remap shard, which binds positions to
times.

Theory of operation. The *remap* shard has one row at each time: the position up to which the source
was ingested, and the exports that failed. A batch is ONE append to that shard and those of all
exports. So contents and position agree at every time, a crash leaves both or neither, and all
readers see each position at the same time.

Rules: no shard is sealed before the first mark. The shard of an export that is added later is not
sealed before the mark that fills it; its upper stays at 0 until then. If columns were added to an
export since the task started, an append fails with `WriterFenced`, and the next task knows the
columns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final

import anyio
import msgspec
import pyarrow as pa

from actors.connectors.ingest.staging import IngestBatch, SourceFault
from actors.durable.persist import BatchPart, PersistClient, ShardAppend, UpperMismatch
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import between, concat, consolidate, error_update
from actors.runtime.errors import CorruptData, WriterFenced
from actors.runtime.memory_ledger import MemoryLedger
from actors.runtime.progress import Frontier, ShardId, Time

REMAP: Final = TableSchema(
    (TableColumn("position", "string", False), TableColumn("failed", "string", False))
)
"""Schema of a remap shard. `failed` is a JSON object that maps exports to errors."""


class ExportShard(msgspec.Struct, frozen=True):
    """The shard and schema of an export."""

    shard: ShardId
    schema: TableSchema


class IngestShards:
    """Reads and appends to the shards of one source.

    Call `open` first. Make one call at a time, except for `write`.
    """

    def __init__(
        self, persist: PersistClient, remap: ShardId, exports: Mapping[str, ExportShard]
    ) -> None:
        self._persist = persist
        self._remap = remap
        self.exports = dict(exports)
        self._uppers: dict[ShardId, Frontier] = {}
        """Upper of each shard, as of the last append or `open`."""
        self.position: str | None = None
        """Durable position; None if nothing was ingested yet."""
        self.failed: dict[str, str] = {}
        """Errors of failed exports. An export that was dropped and added again starts without
        one."""
        self._bound: tuple[str, dict[str, str]] | None = None
        """Position and failures in the remap shard; None if it is empty."""

    @property
    def ledger(self) -> MemoryLedger:
        """Return the ledger that accounts for the memory of staged rows."""
        return self._persist.ledger

    @property
    def upper(self) -> Frontier:
        """Return the upper of the remap shard. Filled exports are sealed up to it."""
        return self._uppers[self._remap]

    @property
    def begun(self) -> bool:
        """Return whether anything has been sealed yet."""
        return self.upper > 0

    @property
    def sealed(self) -> tuple[tuple[str, Frontier], ...]:
        """Return (export, upper) of all exports that are filled."""
        uppers = ((name, self._uppers[each.shard]) for name, each in self.exports.items())
        return tuple((name, upper) for name, upper in uppers if upper)

    def is_empty(self, export: str) -> bool:
        """Return whether an export has not been filled yet."""
        return not self._uppers[self.exports[export].shard]

    async def open(self) -> None:
        """Read the durable position and the uppers from the store.

        Raises `UnknownObject`, `CorruptData` and `StorageError`, and `WriterFenced` if an export's
        columns have changed.
        """
        shards = [self._remap, *(export.shard for export in self.exports.values())]
        # From the store: parts are written with the newest schema that this process knows, and
        # another process may have added columns.
        self._uppers = {shard: await self._persist.recent_upper(shard) for shard in shards}
        for export in self.exports.values():
            columns = (await self._persist.state(export.shard)).schema
            if columns != export.schema:
                raise WriterFenced(
                    f"the schema of shard {export.shard} of this source is now {columns.ddl()}, "
                    f"not {export.schema.ddl()}",
                    determinate=True,
                )
        self.position, self.failed, self._bound = None, {}, None
        if self.upper == 0:
            return
        rows = consolidate((await self._contents()).drop_columns([TIME])).to_pylist()
        if len(rows) > 1 or any(row[DIFF] != 1 for row in rows):
            raise CorruptData(
                f"remap shard {self._remap} has {len(rows)} positions at {self.upper - 1}, "
                "expected one: restore the stores from a backup",
                determinate=True,
            )
        for row in rows:
            self.position = row["position"]
            failed = msgspec.json.decode(row["failed"], type=dict[str, str])
            self._bound = (row["position"], failed)
            self.failed = {
                name: error
                for name, error in failed.items()
                if name in self.exports and not self.is_empty(name)
            }

    async def _contents(self) -> pa.Table:
        reader = await self._persist.open_reader(self._remap, f"ingest/{self._remap}")
        try:
            parts, _ = await reader.snapshot(self.upper - 1)
            tables = [await self._persist.fetch(part, REMAP) for part in parts]
        finally:
            await reader.close()
        return concat(tables, REMAP.arrow_updates())

    async def rows(self, export: str) -> AsyncIterator[pa.Table]:
        """Yield the durable updates of an export, part by part. Raises `StorageError`."""
        own = self.exports[export]
        upper = self._uppers[own.shard]
        if upper == 0:
            return
        reader = await self._persist.open_reader(own.shard, f"ingest/{own.shard}")
        try:
            parts, _ = await reader.snapshot(upper - 1)
            for part in parts:
                yield between(await self._persist.fetch(part, own.schema), 0, upper)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()

    async def fetch(self, export: str, part: BatchPart) -> pa.Table:
        """Return the updates in a part that this task wrote. Raises `StorageError`."""
        return await self._persist.fetch(part, self.exports[export].schema)

    async def write(self, export: str, updates: pa.Table) -> tuple[BatchPart, ...]:
        """Write an export's updates as durable parts, which are not appended yet. Raises
        `StorageError`."""
        return await self._persist.write_parts(self.exports[export].shard, updates)

    async def write_all(self, tables: Mapping[str, pa.Table]) -> dict[str, tuple[BatchPart, ...]]:
        """Write parts for several exports, all or none. Raises `StorageError`."""
        written: dict[str, tuple[BatchPart, ...]] = {}
        try:
            for export, updates in tables.items():
                written[export] = await self.write(export, updates)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.discard([part for held in written.values() for part in held])
            raise
        return written

    async def discard(self, parts: list[BatchPart]) -> None:
        """Delete parts that will not be appended."""
        await self._persist.discard_parts(parts)

    async def commit(self, batch: IngestBatch) -> Frontier:
        """Append a batch and return the new upper.

        Raises `WriterFenced`, `TypeMismatch`, and `StorageError` (unless it is determinate, open
        again to learn the outcome).
        """
        parts: dict[str, list[BatchPart]] = {name: list(held) for name, held in batch.parts.items()}
        failed = self.failed | {each.export: each.error for each in batch.failed}
        # Without progress of the source, the remap shard needs no row. Its upper still advances.
        moved = self._bound != (batch.position, failed)
        # The first mark fills all exports, even those that it does not name.
        filled = batch.filled if self.begun else frozenset(self.exports)
        self._check_filled(batch, filled)
        written: list[BatchPart] = []
        try:
            for export, tables in batch.tables.items():
                updates = pa.concat_tables(tables)
                parts.setdefault(export, []).extend(await self.write(export, updates))
            for each in batch.failed:
                error = error_update(self.exports[each.export].schema, each.error, batch.time, 1)
                parts.setdefault(each.export, []).extend(await self.write(each.export, error))
            if moved:
                binding = self._binding(batch.position, failed, batch.time)
                written = list(await self._persist.write_parts(self._remap, binding))
        except BaseException:  # also on cancellation; otherwise the parts would become orphans
            with anyio.CancelScope(shield=True):
                await self.discard([*written, *(part for held in parts.values() for part in held)])
            raise
        upper = await self._append(batch.time + 1, tuple(written), parts, filled)
        self.position, self.failed, self._bound = batch.position, failed, (batch.position, failed)
        return upper

    async def tick(self, upper: Frontier) -> Frontier:
        """Seal all shards below `upper` without updates. Only allowed after the first mark."""
        assert self.begun, "only a source with contents can be sealed"
        return await self._append(upper, (), {})

    def _check_filled(self, batch: IngestBatch, filled: frozenset[str]) -> None:
        for export in {*batch.tables, *batch.parts}:
            if export not in filled and not self._uppers[self.exports[export].shard]:
                raise SourceFault(f"rows of {export} arrived before the mark that fills it")

    def _binding(self, position: str, failed: dict[str, str], time: Time) -> pa.Table:
        rows = [self._row(position, failed, time, 1)]
        if self._bound is not None:
            rows.append(self._row(*self._bound, time, -1))
        return pa.Table.from_pylist(rows, schema=REMAP.arrow_updates())

    def _row(
        self, position: str, failed: dict[str, str], time: Time, diff: int
    ) -> dict[str, object]:
        text = msgspec.json.encode(failed, order="sorted").decode()
        return {"position": position, "failed": text, TIME: time, DIFF: diff}

    async def _append(
        self,
        upper: Frontier,
        remap: tuple[BatchPart, ...],
        parts: Mapping[str, list[BatchPart]],
        filled: frozenset[str] = frozenset(),
    ) -> Frontier:
        appends = [ShardAppend(self._remap, self.upper, upper, remap)]
        for name, export in self.exports.items():
            if self._uppers[export.shard] or name in filled:
                held = tuple(parts.get(name, ()))
                own = self._uppers[export.shard]
                # The table may have columns by now that these rows were read without; then they
                # must not be appended.
                schema = export.schema
                appends.append(ShardAppend(export.shard, own, upper, held, schema=schema))
        try:
            result = await self._persist.append(appends)
            # Another task has appended: a retry here would duplicate its rows.
            if isinstance(result, UpperMismatch):
                raise WriterFenced(
                    f"shard {result.shard} of this source is at {result.current}, expected "
                    f"{result.expected}: another task writes to it; nothing was written",
                    determinate=True,
                )
        except BaseException:  # `discard` keeps parts of an indeterminate append
            with anyio.CancelScope(shield=True):
                await self.discard([*remap, *(part for held in parts.values() for part in held)])
            raise
        self._uppers |= {append.shard: upper for append in appends}
        return upper
