"""Coordinates a dataflow with the same dataflow on other replicas of its instance.

All replicas maintain the same views over the same shards. Names whose scope is wider than a replica
(jobs of a shared engine, prepared plans) start with the replica's name. Replicas race for steps
(`machine`). The loser reads the winner's append (`ReplicaFollower`): the hidden state that it would
have computed itself, and the errors. The controller lets one replica at a time hydrate a view
(`HydrationTurns`).

A followed interval ends at the end of an append, and the follower's lease protects the times of its
updates from compaction, so the reads are exact.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from actors.durable.persist import LeasedReader, PersistClient
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import between, concat
from actors.model.protocol.compute import ViewExport
from actors.replica.dataflow.commit import ErrorChange, shards_of
from actors.replica.dataflow.contents import error_sums, errors_held, split_errors
from actors.runtime.progress import Frontier, Time


class ReplicaAppend(msgspec.Struct, frozen=True):
    """Updates that another replica appended in an interval."""

    hidden: tuple[pa.Table, ...]
    errors: tuple[ErrorChange, ...]
    """Changes of the output's errors. Only their sum is meaningful."""

    def error_after(self, before: tuple[str, ...]) -> str | None:
        """Return the error that the output holds afterwards, if any."""
        sums = dict.fromkeys(before, 1)
        for change in self.errors:
            sums[change.text] = sums.get(change.text, 0) + change.diff
        return next(iter(errors_held(sums)), None)


class ReplicaFollower:
    """Reads the output and the hidden states of a view from its `lo` on, under leases."""

    def __init__(
        self, persist: PersistClient, export: ViewExport, readers: list[LeasedReader]
    ) -> None:
        self._persist = persist
        self._readers = readers
        plan = export.plan
        self._schemas = (plan.output, *(state.schema for state in plan.hidden))

    @classmethod
    async def open(
        cls, persist: PersistClient, export: ViewExport, reader_id: str
    ) -> ReplicaFollower:
        """Acquire the leases. Raise the stores' errors."""
        readers: list[LeasedReader] = []
        try:
            for shard in shards_of(export):
                reader = await persist.open_reader(shard, reader_id)
                readers.append(reader)
        except BaseException:
            for reader in readers:
                reader.give_up()
            raise
        return cls(persist, export, readers)

    async def read(self, lo: Time, hi: Frontier) -> ReplicaAppend:
        """Return what was appended from `lo` to `hi`, which must be an upper of the shards.

        Raise `ReadBelowSince` and the stores' errors.
        """
        output, *hidden = zip(self._readers, self._schemas, strict=True)
        found = await self._updates(*output, lo, hi, errors_only=True)
        sums = error_sums([errors for each in found if (errors := split_errors(each)[1])])
        errors = tuple(ErrorChange(text, hi - 1, diff) for text, diff in sums.items() if diff)
        # Read the winner's hidden state bit by bit instead of recomputing it: later retractions
        # must match it exactly, whatever the order of its sums.
        states = []
        for reader, schema in hidden:
            shape = schema.arrow_updates()
            rows = await self._updates(reader, schema, lo, hi)
            plain = (split_errors(each)[0].select(shape.names).cast(shape) for each in rows)
            states.append(concat(plain, shape))
        return ReplicaAppend(tuple(states), errors)

    async def _updates(
        self,
        reader: LeasedReader,
        schema: TableSchema,
        lo: Time,
        hi: Frontier,
        *,
        errors_only: bool = False,
    ) -> list[pa.Table]:
        batches, _ = await reader.next(lo)
        parts = [part for batch in batches for part in batch.parts]
        try:
            return [
                between(await self._persist.fetch(part, schema), lo, hi)
                for part in parts
                if part.time_min < hi and (part.has_errors or not errors_only)
            ]
        finally:
            reader.release([part.key for part in parts])

    async def moved(self, lo: Frontier) -> None:
        """Advance the leases, because the view is at `lo` and nothing before that is read again."""
        for reader in self._readers:
            await reader.downgrade(lo - 1)

    def close(self) -> None:
        """Release the leases."""
        for reader in self._readers:
            reader.give_up()
