"""The first contents of an additive view, chunk by chunk: what was done is not done again.

Theory of operation. A plan is *additive* when its output over a union of inputs is the union of
its outputs: projections, filters and UNION ALL. Its imports' files are cut into chunks; each is
computed alone, and its parts are noted in a document before the next is begun. A process that
is killed goes on behind the last chunk noted. The append that makes the view takes the note
away in the same compare-and-set.

Rules. A note is of one `as_of` and one list of chunks, each named by the files and rows it
reads: when compaction has replaced any of them, or a noted part is gone, or the note is damaged,
nothing of it is used.
Noted parts are nobody's orphans while a process hydrates; a service that stays away for longer
than the grace loses them, and computes them again.

What it does not do: views with a hidden state or a join are computed whole, and again from the
start after a kill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.errors import Corrupt
from actors.persist import Cas, Part, PersistClient
from actors.persist.documents import sealed, unsealed
from actors.plan.delta import (
    Consolidate,
    DeltaPlan,
    Expand,
    Generate,
    Input,
    Node,
    Select,
    Union,
    Weigh,
    Where,
)
from actors.plan.jobs import Rows
from actors.progress import ShardId, Time


class Note(msgspec.Struct, frozen=True):
    """How far a hydration is: its chunks by name, and the output's parts of those done."""

    as_of: Time
    chunks: tuple[str, ...]
    done: tuple[tuple[Part, ...], ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Note)


def note_key(shard: ShardId) -> str:
    """Names the document with the note of an output's shard."""
    return f"hydration/{shard}"


def additive(plan: DeltaPlan) -> bool:
    """Whether the plan may be computed in chunks of its inputs."""
    return not plan.hidden and all(_linear(stratum.node) for stratum in plan.strata)


def _linear(node: Node) -> bool:
    match node:
        case Input():
            return True
        case Where() | Select() | Weigh() | Expand() | Generate() | Consolidate():
            return _linear(node.input)
        case Union():
            return all(_linear(child) for child in node.inputs)
        case _:
            return False


def chunks_of(sources: Sequence[Rows], bytes_max: int) -> list[list[Rows]]:
    """The contents cut into chunks, each a `Rows` a source: files up to `bytes_max` bytes, at
    least one; last the rows that are in no file. Blocks (it asks for the files' sizes)."""
    nothing = [
        msgspec.structs.replace(rows, files=(), arrow=None, arrow_file=None) for rows in sources
    ]
    made: list[list[Rows]] = []
    for index, rows in enumerate(sources):
        taken: list[str] = []
        size = 0
        for file in (*rows.files, None):
            bytes_ = 0 if file is None else Path(file).stat().st_size
            if taken and (file is None or size + bytes_ > bytes_max):
                chunk = list(nothing)
                chunk[index] = msgspec.structs.replace(nothing[index], files=tuple(taken))
                made.append(chunk)
                taken, size = [], 0
            if file is not None:
                taken.append(file)
                size += bytes_
    rest = [msgspec.structs.replace(rows, files=()) for rows in sources]
    if not made or any(rows.arrow is not None or rows.arrow_file is not None for rows in rest):
        made.append(rest)
    return made


def chunk_name(chunk: Sequence[Rows]) -> str:
    """What a chunk reads, as a digest. Blocks."""
    digest = hashlib.sha256()
    for index, rows in enumerate(chunk):
        names = " ".join(Path(file).name for file in rows.files)
        digest.update(f"{index} {rows.upper} {names}\n".encode())
        digest.update(rows.arrow or b"")
        if rows.arrow_file is not None:
            digest.update(Path(rows.arrow_file).read_bytes())
    return digest.hexdigest()


class Notes:
    """The note of one hydration, as it is kept."""

    def __init__(self, persist: PersistClient, shard: ShardId) -> None:
        self._persist = persist
        self._shard = shard
        self._seqno: int | None = None

    async def load(self, as_of: Time, chunks: tuple[str, ...]) -> Note:
        """The note to go on from, empty when there is none that fits. Raises `StorageError`."""
        fresh = Note(as_of, chunks)
        head = await self._persist.head(note_key(self._shard))
        self._seqno = None if head is None else head.seqno
        if head is None:
            return fresh
        try:
            found = _DECODER.decode(unsealed(note_key(self._shard), head.data))
        except (msgspec.DecodeError, UnicodeDecodeError, Corrupt):
            return fresh
        parts = [part for done in found.done for part in done]
        if not await self._persist.claim(self._shard, parts):
            return fresh
        if (found.as_of, found.chunks) != (as_of, chunks):
            await self._persist.discard_parts(parts)
            return fresh
        return found

    async def save(self, note: Note) -> bool:
        """Keeps the note; False when another hydrates the same shard."""
        cas = Cas(note_key(self._shard), self._seqno, sealed(_ENCODER.encode(note)))
        if not await self._persist.compare_and_set([cas]):
            return False
        self._seqno = 0 if self._seqno is None else self._seqno + 1
        return True

    def gone(self) -> list[Cas]:
        """What takes the note away."""
        if self._seqno is None:
            return []
        return [Cas(note_key(self._shard), self._seqno, None)]

    async def drop(self) -> None:
        """Takes it away now."""
        if self.gone() and await self._persist.compare_and_set(self.gone()):
            self._seqno = None
