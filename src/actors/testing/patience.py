"""The longest wait of a test, in real time, for what must come.

A wait for a condition needs some limit, so that a test fails instead of hanging. The limit must say
nothing about speed: it is far beyond what the slowest machine needs, and costs nothing while tests
pass. `tests/house/test_suite_deadlines.py` refuses shorter limits on real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

PATIENCE_S: Final = 300
PATIENCE_MS: Final = PATIENCE_S * 1000
PROGRAM_S: Final = 800
"""The same for a program that runs to its end; less than pytest's own limit of a test, 900 s."""


def growing_deadlines_ms(first_ms: int = 2_000) -> Iterator[int]:
    """Yield deadlines for a request that hangs, each four times as long as the one before.

    Other requests, which are answered, have the deadline of the one that hangs. A test begins with
    a short one, and tries the next one when an answer has come too late for it.
    """
    deadline_ms = first_ms
    while deadline_ms <= PATIENCE_MS:
        yield deadline_ms
        deadline_ms *= 4
