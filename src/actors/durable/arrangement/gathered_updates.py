"""Gathers updates of one time from many parts, and consolidates them in bounded memory. Blocking.

Updates are kept in memory, and beyond `HELD_BYTES_MAX` in a temporary arrangement on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.arrangement import Arrangement
from actors.durable.arrangement.hashing import Hashes, check_key_type
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import consolidate, iter_slices, set_column
from actors.runtime.errors import CorruptData, InvalidUsage, ViewInError

HELD_BYTES_MAX = 8 << 20


class CollectionContents(Protocol):
    """A collection at one time."""

    def errors(self) -> pa.Table:
        """Return the consolidated errors, with columns `ERROR` and `DIFF`."""
        ...

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the user's columns and `DIFF`, consolidated and without zeros."""
        ...


class GatheredUpdates:
    """Updates that are all treated as being at the same time. `place` is a folder for spilling,
    created when needed."""

    def __init__(self, schema: TableSchema, place: Path) -> None:
        self._schema = schema
        self._place = place
        # Updates in memory, and their size.
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: Arrangement | None = None
        """Arrangement with the spilled updates; None until the first spill."""

    def add(self, updates: pa.Table) -> None:
        """Add updates, with an `ERROR` column if there are errors. Raises `StoreFull` and
        `StorageError`."""
        if not updates.num_rows:
            return
        self._held.append(updates)
        self._held_bytes += updates.nbytes
        if self._held_bytes > HELD_BYTES_MAX:
            self._spill()

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = Arrangement(self._place, self._schema, _hashable(self._schema))
        held = pa.concat_tables(self._held, promote_options="default")
        # All times become one, so that equal rows are consolidated whatever their times were.
        times = pa.repeat(pa.scalar(0, pa.int64()), held.num_rows)
        self._spilled.fill(set_column(held, TIME, times))
        self._held, self._held_bytes = [], 0

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the number of bytes in memory and in files."""
        spilled = None if self._spilled is None else self._spilled.statistics()
        if spilled is None:
            return self._held_bytes, 0
        return self._held_bytes + spilled.bytes_memory, spilled.bytes_mapped

    def contents(self) -> CollectionContents:
        """Return all updates, consolidated."""
        if self._spilled is None:
            return _Held(self._held, self._schema)
        if self._held:
            self._spill()
        # An empty insert advances the upper, so that the view includes the filled updates.
        self._spilled.insert(self._schema.arrow_updates().empty_table(), 1)
        return self._spilled.view(1)

    def close(self) -> None:
        """Remove the spilled files. A view that is being read stays valid."""
        if self._spilled is not None:
            self._spilled.close(remove=True)
            shutil.rmtree(self._place, ignore_errors=True)


class _Held:
    """Updates in memory as `CollectionContents`."""

    def __init__(self, tables: list[pa.Table], schema: TableSchema) -> None:
        self._tables = tables
        shape = schema.arrow_updates()
        self._rows = shape.remove(shape.get_field_index(TIME))

    def errors(self) -> pa.Table:
        shape = pa.schema([pa.field(ERROR, pa.string()), pa.field(DIFF, pa.int64())])
        found = [
            table.filter(pc.is_valid(table[ERROR])).select([ERROR, DIFF])
            for table in self._tables
            if ERROR in table.column_names
        ]
        return consolidate(pa.concat_tables(found)) if found else shape.empty_table()

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        found = [
            table.filter(pc.is_null(table[ERROR])) if ERROR in table.column_names else table
            for table in self._tables
        ]
        if found:
            names = self._rows.names
            rows = pa.concat_tables([table.select(names).cast(self._rows) for table in found])
            for piece in iter_slices(consolidate(rows)):
                yield from piece.to_batches()


def raise_error(errors: pa.Table) -> None:
    """Raise `ViewInError` for consolidated errors (`ERROR`, `DIFF`), or `CorruptData` for a
    negative sum."""
    for text, diff in zip(errors[ERROR].to_pylist(), errors[DIFF].to_pylist(), strict=True):
        # A negative sum is corrupt input, not an error to report to users.
        if diff < 0:
            raise CorruptData(
                f"invalid data: the diffs of error {text!r} sum to {diff}", determinate=True
            )
        raise ViewInError(text)


def check_positive(batch: pa.RecordBatch) -> None:
    """Raise `CorruptData` unless every row has a positive sum."""
    diffs = batch.column(DIFF)
    if pc.min(diffs).as_py() < 0:
        bad = batch.filter(pc.less(diffs, pa.scalar(0, pa.int64()))).slice(0, 1)
        raise CorruptData(
            f"invalid data: the diffs of a row sum to less than 0: {bad.to_pylist()[0]}",
            determinate=True,
        )


def _hashable(schema: TableSchema) -> tuple[str, ...]:
    """Return the columns that can be hashed, as a key by which to distribute rows."""
    names = []
    for field in schema.arrow():
        try:
            check_key_type(field.name, field.type)
        except InvalidUsage:
            continue
        names.append(field.name)
    return tuple(names)
