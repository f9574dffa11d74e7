"""Mutants: each leaves out one rule of the service; see `mutants`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

from actors.channel_adapter import ChannelAdapter, NonceVerdict, StashRules
from actors.durable.persist.location import CompareAndSet, ConsensusStore
from actors.durable.persist.machine import ShardMachine
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.plan.updates import empty_updates
from actors.model.protocol.internal import PartFetched, TaggedResponse
from actors.replica.cluster.connection import AcceptConnection, ConnectionAcceptor
from actors.replica.compute.pending_peeks import PeekHolds
from actors.replica.dataflow.replica_follower import ReplicaAppend, ReplicaFollower
from actors.runtime.errors import ConnectionDisplaced, PenstockError
from actors.runtime.kernel import ActorAddress
from tests.simulators.mutants import Mutants
from tests.simulators.service import planted_storage

PLANTED: Final = Mutants()


@PLANTED.replaces(ChannelAdapter, "_from_worker")
async def no_nonce_check(self: ChannelAdapter, tagged: TaggedResponse) -> None:
    """Let the adapter forward every response to the present connection."""
    current = self._rules.current
    if current is not None and self._rules.connected:
        self._forward(TaggedResponse(current, tagged.response, tagged.serial))
    else:
        await self._acknowledge(tagged.nonce, (tagged.serial,))


@PLANTED.replaces(FetchTask, "_failed")
def past_a_failed_fetch(self: FetchTask, job: Any, error: PenstockError) -> None:
    """Count a fetch that failed for good as an empty one."""
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


@PLANTED.wraps(ShardMachine, "_set")
async def acknowledged_before_durable(right: Any, self: ShardMachine, *args: Any) -> Any:
    """Show and acknowledge a change of documents while it is still being written."""
    real, lock = self._consensus, self.__dict__.setdefault("planted", asyncio.Lock())
    self._consensus = _Hasty(real, lock)
    try:
        return await right(self, *args)
    finally:
        self._consensus = real


@PLANTED.wraps(ListenTask, "_describe")
def lease_released_early(right: Any, self: ListenTask, item: Any, index: int) -> Any:
    """Let the listen task release a part as soon as it has described it."""
    described = right(self, item, index)
    self._release([self._leases.pop(described.key)])
    return described


@PLANTED.wraps(StashRules, "judge")
def stash_forgotten(right: Any, self: StashRules, tagged: TaggedResponse) -> Any:
    """Let the adapter drop responses for a connection that it does not serve yet."""
    verdict = right(self, tagged)
    if verdict is NonceVerdict.STASH:
        self.clear()
        return NonceVerdict.DROP
    return verdict


@PLANTED.wraps(ConnectionAcceptor, "_accept")
async def displaced_unproved(
    right: Any, self: ConnectionAcceptor, message: AcceptConnection
) -> None:
    """Let a newcomer displace the active client before its two first commands are checked."""
    if self._current is not None:
        nonce = message.hello.nonce
        await self._release(ConnectionDisplaced(f"a newer connection ({nonce}) took over"))
    await right(self, message)


@PLANTED.wraps(ConnectionAcceptor, "_accept")
async def nonce_used_again(right: Any, self: ConnectionAcceptor, message: AcceptConnection) -> None:
    """Let the acceptor forget the used nonces."""
    self._nonces.clear()
    await right(self, message)


@PLANTED.planted
def peeks_not_forgotten() -> Iterator[None]:
    """Let a worker go on with the peeks of a client that is gone."""
    with mock.patch.object(PeekHolds, "forget", return_value=[]):
        yield


@PLANTED.wraps(ReplicaFollower, "read")
async def winner_not_read(right: Any, self: ReplicaFollower, lo: int, hi: int) -> Any:
    """Let a replica that lost a race go on as if the winner had appended no hidden state."""
    found = await right(self, lo, hi)
    return ReplicaAppend(tuple(each.slice(0, 0) for each in found.hidden), found.errors)


PLANTED.update(planted_storage.BUGS)
