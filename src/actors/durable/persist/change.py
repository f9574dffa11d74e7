"""Changes of documents: their types, and the changes that append, create and drop. Pure.

A change reads documents (`ShardDocuments`) and returns their successors (`ChangeOutcome`). It may
run several times, which `ChangeAttempts` counts. Each change covers all its documents at once, so
after a crash all shards are appended to, created or dropped, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from actors.durable.persist.shard import (
    TABLES_UPPER,
    WRITERS_MAX,
    AppendCommitted,
    ShardAppend,
    ShardState,
    TablesUpper,
    UpperMismatch,
    appended,
    is_applied,
    record_token,
    with_hold,
)
from actors.runtime.errors import InvalidUsage, PenstockError, StorageError, UnknownObject
from actors.runtime.progress import EMPTY, TIME_MIN, Frontier, ShardId, Time
from actors.runtime.spans import OpenSpan
from actors.runtime.tracing.append_traces import AppendTraceIndex

R = TypeVar("R")

ATTEMPTS_MAX = 8
"""Maximum number of attempts of one change with an indeterminate failure, and of reading back after
one."""


class ShardDocuments(msgspec.Struct, frozen=True):
    """The documents that a change reads. An absent shard is None."""

    shards: Mapping[ShardId, ShardState | None]
    tables: TablesUpper
    uncertain: bool = False
    """True if an earlier attempt of this change failed indeterminately, so these documents may
    contain it."""

    def shard(self, shard: ShardId) -> ShardState:
        """Return the state of a shard. Raises `UnknownObject`."""
        state = self.shards[shard]
        if state is None:
            raise UnknownObject(f"no shard {shard}")
        return state


class ChangeOutcome(Generic[R]):
    """The new documents (None: deleted) and the answer to the caller. Without documents, nothing is
    written."""

    def __init__(
        self,
        result: R,
        shards: Mapping[ShardId, ShardState | None] | None = None,
        tables: TablesUpper | None = None,
        *,
        floored: bool = False,
    ) -> None:
        """Make an outcome. `floored` means that it is valid only while the tables' upper is
        unchanged."""
        self.result = result
        self.shards = dict(shards or {})
        self.tables = tables
        self.floored = floored

    @property
    def writes(self) -> bool:
        """Return whether any document changes."""
        return bool(self.shards) or self.tables is not None


Change = Callable[[ShardDocuments], ChangeOutcome[R]]


class SeqnoMismatch(PenstockError):
    """Internal to this package: an extra key was not at its expected seqno."""


class ChangeAttempts:
    """Counts the failed attempts of one change."""

    def __init__(self, fresh: bool) -> None:
        self.uncertain = False
        """True if an attempt failed indeterminately."""
        self.fresh = fresh
        """True if the documents were read within the call, or no other process writes them."""
        self.failures = 0
        """Number of attempts that failed indeterminately."""
        self.late = 0
        """Number of attempts that lost the compare-and-set to another process."""

    def failed(self, names: Sequence[ShardId], error: StorageError) -> None:
        """Count an indeterminate failure. Raises `StorageError` if it was the last attempt."""
        self.failures += 1
        # Indeterminate, because any of the attempts may have landed.
        if self.failures == ATTEMPTS_MAX:
            raise StorageError(
                f"gave up changing {', '.join(names)} after {ATTEMPTS_MAX} attempts: the store "
                f"failed: {error}",
                determinate=False,
            ) from error


# -- appends over several shards -------------------------------------------------------------------


def check_append(
    appends: Sequence[ShardAppend], tables_upper: tuple[Frontier, Frontier] | None
) -> None:
    """Raise `InvalidUsage` for a call that can never be valid."""
    shards = [append.shard for append in appends]
    if not shards and tables_upper is None:
        raise InvalidUsage("an append needs at least one shard, or the tables' upper")
    if len(set(shards)) < len(shards):
        raise InvalidUsage(f"an append names a shard twice: {', '.join(sorted(shards))}")
    if tables_upper is not None:
        expected, new = tables_upper
        if not TIME_MIN <= expected < new <= EMPTY:
            raise InvalidUsage(f"the tables' upper cannot go from {expected} to {new}")


def append_all(
    documents: ShardDocuments,
    appends: Sequence[ShardAppend],
    tables_upper: tuple[Frontier, Frontier] | None,
    writer: str,
    call: int,
) -> ChangeOutcome[AppendCommitted | UpperMismatch]:
    """Apply all appends, their holds and the move of the tables' upper, or return the first
    mismatch.

    Raises `StorageError` (indeterminate) if an earlier attempt may have succeeded and its
    idempotency token (`shard.IdempotencyToken`) may have been evicted.
    """
    tables = documents.tables
    done = AppendCommitted(tuple((append.shard, append.upper) for append in appends))
    witness: ShardState | TablesUpper = documents.shard(appends[0].shard) if appends else tables
    # A retry whose first answer was lost finds its own token, so it is not applied twice.
    if is_applied(witness, writer, call):
        return ChangeOutcome(done)
    # If the token may have been evicted, its absence proves nothing, and only the caller can
    # decide.
    if documents.uncertain and is_forgotten(witness, writer):
        raise StorageError(
            "cannot determine whether an append to "
            f"{', '.join(append.shard for append in appends)} succeeded: more than {WRITERS_MAX} "
            "other writers have written since; read the uppers again",
            determinate=False,
        )
    moved: TablesUpper | None = None
    if tables_upper is not None:
        expected, new = tables_upper
        if tables.upper != expected:
            return ChangeOutcome(UpperMismatch(TABLES_UPPER, expected, tables.upper))
        moved = replace(tables, upper=new, writers=record_token(tables.writers, writer, call, new))
    become: dict[ShardId, ShardState | None] = {}
    for append in appends:
        state = documents.shard(append.shard)
        floor = tables.upper if state.tables else TIME_MIN
        then = appended(state, append, floor, writer, call)
        if isinstance(then, UpperMismatch):
            return ChangeOutcome(then)
        become[append.shard] = then
    holds = [hold for append in appends for hold in append.holds]
    # Times must not be below the tables' upper, so it is compared in the same set (`machine.py`).
    floored = any(append.parts and documents.shard(append.shard).tables for append in appends)
    return ChangeOutcome(done, with_holds(documents, become, holds), moved, floored=floored)


def trace_appends(
    opened: OpenSpan, trail: AppendTraceIndex, appends: Sequence[ShardAppend]
) -> None:
    """Describe the appends in the span, and record its traceparent for each of them in the
    trail."""
    parts = [part for append in appends for part in append.parts]
    opened.describe(
        ",".join(append.shard for append in appends),
        min((append.lower for append in appends), default=0),
        max((append.upper for append in appends), default=0),
        sum(part.rows for part in parts),
        sum(part.bytes for part in parts),
    )
    for append in appends:
        if append.parts:
            trail.note(append.shard, append.upper, opened.traceparent)


def trace_refusal(
    opened: OpenSpan,
    trail: AppendTraceIndex,
    appends: Sequence[ShardAppend],
    mismatch: UpperMismatch,
) -> None:
    """Mark the span as failed, and remove its traceparent from the trail, because nothing was
    appended."""
    opened.fail(f"the upper of {mismatch.shard} was {mismatch.current}")
    for append in appends:
        trail.forget(append.shard, append.upper, opened.traceparent)


def is_forgotten(document: ShardState | TablesUpper, writer: str) -> bool:
    """Return whether this writer's token may have been evicted: it is absent, and all slots are
    taken."""
    return writer not in document.writers and len(document.writers) >= WRITERS_MAX


def with_holds(
    documents: ShardDocuments,
    become: dict[ShardId, ShardState | None],
    holds: Sequence[tuple[ShardId, str, Time]],
) -> dict[ShardId, ShardState | None]:
    """Return `become` with the shards that these holds change. Unchanged shards are left out."""
    for shard, holder, since in holds:
        state = become.get(shard) or documents.shard(shard)
        then = with_hold(state, holder, since)
        if then is not state:
            become[shard] = then
    return become


# -- creation and deletion of several shards -------------------------------------------------------


def create_all(
    documents: ShardDocuments, states: Mapping[ShardId, ShardState], writer: str, call: int
) -> ChangeOutcome[bool]:
    """Create all of these shards, or none. The answer is False if one exists.

    Raises `StorageError` (indeterminate) if an earlier attempt may have created them and its token
    may have been evicted.
    """
    held = [documents.shards[shard] for shard in states]
    first = held[0]
    if first is not None and is_applied(first, writer, call):
        return ChangeOutcome(True)
    # An existing shard may be ours or another process's; without the token this cannot be
    # determined.
    if documents.uncertain and first is not None and is_forgotten(first, writer):
        raise StorageError(
            f"cannot determine whether {', '.join(states)} were created: more than {WRITERS_MAX} "
            "other writers have written since",
            determinate=False,
        )
    if any(state is not None for state in held):
        return ChangeOutcome(False)
    return ChangeOutcome(True, states)


def drop_all(
    documents: ShardDocuments, ids: Sequence[ShardId], gone: dict[ShardId, ShardState]
) -> ChangeOutcome[bool]:
    """Delete all of these shards, or none. The answer is False if one does not exist.

    `gone` collects the states found by this attempt and earlier ones.
    """
    held = {shard: documents.shards[shard] for shard in ids}
    # By `born`, not by presence, because another process may have created a shard with the same
    # name since.
    if documents.uncertain and all(_is_gone(gone[id_], held[id_]) for id_ in held):
        return ChangeOutcome(True)  # by our attempt whose answer was lost, or by another process
    if any(state is None for state in held.values()):
        return ChangeOutcome(False)
    gone.update({shard: state for shard, state in held.items() if state is not None})
    return ChangeOutcome(True, dict.fromkeys(held))


def _is_gone(before: ShardState, now: ShardState | None) -> bool:
    """Return whether `before` was deleted. Another shard may have its name by now."""
    return now is None or now.born != before.born
