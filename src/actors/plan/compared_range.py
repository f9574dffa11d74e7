"""Rows between the old and the new value of a bound: all that a change of the bound can affect.

Rows are compared with one row, ``placed > (SELECT max(placed) …) - 24 hours``, and that row
changes. A row beyond all values that the bound had compares with each of them alike: it meets the
bound that is retracted and the new one, and its changes for both sum to nothing, as long as the
changes of the one row sum to nothing at each time, and nothing else is read of it.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import DIFF, TIME


class ComparedRange(msgspec.Struct, frozen=True):
    """Selects the rows that a changed bound can affect: a lookup without a key reads no others.

    `lookup` is its number. Each of `columns`, of its target, is compared with the column of
    `bounds` beside it, of its only origin.
    """

    lookup: int
    columns: tuple[str, ...]
    bounds: tuple[str, ...]

    def text(self) -> str:
        """Return a text for people that says which rows these are."""
        pairs = zip(self.columns, self.bounds, strict=True)
        return " or ".join(f"{column} in the range of {bound}" for column, bound in pairs)


def rows_in_range(rows: pa.Table, changes: pa.Table, wanted: ComparedRange) -> pa.Table:
    """Return at least the rows that do not compare alike with all bounds.

    Args:
        rows: Rows of the lookup's target.
        changes: Updates of the one row, with its bounds.
        wanted: Columns to compare.

    Returns all rows where a bound is NULL or NaN, or where the one row is not replaced by another.
    """
    if not _is_replaced(changes):
        return rows
    kept: pa.ChunkedArray | None = None
    for column, bound in zip(wanted.columns, wanted.bounds, strict=True):
        found = _between(rows[column], changes[bound])
        if found is None:
            return rows
        kept = found if kept is None else pc.or_kleene(kept, found)
    # This drops rows whose column is NULL, too: NULL compares alike with every bound.
    return rows.filter(kept)


def _is_replaced(changes: pa.Table) -> bool:
    """Return whether retractions and inserts sum to nothing, at every time."""
    sums = changes.select([TIME, DIFF]).group_by(TIME).aggregate([(DIFF, "sum")])
    return not pc.any(pc.not_equal(sums[f"{DIFF}_sum"], 0)).as_py()


def _between(values: pa.ChunkedArray, bounds: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return which values are no less than the least bound and no greater than the greatest; None
    where that is not known."""
    kind = bounds.type
    if bounds.null_count or not _compares(values.type, kind):
        return None
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(bounds)).as_py():
        return None
    # A whole number beside a double is rounded, as Spark does, which keeps their order.
    values = values.cast(kind, safe=False)
    ends = pc.min_max(bounds)
    return pc.and_(pc.greater_equal(values, ends["min"]), pc.less_equal(values, ends["max"]))


def _compares(own: pa.DataType, bound: pa.DataType) -> bool:
    """Return whether a cast of a column to the bound's type keeps every value's place."""
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
