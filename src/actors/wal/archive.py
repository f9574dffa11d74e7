"""Whole segments of logs in a blob store: written once, verified, read back.

A segment is the object ``<tenant>/<timeline>/<segment>``, the bytes of the file of that name; its
*stamp*, ``<segment>.json``, has its length and CRC-32. A segment without a stamp does not count.

All acceptors of a log may write one segment at the same time: up to the commit LSN they have the
same bytes. Every call ends within ``wal_blob_timeout_ms``, waiting for others included. At most
`SEGMENTS_MAX` segments are cached for readers; one is fetched at a time.
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

from actors.runtime.errors import CorruptData, StorageError
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.wal.lsn import SEGMENT_BYTES, segment_name

if TYPE_CHECKING:
    from actors.durable.persist.location import BlobStore

SEGMENTS_MAX: Final = 4

log = logging.getLogger("penstock.wal")

STAMP: Final = ".json"


class SegmentStamp(msgspec.Struct, frozen=True):
    """Length and CRC of a segment that was verified."""

    size: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the stamp of these bytes."""
        return cls(len(data), zlib.crc32(data))


class WalArchive:
    """Stores segments; `at` opens the archive of a URL. `open_tenant` opens the store of one
    tenant, whose keys are ``<timeline>/<segment>``."""

    def __init__(
        self, open_tenant: Callable[[str], Awaitable[BlobStore]], settings: Settings
    ) -> None:
        self._open_tenant = open_tenant
        self._limit_ms = settings.wal_blob_timeout_ms
        self._tenants: dict[str, BlobStore] = {}
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._fetching = anyio.Lock()

    @classmethod
    async def at(cls, url: str, settings: Settings, clock: ActorClock) -> Self:
        """Open the archive of a URL (`actors.durable.persist.store_urls`). A bucket is not
        contacted yet. Raises `InvalidUsage`, `StorageError`.
        """
        # Imported here: it loads persist and pyarrow, three times what an acceptor needs to start.
        from actors.durable.persist.store_urls import open_blob

        async def open_tenant(tenant: str) -> BlobStore:
            return await open_blob(url, settings, clock, exclusive=False, below=tenant)

        await open_blob(url, settings, clock, exclusive=False)
        return cls(open_tenant, settings)

    async def keep(self, tenant: str, timeline: str, number: int, data: bytes) -> bool:
        """Ensure that the store has a whole segment, verified now; return whether it had to be
        written. Raises `CorruptData` when the store has another one of that name,
        `StorageError`."""
        key, ours = _key(timeline, number), SegmentStamp.of(data)
        async with self._within(f"keep segment {key}", determinate=False):
            blob = await self._blob(tenant)
            stamp = await self._stamp(blob, key)
            # Nothing is overwritten: one of the two logs is wrong, and it is not known which.
            if stamp not in (None, ours):
                raise CorruptData(
                    f"segment {key} of tenant {tenant} is kept with {stamp}, and here it is {ours}:"
                    " one of the two logs is wrong; compare them by `penstock wal inspect`, and"
                    f" remove the object with its {STAMP} if that is the wrong one",
                    determinate=True,
                )
            if stamp is not None:
                # Read back also if another acceptor wrote it: callers may remove their own segment
                # now.
                if await blob.get(key) == data:
                    return False
                log.warning("segment %s was damaged in its store: it is written again", key)
            await blob.set(key, data)
            if await blob.get(key) != data:
                raise CorruptData(
                    f"segment {key} of tenant {tenant} was written and read back otherwise:"
                    " it does not count, and is written again later",
                    determinate=True,
                )
            if stamp is None:
                # Last, after the segment was read back: a stamp is proof that the segment is whole.
                await blob.set(key + STAMP, msgspec.json.encode(ours))
            return True

    async def has(self, tenant: str, timeline: str, number: int) -> bool:
        """Return whether a segment is archived. Raises `StorageError`."""
        key = _key(timeline, number)
        async with self._within(f"look for segment {key}", determinate=True):
            return await self._stamp(await self._blob(tenant), key) is not None

    async def segment(self, tenant: str, timeline: str, number: int) -> bytes | None:
        """Return a segment, checked against its stamp; None: it is not archived. Raises
        `CorruptData` for one that is damaged, `StorageError`."""
        key = _key(timeline, number)
        # One fetch at a time bounds the memory for segments.
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
            if data is None or SegmentStamp.of(data) != stamp:
                now = "it is gone" if data is None else f"it is {SegmentStamp.of(data)}"
                raise CorruptData(
                    f"segment {key} of tenant {tenant} was kept with {stamp}, and {now}: restore"
                    " it, or read from an acceptor that has it still",
                    determinate=True,
                )
            self._kept[tenant, key] = data
            if len(self._kept) > SEGMENTS_MAX:
                self._kept.popitem(last=False)
            return data

    async def _stamp(self, blob: BlobStore, key: str) -> SegmentStamp | None:
        found = await blob.get(key + STAMP)
        if found is None:
            return None
        try:
            stamp = msgspec.json.decode(found, type=SegmentStamp)
        except msgspec.MsgspecError as error:
            raise CorruptData(
                f"{key}{STAMP} does not say what segment it is of: {error}", determinate=True
            ) from None
        if stamp.size != SEGMENT_BYTES:
            raise CorruptData(
                f"{key}{STAMP} is of a segment of {stamp.size} bytes: {SEGMENT_BYTES} it would be",
                determinate=True,
            )
        return stamp

    async def _blob(self, tenant: str) -> BlobStore:
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
            # The store may still carry out a write that timed out; a read has changed nothing.
            raise StorageError(
                f"could not {what} in {self._limit_ms} ms (wal_blob_timeout_ms)",
                determinate=determinate,
            ) from None


def _key(timeline: str, number: int) -> str:
    return f"{timeline}/{segment_name(number)}"
