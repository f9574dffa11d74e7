"""Steps that wait for a core: who goes when, with plans and an engine that are stand-ins."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from actors.settings import Settings
from actors.spark.rounds import Rounds, Runnable
from actors.threshold_probes import ROUND_ALONE, ROUND_STEPS, Threshold, counts

EMPTY = pa.table({})
WAIT_SECONDS = 60


class Plan:
    """A prepared plan that runs alone until it is let go."""

    ready = True

    def __init__(self, gate: threading.Event) -> None:
        self.running = threading.Event()
        self._gate = gate

    def batches(self) -> None:
        """Made ahead of the round; here there is nothing to make."""

    def alone(self, wanted: pa.Schema) -> pa.Table:
        self.running.set()
        assert self._gate.wait(WAIT_SECONDS)
        return EMPTY


def beyond(threshold: Threshold) -> int:
    return counts()[threshold.place + 1]


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as made:
        yield made


def begun(pool: ThreadPoolExecutor, rounds: Rounds, plan: Any, group: str) -> Any:
    runnable: Runnable = plan
    return pool.submit(rounds.collect, runnable, EMPTY.schema, group, MagicMock())


def waiting(rounds: Rounds, count: int) -> bool:
    return len(rounds._waiting) == count


def test_a_step_that_waited_too_long_goes_out_beside_the_others(pool: ThreadPoolExecutor) -> None:
    rounds = Rounds(1, Settings(engine_round_wait_ms_max=1))
    gate, before = threading.Event(), beyond(ROUND_ALONE)
    first, second = Plan(gate), Plan(gate)
    answers = [begun(pool, rounds, first, "a")]
    assert first.running.wait(WAIT_SECONDS)
    answers.append(begun(pool, rounds, second, "b"))
    assert second.running.wait(WAIT_SECONDS), "the core is taken, and it runs all the same"
    gate.set()
    assert [each.result(WAIT_SECONDS) for each in answers] == [EMPTY, EMPTY]
    assert beyond(ROUND_ALONE) == before + 1


def test_a_round_takes_no_more_steps_than_it_may(pool: ThreadPoolExecutor) -> None:
    """One step is no round: it goes alone, and those behind it after it."""
    settings = Settings(engine_round_steps_max=1, engine_round_wait_ms_max=WAIT_SECONDS * 1_000)
    rounds = Rounds(1, settings)
    gate, before = threading.Event(), beyond(ROUND_STEPS)
    first = Plan(gate)
    answers = [begun(pool, rounds, first, "a")]
    assert first.running.wait(WAIT_SECONDS)
    answers += [begun(pool, rounds, Plan(gate), name) for name in ("b", "c")]
    turns = threading.Event()
    while not waiting(rounds, 2):
        turns.wait(0.001)
    gate.set()
    assert [each.result(WAIT_SECONDS) for each in answers] == [EMPTY] * 3
    assert beyond(ROUND_STEPS) == before + 1
    assert waiting(rounds, 0)
