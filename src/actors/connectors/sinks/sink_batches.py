"""Chooses the upper of a sink's next batch. Pure.

A batch reaches from the external system's durable upper, `lower`, up to a sealed time. Its upper is
an upper of one of the shard's own batches, chosen so that the batch has about `bytes_max`, and
never inside an interval in which the collection is in error.

Errors. A collection is in error at a time when the updates of some error sum to more than zero. It
has no contents then, so nothing is written at such times. Changes inside an error interval are
written at the first time after it, so the external contents are always those of a time that had
some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import TIME
from actors.model.plan.updates import set_column
from actors.runtime.progress import Frontier, Time


class ListedBatch(msgspec.Struct, frozen=True):
    """One of the shard's batches: its upper and its size."""

    upper: Frontier
    bytes: int


class ErrorInterval(msgspec.Struct, frozen=True):
    """An interval ``lower <= t < upper`` in which the collection is in error; `error` is the one at
    `lower`."""

    lower: Time
    upper: Frontier
    error: str


class SinkBatchChoice(msgspec.Struct, frozen=True):
    """The next batch reaches up to `upper`; its updates inside `intervals` are moved to the
    intervals' uppers.

    `upper` is None if there is no time with contents yet. `error` is the one at `upper`.
    """

    upper: Frontier | None
    intervals: tuple[ErrorInterval, ...] = ()
    error: str | None = None


def error_intervals(
    errors: Iterable[tuple[Time, str, int]], sealed: Frontier
) -> tuple[ErrorInterval, ...]:
    """Return the error intervals below `sealed`, from (time, text, diff) in any order."""
    # Sums start at zero: no batch ends in error, so there is no error right before `lower`.
    sums: dict[str, int] = {}
    found: list[ErrorInterval] = []
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
            found.append(ErrorInterval(began[0], time, began[1]))
            began = None
    if began is not None:
        found.append(ErrorInterval(began[0], sealed, began[1]))
    return tuple(found)


def choose_batch(
    lower: Frontier,
    sealed: Frontier,
    listed: Sequence[ListedBatch],
    intervals: Sequence[ErrorInterval],
    bytes_max: int,
) -> SinkBatchChoice:
    """Return the next batch from `lower` on, if everything below `sealed` is known.

    `listed` must be in order. The batch exceeds `bytes_max` only if it cannot be smaller.
    """
    upper = _by_bytes(lower, sealed, listed, bytes_max)
    within = next((each for each in intervals if each.lower < upper <= each.upper), None)
    if within is not None and within.lower <= lower:
        # Nothing can be written before the interval's end, so the batch ends with the first time
        # after it.
        if within.upper >= sealed:
            return SinkBatchChoice(None, error=within.error)
        upper = within.upper + 1  # that time has contents, because intervals are never adjacent
    elif within is not None:
        upper = within.lower
    ahead = next((each for each in intervals if each.lower == upper), None)
    inside = tuple(each for each in intervals if each.upper < upper)
    return SinkBatchChoice(upper, inside, None if ahead is None else ahead.error)


def _by_bytes(
    lower: Frontier, sealed: Frontier, listed: Sequence[ListedBatch], most: int
) -> Frontier:
    """Return the last of the shard's uppers within `most` bytes; if there is none, the first one
    with any bytes."""
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


def move_out_of_intervals(updates: pa.Table, intervals: Sequence[ErrorInterval]) -> pa.Table:
    """Return the updates; those inside an interval are moved to its upper."""
    for each in intervals:
        times = updates[TIME]
        within = pc.and_(
            pc.greater_equal(times, pa.scalar(each.lower, pa.int64())),
            pc.less(times, pa.scalar(each.upper, pa.int64())),
        )
        if pc.any(within).as_py():
            moved = pc.if_else(within, pa.scalar(each.upper, pa.int64()), times)
            updates = set_column(updates, TIME, moved)
    return updates
