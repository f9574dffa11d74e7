"""One service at a time on stores that several could use: the newest one wins.

**Rule.** The document `EPOCH_KEY` names the service that owns the stores. Who starts raises its
epoch by compare-and-set, and remembers the seqno that this gave. Each set of documents by that
service compares this seqno too, *in the same set*. So after a successor's epoch is durable no set
of the older service succeeds: there is no clock, no lease that must run out, no instant in which
both write. What it had acknowledged before is there for the successor, which reads after its epoch.

The older one learns of it at its next set, or by the store's word, or by looking now and then
(`following`): as `Fenced`, which names the successor. Then it halts. Until then it may answer
reads: of times that it had sealed, which stay true.

What it does not fence: blobs (they are written under names of their own, and what a fenced process
deletes was named by no state any more), and clients that write beside a service without being one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from actors.errors import Corrupt, Fenced, StorageError
from actors.kernel import Clock
from actors.persist.location import Cas, Consensus, VersionedData
from actors.settings import Settings

EPOCH_KEY: Final = "epoch"
VERSION: Final = 1
_ATTEMPTS_MAX: Final = 16


class Epoch(msgspec.Struct, frozen=True):
    """Which service owns the stores."""

    version: int
    epoch: int
    process: str
    """Its name in the shards' documents."""
    host: str
    pid: int
    started_ms: int
    """By its own wall clock; to be shown."""

    def __str__(self) -> str:
        return f"epoch {self.epoch}, process {self.pid} on {self.host}"


class FencedConsensus:
    """The documents, as the owner of the stores sets them."""

    several_at_once: Final = True

    def __init__(self, inner: Consensus, own: Epoch, seqno: int, former: str) -> None:
        """`seqno`: of the document that names us; `former`: the process of the one before us."""
        self.inner = inner
        self.own = own
        self.former = former
        self.fenced = anyio.Event()
        self._seqno = seqno
        self._by = ""

    async def head(self, key: str) -> VersionedData | None:
        """The document, or None. Raises `StorageError`."""
        return await self.inner.head(key)

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Keys that start with `prefix`. Raises `StorageError`."""
        return await self.inner.list_keys(prefix)

    async def compare_and_set(self, ops: Sequence[Cas]) -> bool:
        """All or none. Raises `Fenced`, and as the store does."""
        self.check()
        fence = Cas(EPOCH_KEY, self._seqno, None, kept=True)
        if await self.inner.compare_and_set([*ops, fence]):
            return True
        await self.look()
        return False

    async def look(self) -> None:
        """Whether we own the stores still. Raises `Fenced`, `StorageError`."""
        self.check()
        head = await self.inner.head(EPOCH_KEY)
        if head is None or head.seqno != self._seqno:
            self._by = "nobody" if head is None else str(_decoded(head.data))
            self.fenced.set()
            self.check()

    def check(self) -> None:
        """Raises `Fenced` once it is known."""
        if self.fenced.is_set():
            raise Fenced(
                f"another service took over the stores ({self._by}); this one ({self.own}) has"
                " stopped writing: nothing was done. Stop one of them, or give it stores of its"
                " own (consensus_url)",
                determinate=True,
            )

    async def close(self) -> None:
        """Releases the store. The epoch stays ours."""
        await self.inner.close()


async def take_over(
    inner: Consensus, process: str, clock: Clock, settings: Settings
) -> FencedConsensus:
    """Makes us the owner, whoever was. Raises `StorageError`, `Corrupt`."""
    former, failures = "", 0
    while True:
        try:
            head = await inner.head(EPOCH_KEY)
            held = None if head is None else _decoded(head.data)
            if held is not None and head is not None and held.process == process:
                return FencedConsensus(inner, held, head.seqno, former)  # the answer was lost
            former = "" if held is None else held.process
            own = Epoch(
                VERSION,
                1 if held is None else held.epoch + 1,
                process,
                socket.gethostname(),
                os.getpid(),
                clock.now_ms(),
            )
            cas = Cas(EPOCH_KEY, None if head is None else head.seqno, _ENCODER.encode(own))
            if await inner.compare_and_set([cas]):
                return FencedConsensus(inner, own, cas.seqno, former)
        except StorageError as error:
            if error.determinate or failures >= _ATTEMPTS_MAX:
                raise
        failures += 1
        if failures > _ATTEMPTS_MAX:
            raise StorageError(
                f"could not take over the stores: other services did so {failures} times meanwhile;"
                " start one at a time",
                determinate=True,
            )
        await anyio.sleep(settings.retry_delay_ms(failures) / 1000)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Epoch)


def _decoded(data: bytes) -> Epoch:
    try:
        found = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"document {EPOCH_KEY} cannot be decoded: {error}", determinate=True
        ) from None
    if found.version > VERSION:
        raise StorageError(
            f"the stores are of format {found.version} ({found}), this version reads up to"
            f" {VERSION}: use the newer version of the program",
            determinate=True,
        )
    return found
