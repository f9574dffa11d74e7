"""Faults: the operations that go wrong, and how; counted as they strike.

Theory of operation. A place where a fault can strike is a *site* (``consensus.set``, ``link.up``).
Its operations are counted from the start of a run, restarts included. A `InjectedFault` names a
site, the number of an operation there, and its effect. So a schedule of faults is a plain list:
leaving one out leaves all others where they are, as long as the run before them is the same.
Therefore a schedule can be shrunk.

Out of scope: drawing faults (`schedule` does), and carrying them out (the site does, as only it
knows the meaning of a failure there).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

FAIL: Final = "fail"
"""The operation does not happen, and its error is determinate."""
LOST: Final = "lost"
"""The operation does not happen, and the answer is a timeout (indeterminate)."""
LOST_ANSWER: Final = "lost answer"
"""The operation happens, and the answer is a timeout."""
LATE: Final = "late"
"""The answer is a timeout, and the operation happens afterwards."""
HANG: Final = "hang"
"""The operation happens after a long time."""
DELAY: Final = "delay"
"""The operation happens later."""
DISCONNECT: Final = "disconnect"
"""The connection breaks here; messages in flight are lost."""
CRASH: Final = "crash"
"""The process dies before the operation happens."""
CRASH_AFTER: Final = "crash after"
"""The operation happens, and the process dies before it gets the answer."""
KILL: Final = "kill"
"""The engine dies at this job."""


class InjectedFault(msgspec.Struct, frozen=True):
    """Operation number `at` (from 1) of `site` goes wrong in the way of `kind`."""

    site: str
    at: int
    kind: str
    delay_ms: int = 0


class TraceDigest:
    """A digest of all steps of a run, in order: equal for equal runs."""

    def __init__(self, keep: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._kept: list[str] | None = [] if keep else None
        self.steps = 0

    def note(self, *what: object) -> None:
        """Note one step."""
        self.steps += 1
        line = " ".join(map(str, what))
        self._digest.update(line.encode())
        if self._kept is not None:
            now = asyncio.get_running_loop().time()
            self._kept.append(f"{now * 1000:10.3f} {line}")

    @property
    def hash(self) -> str:
        """Return the digest of all steps so far."""
        return self._digest.hexdigest()

    @property
    def lines(self) -> list[str]:
        """Return the steps as text, when they were to be kept."""
        return self._kept or []


class FaultInjector:
    """Assigns faults to operations. A site carries its fault out."""

    def __init__(self, faults: Iterable[InjectedFault], trace: TraceDigest) -> None:
        self._faults = {(fault.site, fault.at): fault for fault in faults}
        self._seen: Counter[str] = Counter()
        self.trace = trace
        self.struck: list[InjectedFault] = []
        self.active = True

    def draw(self, site: str) -> InjectedFault | None:
        """Count an operation of `site`; return its fault, if it has one."""
        self._seen[site] += 1
        if not self.active:
            return None
        fault = self._faults.get((site, self._seen[site]))
        if fault is not None:
            self.struck.append(fault)
            self.trace.note("fault", fault.site, fault.at, fault.kind)
        return fault
