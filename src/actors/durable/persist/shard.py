"""The state of one shard and every way in which it may change: pure, no clock, no store.

A shard is one durable collection. Its state is one small document: its batches, its `since`, its
`upper`, its holds and leases. Each function here takes a state and returns the next one, raises, or
returns a refusal; `machine.py` makes the change durable by compare-and-set and counts `seqno`.

Rules
- Batches are contiguous: each starts where the one before ends, the last ends at `upper`.
- Times in a batch lie in its interval: ``lower <= t < upper``. Compaction raises times to
  `compact_to` only: so contents are exact at every ``t >= since``.
- ``since = min(holds and leases)``, and never goes back. A hold lasts until it is dropped; a lease
  until it expires. Without any, the since stays.
- A part that compaction replaced is *retired*: its blob may be deleted when no lease was taken
  before it was retired (``lease.seqno < retired.seqno``) and no reader of this process uses it.
- Each writer's last call is remembered (`IdempotencyToken`, an idempotency token), so that a retry
  after a lost answer is never done twice; the last copies by their uuids.
- A *list*, a blob of its own, describes the parts of a large batch. It is retired with its batch.
- A shard may have an *owner*: then only that dataflow appends. A dataflow that another one replaced
  may still run on a replica, and must not write by its old plan.
- A part may be written before its time is known, and be *placed* later: then all its rows lie at
  the time in its description (`at`), whatever the file says.
- A shard of a *table* is sealed up to the greater of its own upper and the tables' shared upper:
  appended times must not lie below either.

`shard_invariants` checks the invariants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from actors.durable.persist.statistics import ColumnStatistics
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import InvalidUsage, ReadBelowSince, ShardClosed, WriterFenced
from actors.runtime.progress import EMPTY, TIME_MAX, TIME_MIN, Frontier, ShardId, Time

FORMAT: Final = 3
"""Format of the state documents; older ones are read, and written as this."""
TABLES_UPPER: Final = "tables_upper"
"""Key of the tables' shared upper; also the `shard` of a mismatch on it."""
WRITERS_MAX: Final = 16
COPIES_MAX: Final = 16
"""Bound of remembered copies into one shard."""
PLACED: Final = 2
"""Version of parts whose rows all lie at a time that their file does not say."""

Bytes: TypeAlias = bytes


def shard_key(shard: ShardId) -> str:
    """Return the consensus key of a shard's state."""
    return f"shard/{shard}"


class BatchPart(msgspec.Struct, frozen=True):
    """Immutable updates: a Parquet blob, or inline as an Arrow IPC stream (then `key` is "")."""

    key: str
    rows: int
    bytes: int
    checksum: int
    """crc32 of the blob, or of the inline bytes."""
    inline: Bytes | None
    has_errors: bool
    time_min: Time
    time_max: Time
    version: int
    retracts: bool = True
    """True if a diff may be less than zero; False: surely none is."""
    # A placed file says 0, so that a reader that reads it from `at` on and raises times to its own
    # start finds it right.
    at: Time | None = None
    """Time of all rows; None: the part's own times count."""
    schema_id: int = 0
    """Number of the shard's schema that it was written with."""
    statistics: tuple[ColumnStatistics, ...] = ()
    """Statistics of its columns, as far as they are known."""


def placed(part: BatchPart, time: Time) -> BatchPart:
    """Return a part that was written at 0, with all its rows at `time`."""
    return replace(part, at=time, time_min=time, time_max=time, version=PLACED)


class PartList(msgspec.Struct, frozen=True):
    """A blob that describes the parts of a large batch, so that the document need not."""

    key: str
    bytes: int
    checksum: int
    """crc32 of the blob."""


class ShardBatch(msgspec.Struct, frozen=True):
    """All updates of one interval of times."""

    lower: Time
    upper: Frontier
    parts: tuple[BatchPart, ...]
    listed: PartList | None = None
    """The list that describes the parts outside of the document (`parts.py`)."""

    @property
    def is_whole(self) -> bool:
        """Return whether `parts` is complete: not so while its list is unread."""
        return self.listed is None or bool(self.parts)

    @property
    def bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Count the updates of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        """Return the bytes of the parts in the state document."""
        if self.listed is not None:
            return 0
        return sum(part.bytes for part in self.parts if part.inline is not None)


class ReaderLease(msgspec.Struct, frozen=True):
    """A reader's lease: pins the since and the blobs that it may reference."""

    since: Time
    seqno: int
    """The oldest state whose parts the reader may still use."""
    expires_ms: int


class RetiredBlob(msgspec.Struct, frozen=True):
    """A tombstone: a blob that no batch names since state `seqno`."""

    key: str
    seqno: int


class IdempotencyToken(msgspec.Struct, frozen=True):
    """The last call of one writer that changed this document."""

    call: int
    seqno: int


class CopyCommitted(msgspec.Struct, frozen=True):
    """An appended copy: its number of rows, at one time."""

    uuid: str
    rows: int
    time: Time


class ShardState(msgspec.Struct, frozen=True):
    """The state document of a shard."""

    version: int
    id: ShardId
    schema: TableSchema
    seqno: int
    since: Time
    upper: Frontier
    batches: tuple[ShardBatch, ...] = ()
    holds: dict[str, Time] = {}
    leases: dict[str, ReaderLease] = {}
    tables: bool = False
    """True if it is sealed up to the tables' shared upper, too."""
    retired: tuple[RetiredBlob, ...] = ()
    writers: dict[str, IdempotencyToken] = {}
    copies: tuple[CopyCommitted, ...] = ()
    """The last copies, oldest first."""
    born: int = 0
    """Seqno of its first state; it differs between shards that had the same name."""
    older: tuple[TableSchema, ...] = ()
    """Schemas before the present one, from number 0 on (`schemas.py`)."""
    owner: str = ""
    """The dataflow that alone may append; empty: any caller that knows the upper."""

    @property
    def schema_id(self) -> int:
        """Return the number of the present schema."""
        return len(self.older)

    def copied(self, uuid: str) -> CopyCommitted | None:
        """Return the copy of that uuid, if it was appended and is remembered."""
        return next((copy for copy in self.copies if copy.uuid == uuid), None)

    @property
    def rows(self) -> int:
        """Count the updates of all batches."""
        return sum(batch.rows for batch in self.batches)

    @property
    def inline_bytes(self) -> int:
        """Return the bytes of all inline parts."""
        return sum(batch.inline_bytes for batch in self.batches)

    @property
    def is_whole(self) -> bool:
        """Return whether all lists of parts were read."""
        return all(batch.is_whole for batch in self.batches)

    def live_keys(self) -> set[str]:
        """Return the keys of all blobs of the contents, lists included. The state must be whole."""
        assert self.is_whole, f"shard {self.id}: its lists of parts were not read"
        return self._live_keys()

    def _live_keys(self) -> set[str]:
        keys = {part.key for batch in self.batches for part in batch.parts if part.key}
        return keys | {batch.listed.key for batch in self.batches if batch.listed is not None}

    def blob_keys(self) -> set[str]:
        """Return the keys of all blobs that this state names, retired ones included. It must be
        whole."""
        return self.live_keys() | {retired.key for retired in self.retired}

    def own_keys(self) -> set[str]:
        """Return the keys in the document itself, and in lists that were read."""
        return self._live_keys() | {retired.key for retired in self.retired}


class TablesUpper(msgspec.Struct, frozen=True):
    """The shared upper of all tables."""

    version: int
    upper: Frontier
    writers: dict[str, IdempotencyToken] = {}


class NewShard(msgspec.Struct, frozen=True):
    """A shard to create."""

    id: ShardId
    schema: TableSchema
    since: Time = TIME_MIN
    upper: Frontier = TIME_MIN
    holds: dict[str, Time] = {}
    tables: bool = False


class ShardAppend(msgspec.Struct, frozen=True):
    """Updates of [lower, upper) for one shard; `holds` (shard, holder, since) move with it."""

    shard: ShardId
    lower: Frontier
    upper: Frontier
    parts: tuple[BatchPart, ...]
    holds: tuple[tuple[ShardId, str, Time], ...] = ()
    copied: CopyCommitted | None = None
    """The copy that this appends, to be remembered."""
    listed: PartList | None = None
    """List of the parts, where they are many; set by the `ShardAppender`, not by the caller."""
    owner: str = ""
    """The dataflow that appends; it counts where the shard has an owner."""
    schema: TableSchema | None = None
    """The schema that must be the shard's newest; None: any will do."""


class AppendCommitted(msgspec.Struct, frozen=True):
    """The append is durable; the uppers of its shards."""

    uppers: tuple[tuple[ShardId, Frontier], ...]


class UpperMismatch(msgspec.Struct, frozen=True):
    """The append was refused: the shard was not at the expected upper."""

    shard: ShardId
    expected: Frontier
    current: Frontier


# -- transitions ----------------------------------------------------------------------------------


def created(new: NewShard, writer: str, call: int) -> ShardState:
    """Return the first state. Raises `InvalidUsage` for a hold below the since."""
    for holder, since in new.holds.items():
        if since < new.since:
            raise InvalidUsage(
                f"shard {new.id}: hold {holder} at {since} lies below its since {new.since}"
            )
    state = ShardState(
        version=FORMAT,
        id=new.id,
        schema=new.schema,
        seqno=0,
        since=new.since,
        upper=new.upper,
        holds=dict(new.holds),
        tables=new.tables,
    )
    return replace(with_token(state, writer, call), seqno=0)


def with_token(state: ShardState, writer: str, call: int) -> ShardState:
    """Return the state with the writer's last call recorded."""
    return replace(state, writers=record_token(state.writers, writer, call, state.seqno + 1))


def record_token(
    writers: Mapping[str, IdempotencyToken], writer: str, call: int, seqno: int
) -> dict[str, IdempotencyToken]:
    """Return the writers with this call recorded; beyond `WRITERS_MAX` the longest silent are
    evicted."""
    kept = {**writers, writer: IdempotencyToken(call, seqno)}
    while len(kept) > WRITERS_MAX:
        # By (seqno, name): every process evicts the same one.
        del kept[min(kept, key=lambda name: (kept[name].seqno, name))]
    return kept


def is_applied(document: ShardState | TablesUpper, writer: str, call: int) -> bool:
    """Return whether this call of this writer has already changed the document."""
    found = document.writers.get(writer)
    return found is not None and found.call == call


def sealed(state: ShardState, tables: Frontier) -> Frontier:
    """Return the upper for readers; of a table, with the shared one."""
    return max(state.upper, tables) if state.tables else state.upper


def appended(
    state: ShardState, append: ShardAppend, floor: Frontier, writer: str, call: int
) -> ShardState | UpperMismatch:
    """Return the state with the updates of [lower, upper) appended, if the upper is `lower`.

    `floor`: no time may lie below it (the tables' shared upper, for a table). Raises `InvalidUsage`
    when the interval or a part does not fit, `ShardClosed` when the upper is the empty frontier,
    `WriterFenced` for a copy that was appended before, for an append of another than the owner, and
    for one that was made for other columns.
    """
    # Before the upper is compared: to a dataflow that was replaced a mismatch would look like a
    # rival replica, and it would go on by the plan that is gone.
    if state.owner and append.owner != state.owner:
        raise WriterFenced(
            f"append to {state.id}: {append.owner or 'its writer'} was replaced by {state.owner}",
            determinate=True,
        )
    if append.schema is not None and append.schema != state.schema:
        raise WriterFenced(
            f"append to {state.id}: its columns are {state.schema.ddl()} now, and not "
            f"{append.schema.ddl()}; nothing was written",
            determinate=True,
        )
    _check_interval(state, append)
    if state.upper != append.lower:
        return UpperMismatch(state.id, append.lower, state.upper)
    if append.copied is not None and state.copied(append.copied.uuid) is not None:
        raise WriterFenced(
            f"copy {append.copied.uuid} was appended to {state.id} before: ask for it again",
            determinate=True,
        )
    _check_parts(state, append, max(append.lower, floor))
    if not append.parts and state.batches:
        # Extend the last batch: the batches of an idle shard do not multiply.
        last = replace(state.batches[-1], upper=append.upper)
        batches = (*state.batches[:-1], last)
    else:
        fresh = ShardBatch(append.lower, append.upper, append.parts, append.listed)
        batches = (*state.batches, fresh)
    if append.copied is not None:
        state = replace(state, copies=(*state.copies, append.copied)[-COPIES_MAX:])
    return with_token(replace(state, batches=batches, upper=append.upper), writer, call)


def _check_interval(state: ShardState, append: ShardAppend) -> None:
    bounds = f"[{append.lower}, {append.upper})"
    if append.lower >= EMPTY and state.upper >= EMPTY:
        raise ShardClosed(f"append to {state.id}: it is closed, its upper is empty for ever")
    if not TIME_MIN <= append.lower <= append.upper <= EMPTY:
        raise InvalidUsage(f"append to {state.id}: {bounds} is not an interval of times")
    if append.lower == append.upper:
        what = "updates lie in" if append.parts else "nothing moves by"
        raise InvalidUsage(f"append to {state.id}: {what} {bounds}, which holds no time")


def _check_parts(state: ShardState, append: ShardAppend, lower: Time) -> None:
    known = state.blob_keys() if any(part.key for part in append.parts) else set()
    for part in append.parts:
        name = f"append to {state.id}: part {part.key or 'inline'}"
        if part.rows <= 0:
            raise InvalidUsage(f"{name} holds {part.rows} rows: leave it out")
        if not lower <= part.time_min <= part.time_max < append.upper:
            raise InvalidUsage(
                f"{name} holds {part.rows} rows at times {part.time_min} to {part.time_max}, the"
                f" interval is [{lower}, {append.upper})"
            )
        if part.key and not part.key.startswith(f"{state.id}/"):
            raise InvalidUsage(f"{name} was written for another shard")
        if part.key in known:
            raise InvalidUsage(f"{name} was appended before, or stands here twice")
        if not 0 <= part.schema_id <= state.schema_id:
            raise InvalidUsage(
                f"{name} has schema {part.schema_id}, the shard's newest is {state.schema_id}"
            )
        if part.key:
            known.add(part.key)


def with_hold(state: ShardState, holder: str, since: Time) -> ShardState:
    """Return the state with a hold taken or moved; an existing one stops at the since."""
    if since < state.since:
        if holder not in state.holds:
            raise ReadBelowSince(
                f"shard {state.id}: cannot hold {since} for {holder}, its since is {state.since}"
            )
        since = state.since
    if state.holds.get(holder) == since:
        return state
    return replace(state, holds={**state.holds, holder: since})


def without_hold(state: ShardState, holder: str) -> ShardState:
    """Return the state without the hold; no error if there is none."""
    if holder not in state.holds:
        return state
    holds = {name: since for name, since in state.holds.items() if name != holder}
    return replace(state, holds=holds)


def renewed(
    state: ShardState, own: Mapping[str, ReaderLease], gone: frozenset[str], now_ms: int
) -> ShardState:
    """Return the state with this process's leases `own`, those of others until they expire, without
    the `gone` ones; and advance the since.

    The last step of every change: only here the since advances, as only here all of its holders are
    known.
    """
    leases = {
        reader: lease
        for reader, lease in state.leases.items()
        if reader not in gone and reader not in own and lease.expires_ms > now_ms
    }
    for reader, lease in own.items():
        leases[reader] = replace(lease, since=max(lease.since, state.since))
    held = [*state.holds.values(), *(lease.since for lease in leases.values())]
    # A reader at the end of a closed shard holds the empty frontier, which pins no time: capped, so
    # that the last time stays readable.
    since = max(state.since, min(min(held, default=state.since), TIME_MAX))
    return replace(state, leases=leases, since=since)


def compact_to(state: ShardState, upper: Frontier) -> Time:
    """Return the time to which times of a batch that ends at `upper` may be raised."""
    # One below the since: a reader that listens from ``frontier == since`` still tells what it has
    # seen (``t < since``) from what it has not, although a merged batch holds both.
    return max(TIME_MIN, min(state.since, upper) - 1)


def compacted(
    state: ShardState,
    inputs: Sequence[ShardBatch],
    parts: tuple[BatchPart, ...],
    listed: PartList | None = None,
) -> ShardState | None:
    """Return the state with adjacent batches replaced by one of the same contents; None when they
    are no longer there."""
    starts = [i for i, batch in enumerate(state.batches) if batch.lower == inputs[0].lower]
    if not starts:
        return None
    first = starts[0]
    found = state.batches[first : first + len(inputs)]
    if len(found) != len(inputs):
        return None
    for wanted, batch in zip(inputs, found, strict=True):
        if (wanted.lower, wanted.parts) != (batch.lower, batch.parts):
            return None
    # The upper found, not the input's: an empty append may have extended the last batch meanwhile.
    merged = ShardBatch(inputs[0].lower, found[-1].upper, parts, listed)
    batches = (*state.batches[:first], merged, *state.batches[first + len(inputs) :])
    kept = {part.key for part in parts}
    keys = [part.key for batch in found for part in batch.parts if part.key not in kept]
    keys += [batch.listed.key for batch in found if batch.listed is not None]
    retired = tuple(RetiredBlob(key, state.seqno + 1) for key in keys if key)
    return replace(state, batches=batches, retired=(*state.retired, *retired))


def deletable(state: ShardState, own: frozenset[str]) -> tuple[str, ...]:
    """Return the retired blobs that no reader of another process can know; `own` leases do not
    count."""
    # Retired up to the oldest state that a lease refers to: no such state names the blob.
    held = min(
        (lease.seqno for reader, lease in state.leases.items() if reader not in own),
        default=state.seqno,
    )
    return tuple(retired.key for retired in state.retired if retired.seqno <= held)


def collected(state: ShardState, keys: frozenset[str]) -> ShardState:
    """Return the state without the retired blobs that were deleted."""
    if not any(retired.key in keys for retired in state.retired):
        return state
    retired = tuple(retired for retired in state.retired if retired.key not in keys)
    return replace(state, retired=retired)
