"""Tells a failure that comes again and again in the same way from one that may go away.
A view's step is tried again after a failure. What was lost (the engine, a store, a connection)
comes back at some time, however many attempts that takes. Any other failure that comes
`ATTEMPTS_MAX` times in the same way is the view's: its contents at that time are the error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from actors.replica.dataflow.policy import StepDeclined
from actors.runtime.errors import (
    ConnectionBroken,
    DeadlineExceeded,
    DefiniteError,
    EngineLost,
    EngineUnavailable,
    JobTooLarge,
    OperationCanceled,
    PenstockError,
    ReadBelowSince,
    ResourceBusy,
    ResourceClosed,
    StorageError,
    WouldBlock,
)
from actors.runtime.metric_table import STEPS_IN_ERROR
from actors.runtime.spans import measure

log = logging.getLogger("penstock.dataflow")

_LOSSES: Final = (
    ConnectionBroken,
    DeadlineExceeded,
    EngineLost,
    EngineUnavailable,
    OperationCanceled,
    ReadBelowSince,
    ResourceBusy,
    ResourceClosed,
    StorageError,
    WouldBlock,
    OSError,
    MemoryError,
)
_JUDGED: Final = (DefiniteError, JobTooLarge, StepDeclined)
"""Exceptions that need no counting: errors of the view already at the first time, and the request
to compute it whole."""
_NUMBER: Final = re.compile(r"\b0x[0-9a-f]+|\b[0-9a-f]*\d[0-9a-f]*\b|\d+")
"""Numbers of tasks, attempts and addresses, in which the same failure differs each time."""
ATTEMPTS_MAX: Final = 3
_KINDS_MAX: Final = 16


class RepeatedFailures:
    """Counts the failures of one view's steps by their kinds, until a step succeeds."""

    def __init__(self, name: str, id_: str) -> None:
        """Create it. `name` of the dataflow, for the log, and its id, for the measures."""
        self._name = name
        self._id = id_
        self._counts: dict[str, int] = {}

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Raise a failure of the body as `DefiniteError` once it has come as often as the limit
        says."""
        try:
            yield
        except Exception as error:
            text = self.note(error)
            if text is None:
                raise
            raise DefiniteError(text) from error
        self._counts.clear()

    def note(self, error: Exception) -> str | None:
        """Count a failure; return its text if it is the view's from now on."""
        if isinstance(error, (*_LOSSES, *_JUDGED)):
            return None
        text = f"{type(error).__name__}: {error}"
        # The same failure names another task, attempt or address each time.
        kind = _NUMBER.sub("#", text)
        # Failures that are always different are no kind, and must not fill memory.
        if kind not in self._counts and len(self._counts) >= _KINDS_MAX:
            self._counts.clear()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count < ATTEMPTS_MAX:
            return None
        if count == ATTEMPTS_MAX:
            measure(STEPS_IN_ERROR, 1, self._id)
            log.error("%s: in error after %d equal failures: %s", self._name, count, text)
        # An error of Python has a class that says something; ours have texts that do.
        return str(error) if isinstance(error, PenstockError) else text
