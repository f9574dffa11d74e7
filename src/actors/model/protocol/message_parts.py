"""Parts of messages that several protocols have in common: comparisons, orders, statistics.

They stand apart so that a client loads no protocol but its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime.progress import ObjectId


class ColumnComparison(msgspec.Struct, frozen=True, gc=False):
    """Keeps rows whose `column` compares with `value` as `op` says, by SQL's rules: unknown is not
    kept.

    `value`: an Arrow IPC stream of one row and one column; empty for the two tests of null.
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
    """Last operations on the rows: order, then `offset` rows skipped, then at most `limit`.

    A worker may apply `limit + offset` to its own part; the client finishes over all parts.
    """

    order_by: tuple[OrderBy, ...] = ()
    limit: int | None = None
    offset: int = 0


class OperatorStatistics(msgspec.Struct, frozen=True, gc=False):
    """Work of one operator of a running task since the task began."""

    operator: str
    text: str
    rows: int = 0
    """Rows that have passed it."""
    ms: float = 0.0
    """Time spent in it, waits included."""
    bytes_memory: int = 0
    """Bytes that it holds in memory."""
    bytes_mapped: int = 0
    """Bytes in files, in memory only as far as they are read."""


class ObjectStatistics(msgspec.Struct, frozen=True, gc=False):
    """Work of a source, sink or one-shot ingestion (by its uuid) since it was created (counts), and
    its state (the rest; None: unknown)."""

    id: ObjectId
    messages: int = 0
    """Changes received; for a sink: commits made; for a one-shot ingestion: files read."""
    bytes: int = 0
    rows_inserted: int = 0
    rows_deleted: int = 0
    rows_staged: int = 0
    """Rows written into parts, or externally, and not committed at the time."""
    snapshot_rows_known: int | None = None
    """Rows of the first contents, about."""
    snapshot_rows_staged: int | None = None
    position_known: str | None = None
    """Newest external position."""
    position_committed: str | None = None
    """Newest position that is durable; for a sink: its external upper."""
    lag_ms: int | None = None
    lag_bytes: int | None = None
    restarts: int = 0
    """Restarts since the worker started."""
    files_known: int | None = None
    """Files that a one-shot ingestion must read; `messages` of them were."""
    bytes_known: int | None = None
    """Bytes that it must read; `bytes` of them were."""
    operators: tuple[OperatorStatistics, ...] | None = None
    """Operators of the task that runs now, the last one of the rows' path first."""
