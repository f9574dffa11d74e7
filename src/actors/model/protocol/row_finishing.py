"""Applies order, offset and limit to the rows of a peek. Pure.

Each worker drops the rows that cannot be in the result (`limit_batches`), and the reader finishes
over the rows of all workers (`finish_rows`). Every row has a weight (`DIFF`, greater than zero); a
row of weight 3 stands for three rows. `limit_batches` keeps the rows that may be among the first
``offset + limit``. Without an order it stops as soon as it has enough rows. With an order it sorts
and cuts whenever it holds twice as many.

The order is Spark's: NaN is greater than every number, -0.0 equals 0.0, and text and binary compare
byte by byte. Each column says where its NULLs sort. Rows that compare equal have any order, and
a limit may keep any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from actors.model.plan import arrow_compute as pc
from actors.model.plan.schema import DIFF
from actors.model.protocol.message_parts import OrderBy, RowSetFinishing
from actors.runtime.errors import InvalidUsage

SORTED_ROWS_MIN = 4_096
"""Sorting fewer rows at a time costs more than holding them."""


def check_finishing(finishing: RowSetFinishing) -> None:
    """Raise `InvalidUsage` if the limit or the offset is negative."""
    if finishing.offset < 0:
        raise InvalidUsage(f"offset {finishing.offset}: must be at least 0")
    if finishing.limit is not None and finishing.limit < 0:
        raise InvalidUsage(f"limit {finishing.limit}: must be at least 0")


def limit_batches(
    batches: Iterator[pa.RecordBatch], finishing: RowSetFinishing | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one worker that may be in the result, and stop reading early if
    possible."""
    if finishing is None or finishing.limit is None:
        yield from batches
        return
    wanted = finishing.limit + finishing.offset
    if wanted == 0:
        return
    # Without an order any rows will do, so stop reading as soon as there are enough.
    if not finishing.order_by:
        yield from _first(batches, wanted)
        return
    bound = max(SORTED_ROWS_MIN, 2 * wanted)
    held: pa.Table | None = None
    gathered: list[pa.Table] = []
    rows = 0
    for batch in batches:
        gathered.append(pa.Table.from_batches([batch]))
        rows += batch.num_rows
        if rows >= bound:
            held = _top([held, *gathered] if held is not None else gathered, finishing, wanted)
            gathered, rows = [], held.num_rows
    if gathered:
        held = _top([held, *gathered] if held is not None else gathered, finishing, wanted)
    if held is not None:
        yield from held.combine_chunks().to_batches()


def finish_rows(
    rows: pa.Table, finishing: RowSetFinishing | None, project: Sequence[str] | None
) -> pa.Table:
    """Sort the rows of all workers, skip `offset` of them, and return at most `limit`.

    The columns are those of `project` (None for all) and `DIFF`.
    """
    if finishing is not None:
        if finishing.order_by and rows.num_rows:
            rows = rows.take(_order(rows, finishing.order_by))
        if finishing.offset or finishing.limit is not None:
            rows = _cut(rows, finishing.offset, finishing.limit)
    return rows if project is None else rows.select([*project, DIFF])


class RowFinisher:
    """Applies `finish_rows` piece by piece. With an order, all rows are needed first."""

    def __init__(self, finishing: RowSetFinishing | None, project: Sequence[str] | None) -> None:
        self._finishing = finishing or RowSetFinishing()
        self._project = project
        self._gathered: list[pa.Table] = []
        """With an order: the pieces added so far."""
        self._skip = self._finishing.offset
        """Rows that are still to be skipped."""
        self._left = self._finishing.limit
        """Rows that may still be returned; None without a limit."""

    @property
    def complete(self) -> bool:
        """Return whether no further piece can change the result."""
        return self._left == 0 and not self._finishing.order_by

    def add(self, rows: pa.Table) -> pa.Table | None:
        """Add a piece. Return rows of the result that are final; None if there are none yet."""
        # Rows of a later piece may come first in the order.
        if self._finishing.order_by:
            self._gathered.append(rows)
            return None
        if self._skip == 0 and self._left is None:
            return finish_rows(rows, None, self._project)
        piece = _cut(rows, self._skip, self._left)
        # Rows that were cut off count against the offset, those that were kept against the limit.
        self._skip = max(0, self._skip - _weight(rows))
        if self._left is not None:
            self._left -= _weight(piece)
        return finish_rows(piece, None, self._project)

    def end(self) -> pa.Table | None:
        """Return the remaining rows of the result after the last piece; None if there are none."""
        if not self._gathered:
            return None
        rows: pa.Table = pa.concat_tables(self._gathered)
        return finish_rows(rows, self._finishing, self._project)


def _weight(table: Any) -> int:
    return int(pc.sum(table.column(DIFF), min_count=0).as_py())


def _first(batches: Iterator[pa.RecordBatch], wanted: int) -> Iterator[pa.RecordBatch]:
    left = wanted
    for batch in batches:
        # Count weights, not rows: a row of weight 3 stands for three rows.
        weights = np.cumsum(batch.column(DIFF).to_numpy())
        if weights[-1] < left:
            left -= int(weights[-1])
            yield batch
            continue
        yield batch.slice(0, int(np.searchsorted(weights, left, "left")) + 1)
        return


def _top(tables: Sequence[pa.Table], finishing: RowSetFinishing, wanted: int) -> pa.Table:
    """Return the first rows in order whose weights add up to at least `wanted`."""
    rows = pa.concat_tables(tables)
    order = _order(rows, finishing.order_by)
    weights = np.cumsum(rows[DIFF].to_numpy()[order.to_numpy()])
    count = int(np.searchsorted(weights, wanted, "left")) + 1
    return rows.take(order.slice(0, count))


def _cut(rows: pa.Table, offset: int, limit: int | None) -> pa.Table:
    """Skip `offset` rows and return at most `limit`, both counted by weight."""
    if rows.num_rows == 0:
        return rows
    diffs = rows[DIFF].to_numpy()
    ends = np.cumsum(diffs)
    begins = ends - diffs
    beyond = int(ends[-1]) if limit is None else offset + limit
    kept = np.minimum(ends, beyond) - np.maximum(begins, offset)
    first, last = np.searchsorted(ends, offset, "right"), np.searchsorted(begins, beyond, "left")
    # The first and the last row may be kept in part, with the weight that lies within the range.
    rows = rows.slice(int(first), max(0, int(last) - int(first)))
    weights = pa.array(kept[int(first) : int(first) + rows.num_rows], pa.int64())
    return rows.set_column(rows.schema.get_field_index(DIFF), pa.field(DIFF, pa.int64()), weights)


def _order(rows: pa.Table, order_by: Sequence[OrderBy]) -> pa.Array:
    """Return the indices that sort the rows."""
    columns: list[Any] = []
    keys: list[tuple[str, str]] = []
    for number, by in enumerate(order_by):
        values = rows[by.column]
        rank = _rank(values, by)
        # Arrow cannot place NULL and NaN per column, so sort by a rank column first.
        if rank is not None:
            columns.append(rank)
            keys.append((f"r{number}", "ascending"))
        columns.append(values)
        keys.append((f"v{number}", "descending" if by.descending else "ascending"))
    table = pa.table(columns, names=[name for name, _ in keys])
    return pc.sort_indices(table, sort_keys=keys)


def _rank(values: Any, by: OrderBy) -> Any:
    """Return ranks that place NULL and NaN before or after the other values; None if not
    needed."""
    floating = pa.types.is_floating(values.type)
    if not values.null_count and not floating:
        return None
    ordinary = pa.scalar(2, pa.int8())
    rank: Any = pa.scalar(1 if by.descending else 3, pa.int8())
    if floating:
        rank = pc.if_else(pc.fill_null(pc.is_nan(values), False), rank, ordinary)
    else:
        rank = ordinary
    null = pa.scalar(0 if by.nulls_first else 4, pa.int8())
    return pc.if_else(pc.is_null(values), null, rank)
