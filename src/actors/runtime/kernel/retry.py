"""Retries: the failures of one operation and the pauses between its attempts."""

from __future__ import annotations

from random import Random
from typing import Protocol

import anyio


class RetryDelay(Protocol):
    """Determines the delay between attempts; `Settings` implements it."""

    def retry_delay_ms(self, failures: int) -> int:
        """Return the delay in ms before the next attempt, after `failures` failures (from 1)."""
        ...


def with_jitter(delay_ms: float, random: Random) -> float:
    """Draw a pause from the upper half of a delay, so that many do not retry simultaneously."""
    # Not from zero, because pauses that are too short cause a retry storm.
    return delay_ms * random.uniform(0.5, 1.0)


class RetryLoop:
    """Counts the failures of one operation and pauses before each new attempt.

    `delay` determines the pauses. With `random`, jitter is added (`with_jitter`). After
    `failures_max` failures (None: no limit) there are no more attempts, and the caller raises its
    own error.

    >>> class Slow:
    ...     def retry_delay_ms(self, failures: int) -> int:
    ...         return 10 << failures
    >>> loop = RetryLoop(Slow(), failures_max=2)
    >>> loop.next_pause_ms(), loop.next_pause_ms(), loop.next_pause_ms()
    (20, 40, None)
    """

    def __init__(
        self,
        delay: RetryDelay,
        *,
        failures_max: int | None = None,
        random: Random | None = None,
    ) -> None:
        self._delay = delay
        self._failures_max = failures_max
        self._random = random
        self.failures = 0
        """Number of failures since the last `reset`."""

    def next_pause_ms(self) -> float | None:
        """Count a failure. Return the pause before the next attempt in ms, None after too many."""
        self.failures += 1
        # The caller raises the error, because only it knows whether the operation may have
        # happened.
        if self._failures_max is not None and self.failures > self._failures_max:
            return None
        delay_ms = self._delay.retry_delay_ms(self.failures)
        return delay_ms if self._random is None else with_jitter(delay_ms, self._random)

    async def pause(self) -> bool:
        """Count a failure and wait for the next attempt. Return False after too many failures."""
        pause_ms = self.next_pause_ms()
        # Without a pause, so that the caller's error is not delayed.
        if pause_ms is None:
            return False
        await anyio.sleep(pause_ms / 1000)
        return True

    def reset(self) -> None:
        """Forget the failures after a success."""
        self.failures = 0
