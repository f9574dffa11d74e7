"""Parts between the process and the blob store: written before a state names them, read after.

A part that was written and not yet appended is *pending*: this process never takes it for an
orphan. It stops being pending when it is appended or discarded; what a killed process left is
found by the collection of orphans.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import count
from pathlib import Path
from random import Random

import pyarrow as pa
from msgspec.structs import replace

from actors.errors import Corrupt, InvalidUsage, LeaseLost, StorageError
from actors.kernel import Clock
from actors.persist.decoded import DecodedParts
from actors.persist.location import Blob
from actors.persist.parts import VERSION, Encoded, decode, encode
from actors.persist.shard import Part
from actors.plan.schema import Schema
from actors.progress import ShardId, Time

_ON_THE_LOOP_BYTES_MAX = 64 * 1024
"""Smaller updates are encoded and decoded at once: a thread costs more."""


class PartStore:
    """Writes and reads parts."""

    def __init__(
        self,
        blob: Blob,
        clock: Clock,
        random: Random,
        bytes_target: int,
        decoded_bytes_max: int,
        is_named: Callable[[ShardId, str], Awaitable[bool]],
    ) -> None:
        self._blob = blob
        self._clock = clock
        self._bytes_target = bytes_target
        self._decoded = DecodedParts(decoded_bytes_max)
        self._is_named = is_named
        self._nonce = f"{random.getrandbits(64):016x}"
        self._numbers = count(1)
        self._pending: dict[str, bool] = {}
        """Key → whether it may be discarded (not after an append whose outcome is open)."""

    @property
    def writer(self) -> str:
        """Names this process in documents and blob keys."""
        return self._nonce

    async def write(
        self, shard: ShardId, schema: Schema, updates: pa.Table, inline_bytes_max: int
    ) -> tuple[Part, ...]:
        """Durable parts of these updates. Raises `TypeMismatch`, `InvalidUsage`, `StoreFull`,
        `StorageError`; then none is left behind."""
        pieces = encode(
            updates, schema, inline_bytes_max=inline_bytes_max, bytes_target=self._bytes_target
        )
        small = updates.nbytes <= _ON_THE_LOOP_BYTES_MAX
        parts: list[Part] = []
        try:
            while True:
                piece: Encoded | None
                if small:
                    piece = next(pieces, None)
                else:
                    piece = await self._clock.run_blocking(lambda: next(pieces, None))
                if piece is None:
                    return tuple(parts)
                part = piece.part
                if piece.blob is not None:
                    part = replace(part, key=self._new_key(shard))
                parts.append(part)
                if piece.blob is not None:
                    await self._blob.set(part.key, piece.blob)
                if piece.updates.get_total_buffer_size() <= 2 * piece.updates.nbytes:
                    self._decoded.put(part, piece.updates)
        except StorageError:
            await self.discard(parts)
            raise

    async def adopt(
        self,
        shard: ShardId,
        path: Path,
        rows: int,
        times: tuple[Time, Time],
        has_errors: bool,
    ) -> Part:
        """Takes over a Parquet file. Raises `InvalidUsage`, `StoreFull`, `StorageError`."""
        if rows <= 0 or times[0] > times[1]:
            raise InvalidUsage(
                f"{path}: {rows} rows at times {times[0]} to {times[1]}; an empty file is no part"
            )
        key = self._new_key(shard)
        try:
            size, checksum = await self._blob.adopt(key, path)
        except StorageError:
            self._pending.pop(key, None)
            raise
        return Part(
            key=key,
            rows=rows,
            bytes=size,
            checksum=checksum,
            inline=None,
            has_errors=has_errors,
            time_min=times[0],
            time_max=times[1],
            version=VERSION,
        )

    def _new_key(self, shard: ShardId) -> str:
        key = f"{shard}/{self._nonce}-{next(self._numbers):08x}.parquet"
        self._pending[key] = True
        return key

    async def fetch(self, part: Part, schema: Schema) -> pa.Table:
        """The part's updates. Raises `Corrupt`, `LeaseLost`, `StorageError`."""
        return await self._decoded.get(part, lambda: self._read(part, schema))

    async def _read(self, part: Part, schema: Schema) -> pa.Table:
        if part.inline is not None:
            return decode(part, part.inline, schema)
        data = await self._blob.get(part.key)
        if data is None:
            shard = part.key.partition("/")[0]
            if await self._is_named(shard, part.key):
                raise Corrupt(
                    f"blob {part.key} is gone although shard {shard} names it; restore the file"
                    " from a copy",
                    determinate=True,
                )
            raise LeaseLost(
                f"part {part.key} was compacted away and deleted: its reader's lease was"
                " released or has expired; read the shard again",
                determinate=True,
            )
        if len(data) <= _ON_THE_LOOP_BYTES_MAX:
            return decode(part, data, schema)
        return await self._clock.run_blocking(lambda: decode(part, data, schema))

    def path(self, part: Part) -> str | None:
        """The file's path, where there is one."""
        return self._blob.path(part.key) if part.key else None

    def pending(self, key: str) -> bool:
        """Whether this process wrote it and may still append it."""
        return key in self._pending

    async def claim(self, shard: ShardId, parts: Iterable[Part]) -> bool:
        """Makes parts of another process pending here; False when one of them is gone."""
        keys = {part.key for part in parts if part.inline is None}
        new = {key: True for key in keys if key not in self._pending}
        self._pending |= new  # before the look: no collector takes them meanwhile
        found = {info.key for info in await self._blob.list_keys(f"{shard}/")}
        if keys <= found:
            return True
        for key in new:
            del self._pending[key]
        return False

    def settle(self, parts: Iterable[Part], *, named: bool) -> None:
        """After an append: they are named by a state, or that is open."""
        for part in parts:
            if part.key in self._pending:
                if named:
                    del self._pending[part.key]
                else:
                    self._pending[part.key] = False

    def forget(self, shard: ShardId) -> None:
        """The shard is gone: what was written for it is orphaned."""
        for key in [key for key in self._pending if key.startswith(f"{shard}/")]:
            del self._pending[key]

    async def discard(self, parts: Iterable[Part]) -> None:
        """Deletes parts that were never appended; failures are left to the collection."""
        for part in parts:
            if self._pending.get(part.key):
                del self._pending[part.key]
                await self.delete([part.key])

    async def delete(self, keys: Iterable[str]) -> list[str]:
        """Deletes blobs; those that are gone now, one that cannot be deleted stays for later."""
        gone = []
        for key in keys:
            try:
                await self._blob.delete(key)
            except StorageError:
                continue
            self._decoded.drop(key)
            gone.append(key)
        return gone
