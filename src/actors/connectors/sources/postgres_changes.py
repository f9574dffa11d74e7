"""Turns replication messages into a source's answers: rows by table, then one mark. Pure.

Theory of operation. A batch of whole transactions becomes one piece of rows for each table: rows of
one mark belong to one instant, so the order of transactions does not matter. The batch is cut only
where order counts: at a truncate, and where a table changed its columns. A transaction too large
for one batch comes in several, without a mark between them.

A table with replica identity FULL tells whole old rows: its changes are `SourceRows`. Any other
identity tells the key at most: changes are `SourceUpserts`, or `SourceRows` as long as nothing but
inserts came since the last mark.

An export that is being given further columns (`growing`) has NULL in them up to the snapshot that
tells their values. Where the stream passes its position, `ColumnsDue` stands in the answer, and
from there on rows have all columns.

An export ends when its table was renamed, dropped and made anew, lost a column or changed a type,
when its replica identity no longer gives its key, or when a value cannot be held. Others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources import pgoutput
from actors.connectors.sources.pgoutput import MessageBatch, PgRelation, TupleValues
from actors.connectors.sources.postgres_drift import (
    RECREATE_HINT,
    FilledTable,
    TableContinues,
    type_changed,
)
from actors.connectors.sources.postgres_types import (
    ColumnType,
    TypeFacts,
    UnrepresentableValue,
    column_type,
    from_text,
    numeric_held_by,
)
from actors.connectors.sources.source import (
    KEPT,
    OP,
    ExportFailed,
    ExportTruncated,
    Given,
    PositionMark,
    SourceExport,
    SourceRows,
    SourceUpserts,
    UpsertOp,
)
from actors.model.pgwire.encoded_values import ByteValues, Places, RowMask
from actors.model.plan.schema import DIFF, arrow_type
from actors.runtime.errors import RemoteProtocolError


class ColumnsDue(msgspec.Struct, frozen=True):
    """The stream has reached the snapshot of further columns: here come their values in the rows
    that these exports hold."""

    exports: tuple[str, ...]


Decoded: TypeAlias = Given | ColumnsDue


class _Bound(msgspec.Struct, frozen=True):
    """A table of the stream that is an export."""

    export: SourceExport
    relation: PgRelation
    columns: tuple[tuple[int, ColumnType], ...]
    """Place in the relation, and type, of each of the export's columns; the export may have further
    ones, which are NULL."""
    filled: int
    """See `FilledTable.lsn`."""


class DecodedChanges:
    """Decoder of one stream: tables, open transaction, and exports that are new or failed."""

    def __init__(
        self,
        exports: Iterable[SourceExport],
        filled: dict[str, FilledTable],
        types: Mapping[int, TypeFacts],
        lsn: int,
        position: Callable[[int], str],
        filling: Sequence[str] = (),
        growing: Mapping[str, FilledTable] | None = None,
    ) -> None:
        """Make a decoder. `filled` is shared with the caller, and follows: those in `growing` take
        the place of others at their snapshot, which is one for all."""
        self.lsn = lsn
        """Position before which everything was given, with a mark."""
        self.commit_ms: int | None = None
        """Commit time of the newest transaction given."""
        self.open = False
        """True if a transaction has begun and not ended."""
        self._exports = {export.name: export for export in exports}
        self._filled = filled
        self._oids = {each.oid: name for name, each in filled.items()}
        self._types = types
        self._position = position
        self._relations: dict[int, PgRelation] = {}
        self._bound: dict[int, _Bound] = {}
        self._failed: set[str] = set()
        self._replacing: set[str] = set()
        """Exports that gave upserts since the last mark."""
        self._commit_lsn = 0
        """Commit position of the open transaction."""
        self._count = 0
        self._growing = dict(growing or {})
        snapshots = [each.lsn for each in (*filled.values(), *self._growing.values())]
        self._hold = max([lsn, *snapshots])
        """Position before which no mark is given: that of the newest snapshot, or of the begin."""
        self._filling = tuple(filling)
        """Exports that the next mark fills."""
        self.xids: set[int] = set()
        """Transactions decoded since the catalog was last checked, modulo 2^32."""
        self._described: dict[str, set[tuple[str, ...]]] = {}
        """Export → columns that the server has listed since then."""
        self._listed: dict[str, tuple[str, ...]] = {}
        """Export → columns that every list must begin with, where names alone no longer identify
        columns."""
        self._grown: set[str] = set()
        """Exports that were given columns since then: their lists hold for what came before."""

    def take(self, batch: MessageBatch) -> list[Decoded]:
        """Decode a batch: return rows, then a mark for its last commit, then rows of the
        transaction that is still open. Raises `RemoteProtocolError`."""
        commits = pgoutput.commits(batch)
        if not len(commits.places):
            return self._segments(batch)
        cut = int(commits.places[-1]) + 1
        given = self._segments(batch.slice(0, cut))
        given += self._mark(int(commits.ends[-1]), int(commits.times_ms[-1]))
        self.open = False
        return given + (self._segments(batch.slice(cut, len(batch))) if cut < len(batch) else [])

    @property
    def holding(self) -> bool:
        """Return whether the stream has not reached the snapshots yet: no mark is given."""
        return self.lsn < self._hold

    def contents_given(self) -> list[Decoded]:
        """Return a mark after the snapshot's last rows, if the stream begins at its position."""
        return self._mark(self.lsn, None)

    def idle(self, lsn: int) -> list[Decoded]:
        """Return a mark for a position before which the server has nothing more; none if it is no
        progress."""
        if self.open or lsn <= self.lsn:
            return []
        return self._mark(lsn, None)

    def stands(self, export: str, found: TableContinues) -> None:
        """Record the verdict that a table is still bound."""
        if found.fingerprint.strict:
            self._listed[export] = found.all_names

    def learn(self, types: Mapping[int, TypeFacts]) -> None:
        """Replace the facts of types with the catalog's current ones."""
        self._types = types

    def confirm(self) -> list[Given]:
        """Return failures of exports whose columns in the stream differ from the catalog's; called
        after a check of the catalog that saw all decoded transactions."""
        given: list[Given] = []
        for export, columns in self._listed.items():
            for names in self._described.get(export, ()):
                if names[: len(columns)] != columns:
                    listed = ", ".join(columns)
                    error = f"its columns changed names: {', '.join(names)}, now {listed}"
                    given += self.fail(export, error, RECREATE_HINT)
        # Bound anew at their snapshot, since when names count again.
        for export in self._grown:
            self._listed.pop(export, None)
        self._grown.clear()
        self._described.clear()
        self.xids.clear()
        return given

    def is_failed(self, export: str) -> bool:
        """Say whether an export has ended."""
        return export in self._failed

    def fail(self, export: str, error: str, hint: str) -> list[Given]:
        """End an export; return the failure, the first time."""
        if export in self._failed or export not in self._exports:
            return []
        self._failed.add(export)
        self._bound = {
            oid: bound for oid, bound in self._bound.items() if bound.export.name != export
        }
        return [ExportFailed(export, error, hint)]

    def _mark(self, lsn: int, commit_ms: int | None) -> list[Decoded]:
        # Before all snapshots are reached, one table would be newer than another.
        if lsn < self._hold:
            return []
        due = self._grow() if self._growing else []
        self.lsn = lsn
        self.commit_ms = commit_ms or self.commit_ms
        count, self._count = self._count, 0
        filled, self._filling = self._filling, ()
        self._replacing.clear()
        return [*due, PositionMark(self._position(lsn), commit_ms, count, filled)]

    # -- further columns ---------------------------------------------------------------------

    def _due(self, batch: MessageBatch) -> int | None:
        """Return the place of the first transaction that the snapshot of further columns lacks."""
        if not self._growing:
            return None
        at = next(iter(self._growing.values())).lsn
        begins, lsns = pgoutput.begins(batch)
        (later,) = np.nonzero(lsns >= at)
        return int(begins[later[0]]) if len(later) else None

    def _grow(self) -> list[Decoded]:
        """Bind the tables that are being given columns to all of them."""
        growing, self._growing = self._growing, {}
        live = {name: each for name, each in growing.items() if name not in self._failed}
        for name, filled in live.items():
            self._filled[name] = filled
            self._grown.add(name)
            self._bound.pop(filled.oid, None)
            known = self._relations.get(filled.oid)
            try:
                if known is not None:
                    self._bound[filled.oid] = self._bind(name, known)
            except _Column:
                # The table as it was before its columns came: it is told again before its next row.
                del self._relations[filled.oid]
        return [ColumnsDue(tuple(live))]

    # -- segments of a batch -----------------------------------------------------------------

    def _segments(self, batch: MessageBatch) -> list[Decoded]:
        place = self._due(batch)
        if place is not None:
            given = self._segments(batch.slice(0, place))
            given += self._grow()
            return given + self._segments(batch.slice(place, len(batch)))
        given = []
        if not len(batch):
            return given
        start = 0
        rare = (batch.tags == pgoutput.RELATION) | (batch.tags == pgoutput.TRUNCATE)
        for index in np.flatnonzero(rare).tolist():
            if batch.tags[index] == pgoutput.TRUNCATE:
                given += self._changes(batch, start, index)
                given += self._truncate(batch, index)
                start = index
                continue
            relation = pgoutput.relation(batch, index)
            known = self._relations.get(relation.oid)
            names = tuple(column.name for column in relation.columns)
            self._described.setdefault(self._oids.get(relation.oid, ""), set()).add(names)
            if known == relation:
                continue
            if known is not None:
                # Rows so far have the old columns.
                given += self._changes(batch, start, index)
                start = index
            given += self._relation(relation)
        given += self._changes(batch, start, len(batch))
        begins, lsns = pgoutput.begins(batch)
        if len(begins):
            self.xids |= pgoutput.xids(batch)
            self.open, self._commit_lsn = True, int(lsns[-1])
        return given

    def _commit_lsns(self, batch: MessageBatch, indices: Places) -> Places:
        """Return the commit position of each message's transaction."""
        begins, lsns = pgoutput.begins(batch)
        known = np.concatenate([np.array([self._commit_lsn], np.int64), lsns])
        found: Places = known[np.searchsorted(begins, indices, side="right")]
        return found

    def _find(self, oid: int) -> _Bound | None:
        """Return a table of the stream; None if it is no export, or has failed. Raises
        `RemoteProtocolError` for one that was not described: its changes must not be left out."""
        bound = self._bound.get(oid)
        name = self._oids.get(oid, "")
        if bound is None and name in self._exports and name not in self._failed:
            raise RemoteProtocolError(f"changes of {name} came before its columns")
        return bound

    def _truncate(self, batch: MessageBatch, index: int) -> list[Given]:
        commit_lsn = int(self._commit_lsns(batch, np.array([index]))[0])
        given: list[Given] = []
        for oid in pgoutput.truncated(batch, index):
            bound = self._find(oid)
            if bound is not None and commit_lsn >= bound.filled:
                self._count += 1
                given.append(ExportTruncated(bound.export.name))
        return given

    # -- descriptions of tables -----------------------------------------------------------

    def _relation(self, relation: PgRelation) -> list[Given]:
        """Bind a table that is described for the first time, or again."""
        self._relations[relation.oid] = relation
        self._bound.pop(relation.oid, None)
        name = self._oids.get(relation.oid)
        if name is None:
            if relation.name not in self._exports:
                return []
            error = "the table was dropped and made anew, or another one took its name"
            return self.fail(relation.name, error, RECREATE_HINT)
        if name != relation.name:
            error = f"the table was renamed to {relation.name}"
            return self.fail(name, error, f"rename it back, or {RECREATE_HINT}")
        if name in self._failed:
            return []
        try:
            self._bound[relation.oid] = self._bind(name, relation)
        except _Column as error:
            return self.fail(name, error.text, error.hint)
        return []

    def _bind(self, name: str, relation: PgRelation) -> _Bound:
        """Find an export's columns in the table as it is described. Raises `_Column`."""
        export, filled = self._exports[name], self._filled[name]
        places = {column.name: place for place, column in enumerate(relation.columns)}
        columns = []
        # The export may have further columns, which are not bound yet.
        for column, there in zip(export.schema.columns, filled.names, strict=False):
            place = places.get(there)
            if place is None:
                raise _Column(f"column {column.name} was dropped or renamed", RECREATE_HINT)
            filling = relation.columns[place]
            held = numeric_held_by(column.type)
            kind = column_type(filling.type_oid, filling.type_modifier, self._types, held)
            if kind.spark != column.type:
                raise _Column(type_changed(column.name, column.type, kind.spark), RECREATE_HINT)
            columns.append((place, kind))
        here = dict(zip(filled.names, export.schema.names, strict=False))
        if wrong := _identity_changed(export, relation, here):
            raise _Column(wrong, RECREATE_HINT)
        return _Bound(export, relation, tuple(columns), filled.lsn)

    # -- rows -----------------------------------------------------------------------------

    def _changes(self, batch: MessageBatch, start: int, stop: int) -> list[Given]:
        """Return rows of all inserts, updates and deletes between two indices of a batch."""
        tags = batch.tags[start:stop]
        changed = (tags == pgoutput.INSERT) | (tags == pgoutput.UPDATE) | (tags == pgoutput.DELETE)
        indices = np.flatnonzero(changed) + start
        if not len(indices):
            return []
        oids = pgoutput.relation_oids(batch)[indices]
        given: list[Given] = []
        for oid in np.unique(oids).tolist():
            bound = self._find(oid)
            if bound is None:
                continue
            chosen = indices[oids == oid]
            # The snapshot holds what was committed before its position: those changes are left out.
            if bound.filled > self.lsn:
                chosen = chosen[self._commit_lsns(batch, chosen) >= bound.filled]
            if not len(chosen):
                continue
            self._count += len(chosen)
            try:
                given.append(self._piece(batch, chosen, bound))
            except _Column as error:
                given += self.fail(bound.export.name, error.text, error.hint)
        return given

    def _piece(self, batch: MessageBatch, chosen: Places, bound: _Bound) -> Given:
        data, width = batch.data, len(bound.relation.columns)
        tags, places = batch.tags[chosen], batch.places[chosen] + 5
        marks = data[places]
        old = marks != pgoutput.NEW
        before, behind = pgoutput.walk(data, places[old] + 1, width)
        news = tags != pgoutput.DELETE
        tuples = places + 1
        # The new tuple follows the old one, after its mark.
        tuples[old] = behind + 1
        after, _ = pgoutput.walk(data, tuples[news], width)
        name = bound.export.name
        _check_old(bound, tags, marks)
        if bound.relation.identity == "f":
            _fill_unchanged(before, after, old[news], news[old])
            gone = _table(batch, before, bound, {DIFF: _full(-1, len(chosen[old]))})
            come = _table(batch, after, bound, {DIFF: _full(1, len(chosen[news]))})
            return SourceRows(name, pa.concat_tables([gone, come]))
        # Inserts need no lookup, unless upserts since the last mark may have their keys.
        if name not in self._replacing and bool((tags == pgoutput.INSERT).all()):
            return SourceRows(name, _table(batch, after, bound, {DIFF: _full(1, len(chosen))}))
        self._replacing.add(name)
        return SourceUpserts(name, _upserts(batch, bound, tags, old, before, after))


def _check_old(bound: _Bound, tags: ByteValues, marks: ByteValues) -> None:
    """Raise `_Column` where a change comes without the whole old row that the table's identity
    promises: a partition has an identity of its own."""
    if bound.relation.identity != "f":
        return
    if bool(((tags != pgoutput.INSERT) & (marks != pgoutput.OLD)).any()):
        raise _Column(
            "the replica identity of a partition is not FULL, as its table's is: an old row is not"
            " told",
            f"ALTER TABLE … REPLICA IDENTITY FULL for all partitions, then {RECREATE_HINT}",
        )


class _Column(Exception):
    """A column is not what it was, a value of it cannot be held, or an old row is missing."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def unheld(column: str, error: UnrepresentableValue) -> tuple[str, str]:
    """Return (error, hint) for a value that its column cannot hold."""
    return (
        f"column {column}: {error}",
        f"change the value there, or leave the column out, then {RECREATE_HINT}",
    )


def _identity_changed(export: SourceExport, relation: PgRelation, here: Mapping[str, str]) -> str:
    """Return the error if the table's replica identity no longer fits; "" if it does. `here`:
    column names there → names here."""
    if relation.identity == "f":
        return ""
    key = {here.get(column.name, column.name) for column in relation.columns if column.in_key}
    if key and key == set(export.schema.key):
        return ""
    identity = f"({', '.join(sorted(key))})" if key else "nothing"
    needed = f"({', '.join(export.schema.key)})" if export.schema.key else "full"
    return f"the table's replica identity is now {identity}; the rows here need {needed}"


def _fill_unchanged(
    before: list[TupleValues], after: list[TupleValues], updated: Places, with_new: Places
) -> None:
    """Replace unchanged (TOAST) values by those of the old row. `updated`: which new rows have an
    old one; `with_new`: which old rows have a new one; both in the same order."""
    for old, new in zip(before, after, strict=True):
        stays = new.kinds == pgoutput.UNCHANGED
        if not stays.any():
            continue
        rows = np.flatnonzero(updated)
        chosen = stays[rows]
        target, source = rows[chosen], np.flatnonzero(with_new)[chosen]
        new.kinds[target] = old.kinds[source]
        new.starts[target] = old.starts[source]
        new.ends[target] = old.ends[source]


def _upserts(
    batch: MessageBatch,
    bound: _Bound,
    tags: ByteValues,
    old: RowMask,
    before: list[TupleValues],
    after: list[TupleValues],
) -> pa.Table:
    """Return upserts in order: a delete of the old key (also when an update changed it), then the
    new row."""
    news = tags != pgoutput.DELETE
    moved = old[news]
    places = [place for place, _ in bound.columns]
    stays = np.array([after[place].kinds == pgoutput.UNCHANGED for place in places])
    keeps = stays.any(axis=0)
    ops = np.where(tags[news] == pgoutput.UPDATE, UpsertOp.UPDATED, UpsertOp.INSERTED)
    # An update of the key is a delete and an insert, which keeps values of the deleted row.
    ops = np.where(moved, np.where(keeps, UpsertOp.MOVED, UpsertOp.INSERTED), ops).astype(np.int8)
    come = _table(batch, after, bound, {OP: pa.array(ops)})
    gone = _table(batch, before, bound, {OP: _full(UpsertOp.DELETED, int(old.sum()), pa.int8())})
    if keeps.any():
        kept = [np.flatnonzero(row).tolist() or None for row in stays.T]
        come = come.append_column(KEPT, pa.array(kept, pa.list_(pa.int16())))
        gone = gone.append_column(KEPT, pa.nulls(gone.num_rows, pa.list_(pa.int16())))
    if not gone.num_rows:
        return come
    order = np.concatenate([np.flatnonzero(old) * 2, np.flatnonzero(news) * 2 + 1])
    return pa.concat_tables([gone, come]).take(pa.array(np.argsort(order)))


def _full(value: int, count: int, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(np.full(count, value), kind or pa.int64())


def _table(
    batch: MessageBatch, values: list[TupleValues], bound: _Bound, more: Mapping[str, pa.Array]
) -> pa.Table:
    """Return the export's columns of these tuples, and others."""
    columns: dict[str, pa.Array] = {}
    for (place, kind), column in zip(bound.columns, bound.export.schema.columns, strict=False):
        try:
            columns[column.name] = from_text(pgoutput.column(batch.data, values[place]), kind)
        except UnrepresentableValue as error:
            raise _Column(*unheld(column.name, error)) from None
    for column in bound.export.schema.columns[len(bound.columns) :]:
        rows = len(values[bound.columns[0][0]].kinds)
        columns[column.name] = pa.nulls(rows, arrow_type(column.type))
    return pa.table({**columns, **more})
