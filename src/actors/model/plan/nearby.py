"""Narrows the inputs of a step to the rows that a change can affect. Pure.

- `rows_in_range`: of a table whose rows are compared with a bound, the rows between the bound's old
  and new values.
- `nearby_rows`: of a partition that a window function reads, the rows near a change.
- `covered_changes`: of a step's changes, those up to the edges of groups whose first rows are kept.

A window function reads a whole partition. But ``lag``, or a frame of ten rows, does not change for
a row far from every change, and the first ten rows of a partition depend only on its beginning.
Finding the partition in a file is cheap; having Spark sort all of it, before and after each change,
takes most of a step. So the rows that a lookup found are filtered first.

A block consists of the rows of a partition that its order leaves equal. The order among them is not
decided here, so a block is kept in full or not at all. *Static* rows stay for the whole step; a
block has at least as many static rows as it has rows more than the step retracts. Kept are:

- ``rows``, for frames of at most `size` rows to either side: on each side of a changed block, the
  blocks that contain ``2 * size`` static rows;
- ``first``, for what depends only on the first `size` rows: blocks from the beginning that contain
  `size` static rows;
- ``distinct``: the same, counting blocks with a static row, for ranks without gaps;
- ``range``, for frames of values at most `size` away: values within ``2 * size`` of a change;
- ``gap``, for what depends on rows at most `size` apart (sessions): all chains of such rows that
  contain a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from actors.model.plan.input_names import InputKind
from actors.model.plan.schema import DIFF, TIME

# -- rows in the range of a bound ------------------------------------------------------------------


class ComparedRange(msgspec.Struct, frozen=True):
    """Selects the rows that a changed bound can affect, so that a lookup without a key reads no
    others.

    Rows are compared with a single row, as in ``placed > (SELECT max(placed) …) - 24 hours``, and
    that row changes. A row beyond all values of the bound compares the same way with each of them.
    So it matches both the retracted bound and the new one, or neither, and its changes cancel out.
    This requires that the changes of the single row cancel out at each time, and that nothing else
    of it is read.

    `lookup` is the number of the lookup. Each of `columns`, of its target, is compared with the
    column at the same position in `bounds`, of its only origin.
    """

    lookup: int
    columns: tuple[str, ...]
    bounds: tuple[str, ...]

    def text(self) -> str:
        """Describe the rows for display."""
        pairs = zip(self.columns, self.bounds, strict=True)
        return " or ".join(f"{column} in the range of {bound}" for column, bound in pairs)


def rows_in_range(rows: pa.Table, changes: pa.Table, wanted: ComparedRange) -> pa.Table:
    """Return at least the rows that do not compare the same way with all bounds.

    Args:
        rows: Rows of the lookup's target.
        changes: Updates of the single row, with its bounds.
        wanted: The columns to compare.

    Returns all rows if a bound is NULL or NaN, or if the single row is not replaced by another.
    """
    if not _is_replaced(changes):
        return rows
    kept: pa.ChunkedArray | None = None
    for column, bound in zip(wanted.columns, wanted.bounds, strict=True):
        found = _between(rows[column], changes[bound])
        if found is None:
            return rows
        kept = found if kept is None else pc.or_kleene(kept, found)
    # This also drops rows with NULL in the column, because NULL compares the same way with all
    # bounds.
    return rows.filter(kept)


def _is_replaced(changes: pa.Table) -> bool:
    """Return whether retractions and insertions cancel out at every time."""
    sums = changes.select([TIME, DIFF]).group_by(TIME).aggregate([(DIFF, "sum")])
    return not pc.any(pc.not_equal(sums[f"{DIFF}_sum"], 0)).as_py()


def _between(values: pa.ChunkedArray, bounds: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return a mask of the values between the least and the greatest bound; None if unknown."""
    kind = bounds.type
    if bounds.null_count or not _compares(values.type, kind):
        return None
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(bounds)).as_py():
        return None
    # A whole number compared with a double is rounded as Spark does, which preserves the order.
    values = values.cast(kind, safe=False)
    ends = pc.min_max(bounds)
    return pc.and_(pc.greater_equal(values, ends["min"]), pc.less_equal(values, ends["max"]))


def _compares(own: pa.DataType, bound: pa.DataType) -> bool:
    """Return whether a cast of a column to the bound's type preserves the order of the values."""
    types = pa.types
    if own == bound:
        return types.is_integer(own) or types.is_floating(own) or _is_ordered(own)
    if types.is_decimal(own) and types.is_decimal(bound):
        whole = own.precision - own.scale <= bound.precision - bound.scale
        return bool(whole and own.scale <= bound.scale)
    if types.is_integer(own):
        wider = types.is_integer(bound) and own.bit_width <= bound.bit_width
        return bool(wider or types.is_float64(bound))
    if types.is_timestamp(own) and types.is_timestamp(bound):
        return bool(own.unit == bound.unit and (own.tz is None) == (bound.tz is None))
    return False


def _is_ordered(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind) or pa.types.is_temporal(kind))


# -- rows near a change ----------------------------------------------------------------------------

Reach: TypeAlias = Literal["rows", "first", "distinct", "range", "gap"]
_Numbers: TypeAlias = NDArray[np.int64]
_Flags: TypeAlias = NDArray[np.bool_]
SIZE_MAX: Final = 1 << 61
"""Maximum size, so that twice the size fits into 64 bits."""


class SortColumn(msgspec.Struct, frozen=True):
    """A column by which the rows of a partition are ordered."""

    column: str
    descending: bool = False
    nulls_first: bool = True


class NearbyRows(msgspec.Struct, frozen=True):
    """The input ``n{k}`` of a step: the rows of ``s{n}`` near the changes ``d{n}``.

    `keys` and `order` are columns of the table. For ``range`` and ``gap``, sizes are in the units
    of the only column of `order`: numbers, days of a date, or microseconds of a timestamp.
    """

    input_index: int = msgspec.field(name="source")
    keys: tuple[str, ...]
    order: tuple[SortColumn, ...]
    reach: Reach
    size: int

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read."""
        return tuple(dict.fromkeys((*self.keys, *(each.column for each in self.order))))

    def text(self) -> str:
        """Describe the rows for display."""
        by = ", ".join(self.keys)
        match self.reach:
            case "first" | "distinct":
                return f"the first {self.size} by {by}"
            case "rows":
                return f"{self.size} rows around changes by {by}"
            case _:
                return f"within {self.size} of changes by {by}"


def nearby_rows(rows: pa.Table, changes: pa.Table, near: NearbyRows) -> pa.Table:
    """Return the rows near the changes.

    Args:
        rows: The rows of the table before the step, each once, with a positive diff. A partition
            with a change must be complete.
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
        # own frame reaches `size` further. Rows kept beyond that do not reach a change, not even
        # across a gap, because the same rows are at the gap's end. So their value, even if wrong,
        # stays the same and cancels out.
        at = np.flatnonzero(np.bincount(block[moved], minlength=count))
        low = np.searchsorted(before, before[at] - 2 * near.size, "right") - 1
        high = np.searchsorted(before, before[at + 1] + 2 * near.size, "left") - 1
        low, high = np.clip(low, start[at], at), np.clip(high, at, end[at])
    else:
        # A kept row has its true number, and a row that is left out comes after `size` rows that
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
    """Return a number for each row, from 0, that is the same for equal keys. NULL is an ordinary
    value."""
    found = np.zeros(table.num_rows, np.int64)
    for key in keys:
        encoded = pc.dictionary_encode(table[key].combine_chunks(), null_encoding="encode")
        own = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        _, found = np.unique(found * (int(own.max(initial=0)) + 1) + own, return_inverse=True)
    return found.astype(np.int64)


def order_codes(column: pa.ChunkedArray, by: SortColumn) -> _Numbers:
    """Return numbers in the order of a column's values, the same for equal values."""
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
    found: _Flags = ~known  # rows without a value are peers of each other, and few
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
        # Backwards: the complements are ascending and have the same distances.
        near_one |= _follows(~values[::-1], owner[::-1], moved[::-1], 2 * near.size)[::-1]
    found[places[order]] = near_one
    return found


def _follows(values: _Numbers, owner: _Numbers, moved: _Flags, most: int) -> _Flags:
    """Return a mask of the rows at most `most` after a change in their partition."""
    last = np.maximum.accumulate(np.where(moved, np.arange(len(values)), -1))
    at = np.maximum(last, 0)
    near: _Flags = (last >= 0) & (owner[at] == owner)
    near &= _distance(values[at], values) <= np.uint64(most)
    return near


def _distance(low: _Numbers, high: _Numbers) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the distances of ascending numbers, unsigned, because they may not fit into an
    int64."""
    return high.astype(np.uint64) - low.astype(np.uint64)


def _numbers(column: pa.ChunkedArray) -> _Numbers:
    kind = column.type
    if pa.types.is_date(kind):
        column = column.cast(pa.int32())
    found: _Numbers = column.cast(pa.int64()).to_numpy().astype(np.int64)
    return found


# -- changes up to the edges of groups -------------------------------------------------------------


class CoveredChanges(msgspec.Struct, frozen=True):
    """The input ``k{n}`` of a step: the changes ``d{n}`` up to the edge of their group in
    ``h{edges}``, and all changes of groups without an edge.

    For a group whose first rows are kept (`views.rule_top`), a hidden state has the last of them,
    its edge. A change beyond the edge does not affect the view. If the group and the order are
    columns of a table, this is known before Spark runs, and if no change is left, Spark does not
    run at all.

    `keys` and `order` are columns of the table, and `edge_columns` are those of the state for them.
    """

    input_index: int = msgspec.field(name="source")
    edges: int
    keys: tuple[str, ...]
    order: tuple[SortColumn, ...]
    edge_columns: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the table that are read: keys, then order."""
        return (*self.keys, *(each.column for each in self.order))

    def text(self) -> str:
        """Describe the changes for display."""
        by = f" by {', '.join(self.keys)}" if self.keys else ""
        return f"up to the edges in {InputKind.HIDDEN.text(self.edges)}{by}"


def covered_changes(
    changes: pa.Table, edges: pa.Table, covered: CoveredChanges
) -> tuple[pa.Table, pa.Table]:
    """Return the changes up to the edges, and the edges of their groups.

    Args:
        changes: Updates of the table.
        edges: Rows of the edges' state before the step, at least those of the changes' groups.
        covered: The columns to compare.
    """
    if not changes.num_rows or not edges.num_rows:
        return changes, edges.slice(0, 0)
    names = [f"c{place}" for place in range(len(covered.columns))]
    given = changes.select(covered.columns).rename_columns(names)
    bounds = edges.select(covered.edge_columns).rename_columns(names).cast(given.schema)
    both = pa.concat_tables([given, bounds]).combine_chunks()
    width = len(covered.keys)
    group = group_codes(both, names[:width])
    codes = [
        order_codes(both[name], by) for name, by in zip(names[width:], covered.order, strict=True)
    ]
    _, place = np.unique(np.stack(codes), axis=1, return_inverse=True)
    place = place.reshape(-1)
    count = changes.num_rows
    # In a group without an edge, all changes count as before it.
    last = np.full(int(group.max()) + 1, len(place), np.int64)
    last[group[count:]] = place[count:]
    kept = place[:count] <= last[group[:count]]
    touched = np.zeros(len(last), np.bool_)
    touched[group[:count][kept]] = True
    return changes.filter(pa.array(kept)), edges.filter(pa.array(touched[group[count:]]))
