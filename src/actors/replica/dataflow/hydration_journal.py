"""Checkpoints of the hydration of an additive view, whose contents are computed chunk by chunk.

Theory of operation. A plan is *additive* if its output over a union of inputs is the union of its
outputs: projections, filters and UNION ALL. The files of its imports are grouped into chunks. Each
chunk is computed on its own, and its parts are recorded in a document (the note) before the next
chunk starts. After a crash, hydration resumes after the last recorded chunk. The append of the
contents deletes the note in the same compare-and-set.

A note is valid for one `as_of` and one list of chunks, each named by the files and rows it reads.
If compaction has replaced any of them, a recorded part is gone, or the note is damaged, hydration
starts over. Views with a hidden state or a join are not additive and always start over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.durable.persist import BatchPart, CompareAndSet, PersistClient
from actors.durable.persist.documents import sealed, unsealed
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    ExpandRows,
    FilterRows,
    GenerateRows,
    NamedInput,
    Node,
    SelectColumns,
    UnionRows,
    WeighRows,
)
from actors.model.plan.jobs import BucketObject, JobRows
from actors.runtime.errors import CorruptData
from actors.runtime.progress import ShardId, Time


class HydrationNote(msgspec.Struct, frozen=True):
    """Checkpoint of a hydration: its chunks by name, and the output's parts for each finished
    chunk."""

    as_of: Time
    chunks: tuple[str, ...]
    done: tuple[tuple[BatchPart, ...], ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HydrationNote)


def note_key(shard: ShardId) -> str:
    """Return the key of the document that holds the note for an output's shard."""
    return f"hydration/{shard}"


def is_additive(plan: DeltaPlan) -> bool:
    """Return whether the plan may be computed in chunks of its inputs."""
    return not plan.hidden and all(_linear(stratum.node) for stratum in plan.strata)


def _linear(node: Node) -> bool:
    match node:
        case NamedInput():
            return True
        case (
            FilterRows()
            | SelectColumns()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
        ):
            return _linear(node.input)
        case UnionRows():
            return all(_linear(child) for child in node.inputs)
        case _:
            return False


def split_into_chunks(inputs: Sequence[JobRows], bytes_max: int) -> list[list[JobRows]]:
    """Return the contents split into chunks, each with one `JobRows` for each input.

    A chunk contains files of one input, up to `bytes_max` bytes but at least one file. The last
    chunk contains the rows that are not in files. Blocks to read the sizes of files.
    """
    nothing = [
        msgspec.structs.replace(rows, files=(), objects=(), arrow=None, arrow_file=None)
        for rows in inputs
    ]
    made: list[list[JobRows]] = []
    for index, rows in enumerate(inputs):
        taken: list[str | BucketObject] = []
        size = 0
        for file in (*rows.files, *rows.objects, None):
            bytes_ = 0 if file is None else _bytes_of(file)
            if taken and (file is None or size + bytes_ > bytes_max):
                chunk = list(nothing)
                chunk[index] = msgspec.structs.replace(
                    nothing[index],
                    files=tuple(each for each in taken if isinstance(each, str)),
                    objects=tuple(each for each in taken if isinstance(each, BucketObject)),
                )
                made.append(chunk)
                taken, size = [], 0
            if file is not None:
                taken.append(file)
                size += bytes_
    rest = [msgspec.structs.replace(rows, files=(), objects=()) for rows in inputs]
    if not made or any(rows.arrow is not None or rows.arrow_file is not None for rows in rest):
        made.append(rest)
    return made


def _bytes_of(file: str | BucketObject) -> int:
    return file.bytes if isinstance(file, BucketObject) else Path(file).stat().st_size


def chunk_name(chunk: Sequence[JobRows]) -> str:
    """Return a digest of the files and rows that a chunk reads. Blocks."""
    digest = hashlib.sha256()
    for index, rows in enumerate(chunk):
        # Compaction writes new files, so a file's name identifies its contents.
        keys = (*rows.files, *(part.key for part in rows.objects))
        names = " ".join(Path(key).name for key in keys)
        digest.update(f"{index} {rows.upper} {names}\n".encode())
        digest.update(rows.arrow or b"")
        if rows.arrow_file is not None:
            digest.update(Path(rows.arrow_file).read_bytes())
    return digest.hexdigest()


class HydrationJournal:
    """Stores the note of one hydration."""

    def __init__(self, persist: PersistClient, shard: ShardId) -> None:
        self._persist = persist
        self._shard = shard
        self._seqno: int | None = None
        """Seqno of the stored note; None if there is none."""

    async def load(self, as_of: Time, chunks: tuple[str, ...]) -> HydrationNote:
        """Return the note to resume from, or an empty one if none is usable. Raise
        `StorageError`."""
        fresh = HydrationNote(as_of, chunks)
        head = await self._persist.head(note_key(self._shard))
        self._seqno = None if head is None else head.seqno
        if head is None:
            return fresh
        try:
            found = _DECODER.decode(unsealed(note_key(self._shard), head.data))
        except (msgspec.DecodeError, UnicodeDecodeError, CorruptData):
            return fresh
        parts = [part for done in found.done for part in done]
        # Claimed parts do not become orphans while this process hydrates. The claim fails if the
        # grace period for orphans has passed and a part is gone.
        if not await self._persist.claim(self._shard, parts):
            return fresh
        if (found.as_of, found.chunks) != (as_of, chunks):
            await self._persist.discard_parts(parts)
            return fresh
        return found

    async def save(self, note: HydrationNote) -> bool:
        """Store the note. Return False if another service hydrates the same shard."""
        cas = CompareAndSet(note_key(self._shard), self._seqno, sealed(_ENCODER.encode(note)))
        if not await self._persist.compare_and_set([cas]):
            return False
        self._seqno = 0 if self._seqno is None else self._seqno + 1
        return True

    def gone(self) -> list[CompareAndSet]:
        """Return the changes that delete the note."""
        if self._seqno is None:
            return []
        return [CompareAndSet(note_key(self._shard), self._seqno, None)]

    async def drop(self) -> None:
        """Delete the note now."""
        if self.gone() and await self._persist.compare_and_set(self.gone()):
            self._seqno = None
