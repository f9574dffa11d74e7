"""A group of writes applied in order to what tables hold: rules of keys, and exact updates.

Theory of operation. `fit_change` makes one change's rows fit its table. `keys_wanted` says which
rows of the present contents the group can touch; they are looked up once for the whole group
and given to the table's overlay. `Group.apply` then plays one write after the other: each sees
the former ones, within one change deletes come first, then updates, then inserts, so that a
delete and an insert of one key replace its row. A write that breaks a rule raises and leaves
nothing behind; the others go on.

Rules: keyed tables hold one row a key (`DuplicateKey`, `AbsentRow`); bags hold rows with
counts, and only what is there can be deleted (`AbsentRow`). Retractions are the stored row bit
by bit. Invariant: `updates` is consolidated; overlaid on the old contents it leaves no negative
count and no key twice. Pure: it reads no store and no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import msgspec
import pyarrow as pa

from actors.controller.names import fold
from actors.controller.rows import describe_key, fit, identities
from actors.errors import AbsentRow, DuplicateKey, InvalidUsage, TypeMismatch
from actors.plan.schema import DIFF, TIME, Schema, arrow_type
from actors.plan.updates import consolidate, from_ipc
from actors.progress import ObjectId, ShardId, Time
from actors.protocol.api import TableChange


class TableTarget(msgspec.Struct, frozen=True):
    """A table that a write names, resolved."""

    id: ObjectId
    name: str
    shard: ShardId
    schema: Schema


class FittedChange(msgspec.Struct, frozen=True):
    """One change whose rows fit the table."""

    target: TableTarget
    insert: pa.Table | None = None
    delete: pa.Table | None = None
    update: pa.Table | None = None


def lookup_key(schema: Schema) -> tuple[str, ...]:
    """The columns by which a table's contents are kept ready: its key; of a bag all columns
    that have a plain value (none: it is scanned)."""
    if schema.key:
        return schema.key
    return tuple(c.name for c in schema.columns if not pa.types.is_nested(arrow_type(c.type)))


def fit_change(target: TableTarget, change: TableChange) -> FittedChange:
    """Decodes and fits a change. Raises `TypeMismatch`, `MalformedFrame`, `InvalidUsage`."""
    schema = target.schema
    insert = delete = update = None
    if change.insert is not None:
        insert = fit(target.name, schema, from_ipc(change.insert))
    if change.delete is not None:
        rows = from_ipc(change.delete)
        named = _named(target, rows, "delete") if schema.key else None
        delete = fit(target.name, schema, rows, named)
    if change.update is not None:
        if not schema.key:
            raise InvalidUsage(
                f"table {target.name} has no PRIMARY KEY, by which rows are updated: delete and "
                f"insert instead"
            )
        rows = from_ipc(change.update)
        update = fit(target.name, schema, rows, _named(target, rows, "update"))
    return FittedChange(target, insert, delete, update)


def _named(target: TableTarget, rows: pa.Table, what: str) -> Sequence[str]:
    """The columns given, which must hold the key."""
    given = {fold(name) for name in rows.column_names}
    for name in target.schema.key:
        if fold(name) not in given:
            raise TypeMismatch(
                f"table {target.name}, column {name}: {what} names rows by PRIMARY KEY "
                f"({', '.join(target.schema.key)}), and this column is not given"
            )
    names: Sequence[str] = rows.column_names
    return names


def keys_wanted(changes: Sequence[FittedChange]) -> pa.Table | None:
    """The lookup keys of all rows of the present contents that these changes of one table can
    touch; None when they touch none (a bag without deletes)."""
    schema = changes[0].target.schema
    key = lookup_key(schema)
    wanted: list[pa.Table] = []
    for change in changes:
        parts = (change.insert, change.delete, change.update) if schema.key else (change.delete,)
        wanted += [part.select(key) for part in parts if part is not None]
    return pa.concat_tables(wanted) if wanted else None


class Overlay(ABC):
    """One table during one group: rows by number, what is staged, and what is emitted."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.schema = target.schema
        self._pool: list[pa.Table] = []
        self._pooled = 0
        self._emitted: list[tuple[int, int]] = []
        self._staged_emits: list[tuple[int, int]] = []

    def _add(self, rows: pa.Table) -> int:
        """Numbers rows; the first one's number."""
        base = self._pooled
        self._pool.append(rows)
        self._pooled += rows.num_rows
        return base

    def _take(self, numbers: Sequence[int]) -> pa.Table:
        pool = pa.concat_tables(self._pool)
        return pool.take(pa.array(numbers, pa.int64()))

    @abstractmethod
    def load(self, wanted: pa.Table, found: pa.Table) -> None:
        """The present contents: updates (a superset of) those whose lookup key is wanted."""

    @abstractmethod
    def change(self, change: FittedChange) -> int:
        """Stages one change; how many rows it changes."""

    def commit(self) -> None:
        """The write is good: what was staged counts."""
        self._emitted += self._staged_emits
        self._staged_emits = []

    def rollback(self) -> None:
        """The write failed: nothing was staged."""
        self._staged_emits = []

    def updates(self, time: Time) -> pa.Table:
        """All updates of the group's good writes, at `time`, consolidated."""
        schema = self.schema.arrow_updates()
        if not self._emitted:
            return schema.empty_table()
        numbers, diffs = zip(*self._emitted, strict=True)
        rows = self._take(numbers)
        made = rows.append_column(
            pa.field(TIME, pa.int64()), pa.repeat(pa.scalar(time, pa.int64()), len(numbers))
        ).append_column(pa.field(DIFF, pa.int64()), pa.array(diffs, pa.int64()))
        if min(diffs) < 0:
            made = consolidate(made)
        return made.cast(schema)


def _contents(found: pa.Table) -> pa.Table:
    """Rows with their counts, whatever the times."""
    return consolidate(found.drop_columns([TIME]))


class KeyedOverlay(Overlay):
    """A table with a PRIMARY KEY: the number of each key's row."""

    def __init__(self, target: TableTarget) -> None:
        super().__init__(target)
        self._current: dict[Hashable, int] = {}
        self._staged: dict[Hashable, int | None] = {}

    def load(self, wanted: pa.Table, found: pa.Table) -> None:
        asked = set(identities(wanted, self.schema.key))
        rows = _contents(found)
        base = self._add(rows.select(self.schema.names))
        diffs = rows[DIFF].to_pylist()
        for row, key in enumerate(identities(rows, self.schema.key)):
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
                f"table {self.target.name}: {what} of a row that is not there: "
                f"{describe_key(self.schema.key, rows, row)}"
            )
        return number

    def change(self, change: FittedChange) -> int:
        count = 0
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
        if others and numbers:
            held = identities(self._take(numbers), others)
            for row, given in enumerate(identities(rows, others)):
                if held[row] != given:
                    raise AbsentRow(
                        f"table {self.target.name}: delete of a row that is not there: the row "
                        f"with {describe_key(self.schema.key, rows, row)} holds other values"
                    )
        self._staged_emits += [(number, -1) for number in numbers]
        return len(numbers)

    def _update(self, rows: pa.Table) -> int:
        keys = identities(rows, self.schema.key)
        last = {key: row for row, key in enumerate(keys)}
        if len(last) < len(keys):
            row = next(row for row, key in enumerate(keys) if last[key] != row)
            raise DuplicateKey(
                f"table {self.target.name}: one update sets a key twice: "
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
        self._staged_emits += [(number, -1) for number in old]
        self._staged_emits += [(base + row, 1) for row in range(len(keys))]
        return len(keys)

    def _insert(self, rows: pa.Table) -> int:
        base = self._add(rows)
        staged, current = self._staged, self._current
        for row, key in enumerate(identities(rows, self.schema.key)):
            held = staged[key] if key in staged else current.get(key)
            if held is not None:
                raise DuplicateKey(
                    f"table {self.target.name}: PRIMARY KEY is present already: "
                    f"{describe_key(self.schema.key, rows, row)}"
                )
            staged[key] = base + row
        count: int = rows.num_rows
        self._staged_emits += [(base + row, 1) for row in range(count)]
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


class BagOverlay(Overlay):
    """A table without a key: how often each row is there (only when the group deletes)."""

    def __init__(self, target: TableTarget) -> None:
        super().__init__(target)
        self._counts: dict[Hashable, int] = {}
        self._staged: dict[Hashable, int] = {}
        self._counting = False

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
            self._staged_emits += [(base + row, 1) for row in range(change.insert.num_rows)]
            if self._counting:
                for identity in identities(change.insert, self.schema.names):
                    self._staged[identity] = self._staged.get(identity, 0) + 1
        return count

    def _delete(self, rows: pa.Table) -> int:
        assert self._counting, "deletes need the present contents"
        base = self._add(rows)
        for row, identity in enumerate(identities(rows, self.schema.names)):
            if self._counts.get(identity, 0) + self._staged.get(identity, 0) <= 0:
                raise AbsentRow(
                    f"table {self.target.name}: delete of a row that is not there: "
                    f"{describe_key(self.schema.names, rows, row)}"
                )
            self._staged[identity] = self._staged.get(identity, 0) - 1
        count: int = rows.num_rows
        self._staged_emits += [(base + row, -1) for row in range(count)]
        return count

    def commit(self) -> None:
        for identity, diff in self._staged.items():
            self._counts[identity] = self._counts.get(identity, 0) + diff
        self._staged = {}
        super().commit()

    def rollback(self) -> None:
        self._staged = {}
        super().rollback()


def overlay_of(target: TableTarget) -> Overlay:
    """A fresh overlay of the table's kind."""
    return KeyedOverlay(target) if target.schema.key else BagOverlay(target)


class Group:
    """The tables that one group of writes touches."""

    def __init__(self, overlays: dict[ObjectId, Overlay]) -> None:
        self.overlays = overlays

    def apply(self, changes: Sequence[FittedChange]) -> int:
        """Applies one write whole, or raises `InvalidUsage`'s children and changes nothing."""
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
        """Each written table's updates at `time`."""
        return {id_: overlay.updates(time) for id_, overlay in self.overlays.items()}
