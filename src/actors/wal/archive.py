"""Complete segments of logs in a blob store: written once, verified, read back.

A segment is stored as the object ``<tenant>/<timeline>/<segment>``, with the bytes of the file of
that name. Its *stamp*, ``<segment>.json``, contains its length and CRC-32. A segment without a
stamp does not count.

All acceptors of a log may write the same segment at the same time: up to the commit LSN they have
the same bytes. Every call ends within ``wal_blob_timeout_ms``, including waits for other calls. At
most `SEGMENTS_MAX` segments are cached for readers, and one is fetched at a time.
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
    """Length and CRC of a verified segment."""

    size: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Return the stamp of these bytes."""
        return cls(len(data), zlib.crc32(data))


class WalArchive:
    """Stores segments. `at` opens the archive of a URL.

    `open_tenant` opens the store of one tenant, whose keys are ``<timeline>/<segment>``.
    """

    def __init__(
        self, open_tenant: Callable[[str], Awaitable[BlobStore]], settings: Settings
    ) -> None:
        self._open_tenant = open_tenant
        self._limit_ms = settings.wal_blob_timeout_ms
        self._tenants: dict[str, BlobStore] = {}
        """Opened stores, by tenant."""
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """Cached segments, least recently used first."""
        self._fetching = anyio.Lock()
        """Held while a segment is fetched."""

    @classmethod
    async def at(cls, url: str, settings: Settings, clock: ActorClock) -> Self:
        """Open the archive of a URL (`actors.durable.persist.store_urls`). A bucket is not
        contacted yet.

        Raise `InvalidUsage` or `StorageError`.
        """
        # Import it only here: it loads persist and pyarrow, which takes three times what an
        # acceptor otherwise needs to start.
        from actors.durable.persist.store_urls import open_blob

        async def open_tenant(tenant: str) -> BlobStore:
            return await open_blob(url, settings, clock, exclusive=False, below=tenant)

        await open_blob(url, settings, clock, exclusive=False)
        return cls(open_tenant, settings)

    async def keep(self, tenant: str, timeline: str, number: int, data: bytes) -> bool:
        """Ensure that the store contains a complete, verified segment; return whether it had to be
        written.

        Raise `CorruptData` if the store has a different segment with this name, and `StorageError`.
        """
        key, ours = _key(timeline, number), SegmentStamp.of(data)
        async with self._within(f"keep segment {key}", determinate=False):
            blob = await self._blob(tenant)
            stamp = await self._stamp(blob, key)
            # Overwrite nothing: one of the two logs is wrong, and it is not known which.
            if stamp not in (None, ours):
                raise CorruptData(
                    f"segment {key} of tenant {tenant} is archived with {stamp}, here it is {ours}:"
                    " one of the two logs is wrong; compare them with `penstock wal inspect`, and"
                    f" remove the object and its {STAMP} if the archived one is wrong",
                    determinate=True,
                )
            if stamp is not None:
                # Read it back even if another acceptor wrote it, because callers may now remove
                # their own segment.
                if await blob.get(key) == data:
                    return False
                log.warning("segment %s is damaged in its store; writing it again", key)
            await blob.set(key, data)
            if await blob.get(key) != data:
                raise CorruptData(
                    f"segment {key} of tenant {tenant} was not read back as it was written:"
                    " it does not count and will be written again later",
                    determinate=True,
                )
            if stamp is None:
                # Write the stamp last, after the segment was read back: it proves that the segment
                # is complete.
                await blob.set(key + STAMP, msgspec.json.encode(ours))
            return True

    async def has(self, tenant: str, timeline: str, number: int) -> bool:
        """Return whether a segment is archived. Raise `StorageError`."""
        key = _key(timeline, number)
        async with self._within(f"look for segment {key}", determinate=True):
            return await self._stamp(await self._blob(tenant), key) is not None

    async def segment(self, tenant: str, timeline: str, number: int) -> bytes | None:
        """Return a segment, checked against its stamp, or None if it is not archived.

        Raise `CorruptData` for a damaged segment, and `StorageError`.
        """
        key = _key(timeline, number)
        # One fetch at a time, to bound the memory for segments.
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
                now = "it is missing" if data is None else f"it is {SegmentStamp.of(data)}"
                raise CorruptData(
                    f"segment {key} of tenant {tenant} was archived with {stamp}, but {now}:"
                    " restore it, or read from an acceptor that still has it",
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
                f"invalid segment stamp {key}{STAMP}: {error}", determinate=True
            ) from None
        if stamp.size != SEGMENT_BYTES:
            raise CorruptData(
                f"{key}{STAMP} is for a segment of {stamp.size} bytes: expected {SEGMENT_BYTES}",
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
                f"could not {what} within {self._limit_ms} ms (wal_blob_timeout_ms)",
                determinate=determinate,
            ) from None


def _key(timeline: str, number: int) -> str:
    return f"{timeline}/{segment_name(number)}"
