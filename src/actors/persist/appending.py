"""One append over several shards, as a change of their documents: pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from actors.errors import InvalidUsage, StorageError
from actors.persist.change import ChangeOutcome, ShardDocuments
from actors.persist.shard import (
    TABLES_UPPER,
    WRITERS_MAX,
    AppendCommitted,
    ShardAppend,
    ShardState,
    TablesUpper,
    UpperMismatch,
    appended,
    is_applied,
    mark,
    with_hold,
)
from actors.progress import EMPTY, TIME_MIN, Frontier, ShardId, Time
from actors.spans import OpenSpan
from actors.tracing.trail import AppendTraceIndex


def check_append(
    appends: Sequence[ShardAppend], tables_upper: tuple[Frontier, Frontier] | None
) -> None:
    """Raise `InvalidUsage` for a call that can never be right."""
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
    """Apply all appends, their holds and the move of the tables' upper; or report the first
    mismatch.

    Raises `StorageError` (indeterminate) when an earlier attempt may have been done and its
    idempotency token (`shard.Mark`) is gone.
    """
    tables = documents.tables
    done = AppendCommitted(tuple((append.shard, append.upper) for append in appends))
    witness: ShardState | TablesUpper = documents.shard(appends[0].shard) if appends else tables
    # A retry whose first answer was lost finds its own token: done once, not twice.
    if is_applied(witness, writer, call):
        return ChangeOutcome(done)
    # Without room for the token its absence proves nothing: only the caller can decide.
    if documents.uncertain and is_forgotten(witness, writer):
        raise StorageError(
            f"whether an append to {', '.join(append.shard for append in appends)} was done cannot"
            f" be told: more than {WRITERS_MAX} others have written since; read the uppers again",
            determinate=False,
        )
    moved: TablesUpper | None = None
    if tables_upper is not None:
        expected, new = tables_upper
        if tables.upper != expected:
            return ChangeOutcome(UpperMismatch(TABLES_UPPER, expected, tables.upper))
        moved = replace(tables, upper=new, writers=mark(tables.writers, writer, call, new))
    become: dict[ShardId, ShardState | None] = {}
    for append in appends:
        state = documents.shard(append.shard)
        floor = tables.upper if state.tables else TIME_MIN
        then = appended(state, append, floor, writer, call)
        if isinstance(then, UpperMismatch):
            return ChangeOutcome(then)
        become[append.shard] = then
    holds = [hold for append in appends for hold in append.holds]
    # Times must not lie below the tables' upper, so it is compared in the same set (`machine.py`).
    floored = any(append.parts and documents.shard(append.shard).tables for append in appends)
    return ChangeOutcome(done, with_holds(documents, become, holds), moved, floored=floored)


def trace_appends(
    opened: OpenSpan, trail: AppendTraceIndex, appends: Sequence[ShardAppend]
) -> None:
    """Describe the appends to the span, and record its traceparent for each of them in the
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
    """Mark the span as failed, and remove its traceparent from the trail: nothing was appended."""
    opened.fail(f"the upper of {mismatch.shard} was {mismatch.current}")
    for append in appends:
        trail.forget(append.shard, append.upper, opened.traceparent)


def is_forgotten(document: ShardState | TablesUpper, writer: str) -> bool:
    """Return whether a mark of this writer may have been evicted: it has none, and all places are
    taken."""
    return writer not in document.writers and len(document.writers) >= WRITERS_MAX


def with_holds(
    documents: ShardDocuments,
    become: dict[ShardId, ShardState | None],
    holds: Sequence[tuple[ShardId, str, Time]],
) -> dict[ShardId, ShardState | None]:
    """Return `become` with the shards that these holds change; unchanged shards are left out."""
    for shard, holder, since in holds:
        state = become.get(shard) or documents.shard(shard)
        then = with_hold(state, holder, since)
        if then is not state:
            become[shard] = then
    return become
