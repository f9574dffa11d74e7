"""Chooses the upper of a sink's next batch. Pure.

A batch reaches from the durable upper outside, `lower`, up to a sealed time. It is cut at an upper
of the shard's own batches, so that it holds about `bytes_max`, and never inside a stretch of times
at which the collection is in error.

Errors. A collection is in error at a time when the updates of some error sum to more than zero: it
has no contents then, and nothing is written at such times. Changes inside a stretch in error are
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
    """One of the shard's batches: its bytes, and its upper."""

    upper: Frontier
    bytes: int


class ErrorInterval(msgspec.Struct, frozen=True):
    """Times ``lower <= t < upper`` in error; `error`: the one at `lower`."""

    lower: Time
    upper: Frontier
    error: str


class SinkBatchChoice(msgspec.Struct, frozen=True):
    """The next batch reaches up to `upper`, its updates within `stretches` moved to their uppers.
    None: there is no time with contents yet. `error`: the one at `upper`."""

    upper: Frontier | None
    stretches: tuple[ErrorInterval, ...] = ()
    error: str | None = None


def error_intervals(
    errors: Iterable[tuple[Time, str, int]], sealed: Frontier
) -> tuple[ErrorInterval, ...]:
    """Return the stretches in error below `sealed`, from (time, text, diff) in any order."""
    # Sums begin at zero: no batch ends in error, so no error holds right before `lower`.
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
    stretches: Sequence[ErrorInterval],
    bytes_max: int,
) -> SinkBatchChoice:
    """Return the next batch from `lower` on, when everything below `sealed` is known. `listed` is
    in order. It holds more than `bytes_max` only where it cannot hold less."""
    upper = _by_bytes(lower, sealed, listed, bytes_max)
    within = next((each for each in stretches if each.lower < upper <= each.upper), None)
    if within is not None and within.lower <= lower:
        # Nothing can be written before its end: the batch ends with the first time after it.
        if within.upper >= sealed:
            return SinkBatchChoice(None, error=within.error)
        upper = within.upper + 1  # that time has contents: stretches are apart
    elif within is not None:
        upper = within.lower
    ahead = next((each for each in stretches if each.lower == upper), None)
    inside = tuple(each for each in stretches if each.upper < upper)
    return SinkBatchChoice(upper, inside, None if ahead is None else ahead.error)


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


def move_out_of_intervals(updates: pa.Table, stretches: Sequence[ErrorInterval]) -> pa.Table:
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
