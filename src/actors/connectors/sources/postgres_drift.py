"""Decides, by comparing digests, whether a table still matches the upstream catalog. Pure.

The replication stream carries rows, and a table's column names whenever its columns may have
changed. It does not report column numbers, partitions that are attached or detached, or rewrites.
So the catalog is checked before every mark (`postgres_survey.read_catalog_digest`) and compared
with its state when the table was filled or last checked (`judge`). The rules:

- Columns are bound by number, at the snapshot that fills them. (Columns that are added to an export
  later are bound at the snapshot that reads their values.) As long as no `pg_attribute` row of a
  bound column is rewritten, names in the stream identify columns. Once such a row is rewritten (a
  new default, NOT NULL, a rename and a rename back), names are trusted only if the stream lists all
  original columns exactly as the catalog does, in its order.
- If a bound column is dropped, renamed or changes its type, its table fails.
- If rows change in a way that the stream does not report, the table is refilled from a separate
  snapshot. Examples: a partition that is detached, emptied, or attached with rows; a rewrite
  together with an altered column; a renamed enum label; changes that the publication may have left
  out.
- In doubt, a table counts as changed.

A source's position consists of the server, an LSN, and the filled tables, each with the fingerprint
that it is compared with (`write_position`).
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

RECREATE_HINT: Final = "drop this table from the source and add it again to refill it"


class TableFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the catalog's facts about a table. Short, because every position contains them."""

    shape: str = ""
    """Digest of all column names when the table was filled. "": filled before digests were kept;
    counts as unchanged."""
    altered: str = ""
    """Digest of the ids of the transactions that wrote the catalog rows of its bound columns."""
    storage: str = ""
    """Digest of the file that stores its rows; for a partitioned table, of its partitions and their
    files."""
    leaves: int = 0
    """Number of partitions in `storage`. Partitions with higher oids are new."""
    types: str = ""
    """Digest of the enum labels and composite attributes that appear in the text of its values."""
    label_max: int = 0
    """Highest oid of a label in `types`."""
    membership: str = ""
    """The table's token in `PublicationInfo.tokens`. It changes when the table's membership in the
    publication changes."""
    strict: bool = False
    """True if a bound column has been altered since the table was filled."""


class FilledTable(msgspec.Struct, frozen=True):
    """A table that was filled from a snapshot."""

    oid: int
    lsn: int
    """The snapshot contains exactly what was committed before this LSN."""
    columns: tuple[int, ...] = ()
    """Column numbers of the export's columns in the server's catalog."""
    number_max: int = 0
    """Highest column number of the table at the snapshot."""
    fingerprint: TableFingerprint = TableFingerprint()
    names: tuple[str, ...] = ()
    """Names of the export's columns in the server's catalog."""


class TableContinues(msgspec.Struct, frozen=True):
    """Verdict: the table is unchanged, or changed in a way that the stream reports."""

    fingerprint: TableFingerprint
    names: tuple[str, ...]
    """Names of the bound columns in the server's catalog."""
    all_names: tuple[str, ...]
    """Names of the columns that the stream lists first: those that existed at the snapshot."""
    new_leaves: tuple[LeafPartition, ...]
    """Partitions that were attached. The caller must check that they were empty then."""
    note: str = ""
    """Warning for the user; "" if none."""


class TableFails(msgspec.Struct, frozen=True):
    """Verdict: the export fails."""

    error: str
    hint: str = RECREATE_HINT


class TableNeedsRefill(msgspec.Struct, frozen=True):
    """Verdict: the ingested rows may differ from the upstream rows, so the table must be
    refilled."""

    reason: str


Verdict: TypeAlias = TableContinues | TableFails | TableNeedsRefill


def bind(
    table: PostgresTable,
    numbers: Sequence[int],
    lsn: int,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo | None,
) -> FilledTable:
    """Bind a table, filled by a snapshot at `lsn`, to the columns with these numbers."""
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
    """Return the verdict on a filled table.

    `table` is the table that now has its oid; None if it was dropped.
    """
    ended = _ended(export, filled, table, types, publication)
    if ended is not None or table is None:
        return ended or TableFails("the table was dropped")
    was, bound = filled.fingerprint, filled.columns
    now = _fingerprint_of(table, bound, filled.number_max, types, publication, was)
    altered = bool(was.shape) and now.altered != was.altered
    strict = was.strict or altered
    # Positions written before digests were kept have no shape, so there is nothing to compare.
    if was.shape:
        # An empty token was written by a version that had no tokens for FOR ALL TABLES.
        if was.membership and now.membership != was.membership:
            # The stream may lack changes that were made in between.
            return TableNeedsRefill(
                "the publication was altered, or the table was removed from it and added back"
            )
        # Stored values may now have another text: an enum's label or a composite's attribute
        # changed.
        if now.types != was.types:
            return TableNeedsRefill("one of its columns' types was altered")
        if strict and now.shape != was.shape:
            # Columns may have exchanged their names, so the names in the stream prove nothing.
            return TableNeedsRefill(
                "several of its columns were altered, dropped or renamed together"
            )
        if table.partitioned and now.storage != was.storage:
            return TableNeedsRefill("a partition was detached, dropped, emptied or rewritten")
        if altered and now.storage != was.storage:
            return TableNeedsRefill("it was rewritten and its columns were altered together")
    names = {column.number: column.name for column in table.columns}
    return TableContinues(
        # From now on, all current partitions and labels are known.
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
        return TableFails(f"the table was dropped, recreated or renamed{now}")
    if table.name not in publication.tables:
        return TableFails(
            f"publication {publication.name} no longer contains the table",
            "add it to the publication again; changes in between are not in the stream, so then "
            f"{RECREATE_HINT}",
        )
    if table.name in publication.filtered or publication.missing:
        return TableFails(
            f"publication {publication.name} publishes only part of the table's changes",
            "have it publish all rows, and insert, update, delete and truncate, then "
            f"{RECREATE_HINT}",
        )
    if not table.permanent:
        return TableFails(
            "the table became unlogged", f"ALTER TABLE … SET LOGGED, then {RECREATE_HINT}"
        )
    listed = publication.tables[table.name]
    columns = {column.number: column for column in table.columns}
    # The export may have additional columns that are not bound yet.
    for number, column in zip(filled.columns, export.schema.columns, strict=False):
        found = columns.get(number)
        if found is None or not has_local_name(column.name, number, found.name):
            return TableFails(f"column {column.name} was dropped or renamed")
        if listed and found.name not in listed:
            return TableFails(
                f"publication {publication.name} no longer publishes column {found.name}"
            )
        # A numeric column keeps the type that was chosen when the table was added.
        held = numeric_held_by(column.type)
        now = column_type(found.type_oid, found.modifier, types, held).spark
        if now != column.type:
            return TableFails(type_changed(column.name, column.type, now))
    # With REPLICA IDENTITY FULL, a bad partition is detected at its first change; until then a note
    # is enough (`_note`).
    faults = (leaf_fault(table, leaf) for leaf in table.leaves if not _tells_by_itself(table, leaf))
    return next((TableFails(fault) for fault in faults if fault), None)


def _tells_by_itself(table: PostgresTable, leaf: LeafPartition) -> bool:
    """Return whether the stream itself reveals a bad replica identity of the partition: a change
    arrives without its old row."""
    return table.identity == "f" and leaf.kind == "r" and leaf.permanent


def _note(export: SourceExport, filled: FilledTable, table: PostgresTable) -> str:
    bound = filled.columns
    new = [each for each in table.columns if each.number > filled.number_max]
    added = [each.name for each in new if each.number not in bound and not each.generated]
    notes = []
    if added:
        notes.append(
            f"{export.name}: new columns {', '.join(added)} are not ingested; to ingest them, run "
            "ALTER TABLE … ADD COLUMN here"
        )
    notes += [
        f"{export.name}: {fault}; otherwise its first update makes the table fail"
        for fault in (leaf_fault(table, leaf) for leaf in table.leaves)
        if fault
    ]
    return "; ".join(notes)


def type_changed(column: str, was: str, now: str) -> str:
    """Return the error text for a column whose type changed."""
    return f"column {column} changed its type from {was} to {now}"


def _fingerprint_of(
    table: PostgresTable,
    bound: Sequence[int],
    number_max: int,
    types: Mapping[int, TypeFacts],
    publication: PublicationInfo | None,
    was: TableFingerprint | None = None,
) -> TableFingerprint:
    """Compute a table's current fingerprint.

    With `was`, use only the partitions and labels that `was` includes, so that the two can be
    compared.
    """
    known = was is not None and bool(was.shape)
    # Ordered by oid, so new partitions come last.
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
        # A publication FOR ALL TABLES has a single token, under oid 0.
        (publication.tokens.get(table.oid) or publication.tokens.get(0, "")) if publication else "",
    )


def _made_of(oids: set[int], types: Mapping[int, TypeFacts]) -> Iterable[TypeFacts]:
    """Yield the facts about these types and their component types, in order of oid."""
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
    """A `FilledTable` in the JSON of a position."""

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
    """Position of a source: everything before `lsn` has been delivered, and `filled` tables have
    their first contents."""

    lsn: int
    filled: dict[str, FilledTable]


def write_position(system: str, database: str, lsn: int, filled: Mapping[str, FilledTable]) -> str:
    """Encode a position as text."""
    tables = {
        name: _Filled(
            each.oid, lsn_text(each.lsn), list(each.columns), each.number_max, each.fingerprint
        )
        for name, each in filled.items()
    }
    return msgspec.json.encode(_Position(system, database, lsn_text(lsn), tables)).decode()


def read_position(text: str, system: str, database: str) -> PostgresPosition:
    """Parse the text of a position. Raises `InvalidUsage` if it belongs to another server or
    database."""
    was = msgspec.json.decode(text, type=_Position)
    if was.system != system or was.database != database:
        raise InvalidUsage(
            f"connected to server {system}, database {database}, but the ingested data comes from "
            f"server {was.system}, database {was.database}: connect to that one, or drop the "
            "source and create it again"
        )
    filled = {
        name: FilledTable(
            each.oid, parse_lsn(each.lsn), tuple(each.columns), each.number_max, each.fingerprint
        )
        for name, each in was.filled.items()
    }
    return PostgresPosition(parse_lsn(was.lsn), filled)


def position_lsn(text: str) -> int:
    """Return the LSN in the text of a position."""
    return parse_lsn(msgspec.json.decode(text, type=_Position).lsn)
