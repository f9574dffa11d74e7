"""Faults of objects: the one rule behind the state that status, relations, metrics, the log and the
readiness page show. Pure.

A fault starts with the first report of a state in `ERROR_STATES`. A restart does not end it: its
object is briefly *starting* or *hydrating* and may fail again in the same way. The fault is over
when the object reports that it runs, and has either made progress since the last failure or has
nothing to do. A quarantined object stays quarantined until it is dropped or replaced.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from actors.model.protocol.compute import ERROR_STATES
from actors.runtime.progress import Frontier, ObjectId, Time

QUARANTINED: Final = "quarantined"
ERRORED: Final = "errored"
_ATTEMPTING: Final = frozenset(("", "starting", "hydrating", "suspended", "paused"))
"""States of an object that has not yet shown that it runs."""


class ObjectFault(msgspec.Struct, frozen=True, gc=False):
    """A fault of one object."""

    state: str
    reason: str
    since_ms: Time
    """Time of the first failure (ms since the epoch)."""
    retries: int = 0
    """Attempts that have failed since the first one."""
    hint: str = ""
    upper: Frontier = 0
    """The object's upper at the last failure; any advance beyond it is progress."""
    runs: bool = False
    """True if the object has reported since the last failure that it runs."""


class FaultChange(msgspec.Struct, frozen=True, gc=False):
    """A fault started or is over. The log reports each change once."""

    id: ObjectId
    kind: Literal["began", "over"]
    fault: ObjectFault


class ObjectFaults:
    """The faults of all objects."""

    def __init__(self) -> None:
        self._faults: dict[ObjectId, ObjectFault] = {}
        """Current faults by object, oldest first."""

    def get(self, id_: ObjectId) -> ObjectFault | None:
        """Return the fault of an object, or None if it has none."""
        return self._faults.get(id_)

    def is_quarantined(self, id_: ObjectId) -> bool:
        """Return whether an object is quarantined, so that it does not run."""
        fault = self._faults.get(id_)
        return fault is not None and fault.state == QUARANTINED

    def all(self) -> tuple[tuple[ObjectId, ObjectFault], ...]:
        """Return all faults, oldest first."""
        return tuple(self._faults.items())

    def report(
        self, id_: ObjectId, state: str, reason: str, upper: Frontier, now_ms: Time, hint: str = ""
    ) -> FaultChange | None:
        """Process an object's report of its state and its upper. Return the change that it
        causes."""
        known = self._faults.get(id_)
        if known is not None and known.state == QUARANTINED:
            return None
        if state in ERROR_STATES:
            fault = ObjectFault(state, reason, now_ms, hint=hint, upper=upper)
            # Another kind of fault is news; errors of the data are reported by every step and are
            # not.
            if known is None or known.state != state:
                self._faults[id_] = fault
                return FaultChange(id_, "began", fault)
            retries = known.retries + (state != ERRORED)
            self._faults[id_] = msgspec.structs.replace(
                fault, since_ms=known.since_ms, retries=retries
            )
        elif known is not None and state not in _ATTEMPTING:
            self._faults[id_] = msgspec.structs.replace(known, runs=True)
        return None

    def settle(self, id_: ObjectId, upper: Frontier, *, idle: bool) -> FaultChange | None:
        """End an object's fault if it is over. `idle` means that its contents lack no changes."""
        fault = self._faults.get(id_)
        if fault is None or not fault.runs:
            return None
        if fault.state != ERRORED and upper <= fault.upper and not idle:
            return None
        del self._faults[id_]
        return FaultChange(id_, "over", fault)

    def forget(self, id_: ObjectId) -> None:
        """Remove a dropped object."""
        self._faults.pop(id_, None)
