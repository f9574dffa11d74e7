"""Subtracts rows from a bag of rows, exactly. Pure, over Arrow.

Rows are the same when they are bit by bit, NULL being NULL, other than in engines that merge by
``=``. Of a row with five copies of which two are deleted, three stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import DIFF
from actors.plan.updates import comparable, consolidate


class SubtractedRows(msgspec.Struct, frozen=True, gc=False):
    """The remaining rows (without diffs), and the deletes that were not found (diffs < 0)."""

    kept: pa.Table
    left: pa.Table
    taken: int
    """Number of rows deleted."""


def match_candidates(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    """Return which rows could be among `deletes`, by each of these columns alone. Columns whose
    values cannot be compared are ignored."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)], pa.bool_())
    for name in names:
        kind = rows.schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            continue
        wanted = pc.unique(comparable(deletes[name]))
        mask = pc.and_(mask, pc.is_in(comparable(rows[name]), value_set=wanted))
    return mask


def subtract(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> SubtractedRows:
    """Subtract `deletes` (the columns, `DIFF` < 0, distinct rows) from `rows` (the same columns).
    `names`: columns that tell most rows apart, by which candidates are chosen."""
    # Only candidates are consolidated; most rows are none.
    mask = match_candidates(rows, deletes, names)
    found = rows.filter(mask)
    if not found.num_rows:
        return SubtractedRows(rows, deletes, 0)
    ones = pa.repeat(pa.scalar(1, pa.int64()), found.num_rows)
    there = found.append_column(pa.field(DIFF, pa.int64()), ones)
    sums = consolidate(pa.concat_tables([there, deletes.select(there.column_names)]))
    less = pc.less(sums[DIFF], pa.scalar(0, pa.int64()))
    left = sums.filter(less)
    before = -(pc.sum(deletes[DIFF]).as_py() or 0)
    taken = before + (pc.sum(left[DIFF]).as_py() or 0)
    if not taken:
        return SubtractedRows(rows, deletes, 0)
    stay = sums.filter(pc.invert(less))
    times = stay[DIFF].combine_chunks()
    index = pa.array([n for n, times_ in enumerate(times.to_pylist()) for _ in range(times_)])
    again = stay.drop_columns([DIFF]).take(index.cast(pa.int64()))
    kept = pa.concat_tables([rows.filter(pc.invert(mask)), again])
    return SubtractedRows(kept, left, taken)
