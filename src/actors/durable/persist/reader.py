"""Leased readers of a shard, and this process's registry of them.

If this process is the only writer, a lease costs no write of its own: whenever a state is about to
be written, the book adds the renewed leases of all open readers. If other processes may write to
the same shards, a lease is also written when its reader opens, and `RENEWALS` times per lease
duration. Its name then ends in ``@`` and the process's name, so that readers of two processes never
share a lease.

*Expiry of other processes' leases* uses no wall clock. A renewed lease differs from before; one
that stays the same for its whole duration, measured on our own monotonic clock since we first saw
it, belongs to a dead process. So a new process waits a whole lease duration for dead ones, and all
processes need the same `reader_lease_ms`. A successor immediately drops the leases of the
service that it fenced. An `exclusive` process immediately drops the leases of earlier exclusive
processes. Leases of guests, whose names contain an ``@``, are preserved as long as they are
renewed.

Blobs in use by readers of this process are counted by key. They are never deleted, whatever the
state says.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from msgspec.structs import replace

from actors.durable.persist.guest_leases import PREFIX, renewed_by_guest
from actors.durable.persist.part_filter import PartFilter, PartVerdict
from actors.durable.persist.shard import BatchPart, ReaderLease, ShardBatch, ShardState, renewed
from actors.runtime.errors import (
    CorruptData,
    LeaseLost,
    ReadBelowSince,
    ResourceClosed,
    StorageError,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import Frontier, ShardId, Time

log = logging.getLogger("penstock.persist")

_NEVER: Final = -1
RENEWALS: Final = 4
"""Number of renewals per lease duration, by a process that only reads."""


class LeaseBook:
    """The open readers of this process, and the blobs that they use."""

    def __init__(
        self,
        clock: ActorClock,
        lease_ms: int,
        process: str,
        *,
        exclusive: bool,
        dead: str = "",
        guest: bool = False,
    ) -> None:
        """Make a book. `dead` is the name of a fenced process ("" if none); for `guest`, see
        `guest_leases.py`."""
        self._clock = clock
        self._dead_suffix = f"@{dead}" if dead else "\0"
        self._lease_ms = lease_ms
        self._guest = guest
        self._suffix = "" if exclusive else f"@{process}"
        self._exclusive = exclusive
        self._others: dict[ShardId, dict[str, tuple[ReaderLease, float]]] = {}
        """Leases of other processes, and the monotonic time since which each has not changed."""
        self._renewed_ms: dict[ShardId, float] = {}
        """Monotonic time when our readers' leases were last written, by shard."""
        self._readers: dict[ShardId, dict[str, LeasedReader]] = {}
        """Open readers, by shard and lease name."""
        self._gone: dict[ShardId, set[str]] = {}
        """Closed readers whose leases may still be in the state, by shard."""
        self._used: Counter[str] = Counter()
        """Number of users of each blob."""

    def add(self, reader: LeasedReader) -> str:
        """Register a reader. Return the name of its lease, which is unique among open readers."""
        readers = self._readers.setdefault(reader.shard, {})
        first = f"{PREFIX}{reader.reader_id}" if self._guest else reader.reader_id
        name, number = f"{first}{self._suffix}", 1
        while name in readers:
            number += 1
            name = f"{first}#{number}{self._suffix}"
        readers[name] = reader
        self._gone.get(reader.shard, set()).discard(name)
        return name

    def remove(self, reader: LeasedReader) -> None:
        """Unregister a reader. Its lease is dropped with the next write of the shard."""
        readers = self._readers.get(reader.shard, {})
        if readers.pop(reader.lease_id, None) is None:
            return
        if not readers:
            del self._readers[reader.shard]
        self._gone.setdefault(reader.shard, set()).add(reader.lease_id)

    async def close_readers(self, shard: ShardId) -> None:
        """Close all readers of a shard."""
        for reader in list(self._readers.get(shard, {}).values()):
            await reader.close()

    def forget(self, shard: ShardId) -> None:
        """Forget a dropped shard. Its readers keep their parts, and there is no lease left to
        drop."""
        self._gone.pop(shard, None)
        self._others.pop(shard, None)
        self._renewed_ms.pop(shard, None)

    def without_hold(self, state: ShardState) -> frozenset[str]:
        """Return the leases in the state that pin no blobs: those of our readers, whose blobs are
        counted by `used`, and those of earlier exclusive owners."""
        # An expired lease pins its blobs until a write has dropped it, because it may have been
        # renewed since it was read.
        own = self.own(state.id)
        return frozenset(
            name for name in state.leases if name in own or (self._exclusive and "@" not in name)
        )

    def own(self, shard: ShardId) -> frozenset[str]:
        """Return the names of the open readers' leases."""
        return frozenset(self._readers.get(shard, ()))

    def to_renew(self) -> list[ShardId]:
        """Return the shards with open readers, or with leases still to be dropped."""
        return list(dict.fromkeys([*self._readers, *self._gone]))

    def holding(self, shard: ShardId, key: str) -> list[LeasedReader]:
        """Return the open readers that hold a part."""
        return [each for each in self._readers.get(shard, {}).values() if each.holds(key)]

    def used(self, keys: Iterable[str]) -> set[str]:
        """Return those of the blobs that a reader of this process uses."""
        return {key for key in keys if key in self._used}

    def take(self, keys: Iterable[str]) -> None:
        """Add a user of each blob."""
        self._used.update(keys)

    def give_back(self, keys: Iterable[str]) -> None:
        """Remove a user of each blob."""
        for key in keys:
            self._used[key] -= 1
            if self._used[key] <= 0:
                del self._used[key]

    def renew(self, state: ShardState) -> ShardState:
        """Return the state with our leases renewed, and without those of closed readers and dead
        processes."""
        now = self._clock.now_ms()
        self._see(state)
        open_ = self._readers.get(state.id, {})
        own = {
            name: ReaderLease(reader.since, reader.seqno_held(state.seqno), now + self._lease_ms)
            for name, reader in open_.items()
            if not reader.lost
        }
        if self._guest:
            return renewed_by_guest(state, own, self._gone.get(state.id, ()), now)
        gone = self._dead(state) | self._gone.get(state.id, set())
        # No expiry by wall clock: `_dead` has found the expired leases.
        return renewed(state, own, gone, _NEVER)

    def _see(self, state: ShardState) -> None:
        """Record since when the leases of other processes have not changed."""
        if not state.leases:
            self._others.pop(state.id, None)
            return
        own, before = self._readers.get(state.id, {}), self._others.pop(state.id, {})
        now = self._clock.monotonic_ms()
        others: dict[str, tuple[ReaderLease, float]] = {}
        for name, lease in state.leases.items():
            if name not in own:
                held = before.get(name)
                others[name] = held if held is not None and held[0] == lease else (lease, now)
        if others:
            self._others[state.id] = others

    def _dead(self, state: ShardState) -> frozenset[str]:
        """Return the leases of dead processes."""
        if not state.leases:
            return frozenset()
        own, seen = self._readers.get(state.id, {}), self._others.get(state.id, {})
        limit = self._clock.monotonic_ms() - self._lease_ms
        return frozenset(
            name
            for name, lease in state.leases.items()
            if name not in own
            and (
                (self._exclusive and "@" not in name)
                or name.endswith(self._dead_suffix)
                or ((held := seen.get(name)) is not None and held[0] == lease and held[1] <= limit)
            )
        )

    def written(self, state: ShardState) -> None:
        """Record that the state is durable, with our leases and without dropped ones."""
        waiting = self._gone.get(state.id)
        if waiting is not None:
            waiting.intersection_update(state.leases)
            if not waiting:
                del self._gone[state.id]
        self._see(state)
        readers = self._readers.get(state.id, {})
        for name, reader in readers.items():
            reader.registered = reader.registered or name in state.leases
        if readers:
            self._renewed_ms[state.id] = self._clock.monotonic_ms()
        else:
            self._renewed_ms.pop(state.id, None)

    def reread(self, state: ShardState) -> None:
        """Mark readers as lost if another process has dropped their durable leases."""
        self._see(state)
        for name, reader in self._readers.get(state.id, {}).items():
            if reader.registered and not reader.lost and name not in state.leases:
                reader.lost = True
                log.warning("%s", reader.lease_lost())

    def due(self, state: ShardState) -> bool:
        """Return whether the leases need a write of their own."""
        # A dead process's lease would pin the since of an idle shard forever.
        if self._dead(state):
            return True
        # No other process can drop the leases of an exclusive one.
        if self._exclusive:
            return False
        if self._gone.get(state.id):
            return True
        alive = [r for r in self._readers.get(state.id, {}).values() if not r.lost]
        limit = self._clock.monotonic_ms() - self._lease_ms / RENEWALS
        late = self._renewed_ms.get(state.id, limit) <= limit
        return any(late or not reader.registered for reader in alive)


class LeasedReader:
    """Reads one shard under a lease: the since stays at or below the reader's, and no part that the
    reader received is deleted before `release` or `close`."""

    def __init__(
        self,
        shard: ShardId,
        reader_id: str,
        since: Time,
        wait_upper: Callable[[ShardId, Frontier, Callable[[], None]], Awaitable[Frontier]],
        book: LeaseBook,
        observe: Callable[[ShardId], Awaitable[tuple[ShardState, Frontier]]],
    ) -> None:
        self.shard = shard
        self.reader_id = reader_id
        self.since = since
        """Earliest time that it still needs; only advances."""
        self.lost = False
        """True once another process has dropped its lease."""
        self.registered = False
        """True once its lease was durable."""
        self._wait_upper = wait_upper
        self._book = book
        self._observe = observe
        self._keys: dict[str, int] = {}
        """Parts that it received and has not released, each with the seqno of the first state that
        named it."""
        self._closed = False
        self.lease_id = book.add(self)

    def seqno_held(self, current: int) -> int:
        """Return the seqno of the oldest state whose parts may be in use."""
        return min(current, min(self._keys.values(), default=current))

    async def snapshot(
        self, as_of: Time, wanted: PartFilter | None = None
    ) -> tuple[tuple[BatchPart, ...], Frontier]:
        """Wait until `as_of` is sealed. Return parts that together contain the contents at that
        time, and the upper of the last batch among them.

        The parts may contain later times: keep rows with time <= as_of. With `wanted`, parts that
        certainly contain no wanted row are left out; the others may contain any rows. Raises
        `ReadBelowSince`, `LeaseLost`, `UnknownObject`, `ResourceClosed` and `StorageError`.
        """
        state, upper = await self._seen(as_of, as_of)
        batches = [batch for batch in state.batches if batch.lower <= as_of]
        if len(batches) < len(state.batches):
            upper = batches[-1].upper if batches else state.batches[0].lower
        parts = [part for batch in batches for part in batch.parts if part.time_min <= as_of]
        if wanted is not None:
            parts = [part for part in parts if wanted.verdict(part) is PartVerdict.KEEP]
        # In the same turn of the event loop in which the state was read, so nothing can retire and
        # delete a part in between.
        self._take(state, parts)
        return tuple(parts), upper

    async def next(self, frontier: Frontier) -> tuple[tuple[ShardBatch, ...], Frontier]:
        """Return the batches from `frontier` on, once there are any, and the new upper.

        A batch may repeat earlier times: keep rows with time >= frontier. Parts with only earlier
        times are left out. Raises the same errors as `snapshot`.
        """
        state, upper = await self._seen(frontier, frontier)
        batches = []
        for batch in state.batches:
            if batch.upper > frontier:
                parts = tuple(part for part in batch.parts if part.time_max >= frontier)
                batches.append(replace(batch, parts=parts))
        self._take(state, [part for batch in batches for part in batch.parts])
        return tuple(batches), upper

    async def _seen(self, beyond: Frontier, time: Time) -> tuple[ShardState, Frontier]:
        """Wait until the upper is beyond a frontier. Return the state, without an await after it
        was read."""
        while True:
            self.check()
            state, upper = await self._observe(self.shard)
            self.check()
            # Checked in every round, because another process may let the since pass while this one
            # waits.
            if time < state.since:
                raise ReadBelowSince(f"shard {self.shard}: {time} is below its since {state.since}")
            if upper > beyond:
                return state, upper
            await self._wait_upper(self.shard, beyond, self.check)

    def check(self) -> None:
        """Raise `ResourceClosed`, or `LeaseLost` if another process dropped its lease; then its
        parts may be deleted, and the since may have passed it."""
        if self._closed:
            raise ResourceClosed(f"reader {self.reader_id} of shard {self.shard} is closed")
        if self.lost:
            raise self.lease_lost()

    def lease_lost(self) -> LeaseLost:
        """Return the error for a lost lease."""
        return LeaseLost(
            f"the lease of reader {self.reader_id} on shard {self.shard} expired; open the reader "
            "again, and renew leases more often than they expire",
            determinate=True,
        )

    def holds(self, key: str) -> bool:
        """Return whether the reader received a part and has not released it."""
        return key in self._keys

    def _take(self, state: ShardState, parts: Iterable[BatchPart]) -> None:
        keys = {part.key for part in parts if part.key} - self._keys.keys()
        self._keys |= dict.fromkeys(keys, state.seqno)
        self._book.take(keys)

    def release(self, keys: Iterable[str]) -> None:
        """Release parts. Unknown keys, and the keys of inline parts, are ignored."""
        free = self._keys.keys() & set(keys)
        for key in free:
            del self._keys[key]
        self._book.give_back(free)

    async def downgrade(self, since: Time) -> None:
        """Advance the reader's since. Durable with the shard's next write."""
        self.since = max(self.since, since)

    async def close(self) -> None:
        """Release all parts and the lease. May be called twice."""
        self.give_up()

    def give_up(self) -> None:
        """Close the reader without awaiting."""
        if not self._closed:
            self._closed = True
            self._book.remove(self)
            self.release(set(self._keys))


def why_missing(
    shard: ShardId, key: str, state: ShardState | None, holding: Iterable[LeasedReader]
) -> StorageError:
    """Return the error for a missing blob: `CorruptData` if the store lost it, or `LeaseLost` if it
    was deleted and no lease covered it.

    `state` must just have been read; None if the shard does not exist. `holding` are the open
    readers of this process that hold the part.
    """
    readers = list(holding)
    leased = [reader.reader_id for reader in readers if not reader.lost]
    if state is None:
        return LeaseLost(f"part {key} was deleted: shard {shard} was dropped", determinate=True)
    if key in state.live_keys():  # a retired blob may have been deleted
        names = f"shard {shard} names it"
    elif leased:
        names = f"reader {', '.join(leased)} of this process holds it"
    else:
        lost = ", ".join(reader.reader_id for reader in readers)
        whose = f"the lease of reader {lost} has expired" if lost else "no reader holds it"
        return LeaseLost(
            f"part {key} was compacted away and deleted: {whose}; read the shard again",
            determinate=True,
        )
    return CorruptData(
        f"blob {key} is missing although {names}; restore it from a backup", determinate=True
    )
