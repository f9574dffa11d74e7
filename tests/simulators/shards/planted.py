"""Mutants: each leaves out one rule of persist; see `mutants`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.durable.persist import PersistClient, upkeep
from actors.durable.persist import change as appending
from actors.durable.persist.change import ChangeOutcome, ShardDocuments
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.orphans import OrphanCollector, SuspectBlobs
from actors.durable.persist.part_lists import PartLists, list_lost_error
from actors.durable.persist.part_store import PartStore
from actors.durable.persist.reader import LeaseBook
from actors.durable.persist.shard import (
    BatchPart,
    PartList,
    ReaderLease,
    ShardBatch,
    ShardState,
    compacted,
    renewed,
)
from actors.runtime.errors import CorruptData, LeaseLost, StorageError
from tests.simulators.mutants import Mutants

PLANTED: Final = Mutants()


@PLANTED.replaces(upkeep, "deletable")
def leases_not_looked_at(state: ShardState, own: frozenset[str]) -> tuple[str, ...]:
    """Delete a retired blob even if a lease holds it."""
    return tuple(retired.key for retired in state.retired)


@PLANTED.planted
def own_readers_not_looked_at() -> Iterator[None]:
    """Delete a blob that a reader of this process uses."""
    with mock.patch.object(LeaseBook, "used", return_value=set()):
        yield


@PLANTED.planted
def run_out_by_memory() -> Iterator[None]:
    """Delete a lease's blobs when it has expired by this process's cached state."""
    right, maintain = LeaseBook.without_hold, upkeep.ShardUpkeep.maintain

    def without(self: LeaseBook, state: ShardState) -> frozenset[str]:
        return right(self, state) | self._dead(state)

    async def collecting_first(self: upkeep.ShardUpkeep, shard: str) -> None:
        await self._collect(shard)
        await maintain(self, shard)

    with (
        mock.patch.object(LeaseBook, "without_hold", without),
        mock.patch.object(upkeep.ShardUpkeep, "maintain", collecting_first),
    ):
        yield


@PLANTED.wraps(LeaseBook, "due")
def the_dead_hold_what_is_idle(right: Any, self: LeaseBook, state: ShardState) -> Any:
    """Remove expired leases with the next write, but never write for that alone."""
    with mock.patch.object(LeaseBook, "_dead", return_value=frozenset()):
        return right(self, state)


@PLANTED.replaces(PersistClient, "_missing")
async def retired_and_gone_is_damage(self: PersistClient, shard: str, key: str) -> StorageError:
    """Report a retired and deleted blob as lost."""
    state = await self._machine.refresh(shard)
    if state is not None and key in state.blob_keys():
        return CorruptData(f"blob {key} is gone", determinate=True)
    return LeaseLost(f"part {key} was deleted", determinate=True)


@PLANTED.wraps(PartLists, "read")
async def list_and_gone_is_damage(right: Any, self: PartLists, listed: PartList) -> Any:
    """Report a list of parts that is gone when it is to be read as lost, even if its batch is
    retired."""
    parts = await right(self, listed)
    if parts is None:
        raise list_lost_error("s", listed)
    return parts


@PLANTED.replaces(ShardState, "_live_keys")
def parts_of_lists_unnamed(self: ShardState) -> set[str]:
    """Count the parts of a list as unnamed, as the document does not name them."""
    return {
        part.key
        for batch in self.batches
        if batch.listed is None
        for part in batch.parts
        if part.key
    } | {batch.listed.key for batch in self.batches if batch.listed is not None}


@PLANTED.wraps(upkeep, "_replace")
def taken_for_an_earlier_attempt(
    right: Any,
    documents: ShardDocuments,
    shard: str,
    inputs: Sequence[ShardBatch],
    parts: tuple[BatchPart, ...],
    listed: PartList | None,
) -> Any:
    """Count a merge as done already when any batch has its output."""
    state = documents.shards[shard]
    if state is not None and parts and any(b.parts == parts for b in state.batches):
        return ChangeOutcome(True)
    return right(documents, shard, inputs, parts, listed)


@PLANTED.planted
def token_forgotten() -> Iterator[None]:
    """Ignore the idempotency token of an append whose answer was lost."""
    with mock.patch.object(appending, "is_applied", return_value=False):
        yield


@PLANTED.wraps(upkeep.ShardUpkeep, "_merge")
async def compaction_drops_a_batch(
    right: Any, self: Any, state: ShardState, inputs: Sequence[ShardBatch], *more: Any
) -> Any:
    """Leave the last input out of a merge of more than two."""
    return await right(self, state, inputs[:-1] if len(inputs) > 2 else inputs, *more)


@PLANTED.planted
def compacted_beyond_since() -> Iterator[None]:
    """Advance times to the end of the merged batches, beyond the since."""
    with mock.patch.object(upkeep, "compact_to", lambda state, upper: upper - 1):
        yield


@PLANTED.replaces(upkeep, "compacted")
def compaction_not_compared(
    state: ShardState,
    inputs: Sequence[ShardBatch],
    parts: tuple[BatchPart, ...],
    listed: PartList | None,
) -> ShardState | None:
    """Replace the present batches by a merge, even if they are not its inputs."""
    bounds = (inputs[0].lower, inputs[-1].upper)
    found = [b for b in state.batches if bounds[0] <= b.lower < bounds[1]]
    if not found or found[0].lower != bounds[0]:
        return None
    return compacted(state, found, parts, listed)


@PLANTED.planted
def since_goes_back() -> Iterator[None]:
    """Let the since follow the latest hold, not the least."""

    def hasty(
        state: ShardState, own: Mapping[str, ReaderLease], gone: frozenset[str], now_ms: int
    ) -> ShardState:
        then = renewed(state, own, gone, now_ms)
        held = [*then.holds.values(), *(lease.since for lease in then.leases.values())]
        return replace(then, since=min(held, default=then.since) - (1 if then.since > 2 else 0))

    with mock.patch("actors.durable.persist.reader.renewed", hasty):
        yield


@PLANTED.planted
def pending_collected() -> Iterator[None]:
    """Collect unnamed blobs at once, even those that a writer has just written."""

    def seen(self: SuspectBlobs, keys: Iterable[str], now_ms: float) -> list[str]:
        return list(keys)

    with (
        mock.patch.object(PartStore, "pending", return_value=False),
        mock.patch.object(SuspectBlobs, "seen", seen),
    ):
        yield


@PLANTED.replaces(OrphanCollector, "collect")
async def nothing_collected(self: OrphanCollector) -> int:
    """Never collect blobs that were never named."""
    return 0


@PLANTED.wraps(LeaseBook, "_dead")
def leases_of_others_run_out_early(right: Any, self: LeaseBook, state: ShardState) -> Any:
    """Expire another process's lease after half of its time without renewal."""
    lasts, self._lease_ms = self._lease_ms, self._lease_ms // 2
    try:
        return right(self, state)
    finally:
        self._lease_ms = lasts


@PLANTED.wraps(ShardMachine, "_set")
async def lost_answer_taken_for_done(right: Any, self: ShardMachine, *args: Any) -> Any:
    """Count a set that timed out as done."""
    try:
        return await right(self, *args)
    except Exception:  # noqa: BLE001 - this is the bug
        return True


@PLANTED.wraps(ShardMachine, "change")
async def stale_mismatch(right: Any, self: ShardMachine, *args: Any, **more: Any) -> Any:
    """Report a cached upper, though other processes have moved it."""
    self._exclusive = True
    return await right(self, *args, **more)


@PLANTED.planted
def what_is_in_doubt_is_believed() -> Iterator[None]:
    """Keep the cached document in exclusive mode after a set with an unknown outcome."""
    with mock.patch.object(ShardMachine, "_doubt"):
        yield


@PLANTED.replaces(PartStore, "leave")
def left_for_ever(self: PartStore, parts: Iterable[BatchPart | PartList], within_ms: int) -> None:
    """Keep the parts of an append without an answer from being collected."""
    for part in parts:
        if part.key in self._pending:
            self._pending[part.key].appending = True
