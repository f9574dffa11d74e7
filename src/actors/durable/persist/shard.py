"""The state of one shard and every way in which it may change. Pure: no clock, no store.

A shard is one durable collection. Its state is one small document: its batches, its `since`, its
`upper`, its holds and leases. Each function here takes a state and returns the next one, raises, or
returns a refusal. `machine.py` makes the change durable by compare-and-set and increments `seqno`.

Rules
- Batches are contiguous: each starts where the previous one ends, and the last ends at `upper`.
- Times in a batch are in its interval: ``lower <= t < upper``. Compaction raises times only to
  `compact_to`, so contents are exact at every ``t >= since``.
- ``since = min(holds and leases)``, and it never goes back. A hold lasts until it is dropped, a
  lease until it expires. Without holds and leases, the since stays.
- A part that compaction replaced is *retired*: its blob may be deleted if no lease was taken before
  it was retired (``lease.seqno < retired.seqno``) and no reader of this process uses it.
- Each writer's last call is remembered (`IdempotencyToken`), so that a retry after a lost answer
  never happens twice; the last copies are remembered by their uuids.
- A *list*, a blob of its own, describes the parts of a large batch. It is retired with its batch.
- A shard may have an *owner*, which is then the only dataflow that may append. A dataflow that was
  replaced may still run on a replica, and must not write according to its old plan.
- A part may be written before its time is known, and *placed* later. Then all its rows are at the
  time in its description (`at`), whatever the file says.
- The shard of a *table* is sealed up to the greater of its own upper and the tables' shared upper.
  Appended times must not be below either.

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
"""Format of the state documents. Older ones can be read, and are written in this format."""
TABLES_UPPER: Final = "tables_upper"
"""Key of the tables' shared upper; also the `shard` in a mismatch on it."""
WRITERS_MAX: Final = 16
COPIES_MAX: Final = 16
"""Maximum number of remembered copies into one shard."""
PLACED: Final = 2
"""Version of parts whose rows are all at one time that is not in their file."""

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
    """True if a diff may be negative; False if certainly none is."""
    # A placed file contains time 0, so that a reader that reads it from `at` on and raises times to
    # its own start gets the right result.
    at: Time | None = None
    """Time of all rows; None if the times in the part count."""
    schema_id: int = 0
    """Number of the shard's schema with which it was written."""
    statistics: tuple[ColumnStatistics, ...] = ()
    """Statistics of its columns, where known."""


def placed(part: BatchPart, time: Time) -> BatchPart:
    """Return a part that was written at time 0, with all its rows at `time`."""
    return replace(part, at=time, time_min=time, time_max=time, version=PLACED)


class PartList(msgspec.Struct, frozen=True):
    """A blob that describes the parts of a large batch, so that the document need not."""

    key: str
    bytes: int
    checksum: int
    """crc32 of the blob."""


class ShardBatch(msgspec.Struct, frozen=True):
    """All updates in one interval of times."""

    lower: Time
    upper: Frontier
    parts: tuple[BatchPart, ...]
    listed: PartList | None = None
    """The list that describes the parts outside the document (`part_lists.py`)."""

    @property
    def is_whole(self) -> bool:
        """Return whether `parts` is complete, which it is not while its list is unread."""
        return self.listed is None or bool(self.parts)

    @property
    def bytes(self) -> int:
        """Return the total size of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Return the total number of updates in all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        """Return the size of the parts that are in the state document."""
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
    """A copy that was appended: its number of rows, and its time."""

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
    """True for a table, which is sealed up to the tables' shared upper, too."""
    retired: tuple[RetiredBlob, ...] = ()
    writers: dict[str, IdempotencyToken] = {}
    copies: tuple[CopyCommitted, ...] = ()
    """The last copies, oldest first."""
    born: int = 0
    """Seqno of its first state. It distinguishes shards that had the same name."""
    older: tuple[TableSchema, ...] = ()
    """Previous schemas, from number 0 on (`schemas.py`)."""
    owner: str = ""
    """The only dataflow that may append; "" if any caller that knows the upper may."""

    @property
    def schema_id(self) -> int:
        """Return the number of the current schema."""
        return len(self.older)

    def copied(self, uuid: str) -> CopyCommitted | None:
        """Return the copy with this uuid if it was appended and is still remembered; else None."""
        return next((copy for copy in self.copies if copy.uuid == uuid), None)

    @property
    def rows(self) -> int:
        """Return the total number of updates in all batches."""
        return sum(batch.rows for batch in self.batches)

    @property
    def inline_bytes(self) -> int:
        """Return the total size of all inline parts."""
        return sum(batch.inline_bytes for batch in self.batches)

    @property
    def is_whole(self) -> bool:
        """Return whether all part lists have been read."""
        return all(batch.is_whole for batch in self.batches)

    def live_keys(self) -> set[str]:
        """Return the keys of all blobs of the contents, including lists. All lists must have been
        read."""
        assert self.is_whole, f"shard {self.id}: its lists of parts were not read"
        return self._live_keys()

    def _live_keys(self) -> set[str]:
        keys = {part.key for batch in self.batches for part in batch.parts if part.key}
        return keys | {batch.listed.key for batch in self.batches if batch.listed is not None}

    def blob_keys(self) -> set[str]:
        """Return the keys of all blobs that this state names, including retired ones. All lists
        must have been read."""
        return self.live_keys() | {retired.key for retired in self.retired}

    def own_keys(self) -> set[str]:
        """Return the keys in the document itself and in lists that have been read."""
        return self._live_keys() | {retired.key for retired in self.retired}


class TablesUpper(msgspec.Struct, frozen=True):
    """The upper shared by all tables."""

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
    """Updates of ``[lower, upper)`` for one shard. The `holds` (shard, holder, since) move with
    it."""

    shard: ShardId
    lower: Frontier
    upper: Frontier
    parts: tuple[BatchPart, ...]
    holds: tuple[tuple[ShardId, str, Time], ...] = ()
    copied: CopyCommitted | None = None
    """The copy that is appended, to be remembered."""
    listed: PartList | None = None
    """List of the parts, if there are many. Set by `ShardAppender`, not by the caller."""
    owner: str = ""
    """The dataflow that appends; checked if the shard has an owner."""
    schema: TableSchema | None = None
    """The schema that must be the shard's newest; None to accept any."""


class AppendCommitted(msgspec.Struct, frozen=True):
    """The append is durable. Contains the new uppers of its shards."""

    uppers: tuple[tuple[ShardId, Frontier], ...]


class UpperMismatch(msgspec.Struct, frozen=True):
    """The append was refused, because the shard was not at the expected upper."""

    shard: ShardId
    expected: Frontier
    current: Frontier


# -- transitions ----------------------------------------------------------------------------------


def created(new: NewShard, writer: str, call: int) -> ShardState:
    """Return the first state of a shard. Raises `InvalidUsage` for a hold below the since."""
    for holder, since in new.holds.items():
        if since < new.since:
            raise InvalidUsage(
                f"shard {new.id}: hold {holder} at {since} is below its since {new.since}"
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
    """Return the writers with this call recorded. If there are more than `WRITERS_MAX`, the least
    recent ones are evicted."""
    kept = {**writers, writer: IdempotencyToken(call, seqno)}
    while len(kept) > WRITERS_MAX:
        # By (seqno, name), so that every process evicts the same one.
        del kept[min(kept, key=lambda name: (kept[name].seqno, name))]
    return kept


def is_applied(document: ShardState | TablesUpper, writer: str, call: int) -> bool:
    """Return whether this call of this writer has already changed the document."""
    found = document.writers.get(writer)
    return found is not None and found.call == call


def sealed(state: ShardState, tables: Frontier) -> Frontier:
    """Return the upper for readers, including the shared upper for a table."""
    return max(state.upper, tables) if state.tables else state.upper


def appended(
    state: ShardState, append: ShardAppend, floor: Frontier, writer: str, call: int
) -> ShardState | UpperMismatch:
    """Return the state with the updates of [lower, upper) appended, if its upper is `lower`.

    No time may be below `floor` (the tables' shared upper, for a table). Raises `InvalidUsage` if
    the interval or a part does not fit; `ShardClosed` if the upper is the empty frontier;
    `WriterFenced` for a copy that was already appended, for an append by a dataflow other than the
    owner, and for one with other columns.
    """
    # Before the upper is compared: to a replaced dataflow, a mismatch would look like a competing
    # replica, and it would continue with the old plan.
    if state.owner and append.owner != state.owner:
        raise WriterFenced(
            f"append to {state.id}: {append.owner or 'its writer'} was replaced by {state.owner}",
            determinate=True,
        )
    if append.schema is not None and append.schema != state.schema:
        raise WriterFenced(
            f"append to {state.id}: its schema is now {state.schema.ddl()}, not "
            f"{append.schema.ddl()}; nothing was written",
            determinate=True,
        )
    _check_interval(state, append)
    if state.upper != append.lower:
        return UpperMismatch(state.id, append.lower, state.upper)
    if append.copied is not None and state.copied(append.copied.uuid) is not None:
        raise WriterFenced(
            f"copy {append.copied.uuid} was already appended to {state.id}: request it again",
            determinate=True,
        )
    _check_parts(state, append, max(append.lower, floor))
    if not append.parts and state.batches:
        # Extend the last batch, so that batches of an idle shard do not accumulate.
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
        raise ShardClosed(f"append to {state.id}: it is closed, its upper is the empty frontier")
    if not TIME_MIN <= append.lower <= append.upper <= EMPTY:
        raise InvalidUsage(f"append to {state.id}: {bounds} is not an interval of times")
    if append.lower == append.upper:
        what = "updates in" if append.parts else "nothing moves by"
        raise InvalidUsage(f"append to {state.id}: {what} {bounds}, which holds no time")


def _check_parts(state: ShardState, append: ShardAppend, lower: Time) -> None:
    known = state.blob_keys() if any(part.key for part in append.parts) else set()
    for part in append.parts:
        name = f"append to {state.id}: part {part.key or 'inline'}"
        if part.rows <= 0:
            raise InvalidUsage(f"{name} has {part.rows} rows: leave it out")
        if not lower <= part.time_min <= part.time_max < append.upper:
            raise InvalidUsage(
                f"{name} has {part.rows} rows at times {part.time_min} to {part.time_max}, outside "
                f"the interval [{lower}, {append.upper})"
            )
        if part.key and not part.key.startswith(f"{state.id}/"):
            raise InvalidUsage(f"{name} was written for another shard")
        if part.key in known:
            raise InvalidUsage(f"{name} was already appended, or is listed twice")
        if not 0 <= part.schema_id <= state.schema_id:
            raise InvalidUsage(
                f"{name} has schema {part.schema_id}, but the shard's newest is {state.schema_id}"
            )
        if part.key:
            known.add(part.key)


def with_hold(state: ShardState, holder: str, since: Time) -> ShardState:
    """Return the state with a hold taken or moved. An existing hold stops at the since."""
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
    """Return the state without the hold, unchanged if there is none."""
    if holder not in state.holds:
        return state
    holds = {name: since for name, since in state.holds.items() if name != holder}
    return replace(state, holds=holds)


def renewed(
    state: ShardState, own: Mapping[str, ReaderLease], gone: frozenset[str], now_ms: int
) -> ShardState:
    """Return the state with this process's leases `own`, with others' leases until they expire, and
    without the `gone` ones; then advance the since.

    This is the last step of every change. The since advances only here, because only here are all
    its holders known.
    """
    leases = {
        reader: lease
        for reader, lease in state.leases.items()
        if reader not in gone and reader not in own and lease.expires_ms > now_ms
    }
    for reader, lease in own.items():
        leases[reader] = replace(lease, since=max(lease.since, state.since))
    held = [*state.holds.values(), *(lease.since for lease in leases.values())]
    # A reader at the end of a closed shard holds the empty frontier, which pins no time. It is
    # capped, so that the last time stays readable.
    since = max(state.since, min(min(held, default=state.since), TIME_MAX))
    return replace(state, leases=leases, since=since)


def compact_to(state: ShardState, upper: Frontier) -> Time:
    """Return the time to which the times of a batch that ends at `upper` may be raised."""
    # One below the since, so that a reader that listens from ``frontier == since`` can still
    # distinguish what it has seen (``t < since``) from what it has not, even if a merged batch
    # contains both.
    return max(TIME_MIN, min(state.since, upper) - 1)


def compacted(
    state: ShardState,
    inputs: Sequence[ShardBatch],
    parts: tuple[BatchPart, ...],
    listed: PartList | None = None,
) -> ShardState | None:
    """Return the state with adjacent batches replaced by one with the same contents; None if they
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
    # The current upper, not the input's: an empty append may have extended the last batch
    # meanwhile.
    merged = ShardBatch(inputs[0].lower, found[-1].upper, parts, listed)
    batches = (*state.batches[:first], merged, *state.batches[first + len(inputs) :])
    kept = {part.key for part in parts}
    keys = [part.key for batch in found for part in batch.parts if part.key not in kept]
    keys += [batch.listed.key for batch in found if batch.listed is not None]
    retired = tuple(RetiredBlob(key, state.seqno + 1) for key in keys if key)
    return replace(state, batches=batches, retired=(*state.retired, *retired))


def deletable(state: ShardState, own: frozenset[str]) -> tuple[str, ...]:
    """Return the retired blobs that no reader of another process can know. The leases in `own` do
    not count."""
    # Only blobs retired by the oldest state that a lease refers to: neither that state nor a later
    # one names them.
    held = min(
        (lease.seqno for reader, lease in state.leases.items() if reader not in own),
        default=state.seqno,
    )
    return tuple(retired.key for retired in state.retired if retired.seqno <= held)


def collected(state: ShardState, keys: frozenset[str]) -> ShardState:
    """Return the state without the retired blobs in `keys`, which were deleted."""
    if not any(retired.key in keys for retired in state.retired):
        return state
    retired = tuple(retired for retired in state.retired if retired.key not in keys)
    return replace(state, retired=retired)
