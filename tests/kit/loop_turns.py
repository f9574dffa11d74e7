"""Fails a test in which a turn of the event loop takes too long, because everything else waits
meanwhile.

It measures the CPU time of the loop's own thread and not wall clock time, so a busy machine does
not make tests fail. It does not see delays by other threads, such as by the interpreter's lock.
"""

from __future__ import annotations

import gc
import threading
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

TURN_CPU_MS_MAX: Final = 50.0


@contextmanager
def bounded_turns(cpu_ms_max: float = TURN_CPU_MS_MAX) -> Iterator[None]:
    """Raise `AssertionError` at the end of the block if a turn of this thread's event loop took
    more than `limit_ms` of CPU time. The error names what ran in that turn."""
    here, run = threading.get_ident(), events.Handle._run
    longest = 0.0, ""

    def measured(handle: Any) -> None:
        nonlocal longest
        if threading.get_ident() != here:
            return run(handle)
        begun, shown = time.thread_time(), handle._callback
        try:
            return run(handle)
        finally:
            took_ms = (time.thread_time() - begun) * 1000
            if took_ms > longest[0]:
                longest = took_ms, repr(getattr(shown, "__self__", shown))

    # A service does this too. Objects left by earlier tests would make each full collection long.
    gc.collect()
    gc.freeze()
    try:
        with mock.patch.object(events.Handle, "_run", measured):
            yield
    finally:
        gc.unfreeze()
    took_ms, what = longest
    assert took_ms <= cpu_ms_max, f"a turn of the loop took {took_ms:.0f} ms: {what}"
