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

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TIME, TableSchema
from actors.model.plan.updates import set_column
from actors.runtime.progress import Frontier, Time

# -- Chooses the upper of a sink's next batch. Pure ------------------------------------------------
# A batch reaches from the durable upper outside, `lower`, up to a sealed time. It is cut at an
# upper of the shard's own batches, so that it holds about `bytes_max`, and never inside a stretch
# of times at which the collection is in error.
#
# Errors. A collection is in error at a time when the updates of some error sum to more than zero:
# it has no contents then, and nothing is written at such times. Changes inside a stretch in error
# are written at the first time after it, so the external contents are always those of a time that
# had some.


class ListedBatch(msgspec.Struct, frozen=True):
    """One of the shard's batches: its bytes, and its upper."""

    upper: Frontier
    bytes: int


class EmptyStretch(msgspec.Struct, frozen=True):
    """Times ``lower <= t < upper`` in error; `error`: the one at `lower`."""

    lower: Time
    upper: Frontier
    error: str


class SinkCut(msgspec.Struct, frozen=True):
    """The next batch reaches up to `upper`, its updates within `stretches` moved to their uppers.
    None: there is no time with contents yet. `error`: the one at `upper`."""

    upper: Frontier | None
    stretches: tuple[EmptyStretch, ...] = ()
    error: str | None = None


def stretches_in_error(
    errors: Iterable[tuple[Time, str, int]], sealed: Frontier
) -> tuple[EmptyStretch, ...]:
    """Return the stretches in error below `sealed`, from (time, text, diff) in any order."""
    # Sums begin at zero: no batch ends in error, so no error holds right before `lower`.
    sums: dict[str, int] = {}
    found: list[EmptyStretch] = []
    began: tuple[Time, str] | None = None
    changes: dict[Time, list[tuple[str, int]]] = {}
    for time, text, diff in errors:
        if time < sealed:
            changes.setdefault(time, []).append((text, diff))
    for time in sorted(changes):
        for text, diff in changes[time]:
            sums[text] = sums.get(text, 0) + diff
        held = min((text for text, total in sums.items() if total > 0), default=None)
        if held is not None and began is None:
            began = (time, held)
        elif held is None and began is not None:
            found.append(EmptyStretch(began[0], time, began[1]))
            began = None
    if began is not None:
        found.append(EmptyStretch(began[0], sealed, began[1]))
    return tuple(found)


def choose_batch(
    lower: Frontier,
    sealed: Frontier,
    listed: Sequence[ListedBatch],
    stretches: Sequence[EmptyStretch],
    bytes_max: int,
) -> SinkCut:
    """Return the next batch from `lower` on, when everything below `sealed` is known. `listed` is
    in order. It holds more than `bytes_max` only where it cannot hold less."""
    upper = _by_bytes(lower, sealed, listed, bytes_max)
    within = next((each for each in stretches if each.lower < upper <= each.upper), None)
    if within is not None and within.lower <= lower:
        # Nothing can be written before its end: the batch ends with the first time after it.
        if within.upper >= sealed:
            return SinkCut(None, error=within.error)
        upper = within.upper + 1  # that time has contents: stretches are apart
    elif within is not None:
        upper = within.lower
    ahead = next((each for each in stretches if each.lower == upper), None)
    inside = tuple(each for each in stretches if each.upper < upper)
    return SinkCut(upper, inside, None if ahead is None else ahead.error)


def _by_bytes(
    lower: Frontier, sealed: Frontier, listed: Sequence[ListedBatch], most: int
) -> Frontier:
    """Return the furthest of the shard's uppers within `most` bytes; the first that holds any, when
    none is within."""
    held = 0
    upper: Frontier | None = None
    for batch in listed:
        if batch.upper <= lower:
            continue
        held += batch.bytes
        if held > most and upper is not None:
            return upper
        if held:
            upper = min(batch.upper, sealed)
    return sealed


def move_out_of_stretches(updates: pa.Table, stretches: Sequence[EmptyStretch]) -> pa.Table:
    """Return the updates with times inside a stretch moved to its upper."""
    for each in stretches:
        times = updates[TIME]
        within = pc.and_(
            pc.greater_equal(times, pa.scalar(each.lower, pa.int64())),
            pc.less(times, pa.scalar(each.upper, pa.int64())),
        )
        if pc.any(within).as_py():
            moved = pc.if_else(within, pa.scalar(each.upper, pa.int64()), times)
            updates = set_column(updates, TIME, moved)
    return updates


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
