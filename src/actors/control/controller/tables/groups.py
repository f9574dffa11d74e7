"""Applies a group of writes in order to the tables' contents: checks keys and makes exact updates.

`fit_change` fits one change's rows to its table. `keys_wanted` returns the keys of the existing
rows that the group can touch; they are looked up once for the whole group and loaded into the
table's overlay. `WriteGroup.apply` then applies the writes one by one, each on top of the previous
ones.

Rules: keyed tables hold one row per key (`DuplicateKey`, `AbsentRow`); bags hold rows with counts,
and only existing rows can be deleted (`AbsentRow`). A retraction equals the stored row bit by bit.
Invariant: applied to the old contents, `updates` leaves no negative count and no duplicate key.
Pure: it reads no store and no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from actors.control.controller.tables.rows import describe_key, fit, identities
from actors.durable.persist.compaction import row_hashes
from actors.model.plan.column_defaults import ColumnDefaults, defaults_digest, known_values
from actors.model.plan.schema import DIFF, TIME, TableSchema, arrow_type
from actors.model.plan.updates import consolidate, from_ipc
from actors.model.protocol.api import TableChange
from actors.model.protocol.relations import fold
from actors.runtime.errors import (
    AbsentRow,
    DefinitionChanged,
    DuplicateKey,
    InvalidUsage,
    MalformedFrame,
    TypeMismatch,
)
from actors.runtime.progress import ObjectId, ShardId, Time


class TableTarget(msgspec.Struct, frozen=True):
    """A table that a write names, resolved."""

    id: ObjectId
    name: str
    shard: ShardId
    schema: TableSchema
    defaults: ColumnDefaults = {}


def check_definitions(changes: Sequence[tuple[TableTarget, TableChange]]) -> None:
    """Raise `DefinitionChanged` if a writer made its rows for columns other than those the table
    has now, or filled them with other defaults."""
    for target, change in changes:
        for what, known, now in (
            ("columns", change.columns, target.schema.digest),
            ("defaults", change.defaults, defaults_digest(target.defaults)),
        ):
            if known is not None and known != now:
                raise DefinitionChanged(
                    f"the {what} of table {target.name} have changed in the meantime: write again"
                )


class FittedChange(msgspec.Struct, frozen=True):
    """One change whose rows fit the table."""

    target: TableTarget
    insert: pa.Table | None = None
    delete: pa.Table | None = None
    update: pa.Table | None = None


def check_distinct(target: TableTarget, keys: pa.Table, who: str) -> None:
    """Raise `DuplicateKey` if two rows have the same key. `who` says where the rows come from."""
    if keys.num_rows < 2:
        return
    # Compare only rows whose hashes occur twice as Python values: usually there are few.
    hashes = row_hashes(keys)
    order = np.argsort(hashes, kind="stable")
    same = hashes[order][1:] == hashes[order][:-1]
    suspects = np.zeros(len(hashes), np.bool_)
    suspects[order[1:]] = same
    suspects[order[:-1]] |= same
    rows = keys.filter(pa.array(suspects))
    seen = set()
    for row, key in enumerate(identities(rows, target.schema.key)):
        if key in seen:
            raise DuplicateKey(
                f"table {target.name}: {who} a duplicate PRIMARY KEY: "
                f"{describe_key(target.schema.key, rows, row)}"
            )
        seen.add(key)


def lookup_key(schema: TableSchema) -> tuple[str, ...]:
    """Return the columns by which a table's contents are arranged: its key, or for a bag all
    columns that are not nested. If there are none, the table is scanned."""
    if schema.key:
        return schema.key
    return tuple(c.name for c in schema.columns if not pa.types.is_nested(arrow_type(c.type)))


def fit_change(
    target: TableTarget,
    change: TableChange,
    defaults: ColumnDefaults | None = None,
    now_micros: int = 0,
) -> FittedChange:
    """Decode and fit a change.

    Args:
        target: The table.
        change: Its change.
        defaults: Defaults of the columns that inserted rows leave out.
        now_micros: The time of the write, for defaults that use it.

    Raises:
        InvalidUsage: Rows of a bag are updated, or a column is left out whose default only Spark
            can compute.
        MalformedFrame: The rows are not an Arrow stream.
        TypeMismatch: A value does not fit its column.
    """
    schema = target.schema
    insert = delete = update = None
    if change.insert is not None:
        rows = from_ipc(change.insert)
        if defaults:
            insert = _filled(target, rows, change.left_out, defaults, now_micros)
        else:
            insert = fit(target.name, schema, rows)
    if change.delete is not None:
        rows = from_ipc(change.delete)
        # The key identifies a row of a keyed table; other columns may be left out.
        named = _named(target, rows, "delete") if schema.key else None
        delete = fit(target.name, schema, rows, named)
    if change.update is not None:
        if not schema.key:
            raise InvalidUsage(
                f"table {target.name} has no PRIMARY KEY, which updates need: delete and insert "
                f"instead"
            )
        rows = from_ipc(change.update)
        update = fit(target.name, schema, rows, _named(target, rows, "update"))
    return FittedChange(target, insert, delete, update)


def _filled(
    target: TableTarget,
    rows: pa.Table,
    left_out: bytes | None,
    defaults: ColumnDefaults,
    now_micros: int,
) -> pa.Table:
    """Return rows that fit the table, with defaults for what they leave out: a whole column, or by
    `left_out` some values of it. Raises as `fit` does, and `InvalidUsage` if only Spark can compute
    a default."""
    name, schema = target.name, target.schema
    values = known_values(defaults, schema, now_micros)
    masks = {} if left_out is None else _masks(rows, left_out)
    whole = {fold(each) for each in rows.column_names} - masks.keys()
    for column in defaults.keys() - values:
        if fold(column) not in whole:
            raise InvalidUsage(
                f"table {name}, column {column}: only SQL can compute its default, "
                f"{defaults[column].text}: give the column a value, or write with INSERT"
            )
    filling = {each: mask for each in values if (mask := masks.get(fold(each))) is not None}
    if not filling:
        return fit(name, schema, rows, defaults=values)
    # A value that was left out may be NULL until it is filled in.
    loose = TableSchema(tuple(replace(each, nullable=True) for each in schema.columns), schema.key)
    fitted = fit(name, loose, rows, defaults=values)
    for column, mask in filling.items():
        place = fitted.column_names.index(column)
        chunks = [*fitted.column(place).chunks, pa.array([values[column]])]
        # The default is appended as the last row.
        numbers = np.where(mask, fitted.num_rows, np.arange(fitted.num_rows))
        filled = pa.chunked_array(chunks).take(pa.array(numbers))
        fitted = fitted.set_column(place, fitted.schema.field(place), filled)
    return fit(name, schema, fitted)


def _masks(rows: pa.Table, left_out: bytes) -> dict[str, np.ndarray]:
    """Return, by case-folded column name, which rows leave the column out. Raises
    `MalformedFrame`."""
    masks = from_ipc(left_out)
    if masks.num_rows != rows.num_rows or set(masks.schema.types) - {pa.bool_()}:
        raise MalformedFrame(
            f"invalid mask of left-out columns: expected booleans for {rows.num_rows} rows"
        )
    return {fold(name): masks[name].to_numpy() for name in masks.column_names}


def _named(target: TableTarget, rows: pa.Table, what: str) -> Sequence[str]:
    """Return the names of the given columns, which must include the key. Raises `TypeMismatch`."""
    given = {fold(name) for name in rows.column_names}
    for name in target.schema.key:
        if fold(name) not in given:
            raise TypeMismatch(
                f"table {target.name}, column {name}: {what} needs all columns of the PRIMARY KEY "
                f"({', '.join(target.schema.key)}), and this one is missing"
            )
    names: Sequence[str] = rows.column_names
    return names


def keys_wanted(changes: Sequence[FittedChange]) -> pa.Table | None:
    """Return the lookup keys of all existing rows that these changes of one table can touch, or
    None if they touch none (a bag without deletes)."""
    schema = changes[0].target.schema
    key = lookup_key(schema)
    wanted: list[pa.Table] = []
    for change in changes:
        parts = (change.insert, change.delete, change.update) if schema.key else (change.delete,)
        wanted += [part.select(key) for part in parts if part is not None]
    return pa.concat_tables(wanted) if wanted else None


class TableOverlay(ABC):
    """One table during one group: numbered rows, staged changes, and emitted updates."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.schema = target.schema
        self._pool: list[pa.Table] = []
        """Tables of rows; the number of a row is its position over all of them."""
        self._pooled = 0
        """Number of rows in `_pool`."""
        self._emitted: list[tuple[int, int, int]] = []
        """Updates of successful writes: ranges of row numbers (first, one past last) and their
        weight."""
        self._staged_emits: list[tuple[int, int, int]] = []
        """Updates of the write being applied, in the same form."""

    def _add(self, rows: pa.Table) -> int:
        """Number the rows, and return the number of the first one."""
        base = self._pooled
        self._pool.append(rows)
        self._pooled += rows.num_rows
        return base

    def _take(self, numbers: Sequence[int]) -> pa.Table:
        pool = pa.concat_tables(self._pool)
        return pool.take(pa.array(numbers, pa.int64()))

    def _emit_each(self, numbers: Sequence[int], diff: int) -> None:
        self._staged_emits += [(number, number + 1, diff) for number in numbers]

    @abstractmethod
    def load(self, wanted: pa.Table, found: pa.Table) -> None:
        """Load existing contents: updates of the rows with a wanted lookup key, and perhaps of
        others."""

    @abstractmethod
    def change(self, change: FittedChange) -> int:
        """Stage one change. Return how many rows it changes."""

    def commit(self) -> None:
        """Keep the staged changes of a write that succeeded."""
        self._emitted += self._staged_emits
        self._staged_emits = []

    def rollback(self) -> None:
        """Discard the staged changes of a write that failed."""
        self._staged_emits = []

    def updates(self, time: Time) -> pa.Table:
        """Return all updates of the group's successful writes, at `time`. They are consolidated if
        any is negative."""
        schema = self.schema.arrow_updates()
        if not self._emitted:
            return schema.empty_table()
        pool = pa.concat_tables(self._pool)
        if len(self._emitted) == 1:
            ((first, last, diff),) = self._emitted
            rows, weights = pool.slice(first, last - first), np.full(last - first, diff, np.int64)
        else:
            ranges = [np.arange(first, last) for first, last, _ in self._emitted]
            rows = pool.take(pa.array(np.concatenate(ranges)))
            counts = [last - first for first, last, _ in self._emitted]
            weights = np.repeat(np.array([diff for _, _, diff in self._emitted]), counts)
        times = pa.array(np.full(rows.num_rows, time))
        made = pa.Table.from_arrays([*rows.columns, times, pa.array(weights)], schema=schema)
        if any(diff < 0 for _, _, diff in self._emitted):
            made = consolidate(made).cast(schema)
        return made


def _contents(found: pa.Table) -> pa.Table:
    """Return the rows with their counts, summed over all times."""
    return consolidate(found.drop_columns([TIME]))


class KeyedOverlay(TableOverlay):
    """A table with a PRIMARY KEY: maps each key to the number of its row."""

    def __init__(self, target: TableTarget) -> None:
        super().__init__(target)
        self._current: dict[Hashable, int] = {}
        """Row number of each key after the successful writes."""
        self._staged: dict[Hashable, int | None] = {}
        """Changes of the write being applied: the new row number of a key, or None if deleted."""

    def load(self, wanted: pa.Table, found: pa.Table) -> None:
        # All keys are new, as is usual for inserts.
        if not found.num_rows:
            return
        asked = set(identities(wanted, self.schema.key))
        rows = _contents(found)
        base = self._add(rows.select(self.schema.names))
        diffs = rows[DIFF].to_pylist()
        for row, key in enumerate(identities(rows, self.schema.key)):
            # `found` may contain rows of other keys, and retracted rows.
            if diffs[row] > 0 and key in asked:
                self._current[key] = base + row

    def _get(self, key: Hashable) -> int | None:
        if key in self._staged:
            return self._staged[key]
        return self._current.get(key)

    def _present(self, what: str, key: Hashable, rows: pa.Table, row: int) -> int:
        number = self._get(key)
        if number is None:
            raise AbsentRow(
                f"table {self.target.name}: {what} of a row that does not exist: "
                f"{describe_key(self.schema.key, rows, row)}"
            )
        return number

    def change(self, change: FittedChange) -> int:
        count = 0
        # Deletes first, inserts last: a delete and an insert of the same key in one change replace
        # its row.
        if change.delete is not None:
            count += self._delete(change.delete)
        if change.update is not None:
            count += self._update(change.update)
        if change.insert is not None:
            count += self._insert(change.insert)
        return count

    def _delete(self, rows: pa.Table) -> int:
        numbers = []
        for row, key in enumerate(identities(rows, self.schema.key)):
            number = self._present("delete", key, rows, row)
            numbers.append(number)
            self._staged[key] = None
        others = [name for name in rows.column_names if name not in self.schema.key]
        # A delete that also gives other columns must match exactly that row.
        if others and numbers:
            held = identities(self._take(numbers), others)
            for row, given in enumerate(identities(rows, others)):
                if held[row] != given:
                    raise AbsentRow(
                        f"table {self.target.name}: delete of a row that does not exist: the row "
                        f"with {describe_key(self.schema.key, rows, row)} has other values"
                    )
        self._emit_each(numbers, -1)
        return len(numbers)

    def _update(self, rows: pa.Table) -> int:
        keys = identities(rows, self.schema.key)
        last = {key: row for row, key in enumerate(keys)}
        if len(last) < len(keys):
            row = next(row for row, key in enumerate(keys) if last[key] != row)
            raise DuplicateKey(
                f"table {self.target.name}: an update sets the same key twice: "
                f"{describe_key(self.schema.key, rows, row)}"
            )
        if not keys:
            return 0
        old = [self._present("update", key, rows, row) for row, key in enumerate(keys)]
        before = self._take(old)
        given = set(rows.column_names)
        after = pa.table(
            [rows[name] if name in given else before[name] for name in self.schema.names],
            schema=self.schema.arrow(),
        )
        base = self._add(after)
        self._staged.update({key: base + row for row, key in enumerate(keys)})
        # Retract the stored row, not one built from the client's values, so that it is equal bit by
        # bit.
        self._emit_each(old, -1)
        self._staged_emits.append((base, base + len(keys), 1))
        return len(keys)

    def _insert(self, rows: pa.Table) -> int:
        base = self._add(rows)
        count: int = rows.num_rows
        staged, current = self._staged, self._current
        for row, key in enumerate(identities(rows, self.schema.key)):
            held = staged[key] if key in staged else current.get(key)
            if held is not None:
                raise DuplicateKey(
                    f"table {self.target.name}: PRIMARY KEY already exists: "
                    f"{describe_key(self.schema.key, rows, row)}"
                )
            staged[key] = base + row
        self._staged_emits.append((base, base + count, 1))
        return count

    def commit(self) -> None:
        for key, number in self._staged.items():
            if number is None:
                self._current.pop(key, None)
            else:
                self._current[key] = number
        self._staged = {}
        super().commit()

    def rollback(self) -> None:
        self._staged = {}
        super().rollback()


class BagOverlay(TableOverlay):
    """A table without a key: the count of each row, loaded only if the group deletes."""

    def __init__(self, target: TableTarget) -> None:
        super().__init__(target)
        self._counts: dict[Hashable, int] = {}
        """Count of each row after the successful writes."""
        self._staged: dict[Hashable, int] = {}
        """Counts of the rows that the write being applied changes."""
        self._counting = False
        """True if the group deletes, so that counts were loaded."""

    def load(self, wanted: pa.Table, found: pa.Table) -> None:
        self._counting = True
        rows = _contents(found)
        for row, diff in zip(
            identities(rows, self.schema.names), rows[DIFF].to_pylist(), strict=True
        ):
            self._counts[row] = self._counts.get(row, 0) + diff

    def change(self, change: FittedChange) -> int:
        count = 0
        if change.delete is not None:
            count += self._delete(change.delete)
        if change.insert is not None:
            base = self._add(change.insert)
            count += change.insert.num_rows
            self._staged_emits.append((base, base + change.insert.num_rows, 1))
            # Counts matter only to later deletes; without a delete in the group none were loaded.
            if self._counting:
                for identity in identities(change.insert, self.schema.names):
                    self._staged[identity] = self._staged.get(identity, 0) + 1
        return count

    def _delete(self, rows: pa.Table) -> int:
        assert self._counting, "deletes need the table's contents"
        base = self._add(rows)
        for row, identity in enumerate(identities(rows, self.schema.names)):
            if self._counts.get(identity, 0) + self._staged.get(identity, 0) <= 0:
                raise AbsentRow(
                    f"table {self.target.name}: delete of a row that does not exist: "
                    f"{describe_key(self.schema.names, rows, row)}"
                )
            self._staged[identity] = self._staged.get(identity, 0) - 1
        count: int = rows.num_rows
        self._staged_emits.append((base, base + count, -1))
        return count

    def commit(self) -> None:
        for identity, diff in self._staged.items():
            self._counts[identity] = self._counts.get(identity, 0) + diff
        self._staged = {}
        super().commit()

    def rollback(self) -> None:
        self._staged = {}
        super().rollback()


def overlay_of(target: TableTarget) -> TableOverlay:
    """Return a new overlay for the table."""
    return KeyedOverlay(target) if target.schema.key else BagOverlay(target)


class WriteGroup:
    """The tables that one group of writes touches."""

    def __init__(self, overlays: dict[ObjectId, TableOverlay]) -> None:
        self.overlays = overlays

    def apply(self, changes: Sequence[FittedChange]) -> int:
        """Apply one write in full and return the number of rows that it changes, or raise a
        subclass of `InvalidUsage` and change nothing."""
        touched = [self.overlays[change.target.id] for change in changes]
        try:
            count = sum(
                overlay.change(change) for overlay, change in zip(touched, changes, strict=True)
            )
        except InvalidUsage:
            for overlay in touched:
                overlay.rollback()
            raise
        for overlay in touched:
            overlay.commit()
        return count

    def updates(self, time: Time) -> dict[ObjectId, pa.Table]:
        """Return each written table's updates at `time`."""
        return {id_: overlay.updates(time) for id_, overlay in self.overlays.items()}
