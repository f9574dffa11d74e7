"""The longest wait of a test, in real time, for something that must happen.

A wait for a condition needs some limit, so that a test fails instead of hanging. The limit should
say nothing about speed: it is far beyond what the slowest machine needs, and costs nothing while
tests pass. `tests/house/test_suite_deadlines.py` refuses shorter limits on real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

PATIENCE_S: Final = 300
PATIENCE_MS: Final = PATIENCE_S * 1000
PROGRAM_S: Final = 800
"""Time limit for a program that runs to its end; less than pytest's own limit per test, 900 s."""


def growing_deadlines_ms(first_ms: int = 2_000) -> Iterator[int]:
    """Yield deadlines for a request that hangs, each four times as long as the previous one.

    Other requests, which are answered, have the same deadline. A test starts with a short one, and
    tries the next one if an answer arrived too late for it.
    """
    deadline_ms = first_ms
    while deadline_ms <= PATIENCE_MS:
        yield deadline_ms
        deadline_ms *= 4
