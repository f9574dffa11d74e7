"""Checks the invariants of a shard's state. Pure.

They are checked before a state is written, and whenever one is read.
"""

from __future__ import annotations

from typing import NoReturn

from actors.durable.persist.shard import BatchPart, ShardBatch, ShardState
from actors.runtime.errors import CorruptData
from actors.runtime.progress import EMPTY, TIME_MIN, Frontier, format_frontier


def validate(state: ShardState, before: ShardState | None = None) -> None:
    """Raise `CorruptData`, naming the broken invariant, if the state violates one.

    Parts of batches that are also in `before` (identical, or with the same list) are not checked
    again.
    """
    end: Frontier | None = None
    # Only new batches are checked, so the cost is proportional to the change, not to the shard.
    known: set[object] = set()
    batches = state.batches
    live = [batch.listed.key for batch in batches if batch.listed is not None]
    if before is not None and before.batches:
        whole = len(before.batches)
        if batches[:whole] == before.batches:  # an append; usually the same objects
            end, batches = before.upper, batches[whole:]
        else:
            # By identity or list, because comparing parts by value costs as much as checking them.
            known = {id(b) if b.listed is None else b.listed for b in before.batches}
    for batch in batches:
        if not batch.lower < batch.upper:
            _break(state, "batch.lower < batch.upper", batch)
        if end is not None and end != batch.lower:
            _break(state, "batches are contiguous", batch)
        end = batch.upper
        if (id(batch) if batch.listed is None else batch.listed) not in known:
            for part in batch.parts:
                _validate_part(state, batch, part)
                if part.key:
                    live.append(part.key)
    if end is not None and end != state.upper:
        _break(state, "the last batch ends at upper", end)
    if state.since < TIME_MIN:
        _break(state, "0 <= since", state.since)
    if not TIME_MIN <= state.upper <= EMPTY:
        _break(state, "0 <= upper <= empty", state.upper)
    for holder, since in state.holds.items():
        if since < state.since:
            _break(state, "since <= hold", holder, since)
    for reader, lease in state.leases.items():
        if lease.since < state.since:
            _break(state, "since <= lease.since", reader, lease)
    for retired in state.retired:
        if retired.seqno > state.seqno + 1:
            _break(state, "retired.seqno <= seqno", retired)
    keys = live + [retired.key for retired in state.retired]
    if len(keys) != len(set(keys)):
        _break(state, "a blob is named once")


def _validate_part(state: ShardState, batch: ShardBatch, part: BatchPart) -> None:
    if not batch.lower <= part.time_min <= part.time_max < batch.upper:
        _break(state, "lower <= time_min <= time_max < upper", part.key, batch)
    if part.rows <= 0:
        _break(state, "rows > 0", part.key)
    if not 0 <= part.schema_id <= state.schema_id:
        _break(state, "a part's schema is the shard's", part.key, part.schema_id)
    if (part.key == "") != (part.inline is not None):
        _break(state, "inline has no key", part)
    if part.at is not None and not part.at == part.time_min == part.time_max:
        _break(state, "a placed part lies at one time", part.key)


def _break(state: ShardState, rule: str, *operands: object) -> NoReturn:
    shown = ", ".join(repr(operand)[:200] for operand in operands)
    raise CorruptData(
        f"shard {state.id} at seqno {state.seqno} (since {state.since}, upper"
        f" {format_frontier(state.upper)}) breaks {rule!r}: {shown}",
        determinate=True,
    )
