"""Keeps shards small: runs compaction, and deletes blobs that nothing names or uses.

A blob is removed in this order: no batch names it (it is retired), no reader of this process uses
it and no other lease can cover it, its file is deleted, and the state forgets it. A crash in
between only repeats the last steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeAlias

import anyio

from actors.durable.persist.change import ChangeOutcome, ShardDocuments
from actors.durable.persist.compaction import (
    UpdateMerger,
    choose_batches,
    input_rows,
    worth_merging,
    worth_reclaiming,
)
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.part_store import PartStore
from actors.durable.persist.reader import LeaseBook
from actors.durable.persist.shard import (
    BatchPart,
    PartList,
    ShardBatch,
    ShardState,
    collected,
    compact_to,
    compacted,
    deletable,
)
from actors.runtime.errors import LeaseLost, StorageError, UnknownObject
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import TIME_MIN, ShardId, Time
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import STATE_RELIEF

log = logging.getLogger("penstock.persist")
Progress: TypeAlias = Callable[[int, int], None]
"""Callback with the number of rows done and the total."""
_RELIEF_SHARE = 0.75
"""Share of `state_bytes_max` above which an append waits for a compaction (backpressure)."""
_ROUNDS_MAX = 8
"""Maximum number of consecutive compactions of one shard."""
_COLLECTED_AT_ONCE = 64
"""Number of blobs that are deleted before the state forgets them."""
_DECODED_SHARE = 2
"""Divisor of a part's target size that gives the decoded bytes that a merge keeps in memory."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore the progress."""


class ShardUpkeep:
    """Compaction and collection for the shards of one process."""

    def __init__(
        self,
        machine: ShardMachine,
        parts: PartStore,
        book: LeaseBook,
        settings: Settings,
        clock: ActorClock,
        *,
        scratch: Path | None,
        guest: bool = False,
    ) -> None:
        self._machine = machine
        self._parts = parts
        self._book = book
        self._settings = settings
        self._clock = clock
        self._scratch = scratch
        self._guest = guest
        # One compaction at a time in a process, to bound its memory.
        self._compacting = anyio.Lock()
        self._collecting = anyio.Lock()
        self._numbers = count(1)
        self._last_times: dict[ShardId, Time] = {}
        """Last time of each shard's updates, as of the last `reclaim`."""

    async def maintain(self, shard: ShardId) -> None:
        """Compact while it is due, write leases that need it, and delete retired blobs. Raises
        `UnknownObject`, `StorageError` and `CorruptData`."""
        for _ in range(_ROUNDS_MAX):
            async with self._compacting:
                if not await self._compact_once(shard):
                    break
        if self._book.due(await self._machine.state(shard)):
            await self.heartbeat(shard)  # first, because it drops leases of dead processes
        await self._collect(shard)

    async def reclaim(self, shard: ShardId) -> None:
        """Free space that is no longer needed: leases of dead processes, blobs that no reader can
        use and, unless something was appended since the last call, retracted rows. Raises the same
        errors as `maintain`."""
        # From the store, because the lifetime of another process's lease counts from when we first
        # see it.
        state = await self.state_now(shard)
        then = self._book.renew(state)
        # Leases of closed readers are dropped with the next write, which may never happen.
        if (
            self._book.due(state)
            or then.since > state.since
            or state.leases.keys() - then.leases.keys()
        ):
            await self.heartbeat(shard)
        async with self._compacting:
            state = await self._machine.state(shard)
            parts = [part for batch in state.batches for part in batch.parts]
            last = max((part.time_max for part in parts), default=TIME_MIN)
            # A large merge would delay those of growing shards, and be due again soon.
            is_quiet = self._last_times.get(shard) == last
            self._last_times[shard] = last
            if is_quiet and worth_reclaiming(state):
                await self._compact(state, state.batches, to_blob=False)
        await self._collect(shard)

    async def _compact_once(self, shard: ShardId) -> bool:
        """Merge batches if due, under the caller's lock. Return whether it was done."""
        limits = self._settings
        state = await self._machine.state(shard)
        inline_bytes_max = limits.inline_bytes_per_shard_max // 2
        chosen = choose_batches(state, limits.batches_per_shard_max, inline_bytes_max)
        return chosen is not None and await self._compact(state, *chosen)

    async def state_now(self, shard: ShardId) -> ShardState:
        """Return the current state in the store. Raises `UnknownObject` and `StorageError`."""
        state = await self._machine.refresh(shard)
        if state is None:
            raise UnknownObject(f"no shard {shard}")
        return state

    async def relieve(self, shards: Iterable[ShardId]) -> None:
        """Compact the shards whose documents are too large, and collect some of their blobs:
        backpressure for writers that append faster than compaction can merge. Failures are left to
        the next append."""
        for shard in shards:
            if not self._is_large(shard):
                continue
            try:
                async with self._compacting:
                    if self._is_large(shard):  # another append may have done so meanwhile
                        await self._compact_once(shard)
                # The document names merged blobs until they are collected. If it is too large, or
                # no collection is running, the append collects some of them. Otherwise the document
                # could grow without limit with a slow store.
                too_large = self._machine.document_bytes(shard) > self._settings.state_bytes_max
                if too_large or not self._collecting.locked():
                    await self._collect(shard, 4 * self._settings.batches_per_shard_max)
            except (StorageError, UnknownObject) as error:
                log.warning("could not compact shard %s, which is large: %s", shard, error)

    def _is_large(self, shard: ShardId) -> bool:
        """Return whether the document is nearly too large, and a compaction would shrink it."""
        limits = self._settings
        size = self._machine.document_bytes(shard)
        if not STATE_RELIEF.crossed(size > limits.state_bytes_max * _RELIEF_SHARE):
            return False
        state = self._machine.cached(shard)
        return state is not None and len(state.batches) > 2 * limits.batches_per_shard_max

    async def heartbeat(self, shard: ShardId) -> None:
        """Write the leases of this process's readers."""

        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            # An unchanged state; the machine adds the renewed leases to every write.
            return ChangeOutcome(None, {shard: documents.shard(shard)})

        await self._machine.change([shard], change)

    async def renew_leases(self) -> None:
        """Write the leases of all shards that need it."""
        for shard in self._book.to_renew():
            try:
                if self._book.due(await self._machine.state(shard)):
                    await self.heartbeat(shard)
            except UnknownObject:
                self._book.forget(shard)  # the shard was dropped together with its leases
            except (
                StorageError
            ) as error:  # retried at the next call; a lease lasts for several calls
                log.warning("could not renew leases on shard %s yet: %s", shard, error)

    async def close_readers(self, *, written: bool) -> None:
        """Close all readers. Their leases are dropped with the next writes or, with `written`, at
        once."""
        for shard in self._book.to_renew():
            await self._book.close_readers(shard)
            if written:
                with suppress(StorageError, UnknownObject):  # they expire
                    await self.heartbeat(shard)

    # -- compaction -------------------------------------------------------------------------------

    async def compact(
        self, shard: ShardId, progress: Progress = ignore_progress
    ) -> tuple[int, int] | None:
        """Merge all batches into one, with times raised as far as the since allows. Return the
        number of parts before and after.

        Return None and do nothing if a merge would gain nothing. Raises `UnknownObject`,
        `StoreFull`, `CorruptData` and `StorageError`.
        """
        before = await self._compact_all(shard, progress)
        if before is None:
            return None
        await self._collect(shard)
        after = await self._machine.state(shard)
        return before, sum(len(batch.parts) for batch in after.batches)

    async def _compact_all(self, shard: ShardId, progress: Progress) -> int | None:
        """Merge all batches and return the previous number of parts; None if nothing would be
        gained."""
        async with self._compacting:
            for _ in range(_ROUNDS_MAX):
                state = await self.state_now(shard)
                if not worth_merging(state):
                    return None
                if await self._compact(state, state.batches, True, progress):
                    return sum(len(batch.parts) for batch in state.batches)
        raise StorageError(
            f"could not compact shard {shard}: another process compacted it during each of "
            f"{_ROUNDS_MAX} attempts",
            determinate=True,
        )

    async def _compact(
        self,
        state: ShardState,
        inputs: tuple[ShardBatch, ...],
        to_blob: bool,
        progress: Progress = ignore_progress,
    ) -> bool:
        """Merge the batches. Return False if another process was faster."""
        keys = [part.key for batch in inputs for part in batch.parts if part.key]
        # The inputs count as used, so that no collection of this process deletes them meanwhile.
        self._book.take(keys)
        try:
            parts = await self._merge(state, inputs, to_blob, progress)
        except LeaseLost:
            # Another process compacted and deleted an input: continue from its state.
            await self._machine.refresh(state.id)
            return False
        finally:
            self._book.give_back(keys)
        listed = await self._list(state, parts)
        made: tuple[BatchPart | PartList, ...] = parts if listed is None else (*parts, listed)
        uncertain = False

        def change(documents: ShardDocuments) -> ChangeOutcome[bool]:
            nonlocal uncertain
            uncertain = documents.uncertain
            outcome = _replace(documents, state.id, inputs, parts, listed)
            if outcome.writes:
                # Right before a state names them: if other processes collect orphans, old parts may
                # already be deleted.
                self._parts.check_young(made, uncertain=uncertain)
            return outcome

        try:
            done = await self._machine.change([state.id], change)
        except BaseException as error:
            if isinstance(error, StorageError) and error.determinate:
                await self._drop(made)
            else:
                self._parts.leave(made, self._settings.stash_orphan_ms)
            raise
        if done:
            self._parts.named(made)
        elif (
            uncertain
        ):  # an attempt with unknown outcome may have named them, so readers may use them
            self._parts.leave(made, self._settings.stash_orphan_ms)
        else:
            await self._drop(made)
        return done

    async def _drop(self, made: Sequence[BatchPart | PartList]) -> None:
        await self._parts.discard(made)

    async def _list(self, state: ShardState, parts: tuple[BatchPart, ...]) -> PartList | None:
        try:
            return await self._parts.write_list(state.id, parts)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._drop(parts)
            raise

    async def _merge(
        self,
        state: ShardState,
        inputs: Sequence[ShardBatch],
        to_blob: bool,
        progress: Progress,
    ) -> tuple[BatchPart, ...]:
        limits = self._settings
        scratch = None if self._scratch is None else self._scratch / f"{next(self._numbers)}"
        merger = UpdateMerger(
            state.schema,
            to=compact_to(state, inputs[-1].upper),
            rows=input_rows(inputs),
            errors=any(part.has_errors for batch in inputs for part in batch.parts),
            bytes_max=max(1, limits.part_bytes_target // _DECODED_SHARE),
            scratch=scratch,
            parts=[part for batch in inputs for part in batch.parts],
            part_bytes=limits.part_bytes_target,
        )
        written: list[BatchPart] = []
        done, total = 0, input_rows(inputs)
        try:
            for batch in inputs:
                for part in batch.parts:
                    updates = await self._parts.fetch(part, state.schema)
                    await self._clock.run_blocking(partial(merger.add, updates))
                    done += part.rows
                    progress(done, total)
            while True:
                table = await self._clock.run_blocking(merger.take)
                if table is None:
                    return tuple(written)
                inline = 0 if to_blob or written else limits.inline_part_bytes_max
                written += await self._parts.write(state, table, inline)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._drop(written)
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._clock.run_blocking(merger.close)

    # -- collection -------------------------------------------------------------------------------

    async def collect(self, shard: ShardId) -> None:
        """Delete retired blobs that no reader can use. A guest does nothing. Raises `UnknownObject`
        and `StorageError`."""
        await self.state_now(shard)
        await self._collect(shard)

    async def _collect(self, shard: ShardId, at_most: int | None = None) -> None:
        """Delete retired blobs that no reader can use, at most `at_most` of them."""
        if self._guest:  # a guest does not know the owner's readers (`guest_leases.py`)
            return
        tried: set[str] = set()
        most = math.inf if at_most is None else at_most
        while len(tried) < most:
            turn = int(min(_COLLECTED_AT_ONCE, most - len(tried)))
            async with self._collecting:  # in turns, so that an append waits for at most one
                state = await self._machine.state(shard)
                keys = deletable(state, self._book.without_hold(state))
                used = self._book.used(keys) | tried
                some = [key for key in keys if key not in used][:turn]
                if not some:
                    return
                tried.update(some)
                if gone := frozenset(await self._parts.delete(some)):
                    # After the delete: a crash in between only repeats the delete.
                    await self._forget(shard, gone)

    async def _forget(self, shard: ShardId, gone: frozenset[str]) -> None:
        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            now = documents.shard(shard)
            then = collected(now, gone)
            return ChangeOutcome(None) if then is now else ChangeOutcome(None, {shard: then})

        await self._machine.change([shard], change)

    async def dropped(self, states: Sequence[ShardState]) -> None:
        """Delete the blobs of dropped shards, except those that readers use."""
        for state in states:
            self._book.forget(state.id)
            self._last_times.pop(state.id, None)
            self._parts.forget(state.id)
            keys = state.blob_keys()
            await self._parts.delete(sorted(keys - self._book.used(keys)))


def _replace(
    documents: ShardDocuments,
    shard: ShardId,
    inputs: Sequence[ShardBatch],
    parts: tuple[BatchPart, ...],
    listed: PartList | None,
) -> ChangeOutcome[bool]:
    state = documents.shards[shard]
    if state is None:
        return ChangeOutcome(False)
    lower, upper = inputs[0].lower, inputs[-1].upper
    if parts and any(
        (b.lower, b.parts) == (lower, parts) and b.upper >= upper for b in state.batches
    ):
        return ChangeOutcome(True)  # an earlier attempt succeeded, but its answer was lost
    merged = compacted(state, inputs, parts, listed)
    return ChangeOutcome(False) if merged is None else ChangeOutcome(True, {shard: merged})
