"""What a table's rows here rest on, and whether it still holds. Pure.

The server tells of rows, and of a table's columns by name whenever they may have changed; it does
not tell of columns' numbers, of partitions that come and go, or of a rewrite. So the catalog is
looked at before anything is sealed (`postgres_survey.glance`), and what it says is held against
what it said when the table was filled (`judge`). The rules:

- columns are bound by number, at the snapshot that fills them. While no row of `pg_attribute` of a
  bound column was written again, each has had its name throughout: so names in the stream are
  numbers. Once one was (a default, NOT NULL, or a name given away and taken back), names count
  only where the stream lists all columns of the beginning just as the catalog does, in its order;
- a bound column that is gone, renamed or of another type ends its table;
- what changes rows without telling (a partition that went, was emptied or came with rows; a
  rewrite beside an altered column; a label renamed; changes that the publication may have left
  out) has the table filled anew, at a snapshot of its own;
- what is not sure counts as changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from actors.sources.postgres_catalog import Leaf, Publication, Table
from actors.sources.postgres_exports import leaf_fault
from actors.sources.postgres_names import is_called
from actors.sources.postgres_types import TypeFacts, column_type
from actors.sources.source import Export

ANEW: Final = "drop this source's table here and add it again: it is then filled anew"


class Footing(msgspec.Struct, frozen=True, array_like=True):
    """What the catalog said of a table: digests, short enough to stand in every position."""

    shape: str = ""
    """Of the names of all columns that there were when it was filled; empty: it was filled before
    this was kept, and counts as unchanged."""
    altered: str = ""
    """Of the transactions that wrote its bound columns' rows of the catalog."""
    storage: str = ""
    """Of the file of its rows; of a partitioned table, of its partitions and their files."""
    leaves: int = 0
    """How many partitions `storage` counts; those with higher oids are new."""
    types: str = ""
    """Of labels of enums and parts of composites that its values' texts show."""
    label_max: int = 0
    """The highest oid of a label that `types` counts."""
    membership: str = ""
    """See `Publication.tokens`."""
    strict: bool = False
    """A bound column was altered since the table was filled."""


class Filled(msgspec.Struct, frozen=True):
    """A table whose first contents were taken."""

    oid: int
    lsn: int
    """They hold exactly what was committed before this position."""
    columns: tuple[int, ...] = ()
    """Numbers of the export's columns in the server's catalog."""
    number_max: int = 0
    """The highest column number that the table had."""
    footing: Footing = Footing()
    names: tuple[str, ...] = ()
    """Names there of the export's columns."""


class Stands(msgspec.Struct, frozen=True):
    """The table is as it was, or changed in a way that its rows here follow."""

    footing: Footing
    names: tuple[str, ...]
    """Of the bound columns there."""
    all_names: tuple[str, ...]
    """Of the columns that the stream lists first: those that there were at the beginning."""
    new_leaves: tuple[Leaf, ...]
    """Partitions that came; whoever asks must see that they came empty."""
    note: str = ""


class Ends(msgspec.Struct, frozen=True):
    """The table can go on no further."""

    error: str
    hint: str = ANEW


class Refills(msgspec.Struct, frozen=True):
    """Its rows here may not be those there any more: it is to be filled anew."""

    reason: str


Verdict: TypeAlias = Stands | Ends | Refills


def bind(
    table: Table,
    numbers: Sequence[int],
    lsn: int,
    types: Mapping[int, TypeFacts],
    publication: Publication | None,
) -> Filled:
    """Return a table as filled at a position, bound to columns of these numbers."""
    number_max = max((column.number for column in table.columns), default=0)
    names = {column.number: column.name for column in table.columns}
    return Filled(
        table.oid,
        lsn,
        tuple(numbers),
        number_max,
        _footing(table, numbers, number_max, types, publication),
        tuple(names.get(number, "") for number in numbers),
    )


def judge(
    export: Export,
    filled: Filled,
    table: Table | None,
    types: Mapping[int, TypeFacts],
    publication: Publication,
    numeric: str,
) -> Verdict:
    """Return what became of a table that was filled. `table` is the one with its oid now (None:
    it is no table any more)."""
    ended = _ended(export, filled, table, types, publication, numeric)
    if ended is not None or table is None:
        return ended or Ends("the table was dropped")
    was, bound = filled.footing, filled.columns
    now = _footing(table, bound, filled.number_max, types, publication, was)
    altered = bool(was.shape) and now.altered != was.altered
    strict = was.strict or altered
    if was.shape:
        if now.membership != was.membership:
            return Refills("the publication was altered, or the table taken out and put back")
        if now.types != was.types:
            return Refills("a type of its columns was altered")
        if strict and now.shape != was.shape:
            return Refills("its columns were altered, dropped or renamed together")
        if table.partitioned and now.storage != was.storage:
            return Refills("a partition was detached, dropped, emptied or rewritten")
        if altered and now.storage != was.storage:
            return Refills("it was rewritten and its columns altered together")
    names = {column.number: column.name for column in table.columns}
    return Stands(
        # All partitions, and all labels, count from now on.
        msgspec.structs.replace(
            _footing(table, bound, filled.number_max, types, publication), strict=strict
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
    export: Export,
    filled: Filled,
    table: Table | None,
    types: Mapping[int, TypeFacts],
    publication: Publication,
    numeric: str,
) -> Ends | None:
    if table is None or table.name != export.name:
        now = "" if table is None else f" to {table.name}"
        return Ends(f"the table was dropped or renamed{now}, or made anew")
    if table.name not in publication.tables:
        return Ends(
            f"publication {publication.name} gives the table no more",
            f"changes since then are not in the stream: add it again there, then {ANEW}",
        )
    if table.name in publication.filtered or publication.missing:
        return Ends(
            f"publication {publication.name} gives the table's changes in part only",
            f"have it give all rows, inserts, updates, deletes and truncates, then {ANEW}",
        )
    if not table.permanent:
        return Ends("the table is unlogged now", f"ALTER TABLE … SET LOGGED, then {ANEW}")
    listed = publication.tables[table.name]
    columns = {column.number: column for column in table.columns}
    for number, column in zip(filled.columns, export.schema.columns, strict=True):
        told = columns.get(number)
        if told is None or not is_called(column.name, number, told.name):
            return Ends(f"column {column.name} was dropped or renamed")
        if listed and told.name not in listed:
            return Ends(f"publication {publication.name} gives column {told.name} no more")
        now = column_type(told.type_oid, told.modifier, types, numeric).spark
        if now != column.type:
            return Ends(type_changed(column.name, column.type, now))
    faults = (leaf_fault(table, leaf) for leaf in table.leaves if not _tells_by_itself(table, leaf))
    return next((Ends(fault) for fault in faults if fault), None)


def _tells_by_itself(table: Table, leaf: Leaf) -> bool:
    """Tell whether a change without its old row shows that the partition's identity is wrong."""
    return table.identity == "f" and leaf.kind == "r" and leaf.permanent


def _note(export: Export, filled: Filled, table: Table) -> str:
    added = [each.name for each in table.columns if each.number > filled.number_max]
    told = []
    if added:
        told.append(
            f"{export.name}: not taken are the new {', '.join(added)}; to take them, {ANEW}"
        )
    told += [
        f"{export.name}: {fault}, or its first update ends the table here"
        for fault in (leaf_fault(table, leaf) for leaf in table.leaves)
        if fault
    ]
    return "; ".join(told)


def type_changed(column: str, was: str, now: str) -> str:
    """Return what is wrong with a column of another type."""
    return f"column {column} changed its type: {was} became {now}"


def _footing(
    table: Table,
    bound: Sequence[int],
    number_max: int,
    types: Mapping[int, TypeFacts],
    publication: Publication | None,
    was: Footing | None = None,
) -> Footing:
    """Return a table's footing now; as far as `was` went, of partitions and of labels, to be held
    against it."""
    known = was is not None and bool(was.shape)
    leaves = table.leaves[: was.leaves] if was is not None and known else table.leaves
    used = list(_made_of({c.type_oid for c in table.columns if c.number in bound}, types))
    highest = max((oid for facts in used for oid, _ in facts.labels), default=0)
    label_max = was.label_max if was is not None and known else highest
    return Footing(
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
        publication.tokens.get(table.oid, "") if publication else "",
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
