"""Rows taken out of a bag of rows, exactly: pure, over Arrow.

Rows are the same when they are bit by bit, NULL being NULL: as everywhere here, and other than in
the engines that merge by ``=``. Of a row that is there five times and goes twice, three stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import DIFF
from actors.plan.updates import comparable, consolidate


class Subtracted(msgspec.Struct, frozen=True, gc=False):
    """What stays of some rows (each once), and what was not found among them (diffs < 0)."""

    kept: pa.Table
    left: pa.Table
    taken: int
    """So many rows went."""


def maybe(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    """Which rows could be among `deletes`, by each of these columns alone. Columns whose values
    cannot be compared so are passed over."""
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), rows.num_rows)], pa.bool_())
    for name in names:
        kind = rows.schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            continue
        wanted = pc.unique(comparable(deletes[name]))
        mask = pc.and_(mask, pc.is_in(comparable(rows[name]), value_set=wanted))
    return mask


def subtract(rows: pa.Table, deletes: pa.Table, names: Sequence[str]) -> Subtracted:
    """Takes `deletes` (the columns, `DIFF` < 0, each row once) out of `rows` (the same columns).
    `names`: columns that tell most rows apart: those that differ there are not looked at."""
    mask = maybe(rows, deletes, names)
    found = rows.filter(mask)
    if not found.num_rows:
        return Subtracted(rows, deletes, 0)
    ones = pa.repeat(pa.scalar(1, pa.int64()), found.num_rows)
    there = found.append_column(pa.field(DIFF, pa.int64()), ones)
    sums = consolidate(pa.concat_tables([there, deletes.select(there.column_names)]))
    less = pc.less(sums[DIFF], pa.scalar(0, pa.int64()))
    left = sums.filter(less)
    before = -(pc.sum(deletes[DIFF]).as_py() or 0)
    taken = before + (pc.sum(left[DIFF]).as_py() or 0)
    if not taken:
        return Subtracted(rows, deletes, 0)
    stay = sums.filter(pc.invert(less))
    times = stay[DIFF].combine_chunks()
    index = pa.array([n for n, times_ in enumerate(times.to_pylist()) for _ in range(times_)])
    again = stay.drop_columns([DIFF]).take(index.cast(pa.int64()))
    kept = pa.concat_tables([rows.filter(pc.invert(mask)), again])
    return Subtracted(kept, left, taken)
