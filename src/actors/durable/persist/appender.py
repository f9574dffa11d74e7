"""Durable appends: writes part lists, changes all documents in one set, and settles the parts.

The rules of an append are pure (`change.py`, `shard.appended`). This module decides what happens to
the blobs: appended, refused, or left to orphan collection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio
from msgspec.structs import replace

from actors.durable.persist.change import (
    ChangeOutcome,
    SeqnoMismatch,
    ShardDocuments,
    append_all,
    check_append,
    trace_appends,
    trace_refusal,
)
from actors.durable.persist.location import CompareAndSet
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.part_store import PartStore
from actors.durable.persist.shard import (
    AppendCommitted,
    BatchPart,
    PartList,
    ShardAppend,
    UpperMismatch,
)
from actors.durable.persist.upkeep import ShardUpkeep
from actors.runtime.errors import PenstockError, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock
from actors.runtime.metric_table import APPEND_SECONDS
from actors.runtime.progress import Frontier
from actors.runtime.settings import Settings
from actors.runtime.spans import measure, span
from actors.runtime.telemetry import APPEND
from actors.runtime.tracing.append_traces import AppendTraceIndex


class ShardAppender:
    """Performs the appends of one process, for `PersistClient.append`."""

    def __init__(
        self,
        machine: ShardMachine,
        parts: PartStore,
        upkeep: ShardUpkeep,
        settings: Settings,
        clock: ActorClock,
        trail: AppendTraceIndex,
        calls: Iterator[int],
    ) -> None:
        self._machine = machine
        self._parts = parts
        self._upkeep = upkeep
        self._settings = settings
        self._clock = clock
        self._trail = trail
        self._calls = calls

    async def append(
        self,
        appends: Sequence[ShardAppend],
        tables_upper: tuple[Frontier, Frontier] | None,
        extra: Sequence[CompareAndSet],
    ) -> AppendCommitted | UpperMismatch:
        """Append to all shards in one set, as `PersistClient.append` specifies."""
        check_append(appends, tables_upper)
        # Backpressure: an append to a shard whose document is too large waits for a compaction.
        await self._upkeep.relieve([append.shard for append in appends])
        parts = [part for append in appends for part in append.parts]
        # From here until the outcome is known, nobody may discard these parts.
        begun = self._parts.begin(parts)
        lists: list[PartList] = []
        started = self._clock.monotonic_ms()
        with span(APPEND) as opened:
            if opened is not None:
                trace_appends(opened, self._trail, appends)
            try:
                appends = [await self._listed(append, lists) for append in appends]
            except BaseException as error:
                await self._refused(begun, lists)
                if isinstance(error, StorageError):
                    # Determinate: no document names a list yet, whether or not it was written.
                    raise type(error)(str(error), determinate=True) from error
                raise
            outcome = await self._change(appends, tables_upper, extra, begun, lists)
            if opened is not None and not isinstance(outcome, AppendCommitted):
                trace_refusal(opened, self._trail, appends, outcome)
        if isinstance(outcome, AppendCommitted):
            self._parts.named((*parts, *lists))
        else:
            await self._refused(begun, lists)
        measure(APPEND_SECONDS, (self._clock.monotonic_ms() - started) / 1000)
        return outcome

    async def _listed(self, append: ShardAppend, lists: list[PartList]) -> ShardAppend:
        listed = await self._parts.write_list(append.shard, append.parts)
        if listed is None:
            return append
        lists.append(listed)
        return replace(append, listed=listed)

    async def _change(
        self,
        appends: Sequence[ShardAppend],
        tables_upper: tuple[Frontier, Frontier] | None,
        extra: Sequence[CompareAndSet],
        begun: Sequence[BatchPart],
        lists: Sequence[PartList],
    ) -> AppendCommitted | UpperMismatch:
        call = next(self._calls)
        shards = [append.shard for append in appends]
        shards += [shard for append in appends for shard, _, _ in append.holds]
        parts = [part for append in appends for part in append.parts]
        uncertain = False

        def change(documents: ShardDocuments) -> ChangeOutcome[AppendCommitted | UpperMismatch]:
            nonlocal uncertain
            uncertain = documents.uncertain
            outcome = append_all(documents, appends, tables_upper, self._parts.writer, call)
            if outcome.writes:
                # Checked within the change, right before a state names the parts, in every attempt.
                self._parts.check_kept(parts)
                self._parts.check_young(parts, uncertain=uncertain)
            return outcome

        try:
            return await self._machine.change(
                shards, change, tables=tables_upper is not None, extra=extra
            )
        except SeqnoMismatch:
            await self._refused(begun, lists)
            keys = ", ".join(op.key for op in extra)
            raise WriterFenced(
                f"nothing was appended: another process changed one of {keys}; read again",
                determinate=True,
            ) from None
        except BaseException as error:
            # An earlier attempt may have appended before the shard was dropped.
            if isinstance(error, PenstockError) and error.determinate and not uncertain:
                await self._refused(begun, lists)
            else:
                # Indeterminate: a state may name the parts. Only orphan collection, which reads the
                # state first, may delete them.
                self._parts.leave((*begun, *lists), self._settings.stash_orphan_ms)
            raise

    async def _refused(self, begun: Sequence[BatchPart], lists: Sequence[PartList]) -> None:
        """Return the parts to their caller and delete the lists, because nothing was appended."""
        self._parts.end(begun, self._settings.stash_orphan_ms)
        if lists:
            # No caller knows about the lists, so a cancelled one must not leave them behind.
            with anyio.CancelScope(shield=True):
                await self._parts.discard(lists)
