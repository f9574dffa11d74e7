"""First contents of several tables, at one snapshot that a replication slot exported.

Theory of operation. One transaction of an ordinary connection takes on the snapshot; then one
table after another comes by COPY's binary format, in pieces. Rows lie beside each other in the
buffer they were read into, and are walked all at once (`pgoutput.walk_copied`). So contents are
those of one instant, the slot's position, and changes from there on follow without gap.

Rules: no more than a piece is in memory; the server is not asked for the next table before the
last one is given. A value that cannot be held ends its table (`ExportFailed`), not the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.plan.schema import DIFF
from actors.sources import pgoutput
from actors.sources.postgres_catalog import Table
from actors.sources.postgres_changes import unheld
from actors.sources.postgres_copy import Copy
from actors.sources.postgres_errors import Refused
from actors.sources.postgres_footing import Filled
from actors.sources.postgres_frames import Frames, be16, be32
from actors.sources.postgres_names import identifier, literal
from actors.sources.postgres_survey import Survey, survey
from actors.sources.postgres_types import (
    ColumnType,
    TypeFacts,
    Unheld,
    column_type,
    copy_expression,
    from_binary,
)
from actors.sources.postgres_wire import Wire
from actors.sources.source import Export, ExportFailed, Rows

BUFFER_BYTES: Final = 256 * 1024
PIECE_BYTES: Final = 8 * 1024 * 1024
_FLAGS_AT: Final = 11
_HEADER_BYTES: Final = 19
"""Signature, flags, length of an extension."""


class Contents(msgspec.Struct, frozen=True):
    """A table to copy."""

    export: Export
    relation: str
    """As SQL's FROM names it."""
    kinds: tuple[ColumnType, ...]
    """Of the export's columns."""
    names: tuple[str, ...]
    """Of these there."""

    def select(self) -> str:
        """The rows as `from_binary` reads them."""
        columns = ", ".join(
            copy_expression(identifier(name), kind)
            for name, kind in zip(self.names, self.kinds, strict=True)
        )
        return f"SELECT {columns} FROM {self.relation}"


def copied_contents(
    export: Export, filled: Filled, table: Table, types: Mapping[int, TypeFacts], numeric: str
) -> Contents:
    """Return what is copied of a table: the columns that it is bound to."""
    columns = {column.number: column for column in table.columns}
    bound = [columns[number] for number in filled.columns]
    kinds = tuple(column_type(each.type_oid, each.modifier, types, numeric) for each in bound)
    return Contents(export, table.relation, kinds, filled.names)


class Snapshot:
    """Copies tables, one after another."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._left: list[Contents] = []
        self._copy: Copy | None = None
        self._begun = False
        self._parts: list[pa.Table] = []
        """Of the next piece: a cancelled `next` loses none."""
        self._bytes = 0
        """Of these."""
        self.rows = 0
        """Given so far."""

    async def begin(
        self, snapshot: str, tables: Sequence[Table], publication: str
    ) -> tuple[Survey, dict[str, str]]:
        """Take on an exported snapshot, and lock the tables: nobody alters, empties or rewrites one
        while it is copied. Return what the catalog says there, and by its name why a table cannot
        be had. Raises `Refused`, `Unreachable`."""
        await self._wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await self._wire.query(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
        refused = {}
        for table in tables:
            await self._wire.query("SAVEPOINT one")
            try:
                await self._wire.query(f"LOCK TABLE {table.relation} IN ACCESS SHARE MODE")
            except Refused as error:
                await self._wire.query("ROLLBACK TO one")
                refused[table.name] = str(error)
        oids = [table.oid for table in tables]
        return await survey(self._wire, oids, publication), refused

    def copy(self, tables: Iterable[Contents]) -> None:
        """Choose what comes, in that order."""
        self._left = list(tables)

    async def next(self) -> Rows | ExportFailed | None:
        """The next piece; None when all tables are given. Raises `Unreachable`."""
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
                return Rows(table.export.name, piece, snapshot=True)
            self._left.pop(0)
            self._copy = None
        return None

    async def _piece(self, table: Contents) -> pa.Table | None:
        """The next rows of a table; None: there are no more."""
        if self._copy is None:
            sql = f"COPY ({table.select()}) TO STDOUT (FORMAT binary)"
            await self._wire.query("SAVEPOINT one")
            try:
                self._copy = await self._wire.copy(sql, BUFFER_BYTES)
            except Refused as error:
                await self._wire.query("ROLLBACK TO one")
                hint = "check that the user may SELECT all columns of the table"
                raise _Failed(f"the table cannot be read: {error}", hint) from None
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

    def _rows(self, table: Contents, frames: Frames) -> pa.Table:
        starts = frames.starts
        if not self._begun:
            self._begun = True
            first = starts[:1]
            extension = be32(frames.data, first + _FLAGS_AT + 4)
            starts = np.concatenate([first + _HEADER_BYTES + extension, starts[1:]])
        if int(be16(frames.data, starts[-1:])[0]) == -1:  # the trailer
            starts = starts[:-1]
        values = pgoutput.walk_copied(frames.data, starts, len(table.kinds))
        columns: dict[str, pa.Array] = {}
        for column, kind, told in zip(
            table.export.schema.columns, table.kinds, values, strict=True
        ):
            try:
                columns[column.name] = from_binary(frames.data, told, kind)
            except Unheld as error:
                raise _Failed(*unheld(column.name, error)) from None
        columns[DIFF] = pa.array(np.ones(len(starts), np.int64))
        return pa.table(columns)

    async def _skip(self) -> None:
        """Reads the rest of a table that failed."""
        copy, self._copy = self._copy, None
        self._parts, self._bytes = [], 0
        while copy is not None and not copy.ended:
            await copy.fill()
            copy.take(len(copy.frames()))

    def close(self) -> None:
        """Ends its connection."""
        self._wire.close()


class _Failed(Exception):
    """A table cannot be copied."""

    def __init__(self, error: str, hint: str) -> None:
        super().__init__(error)
        self.error = error
        self.hint = hint
