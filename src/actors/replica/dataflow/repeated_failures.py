"""Tells a failure that repeats in the same way from one that may go away.

A view's step is retried after a failure. A lost resource (the engine, a store, a connection) comes
back at some point, however many attempts it takes. Any other failure that occurs `ATTEMPTS_MAX`
times in the same way belongs to the view: its contents at that time become the error.
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
"""Exceptions that need no counting: errors that belong to the view from the first time on, and the
request to recompute it in full."""
_NUMBER: Final = re.compile(r"\b0x[0-9a-f]+|\b[0-9a-f]*\d[0-9a-f]*\b|\d+")
"""Numbers of tasks, attempts and addresses, which differ between occurrences of the same
failure."""
ATTEMPTS_MAX: Final = 3
_KINDS_MAX: Final = 16


class RepeatedFailures:
    """Counts the failures of one view's steps by kind, until a step succeeds."""

    def __init__(self, name: str, id_: str) -> None:
        """Create the counter. `name` of the dataflow is used in the log, and its id in the
        metrics."""
        self._name = name
        self._id = id_
        self._counts: dict[str, int] = {}
        """Number of failures of each kind since the last success."""

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Raise a failure of the body as `DefiniteError` once it has occurred `ATTEMPTS_MAX`
        times."""
        try:
            yield
        except Exception as error:
            text = self.note(error)
            if text is None:
                raise
            raise DefiniteError(text) from error
        self._counts.clear()

    def note(self, error: Exception) -> str | None:
        """Count a failure. Return its text once it belongs to the view, otherwise None."""
        if isinstance(error, (*_LOSSES, *_JUDGED)):
            return None
        text = f"{type(error).__name__}: {error}"
        # The same failure names a different task, attempt or address each time.
        kind = _NUMBER.sub("#", text)
        # Failures that are always different have no common kind and must not fill the memory.
        if kind not in self._counts and len(self._counts) >= _KINDS_MAX:
            self._counts.clear()
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count < ATTEMPTS_MAX:
            return None
        if count == ATTEMPTS_MAX:
            measure(STEPS_IN_ERROR, 1, self._id)
            log.error(
                "%s: in error after failing %d times in the same way: %s", self._name, count, text
            )
        # For an error of Python the class is informative; for ours the text is.
        return str(error) if isinstance(error, PenstockError) else text
