"""Clusters rows by the shard's key, so that statistics of parts are selective. Pure.

Rows of a part are sorted by time and, within a time, by the key's columns. A merge that is too
large for memory is cut by ranges of the key's first column, where that is a number, a date or a
timestamp: so its parts cover disjoint ranges, and partition pruning works on them. Equal rows have
equal keys, hence meet in one range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.persist.shard import BatchPart
from actors.persist.statistics import column_of
from actors.plan.schema import TIME, TableSchema

POINTS: Final = 64
"""Sample points that stand for the values of one part."""


def sort_by_key(updates: pa.Table, schema: TableSchema) -> pa.Table:
    """Return the updates in a part's order."""
    keys = [name for name in schema.key if not pa.types.is_nested(updates[name].type)]
    if not keys or updates.num_rows < 2:
        return updates
    order = [(name, "ascending") for name in (TIME, *keys)]
    return updates.take(pc.sort_indices(updates, sort_keys=order))


class KeyRanges:
    """Ranges of a key's first column, of about as many rows each."""

    def __init__(self, column: str, cuts: Any) -> None:
        """Take ascending int64 cuts; range n + 1 begins at cut n."""
        self._column = column
        self._cuts = cuts

    @property
    def count(self) -> int:
        """Return the number of ranges."""
        return len(self._cuts) + 1

    def places(self, rows: pa.Table) -> Any:
        """Return the range of each row; NULL is in the first."""
        values = rows[self._column].combine_chunks()
        whole = _as_numbers(values)
        found = np.searchsorted(self._cuts, whole, side="right")
        if values.null_count:
            found[pc.is_null(values).to_numpy(zero_copy_only=False)] = 0
        return found


def choose_ranges(schema: TableSchema, parts: Iterable[BatchPart], count: int) -> KeyRanges | None:
    """Return at most `count` ranges for the rows of the parts; None without usable statistics."""
    if not schema.key or count < 2:
        return None
    column = schema.key[0]
    kind = schema.arrow().field(column).type
    if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return None
    # Guessed as if each part's values lay evenly between its bounds. A wrong guess makes a range
    # too large, which the merger then cuts by hash.
    points: list[Any] = []
    weights: list[float] = []
    for part in parts:
        known = column_of(part.statistics, column)
        if known is not None and known.low is not None and known.high is not None:
            low, high = int(known.low), int(known.high)
            points += [low + (high - low) * step // (POINTS - 1) for step in range(POINTS)]
            weights += [part.rows / POINTS] * POINTS
    if not points:
        return None
    values = np.array(points, np.int64)
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.array(weights)[order])
    wanted = below[-1] * np.arange(1, count) / count
    cuts = np.unique(values[order][np.searchsorted(below, wanted)])
    # A cut at the least value would leave the first range empty.
    cuts = cuts[cuts > values.min()]
    return KeyRanges(column, cuts) if len(cuts) else None


def _as_numbers(values: pa.Array) -> Any:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if pa.types.is_temporal(values.type):
        values = values.view(pa.int32() if values.type.bit_width == 32 else pa.int64())
    whole = pc.fill_null(values.cast(pa.int64()), pa.scalar(0, pa.int64()))
    return whole.to_numpy(zero_copy_only=False)
