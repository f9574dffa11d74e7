"""Rows of keys that are in this process's memory: read without a message to a worker.

A table is there by its PRIMARY KEY, in the arrangement in which the table writer looks keys up
(`TableArrangements`): it is built when a key is first asked for, or written. An index is there if
the workers are in this process: each has its partition, sealed beyond the time that is read. A read
of the controller (`reads`) asks here first. So does a door beside it: it reads the rows of one key
at the latest written time without waiting for a turn of the controller.

Whatever is not surely so is None, and the caller goes the long way, which waits, and reports
errors. All of it runs on one event loop: the controller's state is read between its turns, and
changes in them only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from actors.control.access.role_registry import READ
from actors.control.controller.catalog.catalog import TABLE, CatalogObject, CatalogSnapshot
from actors.control.controller.messages import ArrangeTable
from actors.control.controller.state import ControllerState, NoContentsYet
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.durable.arrangement.arrangement import Arrangement
from actors.durable.arrangement.hashing import Hashes, hash_values
from actors.durable.arrangement.snapshot import ArrangementSnapshot
from actors.engine.views.plain_read import PlainRead
from actors.engine.views.read_choice import KnownIndex, ReadChoice, choose_ways, fixed_columns
from actors.model.plan.schema import DIFF
from actors.model.protocol.compute import Peek
from actors.model.protocol.relations import is_relation
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.peeks import PeekSpec, one_key_answer, rows_of_key
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Time

LOOP_KEYS_MAX = 256
"""Keys that are looked up on the event loop, in 0.1 ms; of one key a thread makes it 1.4 × as long
(November 2026)."""

_RESOLVED_MAX: Final = 1_024
"""Bound of remembered resolutions of names; beyond, all are forgotten."""

_Contents: TypeAlias = tuple[Arrangement, Sequence[ArrangementSnapshot]]
"""One of the arrangements that have a part of some contents each, and the contents of all."""


class PointSelection(msgspec.Struct, frozen=True):
    """The columns of one object that a key fixes, in the order in which values come, and the
    columns of the answer."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


class _Partitioned:
    """Contents that were partitioned by the hashes of their keys; see `CollectionContents`."""

    def __init__(self, views: Sequence[ArrangementSnapshot]) -> None:
        self._views = views

    def errors(self) -> pa.Table:
        """Return the summed errors of all partitions."""
        return pa.concat_tables([each.errors() for each in self._views])

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these hashes, each from its partition."""
        for number, view in enumerate(self._views):
            own = None if wanted is None else wanted[wanted % len(self._views) == number]
            if own is None or len(own):
                yield from view.rows(own)


class KeyedLookup(msgspec.Struct, frozen=True):
    """A peek by keys of contents that are at hand."""

    spec: PeekSpec
    contents: _Partitioned
    hashes: Hashes
    bytes_max: int

    @property
    def is_short(self) -> bool:
        """Return whether it takes no longer than a thread would."""
        return len(self.hashes) <= LOOP_KEYS_MAX

    def answer(self) -> bytes | None:
        """Return the rows as an Arrow stream; None if they are too large for one answer, or the
        long way must tell an error."""
        try:
            piece = next(self.spec.answer(self.contents, self.hashes, self.bytes_max))
        except PenstockError:
            return None
        fits = piece.last and len(piece.arrow) <= self.bytes_max
        return piece.arrow if fits else None


class _Resolved(msgspec.Struct, frozen=True, gc=False):
    """An object, and the ways to read it by key that need no worker."""

    entry: CatalogObject
    ways: tuple[ReadChoice, ...]


class MemoryReads:
    """Reads rows of keys. Until the controller has started it finds nothing."""

    def __init__(self, partitions: Callable[[], Iterable[ClusterPartitions]] = tuple) -> None:
        """`partitions` returns those of the indexes of each cluster in this process."""
        self._state: ControllerState | None = None
        self._tables: TableArrangements | None = None
        self._partitions = partitions
        self._catalog: CatalogSnapshot | None = None
        self._resolved: dict[PointSelection, _Resolved | None] = {}

    def attach_state(self, state: ControllerState, tables: TableArrangements) -> None:
        """Read the catalog, the frontiers and the tables from there: a controller makes its state
        when it starts."""
        self._state, self._tables = state, tables

    # -- contents ------------------------------------------------------------------------------

    def _contents(self, entry: CatalogObject, way: ReadChoice, time: Time) -> _Contents | None:
        if way.index is not None:
            return self._of_index(way.index, time)
        return self._of_table(entry, time)

    def _of_table(self, entry: CatalogObject, time: Time) -> _Contents | None:
        """Return a table's contents by PRIMARY KEY. If they are not at hand, return None, and have
        them at hand for later reads."""
        state, tables = self._state, self._tables
        if state is None or tables is None or entry.shard is None:
            return None
        found = tables.view(entry.id, time)
        if found is None and tables.should_arrange(entry.id, time):
            target = TableTarget(entry.id, entry.name, entry.shard, entry.schema)
            # Its queue takes one such message a table at most.
            state.writer.reply(ArrangeTable(target))
        return None if found is None else (found[0], [found[1]])

    def _of_index(self, index: KnownIndex, time: Time) -> _Contents | None:
        state = self._state
        entry = None if state is None else state.catalog.get(index.id)
        if state is None or entry is None or state.frontiers.readable_from(index.id) > time:
            return None
        # Ids of dataflows are never used again: what is there under one is this index.
        for each in self._partitions():
            held = each.readable(entry.dataflow_id)
            if held is None or any(one.upper <= time for one in held):
                continue
            try:
                return held[0], [one.view(time + 1) for one in held]
            except PenstockError:
                continue  # replaced meanwhile, or it begins later
        return None

    def has_partitions(self, index: CatalogObject) -> bool:
        """Return whether an index is in this process, though perhaps at an earlier time."""
        return any(each.readable(index.dataflow_id) for each in self._partitions())

    # -- reads of the controller -----------------------------------------------------------------

    def look_up(
        self, entry: CatalogObject, way: ReadChoice, peek: Peek
    ) -> bytes | KeyedLookup | None:
        """Return the answer to a peek, or what finds it, if the rows of its keys are at hand."""
        if not way.key or self._state is None:
            return None
        found = self._contents(entry, way, peek.time)
        if found is None:
            return None
        arrangement, views = found
        bytes_max = self._state.settings.piece_bytes_max
        # A single key of integers or text, as most are: a third of the time of the general way.
        one = one_key_answer(arrangement, views, peek, bytes_max)
        if one is not None:
            return one.arrow
        try:
            spec = PeekSpec(entry.schema, peek)
        # Whoever reads in the long way finds the same fault, and tells it.
        except PenstockError:
            return None
        hashes = spec.narrowed(arrangement.key)
        return None if hashes is None else KeyedLookup(spec, _Partitioned(views), hashes, bytes_max)

    # -- reads of a door -------------------------------------------------------------------------

    def find(
        self, selection: PointSelection, values: Sequence[Any], role: str | None
    ) -> pa.RecordBatch | None:
        """Return the rows whose key columns have these values, each once, at the latest written
        time; None if they cannot be had at once, or if the role may not read the object."""
        state = self._state
        found = None if state is None else self._resolve(state, selection)
        if state is None or found is None or not state.access.may(role, READ, found.entry.id):
            return None
        try:
            time = state.latest_with_contents(found.entry)
        except NoContentsYet:
            return None
        # Of several indexes any will do: one that was just made is not at the latest time yet.
        for way in found.ways:
            contents = self._contents(found.entry, way, time)
            if contents is not None:
                return _rows_of(contents, selection, values)
        return None

    def _resolve(self, state: ControllerState, selection: PointSelection) -> _Resolved | None:
        if state.catalog is not self._catalog or len(self._resolved) >= _RESOLVED_MAX:
            self._catalog = state.catalog
            self._resolved.clear()
        try:
            return self._resolved[selection]
        except KeyError:
            found = self._resolved[selection] = _resolved(state.catalog, selection)
            return found


def ways_to_read(
    catalog: CatalogSnapshot, entry: CatalogObject, fixed: Iterable[str], *, by_key: bool
) -> tuple[ReadChoice, ...]:
    """Return the ways to read an object of the catalog, as `choose_ways` does."""
    primary = entry.schema.key if entry.kind == TABLE else ()
    found = catalog.indexes(entry.id)
    indexes = [KnownIndex(each.id, each.name, each.key) for each in found]
    return choose_ways(primary, indexes, set(fixed), by_key=by_key)


def first_way(state: ControllerState, read: PlainRead) -> ReadChoice:
    """Return the way of a plain read at the latest time; that from memory also where a table is
    arranged only by the read itself."""
    if is_relation(read.name):
        return ReadChoice("memory")
    entry = state.catalog.find(read.name)
    for way in ways_to_read(state.catalog, entry, fixed_columns(read.filter), by_key=False):
        if way.index is None or ready_index(state, way, state.latest(entry)) is not None:
            return way
    raise AssertionError("the last way is always there")


def ready_index(state: ControllerState, way: ReadChoice, time: Time) -> CatalogObject | None:
    """Return the index of a way, if it has the contents at a time, or will have them when its
    workers have come so far."""
    index = None if way.index is None else state.catalog.get(way.index.id)
    if index is None:
        return None
    first = state.frontiers.readable_from(index.id)
    return index if first <= time and state.frontiers.upper(index) > first else None


def _resolved(catalog: CatalogSnapshot, selection: PointSelection) -> _Resolved | None:
    """Return the object and its ways; None if it is not there, or has none by these columns."""
    try:
        entry = catalog.find_stored(selection.name, "read")
    except PenstockError:
        return None
    ways = ways_to_read(catalog, entry, selection.key, by_key=True)
    keyed = tuple(each for each in ways if each.key)
    there = set(entry.schema.names)
    if not keyed or not there >= {*selection.columns, *selection.key}:
        return None
    return _Resolved(entry, keyed)


def _rows_of(
    contents: _Contents, selection: PointSelection, values: Sequence[Any]
) -> pa.RecordBatch | None:
    arrangement, views = contents
    kinds, given = arrangement.schema.arrow(), dict(zip(selection.key, values, strict=True))
    if not all(_is_exact(kinds.field(name).type, value) for name, value in given.items()):
        return None
    wanted = hash_values([given[name] for name in arrangement.key])
    rows = None if wanted is None else rows_of_key(views, wanted, tuple(given.items()))
    # A row that is there twice would have to be repeated.
    if rows is None or np.any(rows.column(DIFF).to_numpy() != 1):
        return None
    return rows.select(list(selection.columns))


def _is_exact(kind: pa.DataType, value: object) -> bool:
    """Return whether a value is of a type whose values are equal exactly if Python's are."""
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(kind))
    if isinstance(value, int):
        return bool(pa.types.is_integer(kind))
    return isinstance(value, str) and bool(pa.types.is_string(kind))
