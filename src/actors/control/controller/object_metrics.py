"""Metrics of the objects in the catalog, from the controller's state."""

from __future__ import annotations

from collections.abc import Iterator

from actors.control.controller.object_conditions import lag_ms
from actors.control.controller.state import ControllerState
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import LAG_MS, STALLED_MS


def object_measures(state: ControllerState) -> Iterator[Measurement]:
    """Yield the metrics of all objects. A dropped object has none: nothing is remembered."""
    now = state.ctx.now_ms()
    for entry in state.catalog.objects:
        name, fault = (entry.name,), state.faults.get(entry.id)
        yield Measurement(LAG_MS, lag_ms(state, entry), name)
        # A fault that began just now is no 0, which stands for none.
        stalled_ms = 0 if fault is None else max(1, now - fault.since_ms)
        yield Measurement(STALLED_MS, stalled_ms, name)
