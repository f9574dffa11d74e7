"""Slot files: Arrow files whose paths never change, rewritten for every step.

Theory of operation. Spark keeps a scan's file listing for as long as a plan lives. A plan can be
executed again on other rows if the files of those names hold them: each is an Arrow stream of
one batch, and `SlotFileFormat.java` reads it whole, whatever length the listing says.

Rules
- Columns are named by position (``c0``, ``c1`` …): names of users, equal but for their case or
  odd in other ways, are no names of files' columns.
- A file has one batch, of no rows if need be, so that a file cut short is an error.
- One user at a time: `SlotSet.use` refuses a second. A use that fails, however it does, leaves
  a set that is never used again, because a task of the failed job may still read: its files are
  removed, not rewritten.
- Rewriting in place is safe for the same reason: while a set is in use once at a time and every
  earlier use ended well, no task of an earlier job is left.

What it does not do: it knows nothing of Spark.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa


class SlotOverflow(Exception):
    """The rows need more than the slot's capacity."""


class SlotBusy(Exception):
    """Somebody uses the set, or it was abandoned."""


def positional(schema: pa.Schema) -> pa.Schema:
    """The same columns, named by position and all nullable."""
    return pa.schema([pa.field(f"c{index}", field.type) for index, field in enumerate(schema)])


def write(path: Path, table: pa.Table, capacity: int) -> None:
    """Make `path` a file with these rows.

    Raises:
        SlotOverflow: They need more than `capacity` bytes. The file is unchanged.
        OSError: The file is of no use.
    """
    sink = pa.BufferOutputStream()
    whole = [column.combine_chunks() for column in table.columns]
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(whole, schema=table.schema))
    data = sink.getvalue()
    if data.size > capacity:
        raise SlotOverflow(f"{data.size} bytes; a slot holds {capacity}")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)


class SlotSet:
    """The slots of one plan: a file for each name, in a folder of its own.

    `schemas` are full and `positional`; `narrow` leaves out what no scan reads.
    """

    def __init__(self, folder: Path, schemas: Mapping[str, pa.Schema], capacity: int) -> None:
        """Makes the folder and files without rows. Raises an `OSError`."""
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
        """Names of all slots."""
        return frozenset(self._schemas)

    def path(self, name: str) -> Path:
        """The file of a slot."""
        return self._folder / f"{name}.arrow"

    def narrow(self, columns: Mapping[str, Sequence[int]]) -> None:
        """Keeps these slots only, and of their columns only those at these positions.

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
        """Fills every slot and keeps it so; slots without a table get no rows.

        Tables have all columns of the slot, by whatever names, in order and of its types.
        Raises `SlotBusy` while another use goes on, and what `write` raises. `SlotOverflow` comes
        before a reader can have seen anything and leaves the set sound; any other failure, of the
        caller's too, makes an end of it.
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
                    write(self.path(name), kept, self.capacity)
                yield
            except SlotOverflow:
                raise
            except BaseException:
                self._gone = True
                raise
        finally:
            if self._gone:
                self._remove()
            self._user.release()

    def abandon(self) -> None:
        """Removes the files: now, or when their user is done."""
        self._gone = True
        if self._user.acquire(blocking=False):
            try:
                self._remove()
            finally:
                self._user.release()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
