"""The interface of sinks: connectors that write changes of one object to an external system,
exactly once.

Theory of operation. The caller (the sink task) passes batches: consolidated updates with ``lower <=
time < upper``, contiguous and in order. A sink makes a batch and its `upper` durable *together* (in
Delta Lake, in one transaction of the table), or not at all; `open` returns the durable upper. So
after a crash the caller resumes from there, and no batch is skipped or written twice.

Rules:
- The first batch contains the contents at its `lower`. They are at that time or, if they could not
  be read there, at a later time below `upper`. All other batches contain changes.
- A batch may come in many pieces of bounded size (`write`). Only `commit` makes it visible.
- A retracted row (at one time, if the sink keeps times) is in only one piece of a batch, summed
  over the whole batch. So is an inserted row, except in the first batch of a sink without times,
  where a row may occur in several pieces.
- Uncommitted files are removed by `open`, or left where no reader sees them.
- If two writers write the same sink, one of them gets `WriterFenced`.
- An error that may go away on its own is `SourceUnreachable` (from `sources.source`): the sink is
  reopened with backoff. Nothing blocks the event loop, and every wait can be cancelled.
- After any error a sink is only closed; the caller makes a new one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import pyarrow as pa

from actors.model.plan.schema import TableSchema
from actors.runtime.progress import Frontier


class SinkStatistics(msgspec.Struct, frozen=True):
    """Counters since `open`."""

    rows_staged: int = 0
    """Number of updates written and not committed."""
    rows_committed: int = 0
    """Number of updates committed. A row with n copies at one time counts once."""
    bytes_committed: int = 0
    """Total size of the files added."""
    commits: int = 0


class SinkConnector(Protocol):
    """The connector of one kind of sink. `sinks.kinds` makes it from its configuration."""

    @property
    def keeps_times(self) -> bool:
        """Return whether it writes the times of updates. If not, a batch is given as of ``upper -
        1``, so rows that are inserted and deleted within it are never seen."""
        ...

    @property
    def once(self) -> bool:
        """Return whether it ends with its first batch, which is then committed with the empty
        frontier."""
        ...

    async def check(self, schema: TableSchema) -> None:
        """Check, before anything is created, that the sink can write to its destination and that
        existing data there is its own.

        Raises `InvalidUsage` (what is wrong, and what to do) and `SourceUnreachable`.
        """
        ...

    async def open(self, schema: TableSchema) -> Frontier | None:
        """Start or resume, and fence earlier writers of this sink. Return the durable upper; None
        if nothing was committed yet.

        Raises `SourceUnreachable`, `InvalidUsage` (existing data is not its own, or does not fit)
        and `WriterFenced`.
        """
        ...

    async def write(self, updates: pa.Table) -> None:
        """Write a piece of the batch: the columns, `TIME` and `DIFF`. Raises `SourceUnreachable`,
        and `InvalidUsage` for a value that cannot be written."""
        ...

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Make all pieces since the last commit durable and visible, together with `upper`; without
        pieces, only the frontier.

        Raises `SourceUnreachable` (indeterminate: `open` finds out), `InvalidUsage` (others changed
        the data) and `WriterFenced`.
        """
        ...

    def statistics(self) -> SinkStatistics:
        """Return the counters. Never waits."""
        ...

    async def close(self) -> None:
        """Release all resources. May be called twice."""
        ...
