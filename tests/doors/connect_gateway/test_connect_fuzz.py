"""Plans that are none are refused by name: a slice of the campaign."""

from __future__ import annotations

import time
from random import Random

import pytest

from tests.kit.connect_fuzz import fuzzed_request, read_plan

CASES = 1_500
SECONDS_MAX = 20.0
"""Processor time of one request."""


def test_every_request_has_one_of_three_outcomes() -> None:
    outcomes: dict[str, int] = {}
    slowest = 0.0
    for seed in range(CASES):
        data = fuzzed_request(Random(seed))
        began = time.thread_time()
        outcome = read_plan(data)
        slowest = max(slowest, time.thread_time() - began)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.keys() == {"refused", "passed on", "rewritten"}
    assert min(outcomes.values()) > CASES // 50, outcomes
    assert slowest < SECONDS_MAX


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\xff" * 40])
def test_bytes_that_are_no_request(data: bytes) -> None:
    assert read_plan(data) in ("refused", "passed on")
