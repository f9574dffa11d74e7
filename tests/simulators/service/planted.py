"""Mutants: each leaves out one rule of the service, by patching, while its context manager lasts.

They prove the simulation: each must be found in few seeds; the tests' `FOUND` names one of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from actors.channel_adapter import ChannelAdapter, NonceVerdict, ResponsesForwarded, StashRules
from actors.cluster.connection import AcceptConnection, ConnectionAcceptor
from actors.compute.reads import PeekHolds
from actors.dataflow.rivals import ReplicaAppend, ReplicaFollower
from actors.errors import ConnectionDisplaced, PenstockError
from actors.fetch_task import FetchTask
from actors.kernel import ActorAddress
from actors.listen_task import ListenTask
from actors.persist.location import CompareAndSet, ConsensusStore
from actors.persist.machine import ShardMachine
from actors.plan.updates import empty_updates
from actors.protocol.compute import TaggedResponse
from actors.protocol.internal import PartFetched
from tests.simulators.service import planted_storage


@contextmanager
def no_nonce_check() -> Iterator[None]:
    """Let the adapter forward every response to the present connection."""

    async def from_worker(self: ChannelAdapter, tagged: TaggedResponse) -> None:
        current = self._rules.current
        if current is not None and self._rules.connected:
            self._forward(TaggedResponse(current, tagged.response, tagged.serial))
        else:
            await self._down(ResponsesForwarded(tagged.nonce, (tagged.serial,)))

    with mock.patch.object(ChannelAdapter, "_from_worker", from_worker):
        yield


@contextmanager
def past_a_failed_fetch() -> Iterator[None]:
    """Count a fetch that failed for good as an empty one."""

    def failed(self: FetchTask, job: Any, error: PenstockError) -> None:
        self._finish(job)
        consumer: ActorAddress[Any] = self._consumer
        consumer.reply(
            PartFetched(
                dataflow=self._dataflow,
                incarnation=self._incarnation,
                input_index=self._index,
                time=job.fetch.time,
                key=job.fetch.part.key,
                updates=empty_updates(self._schema),
            )
        )

    with mock.patch.object(FetchTask, "_failed", failed):
        yield


class _Hasty:
    """A consensus that reports success before the set has happened."""

    def __init__(self, inner: ConsensusStore, lock: asyncio.Lock) -> None:
        self._inner = inner
        self._lock = lock

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        async def later() -> None:
            async with self._lock:
                await self._inner.compare_and_set(ops)

        task = asyncio.get_running_loop().create_task(later())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def acknowledged_before_durable() -> Iterator[None]:
    """Show and acknowledge a change of documents while it is still being written."""
    right = ShardMachine._set

    async def set_(self: ShardMachine, *args: Any) -> bool:
        real, lock = self._consensus, self.__dict__.setdefault("planted", asyncio.Lock())
        self._consensus = _Hasty(real, lock)
        try:
            return await right(self, *args)
        finally:
            self._consensus = real

    with mock.patch.object(ShardMachine, "_set", set_):
        yield


@contextmanager
def lease_released_early() -> Iterator[None]:
    """Let the listen task release a part as soon as it has described it."""
    right = ListenTask._describe

    def describe(self: ListenTask, item: Any, index: int) -> Any:
        described = right(self, item, index)
        self._release([self._leases.pop(described.key)])
        return described

    with mock.patch.object(ListenTask, "_describe", describe):
        yield


@contextmanager
def stash_forgotten() -> Iterator[None]:
    """Let the adapter drop responses for a connection that it does not serve yet."""
    right = StashRules.judge

    def judge(self: StashRules, tagged: TaggedResponse) -> NonceVerdict:
        verdict = right(self, tagged)
        if verdict is NonceVerdict.STASH:
            self.clear()
            return NonceVerdict.DROP
        return verdict

    with mock.patch.object(StashRules, "judge", judge):
        yield


@contextmanager
def displaced_unproved() -> Iterator[None]:
    """Let a newcomer displace the active client before its two first commands are checked."""
    right = ConnectionAcceptor._accept

    async def accept(self: ConnectionAcceptor, message: AcceptConnection) -> None:
        if self._current is not None:
            nonce = message.hello.nonce
            await self._release(ConnectionDisplaced(f"a newer connection ({nonce}) took over"))
        await right(self, message)

    with mock.patch.object(ConnectionAcceptor, "_accept", accept):
        yield


@contextmanager
def nonce_used_again() -> Iterator[None]:
    """Let the acceptor forget the used nonces."""
    right = ConnectionAcceptor._accept

    async def accept(self: ConnectionAcceptor, message: AcceptConnection) -> None:
        self._nonces.clear()
        await right(self, message)

    with mock.patch.object(ConnectionAcceptor, "_accept", accept):
        yield


@contextmanager
def peeks_not_forgotten() -> Iterator[None]:
    """Let a worker go on with the peeks of a client that is gone."""
    with mock.patch.object(PeekHolds, "forget", return_value=[]):
        yield


@contextmanager
def winner_not_read() -> Iterator[None]:
    """Let a replica that lost a race go on as if the winner had appended no hidden state."""
    right = ReplicaFollower.read

    async def read(self: ReplicaFollower, lo: int, hi: int) -> ReplicaAppend:
        found = await right(self, lo, hi)
        return ReplicaAppend(tuple(each.slice(0, 0) for each in found.hidden), found.errors)

    with mock.patch.object(ReplicaFollower, "read", read):
        yield


PLANTED: Final[dict[str, Callable[[], Any]]] = {
    "no_nonce_check": no_nonce_check,
    "past_a_failed_fetch": past_a_failed_fetch,
    "acknowledged_before_durable": acknowledged_before_durable,
    "lease_released_early": lease_released_early,
    "stash_forgotten": stash_forgotten,
    "displaced_unproved": displaced_unproved,
    "nonce_used_again": nonce_used_again,
    "peeks_not_forgotten": peeks_not_forgotten,
    "winner_not_read": winner_not_read,
    **planted_storage.BUGS,
}
