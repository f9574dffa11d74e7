"""Slot files: Arrow files whose paths never change, rewritten for every step.

Spark keeps a scan's file listing for as long as a plan lives. A plan can be executed again on other
rows if the files of those names hold them: each is an Arrow stream of one batch, and
`SlotFileFormat.java` reads it whole, whatever length the listing says. This module knows nothing of
Spark.

A set of slots has one user at a time: `SlotSet.use` refuses a second. A use that fails, however it
does, makes an end of the set: its files are removed, not rewritten.
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
    """Raised when the rows need more than the slot's capacity."""


class SlotBusy(Exception):
    """Raised when the set is in use, or was abandoned."""


def positional(schema: pa.Schema) -> pa.Schema:
    """Return the same columns, named by position and all nullable."""
    # Users' names, equal but for their case or odd in other ways, are no names of files' columns.
    return pa.schema([pa.field(f"c{index}", field.type) for index, field in enumerate(schema)])


def write(path: Path, table: pa.Table, capacity: int) -> None:
    """Write these rows to the file `path`.

    Raises:
        SlotOverflow: They need more than `capacity` bytes. The file is unchanged.
        OSError: The file is of no use.
    """
    sink = pa.BufferOutputStream()
    # One batch, of no rows if need be: a file cut short is then an error.
    whole = [column.combine_chunks() for column in table.columns]
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(whole, schema=table.schema))
    data = sink.getvalue()
    if data.size > capacity:
        raise SlotOverflow(f"{data.size} bytes; a slot holds {capacity}")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)


KEPT_BYTES_MAX: Final = 256 * 1024
"""Rows of this size or more are removed from their file after each use: plans are many."""


class SlotSet:
    """The slots of one plan: a file for each name, in a folder of its own.

    `schemas` are full and `positional`; `narrow` leaves out what no scan reads.
    """

    def __init__(self, folder: Path, schemas: Mapping[str, pa.Schema], capacity: int) -> None:
        """Make the folder and files without rows. Raises an `OSError`."""
        self.capacity = capacity
        self._folder = folder
        self._schemas = dict(schemas)
        self._columns = {name: list(range(len(kinds))) for name, kinds in schemas.items()}
        self._user = threading.Lock()
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
        """Return the file of a slot."""
        return self._folder / f"{name}.arrow"

    @property
    def answer(self) -> Path:
        """Return the file by which a use gets the plan's answer."""
        return self._folder / "answer"

    def narrow(self, columns: Mapping[str, Sequence[int]]) -> None:
        """Keep these slots only, and of their columns only those at these positions.

        A slot without any keeps its last column, which tells how many rows there are.
        """
        for name in self.names - set(columns):
            self.path(name).unlink(missing_ok=True)
            del self._schemas[name]
        self._columns = {
            name: list(given) or [len(self._schemas[name]) - 1] for name, given in columns.items()
        }

    @contextmanager
    def use(self, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Fill every slot and keep it so while the context is open; slots without a table get no
        rows.

        Tables have all columns of the slot, by whatever names, in order and of its types. Raises
        `SlotBusy` while another use goes on, and what `write` raises. Any failure but
        `SlotOverflow`, of the caller's too, makes an end of the set.
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
                    # Rewriting in place is safe: uses do not overlap and every earlier one ended
                    # well, so that no task of an earlier job is left to read.
                    write(self.path(name), kept, self.capacity)
                yield
                self._shrink(tables)
            except SlotOverflow:  # before any reader has seen the files: the set stays sound
                raise
            except BaseException:
                # A task of the failed job may still read the files.
                self._gone = True
                raise
        finally:
            if self._gone:
                self._remove()
            self._user.release()

    def _shrink(self, tables: Mapping[str, pa.Table]) -> None:
        """Remove many rows from their files."""
        for name, schema in self._schemas.items():
            if name in tables and tables[name].nbytes >= KEPT_BYTES_MAX:
                columns = [schema.field(at) for at in self._columns[name]]
                write(self.path(name), pa.schema(columns).empty_table(), self.capacity)

    def abandon(self) -> None:
        """Remove the files: now, or when their user is done."""
        self._gone = True
        if self._user.acquire(blocking=False):
            try:
                self._remove()
            finally:
                self._user.release()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
