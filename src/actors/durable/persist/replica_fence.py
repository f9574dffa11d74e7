"""Fencing of a replica in a process of its own: its sets count for the owner that commands it.

A replica never takes the stores over. It takes the fencing token of the service that owns them when
that connects to it (`follow_owner`): the seqno of the epoch's document, which each of its sets then
compares in the same set, as the owner's own do. So

- no set of a replica happens between a takeover and the successor's connection to that replica:
  what the successor reads when it starts stands still;
- a former owner commands no replica: who is not named in the epoch's document is refused, and an
  owner is named by the random name of its process, which no copy of the stores has twice;
- a set that was decided under a former owner may be made under the next one. It is what the set of
  a replica is that a connection was lost to and regained: documents are compared by their own
  seqnos, and what the former owner's plan may not do any more the shards refuse (`ownership`).

While no owner commands the replica its sets wait, for `store_request_timeout_ms` each, and then
fail as those of a store that is away: their callers try again. So running dataflows outlive an
owner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from actors.durable.persist.fence import EPOCH_KEY, FenceEpoch, read_epoch
from actors.durable.persist.location import CompareAndSet, ConsensusStore, VersionedData
from actors.runtime.errors import InvalidUsage, StorageError, WriterFenced

log = logging.getLogger("penstock.persist")


class ReplicaFence:
    """A `ConsensusStore` whose sets succeed only under the owner that was followed last."""

    def __init__(self, inner: ConsensusStore, wait_ms: int) -> None:
        """Take the store, and how long a set waits for an owner."""
        self.inner = inner
        self._wait_ms = wait_ms
        self._owner: FenceEpoch | None = None
        self._seqno: int | None = None
        """Fencing token; None before the first owner."""
        self._current = False
        """False once the token is known to be of a former owner."""
        self._closed = False
        self._changed = anyio.Event()
        self._turns = anyio.Lock()

    @property
    def owner(self) -> FenceEpoch | None:
        """Return the owner that commands this replica; None while there is none, as far as is
        known."""
        return self._owner if self._current else None

    async def follow_owner(self, process: str) -> None:
        """Take the token of an owner, by the name of its process. Raises `WriterFenced` when it
        does not own the stores, `InvalidUsage` for no name, `StorageError`, `CorruptData`."""
        if not process:
            raise InvalidUsage(
                "this replica serves the controller that owns its stores alone, and Hello names "
                "no owner: connect from penstock serve --role controller"
            )
        # In turns: of two owners the later one is read later, so the token never goes back.
        async with self._turns:
            found = await read_epoch(self.inner)
            if found is None or found[0].process != process:
                raise WriterFenced(
                    f"process {process} does not own the stores of this replica"
                    f" ({found[0] if found else 'nobody does'}): it was taken over, or has other"
                    " stores (blob_url, consensus_url)",
                    determinate=True,
                )
            if self._seqno != found[1]:
                log.info("commanded by %s", found[0])
            self._owner, self._seqno = found
            self._current = True
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None. Raises `StorageError`."""
        return await self.inner.head(key)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return keys that start with `prefix`. Raises `StorageError`."""
        return await self.inner.list_keys(prefix)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none, under the present owner. Raises `StorageError` when there was
        none in time, and as the store does."""
        while True:
            token = await self._token()
            fence = CompareAndSet(EPOCH_KEY, token, None, kept=True)
            if await self.inner.compare_and_set([*ops, fence]):
                return True
            # A mismatch may be of the epoch or of the caller's keys; nothing has happened, so the
            # same set may be tried under the next owner.
            head = await self.inner.head(EPOCH_KEY)
            if head is not None and head.seqno == token:
                return False
            if self._seqno == token:
                self._current = False

    async def _token(self) -> int:
        """Return the present owner's token; wait for one. Raises `StorageError`."""
        with anyio.move_on_after(self._wait_ms / 1000):
            while not self._current and not self._closed:
                await self._changed.wait()
        if self._current:
            assert self._seqno is not None
            return self._seqno
        former = "" if self._owner is None else f" since {self._owner} was taken over"
        raise StorageError(
            f"nothing was written: no controller commands this replica{former}; it goes on when"
            " one connects",
            determinate=True,
        )

    def leave(self) -> None:
        """Let no set wait for an owner any more: the process ends."""
        self._closed = True
        self._wake()

    async def close(self) -> None:
        """Release the store."""
        self.leave()
        await self.inner.close()
