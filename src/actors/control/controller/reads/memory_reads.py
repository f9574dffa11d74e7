"""Reads rows by key from this process's memory, without a message to a worker.

A table's rows are in memory by PRIMARY KEY, in the arrangement in which the table writer looks keys
up (`TableArrangements`): it is built when a key is first read or written. An index is in memory if
the workers are in this process: each has its partition, sealed beyond the time that is read. A read
of the controller (`reads`) tries this first. So does a listener alongside it: it reads the rows of
one key at the latest written time without waiting for a turn of the controller.

Whenever it is not certain of an answer, the result is None, and the caller falls back to a regular
read, which waits and reports errors. Everything runs on one event loop: a read sees the
controller's state between two of its turns.
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
"""Maximum number of keys to look up on the event loop, in about 0.1 ms. For one key a thread takes
1.4 × as long (November 2026)."""

_RESOLVED_MAX: Final = 1_024
"""Maximum number of names whose resolution is cached; beyond it, the cache is cleared."""

_Contents: TypeAlias = tuple[Arrangement, Sequence[ArrangementSnapshot]]
"""One of the arrangements that each hold a partition of some contents, and the contents of all."""


class PointSelection(msgspec.Struct, frozen=True):
    """The columns of one object that a key fixes, in the order of the key's values, and the columns
    of the answer."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


class _Partitioned:
    """Contents that are partitioned by the hashes of their keys; see `CollectionContents`."""

    def __init__(self, views: Sequence[ArrangementSnapshot]) -> None:
        self._views = views

    def errors(self) -> pa.Table:
        """Return the errors of all partitions together."""
        return pa.concat_tables([each.errors() for each in self._views])

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these hashes, each from its partition."""
        for number, view in enumerate(self._views):
            own = None if wanted is None else wanted[wanted % len(self._views) == number]
            if own is None or len(own):
                yield from view.rows(own)


class KeyedLookup(msgspec.Struct, frozen=True):
    """A peek by key of contents that are in memory."""

    spec: PeekSpec
    contents: _Partitioned
    hashes: Hashes
    bytes_max: int

    @property
    def is_short(self) -> bool:
        """Return whether the lookup is fast enough for the event loop."""
        return len(self.hashes) <= LOOP_KEYS_MAX

    def answer(self) -> bytes | None:
        """Return the rows as an Arrow stream, or None if they are too large for one answer, or if a
        regular read must report an error."""
        try:
            piece = next(self.spec.answer(self.contents, self.hashes, self.bytes_max))
        except PenstockError:
            return None
        fits = piece.last and len(piece.arrow) <= self.bytes_max
        return piece.arrow if fits else None


class _Resolved(msgspec.Struct, frozen=True, gc=False):
    """An object, and the ways to read it by key without a worker."""

    entry: CatalogObject
    ways: tuple[ReadChoice, ...]


class MemoryReads:
    """Reads rows by key. It finds nothing until the controller has started."""

    def __init__(self, partitions: Callable[[], Iterable[ClusterPartitions]] = tuple) -> None:
        """Set up without state. `partitions` returns the index partitions of each cluster in this
        process."""
        self._state: ControllerState | None = None
        """State of the controller; None until `attach_state`."""
        self._tables: TableArrangements | None = None
        """Arrangements of the tables; None until `attach_state`."""
        self._partitions = partitions
        self._catalog: CatalogSnapshot | None = None
        """The catalog for which `_resolved` is valid."""
        self._resolved: dict[PointSelection, _Resolved | None] = {}
        """Resolved selections of `_catalog`; None for those that cannot be read here."""

    def attach_state(self, state: ControllerState, tables: TableArrangements) -> None:
        """Use this state: a controller makes it when it starts."""
        self._state, self._tables = state, tables

    # -- contents ------------------------------------------------------------------------------

    def _contents(self, entry: CatalogObject, way: ReadChoice, time: Time) -> _Contents | None:
        if way.index is not None:
            return self._of_index(way.index, time)
        return self._of_table(entry, time)

    def _of_table(self, entry: CatalogObject, time: Time) -> _Contents | None:
        """Return a table's contents by PRIMARY KEY. If they are not in memory, return None and have
        them arranged for later reads."""
        state, tables = self._state, self._tables
        if state is None or tables is None or entry.shard is None:
            return None
        found = tables.view(entry.id, time)
        if found is None and tables.should_arrange(entry.id, time):
            target = TableTarget(entry.id, entry.name, entry.shard, entry.schema)
            # Its queue holds at most one such message per table.
            state.writer.reply(ArrangeTable(target))
        return None if found is None else (found[0], [found[1]])

    def _of_index(self, index: KnownIndex, time: Time) -> _Contents | None:
        state = self._state
        entry = None if state is None else state.catalog.get(index.id)
        if state is None or entry is None or state.frontiers.readable_from(index.id) > time:
            return None
        # Ids of dataflows are never reused: an arrangement under this id belongs to this index.
        for each in self._partitions():
            held = each.readable(entry.dataflow_id)
            if held is None or any(one.upper <= time for one in held):
                continue
            try:
                return held[0], [one.view(time + 1) for one in held]
            except PenstockError:
                continue  # the index was replaced, or starts at a later time
        return None

    def has_partitions(self, index: CatalogObject) -> bool:
        """Return whether an index is in this process, though perhaps not up to the wanted time."""
        return any(each.readable(index.dataflow_id) for each in self._partitions())

    # -- reads of the controller
    # ---------------------------------------------------------------------

    def look_up(
        self, entry: CatalogObject, way: ReadChoice, peek: Peek
    ) -> bytes | KeyedLookup | None:
        """Return the answer to a peek, or the lookup that finds it, if the rows of its keys are in
        memory."""
        if not way.key or self._state is None:
            return None
        found = self._contents(entry, way, peek.time)
        if found is None:
            return None
        arrangement, views = found
        bytes_max = self._state.settings.piece_bytes_max
        # Fast path for a single key of integers or text, the usual case: a third of the general
        # time.
        one = one_key_answer(arrangement, views, peek, bytes_max)
        if one is not None:
            return one.arrow
        try:
            spec = PeekSpec(entry.schema, peek)
        # A regular read meets the same fault and reports it.
        except PenstockError:
            return None
        hashes = spec.narrowed(arrangement.key)
        return None if hashes is None else KeyedLookup(spec, _Partitioned(views), hashes, bytes_max)

    # -- reads of a listener ---------------------------------------------------------------------

    def find(
        self, selection: PointSelection, values: Sequence[Any], role: str | None
    ) -> pa.RecordBatch | None:
        """Return the rows whose key columns have these values, each once, at the latest written
        time. Return None if they are not available now, or if the role may not read the object."""
        state = self._state
        found = None if state is None else self._resolve(state, selection)
        if state is None or found is None or not state.access.may(role, READ, found.entry.id):
            return None
        try:
            time = state.latest_with_contents(found.entry)
        except NoContentsYet:
            return None
        # Any of several indexes will do: one that was just created may not have reached the latest
        # time.
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
    """Return the way in which a plain read at the latest time would be done. Memory counts even for
    a table that this read would be the first to have arranged."""
    if is_relation(read.name):
        return ReadChoice("memory")
    entry = state.catalog.find(read.name)
    for way in ways_to_read(state.catalog, entry, fixed_columns(read.filter), by_key=False):
        if way.index is None or ready_index(state, way, state.latest(entry)) is not None:
            return way
    raise AssertionError("the last way is always available")


def ready_index(state: ControllerState, way: ReadChoice, time: Time) -> CatalogObject | None:
    """Return the index of a way, if it has the contents at a time, or will have them once its
    workers have advanced that far."""
    index = None if way.index is None else state.catalog.get(way.index.id)
    if index is None:
        return None
    first = state.frontiers.readable_from(index.id)
    return index if first <= time and state.frontiers.upper(index) > first else None


def _resolved(catalog: CatalogSnapshot, selection: PointSelection) -> _Resolved | None:
    """Return the object and its ways; None if it does not exist or cannot be read by these
    columns."""
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
    # A row that occurs twice would have to be repeated.
    if rows is None or np.any(rows.column(DIFF).to_numpy() != 1):
        return None
    return rows.select(list(selection.columns))


def _is_exact(kind: pa.DataType, value: object) -> bool:
    """Return whether a value has a type whose equality is the same in Python and in SQL."""
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(kind))
    if isinstance(value, int):
        return bool(pa.types.is_integer(kind))
    return isinstance(value, str) and bool(pa.types.is_string(kind))
