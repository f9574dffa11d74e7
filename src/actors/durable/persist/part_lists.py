"""Part lists: blobs that describe the parts of large batches, outside the document.

A document is written in full with each change, so it must not grow with the data. A batch of at
least `part_list_parts_min` parts therefore has a *list*: an immutable blob with their descriptions,
written before a document names it, and retired with its batch. The document contains the list's
key, size and crc32 instead of the parts.

In memory, a state is *whole* if it has all descriptions. A state that was just decoded is not,
until its lists are read; it encodes to the same document either way. A list is never read twice
while a document names it. `shard.deletable` decides when a list may be deleted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.durable.persist.location import BlobStore
from actors.durable.persist.parts import LOOP_BYTES_MAX
from actors.durable.persist.shard import BatchPart, PartList, ShardState
from actors.durable.persist.shard_invariants import validate
from actors.runtime.errors import CorruptData
from actors.runtime.kernel import ActorClock
from actors.runtime.progress import TIME_MIN, Frontier

Parts: TypeAlias = tuple[BatchPart, ...]
LOOKS_MAX: Final = 16
"""Maximum number of times that a document is read because its lists are deleted meanwhile."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[BatchPart, ...])


def encode_list(parts: Parts) -> bytes:
    """Encode a part list."""
    return _encoder.encode(parts)


def decode_list(listed: PartList, data: bytes) -> Parts:
    """Decode and verify a part list. Raises `CorruptData` if any byte differs."""
    found = zlib.crc32(data)
    if len(data) != listed.bytes or found != listed.checksum:
        raise CorruptData(
            f"part list {listed.key}: {len(data)} bytes with crc32 {found:08x}, expected "
            f"{listed.bytes} bytes with {listed.checksum:08x}; restore the file from a backup",
            determinate=True,
        )
    try:
        parts = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptData(
            f"cannot decode part list {listed.key}: {error}", determinate=True
        ) from None
    folder = f"{listed.key.partition('/')[0]}/"
    if not parts or not all(part.key.startswith(folder) for part in parts if part.key):
        raise CorruptData(
            f"part list {listed.key} is damaged: it names {len(parts)} parts, not all of its own "
            "shard",
            determinate=True,
        )
    return parts


def unread(state: ShardState, beyond: Frontier = TIME_MIN) -> list[PartList]:
    """Return the lists that are still to be read, of batches with times beyond a frontier."""
    return [
        batch.listed
        for batch in state.batches
        if batch.listed is not None and not batch.is_whole and batch.upper > beyond
    ]


def with_parts(
    state: ShardState, known: Mapping[str, Parts], before: ShardState | None = None
) -> ShardState:
    """Return the state with the parts of its known lists. Validates all parts except those that
    `before` had. Raises `CorruptData`."""
    if state.is_whole:
        return state
    batches = tuple(
        batch
        if batch.listed is None or batch.is_whole
        else replace(batch, parts=known.get(batch.listed.key, ()))
        for batch in state.batches
    )
    state = replace(state, batches=batches)
    validate(state, before)
    return state


def parts_by_list(state: ShardState) -> dict[str, Parts]:
    """Return the contents of a state's lists, by key."""
    return {b.listed.key: b.parts for b in state.batches if b.listed is not None and b.parts}


def without_parts(state: ShardState) -> ShardState:
    """Return the state as it is stored, without the parts that lists describe."""
    if all(batch.listed is None for batch in state.batches):
        return state
    batches = tuple(
        batch if batch.listed is None else replace(batch, parts=()) for batch in state.batches
    )
    return replace(state, batches=batches)


def list_lost_error(shard: str, listed: PartList) -> CorruptData:
    """Return the error for a list that a document names but that does not exist."""
    return CorruptData(
        f"part list {listed.key} is missing although shard {shard} names it; restore the file "
        "from a backup",
        determinate=True,
    )


class PartLists:
    """Reads the part lists in one blob store."""

    def __init__(self, blob: BlobStore, clock: ActorClock) -> None:
        self._blob = blob
        self._clock = clock

    async def read(self, listed: PartList) -> Parts | None:
        """Return the contents of a list; None if it does not exist. Raises `CorruptData` and
        `StorageError`."""
        data = await self._blob.get(listed.key)
        if data is None:
            return None
        if len(data) <= LOOP_BYTES_MAX:
            return decode_list(listed, data)
        return await self._clock.run_blocking(lambda: decode_list(listed, data))

    async def read_all(
        self, state: ShardState, known: dict[str, Parts], beyond: Frontier = TIME_MIN
    ) -> PartList | None:
        """Add to `known` the lists of batches beyond a frontier. Return the first missing list;
        None if none is missing. Raises the same errors as `read`."""
        for listed in unread(state, beyond):
            if listed.key not in known:
                parts = await self.read(listed)
                # The reader has no lease yet, so a compaction may have deleted the list. The caller
                # reads the document again; only if it still names the missing list, it is
                # `CorruptData`.
                if parts is None:
                    return listed
                known[listed.key] = parts
        return None
