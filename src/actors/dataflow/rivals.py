"""Several replicas of one instance in one process: what their dataflows must know of each other.

All of them maintain the same views over the same shards. Names that reach beyond a replica (jobs
of the engine, prepared plans) begin with the replica's. The first contents of a view are made by
one at a time (`turn`): it is the largest job of a view, its notes are kept under the name of the
output (`chunks`), and whoever waits finds the view there. Steps are raced for, so that
nobody waits for long for a replica that has died (`machine`); who loses reads what the winner has
appended (`Follower`): the hidden state that it would have computed, and the errors.

What is read is exact. An append covers an interval, and its updates lie in it; the interval that
is followed ends where an append ended. No since passes the follower's lease, so times are as they
were written. The winner's hidden state is taken bit by bit, so that whoever goes on from it
retracts just what was inserted, in whatever order the winner may have computed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pyarrow as pa

from actors.dataflow.commit import ErrorChange, shards_of
from actors.dataflow.contents import error_sums, errors_held, split_errors
from actors.persist import PersistClient, Reader
from actors.plan.schema import Schema
from actors.plan.updates import between, concat
from actors.progress import Frontier, ShardId, Time
from actors.protocol.compute import ViewExport


class Turns:
    """Who makes the first contents of which shard; shared by the replicas of a process."""

    def __init__(self) -> None:
        self._locks: dict[ShardId, tuple[anyio.Lock, int]] = {}

    @asynccontextmanager
    async def turn(self, shard: ShardId) -> AsyncIterator[None]:
        """Waits until nobody else is at it. One that is canceled gives its turn up."""
        lock, users = self._locks.get(shard, (anyio.Lock(), 0))
        self._locks[shard] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[shard]
            if users > 1:
                self._locks[shard] = (lock, users - 1)
            else:
                del self._locks[shard]


class Rivals:
    """One replica's view of the others: its own `name` among theirs, and whose turn it is."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.name = name
        self.turns = turns


class Appended(msgspec.Struct, frozen=True):
    """What another replica has appended in an interval."""

    hidden: tuple[pa.Table, ...]
    errors: tuple[ErrorChange, ...]
    """Changes of the output's errors; their sum counts."""

    def error_after(self, before: tuple[str, ...]) -> str | None:
        """What the output holds at the end."""
        sums = dict.fromkeys(before, 1)
        for change in self.errors:
            sums[change.text] = sums.get(change.text, 0) + change.diff
        return next(iter(errors_held(sums)), None)


class Follower:
    """Reads the output and the hidden states of a view from its `lo` on, under leases there."""

    def __init__(self, persist: PersistClient, export: ViewExport, readers: list[Reader]) -> None:
        self._persist = persist
        self._readers = readers
        plan = export.plan
        self._schemas = (plan.output, *(state.schema for state in plan.hidden))

    @classmethod
    async def open(cls, persist: PersistClient, export: ViewExport, reader_id: str) -> Follower:
        """Takes the leases. Raises the stores' errors."""
        readers: list[Reader] = []
        try:
            for shard in shards_of(export):
                reader = await persist.open_reader(shard, reader_id)
                readers.append(reader)
        except BaseException:
            for reader in readers:
                reader.give_up()
            raise
        return cls(persist, export, readers)

    async def read(self, lo: Time, hi: Frontier) -> Appended:
        """What was appended from `lo` to `hi`, an upper of the shards. Raises `ReadBelowSince`
        and the stores' errors."""
        output, *hidden = zip(self._readers, self._schemas, strict=True)
        found = await self._updates(*output, lo, hi, errors_only=True)
        sums = error_sums([errors for each in found if (errors := split_errors(each)[1])])
        errors = tuple(ErrorChange(text, hi - 1, diff) for text, diff in sums.items() if diff)
        states = []
        for reader, schema in hidden:
            shape = schema.arrow_updates()
            rows = await self._updates(reader, schema, lo, hi)
            plain = (split_errors(each)[0].select(shape.names).cast(shape) for each in rows)
            states.append(concat(plain, shape))
        return Appended(tuple(states), errors)

    async def _updates(
        self, reader: Reader, schema: Schema, lo: Time, hi: Frontier, *, errors_only: bool = False
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
        """The view is at `lo`: nothing before is read any more."""
        for reader in self._readers:
            await reader.downgrade(lo - 1)

    def close(self) -> None:
        """Gives the leases back."""
        for reader in self._readers:
            reader.give_up()
