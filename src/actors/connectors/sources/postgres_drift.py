"""Judges whether a table's rows here still agree with the catalog, by digests. Pure.

The stream tells of rows, and of a table's columns by name whenever they may have changed; it does
not tell of columns' numbers, of partitions that come and go, or of a rewrite. So the catalog is
checked before every mark (`postgres_survey.glance`), and compared with its state when the table was
filled, or last judged (`judge`). The rules:

- columns are bound by number, at the snapshot that fills them (an export that was given further
  columns, at the snapshot that tells their values). While no row of `pg_attribute` of a
  bound column was written again, names in the stream are numbers. Once one was (a default, NOT
  NULL, or a name given away and taken back), names count only where the stream lists all columns
  of the beginning just as the catalog does, in its order;
- a bound column that is gone, renamed or of another type ends its table;
- a change of rows that the stream does not tell (a partition that was detached, emptied or attached
  with rows; a rewrite beside an altered column; a label renamed; changes that the publication may
  have left out) has the table refilled, at a snapshot of its own;
- what is not sure counts as changed.

A source's position is a server, a place in its log, and the tables that are filled, each with the
state that it is compared with (`write_position`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from actors.connectors.sources.postgres_catalog import (
    LeafPartition,
    PostgresTable,
    PublicationInfo,
    leaf_fault,
)
from actors.connectors.sources.postgres_names import has_local_name
from actors.connectors.sources.postgres_types import TypeFacts, column_type, numeric_held_by
from actors.connectors.sources.source import SourceExport
from actors.runtime.errors import InvalidUsage
from actors.wal.lsn import lsn_text, parse_lsn

RECREATE_HINT: Final = "drop this source's table here and add it again: it is then filled anew"


class TableFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the catalog's facts of a table, short enough for every position."""

    shape: str = ""
    """Digest of all column names at the filling; "": it was filled before digests were kept, and
    counts as unchanged."""
    altered: str = ""
    """Digest of the transactions that wrote its bound columns' rows of the catalog."""
    storage: str = ""
    """Digest of the file of its rows; of a partitioned table, of its partitions and their files."""
    leaves: int = 0
    """Number of partitions in `storage`; those with higher oids are new."""
    types: str = ""
    """Digest of labels of enums and attributes of composites that its values' texts show."""
    label_max: int = 0
    """Highest oid of a label in `types`."""
    membership: str = ""
    """See `PublicationInfo.tokens`."""
    strict: bool = False
    """True if a bound column was altered since the table was filled."""


class FilledTable(msgspec.Struct, frozen=True):
    """A table whose snapshot was taken."""

    oid: int
    lsn: int
    """The snapshot holds exactly what was committed before this position."""
    columns: tuple[int, ...] = ()
    """Numbers of the export's columns in the server's catalog."""
    number_max: int = 0
    """Highest column number of the table at the snapshot."""
    fingerprint: TableFingerprint = TableFingerprint()
    names: tuple[str, ...] = ()
    """Names of the export's columns in the server's catalog."""


class TableContinues(msgspec.Struct, frozen=True):
    """Verdict: the table is unchanged, or changed in a way that its rows here follow."""

    fingerprint: TableFingerprint
    names: tuple[str, ...]
    """Names of the bound columns in the server's catalog."""
    all_names: tuple[str, ...]
    """Names of the columns that the stream lists first: those that there were at the snapshot."""
    new_leaves: tuple[LeafPartition, ...]
    """Partitions that were attached; the caller must check that they came empty."""
    note: str = ""


class TableFails(msgspec.Struct, frozen=True):
    """Verdict: the export fails."""

    error: str
    hint: str = RECREATE_HINT


class TableNeedsRefill(msgspec.Struct, frozen=True):
    """Verdict: rows here may differ from those there; the table must be refilled."""

    reason: str


Verdict: TypeAlias = TableContinues | TableFails | TableNeedsRefill


def bind(
    table: PostgresTable,
    numbers: Sequence[int],
    lsn: int,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo | None,
) -> FilledTable:
    """Return a table as filled at a position, bound to columns of these numbers."""
    number_max = max((column.number for column in table.columns), default=0)
    names = {column.number: column.name for column in table.columns}
    return FilledTable(
        table.oid,
        lsn,
        tuple(numbers),
        number_max,
        _fingerprint_of(table, numbers, number_max, types, publication),
        tuple(names.get(number, "") for number in numbers),
    )


def judge(
    export: SourceExport,
    filled: FilledTable,
    table: PostgresTable | None,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo,
) -> Verdict:
    """Return the verdict on a table that was filled. `table`: the one with its oid now; None:
    dropped."""
    ended = _ended(export, filled, table, types, publication)
    if ended is not None or table is None:
        return ended or TableFails("the table was dropped")
    was, bound = filled.fingerprint, filled.columns
    now = _fingerprint_of(table, bound, filled.number_max, types, publication, was)
    altered = bool(was.shape) and now.altered != was.altered
    strict = was.strict or altered
    # Positions written before digests were kept have no shape: nothing can be compared.
    if was.shape:
        # An empty token was kept by a version that did not know those FOR ALL TABLES.
        if was.membership and now.membership != was.membership:
            # Changes in between may not be in the stream.
            return TableNeedsRefill(
                "the publication was altered, or the table taken out and put back"
            )
        # Values that were stored before may read otherwise now: an enum's label, a composite's
        # field.
        if now.types != was.types:
            return TableNeedsRefill("a type of its columns was altered")
        if strict and now.shape != was.shape:
            # Names may have been exchanged between columns, so those in the stream prove nothing.
            return TableNeedsRefill("its columns were altered, dropped or renamed together")
        if table.partitioned and now.storage != was.storage:
            return TableNeedsRefill("a partition was detached, dropped, emptied or rewritten")
        if altered and now.storage != was.storage:
            return TableNeedsRefill("it was rewritten and its columns altered together")
    names = {column.number: column.name for column in table.columns}
    return TableContinues(
        # All partitions, and all labels, count from now on.
        msgspec.structs.replace(
            _fingerprint_of(table, bound, filled.number_max, types, publication), strict=strict
        ),
        tuple(names[number] for number in bound),
        tuple(
            column.name
            for column in table.columns
            if column.number <= filled.number_max
            and not column.generated
            and column.name in (publication.tables[table.name] or (column.name,))
        ),
        table.leaves[was.leaves :] if was.shape else (),
        _note(export, filled, table),
    )


def _ended(
    export: SourceExport,
    filled: FilledTable,
    table: PostgresTable | None,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo,
) -> TableFails | None:
    if table is None or table.name != export.name:
        now = "" if table is None else f" to {table.name}"
        return TableFails(f"the table was dropped or renamed{now}, or made anew")
    if table.name not in publication.tables:
        return TableFails(
            f"publication {publication.name} gives the table no more",
            f"changes since then are not in the stream: add it again there, then {RECREATE_HINT}",
        )
    if table.name in publication.filtered or publication.missing:
        return TableFails(
            f"publication {publication.name} gives the table's changes in part only",
            f"have it give all rows, inserts, updates, deletes and truncates, then {RECREATE_HINT}",
        )
    if not table.permanent:
        return TableFails(
            "the table is unlogged now", f"ALTER TABLE … SET LOGGED, then {RECREATE_HINT}"
        )
    listed = publication.tables[table.name]
    columns = {column.number: column for column in table.columns}
    # The export may have further columns, which are not bound yet.
    for number, column in zip(filled.columns, export.schema.columns, strict=False):
        found = columns.get(number)
        if found is None or not has_local_name(column.name, number, found.name):
            return TableFails(f"column {column.name} was dropped or renamed")
        if listed and found.name not in listed:
            return TableFails(f"publication {publication.name} gives column {found.name} no more")
        # The type that was chosen for it when the table was taken holds on.
        held = numeric_held_by(column.type)
        now = column_type(found.type_oid, found.modifier, types, held).spark
        if now != column.type:
            return TableFails(type_changed(column.name, column.type, now))
    # With FULL a partition's first change shows its fault; until then a note is enough (`_note`).
    faults = (leaf_fault(table, leaf) for leaf in table.leaves if not _tells_by_itself(table, leaf))
    return next((TableFails(fault) for fault in faults if fault), None)


def _tells_by_itself(table: PostgresTable, leaf: LeafPartition) -> bool:
    """Say whether the stream itself shows that the partition's identity is wrong: a change comes
    without its old row."""
    return table.identity == "f" and leaf.kind == "r" and leaf.permanent


def _note(export: SourceExport, filled: FilledTable, table: PostgresTable) -> str:
    bound = filled.columns
    new = [each for each in table.columns if each.number > filled.number_max]
    added = [each.name for each in new if each.number not in bound and not each.generated]
    notes = []
    if added:
        notes.append(
            f"{export.name}: not taken are the new {', '.join(added)}; to take them, ALTER TABLE …"
            " ADD COLUMN here"
        )
    notes += [
        f"{export.name}: {fault}, or its first update ends the table here"
        for fault in (leaf_fault(table, leaf) for leaf in table.leaves)
        if fault
    ]
    return "; ".join(notes)


def type_changed(column: str, was: str, now: str) -> str:
    """Return the error for a column whose type changed."""
    return f"column {column} changed its type: {was} became {now}"


def _fingerprint_of(
    table: PostgresTable,
    bound: Sequence[int],
    number_max: int,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo | None,
    was: TableFingerprint | None = None,
) -> TableFingerprint:
    """Return a table's fingerprint now. With `was`, only partitions and labels that `was` counts
    take part, so that the two compare.
    """
    known = was is not None and bool(was.shape)
    # Ordered by oid: partitions that are new come last.
    leaves = table.leaves[: was.leaves] if was is not None and known else table.leaves
    used = list(_made_of({c.type_oid for c in table.columns if c.number in bound}, types))
    highest = max((oid for facts in used for oid, _ in facts.labels), default=0)
    label_max = was.label_max if was is not None and known else highest
    return TableFingerprint(
        _digest((c.number, c.name, c.generated) for c in table.columns if c.number <= number_max),
        _digest((c.number, c.changed_xid) for c in table.columns if c.number in bound),
        _digest([table.filenode, *((leaf.oid, leaf.filenode) for leaf in leaves)]),
        len(leaves),
        _digest(
            (
                facts.oid,
                facts.attributes,
                [label for label in facts.labels if label[0] <= label_max],
            )
            for facts in used
            if facts.labels or facts.attributes
        ),
        label_max,
        # Of a publication FOR ALL TABLES there is only its own token, under 0.
        (publication.tokens.get(table.oid) or publication.tokens.get(0, "")) if publication else "",
    )


def _made_of(oids: set[int], types: Mapping[int, TypeFacts]) -> Iterable[TypeFacts]:
    """Yield the facts of these types and of all that they are made of, in order of their oids."""
    found: dict[int, TypeFacts] = {}
    left = list(oids)
    while left:
        facts = types.get(left.pop())
        if facts is not None and facts.oid not in found:
            found[facts.oid] = facts
            left += facts.parts
    return (found[oid] for oid in sorted(found))


def _digest(parts: Iterable[object]) -> str:
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=6).hexdigest()


# -- positions -------------------------------------------------------------------------------------


class _Filled(msgspec.Struct, frozen=True, array_like=True):
    """A `FilledTable` as JSON."""

    oid: int
    lsn: str
    columns: list[int]
    number_max: int
    fingerprint: TableFingerprint = TableFingerprint()


class _Position(msgspec.Struct, frozen=True):
    system: str
    database: str
    lsn: str
    filled: dict[str, _Filled]


class PostgresPosition(msgspec.Struct, frozen=True):
    """A source's position: everything before `lsn` was given."""

    lsn: int
    filled: dict[str, FilledTable]


def write_position(system: str, database: str, lsn: int, filled: Mapping[str, FilledTable]) -> str:
    """Return a position as its text."""
    tables = {
        name: _Filled(
            each.oid, lsn_text(each.lsn), list(each.columns), each.number_max, each.fingerprint
        )
        for name, each in filled.items()
    }
    return msgspec.json.encode(_Position(system, database, lsn_text(lsn), tables)).decode()


def read_position(text: str, system: str, database: str) -> PostgresPosition:
    """Parse a position's text. Raises `InvalidUsage` for that of another server or database."""
    was = msgspec.json.decode(text, type=_Position)
    if was.system != system or was.database != database:
        raise InvalidUsage(
            f"this is server {system}, database {database}; what is here came from server"
            f" {was.system}, database {was.database}: name that one, or drop the source and create"
            " it again"
        )
    filled = {
        name: FilledTable(
            each.oid, parse_lsn(each.lsn), tuple(each.columns), each.number_max, each.fingerprint
        )
        for name, each in was.filled.items()
    }
    return PostgresPosition(parse_lsn(was.lsn), filled)


def position_lsn(text: str) -> int:
    """Return the place in the log of a position's text."""
    return parse_lsn(msgspec.json.decode(text, type=_Position).lsn)
