"""Parts of messages that several protocols share: comparisons, orders, statistics.

They have a module of their own so that a client loads only its own protocol.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime.progress import ObjectId


class ColumnComparison(msgspec.Struct, frozen=True, gc=False):
    """Keeps the rows for which ``column op value`` is true by SQL's rules (not false or unknown).

    `value` is an Arrow IPC stream of one row and one column; empty for the two tests of NULL.
    """

    column: str
    op: Literal["=", "<>", "<", "<=", ">", ">=", "is null", "is not null"]
    value: bytes = b""


class OrderBy(msgspec.Struct, frozen=True, gc=False):
    """One column of an order."""

    column: str
    descending: bool = False
    nulls_first: bool = True


class RowSetFinishing(msgspec.Struct, frozen=True, gc=False):
    """The final operations on the rows of a read: sort, skip `offset` rows, return at most `limit`.

    A worker may return only its first ``limit + offset`` rows; the client finishes over the rows of
    all workers.
    """

    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None
    offset: int = 0


class OperatorStatistics(msgspec.Struct, frozen=True, gc=False):
    """Work of one operator of a running task since the task started."""

    operator: str
    text: str
    rows: int = 0
    """Rows that have passed through it."""
    ms: float = 0.0
    """Time spent in it, including waits."""
    bytes_memory: int = 0
    """Bytes that it holds in memory."""
    bytes_mapped: int = 0
    """Bytes that it holds in mapped files."""


class ObjectStatistics(msgspec.Struct, frozen=True, gc=False):
    """Statistics of a source, a sink, or a one-shot ingestion (`id` is its uuid).

    Counts are since its creation. The other values are current; None means unknown.
    """

    id: ObjectId
    messages: int = 0
    """Changes received; for a sink, commits made; for a one-shot ingestion, files read."""
    bytes: int = 0
    rows_inserted: int = 0
    rows_deleted: int = 0
    rows_staged: int = 0
    """Rows written into parts, or to an external system, before they were committed."""
    snapshot_rows_known: int | None = None
    """Approximate number of rows of the first contents."""
    snapshot_rows_staged: int | None = None
    """How many of them have been staged."""
    position_known: str | None = None
    """Latest position of the external system."""
    position_committed: str | None = None
    """Latest durable position; for a sink, its upper in the external system."""
    lag_ms: int | None = None
    lag_bytes: int | None = None
    restarts: int = 0
    """Restarts since the worker started."""
    files_known: int | None = None
    """Number of files that a one-shot ingestion must read; it has read `messages` of them."""
    bytes_known: int | None = None
    """Number of bytes that it must read; it has read `bytes` of them."""
    operators: tuple[OperatorStatistics, ...] | None = None
    """Operators of the running task, from the last one on the rows' path to the first."""
