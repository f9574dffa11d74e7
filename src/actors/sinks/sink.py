"""What a sink is: it writes changes of one object into something outside, each exactly once.

Theory of operation. Whoever drives a sink (the sink task) gives it batches: consolidated updates
with ``lower <= time < upper``, contiguous and in order. A sink makes a batch and its `upper`
durable outside *together* (for Delta Lake: in one transaction of the table, by its application
transaction id), or not at all; `open` returns the upper that stands outside. So after a kill
the driver goes on from there, and nothing is skipped or written twice.

Rules:
- the first batch holds the contents at its `lower`, at that time or, when they could not be read
  there, at a later one below `upper`; all others hold changes;
- a batch may come in many pieces (`write`), bounded in bytes; only `commit` makes it seen;
- a row (at a time, where the sink keeps times) that goes is in one piece of a batch only, summed
  up over the whole batch; so is one that comes, except in the first batch of a sink that keeps no
  times, in which all rows come;
- what was written and not committed is removed by `open` or left where nobody reads it;
- two writers of one sink: one of them gets `Fenced`;
- an error that goes away by waiting is `Unreachable` (of `sources.source`): the sink is opened
  again, with backoff; nothing blocks the event loop; every wait can be cancelled;
- after any error a sink is only closed: it is made anew.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import pyarrow as pa

from actors.plan.schema import Schema
from actors.progress import Frontier


class SinkStatistics(msgspec.Struct, frozen=True):
    """Counts since `open`."""

    rows_staged: int = 0
    """Written, and not committed."""
    rows_committed: int = 0
    """Updates: a row that is there n times at once is one."""
    bytes_committed: int = 0
    """Of files that were added outside."""
    commits: int = 0


class Sink(Protocol):
    """One kind's implementation. Made from its configuration by `sinks.kinds`."""

    @property
    def keeps_times(self) -> bool:
        """Whether it writes the times of updates. False: a batch is given as of ``upper - 1``,
        so that what comes and goes within it is never seen."""
        ...

    @property
    def once(self) -> bool:
        """Whether it ends with its first batch, which is then committed with the empty frontier."""
        ...

    async def check(self, schema: Schema) -> None:
        """Before anything is made: can it be written there, and is what is there ours? Raises
        `InvalidUsage` (what is wrong, and what to do), `Unreachable`."""
        ...

    async def open(self, schema: Schema) -> Frontier | None:
        """Begins or goes on, and keeps any earlier writer of this sink from committing. The upper
        that is durable outside; None when nothing was committed yet. Raises `Unreachable`,
        `InvalidUsage` (what is there is not ours, or does not fit), `Fenced`."""
        ...

    async def write(self, updates: pa.Table) -> None:
        """A piece of the batch: the columns, `TIME`, `DIFF`. Raises `Unreachable`,
        `InvalidUsage` (a value cannot be written)."""
        ...

    async def commit(self, lower: Frontier, upper: Frontier) -> None:
        """Makes all pieces since the last commit durable, and seen, with `upper`. Nothing may
        have been written: then the frontier alone moves. Raises `Unreachable` (it may have
        happened: open again to learn), `InvalidUsage` (somebody changed what is there), `Fenced`.
        """
        ...

    def statistics(self) -> SinkStatistics:
        """Counts; never waits."""
        ...

    async def close(self) -> None:
        """Frees what it holds; twice is fine."""
        ...
