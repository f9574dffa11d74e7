"""The condition of each object, the same for everything that shows it: its staleness, its state,
and what holds it back. `ObjectFaults` has the rule for faults; this module applies it to the
controller's state."""

from __future__ import annotations

import logging

import msgspec

from actors.control.controller.catalog.catalog import (
    INDEX,
    PLAIN_VIEW,
    SOURCE,
    SOURCE_TABLE,
    TABLE,
    CatalogObject,
)
from actors.control.controller.object_faults import ERRORED, QUARANTINED, FaultChange
from actors.control.controller.state import ControllerState
from actors.runtime.progress import ObjectId, Time, is_empty

log = logging.getLogger("penstock.controller")


class ObjectCondition(msgspec.Struct, frozen=True, gc=False):
    """State of one object; for a fault also when it started and how many attempts have failed
    since."""

    state: str
    text: str = ""
    hint: str = ""
    since_ms: Time = 0
    retries: int = 0


def note_report(
    state: ControllerState, entry: CatalogObject, word: str, reason: str, hint: str = ""
) -> None:
    """Process an object's report of its state."""
    upper = state.frontiers.upper(entry)
    change = state.faults.report(entry.id, word, reason, upper, state.ctx.now_ms(), hint)
    _log(state, entry, change)
    settle(state, entry)


def settle(state: ControllerState, entry: CatalogObject) -> None:
    """End the object's fault if the object has recovered."""
    fault = state.faults.get(entry.id)
    if fault is None or not fault.runs:
        return
    upper = state.frontiers.upper(entry)
    change = state.faults.settle(entry.id, upper, idle=_is_current(state, entry))
    _log(state, entry, change)


def note_quarantined(state: ControllerState) -> None:
    """Record the objects that are quarantined when the service starts."""
    for id_, found in state.catalog.quarantined.items():
        note_report(state, state.catalog.by_id(id_), QUARANTINED, found.reason)


def observe_objects(state: ControllerState) -> None:
    """End the faults of objects that have recovered. Called at intervals."""
    for id_, _ in state.faults.all():
        # An idle view sends no report, since its upper does not advance.
        settle(state, state.catalog.by_id(id_))


def _log(state: ControllerState, entry: CatalogObject, change: FaultChange | None) -> None:
    if change is None:
        return
    fault, what = change.fault, f"{entry.kind} {entry.name}"
    if change.kind == "over":
        seconds = max(0, state.ctx.now_ms() - fault.since_ms) / 1000
        log.info("%s runs again: it was %s for %.1f s", what, fault.state, seconds)
        return
    hint = f" ({fault.hint})" if fault.hint else ""
    log.warning("%s is %s: %s%s", what, fault.state, fault.reason, hint)


def condition_of(
    state: ControllerState, entry: CatalogObject, word: str, text: str = ""
) -> ObjectCondition:
    """Return the condition of an object whose last report had this state and text."""
    fault = state.faults.get(entry.id)
    # Check the fault first: the last report may be of an attempt to recover from it.
    if fault is not None:
        return ObjectCondition(fault.state, fault.reason, fault.hint, fault.since_ms, fault.retries)
    cause = blocking_dependency(state, entry)
    if cause is not None:
        below, found = cause
        waits = f"waits for {below.kind} {below.name}, which is {found}"
        text = f"{text}; {waits}" if text else waits
    return ObjectCondition(word, text)


def blocking_dependency(
    state: ControllerState, entry: CatalogObject
) -> tuple[CatalogObject, str] | None:
    """Return a dependency of this object that is not advancing, and its state."""
    seek, seen = list(entry.depends), set[ObjectId]()
    while seek:
        id_ = seek.pop()
        if id_ in seen:
            continue
        seen.add(id_)
        below, fault = state.catalog.by_id(id_), state.faults.get(id_)
        # A definite error holds nothing back: it becomes part of the dependents' contents.
        if fault is not None and fault.state != ERRORED:
            return below, fault.state
        seek += below.depends
    return None


def lag_ms(state: ControllerState, entry: CatalogObject) -> int:
    """Return how stale the contents are that a reader of the object sees, in ms.

    A table that clients write is never stale. A table that a source fills is as old as the last
    moment at which the source was known to have everything from its external system. A view is as
    old as the oldest change that it lacks, or as its error.
    """
    now = state.oracle_now()
    if entry.kind == PLAIN_VIEW:  # the staleness is computed on demand, from these inputs
        below = (lag_ms(state, state.catalog.by_id(id_)) for id_ in entry.depends)
        return max(below, default=0)
    frontiers = state.frontiers
    fault, upper = state.faults.get(entry.id), frontiers.upper(entry)
    if fault is not None and fault.state == ERRORED:
        return max(0, now - fault.since_ms)
    if is_empty(upper):
        return 0
    seen = _missing(state, entry)
    from_ = frontiers.readable_from(entry.id) if entry.kind == INDEX else entry.as_of
    if entry.kind != TABLE and upper <= from_:
        # It has no contents yet: readers have been waiting since it started.
        seen.append(frontiers.tracked_since_ms(entry.id))
    return max(0, now - min(seen, default=now))


def _missing(state: ControllerState, entry: CatalogObject) -> list[Time]:
    """Return the times since which the object lacks changes: one for each client table that is
    further ahead, and for each source's table the time up to which its external changes are known
    here."""
    frontiers = state.frontiers
    known = max(frontiers.upper(entry), entry.as_of)
    found = []
    for each in _origins(state, entry):
        upper = frontiers.upper(each)
        if is_empty(upper) or not upper:
            continue
        if each.kind == TABLE:
            if known < upper:
                found.append(frontiers.missing_since(each, known))
        else:
            sources = (each.id,) if each.kind == SOURCE else each.depends
            behind_ms = max(map(frontiers.behind_ms, sources), default=0)
            found.append(min(known, upper) - behind_ms)
    return found


def _is_current(state: ControllerState, entry: CatalogObject) -> bool:
    """Return whether the object has all changes that are durable in the tables below it."""
    if entry.kind in (SOURCE, SOURCE_TABLE):
        # A source cannot lag behind itself: only progress of its upper shows that it runs.
        return is_empty(state.frontiers.upper(entry))
    known = state.frontiers.upper(entry)
    uppers = (state.frontiers.upper(each) for each in _origins(state, entry))
    return all(is_empty(upper) or upper <= known for upper in uppers)


def _origins(state: ControllerState, entry: CatalogObject) -> list[CatalogObject]:
    """Return the tables of clients and sources that an object depends on, through any views. An
    object that is itself a table or a source depends on itself."""
    found: dict[ObjectId, CatalogObject] = {}
    seek = [entry]
    while seek:
        each = seek.pop()
        if each.id not in found:
            found[each.id] = each
            if each.kind != SOURCE_TABLE:
                seek += [state.catalog.by_id(id_) for id_ in each.depends]
    return [each for each in found.values() if each.kind in (TABLE, SOURCE_TABLE, SOURCE)]
