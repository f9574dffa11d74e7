"""Mutants: each leaves out one rule of persist, by patching, while its context manager lasts.

They prove the simulation: each must be found in few seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.errors import CorruptData, LeaseLost, StorageError
from actors.persist import PersistClient, upkeep
from actors.persist import change as appending
from actors.persist.change import ChangeOutcome, ShardDocuments
from actors.persist.machine import ShardMachine
from actors.persist.orphans import OrphanCollector, SuspectBlobs
from actors.persist.part_store import PartStore
from actors.persist.parts import PartLists, list_lost_error
from actors.persist.reader import LeaseBook
from actors.persist.shard import (
    BatchPart,
    PartList,
    ReaderLease,
    ShardBatch,
    ShardState,
    compacted,
    renewed,
)


@contextmanager
def leases_not_looked_at() -> Iterator[None]:
    """Delete a retired blob even if a lease holds it."""

    def every(state: ShardState, own: frozenset[str]) -> tuple[str, ...]:
        return tuple(retired.key for retired in state.retired)

    with mock.patch.object(upkeep, "deletable", every):
        yield


@contextmanager
def own_readers_not_looked_at() -> Iterator[None]:
    """Delete a blob that a reader of this process uses."""
    with mock.patch.object(LeaseBook, "used", return_value=set()):
        yield


@contextmanager
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


@contextmanager
def the_dead_hold_what_is_idle() -> Iterator[None]:
    """Remove expired leases with the next write, but never write for that alone."""
    right = LeaseBook.due

    def due(self: LeaseBook, state: ShardState) -> bool:
        with mock.patch.object(LeaseBook, "_dead", return_value=frozenset()):
            return right(self, state)

    with mock.patch.object(LeaseBook, "due", due):
        yield


@contextmanager
def retired_and_gone_is_damage() -> Iterator[None]:
    """Report a retired and deleted blob as lost."""

    async def missing(self: PersistClient, shard: str, key: str) -> StorageError:
        state = await self._machine.refresh(shard)
        if state is not None and key in state.blob_keys():
            return CorruptData(f"blob {key} is gone", determinate=True)
        return LeaseLost(f"part {key} was deleted", determinate=True)

    with mock.patch.object(PersistClient, "_missing", missing):
        yield


@contextmanager
def list_and_gone_is_damage() -> Iterator[None]:
    """Report a list of parts that is gone when it is to be read as lost, even if its batch is
    retired."""
    right = PartLists.read

    async def read(self: PartLists, listed: PartList) -> Any:
        parts = await right(self, listed)
        if parts is None:
            raise list_lost_error("s", listed)
        return parts

    with mock.patch.object(PartLists, "read", read):
        yield


@contextmanager
def parts_of_lists_unnamed() -> Iterator[None]:
    """Count the parts of a list as unnamed, as the document does not name them."""

    def keys(self: ShardState) -> set[str]:
        return {
            part.key
            for batch in self.batches
            if batch.listed is None
            for part in batch.parts
            if part.key
        } | {batch.listed.key for batch in self.batches if batch.listed is not None}

    with mock.patch.object(ShardState, "_live_keys", keys):
        yield


@contextmanager
def taken_for_an_earlier_attempt() -> Iterator[None]:
    """Count a merge as done already when any batch has its output."""
    right = upkeep._replace

    def replaced(
        documents: ShardDocuments,
        shard: str,
        inputs: Sequence[ShardBatch],
        parts: tuple[BatchPart, ...],
        listed: PartList | None,
    ) -> ChangeOutcome[bool]:
        state = documents.shards[shard]
        if state is not None and parts and any(b.parts == parts for b in state.batches):
            return ChangeOutcome(True)
        return right(documents, shard, inputs, parts, listed)

    with mock.patch.object(upkeep, "_replace", replaced):
        yield


@contextmanager
def token_forgotten() -> Iterator[None]:
    """Ignore the idempotency token of an append whose answer was lost."""
    with mock.patch.object(appending, "is_applied", return_value=False):
        yield


@contextmanager
def compaction_drops_a_batch() -> Iterator[None]:
    """Leave the last input out of a merge of more than two."""
    right = upkeep.ShardUpkeep._merge

    async def merge(self: Any, state: ShardState, inputs: Sequence[ShardBatch], *more: Any) -> Any:
        return await right(self, state, inputs[:-1] if len(inputs) > 2 else inputs, *more)

    with mock.patch.object(upkeep.ShardUpkeep, "_merge", merge):
        yield


@contextmanager
def compacted_beyond_since() -> Iterator[None]:
    """Advance times to the end of the merged batches, beyond the since."""
    with mock.patch.object(upkeep, "compact_to", lambda state, upper: upper - 1):
        yield


@contextmanager
def compaction_not_compared() -> Iterator[None]:
    """Replace the present batches by a merge, even if they are not its inputs."""

    def replaced(
        state: ShardState,
        inputs: Sequence[ShardBatch],
        parts: tuple[BatchPart, ...],
        listed: PartList | None,
    ) -> ShardState | None:
        bounds = (inputs[0].lower, inputs[-1].upper)
        found = [b for b in state.batches if bounds[0] <= b.lower < bounds[1]]
        if not found or found[0].lower != bounds[0]:
            return None
        return compacted(state, found, parts, listed)

    with mock.patch.object(upkeep, "compacted", replaced):
        yield


@contextmanager
def since_goes_back() -> Iterator[None]:
    """Let the since follow the latest hold, not the least."""

    def hasty(
        state: ShardState, own: Mapping[str, ReaderLease], gone: frozenset[str], now_ms: int
    ) -> ShardState:
        then = renewed(state, own, gone, now_ms)
        held = [*then.holds.values(), *(lease.since for lease in then.leases.values())]
        return replace(then, since=min(held, default=then.since) - (1 if then.since > 2 else 0))

    with mock.patch("actors.persist.reader.renewed", hasty):
        yield


@contextmanager
def pending_collected() -> Iterator[None]:
    """Collect unnamed blobs at once, even those that a writer has just written."""

    def seen(self: SuspectBlobs, keys: Iterable[str], now_ms: float) -> list[str]:
        return list(keys)

    with (
        mock.patch.object(PartStore, "pending", return_value=False),
        mock.patch.object(SuspectBlobs, "seen", seen),
    ):
        yield


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Never collect blobs that were never named."""

    async def nothing(self: OrphanCollector) -> int:
        return 0

    with mock.patch.object(OrphanCollector, "collect", nothing):
        yield


@contextmanager
def leases_of_others_run_out_early() -> Iterator[None]:
    """Expire another process's lease after half of its time without renewal."""
    right = LeaseBook._dead

    def dead(self: LeaseBook, state: ShardState) -> frozenset[str]:
        lasts, self._lease_ms = self._lease_ms, self._lease_ms // 2
        try:
            return right(self, state)
        finally:
            self._lease_ms = lasts

    with mock.patch.object(LeaseBook, "_dead", dead):
        yield


@contextmanager
def lost_answer_taken_for_done() -> Iterator[None]:
    """Count a set that timed out as done."""
    right = ShardMachine._set

    async def set_(self: ShardMachine, *args: Any) -> bool:
        try:
            return await right(self, *args)
        except Exception:  # noqa: BLE001 - this is the bug
            return True

    with mock.patch.object(ShardMachine, "_set", set_):
        yield


@contextmanager
def stale_mismatch() -> Iterator[None]:
    """Report a cached upper, though other processes have moved it."""
    right = ShardMachine.change

    async def change(self: ShardMachine, *args: Any, **more: Any) -> Any:
        self._exclusive = True
        return await right(self, *args, **more)

    with mock.patch.object(ShardMachine, "change", change):
        yield


@contextmanager
def what_is_in_doubt_is_believed() -> Iterator[None]:
    """Keep the cached document in exclusive mode after a set with an unknown outcome."""
    with mock.patch.object(ShardMachine, "_doubt"):
        yield


@contextmanager
def left_for_ever() -> Iterator[None]:
    """Keep the parts of an append without an answer from being collected."""

    def leave(self: PartStore, parts: Iterable[BatchPart | PartList], within_ms: int) -> None:
        for part in parts:
            if part.key in self._pending:
                self._pending[part.key].appending = True

    with mock.patch.object(PartStore, "leave", leave):
        yield


PLANTED: Final[dict[str, Callable[[], Any]]] = {
    "leases_not_looked_at": leases_not_looked_at,
    "own_readers_not_looked_at": own_readers_not_looked_at,
    "run_out_by_memory": run_out_by_memory,
    "the_dead_hold_what_is_idle": the_dead_hold_what_is_idle,
    "retired_and_gone_is_damage": retired_and_gone_is_damage,
    "list_and_gone_is_damage": list_and_gone_is_damage,
    "parts_of_lists_unnamed": parts_of_lists_unnamed,
    "taken_for_an_earlier_attempt": taken_for_an_earlier_attempt,
    "token_forgotten": token_forgotten,
    "compaction_drops_a_batch": compaction_drops_a_batch,
    "compacted_beyond_since": compacted_beyond_since,
    "compaction_not_compared": compaction_not_compared,
    "since_goes_back": since_goes_back,
    "pending_collected": pending_collected,
    "nothing_collected": nothing_collected,
    "leases_of_others_run_out_early": leases_of_others_run_out_early,
    "lost_answer_taken_for_done": lost_answer_taken_for_done,
    "stale_mismatch": stale_mismatch,
    "what_is_in_doubt_is_believed": what_is_in_doubt_is_believed,
    "left_for_ever": left_for_ever,
}
