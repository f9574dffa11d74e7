"""Slot files: Arrow files with constant paths that are rewritten for every step.

Spark keeps the file listing of a scan for as long as a plan exists. A plan can be executed again on
other rows if files with the same names contain them: each is an Arrow stream of one batch, and
`SlotFileFormat.java` reads all of it, whatever length the listing says. This module does not depend
on Spark.

A set of slots has one user at a time: `SlotSet.use` refuses a second one. A use that fails in any
way ends the set: its files are removed and never rewritten.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa


class SlotOverflow(Exception):
    """Raised if the rows need more than the capacity of the slot."""


class SlotBusy(Exception):
    """Raised if the set is in use, or was abandoned."""


def positional(schema: pa.Schema) -> pa.Schema:
    """Return the same columns, named by position and all nullable."""
    # Users' names may differ only in case or be unusual in other ways, so they cannot name columns
    # of files.
    return pa.schema([pa.field(f"c{index}", field.type) for index, field in enumerate(schema)])


def write(path: Path, table: pa.Table, capacity: int) -> None:
    """Write these rows to the file `path`.

    Raises:
        SlotOverflow: The rows need more than `capacity` bytes. The file is unchanged.
        OSError: The file is unusable.
    """
    sink = pa.BufferOutputStream()
    # A single batch, even if it has no rows, so that a truncated file is an error.
    whole = [column.combine_chunks() for column in table.columns]
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(whole, schema=table.schema))
    data = sink.getvalue()
    if data.size > capacity:
        raise SlotOverflow(f"{data.size} bytes, more than the capacity of a slot ({capacity})")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)


KEPT_BYTES_MAX: Final = 256 * 1024
"""Rows of at least this size are removed from their file after each use, since there are many
plans."""


class SlotSet:
    """The slots of one plan: a file for each name, in a folder of their own.

    `schemas`: complete and `positional`; `narrow` removes what no scan reads.
    """

    def __init__(self, folder: Path, schemas: Mapping[str, pa.Schema], capacity: int) -> None:
        """Create the folder, and files without rows. Raises `OSError`."""
        self.capacity = capacity
        self._folder = folder
        # Columns of each slot, and the positions of those that are kept; `narrow` reduces them.
        self._schemas = dict(schemas)
        self._columns = {name: list(range(len(kinds))) for name, kinds in schemas.items()}
        # Held by the current user of the set.
        self._user = threading.Lock()
        # True once the set was abandoned or a use has failed.
        self._gone = False
        folder.mkdir(parents=True)
        try:
            for name, schema in self._schemas.items():
                write(self.path(name), schema.empty_table(), capacity)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all slots."""
        return frozenset(self._schemas)

    def path(self, name: str) -> Path:
        """Return the path of a slot's file."""
        return self._folder / f"{name}.arrow"

    @property
    def answer(self) -> Path:
        """Return the path of the file through which a use gets the plan's answer."""
        return self._folder / "answer"

    def narrow(self, columns: Mapping[str, Sequence[int]]) -> None:
        """Keep only these slots, and of their columns only those at these positions.

        A slot for which no position is given keeps its last column, which tells the number of rows.
        """
        for name in self.names - set(columns):
            self.path(name).unlink(missing_ok=True)
            del self._schemas[name]
        self._columns = {
            name: list(given) or [len(self._schemas[name]) - 1] for name, given in columns.items()
        }

    @contextmanager
    def use(self, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Fill every slot and keep it filled while the context is open. Slots without a table get
        no rows.

        Tables have all columns of the slot, under any names, in the same order and with the same
        types. Raises `SlotBusy` during another use, and what `write` raises. Any failure except
        `SlotOverflow`, including one of the caller's, ends the set.
        """
        if not self._user.acquire(blocking=False):
            raise SlotBusy("the slots are in use")
        try:
            if self._gone:
                raise SlotBusy("the slots were abandoned")
            try:
                for name, schema in self._schemas.items():
                    table = tables.get(name)
                    rows = schema.empty_table() if table is None else table
                    columns = self._columns[name]
                    kept = rows.select(columns).rename_columns([f"c{at}" for at in columns])
                    # Rewriting in place is safe: uses do not overlap and every earlier one
                    # succeeded, so no task of an earlier job is still reading.
                    write(self.path(name), kept, self.capacity)
                yield
                self._shrink(tables)
            except SlotOverflow:  # No reader has seen the files yet, so the set stays usable.
                raise
            except BaseException:
                # A task of the failed job may still be reading the files.
                self._gone = True
                raise
        finally:
            if self._gone:
                self._remove()
            self._user.release()

    def _shrink(self, tables: Mapping[str, pa.Table]) -> None:
        """Remove large rows from their files."""
        for name, schema in self._schemas.items():
            if name in tables and tables[name].nbytes >= KEPT_BYTES_MAX:
                columns = [schema.field(at) for at in self._columns[name]]
                write(self.path(name), pa.schema(columns).empty_table(), self.capacity)

    def abandon(self) -> None:
        """Remove the files: now, or when their user has finished."""
        self._gone = True
        if self._user.acquire(blocking=False):
            try:
                self._remove()
            finally:
                self._user.release()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
