"""Retries: the attempts of one operation, the pauses between them, and their story."""

from __future__ import annotations

from random import Random
from typing import Protocol

import anyio


class RetryDelay(Protocol):
    """Gives the delay after so many failures: `Settings` does."""

    def retry_delay_ms(self, failures: int) -> int:
        """Return the delay before the next attempt, in ms, after `failures` (from 1) failures."""
        ...


def with_jitter(delay_ms: float, random: Random) -> float:
    """Return a pause from the upper half of a delay, so that many do not retry at once."""
    # Not from zero: a pause that is too short is a retry storm.
    return delay_ms * random.uniform(0.5, 1.0)


class RetryLoop:
    """Counts the failures of one operation, and pauses before each further attempt.

    Pauses grow as the settings say. With `random` each is drawn from its upper half. The loop ends
    after `failures_max` failures (None: never), which the caller turns into its error.

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

    def next_pause_ms(self) -> float | None:
        """Count a failure; return the pause before the next attempt, or None after too many."""
        self.failures += 1
        # The caller raises its own error: it alone knows whether the operation may have happened.
        if self._failures_max is not None and self.failures > self._failures_max:
            return None
        delay_ms = self._delay.retry_delay_ms(self.failures)
        return delay_ms if self._random is None else with_jitter(delay_ms, self._random)

    async def pause(self) -> bool:
        """Count a failure and wait for the next attempt. Return False at once after too many."""
        pause_ms = self.next_pause_ms()
        # At once: the caller's error must not wait for an attempt that will not come.
        if pause_ms is None:
            return False
        await anyio.sleep(pause_ms / 1000)
        return True

    def reset(self) -> None:
        """Forget the failures after a success."""
        self.failures = 0
