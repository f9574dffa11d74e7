"""Steps that wait for a core: who goes when, with plans and an engine that are stand-ins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from actors.errors import OperationCanceled
from actors.settings import Settings
from actors.spark.rounds import RunnablePlan, StepRounds
from actors.threshold_probes import HEAVY_STEP, ROUND_ALONE, ROUND_STEPS, ThresholdProbe, counts

EMPTY = pa.table({})
WAIT_SECONDS = 60


class Plan:
    """A prepared plan that runs alone until it is let go."""

    sociable = True

    def __init__(self, gate: threading.Event, expected_ms: float | None = 0.0) -> None:
        self.running = threading.Event()
        self._gate = gate
        self._expected_ms = expected_ms

    def expected_ms(self, rows: int) -> float | None:
        return self._expected_ms

    def took(self, rows: int, ms: float) -> None:
        """Nothing is learnt here."""

    def batches(self) -> None:
        """Made ahead of the round; here there is nothing to make."""

    def alone(self, wanted: pa.Schema, group: str) -> pa.Table:
        self.running.set()
        assert self._gate.wait(WAIT_SECONDS)
        return EMPTY


def beyond(threshold: ThresholdProbe) -> int:
    return counts()[threshold.place + 1]


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as made:
        yield made


def begun(
    pool: ThreadPoolExecutor,
    rounds: StepRounds,
    plan: Any,
    group: str,
    check: Callable[[], None] = lambda: None,
) -> Any:
    runnable: RunnablePlan = plan
    return pool.submit(rounds.collect, runnable, EMPTY.schema, group, MagicMock(), 1, check)


def waiting(rounds: StepRounds, count: int) -> bool:
    return len(rounds._waiting) == count


def test_a_step_that_waited_too_long_goes_out_beside_the_others(pool: ThreadPoolExecutor) -> None:
    rounds = StepRounds(1, Settings(engine_round_wait_ms_max=1))
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
    rounds = StepRounds(1, settings)
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


def test_heavy_steps_leave_a_core(pool: ThreadPoolExecutor) -> None:
    rounds = StepRounds(2, Settings())
    gate, opened, before = threading.Event(), threading.Event(), beyond(HEAVY_STEP)
    opened.set()
    heavy = [Plan(gate, 10_000.0) for _ in range(2)]
    answers = [begun(pool, rounds, heavy[0], "a")]
    assert heavy[0].running.wait(WAIT_SECONDS)
    answers.append(begun(pool, rounds, heavy[1], "b"))
    while beyond(HEAVY_STEP) < before + 2:
        pass
    assert begun(pool, rounds, Plan(opened), "c").result(WAIT_SECONDS) == EMPTY
    assert not heavy[1].running.is_set(), "there are two cores"
    gate.set()
    assert [each.result(WAIT_SECONDS) for each in answers] == [EMPTY, EMPTY]


def test_a_heavy_step_does_not_wait_long_behind_a_heavier_one(pool: ThreadPoolExecutor) -> None:
    rounds = StepRounds(2, Settings(engine_short_step_ms=1))
    gate, opened = threading.Event(), threading.Event()
    opened.set()
    heavier = Plan(gate, 10_000_000.0)
    answer = begun(pool, rounds, heavier, "a")
    assert heavier.running.wait(WAIT_SECONDS)
    assert begun(pool, rounds, Plan(opened, 10.0), "b").result(WAIT_SECONDS) == EMPTY
    gate.set()
    assert answer.result(WAIT_SECONDS) == EMPTY


def test_a_plan_of_which_nothing_is_known_runs_by_itself(pool: ThreadPoolExecutor) -> None:
    """It may be heavy: nobody stands behind it, nor does it wait."""
    rounds = StepRounds(1, Settings(engine_round_wait_ms_max=WAIT_SECONDS * 1_000))
    gate, opened = threading.Event(), threading.Event()
    opened.set()
    unknown = [Plan(gate, None) for _ in range(2)]
    answers = [begun(pool, rounds, each, name) for name, each in zip("ab", unknown, strict=True)]
    assert all(each.running.wait(WAIT_SECONDS) for each in unknown)
    assert begun(pool, rounds, Plan(opened), "c").result(WAIT_SECONDS) == EMPTY
    gate.set()
    assert [each.result(WAIT_SECONDS) for each in answers] == [EMPTY, EMPTY]


def test_a_heavy_step_that_waits_is_cancelled(pool: ThreadPoolExecutor) -> None:
    rounds = StepRounds(1, Settings())
    gate = threading.Event()
    first, second = Plan(gate, 10_000.0), Plan(gate, 10_000.0)
    answer = begun(pool, rounds, first, "a")
    assert first.running.wait(WAIT_SECONDS)

    def check() -> None:
        raise OperationCanceled("on request")

    with pytest.raises(OperationCanceled):
        begun(pool, rounds, second, "b", check).result(WAIT_SECONDS)
    assert not second.running.is_set()
    gate.set()
    assert answer.result(WAIT_SECONDS) == EMPTY


def test_a_step_is_expected_to_take_what_it_took_and_less_for_fewer_rows() -> None:
    plan = RunnablePlan.__new__(RunnablePlan)
    plan._costs = deque(maxlen=2)
    plan.took(0, 900.0)
    assert plan.expected_ms(10**6) is None, "nobody knows, for a rehearsal says nothing"
    plan.took(1_000, 300.0)
    assert plan.expected_ms(100) == pytest.approx(30)
    assert plan.expected_ms(2_000) == pytest.approx(300)
    plan.took(1_000, 900.0)
    assert plan.expected_ms(2_000) == pytest.approx(300), "one that was slow says little"
    plan.took(1_000, 800.0)
    assert plan.expected_ms(2_000) == pytest.approx(800), "two say more"
