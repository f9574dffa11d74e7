"""Keeps cached documents up to date while other processes change them.

Correctness does not depend on this, because compare-and-set detects every stale document. It wakes
readers that wait for a shard to which another process appends. The store either notifies of changes
(`WatchedConsensus`), or all known documents are polled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial

import anyio

from actors.durable.persist.fence import EPOCH_KEY, FencedConsensus
from actors.durable.persist.location import ConsensusStore, WatchedConsensus
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.reader import RENEWALS
from actors.durable.persist.replica_fence import ReplicaFence
from actors.durable.persist.shard import TABLES_UPPER, shard_key
from actors.durable.persist.standby import send_heartbeats
from actors.runtime.errors import StorageError, WriterFenced
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.persist")


async def follow(
    machine: ShardMachine,
    consensus: ConsensusStore,
    settings: Settings,
    renew: Callable[[], Awaitable[None]],
) -> None:
    """Follow changes until cancelled, or until the store's notifications end.

    `renew` is called several times per lease duration. Raises `WriterFenced` when another service
    owns the stores.
    """
    fence = consensus if isinstance(consensus, FencedConsensus) else None
    inner = consensus.inner if isinstance(consensus, FencedConsensus | ReplicaFence) else consensus
    async with anyio.create_task_group() as group:
        group.start_soon(_renewing, renew, settings)
        if fence is not None:
            group.start_soon(_until_fenced, fence, group.cancel_scope)
            group.start_soon(send_heartbeats, fence, settings)
        await _changes(machine, inner, fence, settings)
        group.cancel_scope.cancel()
    if fence is not None:
        fence.check()


async def _renewing(renew: Callable[[], Awaitable[None]], settings: Settings) -> None:
    while True:
        await anyio.sleep(settings.reader_lease_ms / RENEWALS / 2 / 1000)
        await renew()


async def _until_fenced(fence: FencedConsensus, scope: anyio.CancelScope) -> None:
    # A set of this process may detect the takeover first.
    await fence.fenced.wait()
    scope.cancel()


async def _changes(
    machine: ShardMachine,
    consensus: ConsensusStore,
    fence: FencedConsensus | None,
    settings: Settings,
) -> None:
    if not isinstance(consensus, WatchedConsensus):
        while True:
            await anyio.sleep(settings.store_poll_ms / 1000)
            await _look(machine, fence, {None: None})
    due: dict[str | None, None] = {}
    heard = anyio.Event()

    async def look() -> None:
        nonlocal heard
        failures = 0
        while True:
            # Keys that failed stay due; they are retried after a pause or with the next
            # notification.
            pause_ms = settings.retry_delay_ms(failures) if failures else math.inf
            with anyio.move_on_after(pause_ms / 1000):
                await heard.wait()
            heard = anyio.Event()
            now = dict(due)
            due.clear()
            failed = await _look(machine, fence, now)
            due.update(failed)
            failures = failures + 1 if failed else 0

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        async with aclosing(consensus.changes()) as changes:
            async for key in changes:
                # A dict, so that many changes of one key during a read count once.
                due[key] = None
                heard.set()
        group.cancel_scope.cancel()


async def _look(
    machine: ShardMachine, fence: FencedConsensus | None, due: dict[str | None, None]
) -> dict[str | None, None]:
    """Read the due keys again (None: all known documents), and return those that failed."""
    whole, failed = None in due, list[str]()

    async def read(key: str, what: Callable[[], Awaitable[object]]) -> None:
        try:
            await what()
        except WriterFenced:
            return  # `follow` raises it
        except StorageError as error:
            log.warning("cannot see changes of %s by other processes yet: %s", key, error)
            # One damaged document must not keep the others stale.
            failed.append(key)

    if fence is not None and (whole or EPOCH_KEY in due):
        await read(EPOCH_KEY, fence.look)
    if whole or TABLES_UPPER in due:
        # First, so that the shards that it seals are read at this upper or later.
        await read(TABLES_UPPER, machine.refresh_tables)
    for shard in machine.known_shards():
        if whole or shard_key(shard) in due:
            await read(shard_key(shard), partial(machine.refresh, shard))
    return dict.fromkeys(failed)
