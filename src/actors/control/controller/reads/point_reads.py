"""Rows of one key, read from an index or a table in this process without a message.

A door that runs beside the controller and the workers may ask for the rows of one key at the latest
written time. They are there already, as a rule: the table writer has the table by PRIMARY KEY, or
an index is sealed beyond that time in every worker, and each has its partition in this process's
memory. Whatever is not surely so is None, and the caller goes the long way (`reads`), which waits,
and reports errors.

Parts of one event loop: the controller's state is read between its turns, and changes in them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from actors.control.access.role_registry import READ
from actors.control.controller.catalog.catalog import TABLE, CatalogObject, CatalogSnapshot
from actors.control.controller.reads.keyed_reads import KeyedReads
from actors.control.controller.state import ControllerState, NoContentsYet
from actors.durable.arrangement.hashing import hash_values
from actors.durable.arrangement.reading import ArrangementSnapshot, is_plain
from actors.model.plan.schema import DIFF, TableSchema
from actors.replica.compute.index import ClusterPartitions
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Time

POINT_ROWS_MAX = 256
"""Rows of one key that are compared on the event loop."""

_RESOLVED_MAX: Final = 1_024
"""Bound of remembered resolutions of names; beyond, all are forgotten."""


class PointSelection(msgspec.Struct, frozen=True):
    """The columns of one object that a key fixes, in the order in which values come, and the
    columns of the answer."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


_KeyPlaces: TypeAlias = tuple[tuple[str, int], ...]
"""Key columns in the order of an arrangement, each with the place of its value."""


class _Resolved(msgspec.Struct, frozen=True, gc=False):
    """An object; the places of the values of its PRIMARY KEY, None if the columns are not just
    those; and its indexes on just the key's columns, each with the places of the values."""

    entry: CatalogObject
    primary: _KeyPlaces | None
    indexes: tuple[tuple[CatalogObject, _KeyPlaces], ...]


class PointReads:
    """Reads rows of one key. Until the controller has started it finds nothing."""

    def __init__(self, partitions: ClusterPartitions | None = None) -> None:
        """`partitions` are those of all indexes; None: in another process, so that none is read."""
        self._state: ControllerState | None = None
        self._keyed: KeyedReads | None = None
        self._partitions = partitions
        self._catalog: CatalogSnapshot | None = None
        self._resolved: dict[PointSelection, _Resolved | None] = {}

    def attach_state(self, state: ControllerState, keyed: KeyedReads) -> None:
        """Read the catalog, the frontiers and the tables from there: a controller makes its state
        when it starts."""
        self._state, self._keyed = state, keyed

    def find(
        self, selection: PointSelection, values: Sequence[Any], role: str | None
    ) -> pa.RecordBatch | None:
        """Return the rows whose key columns have these values, each once, at the latest written
        time; None if they cannot be had at once, or without summing rows up, or if the role may not
        read the object."""
        state, keyed = self._state, self._keyed
        if state is None or keyed is None:
            return None
        found = self._resolve(state, selection)
        if found is None or not state.access.may(role, READ, found.entry.id):
            return None
        try:
            time = state.latest_with_contents(found.entry)
        except NoContentsYet:
            return None
        if found.primary is not None:
            contents = keyed.contents(found.entry, time)
            if contents is not None:
                key = [(name, values[place]) for name, place in found.primary]
                return _rows_of([contents], key, selection)
        return self._from_index(found, values, time, selection)

    def _from_index(
        self, found: _Resolved, values: Sequence[Any], time: Time, selection: PointSelection
    ) -> pa.RecordBatch | None:
        state, partitions = self._state, self._partitions
        if state is None or partitions is None:
            return None
        # Any of them: an index that was just made is not readable at the latest time yet.
        for index, places in found.indexes:
            if state.frontiers.readable_from(index.id) > time:
                continue
            arrangements = partitions.readable(index.dataflow_id)
            if arrangements is None or any(each.upper <= time for each in arrangements):
                continue
            try:
                views = [each.view(time + 1) for each in arrangements]
            except PenstockError:
                return None  # replaced meanwhile, or it begins later
            return _rows_of(views, [(name, values[place]) for name, place in places], selection)
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


def _resolved(catalog: CatalogSnapshot, selection: PointSelection) -> _Resolved | None:
    """Return the object and its indexes; None if it is not there, or has none on these columns."""
    try:
        entry = catalog.find_stored(selection.name, "read")
    except PenstockError:
        return None
    key = selection.key

    def places(columns: tuple[str, ...]) -> _KeyPlaces | None:
        same = len(columns) == len(key) and set(columns) == set(key)
        return tuple((name, key.index(name)) for name in columns) if same else None

    primary = places(entry.schema.key) if entry.kind == TABLE else None
    on_key = ((index, places(index.key)) for index in catalog.indexes(entry.id))
    indexes = tuple((index, found) for index, found in on_key if found is not None)
    there = set(entry.schema.names)
    if (primary is None and not indexes) or not there >= set(selection.columns):
        return None
    return _Resolved(entry, primary, indexes)


def _rows_of(
    views: Sequence[ArrangementSnapshot], key: Sequence[tuple[str, Any]], selection: PointSelection
) -> pa.RecordBatch | None:
    """Return the rows of a key out of the partitions of contents that are arranged by it."""
    schema, values = views[0].schema, [value for _, value in key]
    if not all(_is_exact(schema.arrow().field(name).type, value) for name, value in key):
        return None
    hash_ = hash_values(values)
    if hash_ is None:
        return None
    # An error belongs to every answer.
    if any(run.has_errors for view in views for run in view.runs):
        return None
    view = views[hash_ % len(views)]
    places = view.point(hash_)
    if places is None:
        return None
    if not places:
        return _empty(schema, selection.columns)
    if sum(beyond - start for _, _, start, beyond in places) > POINT_ROWS_MAX:
        return None
    run, block, start, beyond = places[0]
    rows = block.values
    if len(places) > 1 or not (is_plain(run, view.before) and run.positive):
        # Rows that were changed lately are in several places.
        summed = [batch for batch in view.rows(np.array([hash_], np.uint64)) if batch.num_rows]
        if not summed:
            return _empty(schema, selection.columns)
        if len(summed) > 1:
            return None
        start, beyond, rows = 0, summed[0].num_rows, summed[0]
    for name, value in key:
        held = rows.column(name)
        if any(held[row].as_py() != value for row in range(start, beyond)):
            return None  # another key of the same hash
    weights = rows.column(DIFF).slice(start, beyond - start)
    # A row that is there twice would have to be repeated.
    if np.any(weights.to_numpy() != 1):
        return None
    return rows.slice(start, beyond - start).select(list(selection.columns))


def _is_exact(kind: pa.DataType, value: object) -> bool:
    """Return whether a value is of a type whose values are equal exactly if Python's are."""
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(kind))
    if isinstance(value, int):
        return bool(pa.types.is_integer(kind))
    return isinstance(value, str) and bool(pa.types.is_string(kind))


def _empty(schema: TableSchema, columns: Sequence[str]) -> pa.RecordBatch:
    held = schema.arrow()
    return pa.RecordBatch.from_pylist([], schema=pa.schema([held.field(name) for name in columns]))
