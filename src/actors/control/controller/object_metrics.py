"""Metrics of the objects in the catalog, from the controller's state."""

from __future__ import annotations

from collections.abc import Iterator

from actors.control.controller.catalog.catalog import PLAIN_VIEW, CatalogObject
from actors.control.controller.object_conditions import lag_ms
from actors.control.controller.state import ControllerState
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import (
    FRONTIER_AGE_MS,
    FRONTIER_LAG_MS,
    LAG_MS,
    OBJECT_INFO,
    OBJECT_RETRIES,
    STALLED_MS,
)
from actors.runtime.progress import Frontier, is_empty


def object_measures(state: ControllerState) -> Iterator[Measurement]:
    """Yield the metrics of all objects. A dropped object has none: nothing is remembered."""
    now = state.ctx.now_ms()
    for entry in state.catalog.objects:
        name, fault = (entry.name,), state.faults.get(entry.id)
        yield Measurement(OBJECT_INFO, 1, (entry.name, entry.kind, entry.dataflow_id))
        yield Measurement(LAG_MS, lag_ms(state, entry), name)
        # A fault that began just now is no 0, which stands for none.
        stalled_ms = 0 if fault is None else max(1, now - fault.since_ms)
        yield Measurement(STALLED_MS, stalled_ms, name)
        yield Measurement(OBJECT_RETRIES, 0 if fault is None else fault.retries, name)
        upper = _known_upper(state, entry)
        # A plain view has no frontier; an object without contents has none yet.
        if entry.kind != PLAIN_VIEW and upper:
            yield from _frontier_measures(state, entry, upper, now)


def _frontier_measures(
    state: ControllerState, entry: CatalogObject, upper: Frontier, now: int
) -> Iterator[Measurement]:
    name = (entry.name,)
    inputs = [_known_upper(state, state.catalog.by_id(id_)) for id_ in entry.depends]
    # A complete object lacks nothing, and a complete input keeps nothing back.
    least = min((each for each in inputs if not is_empty(each)), default=upper)
    if is_empty(upper):
        upper = least = now
    yield Measurement(FRONTIER_AGE_MS, max(0, now - upper), name)
    yield Measurement(FRONTIER_LAG_MS, max(0, least - upper), name)


def _known_upper(state: ControllerState, entry: CatalogObject) -> Frontier:
    """Return the frontier below which an object is complete: at least the time at which its
    contents begin."""
    return max(state.frontiers.upper(entry), entry.as_of)
