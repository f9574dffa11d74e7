"""Writes and reads parts and part lists in the blob store, and tracks parts that no state names
yet.

A part that was written but not yet appended is *pending*: this process never treats it as an
orphan. It stops being pending when it is appended or discarded. Parts of crashed processes are
found by orphan collection.

A pending part may be *offered* to another actor, which claims it. An unclaimed part becomes an
orphan after a while. While an append is in progress, its parts cannot be discarded; an append of
parts that were given up or discarded is refused. So at any time a part has one owner, or has lost
it for good. An append with an unknown outcome *leaves* its parts: only orphan collection may delete
them, unless they are appended again in time.

If other processes collect orphans, too, a part must be named within `link_within_ms` after its
writing started.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import anyio
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from actors.durable.persist.decoded_parts import DecodedParts
from actors.durable.persist.location import BlobStore
from actors.durable.persist.part_lists import encode_list
from actors.durable.persist.parts import (
    LOOP_BYTES_MAX,
    VERSION,
    EncodedPart,
    at_its_time,
    check_bytes,
    decode_written,
    encode,
    takes_at_most,
)
from actors.durable.persist.schemas import SchemaRegistry, read_as, schema_of
from actors.durable.persist.shard import BatchPart, PartList, ShardState
from actors.durable.persist.statistics import ColumnStatistics, of_footer
from actors.model.plan.schema import SYSTEM_COLUMNS, TableSchema
from actors.runtime.errors import InvalidUsage, StorageError, storage_error
from actors.runtime.kernel import ActorClock
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import ShardId, Time
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import PART_LIST

_DELETED_AT_ONCE: Final = 8
"""Number of concurrent deletes per call. A remote store needs two round trips for each."""


class WrittenBlob(Protocol):
    """A Parquet blob that another process wrote under a reserved prefix."""

    @property
    def name(self) -> str:
        """Return its key without the prefix."""
        ...

    @property
    def rows(self) -> int:
        """Return its number of rows."""
        ...

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        ...

    @property
    def checksum(self) -> int:
        """Return the crc32 of the whole blob."""
        ...

    @property
    def footer(self) -> bytes:
        """Return its metadata in the form of a Parquet file without rows."""
        ...

    @property
    def time_min(self) -> int:
        """Return the smallest time of its rows."""
        ...

    @property
    def time_max(self) -> int:
        """Return the largest time of its rows."""
        ...


class _Pending(msgspec.Struct):
    """A part that no state names yet."""

    since_ms: float
    """Monotonic time when its writing started."""
    free: bool = True
    """True if it may be deleted, because no state can name it."""
    appending: bool = False
    """True while an append of it is in progress."""


class PartStore:
    """Writes and reads parts.

    `writer` is a unique name of this process. `missing` explains why a blob (shard, key) does not
    exist. `link_within_ms` is described above; None if no other process collects orphans.
    """

    def __init__(
        self,
        blob: BlobStore,
        clock: ActorClock,
        writer: str,
        settings: Settings,
        missing: Callable[[ShardId, str], Awaitable[StorageError]],
        schemas: SchemaRegistry,
        link_within_ms: int | None,
    ) -> None:
        self._blob = blob
        self._clock = clock
        self._settings = settings
        self._decoded = DecodedParts(settings.decoded_parts_bytes_max)
        """Cache of decoded parts."""
        self._missing = missing
        self._nonce = writer
        self._schemas = schemas
        self._numbers = count(1)
        """Numbers of the blobs written by this process, for their keys."""
        self._link_within_ms = link_within_ms
        self._pending: dict[str, _Pending] = {}
        """Blobs written or claimed by this process that no state names yet, by key."""
        self._reserved: dict[str, float] = {}
        """Reserved key prefixes, with the monotonic time of the reservation."""
        self._offered: dict[str, float] = {}
        """Deadlines for claiming pending parts, by key, on the monotonic clock."""
        self._deleting: set[str] = set()
        """Keys whose deletion is in progress."""

    @property
    def writer(self) -> str:
        """Return the unique name of this process in documents and blob keys."""
        return self._nonce

    def memory(self) -> list[MemoryUse]:
        """Return the memory of the decoded parts, for a `MemoryLedger`."""
        kept = self._decoded
        return [MemoryUse("decoded parts", "", kept.rows, kept.bytes)]

    async def write(
        self,
        state: ShardState,
        updates: pa.Table,
        inline_bytes_max: int,
        *,
        keep: bool = True,
    ) -> tuple[BatchPart, ...]:
        """Write the updates as durable parts with the shard's newest schema. With `keep`, cache
        them in decoded form.

        Raises `TypeMismatch`, `InvalidUsage`, `StoreFull` and `StorageError`; then no part remains.
        """
        pieces = encode(
            updates,
            state.schema,
            inline_bytes_max=inline_bytes_max,
            bytes_target=self._settings.part_bytes_target,
            statistics_bytes_max=self._settings.part_statistics_bytes_max,
        )
        # A thread costs more than encoding a small table.
        small = takes_at_most(updates, LOOP_BYTES_MAX)
        parts: list[BatchPart] = []
        try:
            while True:
                piece: EncodedPart | None
                if small:
                    piece = next(pieces, None)
                else:
                    piece = await self._clock.run_blocking(lambda: next(pieces, None))
                if piece is None:
                    return tuple(parts)
                part = piece.part
                if piece.blob is not None:
                    part = replace(part, key=self._new_key(state.id))
                if state.schema_id:
                    part = replace(part, schema_id=state.schema_id)
                parts.append(part)
                if piece.blob is not None:
                    await self._blob.set(part.key, piece.blob)
                if keep and _is_whole(piece.updates, part):
                    self._decoded.put(part, piece.updates)
        except BaseException as error:
            if isinstance(error, StorageError) or not keep:
                with anyio.CancelScope(shield=True):
                    await self.discard(parts)
            for (
                part
            ) in parts:  # the caller does not get them; orphan collection removes what remains
                self._pending.pop(part.key, None)
            raise

    async def adopt(
        self, state: ShardState, path: Path, rows: int, times: tuple[Time, Time]
    ) -> BatchPart:
        """Take over a Parquet file, with the statistics in its footer. Raises `InvalidUsage`,
        `StoreFull` and `StorageError`."""
        if rows <= 0 or times[0] > times[1]:
            raise InvalidUsage(
                f"invalid part {path}: {rows} rows at times {times[0]} to {times[1]}; a part must "
                "contain rows"
            )
        schema_id, known = await self._clock.run_blocking(
            partial(self._footer, path, state, str(path))
        )
        key = self._new_key(state.id)
        try:
            size, checksum = await self._blob.adopt(key, path)
        except BaseException:
            self._pending.pop(key, None)
            raise
        return BatchPart(
            key=key,
            rows=rows,
            bytes=size,
            checksum=checksum,
            inline=None,
            has_errors=False,
            time_min=times[0],
            time_max=times[1],
            version=VERSION,
            schema_id=schema_id,
            statistics=known,
        )

    def reserve(self, shard: ShardId) -> str:
        """Reserve a unique prefix of keys. Blobs under it are pending until `release`."""
        prefix = f"{shard}/{self._nonce}-{next(self._numbers):08x}-"
        self._reserved[prefix] = self._clock.monotonic_ms()
        return prefix

    def release(self, prefix: str) -> None:
        """End a reservation. Blobs under the prefix that were not adopted become orphans."""
        self._reserved.pop(prefix, None)

    async def adopt_written(
        self, state: ShardState, prefix: str, written: Sequence[WrittenBlob]
    ) -> list[BatchPart]:
        """Take over blobs that others wrote under a reserved prefix, with the statistics in their
        footers. Raises `InvalidUsage` and `StorageError`."""
        sizes = {info.key: info.bytes for info in await self._blob.list_keys(prefix)}
        parts = []
        for blob in written:
            key = prefix + blob.name
            if sizes.get(key) != blob.size:
                raise StorageError(
                    f"blob {key} should have {blob.size} bytes, but has {sizes.get(key, 'none')}: "
                    "compute it again",
                    determinate=True,
                )
            schema_id, known = await self._clock.run_blocking(
                partial(self._footer, pa.BufferReader(blob.footer), state, key)
            )
            parts.append(
                BatchPart(
                    key=key,
                    rows=blob.rows,
                    bytes=blob.size,
                    checksum=blob.checksum,
                    inline=None,
                    has_errors=False,
                    time_min=blob.time_min,
                    time_max=blob.time_max,
                    version=VERSION,
                    schema_id=schema_id,
                    statistics=known,
                )
            )
        for part in parts:
            # As old as the reservation, because another process's collector may have seen the blob
            # for as long.
            self._pending[part.key] = _Pending(self._reserved[prefix])
        return parts

    def _footer(
        self, source: Path | pa.BufferReader, state: ShardState, name: str
    ) -> tuple[int, tuple[ColumnStatistics, ...]]:
        """Return the number of the shard's newest schema that the file fits, and its statistics."""
        try:
            with pq.ParquetFile(source) as file:
                kinds, footer = file.schema_arrow, file.metadata
        except pa.ArrowException as error:
            raise InvalidUsage(f"{name} is not a Parquet file: {error}") from None
        except OSError as error:
            raise storage_error(f"read the footer of {name}", error) from error
        # Compared by name, so it is the newest of schemas that differ only in types.
        for schema_id in range(state.schema_id, -1, -1):
            schema = schema_of(state, schema_id)
            if set(schema.names) == set(kinds.names) - SYSTEM_COLUMNS:
                bytes_max = self._settings.part_statistics_bytes_max
                return schema_id, of_footer(footer, kinds, schema, bytes_max)
        raise InvalidUsage(
            f"{name} has columns {', '.join(kinds.names)}, but shard {state.id} has "
            f"{state.schema.ddl()}"
        )

    async def write_list(self, shard: ShardId, parts: tuple[BatchPart, ...]) -> PartList | None:
        """Write a list of the parts of one batch, which is pending like the parts.

        Return None if there are so few parts that the document describes them. Raises `StoreFull`
        and `StorageError`.
        """
        if not PART_LIST.crossed(len(parts) >= self._settings.part_list_parts_min):
            return None
        data = await self._clock.run_blocking(partial(encode_list, parts))
        listed = PartList(self._new_key(shard, "parts"), len(data), zlib.crc32(data))
        try:
            await self._blob.set(listed.key, data)
        except BaseException:  # orphan collection removes what was written
            self._pending.pop(listed.key, None)
            raise
        return listed

    def _new_key(self, shard: ShardId, kind: str = "parquet") -> str:
        # The writer's name makes keys of different processes distinct, so a blob key is never
        # written twice.
        key = f"{shard}/{self._nonce}-{next(self._numbers):08x}.{kind}"
        # Before the write starts, because a collection may list the blob at any time afterwards.
        self._pending[key] = _Pending(self._clock.monotonic_ms())
        return key

    async def fetch(self, part: BatchPart, schema: TableSchema) -> pa.Table:
        """Return the part's updates. Raises `CorruptData`, `LeaseLost` and `StorageError`."""
        # Cached as written, because the part may be read before and after it is placed, and with
        # any schema.
        own = self._schemas.written_with(part)
        written = await self._decoded.get(part, lambda: self._read(part, own))
        name = f"part {part.key}" if part.key else "inline part"
        return at_its_time(part, read_as(name, written, schema))

    async def _read(self, part: BatchPart, schema: TableSchema | None) -> pa.Table:
        if part.inline is not None:
            return decode_written(part, part.inline, schema)
        data = await self._bytes(part)
        # Decode large parts in a thread, so that the event loop does not stall.
        if len(data) <= LOOP_BYTES_MAX:
            return decode_written(part, data, schema)
        return await self._clock.run_blocking(lambda: decode_written(part, data, schema))

    async def _bytes(self, part: BatchPart) -> bytes:
        data = await self._blob.get(part.key)
        if data is None:
            raise await self._missing(part.key.partition("/")[0], part.key)
        return data

    async def save(self, part: BatchPart, path: Path) -> None:
        """Write the part's blob to a file. Raises `CorruptData`, `LeaseLost` and `StorageError`."""
        data = await self._bytes(part)

        def write() -> None:
            check_bytes(part, data)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        try:
            await self._clock.run_blocking(write)
        except OSError as error:
            raise storage_error(f"write {path}", error) from error

    def path(self, part: BatchPart) -> str | None:
        """Return the path of the part's file; None if it is not in a file."""
        return self._blob.path(part.key) if part.key else None

    def place(self, part: BatchPart) -> tuple[str, str] | None:
        """Return the URL of the part's bucket and its key there; None if it is not in a bucket."""
        return self._blob.place(part.key) if part.key else None

    def place_of(self, prefix: str) -> tuple[str, str] | None:
        """Return the URL of the bucket, and the prefix within it, for keys with this prefix; None
        if blobs are not in a bucket."""
        return self._blob.place(prefix)

    def pending(self, key: str) -> bool:
        """Return whether this process wrote or claimed the blob and may still append it."""
        return key in self._pending or key.startswith(tuple(self._reserved))

    def pending_keys(self) -> list[str]:
        """Return the keys of all pending blobs, sorted."""
        return sorted(self._pending)

    async def claim(self, shard: ShardId, parts: Iterable[BatchPart]) -> bool:
        """Make another process's parts pending here. Return False if one of them is missing."""
        keys = {part.key for part in parts if part.inline is None}
        self.give_up()
        # A deletion in progress cannot be undone.
        if keys & self._deleting:
            return False
        now = self._clock.monotonic_ms()
        new = {key: _Pending(now) for key in keys if key not in self._pending}
        self._pending |= new  # before the listing, so that our collector spares them meanwhile
        # Listed after they became pending: a blob in this listing will not be collected here.
        found = {info.key for info in await self._blob.list_keys(f"{shard}/")}
        if keys <= found:
            for key in keys:
                self._offered.pop(key, None)
            return True
        for key in new:
            self._pending.pop(key, None)
        return False

    def offer(self, parts: Iterable[BatchPart], within_ms: int) -> None:
        """Make the parts orphans unless they are claimed within `within_ms`."""
        until = self._clock.monotonic_ms() + within_ms
        self._offered |= {part.key: until for part in parts if self._free(part.key)}

    def _free(self, key: str) -> bool:
        found = self._pending.get(key)
        return found is not None and found.free and not found.appending

    def check_kept(self, parts: Iterable[BatchPart]) -> None:
        """Raise `InvalidUsage` if this process wrote a part that is no longer pending, and so may
        be deleted. Call it right before a state names the parts."""
        for part in parts:
            own = part.key.rpartition("/")[2].startswith(f"{self._nonce}-")
            if own and part.key not in self._pending:
                raise _given_up(part)

    def check_young(self, parts: Iterable[BatchPart | PartList], *, uncertain: bool) -> None:
        """Raise `StorageError` if another process may have collected a part.

        Call it right before a state names the parts. `uncertain` means that an earlier attempt may
        have named them.
        """
        if self._link_within_ms is None:
            return
        now = self._clock.monotonic_ms()
        for part in parts:
            written = self._pending.get(part.key)
            if written is not None and now - written.since_ms > self._link_within_ms:
                raise StorageError(
                    f"part {part.key} was not linked: its writing started "
                    f"{now - written.since_ms:.0f} ms ago, more than half of blob_orphan_grace_ms "
                    f"({self._link_within_ms} ms), so another process may treat it as an orphan; "
                    "write it again, or raise that setting in all processes",
                    determinate=not uncertain,
                )

    def give_up(self) -> None:
        """Make parts orphans that were offered or left, and neither claimed nor appended in
        time."""
        now = self._clock.monotonic_ms()
        for key in [key for key, until in self._offered.items() if until <= now]:
            del self._offered[key]
            self._pending.pop(key, None)

    def begin(self, parts: Iterable[BatchPart]) -> tuple[BatchPart, ...]:
        """Pin the parts for an append. Return those that no other append has pinned, to pass to
        `end` or `leave`.

        Raises `InvalidUsage` if a placed part is not pending here.
        """
        given = tuple(parts)
        for part in given:
            # A placed part may be another process's, which `check_kept` cannot tell by its key: it
            # must have been claimed.
            if part.at is not None and part.key not in self._pending:
                raise _given_up(part)
        begun = []
        for part in given:
            found = self._pending.get(part.key)
            if found is not None and not found.appending:
                # Its `end` or `leave` belongs to the append that pinned it first.
                found.appending = True
                self._offered.pop(part.key, None)
                begun.append(part)
        return tuple(begun)

    def end(self, parts: Iterable[BatchPart], within_ms: int) -> None:
        """Unpin parts that were certainly not appended. They become orphans unless they are
        appended, claimed or discarded in time."""
        until = self._clock.monotonic_ms() + within_ms
        for part in parts:
            found = self._pending.get(part.key)
            if found is not None:
                found.appending = False
                self._offered[part.key] = until

    def leave(self, parts: Iterable[BatchPart | PartList], within_ms: int) -> None:
        """Unpin parts of an append with an unknown outcome. Unless they are appended again in time,
        they are left to orphan collection."""
        until = self._clock.monotonic_ms() + within_ms
        for part in parts:
            found = self._pending.get(part.key)
            if found is not None:
                # Never free again: a delete could remove a part that a state names.
                found.appending = found.free = False
                self._offered[part.key] = until

    def named(self, parts: Iterable[BatchPart | PartList]) -> None:
        """Forget parts that were appended."""
        for part in parts:
            self._offered.pop(part.key, None)
            self._pending.pop(part.key, None)

    def forget(self, shard: ShardId) -> None:
        """Forget the pending parts of a dropped shard, which makes them orphans."""
        for key in [key for key in self._pending if key.startswith(f"{shard}/")]:
            del self._pending[key]
            self._offered.pop(key, None)

    async def discard(self, parts: Iterable[BatchPart | PartList]) -> None:
        """Delete parts that were never appended, except those of an append in progress. Blobs that
        a state may name, and failed deletes, are left to orphan collection."""

        # A generator, because an append may start meanwhile and pin parts that are not yet reached.
        def freed() -> Iterator[str]:
            for part in parts:
                found = self._pending.get(part.key)
                if found is not None and not found.appending:
                    del self._pending[part.key]
                    self._offered.pop(part.key, None)
                    if found.free:
                        yield part.key

        await self.delete(freed())

    async def delete(self, keys: Iterable[str]) -> list[str]:
        """Delete blobs, a few at a time, and return the deleted keys. Failed deletes are left for
        later.

        `keys` is consumed lazily, each key right before it is deleted.
        """
        gone: list[str] = []
        left, begun = iter(keys), count(1)

        async def delete_some() -> None:
            for key in left:
                self._deleting.add(key)
                if next(begun) < _DELETED_AT_ONCE:
                    group.start_soon(delete_some)  # one more worker while keys may remain
                try:
                    await self._blob.delete(key)
                except StorageError:
                    continue
                finally:
                    self._deleting.discard(key)
                # Only after a successful delete: after a failed one, the part may still be read.
                self._decoded.drop(key)
                gone.append(key)

        async with anyio.create_task_group() as group:
            await delete_some()
        return gone


def _given_up(part: BatchPart) -> InvalidUsage:
    return InvalidUsage(
        f"part {part.key} was given up or discarded, or was never claimed; nothing was appended: "
        "write the part again"
    )


def _is_whole(table: pa.Table, part: BatchPart) -> bool:
    """Return whether caching the table keeps little else in memory, because it is not a slice of a
    large one."""
    held = table.get_total_buffer_size()
    return bool(held <= part.bytes or held <= 2 * table.nbytes)
