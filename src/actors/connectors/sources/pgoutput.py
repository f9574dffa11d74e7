"""Decodes PostgreSQL's logical replication messages (pgoutput, version 1), many at a time. Pure.

Theory of operation. The messages of a batch are in one buffer (`CopyFrames`). numpy reads the same
field of all messages at once, so a single message costs no Python code of its own. `walk` goes
through the tuples column by column, all rows in parallel. A column is then the buffer plus offsets,
from which Arrow copies the values (`column`). Only rare messages (a relation's description, a
truncate) are decoded one by one.

Frames of the stream are XLogData (``w``, start, end, time, message) and keepalives (``k``). No
state is kept between batches, and values stay text.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from actors.connectors.sources.postgres_copy import CopyFrames
from actors.connectors.sources.postgres_names import qualified_name
from actors.model.pgwire.encoded_values import (
    ByteValues,
    Lengths,
    Places,
    RowMask,
    be16,
    be32,
    be64,
    take_values,
)
from actors.model.pgwire.type_oids import MS_TO_2000
from actors.runtime.errors import RemoteProtocolError

XLOG_HEADER_BYTES: Final = 25

BEGIN, COMMIT, RELATION, TRUNCATE = ord("B"), ord("C"), ord("R"), ord("T")
INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")
OLD, KEY, NEW = ord("O"), ord("K"), ord("N")
NULL, UNCHANGED = ord("n"), ord("u")
_XLOG, _KEEPALIVE = ord("w"), ord("k")
_KNOWN = frozenset(b"BCRTIUDOYM")


class PgRelationColumn(msgspec.Struct, frozen=True):
    """A column as the server describes it."""

    name: str
    type_oid: int
    type_modifier: int
    in_key: bool


class PgRelation(msgspec.Struct, frozen=True):
    """A table as the server describes it: before its first change, and again after the table is
    altered."""

    oid: int
    name: str
    """Name with schema: ``public.accounts``."""
    identity: str
    """Replica identity: ``d`` (default, the primary key), ``i`` (an index), ``f`` (full) or ``n``
    (nothing)."""
    columns: tuple[PgRelationColumn, ...]


class MessageBatch(msgspec.Struct):
    """A batch of messages: the type, start and end of each."""

    data: ByteValues
    tags: ByteValues
    places: Places
    ends: Places

    def __len__(self) -> int:
        return len(self.tags)

    def slice(self, start: int, stop: int) -> MessageBatch:
        """Return the messages from index `start` to ``stop - 1``."""
        cut = slice(start, stop)
        return MessageBatch(self.data, self.tags[cut], self.places[cut], self.ends[cut])


class PrimaryKeepalive(msgspec.Struct, frozen=True):
    """A keepalive of the server, which has sent everything before `end`."""

    end: int
    wants_reply: bool


class CommitBatch(msgspec.Struct):
    """The commits in a batch: their indices, the LSN after each, and its time (Unix ms)."""

    places: Places
    ends: Places
    times_ms: Places


class TupleValues(msgspec.Struct):
    """One column of many tuples: the kind of each value, and the start and end of its text."""

    kinds: ByteValues
    starts: Places
    ends: Places

    @property
    def absent(self) -> RowMask:
        """Return a mask of the values without text: NULL or unchanged."""
        mask: RowMask = (self.kinds == NULL) | (self.kinds == UNCHANGED)
        return mask

    @property
    def lengths(self) -> Lengths:
        """Return the length of each text; -1 for a value without text."""
        return np.where(self.absent, -1, self.ends - self.starts)


def messages(frames: CopyFrames) -> MessageBatch:
    """Return the messages in these frames, without keepalives. Raises `RemoteProtocolError`."""
    kinds = frames.data[frames.starts]
    logged = kinds == _XLOG
    if not bool((logged | (kinds == _KEEPALIVE)).all()):
        strange = int(kinds[~logged & (kinds != _KEEPALIVE)][0])
        raise RemoteProtocolError(
            f"unexpected frame of type {chr(strange)!r} in a replication stream"
        )
    places = frames.starts[logged] + XLOG_HEADER_BYTES
    tags = frames.data[places]
    unknown = [tag for tag in np.unique(tags).tolist() if tag not in _KNOWN]
    if unknown:
        raise RemoteProtocolError(
            f"unexpected message of type {chr(unknown[0])!r} in protocol version 1"
        )
    return MessageBatch(frames.data, tags, places, frames.ends[logged])


def is_commit(frames: CopyFrames) -> RowMask:
    """Return a mask of the frames that end a transaction."""
    # A keepalive is shorter than the header, so the index is limited to the buffer.
    last = np.minimum(frames.starts + XLOG_HEADER_BYTES, len(frames.data) - 1)
    mask: RowMask = (frames.data[frames.starts] == _XLOG) & (frames.data[last] == COMMIT)
    return mask


def late_ms(frames: CopyFrames, index: int) -> int:
    """Return the delay between a commit and its sending, by the server's clock."""
    start = frames.starts[index : index + 1]
    sent = be64(frames.data, start + 17)
    committed = be64(frames.data, start + XLOG_HEADER_BYTES + 18)
    return int((sent - committed)[0]) // 1000


def keepalive(frames: CopyFrames) -> PrimaryKeepalive | None:
    """Return the newest keepalive in these frames; None if there is none. It wants a reply if any
    of them does."""
    (at,) = np.nonzero(frames.data[frames.starts] == _KEEPALIVE)
    if not len(at):
        return None
    starts = frames.starts[at]
    return PrimaryKeepalive(
        end=int(be64(frames.data, starts[-1:] + 1)[0]),
        wants_reply=bool((frames.data[starts + 17] != 0).any()),
    )


def received(frames: CopyFrames) -> int:
    """Return the newest log position in these frames; 0 if there are no frames."""
    if not len(frames):
        return 0
    # XLogData starts with the start of its record, a keepalive with the end of the server's log.
    return int(be64(frames.data, frames.starts + 1).max())


def begins(batch: MessageBatch) -> tuple[Places, Places]:
    """Return the indices of the begins in a batch, and the LSN of each one's commit."""
    (at,) = np.nonzero(batch.tags == BEGIN)
    return at, be64(batch.data, batch.places[at] + 1)


def xids(batch: MessageBatch) -> set[int]:
    """Return the ids (modulo 2^32) of the transactions that begin in the batch."""
    at = batch.tags == BEGIN
    return set((be32(batch.data, batch.places[at] + 17) & 0xFFFFFFFF).tolist())


def commits(batch: MessageBatch) -> CommitBatch:
    """Return all commits of a batch."""
    (at,) = np.nonzero(batch.tags == COMMIT)
    # Layout: type, flags, LSN, LSN after it, time.
    places = batch.places[at]
    times = be64(batch.data, places + 18) // 1000 + MS_TO_2000
    return CommitBatch(at, be64(batch.data, places + 10), times)


def relation_oids(batch: MessageBatch) -> Places:
    """Return the relation oid of each insert, update and delete. Meaningless for other messages."""
    return be32(batch.data, batch.places + 1) & 0xFFFFFFFF


def relation(batch: MessageBatch, index: int) -> PgRelation:
    """Parse the relation message at this index of the batch. Raises `RemoteProtocolError`."""
    start, end = int(batch.places[index]), int(batch.ends[index])
    body = batch.data[start + 1 : end].tobytes()
    try:
        oid = int.from_bytes(body[:4], "big")
        schema, table, rest = body[4:].split(b"\0", 2)
        identity, count = chr(rest[0]), int.from_bytes(rest[1:3], "big")
        rest = rest[3:]
        columns = []
        for _ in range(count):
            name, behind = rest[1:].split(b"\0", 1)
            columns.append(
                PgRelationColumn(
                    name=name.decode(),
                    type_oid=int.from_bytes(behind[:4], "big"),
                    type_modifier=int.from_bytes(behind[4:8], "big", signed=True),
                    in_key=bool(rest[0] & 1),
                )
            )
            rest = behind[8:]
    except (IndexError, ValueError) as error:
        raise RemoteProtocolError(f"invalid description of a relation: {error}") from None
    whole = qualified_name(schema.decode() or "pg_catalog", table.decode())
    return PgRelation(oid, whole, identity, tuple(columns))


def truncated(batch: MessageBatch, index: int) -> tuple[int, ...]:
    """Return the oids of the relations that the truncate at this index of the batch empties."""
    start, end = int(batch.places[index]), int(batch.ends[index])
    oids = batch.data[start + 6 : end].tobytes()
    return tuple(int.from_bytes(oids[at : at + 4], "big") for at in range(0, len(oids), 4))


def walk(data: ByteValues, places: Places, columns: int) -> tuple[list[TupleValues], Places]:
    """Decode the tuples that start at these places, column by column. Return the columns, and the
    end of each tuple.

    Raises `RemoteProtocolError` for a tuple with another number of columns, or one that exceeds the
    buffer.
    """
    try:
        return _walk(data, places, columns)
    except IndexError:  # numpy checks bounds, so that not every read needs a check
        raise RemoteProtocolError("a tuple ends beyond its batch") from None


def _walk(data: ByteValues, places: Places, columns: int) -> tuple[list[TupleValues], Places]:
    counts = be16(data, places)
    if len(counts) and not bool((counts == columns).all()):
        wrong = int(counts[counts != columns][0])
        raise RemoteProtocolError(f"a tuple has {wrong} columns, its relation {columns}")
    at = places + 2
    values = []
    for _ in range(columns):
        kinds = data[at]
        lengths = be32(data, at + 1)
        none = (kinds == NULL) | (kinds == UNCHANGED)
        starts = at + 5
        # NULL and unchanged values have a kind but no length.
        if none.any():
            lengths[none] = 0
            starts = np.where(none, at + 1, starts)
        _check(starts, lengths, data)
        at = starts + lengths
        values.append(TupleValues(kinds, starts, at))
    return values, at


def _check(starts: Places, lengths: Places, data: ByteValues) -> None:
    if len(lengths) and (int(lengths.min()) < 0 or int((starts + lengths).max()) > len(data)):
        raise RemoteProtocolError("a value ends beyond its batch")


def walk_copied(data: ByteValues, places: Places, columns: int) -> list[TupleValues]:
    """Decode the tuples in COPY's binary format that start at these places, column by column.

    Raises `RemoteProtocolError`.
    """
    counts = be16(data, places)
    if len(counts) and not bool((counts == columns).all()):
        raise RemoteProtocolError(f"a row of COPY does not have {columns} columns")
    at = places + 2
    values = []
    for _ in range(columns):
        lengths = be32(data, at)
        none = lengths < 0
        starts = at + 4
        if none.any():
            lengths[none] = 0
        _check(starts, lengths, data)
        at = starts + lengths
        values.append(TupleValues(np.where(none, NULL, 0).astype(np.uint8), starts, at))
    return values


def column(data: ByteValues, values: TupleValues) -> pa.Array:
    """Return the texts of a column as large_binary, NULL for values without text. Their starts must
    be in ascending order."""
    absent = values.absent
    lengths = values.ends - values.starts
    return take_values(data, values.starts, lengths, absent if absent.any() else None)
