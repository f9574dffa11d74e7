"""Decodes replication messages into the output of a source: rows by table, then one mark. Pure.

Theory of operation. A batch of complete transactions becomes one piece of rows per table. All rows
before one mark belong to one instant, so the order of transactions does not matter. The batch is
split only where order matters: at a truncate, and where a table's columns change. A transaction
that is too large for one batch arrives in several, without a mark in between.

With replica identity FULL, the stream contains the complete old rows, and changes become
`SourceRows`. With any other identity it contains at most the key. Then changes become
`SourceUpserts`, or `SourceRows` as long as there were only inserts since the last mark.

Columns that are being added to an export (`growing`) are NULL up to the snapshot that reads their
values. Where the stream passes the snapshot's position, the output contains `ColumnsDue`; from
there on, rows have all columns.

An export fails if its table is renamed, recreated, loses a column or changes a type, if the table's
replica identity no longer contains its key, or if a value cannot be represented. Other exports
continue.
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
    """The stream has reached the snapshot of added columns. Here the rows that these exports
    contain get their values in those columns."""

    exports: tuple[str, ...]


Decoded: TypeAlias = Given | ColumnsDue


class _Bound(msgspec.Struct, frozen=True):
    """A table of the stream that is bound to an export."""

    export: SourceExport
    relation: PgRelation
    columns: tuple[tuple[int, ColumnType], ...]
    """For each of the export's bound columns, its place in the relation and its type. Further
    columns of the export are not bound yet and are NULL."""
    filled: int
    """LSN of the table's snapshot: changes that were committed before it are skipped."""


class DecodedChanges:
    """Decoder of one stream. Keeps the tables, the open transaction, and which exports are new or
    failed."""

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
        """Start at `lsn`.

        `filled` is shared with the caller and updated here: when the stream reaches the snapshot of
        the exports in `growing` (one for all), their new bindings replace the old ones. `position`
        encodes an LSN as a source position, and `filling` are the exports that the first mark
        fills.
        """
        self.lsn = lsn
        """LSN before which everything has been returned, followed by a mark."""
        self.commit_ms: int | None = None
        """Commit time of the newest transaction returned, in Unix ms; None if unknown."""
        self.open = False
        """True while a transaction has begun and not ended."""
        self._exports = {export.name: export for export in exports}
        self._filled = filled
        # Name of each filled export by the oid of its table.
        self._oids = {each.oid: name for name, each in filled.items()}
        # The catalog's types; replaced after each check of the catalog.
        self._types = types
        self._position = position
        # The latest description of each table in the stream, by oid.
        self._relations: dict[int, PgRelation] = {}
        # Bindings of tables to exports, by oid; rebuilt when a description changes.
        self._bound: dict[int, _Bound] = {}
        # Exports that have failed. They produce no more output.
        self._failed: set[str] = set()
        self._replacing: set[str] = set()
        """Exports that had upserts since the last mark."""
        self._commit_lsn = 0
        """LSN of the commit of the open transaction."""
        # Number of changes since the last mark.
        self._count = 0
        # Exports that are being given columns, with their bindings from then on.
        self._growing = dict(growing or {})
        snapshots = [each.lsn for each in (*filled.values(), *self._growing.values())]
        self._hold = max([lsn, *snapshots])
        """No mark is returned before this LSN: that of the newest snapshot, or of the start."""
        self._filling = tuple(filling)
        """Exports that the next mark fills."""
        self.xids: set[int] = set()
        """Ids (modulo 2^32) of the transactions decoded since the last check of the catalog."""
        self._described: dict[str, set[tuple[str, ...]]] = {}
        """Column lists that the server has sent for each export since then."""
        self._listed: dict[str, tuple[str, ...]] = {}
        """Columns with which every list of an export must start. Set for exports whose column names
        alone no longer identify columns."""
        self._grown: set[str] = set()
        """Exports that were given columns since then. Their required lists apply only to what came
        before."""

    def take(self, batch: MessageBatch) -> list[Decoded]:
        """Decode a batch. Return rows, then a mark for the last commit, then rows of the
        transaction that is still open.

        Raises `RemoteProtocolError`.
        """
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
        """Return whether the stream has not yet reached all snapshots, so that no marks are
        returned."""
        return self.lsn < self._hold

    def contents_given(self) -> list[Decoded]:
        """Return a mark after the snapshot's last rows, if the stream starts at its position."""
        return self._mark(self.lsn, None)

    def idle(self, lsn: int) -> list[Decoded]:
        """Return a mark for an LSN before which the server has nothing more to send; nothing if the
        stream is already there."""
        if self.open or lsn <= self.lsn:
            return []
        return self._mark(lsn, None)

    def keep_export(self, export: str, found: TableContinues) -> None:
        """Record the verdict that a table still matches the catalog."""
        if found.fingerprint.strict:
            self._listed[export] = found.all_names

    def learn(self, types: Mapping[int, TypeFacts]) -> None:
        """Replace the types with the catalog's current ones."""
        self._types = types

    def confirm(self) -> list[Given]:
        """Return the failures of exports whose columns in the stream differ from those in the
        catalog.

        Called after a check of the catalog that saw all decoded transactions.
        """
        given: list[Given] = []
        for export, columns in self._listed.items():
            for names in self._described.get(export, ()):
                if names[: len(columns)] != columns:
                    listed = ", ".join(columns)
                    error = (
                        f"its columns were renamed: the stream has {', '.join(names)}, the"
                        f" catalog {listed}"
                    )
                    given += self.fail(export, error, RECREATE_HINT)
        # They were bound again at their snapshot. From there on, names identify their columns.
        for export in self._grown:
            self._listed.pop(export, None)
        self._grown.clear()
        self._described.clear()
        self.xids.clear()
        return given

    def is_failed(self, export: str) -> bool:
        """Return whether an export has failed."""
        return export in self._failed

    def fail(self, export: str, error: str, hint: str) -> list[Given]:
        """Mark an export as failed. Return the failure the first time, and nothing after that."""
        if export in self._failed or export not in self._exports:
            return []
        self._failed.add(export)
        self._bound = {
            oid: bound for oid, bound in self._bound.items() if bound.export.name != export
        }
        return [ExportFailed(export, error, hint)]

    def _mark(self, lsn: int, commit_ms: int | None) -> list[Decoded]:
        # Before the stream reaches all snapshots, some tables would be newer than others.
        if lsn < self._hold:
            return []
        due = self._grow() if self._growing else []
        self.lsn = lsn
        self.commit_ms = commit_ms or self.commit_ms
        count, self._count = self._count, 0
        filled, self._filling = self._filling, ()
        self._replacing.clear()
        return [*due, PositionMark(self._position(lsn), commit_ms, count, filled)]

    # -- added columns -----------------------------------------------------------------------

    def _due(self, batch: MessageBatch) -> int | None:
        """Return the index of the first transaction that is not in the snapshot of added columns;
        None if there is none."""
        if not self._growing:
            return None
        at = next(iter(self._growing.values())).lsn
        begins, lsns = pgoutput.begins(batch)
        (later,) = np.nonzero(lsns >= at)
        return int(begins[later[0]]) if len(later) else None

    def _grow(self) -> list[Decoded]:
        """Bind the tables whose columns are being added to all their columns."""
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
                # The known description is older than the added columns. The server sends a new one
                # before the table's next row.
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
                # Rows up to here have the old columns.
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
        """Return the commit LSN of each message's transaction."""
        begins, lsns = pgoutput.begins(batch)
        known = np.concatenate([np.array([self._commit_lsn], np.int64), lsns])
        found: Places = known[np.searchsorted(begins, indices, side="right")]
        return found

    def _find(self, oid: int) -> _Bound | None:
        """Return the binding of a table in the stream; None if it is not an export or has failed.

        Raises `RemoteProtocolError` for an export that was not described yet, whose changes must
        not be skipped.
        """
        bound = self._bound.get(oid)
        name = self._oids.get(oid, "")
        if bound is None and name in self._exports and name not in self._failed:
            raise RemoteProtocolError(f"changes of {name} arrived before its columns")
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
        """Bind a table to its export when the server describes it, for the first time or again."""
        self._relations[relation.oid] = relation
        self._bound.pop(relation.oid, None)
        name = self._oids.get(relation.oid)
        if name is None:
            if relation.name not in self._exports:
                return []
            error = "the table was recreated, or another table took its name"
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
        """Find an export's columns in the description of its table. Raises `_Column`."""
        export, filled = self._exports[name], self._filled[name]
        places = {column.name: place for place, column in enumerate(relation.columns)}
        columns = []
        # The export may have additional columns that are not bound yet.
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
        """Return the rows of all inserts, updates and deletes between two indices of a batch."""
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
            # The snapshot already contains what was committed before its LSN, so those changes are
            # skipped.
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
        # The new tuple follows the old one, after its type byte.
        tuples[old] = behind + 1
        after, _ = pgoutput.walk(data, tuples[news], width)
        name = bound.export.name
        _check_old(bound, tags, marks)
        if bound.relation.identity == "f":
            _fill_unchanged(before, after, old[news], news[old])
            gone = _table(batch, before, bound, {DIFF: _full(-1, len(chosen[old]))})
            come = _table(batch, after, bound, {DIFF: _full(1, len(chosen[news]))})
            return SourceRows(name, pa.concat_tables([gone, come]))
        # Inserts need no lookup, unless upserts since the last mark may have the same keys.
        if name not in self._replacing and bool((tags == pgoutput.INSERT).all()):
            return SourceRows(name, _table(batch, after, bound, {DIFF: _full(1, len(chosen))}))
        self._replacing.add(name)
        return SourceUpserts(name, _upserts(batch, bound, tags, old, before, after))


def _check_old(bound: _Bound, tags: ByteValues, marks: ByteValues) -> None:
    """Raise `_Column` if a change lacks the complete old row that identity FULL requires. A
    partition may have a different identity than its table."""
    if bound.relation.identity != "f":
        return
    if bool(((tags != pgoutput.INSERT) & (marks != pgoutput.OLD)).any()):
        raise _Column(
            "the replica identity of a partition is not FULL, unlike its table's: an old row is "
            "missing",
            f"run ALTER TABLE … REPLICA IDENTITY FULL for all partitions, then {RECREATE_HINT}",
        )


class _Column(Exception):
    """A column changed, one of its values cannot be represented, or an old row is missing."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def unheld(column: str, error: UnrepresentableValue) -> tuple[str, str]:
    """Return the error and the hint for a value that its column cannot hold."""
    return (
        f"column {column}: {error}",
        f"change the value upstream, or leave the column out, then {RECREATE_HINT}",
    )


def _identity_changed(export: SourceExport, relation: PgRelation, here: Mapping[str, str]) -> str:
    """Return an error if the table's replica identity no longer matches the export's key; "" if it
    does.

    `here` maps upstream column names to local ones.
    """
    if relation.identity == "f":
        return ""
    key = {here.get(column.name, column.name) for column in relation.columns if column.in_key}
    if key and key == set(export.schema.key):
        return ""
    identity = f"({', '.join(sorted(key))})" if key else "nothing"
    needed = f"({', '.join(export.schema.key)})" if export.schema.key else "full"
    return f"the table's replica identity is now {identity}, but the ingested rows need {needed}"


def _fill_unchanged(
    before: list[TupleValues], after: list[TupleValues], updated: Places, with_new: Places
) -> None:
    """Replace unchanged (TOASTed) values with those of the old row.

    `updated` marks the new rows that have an old one, and `with_new` the old rows that have a new
    one; both in the same order.
    """
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
    """Return upserts in order: for each change, a delete of the old key if there is one (also when
    an update changed the key), then the new row."""
    news = tags != pgoutput.DELETE
    moved = old[news]
    places = [place for place, _ in bound.columns]
    stays = np.array([after[place].kinds == pgoutput.UNCHANGED for place in places])
    keeps = stays.any(axis=0)
    ops = np.where(tags[news] == pgoutput.UPDATE, UpsertOp.UPDATED, UpsertOp.INSERTED)
    # An update of the key is a delete and an insert, which keeps unchanged values of the deleted
    # row.
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
    """Return the export's columns of these tuples, and the columns in `more`."""
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
