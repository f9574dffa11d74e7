"""Verifies a shard: reads every part and compares it with its description.

It writes nothing and takes no lease. Parts that are compacted away meanwhile are skipped, and their
successors read instead. Only what is wrong in any interleaving is a fault: bytes that differ from
the checksum, a missing blob that a document names, rows, times or diffs that contradict the
description. It continues after a fault, to find all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist.client import PersistClient
from actors.durable.persist.part_filter import stored
from actors.durable.persist.part_lists import list_lost_error
from actors.durable.persist.shard import BatchPart, ShardBatch, ShardState
from actors.durable.persist.statistics import ColumnStatistics
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.runtime.errors import CorruptData, LeaseLost, PenstockError, StorageError
from actors.runtime.progress import ShardId, format_frontier

_ROUNDS_MAX = 16
"""Maximum number of rounds over a shard that is compacted repeatedly."""


class ShardFault(msgspec.Struct, frozen=True):
    """A fault and its place. `batch` and `part` are "" for a fault of the whole document."""

    shard: ShardId
    batch: str
    part: str
    text: str


class VerifiedShard(msgspec.Struct, frozen=True):
    """Counts of the parts that were read, and the faults found."""

    shard: ShardId
    parts: int
    rows: int
    bytes: int
    faults: tuple[ShardFault, ...]


def batch_name(batch: ShardBatch) -> str:
    """Return the batch's interval as text."""
    upper = "…" if format_frontier(batch.upper) == "[]" else str(batch.upper)
    return f"[{batch.lower}, {upper})"


async def verify(
    client: PersistClient, shard: ShardId, note: Callable[[BatchPart], None] = lambda part: None
) -> VerifiedShard:
    """Verify a shard. `note` is called with each part that was read.

    Raises `UnknownObject` (dropped meanwhile), and `StorageError` only for documents that could not
    be read.
    """
    seen: set[tuple[str, int]] = set()
    lists: set[str] = set()
    faults: list[ShardFault] = []
    rows = read = 0
    for _ in range(_ROUNDS_MAX):
        try:
            state = await client.upkeep.state_now(shard)
        except CorruptData as error:
            faults.append(ShardFault(shard, "", "", str(error)))
            break
        due = [
            (number, batch, part)
            for batch in state.batches
            for number, part in enumerate(batch.parts)
            # A compaction between two rounds moves parts, but each is read once.
            if _name(batch, number, part) not in seen
        ]
        if not due:
            break
        moved = not await _lists_read(client, state, lists, faults)
        for number, batch, part in due:
            try:
                wrong = await _compared(client, state, part)
            except LeaseLost:
                moved = True  # its successor is read in the next round
                continue
            seen.add(_name(batch, number, part))
            rows += part.rows
            read += part.bytes
            name = part.key or f"inline {number}"
            faults += [ShardFault(shard, batch_name(batch), name, text) for text in wrong]
            note(part)
        # Every part of one state was read, so the whole shard is covered.
        if not moved:
            break
    return VerifiedShard(shard, len(seen), rows, read, tuple(faults))


async def _lists_read(
    client: PersistClient, state: ShardState, seen: set[str], faults: list[ShardFault]
) -> bool:
    """Return whether all part lists exist in the store. A missing one is a fault if the state has
    not changed since."""
    for batch in state.batches:
        listed = batch.listed
        if listed is None or listed.key in seen:
            continue
        try:
            # Read from the store, because this process may have the contents cached.
            found = await client.lists.read(listed)
            if found is None:
                if (await client.upkeep.state_now(state.id)).seqno != state.seqno:
                    return False
                raise list_lost_error(state.id, listed)
        except StorageError as error:
            faults.append(ShardFault(state.id, batch_name(batch), listed.key, str(error)))
        seen.add(listed.key)
    return True


def _name(batch: ShardBatch, number: int, part: BatchPart) -> tuple[str, int]:
    """Identify a part across rounds; an inline part by its place."""
    return (part.key, 0) if part.key else (f"{batch.lower} {number}", part.checksum)


async def _compared(client: PersistClient, state: ShardState, part: BatchPart) -> list[str]:
    try:
        updates = await client.fetch(part, state.schema)
    except LeaseLost:
        raise
    except StorageError as error:
        return [str(error)]
    except (PenstockError, pa.ArrowException) as error:
        return [f"{type(error).__name__}: {error}"]
    return compare_with_description(part, updates)


def compare_with_description(part: BatchPart, updates: pa.Table) -> list[str]:
    """Return how the updates contradict the part's description. Decoding has already checked bytes,
    rows and columns."""
    found = []
    bounds = pc.min_max(updates[TIME])
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if updates[TIME].null_count:
        found.append(f"{updates[TIME].null_count} rows have no time")
    elif low < part.time_min or high > part.time_max:
        found.append(f"contains times {low} to {high}, expected {part.time_min} to {part.time_max}")
    if updates[DIFF].null_count:
        found.append(f"{updates[DIFF].null_count} rows have no diff")
    elif not part.retracts and pc.min(updates[DIFF]).as_py() < 0:
        found.append("contains negative diffs, expected none")
    if ERROR in updates.column_names and not part.has_errors:
        found.append("contains errors, expected none")
    for known in part.statistics:
        if known.column in updates.column_names:
            found += _unlike(known, updates[known.column])
    return found


def _unlike(known: ColumnStatistics, values: pa.ChunkedArray) -> list[str]:
    """Return violations of the statistics: values beyond a bound, or a wrong number of NULLs."""
    found = []
    if known.nulls is not None and known.nulls != values.null_count:
        found.append(f"column {known.column}: {values.null_count} NULLs, described {known.nulls}")
    rest: Any = values.drop_null()
    if pa.types.is_floating(values.type):
        # NaN is above every number, and so above any upper bound.
        if known.high is not None and pc.any(pc.is_nan(rest)).as_py():
            found.append(f"column {known.column}: NaN is above the bound {known.high!r}")
        # `min_max` must not see NaN, because the bounds apply to the other numbers.
        rest = rest.filter(pc.invert(pc.is_nan(rest)))
    if not len(rest):
        return found
    bounds: Any = pc.min_max(rest)
    low, high = stored(bounds["min"]), stored(bounds["max"])
    if known.low is not None and low < known.low:  # type: ignore[operator]
        found.append(f"column {known.column}: {low!r} is below the bound {known.low!r}")
    if known.high is not None and high > known.high:  # type: ignore[operator]
        found.append(f"column {known.column}: {high!r} is above the bound {known.high!r}")
    return found
