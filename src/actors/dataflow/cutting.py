"""Where a step ends: the choice of `hi`, and the rows that come along. Pure.

`pick_hi` looks at what is described, before anything is fetched; `bound` and `fitting` at what
was fetched: some times must not share a step, and rows may be larger than their parts. Rows are
taken from the sources' held ones and can be put back, so a step can be cut shorter at any time
before it is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from actors.dataflow.gather import Source
from actors.plan.schema import ERROR, TIME
from actors.progress import EMPTY, Frontier, Time
from actors.threshold_probes import STEP_BUDGET


def pick_hi(
    lo: Time,
    sources: Sequence[Source],
    budget: int,
    until: Frontier | None,
    *,
    forced: bool = True,
) -> Frontier | None:
    """How far the next step may go: None when nothing is described beyond `lo`.

    As far as every source has been described, but not so far that the parts to fetch (with the
    rows already held) exceed `budget` bytes; at least one batch, if `forced`.
    """
    reach = min((source.progress for source in sources), default=EMPTY)
    if until is not None:
        reach = min(reach, until)
    if reach <= lo:
        return None
    pieces = sorted(
        (p for source in sources for p in source.waiting if p.lower < reach),
        key=lambda piece: piece.lower,
    )
    candidates = sorted({p.upper for p in pieces if lo < p.upper < reach} | {reach})
    total = sum(source.held_bytes + source.outstanding_bytes() for source in sources)
    best = candidates[0] if forced else None
    position = 0
    for candidate in candidates:
        while position < len(pieces) and pieces[position].lower < candidate:
            total += pieces[position].part.bytes
            position += 1
        if STEP_BUDGET.crossed(total > budget):
            break
        best = candidate
    return best


def times_of(deltas: Iterable[pa.Table]) -> list[Time]:
    """The distinct times of all deltas, ascending."""
    chunks = [chunk for delta in deltas for chunk in delta[TIME].chunks]
    return sorted(pc.unique(pa.chunked_array(chunks, pa.int64())).to_pylist())


def error_times_of(deltas: Iterable[pa.Table]) -> list[Time]:
    """The distinct times at which the deltas hold error updates, ascending."""
    found: set[int] = set()
    for delta in deltas:
        if ERROR in delta.column_names:
            errors = delta.filter(pc.is_valid(delta[ERROR]))
            found.update(pc.unique(errors[TIME]).to_pylist())
    return sorted(found)


def bound(times: Sequence[Time], error_times: Sequence[Time], *, opaque: bool) -> Frontier | None:
    """A lower `hi`, when the times of a view's step may not all go into one.

    An opaque view takes one time a step. An error of an input ends the healthy part before it,
    then stands alone: the output's error gets its exact time.
    """
    if len(times) < 2:
        return None
    if opaque:
        return times[1]
    if error_times:
        return error_times[0] if error_times[0] > times[0] else times[1]
    return None


def fitting(deltas: Sequence[pa.Table], times: Sequence[Time], budget: int) -> Frontier | None:
    """A lower `hi`, when the rows exceed `budget` bytes in memory: as many times as fit, at
    least one. What a part takes as a file says little of what it takes here."""
    if len(times) < 2 or sum(delta.nbytes for delta in deltas) <= budget:
        return None
    sizes = dict.fromkeys(times, 0.0)
    for delta in deltas:
        row_bytes = delta.nbytes / max(1, delta.num_rows)
        for count in pc.value_counts(delta[TIME]):
            sizes[count["values"].as_py()] += count["counts"].as_py() * row_bytes
    total = 0.0
    for time in times:
        total += sizes[time]
        if total > budget and time > times[0]:
            return time
    return None


def put_back(sources: Sequence[Source], deltas: Iterable[Iterable[pa.Table]]) -> None:
    """Rows that were taken wait again."""
    for source, tables in zip(sources, deltas, strict=True):
        source.hold(*tables)


def take(sources: Sequence[Source], hi: Frontier) -> tuple[tuple[pa.Table, ...], ...]:
    """Per source, its held rows below `hi`."""
    return tuple(tuple(source.take(hi)) for source in sources)
