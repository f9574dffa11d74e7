"""Chooses where a step ends, and takes its rows from the inputs. Pure.

`pick_hi` looks at described parts before any is fetched; `limit_hi_by_times` and
`limit_hi_by_bytes` look at fetched rows. Rows that were taken can be put back, so a step can be
shortened until it is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from actors.model.plan.schema import ERROR, TIME
from actors.replica.dataflow.dataflow_input import DataflowInput
from actors.runtime.progress import EMPTY, Frontier, Time
from actors.runtime.threshold_probes import STEP_BUDGET


def pick_hi(
    lo: Time,
    inputs: Sequence[DataflowInput],
    budget: int,
    until: Frontier | None,
    *,
    forced: bool = True,
) -> Frontier | None:
    """Return the `hi` of the next step, or None if nothing is described beyond `lo`.

    The step reaches as far as every input was described, but only so far that the parts to fetch,
    together with the rows already held, stay within `budget` bytes. If `forced`, it takes at least
    one batch.
    """
    reach = min((input_.progress for input_ in inputs), default=EMPTY)
    if until is not None:
        reach = min(reach, until)
    if reach <= lo:
        return None
    pieces = sorted(
        (p for input_ in inputs for p in input_.waiting if p.lower < reach),
        key=lambda piece: piece.lower,
    )
    candidates = sorted({p.upper for p in pieces if lo < p.upper < reach} | {reach})
    total = sum(input_.held_bytes + input_.outstanding_bytes() for input_ in inputs)
    # Take one batch even if it exceeds the budget; otherwise it could never be taken.
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
    """Return the distinct times of all deltas, ascending."""
    chunks = [chunk for delta in deltas for chunk in delta[TIME].chunks]
    return sorted(pc.unique(pa.chunked_array(chunks, pa.int64())).to_pylist())


def error_times_of(deltas: Iterable[pa.Table]) -> list[Time]:
    """Return the distinct times at which the deltas contain error updates, ascending."""
    found: set[int] = set()
    for delta in deltas:
        if ERROR in delta.column_names:
            errors = delta.filter(pc.is_valid(delta[ERROR]))
            found.update(pc.unique(errors[TIME]).to_pylist())
    return sorted(found)


def limit_hi_by_times(
    times: Sequence[Time], error_times: Sequence[Time], *, opaque: bool
) -> Frontier | None:
    """Return a lower `hi` if the times of a view's step may not all share one step, else None.

    An opaque view takes one time per step. A step ends before the first error of an input, and the
    error gets a step of its own, so that the output's error has its exact time.
    """
    if len(times) < 2:
        return None
    if opaque:
        return times[1]
    if error_times:
        return error_times[0] if error_times[0] > times[0] else times[1]
    return None


def limit_hi_by_bytes(
    deltas: Sequence[pa.Table], times: Sequence[Time], budget: int
) -> Frontier | None:
    """Return a lower `hi` if the rows exceed `budget` bytes in memory, else None.

    The step then takes as many times as fit, but at least one.
    """
    if len(times) < 2 or sum(delta.nbytes for delta in deltas) <= budget:
        return None
    # Estimate from the rows: a part's size as a file says little about its size in memory.
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


def put_back(inputs: Sequence[DataflowInput], deltas: Iterable[Iterable[pa.Table]]) -> None:
    """Put rows that were taken back into the inputs."""
    for input_, tables in zip(inputs, deltas, strict=True):
        input_.hold(*tables)


def take_rows(inputs: Sequence[DataflowInput], hi: Frontier) -> tuple[tuple[pa.Table, ...], ...]:
    """Remove the held rows below `hi` from each input, and return them."""
    return tuple(tuple(input_.take(hi)) for input_ in inputs)
