"""Whole segments of logs in a store of blobs: written once, verified, read back.

Theory of operation. A segment is the object ``<tenant>/<timeline>/<segment>``, the bytes of the
file of that name; beside it lies its *stamp*, ``<segment>.json``, with its length and CRC-32. The
stamp is written last, by somebody who has read the segment back and found the bytes that he wrote:
a segment without a stamp counts for nothing, whatever a crash left of it. All acceptors of a log
may write the same segment at the same time, because up to what is committed they have the same
bytes.

Rules:

- `keep` returns when the store has given back the very bytes that it was given, now: also where
  another acceptor wrote them before. Only then may a caller remove its own.
- A stamp that is not of our bytes ends in `Corrupt`, and nothing is overwritten: one of the two
  logs is wrong, and nobody here knows which. A segment that is not what its stamp says, while the
  stamp is of our bytes, was damaged in the store, and is written again.
- What `segment` gives was checked against its stamp, or is `Corrupt`.
- Every call ends within ``wal_blob_timeout_ms``, waiting for others included.

Bounded: at most ``wal_blob_segments_max`` segments are remembered for readers; one is fetched at a
time.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Self

import anyio
import msgspec

from actors.errors import Corrupt, StorageError
from actors.kernel import Clock
from actors.settings import Settings
from actors.wal.lsn import SEGMENT_BYTES, segment_name

if TYPE_CHECKING:
    from actors.persist.location import Blob

log = logging.getLogger("penstock.wal")

STAMP: Final = ".json"


class Stamp(msgspec.Struct, frozen=True):
    """What a segment was when it was verified."""

    size: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Of these bytes."""
        return cls(len(data), zlib.crc32(data))


class Archive:
    """See the module; `at` makes one of a URL. `open_tenant` gives the store of one tenant, whose
    keys are ``<timeline>/<segment>``."""

    def __init__(self, open_tenant: Callable[[str], Awaitable[Blob]], settings: Settings) -> None:
        self._open_tenant = open_tenant
        self._limit_ms = settings.wal_blob_timeout_ms
        self._kept_max = settings.wal_blob_segments_max
        self._tenants: dict[str, Blob] = {}
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._fetching = anyio.Lock()

    @classmethod
    async def at(cls, url: str, settings: Settings, clock: Clock) -> Self:
        """The one that a URL names (`actors.persist.places`). A bucket is asked nothing yet.
        Raises `InvalidUsage`, `StorageError`."""
        # It loads all of persist, pyarrow too: three times what an acceptor needs to start.
        from actors.persist.places import open_blob

        async def open_tenant(tenant: str) -> Blob:
            return await open_blob(url, settings, clock, exclusive=False, below=tenant)

        await open_blob(url, settings, clock, exclusive=False)
        return cls(open_tenant, settings)

    async def keep(self, tenant: str, timeline: str, number: int, data: bytes) -> bool:
        """Sees to it that the store has a whole segment, verified now; whether anything had to be
        written. Raises `Corrupt` when it has another one of that name, `StorageError`."""
        key, ours = _key(timeline, number), Stamp.of(data)
        async with self._within(f"keep segment {key}", determinate=False):
            blob = await self._blob(tenant)
            stamp = await self._stamp(blob, key)
            if stamp not in (None, ours):
                raise Corrupt(
                    f"segment {key} of tenant {tenant} is kept with {stamp}, and here it is {ours}:"
                    " one of the two logs is wrong; compare them by `penstock wal inspect`, and"
                    f" remove the object with its {STAMP} if that is the wrong one",
                    determinate=True,
                )
            if stamp is not None:
                if await blob.get(key) == data:
                    return False
                log.warning("segment %s was damaged in its store: it is written again", key)
            await blob.set(key, data)
            if await blob.get(key) != data:
                raise Corrupt(
                    f"segment {key} of tenant {tenant} was written and read back otherwise:"
                    " it does not count, and is written again later",
                    determinate=True,
                )
            if stamp is None:
                await blob.set(key + STAMP, msgspec.json.encode(ours))
            return True

    async def has(self, tenant: str, timeline: str, number: int) -> bool:
        """Whether somebody has kept it. Raises `StorageError`."""
        key = _key(timeline, number)
        async with self._within(f"look for segment {key}", determinate=True):
            return await self._stamp(await self._blob(tenant), key) is not None

    async def segment(self, tenant: str, timeline: str, number: int) -> bytes | None:
        """A whole one; None: it is not kept. Raises `Corrupt` for one that is damaged,
        `StorageError`."""
        key = _key(timeline, number)
        async with self._within(f"read segment {key}", determinate=True), self._fetching:
            found = self._kept.get((tenant, key))
            if found is not None:
                self._kept.move_to_end((tenant, key))
                return found
            blob = await self._blob(tenant)
            stamp = await self._stamp(blob, key)
            if stamp is None:
                return None
            data = await blob.get(key)
            if data is None or Stamp.of(data) != stamp:
                now = "it is gone" if data is None else f"it is {Stamp.of(data)}"
                raise Corrupt(
                    f"segment {key} of tenant {tenant} was kept with {stamp}, and {now}: restore"
                    " it, or read from an acceptor that has it still",
                    determinate=True,
                )
            self._kept[tenant, key] = data
            if len(self._kept) > self._kept_max:
                self._kept.popitem(last=False)
            return data

    async def _stamp(self, blob: Blob, key: str) -> Stamp | None:
        found = await blob.get(key + STAMP)
        if found is None:
            return None
        try:
            stamp = msgspec.json.decode(found, type=Stamp)
        except msgspec.MsgspecError as error:
            raise Corrupt(
                f"{key}{STAMP} does not say what segment it is of: {error}", determinate=True
            ) from None
        if stamp.size != SEGMENT_BYTES:
            raise Corrupt(
                f"{key}{STAMP} is of a segment of {stamp.size} bytes: {SEGMENT_BYTES} it would be",
                determinate=True,
            )
        return stamp

    async def _blob(self, tenant: str) -> Blob:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = await self._open_tenant(tenant)
        return found

    @asynccontextmanager
    async def _within(self, what: str, *, determinate: bool) -> AsyncIterator[None]:
        try:
            with anyio.fail_after(self._limit_ms / 1000):
                yield
        except TimeoutError:
            raise StorageError(
                f"could not {what} in {self._limit_ms} ms (wal_blob_timeout_ms)",
                determinate=determinate,
            ) from None


def _key(timeline: str, number: int) -> str:
    return f"{timeline}/{segment_name(number)}"
