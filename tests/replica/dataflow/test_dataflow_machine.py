"""The dataflow machine alone: no loop, no clock; events in, effects out."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.model.protocol.internal import (
    DescribedPart,
    FetchFailed,
    ListenFailed,
    PartFetched,
    PartsDescribed,
)
from actors.replica.dataflow import events as m
from actors.replica.dataflow.events import DataflowPhase
from actors.replica.dataflow.machine import DataflowMachine, check_machine
from actors.runtime.errors import CorruptData, LocalProtocolError
from actors.runtime.progress import EMPTY
from suite_lanes import examples  # type: ignore[import-not-found]


def updates(*times: int, error: str | None = None) -> pa.Table:
    """One update a time; its row is the time."""
    columns = {
        "a": pa.array([None if error else time for time in times], pa.int64()),
        TIME: pa.array(times, pa.int64()),
        DIFF: pa.array([1] * len(times), pa.int64()),
    }
    if error is not None:
        columns[ERROR] = pa.array([error] * len(times), pa.string())
    return pa.table(columns)


def part(key: str, lower: int, upper: int, size: int = 10) -> DescribedPart:
    return DescribedPart(key, "s", None, lower, upper, bytes=size, rows=1)


def described(
    input_index: int, lower: int, upper: int, *parts: DescribedPart, incarnation: int = 1
) -> PartsDescribed:
    return PartsDescribed("d", incarnation, input_index, parts, lower, upper)


class Checked(DataflowMachine):
    """Checks its invariants after every event."""

    def handle(self, event: m.Event) -> list[m.Effect]:
        effects = super().handle(event)
        check_machine(self)
        return effects


def machine(**changes: object) -> DataflowMachine:
    values: dict[str, object] = {
        "inputs": 1,
        "durable": True,
        "as_of": 4,
        "budget_bytes": 10_000,
        "fetches_max": 4,
    }
    return Checked(**(values | changes))  # type: ignore[arg-type]


def running(made: DataflowMachine, lo: int = 5, **restored: object) -> DataflowMachine:
    """A machine at rest, its inputs started."""
    made.handle(m.SuspensionEnded())
    values: dict[str, object] = {
        "incarnation": made.incarnation,
        "lo": lo,
        "as_of": lo - 1,
        "snapshots": (False,) * made.input_count,
    }
    made.handle(m.StateRestored(**(values | restored)))  # type: ignore[arg-type]
    made.handle(m.InputsReady(made.incarnation))
    return made


def asks(effects: list[m.Effect]) -> list[m.RequestPart]:
    return [effect for effect in effects if isinstance(effect, m.RequestPart)]


def answer(made: DataflowMachine, ask: m.RequestPart, rows: pa.Table) -> list[m.Effect]:
    return made.handle(
        PartFetched(
            "d", made.incarnation, ask.input_index, ask.piece.time, ask.piece.part.key, rows
        )
    )


def kinds(effects: list[m.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def computing(effects: list[m.Effect]) -> m.ComputeStep:
    compute = effects[-1]
    assert isinstance(compute, m.ComputeStep)
    return compute


def one_step(
    made: DataflowMachine, upper: int, rows: pa.Table, lower: int | None = None
) -> m.ComputeStep:
    """Described and fetched: the step is cut."""
    lower = made.lo if lower is None else lower
    (ask,) = asks(made.handle(described(0, lower, upper, part(f"p{upper}", lower, upper))))
    return computing(answer(made, ask, rows))


def finish(made: DataflowMachine) -> list[m.Effect]:
    """Computed, committed, installed."""
    effects: list[m.Effect] = []
    for event in (m.StepComputed, m.StepCommitted, m.StepInstalled):
        if (made.state, event) in DataflowMachine.TRANSITIONS:
            effects = made.handle(event(made.number))
    return effects


def test_the_table_accepts_every_event_somewhere_and_none_when_dropped() -> None:
    table = DataflowMachine.TRANSITIONS
    assert {event for _, event in table} == set(get_args(m.Event))
    assert {state for state, _ in table} == set(DataflowPhase) - {DataflowPhase.DROPPED}
    # Every state can be reached.
    reached, found = {DataflowPhase.SUSPENDED}, {DataflowPhase.SUSPENDED}
    while found:
        found = {
            target
            for (state, _), transition in table.items()
            if state in found
            for target in transition.targets
        } - reached
        reached |= found
    assert reached == set(DataflowPhase)


@pytest.fixture
def made() -> DataflowMachine:
    return running(machine())


def test_a_handler_that_leaves_the_targets_is_found(
    made: DataflowMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key: Any = (DataflowPhase.GATHERING, m.DropRequested)
    wrong = m.StateTransition(DataflowMachine.TRANSITIONS[key].handler, frozenset())
    monkeypatch.setitem(DataflowMachine.TRANSITIONS, key, wrong)
    with pytest.raises(AssertionError, match="DropRequested"):
        made.handle(m.DropRequested())


def test_a_step_goes_through_its_stages() -> None:
    made = machine()
    assert made.state.value == "suspended"
    assert kinds(made.handle(m.SuspensionEnded())) == ["PublishStatus", "RestoreState"]
    effects = made.handle(m.StateRestored(1, 5, 4, (False,)))
    assert kinds(effects) == ["ReportFrontier", "StartTasks"]
    assert made.handle(m.InputsReady(1))[0] == m.StartListening(0, 4, False)
    compute = one_step(made, 8, updates(5, 7))
    assert (compute.step.lo, compute.step.hi, compute.step.times) == (5, 8, (5, 7))
    assert kinds(made.handle(m.StepComputed(1))) == ["CommitStep"]
    assert kinds(made.handle(m.StepCommitted(1))) == ["InstallStep"]
    assert made.handle(m.StepInstalled(1))[0] == m.ReportFrontier(8, compute.step)
    assert made.lo == 8


def test_a_fetched_part_returns_its_lease_and_its_bytes(made: DataflowMachine) -> None:
    (ask,) = asks(made.handle(described(0, 5, 8, part("p", 5, 8))))
    assert answer(made, ask, updates(6))[:2] == [m.ReleaseParts(0, ("p",)), m.GrantCredit(0, 10)]


def test_every_description_is_answered_once_when_all_its_parts_are_done() -> None:
    made = running(machine(inputs=2))
    assert made.handle(described(0, 5, 6)) == [m.GrantCredit(0, 0)]
    effects = made.handle(described(0, 6, 8, part("p", 6, 8), part("q", 6, 8, size=5)))
    assert effects == []
    first, second = asks(made.handle(described(1, 5, 8)))
    assert m.GrantCredit(0, 15) not in answer(made, first, updates(6))
    assert m.GrantCredit(0, 15) in answer(made, second, updates(6))


def test_without_updates_only_the_upper_moves(made: DataflowMachine) -> None:
    *_, commit = made.handle(described(0, 5, 9))
    assert isinstance(commit, m.CommitStep)
    assert commit.step.times == ()
    finish(made)
    assert made.lo == 9


def test_hi_is_the_least_progress_and_later_rows_wait() -> None:
    made = running(machine(inputs=2))
    assert made.handle(described(0, 5, 20, part("p", 5, 20))) == []
    effects = made.handle(described(1, 5, 12))
    (ask,) = asks(effects)
    compute = computing(answer(made, ask, updates(6, 11, 12, 19)))
    assert compute.step.hi == 12
    assert compute.step.times == (6, 11)
    finish(made)
    compute = computing(made.handle(described(1, 12, 20)))
    assert compute.step.times == (12, 19)


def test_descriptions_pile_up_while_a_step_runs_and_the_budget_limits_the_next() -> None:
    made = running(machine(budget_bytes=25))
    one_step(made, 6, updates(5))
    for time in range(6, 12):
        assert made.handle(described(0, time, time + 1, part(f"q{time}", time, time + 1))) == []
    effects = finish(made)
    assert [ask.piece.part.key for ask in asks(effects)] == ["q6", "q7"]
    assert made.hi == 8


def test_what_the_next_step_may_take_is_fetched_while_one_runs() -> None:
    made = running(machine(budget_bytes=1000))
    one_step(made, 8, updates(5))
    size = updates(5).nbytes
    (ask,) = asks(made.handle(described(0, 8, 10, part("q", 8, 10, 900))))
    assert answer(made, ask, updates(8)) == [m.ReleaseParts(0, ("q",)), m.GrantCredit(0, 900)]
    # The step and what is held leave no room for this one.
    assert asks(made.handle(described(0, 10, 12, part("r", 10, 12, 1001 - 2 * size)))) == []
    (ask,) = asks(finish(made))
    assert ask.piece.part.key == "r"
    assert computing(answer(made, ask, updates(10))).step.times == (8, 10)


def test_a_fetch_ahead_that_fails_lets_the_running_step_finish(made: DataflowMachine) -> None:
    one_step(made, 8, updates(5))
    (ask,) = asks(made.handle(described(0, 8, 10, part("q", 8, 10))))
    error = CorruptData("part q", determinate=True)
    assert made.handle(FetchFailed("d", 1, 0, ask.piece.time, "q", error)) == []
    assert kinds(finish(made)) == ["ReportFrontier", "CancelWork", "PublishStatus", "RetryLater"]
    assert (made.lo, made.state) == (8, DataflowPhase.FROZEN)


def test_a_batch_over_the_budget_is_taken_all_the_same() -> None:
    made = running(machine(budget_bytes=5))
    assert len(asks(made.handle(described(0, 5, 6, part("p", 5, 6, size=500))))) == 1


def test_fetches_out_are_bounded() -> None:
    made = running(machine(fetches_max=2, budget_bytes=1000))
    parts = [part(f"p{index}", 5, 6) for index in range(5)]
    first = asks(made.handle(described(0, 5, 6, *parts)))
    assert len(first) == 2
    assert len(asks(answer(made, first[1], updates(5)))) == 1


def test_an_opaque_view_takes_one_time_a_step() -> None:
    made = running(machine(opaque=True))
    compute = one_step(made, 9, updates(5, 6, 8))
    assert (compute.step.hi, compute.step.times) == (6, (5,))
    compute = computing(finish(made))
    assert (compute.step.hi, compute.step.times) == (8, (6,))
    compute = computing(finish(made))
    assert (compute.step.hi, compute.step.times) == (9, (8,))


def test_a_pass_through_export_starts_with_the_snapshot() -> None:
    made = running(machine(durable=False), lo=5, snapshots=(True,))
    made.lo = 0
    snapshot = PartsDescribed("d", 1, 0, (part("p", 0, 5),), 0, 5, snapshot=True)
    (ask,) = asks(made.handle(snapshot))
    made.handle(described(0, 5, 9))
    compute = computing(answer(made, ask, updates(1, 3)))
    assert compute.step.snapshot
    assert (compute.step.lo, compute.step.hi, compute.step.times) == (0, 5, (4,))
    assert kinds(made.handle(m.StepComputed(1))) == ["InstallStep"]
    effects = made.handle(m.StepInstalled(1))
    install = effects[-1]
    assert isinstance(install, m.InstallStep)
    assert not install.step.snapshot
    assert (install.step.lo, install.step.hi) == (5, 9)


def test_a_definite_failure_halves_the_interval_down_to_one_time(made: DataflowMachine) -> None:
    one_step(made, 9, updates(5, 6, 7, 8))
    compute = computing(made.handle(m.FailedDefinitely(1, "bad")))
    assert (compute.step.hi, compute.step.times) == (7, (5, 6))
    compute = computing(made.handle(m.FailedDefinitely(2, "bad")))
    assert compute.step.times == (5,)
    (commit,) = made.handle(m.FailedDefinitely(3, "bad"))
    assert isinstance(commit, m.CommitStep)
    assert (commit.step.error, commit.step.times, commit.step.hi) == ("bad", (5,), 6)
    compute = computing(finish(made))
    assert made.in_error
    # In error a step looks at its last time only: all that waits goes into one.
    assert (compute.step.times, compute.step.in_error) == ((6, 7, 8), True)
    finish(made)
    assert not made.in_error
    assert made.state is DataflowPhase.GATHERING


def test_a_view_in_error_rests_errored_and_its_frontier_goes_on() -> None:
    made = running(machine(), in_error=True)
    assert made.state is DataflowPhase.ERRORED
    made.handle(described(0, 5, 9))
    finish(made)
    assert made.state is DataflowPhase.ERRORED
    assert made.lo == 9
    one_step(made, 12, updates(9, 10))
    (commit,) = made.handle(m.FailedDefinitely(made.number, "still"))
    assert isinstance(commit, m.CommitStep)
    finish(made)
    assert made.in_error


def test_an_error_of_an_input_stands_alone_in_its_step(made: DataflowMachine) -> None:
    (first, second) = asks(made.handle(described(0, 5, 10, part("p", 5, 10), part("q", 5, 10))))
    answer(made, first, updates(5, 6, 8))
    compute = computing(answer(made, second, updates(6, error="upstream")))
    assert (compute.step.hi, compute.step.times) == (6, (5,))
    compute = computing(finish(made))
    assert (compute.step.hi, compute.step.times) == (8, (6,))


@pytest.mark.parametrize("kind", [FetchFailed, ListenFailed])
def test_a_failed_input_freezes_and_never_advances(made: DataflowMachine, kind: type) -> None:
    error = CorruptData("part p", determinate=True)
    (ask,) = asks(made.handle(described(0, 5, 8, part("p", 5, 8))))
    if kind is FetchFailed:
        failure = FetchFailed("d", 1, 0, ask.piece.time, "p", error)
        effects = made.handle(failure)
    else:
        # What it has described is whole, and taken first.
        assert made.handle(ListenFailed("d", 1, 0, error)) == []
        effects = made.handle(FetchFailed("d", 1, 0, ask.piece.time, "p", error))
    assert kinds(effects) == ["CancelWork", "PublishStatus", "RetryLater"]
    assert made.state is DataflowPhase.FROZEN
    assert made.handle(described(0, 8, 20)) == []
    assert made.lo == 5
    effects = made.handle(m.RetryDue(1))
    assert effects[-2:] == [m.CancelWork(), m.PublishStatus("hydrating", "")] or kinds(effects) == [
        "CancelWork",
        "PublishStatus",
        "RestoreState",
    ]
    assert made.incarnation == 2
    # What the dead incarnation's tasks still say is of no interest, now and when all runs again.
    assert made.handle(described(0, 5, 9, incarnation=1)) == []
    made.handle(m.StateRestored(2, 5, 4, (False,)))
    made.handle(m.InputsReady(2))
    assert made.handle(described(0, 5, 9, part("q", 5, 9), incarnation=1)) == []
    assert made.handle(PartFetched("d", 1, 0, ask.piece.time, "p", updates(5))) == []
    assert asks(made.handle(described(0, 5, 9, part("q", 5, 9), incarnation=2)))


def test_a_freeze_lets_a_commit_finish_first(made: DataflowMachine) -> None:
    one_step(made, 8, updates(5))
    made.handle(m.StepComputed(1))
    assert made.handle(ListenFailed("d", 1, 0, CorruptData("x", determinate=True))) == []
    made.handle(m.StepCommitted(1))
    effects = made.handle(m.StepInstalled(1))
    assert kinds(effects) == ["ReportFrontier", "CancelWork", "PublishStatus", "RetryLater"]
    assert made.lo == 8


def test_a_mismatch_without_an_upper_to_go_to_starts_a_new_incarnation(
    made: DataflowMachine,
) -> None:
    one_step(made, 8, updates(5))
    made.handle(m.StepComputed(1))
    effects = made.handle(m.UpperMismatched(1, EMPTY))
    assert effects[-1] == m.RestoreState(2, 5)
    made.handle(m.StateRestored(2, 11, 10, (False,)))
    assert made.lo == 11


def test_an_indefinite_failure_repeats_the_stage(made: DataflowMachine) -> None:
    step = one_step(made, 8, updates(5)).step
    effects = made.handle(m.StageFailed(1, 1, "EngineLost: gone"))
    assert effects == [m.PublishStatus("stalled", "EngineLost: gone"), m.RetryLater(1)]
    assert made.handle(m.RetryDue(1)) == [m.ComputeStep(step)]
    made.handle(m.StepComputed(1))
    made.handle(m.StageFailed(1, 1, "StorageError: gone"))
    assert kinds(made.handle(m.RetryDue(2))) == ["CancelWork", "PublishStatus", "RestoreState"]


def test_a_step_that_ended_the_engine_is_halved_and_later_ones_stay_small() -> None:
    made = running(machine(budget_bytes=1000))
    size = updates(5).nbytes
    one_step(made, 13, updates(*range(5, 13)))
    assert made.step is not None
    made.handle(m.StageFailed(1, 1, "EngineLost: no memory", too_large=True))
    compute = computing(made.handle(m.RetryDue(1)))
    assert (compute.step.times, compute.step.hi) == ((5, 6, 7, 8), 9)
    assert made.budget_bytes == 2 * size
    # The other half is cut to what the budget allows by then: half of what went well.
    compute = computing(finish(made))
    assert (compute.step.times, made.budget_bytes) == ((9, 10, 11, 12), 4 * size)
    finish(made)
    assert made.budget_bytes == 8 * size


def test_a_step_of_one_time_that_ended_the_engine_is_repeated(made: DataflowMachine) -> None:
    step = one_step(made, 8, updates(5)).step
    made.handle(m.StageFailed(1, 1, "EngineLost: no memory", too_large=True))
    assert made.handle(m.RetryDue(1)) == [m.ComputeStep(step)]


def test_what_is_too_large_at_a_single_time_is_the_steps_result(made: DataflowMachine) -> None:
    one_step(made, 8, updates(5, 6))
    made.handle(m.StageFailed(1, 1, "JobTooLarge: no", too_large=True, final=True))
    assert computing(made.handle(m.RetryDue(1))).step.times == (5,)
    effects = made.handle(m.StageFailed(1, 2, "JobTooLarge: no", too_large=True, final=True))
    assert kinds(effects) == ["CommitStep"]
    assert made.step is not None
    assert made.step.error == "JobTooLarge: no"
    made.handle(m.StepCommitted(2))
    # In error it is computed whole, at the last of its times, and fails for all of them.
    step = computing(made.handle(m.StepInstalled(2))).step
    assert (step.times, step.in_error) == ((6,), True)


def test_rows_that_are_larger_than_their_parts_are_cut_to_the_budget() -> None:
    size = updates(5).nbytes
    made = running(machine(budget_bytes=3 * size))
    compute = one_step(made, 9, updates(5, 6, 6, 7, 8))
    assert compute.step.times == (5, 6)
    assert computing(finish(made)).step.times == (7, 8)


def test_a_failure_that_repeating_cannot_mend_starts_a_new_incarnation(
    made: DataflowMachine,
) -> None:
    one_step(made, 8, updates(5))
    made.handle(m.StageFailed(1, 1, "ReadBelowSince: 3", restart=True))
    assert kinds(made.handle(m.RetryDue(1))) == ["CancelWork", "PublishStatus", "RestoreState"]


def test_a_failed_restore_is_tried_again() -> None:
    made = machine()
    made.handle(m.SuspensionEnded())
    made.handle(m.StageFailed(1, 0, "Busy: later"))
    assert made.handle(m.RetryDue(1))[-1] == m.RestoreState(2, 0)


def test_what_was_restored_counts_once_an_incarnation() -> None:
    made = machine()
    made.handle(m.SuspensionEnded())
    restored = m.StateRestored(made.incarnation, 5, 4, (False,))
    assert m.StartTasks(1) in made.handle(restored)
    assert made.handle(restored) == []
    assert made.ignored == 1
    made.handle(m.InputsReady(1))
    assert made.state is DataflowPhase.GATHERING


def test_until_ends_it() -> None:
    made = running(machine(until=7))
    *_, commit = made.handle(described(0, 5, 20))
    assert isinstance(commit, m.CommitStep)
    assert commit.step.hi == 7
    effects = finish(made)
    assert effects[-2:] == [m.CancelWork(), m.FinishDataflow(7)]
    assert made.state is DataflowPhase.DROPPED


def test_inputs_that_are_complete_complete_the_output(made: DataflowMachine) -> None:
    made.handle(described(0, 5, EMPTY))
    assert finish(made)[-1] == m.FinishDataflow(EMPTY)


def test_without_inputs_the_output_is_complete() -> None:
    made = machine(inputs=0)
    made.handle(m.SuspensionEnded())
    effects = made.handle(m.StateRestored(1, 5, 4, ()))
    assert isinstance(effects[-1], m.CommitStep)
    assert finish(made)[-1] == m.FinishDataflow(EMPTY)


def test_dropped_is_final(made: DataflowMachine) -> None:
    one_step(made, 8, updates(5))
    assert made.handle(m.DropRequested()) == [m.CancelWork()]
    assert made.handle(m.StepComputed(1)) == []
    assert made.handle(m.SuspensionEnded()) == []
    assert made.ignored == 2


def test_nothing_below_the_as_of_is_reported() -> None:
    made = machine(as_of=20)
    made.handle(m.SuspensionEnded())
    assert kinds(made.handle(m.StateRestored(1, 5, 4, (False,)))) == ["StartTasks"]


def test_a_gap_or_a_stranger_is_refused(made: DataflowMachine) -> None:
    with pytest.raises(LocalProtocolError, match="does not continue"):
        made.handle(described(0, 7, 9))
    with pytest.raises(LocalProtocolError, match="was not requested"):
        made.handle(PartFetched("d", 1, 0, 9, "nobody", updates(5)))


# -- whatever the order of arrival ---------------------------------------------------------------


STAGE_DONE: dict[type[m.Effect], type[m.StepComputed | m.StepCommitted | m.StepInstalled]] = {
    m.ComputeStep: m.StepComputed,
    m.CommitStep: m.StepCommitted,
    m.InstallStep: m.StepInstalled,
}


@dataclass
class World:
    """Sources' batches, and what the machine made of them."""

    batches: list[list[tuple[int, int, list[list[int]]]]]
    """Per input, (lower, upper, parts' times)."""
    out: list[m.RequestPart] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)
    stages: list[m.Event] = field(default_factory=list)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        lower, found = 5, []
        for _ in range(draw(st.integers(1, 5))):
            upper = lower + draw(st.integers(1, 4))
            times = st.lists(st.integers(lower, upper - 1), min_size=1, max_size=3)
            found.append((lower, upper, draw(st.lists(times, max_size=3))))
            lower = upper
        batches.append(found)
    return World(batches)


@settings(max_examples=examples(200), deadline=None)
@given(worlds(), st.randoms(use_true_random=False), st.booleans(), st.integers(1, 60))
def test_any_order_of_arrival_seals_no_time_early(
    world: World, random: Random, opaque: bool, budget: int
) -> None:
    made = running(machine(inputs=len(world.batches), opaque=opaque, budget_bytes=budget))
    world.taken = [[] for _ in world.batches]
    rows = {
        f"{input_index}/{index}/{position}": times
        for input_index, batches in enumerate(world.batches)
        for index, (_, _, parts) in enumerate(batches)
        for position, times in enumerate(parts)
    }
    everything = [
        sorted(time for _, _, parts in batches for times in parts for time in times)
        for batches in world.batches
    ]
    next_batch = [0] * len(world.batches)
    frontier = made.lo

    def perform(effects: list[m.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, m.RequestPart):
                world.out.append(effect)
            elif isinstance(effect, m.ComputeStep | m.CommitStep | m.InstallStep):
                world.stages.append(STAGE_DONE[type(effect)](effect.step.number))

    while True:
        choices = [("describe", s) for s, at in enumerate(next_batch) if at < len(world.batches[s])]
        choices += [("fetch", index) for index in range(len(world.out))]
        choices += [("stage", 0)] * bool(world.stages)
        if not choices:
            break
        kind, index = random.choice(choices)
        if kind == "describe":
            lower, upper, parts = world.batches[index][next_batch[index]]
            keys = [f"{index}/{next_batch[index]}/{position}" for position in range(len(parts))]
            next_batch[index] += 1
            given_parts = [part(key, lower, upper) for key in keys]
            perform(made.handle(described(index, lower, upper, *given_parts)))
        elif kind == "fetch":
            ask = world.out.pop(index)
            perform(answer(made, ask, updates(*rows[ask.piece.part.key])))
        else:
            event = world.stages.pop(0)
            step = made.step
            assert step is not None
            if isinstance(event, m.StepInstalled):
                for input_index, tables in enumerate(step.deltas):
                    times = sorted(time for table in tables for time in table[TIME].to_pylist())
                    # Exactly the input's updates of this interval: none early, none late.
                    assert times == [t for t in everything[input_index] if step.lo <= t < step.hi]
                    world.taken[input_index] += times
            perform(made.handle(event))
        assert made.lo >= frontier
        frontier = made.lo
    reach = min(batches[-1][1] for batches in world.batches)
    assert made.lo == reach
    assert world.taken == [[t for t in times if t < reach] for times in everything]


# -- dataflows that change with the clock ----------------------------------------------------------


def test_a_temporal_dataflow_computes_steps_without_changes() -> None:
    made = running(machine(temporal=True))
    compute = computing(made.handle(described(0, 5, 9)))
    assert (compute.step.lo, compute.step.hi, compute.step.times) == (5, 9, (8,))
    finish(made)
    assert made.lo == 9
    compute = one_step(made, 12, updates(9))
    assert compute.step.times == (9, 11)


def test_a_temporal_step_that_fails_is_halved_down_to_a_millisecond() -> None:
    made = running(machine(temporal=True))
    compute = one_step(made, 9, updates(5))
    found = [(compute.step.lo, compute.step.hi)]
    while found[-1][1] - found[-1][0] > 1:
        compute = computing(made.handle(m.FailedDefinitely(made.number, "bad")))
        found.append((compute.step.lo, compute.step.hi))
    assert found == [(5, 9), (5, 7), (5, 6)]
    (commit,) = made.handle(m.FailedDefinitely(made.number, "bad"))
    assert isinstance(commit, m.CommitStep)
    assert (commit.step.error, commit.step.times) == ("bad", (5,))


def test_a_temporal_dataflow_in_error_looks_again_as_time_passes() -> None:
    made = running(machine(temporal=True), in_error=True)
    compute = computing(made.handle(described(0, 5, 9)))
    assert compute.step.in_error
    (commit,) = made.handle(m.FailedDefinitely(made.number, "still"))
    assert isinstance(commit, m.CommitStep), "in error it is not halved"
