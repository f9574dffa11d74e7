"""The interface of sinks: connectors that write changes of one object outside, exactly once.

Theory of operation. The caller (the sink task) gives a sink batches: consolidated updates with
``lower <= time < upper``, contiguous and in order. A sink makes a batch and its `upper` durable
*together* (for Delta Lake: in one transaction of the table), or not at all; `open` returns the
durable upper. So after a kill the caller resumes from there: no batch is skipped or written twice.

Rules:
- the first batch holds the contents at its `lower`, at that time or, when they could not be read
  there, at a later one below `upper`; all others hold changes;
- a batch may come in many pieces (`write`), bounded in bytes; only `commit` makes it visible;
- a retracted row (at a time, where the sink keeps times) is in one piece of a batch only, summed
  up over the whole batch; so is an inserted one, except in the first batch of a sink that keeps no
  times, in which a row may come in several pieces;
- uncommitted files are removed by `open`, or left where no reader sees them;
- of two writers of one sink, one gets `WriterFenced`;
- an error that waiting may cure is `SourceUnreachable` (of `sources.source`): the sink is reopened,
  with backoff; nothing blocks the event loop; every wait can be cancelled;
- after any error a sink is only closed: the caller makes a new one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import pyarrow as pa

from actors.model.plan.schema import TableSchema
from actors.runtime.progress import Frontier


class SinkStatistics(msgspec.Struct, frozen=True):
    """Counts since `open`."""

    rows_staged: int = 0
    """Updates that were written and not committed."""
    rows_committed: int = 0
    """Updates: a row with n copies at one time counts once."""
    bytes_committed: int = 0
    """Bytes of the files that were added."""
    commits: int = 0


class SinkConnector(Protocol):
    """The connector of one kind. Made from its configuration by `sinks.kinds`."""

    @property
    def keeps_times(self) -> bool:
        """Return whether it writes the times of updates. If not, a batch is given as of ``upper -
        1``, so that rows inserted and deleted within it are never seen."""
        ...

    @property
    def once(self) -> bool:
        """Return whether it ends with its first batch, which is then committed with the empty
        frontier."""
        ...

    async def check(self, schema: TableSchema) -> None:
        """Check, before anything is created, that the sink can write there, and that existing data
        is its own. Raises `InvalidUsage` (what is wrong, and what to do), `SourceUnreachable`."""
        ...

    async def open(self, schema: TableSchema) -> Frontier | None:
        """Begin or resume, and fence earlier writers of this sink. Return the durable upper; None
        when nothing was committed yet. Raises `SourceUnreachable`, `InvalidUsage` (existing data is
        not its own, or does not fit), `WriterFenced`."""
        ...

    async def write(self, updates: pa.Table) -> None:
        """Write a piece of the batch: the columns, `TIME`, `DIFF`. Raises `SourceUnreachable`,
        `InvalidUsage` (a value cannot be written)."""
        ...

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Make all pieces since the last commit durable and visible, together with `upper`; without
        pieces only the frontier. Raises `SourceUnreachable` (indeterminate: `open` tells),
        `InvalidUsage` (others changed the data), `WriterFenced`."""
        ...

    def statistics(self) -> SinkStatistics:
        """Return the counts; never waits."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called twice."""
        ...
