"""Rows cut into pieces that fit a message, each an Arrow IPC stream. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from actors.plan.updates import stream_of


class ResultPiece(msgspec.Struct, frozen=True, gc=False):
    """Rows of a result as an Arrow IPC stream; `last`: nothing follows."""

    arrow: bytes
    rows: int
    last: bool


def pieces(
    batches: Iterator[pa.RecordBatch], opening: bytes, bytes_max: int
) -> Iterator[ResultPiece]:
    """Yield a result in pieces, at least one, which may be without rows. A piece has at most
    `bytes_max` bytes unless a single row has more."""
    gathered: list[pa.RecordBatch] = []
    size = rows = 0
    room = max(1, bytes_max - len(opening) - _OVERHEAD)
    for batch in batches:
        for part in _cut(batch, room):
            bytes_ = part.nbytes + _OVERHEAD
            if gathered and size + bytes_ > room:
                yield ResultPiece(stream_of(opening, gathered), rows, last=False)
                gathered, size, rows = [], 0, 0
            gathered.append(part)
            size += bytes_
            rows += part.num_rows
    yield ResultPiece(stream_of(opening, gathered), rows, last=True)


_OVERHEAD = 1_024
"""Bytes of one batch in a stream, beside its data."""


def _cut(batch: pa.RecordBatch, room: int) -> Iterator[pa.RecordBatch]:
    size = batch.nbytes + _OVERHEAD
    if size <= room or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), room)
    yield from _cut(batch.slice(half), room)
