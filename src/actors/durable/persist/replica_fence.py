"""Fencing of a replica in a process of its own: its sets are made on behalf of its current owner.

A replica never takes over the stores. When the service that owns them connects (`follow_owner`),
the replica adopts that service's fencing token: the seqno of the epoch document. Each of its sets
then compares the token in the same set, as the owner's own sets do. So

- No set of a replica happens between a takeover and the successor's connection to that replica.
  What the successor reads when it starts does not change.
- A former owner cannot command a replica: whoever is not named in the epoch document is refused. An
  owner is named by the random name of its process, which is unique among all copies of the stores.
- A set that was decided under a former owner may be made under the next one. It is no different
  from a set after a connection was lost and restored: documents are compared by their own seqnos,
  and shards refuse what only the former owner's plan allowed (`ownership`).

While no owner commands the replica, its sets wait, each for up to `store_request_timeout_ms`, and
then fail as if the store were unavailable, so their callers retry. So running dataflows outlive an
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
    """A `ConsensusStore` whose sets succeed only under the owner that was last followed."""

    def __init__(self, inner: ConsensusStore, wait_ms: int) -> None:
        """Make a fenced store. A set waits up to `wait_ms` for an owner."""
        self.inner = inner
        self._wait_ms = wait_ms
        self._owner: FenceEpoch | None = None
        """The owner followed last; None before the first."""
        self._seqno: int | None = None
        """Fencing token of that owner; None before the first."""
        self._current = False
        """False once the token is known to belong to a former owner."""
        self._closed = False
        """True once the process is ending, so that no set waits any more."""
        self._changed = anyio.Event()
        """Set, and replaced, when one of the fields above changes."""
        self._turns = anyio.Lock()
        """Serializes `follow_owner`."""

    @property
    def owner(self) -> FenceEpoch | None:
        """Return the owner that commands this replica; None if there is none, as far as is
        known."""
        return self._owner if self._current else None

    async def follow_owner(self, process: str) -> None:
        """Adopt the token of the owner whose process has this name.

        Raises `WriterFenced` if it does not own the stores, `InvalidUsage` for an empty name,
        `StorageError` and `CorruptData`.
        """
        if not process:
            raise InvalidUsage(
                "this replica only serves the controller that owns its stores, but Hello names no "
                "owner: connect from penstock serve --role controller"
            )
        # One at a time: the later of two owners is read later, so the token never goes back.
        async with self._turns:
            found = await read_epoch(self.inner)
            if found is None or found[0].process != process:
                raise WriterFenced(
                    f"process {process} does not own the stores of this replica "
                    f"({found[0] if found else 'nobody does'}): another service took over, or it "
                    "uses other stores (blob_url, consensus_url)",
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
        """Return the document; None if it does not exist. Raises `StorageError`."""
        return await self.inner.head(key)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`. Raises `StorageError`."""
        return await self.inner.list_keys(prefix)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none, under the current owner. Raises `StorageError` if there is no
        owner in time, and what the store raises."""
        while True:
            token = await self._token()
            fence = CompareAndSet(EPOCH_KEY, token, None, kept=True)
            if await self.inner.compare_and_set([*ops, fence]):
                return True
            # The mismatch may be of the epoch or of the caller's keys. Nothing has happened, so the
            # same set may be tried under the next owner.
            head = await self.inner.head(EPOCH_KEY)
            if head is not None and head.seqno == token:
                return False
            if self._seqno == token:
                self._current = False

    async def _token(self) -> int:
        """Return the current owner's token, waiting for an owner. Raises `StorageError`."""
        with anyio.move_on_after(self._wait_ms / 1000):
            while not self._current and not self._closed:
                await self._changed.wait()
        if self._current:
            assert self._seqno is not None
            return self._seqno
        former = "" if self._owner is None else f" since {self._owner} was taken over"
        raise StorageError(
            f"nothing was written: no controller commands this replica{former}; it continues when "
            "one connects",
            determinate=True,
        )

    def leave(self) -> None:
        """Stop waiting for an owner, because the process is ending."""
        self._closed = True
        self._wake()

    async def close(self) -> None:
        """Close the store."""
        self.leave()
        await self.inner.close()
