"""Views that may be some time old: fewer and larger steps, and never older than they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    contents,
    numbers_plan,
    shard,
    table,
    view_description,
)
from dataflow_stage import Flow, Shards, surroundings  # type: ignore[import-not-found]
from msgspec.structs import replace
from test_dataflow_machine import (  # type: ignore[import-not-found]
    answer,
    asks,
    computing,
    described,
    finish,
    kinds,
    machine,
    one_step,
    part,
    running,
    updates,
)

from actors.model.plan.jobs import RunStep as StepJob
from actors.model.protocol.compute import StatusResponse
from actors.model.protocol.internal import ListenFailed
from actors.replica.dataflow import events as m
from actors.replica.dataflow.events import DataflowPhase
from actors.runtime.errors import CorruptData
from actors.testing.isolation import ActorIsolation

TARGET_MS = 500


# -- the machine -----------------------------------------------------------------------------------


def test_after_a_step_it_gathers_until_the_next_is_due() -> None:
    made = running(machine(paced=True))
    one_step(made, 8, updates(5, 7))
    effects = finish(made)
    assert effects[-1] == m.PaceStep(1, 8)
    (ask,) = asks(made.handle(described(0, 8, 10, part("a", 8, 10))))
    assert answer(made, ask, updates(9)) == [m.ReleaseParts(0, ("a",)), m.GrantCredit(0, 10)]
    (ask,) = asks(made.handle(described(0, 10, 20, part("b", 10, 20))))
    assert made.state is DataflowPhase.GATHERING
    # It is due, and not yet all there.
    assert made.handle(m.StepDue(1)) == []
    compute = computing(answer(made, ask, updates(11, 15)))
    assert (compute.step.lo, compute.step.hi, compute.step.times) == (8, 20, (9, 11, 15))
    assert finish(made)[-1] == m.PaceStep(2, 20)
    (ask,) = asks(made.handle(described(0, 20, 21, part("c", 20, 21))))
    answer(made, ask, updates(20))
    # That of a step before says nothing of this one.
    assert made.handle(m.StepDue(1)) == []
    assert made.state is DataflowPhase.GATHERING
    assert computing(made.handle(m.StepDue(2))).step.times == (20,)


def test_one_that_is_not_paced_is_never_told_to_wait() -> None:
    made = running(machine())
    one_step(made, 8, updates(5))
    assert "PaceStep" not in kinds(finish(made))
    one_step(made, 9, updates(8))
    assert made.state is DataflowPhase.RUNNING


def test_it_does_not_wait_with_a_full_budget() -> None:
    made = running(machine(paced=True, budget_bytes=25))
    one_step(made, 6, updates(5))
    finish(made)
    (ask,) = asks(made.handle(described(0, 6, 7, part("a", 6, 7))))
    answer(made, ask, updates(6))
    assert made.state is DataflowPhase.GATHERING
    (ask,) = asks(made.handle(described(0, 7, 9, part("b", 7, 8), part("c", 8, 9))))
    answer(made, ask, updates(7))
    assert made.step is not None
    assert (made.state, made.step.hi) == (DataflowPhase.RUNNING, 7)


def test_a_step_without_changes_does_not_wait() -> None:
    made = running(machine(paced=True))
    one_step(made, 8, updates(5))
    finish(made)
    assert kinds(made.handle(described(0, 8, 30)))[-1] == "CommitStep"
    assert finish(made)[-1] == m.PaceStep(2, 30)
    # Where the clock itself changes the output, it is no step without changes.
    made = running(machine(paced=True, temporal=True))
    one_step(made, 8, updates(5))
    finish(made)
    assert kinds(made.handle(described(0, 8, 30))) == ["GrantCredit"]
    assert computing(made.handle(m.StepDue(1))).step.times == (29,)


def test_the_first_step_of_an_incarnation_does_not_wait() -> None:
    made = running(machine(paced=True))
    one_step(made, 8, updates(5))
    finish(made)
    made.handle(m.StageFailed(1, 0, "a store"))
    made.handle(m.RetryDue(made.attempt))
    assert made.state is DataflowPhase.HYDRATING
    running(made, 8)
    assert made.incarnation == 2


def test_what_is_whole_before_a_failed_input_does_not_wait() -> None:
    made = running(machine(paced=True))
    one_step(made, 8, updates(5))
    finish(made)
    (ask,) = asks(made.handle(described(0, 8, 10, part("a", 8, 10))))
    answer(made, ask, updates(9))
    lost = ListenFailed("d", 1, 0, CorruptData("gone", determinate=True))
    assert computing(made.handle(lost)).step.hi == 10


def test_another_replicas_step_is_followed_at_once() -> None:
    made = running(machine(paced=True))
    one_step(made, 8, updates(5))
    finish(made)
    (ask,) = asks(made.handle(described(0, 8, 10, part("a", 8, 10))))
    answer(made, ask, updates(9))
    made.handle(m.StepDue(1))
    made.handle(m.StepComputed(2))
    made.handle(m.UpperMismatched(2, 12))
    (ask,) = asks(made.handle(described(0, 10, 12, part("b", 10, 12))))
    answer(made, ask, updates(11))
    assert made.state is DataflowPhase.FOLLOWING


# -- the actor -------------------------------------------------------------------------------------


class Paced:
    """A view of numbers that may be `TARGET_MS` old, at the times of the clock."""

    def __init__(self, stage: ActorIsolation, shards: Shards, flow: Flow) -> None:
        self.stage = stage
        self.shards = shards
        self.flow = flow
        self.written = 0

    @property
    def now(self) -> int:
        return int(self.stage.clock.now_ms())

    @property
    def upper(self) -> int:
        return max(self.flow.progress, default=0)

    @property
    def steps(self) -> int:
        return sum(isinstance(job, StepJob) and bool(job.inputs) for job in self.flow.jobs)

    async def write(self) -> int:
        """Writes a row at this time; its time."""
        self.written += 1
        time = self.now
        await self.shards.write("numbers", time + 1, table(NUMBERS, (100 + self.written, time, 1)))
        await self.stage.idle()
        return time


async def paced(stage: ActorIsolation, shards: Shards, scratch: Path, target_ms: int) -> Paced:
    begin = stage.clock.now_ms()
    await shard(shards.persist, "numbers", NUMBERS)
    await shard(shards.persist, "out", NUMBERS)
    await shards.write("numbers", begin, table(NUMBERS, (1, begin - 9, 1)))
    description = view_description(numbers_plan(), [("numbers", NUMBERS)], begin - 1)
    export = replace(description.export, target_lag_ms=target_ms)
    flow = Flow(stage, shards, scratch, replace(description, export=export))
    await flow.start()
    await flow.reported(begin)
    return Paced(stage, shards, flow)


async def test_many_writes_are_one_step_and_none_is_missing_for_longer(
    stage: ActorIsolation, tmp_path: Path
) -> None:
    async with surroundings(stage) as shards:
        view = await paced(stage, shards, tmp_path, TARGET_MS)
        await view.stage.advance(10)
        first = await view.write()  # the first after a restore comes at once
        await view.flow.reported(first + 1)
        steps, oldest = view.steps, 0
        for _ in range(200):
            await stage.advance(10)
            await view.write()
            oldest = max(oldest, view.now - view.upper)
        assert TARGET_MS / 2 < oldest <= TARGET_MS
        assert 3 <= view.steps - steps <= 6
        last = view.now
        await view.flow.until(lambda: view.upper > last, "the last write")
        assert view.now - last <= TARGET_MS
        found = await contents(shards.persist, "out", NUMBERS, last)
        assert len(found) == view.written + 1


async def test_after_a_rest_a_write_does_not_wait(stage: ActorIsolation, tmp_path: Path) -> None:
    async with surroundings(stage) as shards:
        view = await paced(stage, shards, tmp_path, TARGET_MS)
        await view.flow.reported(await view.write() + 1)
        await stage.advance(5 * TARGET_MS)
        time = await view.write()
        await view.flow.until(lambda: view.upper > time, "the write")
        assert view.now - time <= 5


@pytest.mark.parametrize("target_ms", [0, TARGET_MS])
async def test_a_long_step_begins_earlier(
    stage: ActorIsolation, tmp_path: Path, target_ms: int
) -> None:
    """Where steps take longer than the view may be old, it is as fresh as can be."""
    async with surroundings(stage) as shards:
        view = await paced(stage, shards, tmp_path, target_ms)
        view.flow.keep = True
        ages = []
        for _ in range(6):
            time = await view.write()
            await view.flow.until(lambda: bool(view.flow.kept), "a step")
            ages.append(view.now - time)
            await stage.advance(200)  # so long it takes
            (run,) = view.flow.kept
            view.flow.kept.clear()
            view.flow._answer(run.job, run.reply)
            await view.flow.until(lambda time=time: view.upper > time, "the write")
        waits = ages[2:]
        assert max(waits) <= max(0, target_ms - 200)
        if not target_ms:
            assert max(ages) <= 5
        status = view.flow.told(StatusResponse)[-1]
        assert status.step_ms > 199
