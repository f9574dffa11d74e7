"""Copies the first contents of several tables, at one snapshot that a replication slot exported.

Theory of operation. One transaction imports the snapshot. Then the tables are copied one after
another in COPY's binary format, in pieces whose rows are decoded together (`pgoutput.walk_copied`).
The snapshot is at the slot's position, so changes from there on follow without a gap.

For a table to which columns are added, only the rows with a value in an added column are copied,
once the stream has reached the snapshot. Until then the transaction stays open
(`postgres_changes.ColumnsDue`).

Rules: at most one piece is in memory, and the next table is requested after the last one was
returned. A value that cannot be represented fails its table (`ExportFailed`) but not the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources import pgoutput
from actors.connectors.sources.postgres_catalog import PostgresTable
from actors.connectors.sources.postgres_changes import unheld
from actors.connectors.sources.postgres_copy import CopyFrames, CopyStream
from actors.connectors.sources.postgres_drift import FilledTable
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_survey import CatalogSurvey, survey
from actors.connectors.sources.postgres_types import (
    ColumnType,
    TypeFacts,
    UnrepresentableValue,
    column_type,
    copy_expression,
    from_binary,
    numeric_held_by,
)
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import ExportFailed, SourceExport, SourceRows
from actors.model.pgwire.encoded_values import be16, be32
from actors.model.pgwire.quoting import quote_literal, quote_name
from actors.model.plan.schema import DIFF

BUFFER_BYTES: Final = 256 * 1024
PIECE_BYTES: Final = 8 * 1024 * 1024
_FLAGS_AT: Final = 11
_HEADER_BYTES: Final = 19
"""Length of the signature, the flags, and the length field of the extension."""


class SnapshotTable(msgspec.Struct, frozen=True):
    """A table to copy."""

    export: SourceExport
    relation: str
    """FROM expression for SQL."""
    kinds: tuple[ColumnType, ...]
    """Types of the export's columns, in order."""
    names: tuple[str, ...]
    """Upstream names of the export's columns, in order."""
    held: int = 0
    """Number of leading columns whose values were ingested before; 0 for a new table. If not 0,
    only rows with a value in another column are copied, as updates of the ingested rows."""

    def select(self) -> str:
        """Return the query whose rows `from_binary` decodes."""
        columns = ", ".join(
            copy_expression(quote_name(name), kind)
            for name, kind in zip(self.names, self.kinds, strict=True)
        )
        text = f"SELECT {columns} FROM {self.relation}"
        if not self.held:
            return text
        # IS NOT NULL would be false for a composite value that contains a NULL.
        values = (f"{quote_name(name)} IS DISTINCT FROM NULL" for name in self.names[self.held :])
        return f"{text} WHERE {' OR '.join(values)}"

    def updates(self, rows: pa.Table) -> pa.Table:
        """Return copied rows as changes of the ingested rows."""
        come = rows.append_column(DIFF, pa.array(np.ones(rows.num_rows, np.int64)))
        if not self.held:
            return come
        # Up to now, the added columns of these rows were NULL.
        gone = pa.table(
            {
                name: values if place < self.held else pa.nulls(rows.num_rows, values.type)
                for place, (name, values) in enumerate(zip(rows.column_names, rows, strict=True))
            }
        )
        minus = pa.array(np.full(rows.num_rows, -1, np.int64))
        return pa.concat_tables([gone.append_column(DIFF, minus), come])


def copied_contents(
    export: SourceExport,
    filled: FilledTable,
    table: PostgresTable,
    types: Mapping[int, TypeFacts],
    held: int = 0,
) -> SnapshotTable:
    """Describe the copy of a table, with the columns that it is bound to. For `held`, see
    `SnapshotTable.held`."""
    columns = {column.number: column for column in table.columns}
    bound = [columns[number] for number in filled.columns]
    kinds = tuple(
        column_type(each.type_oid, each.modifier, types, numeric_held_by(column.type))
        for each, column in zip(bound, export.schema.columns, strict=True)
    )
    return SnapshotTable(export, table.relation, kinds, filled.names, held)


class TableSnapshots:
    """Copies tables, one after another, over one connection."""

    def __init__(self, wire: PostgresConnection) -> None:
        self._wire = wire
        # Tables that are not yet copied completely; the first one is being copied.
        self._left: list[SnapshotTable] = []
        # The COPY of the current table; None between tables.
        self._copy: CopyStream | None = None
        # True once the header of the current COPY has been read.
        self._begun = False
        self._parts: list[pa.Table] = []
        """Rows of the next piece. Kept here so that cancelling `next` loses none of them."""
        self._bytes = 0
        """Size of `_parts` in bytes."""
        self.rows = 0
        """Number of rows returned so far."""

    async def begin(
        self, snapshot: str, tables: Sequence[PostgresTable], publication: str
    ) -> tuple[CatalogSurvey, dict[str, str]]:
        """Import an exported snapshot, and lock the tables.

        Return the catalog at the snapshot, and the error for each table that cannot be locked, by
        name. Raises `ServerRefused` and `SourceUnreachable`.
        """
        # If added columns are to be copied, the transaction stays open until the stream has reached
        # the snapshot.
        await self._wire.query("SET idle_in_transaction_session_timeout = 0")
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await self._wire.query(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot)}")
        refused = {}
        for table in tables:
            # Without a savepoint, an error would abort the transaction and lose the snapshot.
            await self._wire.query("SAVEPOINT one")
            try:
                # The lock prevents others from altering, truncating or rewriting the table during
                # the copy.
                await self._wire.query(f"LOCK TABLE {table.relation} IN ACCESS SHARE MODE")
            except ServerRefused as error:
                await self._wire.query("ROLLBACK TO one")
                refused[table.name] = str(error)
        oids = [table.oid for table in tables]
        return await survey(self._wire, oids, publication), refused

    def copy(self, tables: Iterable[SnapshotTable]) -> None:
        """Set the tables to copy, in this order."""
        self._left = list(tables)

    async def next(self) -> SourceRows | ExportFailed | None:
        """Return the next piece of rows; None after the last table. Raises `SourceUnreachable`."""
        while self._left:
            table = self._left[0]
            try:
                piece = await self._piece(table)
            except _Failed as failed:
                self._left.pop(0)
                await self._skip()
                return ExportFailed(table.export.name, failed.error, failed.hint)
            if piece is not None:
                self.rows += piece.num_rows
                return SourceRows(table.export.name, piece, snapshot=not table.held)
            self._left.pop(0)
            self._copy = None
        return None

    async def _piece(self, table: SnapshotTable) -> pa.Table | None:
        """Return the next rows of a table; None after the last ones."""
        if self._copy is None:
            sql = f"COPY ({table.select()}) TO STDOUT (FORMAT binary)"
            await self._wire.query("SAVEPOINT one")
            try:
                self._copy = await self._wire.copy(sql, BUFFER_BYTES)
            except ServerRefused as error:
                await self._wire.query("ROLLBACK TO one")
                hint = "check that the user has the SELECT privilege on all columns of the table"
                raise _Failed(f"cannot read the table: {error}", hint) from None
            self._begun = False
        copy, parts = self._copy, self._parts
        while self._bytes < PIECE_BYTES:
            while not copy.full and not copy.ended:
                await copy.fill()
            frames = copy.frames()
            copy.take(len(frames))
            if len(frames):
                parts.append(self._rows(table, frames))
                self._bytes += parts[-1].nbytes
            elif copy.ended:
                break
        self._parts, self._bytes = [], 0
        return pa.concat_tables(parts) if any(part.num_rows for part in parts) else None

    def _rows(self, table: SnapshotTable, frames: CopyFrames) -> pa.Table:
        starts = frames.starts
        if not self._begun:
            self._begun = True
            # COPY's header arrives in one frame with the first row.
            first = starts[:1]
            extension = be32(frames.data, first + _FLAGS_AT + 4)
            starts = np.concatenate([first + _HEADER_BYTES + extension, starts[1:]])
        if int(be16(frames.data, starts[-1:])[0]) == -1:  # the trailer
            starts = starts[:-1]
        values = pgoutput.walk_copied(frames.data, starts, len(table.kinds))
        columns: dict[str, pa.Array] = {}
        for column, kind, sent in zip(
            table.export.schema.columns, table.kinds, values, strict=True
        ):
            try:
                columns[column.name] = from_binary(frames.data, sent, kind)
            except UnrepresentableValue as error:
                raise _Failed(*unheld(column.name, error)) from None
        return table.updates(pa.table(columns))

    async def _skip(self) -> None:
        """Discard the rest of a table that failed."""
        copy, self._copy = self._copy, None
        self._parts, self._bytes = [], 0
        # The connection accepts no other query before this COPY has ended.
        while copy is not None and not copy.ended:
            await copy.fill()
            copy.take(len(copy.frames()))

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()


class _Failed(Exception):
    """A table cannot be copied."""

    def __init__(self, error: str, hint: str) -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
