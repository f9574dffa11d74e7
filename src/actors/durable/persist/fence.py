"""Fencing: one service at a time on stores that several could use; the newest one wins.

**Rule.** The document `EPOCH_KEY` names the service that owns the stores. A starting service raises
its epoch by compare-and-set, and remembers the resulting seqno as its fencing token. Each set of
documents by that service compares this seqno too, *in the same set*. So after a successor's epoch
is durable no set of the older service succeeds: there is no clock, no lease that must run out, no
instant in which both write. The successor reads after its epoch, hence sees all acknowledged sets.

The older service gets `WriterFenced`, which names the successor: at its next set, through a
notification, or by polling (`follow_changes`). Then it halts. Until then it may answer reads of
times that it had sealed, which stay true.

A replica in a process of its own owns nothing, and is fenced by what its owner remembers
(`replica_fence`).

Not fenced: blobs (written under unique names; a fenced process deletes only blobs that no state
names any more), and guests that write beside a service.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final, Literal

import anyio
import msgspec

from actors.durable.persist.location import CompareAndSet, ConsensusStore, VersionedData
from actors.runtime.errors import CorruptData, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock, RetryLoop
from actors.runtime.settings import Settings

EPOCH_KEY: Final = "epoch"
VERSION: Final = 1
_ATTEMPTS_MAX: Final = 16


class FenceEpoch(msgspec.Struct, frozen=True):
    """Identity of the service that owns the stores."""

    version: int
    epoch: int
    process: str
    """Process name in the shards' documents."""
    host: str
    pid: int
    started_ms: int
    """Wall clock of that service; for display only."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, process {self.pid} on {self.host}"


class FencedConsensus:
    """A `ConsensusStore` whose sets fail once another service owns the stores."""

    def __init__(self, inner: ConsensusStore, own: FenceEpoch, seqno: int, former: str) -> None:
        """Take the seqno of our epoch document, and the name of the `former` process."""
        self.inner = inner
        self.own = own
        self.former = former
        self.took_over = False
        """True if the former owner was there until it was found dead."""
        self.fenced = anyio.Event()
        self._seqno = seqno
        self._by = ""

    @property
    def seqno(self) -> int:
        """Return the seqno of the epoch's document, which is this service's alone."""
        return self._seqno

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None. Raises `StorageError`."""
        return await self.inner.head(key)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return keys that start with `prefix`. Raises `StorageError`."""
        return await self.inner.list_keys(prefix)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none. Raises `WriterFenced`, and as the store does."""
        # Saves a request: after a takeover no set can succeed.
        self.check()
        # Only compared (`kept`): the store fences atomically with the caller's changes.
        fence = CompareAndSet(EPOCH_KEY, self._seqno, None, kept=True)
        if await self.inner.compare_and_set([*ops, fence]):
            return True
        # A mismatch may be of the epoch or of the caller's keys: only the former raises.
        await self.look()
        return False

    async def look(self) -> None:
        """Read the epoch; raise `WriterFenced` once another service owns the stores. Raises
        `StorageError`."""
        self.check()
        head = await self.inner.head(EPOCH_KEY)
        if head is None or head.seqno != self._seqno:
            self._by = "nobody" if head is None else str(_decoded(head.data))
            self.fenced.set()
            self.check()

    def check(self) -> None:
        """Raise `WriterFenced` once the takeover is known."""
        if self.fenced.is_set():
            raise WriterFenced(
                f"another service took over the stores ({self._by}); this one ({self.own}) has"
                " stopped writing: nothing was done. Stop one of them, or give it stores of its"
                " own (consensus_url)",
                determinate=True,
            )

    async def close(self) -> None:
        """Release the store. The epoch document stays."""
        await self.inner.close()


async def read_epoch(store: ConsensusStore) -> tuple[FenceEpoch, int] | None:
    """Return the service that owns the stores, and the seqno of its document; None if no service
    ever did. Raises `StorageError`, `CorruptData`."""
    head = await store.head(EPOCH_KEY)
    return None if head is None else (_decoded(head.data), head.seqno)


async def acquire_epoch(
    inner: ConsensusStore,
    process: str,
    clock: ActorClock,
    settings: Settings,
    *,
    over: int | Literal["anyone"] | None = "anyone",
) -> FencedConsensus:
    """Make this process the owner of the stores.

    `over`: the seqno of the epoch's document to take over from (None: there is none), so that of
    several that saw an owner die one takes over, and the others see a living one again. Raises
    `StorageError` (determinate if the owner is another one), `CorruptData`.
    """
    former, retry = "", RetryLoop(settings, failures_max=_ATTEMPTS_MAX)
    while True:
        try:
            found = await read_epoch(inner)
            held, seqno = (None, None) if found is None else found
            if held is not None and seqno is not None and held.process == process:
                # An earlier attempt succeeded, and its answer was lost.
                return FencedConsensus(inner, held, seqno, former)
            if over not in ("anyone", seqno):
                raise StorageError(f"another service has done so: {held}", determinate=True)
            former = "" if held is None else held.process
            own = FenceEpoch(
                VERSION,
                1 if held is None else held.epoch + 1,
                process,
                socket.gethostname(),
                os.getpid(),
                clock.now_ms(),
            )
            cas = CompareAndSet(EPOCH_KEY, seqno, _ENCODER.encode(own))
            if await inner.compare_and_set([cas]):
                return FencedConsensus(inner, own, cas.seqno, former)
        except StorageError as error:
            # Retry here is safe: the next round reads the epoch, and finds its own process there if
            # the failed set has landed.
            if error.determinate or retry.failures >= _ATTEMPTS_MAX:
                raise
        if not await retry.pause():
            raise StorageError(
                "could not take over the stores: other services did so"
                f" {retry.failures} times meanwhile;"
                " start one at a time",
                determinate=True,
            )


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(FenceEpoch)


def _decoded(data: bytes) -> FenceEpoch:
    try:
        found = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"document {EPOCH_KEY} cannot be decoded: {error}", determinate=True
        ) from None
    # A newer version may fence by other rules.
    if found.version > VERSION:
        raise StorageError(
            f"the stores are of format {found.version} ({found}), this version reads up to"
            f" {VERSION}: use the newer version of the program",
            determinate=True,
        )
    return found
