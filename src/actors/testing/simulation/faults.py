"""Faults: which operation at which place goes wrong, and how; counted as they strike.

Theory of operation. A place where something can go wrong is a *site* (``consensus.set``,
``link.up``). Its operations are counted from the start of a run, restarts included. A `Fault`
names a site, the number of an operation there, and what happens to that one. So a schedule of
faults is a plain list: leaving one out leaves all others where they are, as far as the run
before them is the same. That is what makes a schedule shrink.

What it does not do: it draws nothing (`schedule` does), and it carries nothing out (the site
does, as only it knows what failing means there).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

FAIL: Final = "fail"
"""It does not happen, and says so."""
LOST: Final = "lost"
"""It does not happen, and nobody can tell: the answer is a timeout."""
LOST_ANSWER: Final = "lost answer"
"""It happens, and the answer is a timeout."""
LATE: Final = "late"
"""The answer is a timeout, and it happens afterwards."""
HANG: Final = "hang"
"""It happens after a long time."""
DELAY: Final = "delay"
"""It happens later."""
DISCONNECT: Final = "disconnect"
"""The connection breaks here; what is on its way is lost."""
CRASH: Final = "crash"
"""The process dies before it happens."""
CRASH_AFTER: Final = "crash after"
"""It happens, and the process dies before it hears of it."""
KILL: Final = "kill"
"""The engine dies at this job."""


class Fault(msgspec.Struct, frozen=True):
    """Operation number `at` (from 1) of `site` goes wrong in the way of `kind`."""

    site: str
    at: int
    kind: str
    delay_ms: int = 0


class Trace:
    """A digest of all that happened, in order: equal for equal runs."""

    def __init__(self, keep: bool = False) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._kept: list[str] | None = [] if keep else None
        self.steps = 0

    def note(self, *what: object) -> None:
        """One step."""
        self.steps += 1
        line = " ".join(map(str, what))
        self._digest.update(line.encode())
        if self._kept is not None:
            now = asyncio.get_running_loop().time()
            self._kept.append(f"{now * 1000:10.3f} {line}")

    @property
    def hash(self) -> str:
        """Of all steps so far."""
        return self._digest.hexdigest()

    @property
    def lines(self) -> list[str]:
        """The steps as text, when they were to be kept."""
        return self._kept or []


class Injector:
    """Says what goes wrong where. `crash` is called by the sites that are to kill the process."""

    def __init__(self, faults: Iterable[Fault], trace: Trace) -> None:
        self._faults = {(fault.site, fault.at): fault for fault in faults}
        self._seen: Counter[str] = Counter()
        self.trace = trace
        self.struck: list[Fault] = []
        self.active = True

    def draw(self, site: str) -> Fault | None:
        """Counts an operation of `site`; what goes wrong with it, if anything does."""
        self._seen[site] += 1
        if not self.active:
            return None
        fault = self._faults.get((site, self._seen[site]))
        if fault is not None:
            self.struck.append(fault)
            self.trace.note("fault", fault.site, fault.at, fault.kind)
        return fault
