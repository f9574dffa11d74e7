"""Retries pause as the settings say, with jitter from the upper half, and come to an end."""

from __future__ import annotations

from random import Random

from actors.runtime.kernel import RetryLoop, with_jitter
from actors.runtime.settings import Settings, backoff_ms

SETTINGS = Settings(retry_delay_ms_min=50, retry_delay_ms_max=1_000)


def test_pauses_double_up_to_the_most() -> None:
    loop = RetryLoop(SETTINGS)
    assert [loop.next_pause_ms() for _ in range(7)] == [50, 100, 200, 400, 800, 1_000, 1_000]
    loop.reset()
    assert (loop.next_pause_ms(), loop.failures) == (50, 1)
    assert backoff_ms(10**9, 50, 1_000) == 1_000


def test_jitter_is_from_the_upper_half() -> None:
    random = Random(1)
    found = [with_jitter(100, random) for _ in range(200)]
    assert 50 <= min(found) < 60
    assert 90 < max(found) <= 100


async def test_too_many_failures_end_the_loop() -> None:
    loop = RetryLoop(SETTINGS, failures_max=1, random=Random(1))
    assert [await loop.pause(), await loop.pause()] == [True, False]
    assert loop.failures == 2
