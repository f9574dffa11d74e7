"""Fencing: of several services that could use the same stores, only the newest may write.

**Rule.** The document `EPOCH_KEY` names the service that owns the stores. A starting service raises
the epoch by compare-and-set, and remembers the resulting seqno as its fencing token. Each set of
documents by that service compares this seqno, too, *in the same set*. So once a successor's epoch
is durable, no set of the older service succeeds. There is no clock, no lease that must expire, and
no instant at which both can write. The successor reads after its epoch, so it sees all acknowledged
sets.

The older service gets `WriterFenced`, which names the successor: at its next set, through a
notification, or by polling (`follow_changes`). Then it halts. Until then it may serve reads at
times that it had sealed, which stay correct.

A replica in a separate process owns nothing. It is fenced by the token of its owner
(`replica_fence`).

Not fenced: blobs (which have unique names; a fenced process only deletes blobs that no state
names), and guests that write alongside a service.
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
    """Identifies the service that owns the stores."""

    version: int
    epoch: int
    process: str
    """The process's name in the shards' documents."""
    host: str
    pid: int
    started_ms: int
    """Wall clock when that service started; for display only."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, process {self.pid} on {self.host}"


class FencedConsensus:
    """A `ConsensusStore` whose sets fail once another service owns the stores."""

    def __init__(self, inner: ConsensusStore, own: FenceEpoch, seqno: int, former: str) -> None:
        """Make a fenced store. `seqno` is that of our epoch document, and `former` the previous
        owner's process."""
        self.inner = inner
        self.own = own
        self.former = former
        self.took_over = False
        """True if the previous owner was running until it was found dead."""
        self.fenced = anyio.Event()
        """Set when the takeover becomes known."""
        self._seqno = seqno
        self._by = ""
        """The successor, for errors."""

    @property
    def seqno(self) -> int:
        """Return the fencing token: the seqno of this service's epoch document."""
        return self._seqno

    async def head(self, key: str) -> VersionedData | None:
        """Return the document; None if it does not exist. Raises `StorageError`."""
        return await self.inner.head(key)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`. Raises `StorageError`."""
        return await self.inner.list_keys(prefix)

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none. Raises `WriterFenced`, and what the store raises."""
        # Saves a request: after a takeover no set can succeed.
        self.check()
        # Only compared (`kept`), so the store fences atomically with the caller's changes.
        fence = CompareAndSet(EPOCH_KEY, self._seqno, None, kept=True)
        if await self.inner.compare_and_set([*ops, fence]):
            return True
        # The mismatch may be of the epoch or of the caller's keys; only the former raises.
        await self.look()
        return False

    async def look(self) -> None:
        """Read the epoch, and raise `WriterFenced` if another service owns the stores. Raises
        `StorageError`."""
        self.check()
        head = await self.inner.head(EPOCH_KEY)
        if head is None or head.seqno != self._seqno:
            self._by = "nobody" if head is None else str(_decoded(head.data))
            self.fenced.set()
            self.check()

    def check(self) -> None:
        """Raise `WriterFenced` if a takeover is known."""
        if self.fenced.is_set():
            raise WriterFenced(
                f"another service took over the stores ({self._by}), so this one ({self.own}) has "
                "stopped writing; nothing was written. Stop one of them, or give it stores of "
                "its own (consensus_url)",
                determinate=True,
            )

    async def close(self) -> None:
        """Close the store. The epoch document stays."""
        await self.inner.close()


async def read_epoch(store: ConsensusStore) -> tuple[FenceEpoch, int] | None:
    """Return the service that owns the stores, and the seqno of its document; None if no service
    ever owned them. Raises `StorageError` and `CorruptData`."""
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

    `over` is the seqno of the epoch document to take over from (None: there is none). If several
    processes saw an owner fail, only one takes over, and the others see a live owner again. Raises
    `StorageError` (determinate if another process became the owner) and `CorruptData`.
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
                raise StorageError(
                    f"another service has taken over the stores: {held}", determinate=True
                )
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
            # Retrying is safe: the next round reads the epoch, and finds this process there if the
            # failed set has landed.
            if error.determinate or retry.failures >= _ATTEMPTS_MAX:
                raise
        if not await retry.pause():
            raise StorageError(
                f"could not take over the stores: other services took them over {retry.failures} "
                "times; start one service at a time",
                determinate=True,
            )


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(FenceEpoch)


def _decoded(data: bytes) -> FenceEpoch:
    try:
        found = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptData(
            f"cannot decode document {EPOCH_KEY}: {error}", determinate=True
        ) from None
    # A newer version may fence by other rules.
    if found.version > VERSION:
        raise StorageError(
            f"the stores have format {found.version} ({found}), this version supports up to "
            f"{VERSION}: use a newer version of Penstock",
            determinate=True,
        )
    return found
