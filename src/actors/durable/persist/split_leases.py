"""Leases that are shared by several processes: taken by the planner of a read, used by its tasks.

Spark plans a read in one process and runs its tasks in others, which may run again after a failure,
or never; no process lives throughout. So the lease exists only in the shard's document, as a
guest's lease, under a name that all processes know. The name encodes which tasks are done. The last
task drops the lease. If tasks never run, it expires. A task that finds the lease expired takes it
again if every blob that it needs is still named; otherwise the read fails (`LeaseLost`), and never
appears to have no rows.

A *consumer* reads changes over days, using a durable hold of its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeVar

import anyio
import msgspec
from msgspec.structs import replace

from actors.durable.persist import guest_leases
from actors.durable.persist.documents import decode_shard, decode_tables, encode
from actors.durable.persist.location import BlobStore, CompareAndSet, ConsensusStore
from actors.durable.persist.part_lists import (
    LOOKS_MAX,
    PartLists,
    Parts,
    list_lost_error,
    with_parts,
)
from actors.durable.persist.shard import (
    TABLES_UPPER,
    ReaderLease,
    ShardState,
    sealed,
    shard_key,
    with_hold,
    without_hold,
)
from actors.durable.persist.shard_invariants import validate
from actors.runtime.errors import (
    LeaseLost,
    ReadBelowSince,
    ResourceBusy,
    StorageError,
    UnknownObject,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import EMPTY, TIME_MIN, Frontier, ShardId, Time
from actors.runtime.settings import Settings

R = TypeVar("R")
CONSUMER: Final = "consumer/"
"""Prefix of the names of consumers' holds."""
LOADS_MAX: Final = 64
"""Maximum number per shard, so that a client that loads every second does not fill the document."""
_LOAD: Final = guest_leases.guest_lease("", "load")
_STREAM: Final = guest_leases.guest_lease("", "stream")
"""Prefixes of such leases' names; their own names follow."""
_ATTEMPTS_MAX: Final = 64


def consumer_hold(consumer: str) -> str:
    """Return the name of a consumer's hold."""
    return f"{CONSUMER}{consumer}"


class SplitLease(msgspec.Struct, frozen=True):
    """A lease for `tasks` tasks. Its `name` is unique."""

    shard: ShardId
    name: str
    since: Time
    seqno: int
    tasks: int


class SplitLeases:
    """The split leases in the documents of one store. Most changes of leases need not read part
    lists."""

    def __init__(
        self, consensus: ConsensusStore, blob: BlobStore, settings: Settings, clock: ActorClock
    ) -> None:
        self._consensus = consensus
        self._lists = PartLists(blob, clock)
        self._settings = settings
        self._clock = clock

    async def look(self, shard: ShardId, beyond: Frontier = EMPTY) -> tuple[ShardState, Frontier]:
        """Read a shard's current state, with the parts of batches beyond a frontier, and the sealed
        upper. Raises `UnknownObject` and `StorageError`."""
        head = await self._consensus.head(TABLES_UPPER)
        tables = TIME_MIN if head is None else decode_tables(head.data).upper
        # Read after the tables' upper: whatever that seals is in this state.
        state = await self._state(shard, beyond)
        return state, sealed(state, tables)

    async def _state(self, shard: ShardId, beyond: Frontier = EMPTY) -> ShardState:
        key = shard_key(shard)
        known: dict[str, Parts] = {}
        gone = None
        for _ in range(LOOKS_MAX):
            head = await self._consensus.head(key)
            if head is None:
                raise UnknownObject(f"no shard {shard}")
            state = replace(decode_shard(key, head.data), seqno=head.seqno)
            missed = await self._lists.read_all(state, known, beyond)
            if missed is None:
                return with_parts(state, known)
            # A missing list usually means that the document has changed. If the same document lacks
            # it twice, it is lost.
            if gone == (missed, state.seqno):
                raise list_lost_error(shard, missed)
            gone = missed, state.seqno
        raise StorageError(
            f"could not read shard {shard}: other processes kept changing it ({LOOKS_MAX} times)",
            determinate=True,
        )

    async def _change(
        self,
        shard: ShardId,
        change: Callable[[ShardState], tuple[ShardState, R]],
        beyond: Frontier = EMPTY,
    ) -> R:
        """Apply an idempotent change to a state as `look` reads it. Raises what the change raises,
        and `StorageError`."""
        failure: StorageError | None = None
        for _ in range(_ATTEMPTS_MAX):
            try:
                state = await self._state(shard, beyond)
                then, answer = change(state)
                # Without a change there is no write; the answer is based on the state that was just
                # read.
                if then is state:
                    return answer
                then = replace(then, seqno=state.seqno + 1)
                validate(then)
                if await self._consensus.compare_and_set(
                    [CompareAndSet(shard_key(shard), state.seqno, encode(then))]
                ):
                    return answer
            except StorageError as error:
                # A determinate failure says nothing about an earlier attempt with unknown outcome.
                if error.determinate and failure is not None:
                    raise type(error)(
                        f"{error}; an earlier attempt may have succeeded", determinate=False
                    ) from error
                if error.determinate:
                    raise
                failure = error
        raise failure or StorageError(
            f"gave up changing the leases of shard {shard} after {_ATTEMPTS_MAX} attempts: other "
            "processes keep changing it",
            determinate=True,
        )

    def _with(self, state: ShardState, name: str, lease: ReaderLease) -> ShardState:
        # Only leases that expired long ago, because clocks of processes differ.
        old = self._clock.now_ms() - guest_leases.CLOCKS_APART_MS_MAX
        leases = {
            other: held
            for other, held in state.leases.items()
            if not guest_leases.is_guest(other) or held.expires_ms > old
        }
        count = sum(map(guest_leases.is_guest, leases))
        if name not in leases and count >= guest_leases.GUEST_LEASES_MAX:
            raise ResourceBusy(
                f"too many external readers of shard {state.id}: {count} leases (limit "
                f"{guest_leases.GUEST_LEASES_MAX}); try again when some have ended or expired"
            )
        return replace(state, leases={**leases, name: lease})

    def _until(self) -> int:
        return self._clock.now_ms() + self._settings.reader_lease_ms

    async def hold_load(self, shard: ShardId, name: str, since: Time) -> None:
        """Take a lease that pins a time but no blobs, for a future read. It is never renewed.

        If a shard has more than `LOADS_MAX`, the oldest are dropped. Raises `ReadBelowSince` and
        `ResourceBusy`.
        """

        def change(state: ShardState) -> tuple[ShardState, None]:
            _check_since(state, since)
            loads = [
                held for held in state.leases if held.startswith(_LOAD)
            ]  # in the order in which they were taken
            old = set(loads[: max(0, len(loads) + 1 - LOADS_MAX)])
            leases = {other: held for other, held in state.leases.items() if other not in old}
            lease = ReaderLease(since, guest_leases.NO_BLOB, self._until())
            return self._with(replace(state, leases=leases), f"{_LOAD}{name}", lease), None

        await self._change(shard, change)

    async def hold_stream(self, shard: ShardId, name: str, since: Time) -> None:
        """Take or renew a lease like that of `hold_load` for a running stream, which drops it at
        its end. Raises the same errors."""

        def change(state: ShardState) -> tuple[ShardState, None]:
            _check_since(state, since)
            lease = ReaderLease(since, guest_leases.NO_BLOB, self._until())
            return self._with(state, f"{_STREAM}{name}", lease), None

        await self._change(shard, change)

    async def drop_stream(self, shard: ShardId, name: str) -> None:
        """Drop a stream's lease. Does nothing if there is none."""
        gone = f"{_STREAM}{name}"

        def change(state: ShardState) -> tuple[ShardState, None]:
            if gone not in state.leases:
                return state, None
            leases = {other: lease for other, lease in state.leases.items() if other != gone}
            return replace(state, leases=leases), None

        await self._change(shard, change)

    async def take(self, shard: ShardId, name: str, since: Time) -> tuple[ShardState, SplitLease]:
        """Take a lease on all parts of the returned state, at first for one task. Raises
        `ReadBelowSince` and `ResourceBusy`."""

        def change(state: ShardState) -> tuple[ShardState, tuple[ShardState, SplitLease]]:
            _check_since(state, since)
            # The seqno that was read, not the one to be written, because the parts come from the
            # state as read.
            handed = SplitLease(shard, name, since, state.seqno, 1)
            lease = ReaderLease(since, state.seqno, self._until())
            return self._with(state, _lease_of(name, 0), lease), (state, handed)

        state, handed = await self._change(shard, change)
        try:
            return await self._under_lease(state), handed
        except BaseException:
            # Otherwise the lease would pin its blobs until it expires.
            with anyio.CancelScope(shield=True):
                await self.drop(handed)
            raise

    async def _under_lease(self, state: ShardState) -> ShardState:
        """Return the state with all its parts. The lease keeps their lists from being deleted."""
        known: dict[str, Parts] = {}
        missed = await self._lists.read_all(state, known)
        if missed is not None:
            raise list_lost_error(state.id, missed)
        return with_parts(state, known)

    async def shared(self, handed: SplitLease, tasks: int) -> SplitLease:
        """Return the lease for `tasks` tasks. Without tasks, it is dropped."""
        if not tasks:
            await self.drop(handed)
        return replace(handed, tasks=max(1, tasks))

    async def keep(self, handed: SplitLease, keys: Collection[str]) -> None:
        """Renew the lease once half of its duration has passed, or take it again if it has expired.
        Raises `LeaseLost` if one of the blobs is no longer named."""

        def change(state: ShardState) -> tuple[ShardState, bool]:
            found = _found(state, handed)
            lease = ReaderLease(max(handed.since, state.since), handed.seqno, self._until())
            if found is None:
                if not state.is_whole:  # try again with all part lists
                    return state, False
                gone = set(keys) - state.live_keys()  # a retired blob may be deleted at any time
                if gone:
                    raise LeaseLost(
                        f"the lease of this read of shard {state.id} expired, and {len(gone)} "
                        "parts were compacted away since: load() it again; a read that takes "
                        f"longer than {self._settings.reader_lease_ms} ms (reader_lease_ms) "
                        "between two parts loses its lease",
                        determinate=True,
                    )
                return self._with(state, _lease_of(handed.name, 0), lease), True
            name, held = found
            left, whole = held.expires_ms - self._clock.now_ms(), self._settings.reader_lease_ms
            if whole // 2 < left <= whole:  # more than the whole duration: a clock went back
                return state, True
            return self._with(state, name, lease), True

        if not await self._change(handed.shard, change):
            await self._change(handed.shard, change, TIME_MIN)

    async def done(self, handed: SplitLease, task: int) -> None:
        """Mark a task as done; idempotent. The last one drops the lease."""

        def change(state: ShardState) -> tuple[ShardState, None]:
            found = _found(state, handed)
            if found is None:
                return state, None
            name, lease = found
            # One bit per task, so a task that runs or reports twice counts once.
            done = _done(name) | 1 << task
            leases = {other: held for other, held in state.leases.items() if other != name}
            if done != (1 << handed.tasks) - 1:
                leases[_lease_of(handed.name, done)] = lease
            return replace(state, leases=leases), None

        await self._change(handed.shard, change)

    async def drop(self, handed: SplitLease) -> None:
        """Drop the lease."""
        await self.done(replace(handed, tasks=1), 0)

    async def hold(self, shard: ShardId, consumer: str, since: Time) -> None:
        """Take or move a consumer's durable hold. Raises `ReadBelowSince` for a new hold below the
        since."""
        holder = consumer_hold(consumer)
        await self._change(shard, lambda state: (with_hold(state, holder, since), None))

    async def release(self, shard: ShardId, consumer: str) -> bool:
        """Drop a consumer's hold. Return whether there was one."""
        holder = consumer_hold(consumer)

        def change(state: ShardState) -> tuple[ShardState, bool]:
            return without_hold(state, holder), holder in state.holds

        return await self._change(shard, change)


def _check_since(state: ShardState, since: Time) -> None:
    if since < state.since:
        raise ReadBelowSince(
            f"shard {state.id}: {since} is below its since {state.since}; older changes have been "
            "merged into later times"
        )


def _lease_of(name: str, done: int) -> str:
    """Return the lease's name in the document. Its second part is the set of completed tasks, as
    hex."""
    return guest_leases.guest_lease(name, f"tasks-{done:x}")


def _done(lease: str) -> int:
    return int(lease.partition("tasks-")[2].partition("@")[0], 16)


def _found(state: ShardState, handed: SplitLease) -> tuple[str, ReaderLease] | None:
    for name, lease in state.leases.items():
        if guest_leases.is_guest(name) and name.endswith(f"@{handed.name}") and "tasks-" in name:
            return name, lease
    return None
