"""Up to where the next batch of a sink reaches: pure.

A batch reaches from what is durable outside, `lower`, up to a time that is sealed here. It is cut
at the upper of one of the shard's own batches, so that it holds about `bytes_max`, and always
before or behind a stretch of times at which the collection is in error.

Errors. A collection is in error at a time when the sum of some error's updates is positive there:
it has no contents then. A batch never ends in such a stretch: nothing is written at its times.
When the error is retracted, the changes that fell into the stretch belong to the first time
behind it, at which there are contents again. So what stands outside is always the contents of a
time at which there were some, and outside there is no change at a time without contents.

Since no batch ends in error, no error holds right before `lower`: sums begin with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.plan.schema import TIME
from actors.plan.updates import set_column
from actors.progress import Frontier, Time


class Listed(msgspec.Struct, frozen=True):
    """What a shard has: one of its batches as bytes below an upper."""

    upper: Frontier
    bytes: int


class Stretch(msgspec.Struct, frozen=True):
    """Times ``lower <= t < upper`` without contents, and an error that holds at the first."""

    lower: Time
    upper: Frontier
    error: str


class Cut(msgspec.Struct, frozen=True):
    """The next batch: up to `upper`, its updates within `stretches` raised to their uppers. None:
    there is no time with contents yet. `error`: what stands right behind it."""

    upper: Frontier | None
    stretches: tuple[Stretch, ...] = ()
    error: str | None = None


def stretches_in_error(
    errors: Iterable[tuple[Time, str, int]], sealed: Frontier
) -> tuple[Stretch, ...]:
    """The stretches below `sealed` at which something sums to more than zero, of (time, text,
    diff) in any order."""
    sums: dict[str, int] = {}
    found: list[Stretch] = []
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
            found.append(Stretch(began[0], time, began[1]))
            began = None
    if began is not None:
        found.append(Stretch(began[0], sealed, began[1]))
    return tuple(found)


def cut(
    lower: Frontier,
    sealed: Frontier,
    listed: Sequence[Listed],
    stretches: Sequence[Stretch],
    bytes_max: int,
) -> Cut:
    """Up to where the batch from `lower` on reaches, when everything below `sealed` is known.
    `listed` is in order. It holds more than `bytes_max` only where it cannot hold less."""
    upper = _by_bytes(lower, sealed, listed, bytes_max)
    within = next((each for each in stretches if each.lower < upper <= each.upper), None)
    if within is not None and within.lower <= lower:
        # Nothing can be written before its end: the batch ends with the first time behind it.
        if within.upper >= sealed:
            return Cut(None, error=within.error)
        upper = within.upper + 1  # that time has contents: stretches are apart
    elif within is not None:
        upper = within.lower
    ahead = next((each for each in stretches if each.lower == upper), None)
    inside = tuple(each for each in stretches if each.upper < upper)
    return Cut(upper, inside, None if ahead is None else ahead.error)


def _by_bytes(lower: Frontier, sealed: Frontier, listed: Sequence[Listed], most: int) -> Frontier:
    """The furthest of the shard's uppers that keeps to `most` bytes; the first that holds any,
    when none does."""
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


def raised(updates: pa.Table, stretches: Sequence[Stretch]) -> pa.Table:
    """Updates with the times within each stretch raised to its upper."""
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
