"""Rows of one key, read from an index in this process without a message.

A door that runs beside the controller and the workers may ask for the rows of one key at the latest
written time. They are there already, as a rule: an index is sealed beyond that time in every
worker, and each has its partition in this process's memory. Whatever is not surely so is None, and
the caller goes the long way (`reads`), which waits, and reports errors.

Parts of one event loop: the controller's state is read between its turns, and changes in them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.access.role_registry import READ
from actors.arrangement.arrangement import Arrangement
from actors.arrangement.hashing import hash_values
from actors.arrangement.reading import is_plain
from actors.compute.index import ClusterPartitions
from actors.controller.catalog.catalog import CatalogObject, CatalogSnapshot
from actors.controller.state import ControllerState, NoContentsYet
from actors.errors import PenstockError
from actors.plan.schema import DIFF
from actors.progress import Time
from actors.threshold_probes import POINT_ROWS

_RESOLVED_MAX: Final = 1_024
"""Bound of remembered resolutions of names; beyond, all are forgotten."""


class PointSelection(msgspec.Struct, frozen=True):
    """The columns of one object that a key fixes, in the order in which values come, and the
    columns of the answer."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


class _Resolved(msgspec.Struct, frozen=True, gc=False):
    """An object, and its indexes on just the key's columns, each with the places of the values."""

    entry: CatalogObject
    indexes: tuple[tuple[CatalogObject, tuple[int, ...]], ...]


class PointReads:
    """Reads rows of one key. Until the controller has started it finds nothing."""

    def __init__(self, partitions: ClusterPartitions | None = None) -> None:
        """`partitions` are those of all indexes; None: in another process, so that nothing is
        found."""
        self._state: ControllerState | None = None
        self._partitions = partitions
        self._catalog: CatalogSnapshot | None = None
        self._resolved: dict[PointSelection, _Resolved | None] = {}

    def attach_state(self, state: ControllerState) -> None:
        """Read the catalog and the frontiers from there: a controller makes its state when it
        starts."""
        self._state = state

    def find(
        self, selection: PointSelection, values: Sequence[Any], role: str | None
    ) -> pa.RecordBatch | None:
        """Return the rows whose key columns have these values, each once, at the latest written
        time; None if they cannot be had at once, or without summing rows up, or if the role may not
        read the object."""
        state, partitions = self._state, self._partitions
        if state is None or partitions is None:
            return None
        found = self._resolve(state, selection)
        if found is None or not state.access.may(role, READ, found.entry.id):
            return None
        try:
            time = state.latest_with_contents(found.entry)
        except NoContentsYet:
            return None
        # Any of them: an index that was just made is not readable at the latest time yet.
        for index, places in found.indexes:
            if state.frontiers.readable_from(index.id) > time:
                continue
            arrangements = partitions.readable(index.id)
            if arrangements is None or any(each.upper <= time for each in arrangements):
                continue
            return _rows_of(arrangements, [values[place] for place in places], time, selection)
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
    indexes = tuple(
        (index, tuple(key.index(name) for name in index.key))
        for index in catalog.indexes(entry.id)
        if len(index.key) == len(key) and set(index.key) == set(key)
    )
    there = set(entry.schema.names)
    if not indexes or not there >= set(selection.columns):
        return None
    return _Resolved(entry, indexes)


def _rows_of(
    arrangements: Sequence[Arrangement],
    values: Sequence[Any],
    time: Time,
    selection: PointSelection,
) -> pa.RecordBatch | None:
    """Return the rows of a key out of the partitions of its index."""
    first = arrangements[0]
    if not all(map(_is_exact, first.key_types, values)):
        return None
    hash_ = hash_values(values)
    if hash_ is None:
        return None
    try:
        views = [each.view(time + 1) for each in arrangements]
    except PenstockError:
        return None  # replaced meanwhile, or it begins later
    # An error belongs to every answer.
    if any(run.has_errors for view in views for run in view.runs):
        return None
    places = views[hash_ % len(views)].point(hash_)
    if places is None or len(places) > 1:
        return None
    if not places:
        return _empty(first, selection.columns)
    ((run, block, start, beyond),) = places
    if not (is_plain(run, time + 1) and run.positive) or POINT_ROWS.exceeded_by(beyond - start):
        return None
    rows = block.values
    for name, value in zip(first.key, values, strict=True):
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


def _empty(arrangement: Arrangement, columns: Sequence[str]) -> pa.RecordBatch:
    held = arrangement.schema.arrow()
    return pa.RecordBatch.from_pylist([], schema=pa.schema([held.field(name) for name in columns]))
