"""The longest wait of a test, in real time, for what must come.

A wait for a condition needs some limit, so that a test fails instead of hanging. The limit must say
nothing about speed: it is far beyond what the slowest machine needs, and costs nothing while tests
pass. `tests/test_suite_deadlines.py` refuses shorter limits on real time.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 300
PATIENCE_MS: Final = PATIENCE_S * 1000
PROGRAM_S: Final = 800
"""The same for a program that runs to its end; less than pytest's own limit of a test, 900 s."""
