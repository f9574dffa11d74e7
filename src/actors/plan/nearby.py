"""Rows of a table near a step's changes: all of a partition that a window function needs.

A window function reads a whole partition, but ``lag`` or a frame of ten rows say nothing new of a
row far from every change, and of the first ten rows of a partition only its beginning matters. A
lookup finds the partition in a file, at little cost; to have Spark sort all of it, before and after
each change, costs most of a step. So the rows that a lookup found are thinned out first.

Blocks are the rows of a partition that its order leaves equal; the order among them is not decided
here, so a block is kept whole or not at all. *Static* rows are those that stay for the whole step;
of a block at least as many are static as it has rows more than the step retracts. Kept are

- ``rows``, for frames of at most `size` rows to either side: on each side of a changed block the
  blocks that hold ``2 * size`` static rows;
- ``first``, for what holds for the first `size` rows alone: blocks from the beginning that hold
  `size` static rows;
- ``distinct``: the same of blocks with a static row, for ranks without gaps;
- ``range``, for frames of values at most `size` away: values within ``2 * size`` of a change;
- ``gap``, for what depends on the rows that are no more than `size` after one another (sessions):
  all such chains that have a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from actors.plan.schema import DIFF

Reach: TypeAlias = Literal["rows", "first", "distinct", "range", "gap"]
_Numbers: TypeAlias = NDArray[np.int64]
_Flags: TypeAlias = NDArray[np.bool_]
SIZE_MAX: Final = 1 << 61
"""Greatest size: twice as much is still a number of 64 bits."""


class SortColumn(msgspec.Struct, frozen=True):
    """A column by which the rows of a partition are ordered."""

    column: str
    descending: bool = False
    nulls_first: bool = True


class NearbyRows(msgspec.Struct, frozen=True):
    """The input ``n{k}`` of a step: the rows ``s{source}`` that are near the changes ``d{source}``.

    `keys` and `order` are columns of the table. ``range`` and ``gap`` are in the units of the one
    column of `order`: numbers, days of a date, microseconds of a timestamp.
    """

    source: int
    keys: tuple[str, ...]
    order: tuple[SortColumn, ...]
    reach: Reach
    size: int

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read."""
        return tuple(dict.fromkeys((*self.keys, *(each.column for each in self.order))))

    def text(self) -> str:
        """Return a text for people that says which rows these are."""
        by = ", ".join(self.keys)
        match self.reach:
            case "first" | "distinct":
                return f"the first {self.size} by {by}"
            case "rows":
                return f"{self.size} rows around changes by {by}"
            case _:
                return f"within {self.size} of changes by {by}"


def nearby_rows(rows: pa.Table, changes: pa.Table, near: NearbyRows) -> pa.Table:
    """Return the rows near these changes.

    Args:
        rows: Settled rows of the table, each once, with a positive diff; a partition that has a
            change must be there whole.
        changes: Updates of the table at any times.
        near: The distance that counts as near.
    """
    if not rows.num_rows or not changes.num_rows:
        return rows.slice(0, 0)
    names = [*near.columns, DIFF]
    both = pa.concat_tables([rows.select(names), changes.select(names)]).combine_chunks()
    changed = np.arange(both.num_rows) >= rows.num_rows
    partition = group_codes(both, near.keys)
    touched = np.zeros(int(partition.max()) + 1, np.bool_)
    touched[partition[changed]] = True
    # Partitions without a change are not sorted.
    places = np.flatnonzero(touched[partition])
    both, changed, partition = both.take(pa.array(places)), changed[places], partition[places]
    kept = _near_values if near.reach in ("range", "gap") else _near_blocks
    wanted = kept(both, partition, changed, near) & ~changed
    return rows.take(pa.array(places[wanted]))


# -- blocks ---------------------------------------------------------------------------------------


def _near_blocks(both: pa.Table, partition: _Numbers, changed: _Flags, near: NearbyRows) -> _Flags:
    codes = [order_codes(both[each.column], each) for each in near.order]
    order = np.lexsort((*reversed(codes), partition))
    begins = np.zeros(len(order), np.bool_)
    begins[0] = True
    for each in (partition, *codes):
        begins[1:] |= np.diff(each[order]) != 0
    block = np.cumsum(begins) - 1
    count = int(block[-1]) + 1
    moved = changed[order]
    back = moved & (both[DIFF].to_numpy()[order] < 0)
    there = np.bincount(block[~moved], minlength=count)
    static = np.maximum(there - np.bincount(block[back], minlength=count), 0)
    if near.reach == "distinct":
        static = np.minimum(static, 1)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(static)])
    owner = partition[order][begins]
    start = np.searchsorted(owner, owner, "left")
    end = np.searchsorted(owner, owner, "right") - 1
    if near.reach == "rows":
        # A row whose frame a change may reach is at most `size` static rows away from it, and its
        # own frame reaches `size` further. A row kept beyond reaches no change, nor one across a
        # gap, as the same rows stand at the gap's end: its value, if a wrong one, stays the same
        # and cancels out.
        at = np.flatnonzero(np.bincount(block[moved], minlength=count))
        low = np.searchsorted(before, before[at] - 2 * near.size, "right") - 1
        high = np.searchsorted(before, before[at + 1] + 2 * near.size, "left") - 1
        low, high = np.clip(low, start[at], at), np.clip(high, at, end[at])
    else:
        # A kept row has its true number, and one that is left out comes behind `size` rows that
        # stay.
        low = np.unique(start)
        high = np.searchsorted(before, before[low] + near.size, "left") - 1
        high = np.clip(high, low, end[low])
    covers = np.zeros(count + 1, np.int64)
    np.add.at(covers, low, 1)
    np.add.at(covers, high + 1, -1)
    found = np.zeros(len(order), np.bool_)
    found[order] = (np.cumsum(covers) > 0)[block]
    return found


def group_codes(table: pa.Table, keys: Sequence[str]) -> _Numbers:
    """Return a number for each row, from 0 on, the same for equal keys; NULL is a value like
    others."""
    found = np.zeros(table.num_rows, np.int64)
    for key in keys:
        encoded = pc.dictionary_encode(table[key].combine_chunks(), null_encoding="encode")
        own = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, found = np.unique(found * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    return found.astype(np.int64)


def order_codes(column: pa.ChunkedArray, by: SortColumn) -> _Numbers:
    """Return numbers in the order of a column's values, the same for equal ones."""
    ranks = pc.rank(column, sort_keys=[("", "ascending", "at_start")], tiebreaker="dense")
    codes: _Numbers = ranks.to_numpy().astype(np.int64)
    empty = column.is_null().to_numpy()
    if by.descending:
        codes = -codes
    codes[empty] = -len(codes) - 1 if by.nulls_first else len(codes) + 1
    return codes


# -- values ---------------------------------------------------------------------------------------


def _near_values(both: pa.Table, partition: _Numbers, changed: _Flags, near: NearbyRows) -> _Flags:
    column = both[near.order[0].column]
    known = ~column.is_null().to_numpy()
    found: _Flags = ~known  # rows without a value are peers of one another, and few
    places = np.flatnonzero(known)
    if not len(places):
        return found
    values = _numbers(column.filter(pa.array(known)))
    order = np.lexsort((values, partition[places]))
    values, owner, moved = values[order], partition[places][order], changed[places][order]
    if near.reach == "gap":
        begins = np.ones(len(values), np.bool_)
        begins[1:] = (np.diff(owner) != 0) | (_distance(values[:-1], values[1:]) > near.size)
        chain = np.cumsum(begins) - 1
        near_one = np.bincount(chain[moved], minlength=int(chain[-1]) + 1)[chain] > 0
    else:
        near_one = _follows(values, owner, moved, 2 * near.size)
        # Backwards the complements ascend, and stand as far from one another.
        near_one |= _follows(~values[::-1], owner[::-1], moved[::-1], 2 * near.size)[::-1]
    found[places[order]] = near_one
    return found


def _follows(values: _Numbers, owner: _Numbers, moved: _Flags, most: int) -> _Flags:
    """Return which rows stand no further than `most` behind a change in their partition."""
    last = np.maximum.accumulate(np.where(moved, np.arange(len(values)), -1))
    at = np.maximum(last, 0)
    near: _Flags = (last >= 0) & (owner[at] == owner)
    near &= _distance(values[at], values) <= np.uint64(most)
    return near


def _distance(low: _Numbers, high: _Numbers) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the distances of ascending numbers, unsigned: they may be more than an int64 holds."""
    return high.astype(np.uint64) - low.astype(np.uint64)


def _numbers(column: pa.ChunkedArray) -> _Numbers:
    kind = column.type
    if pa.types.is_date(kind):
        column = column.cast(pa.int32())
    found: _Numbers = column.cast(pa.int64()).to_numpy().astype(np.int64)
    return found
