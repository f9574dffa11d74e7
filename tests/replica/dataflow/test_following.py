"""The dataflow machine when another replica was first: it follows, and stands by."""

from __future__ import annotations

from test_dataflow_machine import (  # type: ignore[import-not-found]
    answer,
    asks,
    computing,
    described,
    kinds,
    machine,
    one_step,
    part,
    running,
    updates,
)

from actors.replica.dataflow import events as m
from actors.replica.dataflow.events import DataflowPhase
from actors.replica.dataflow.machine import DataflowMachine, check_machine


def lost(made: DataflowMachine, upper: int) -> list[m.Effect]:
    """Another replica was first, and went to `upper`."""
    assert made.step is not None
    return made.handle(m.UpperMismatched(made.step.number, upper))


def test_a_lost_step_becomes_what_the_winner_appended() -> None:
    """The winner's step was shorter: the rows beyond it wait again."""
    made = running(machine())
    one_step(made, 9, updates(5, 7))
    made.handle(m.StepComputed(1))
    (follow,) = lost(made, 6)
    assert isinstance(follow, m.FollowReplica)
    assert (follow.step.lo, follow.step.hi, follow.step.times) == (5, 6, (5,))
    assert made.state is DataflowPhase.FOLLOWING
    check_machine(made)
    (install,) = made.handle(m.ReplicaFollowed(follow.step.number))
    assert isinstance(install, m.InstallStep)
    effects = made.handle(m.StepInstalled(follow.step.number))
    assert effects[0] == m.ReportFrontier(6, install.step)
    # It stands by for the rest; the winner is gone, so it makes that step itself.
    (stand_by,) = effects[1:]
    assert isinstance(stand_by, m.StandBy)
    assert (stand_by.step.lo, stand_by.step.hi, stand_by.step.times) == (6, 9, (7,))
    compute = computing(made.handle(m.StandbyExpired(stand_by.step.number)))
    made.handle(m.StepComputed(compute.step.number))
    made.handle(m.StepCommitted(compute.step.number))
    made.handle(m.StepInstalled(compute.step.number))
    assert made.lo == 9
    # Who was the first to commit does not stand by.
    assert one_step(made, 12, updates(10)).step.times == (10,)


def test_a_winner_that_went_further_is_followed_when_its_rows_are_there() -> None:
    made = running(machine())
    one_step(made, 8, updates(5))
    made.handle(m.StepComputed(1))
    assert lost(made, 11) == []
    assert made.state is DataflowPhase.GATHERING
    check_machine(made)
    (ask,) = asks(made.handle(described(0, 8, 11, part("p11", 8, 11))))
    follow = answer(made, ask, updates(9))[-1]
    assert isinstance(follow, m.FollowReplica)
    assert (follow.step.lo, follow.step.hi, follow.step.times) == (5, 11, (5, 9))
    made.handle(m.ReplicaFollowed(follow.step.number, "it fails now"))
    made.handle(m.StepInstalled(follow.step.number))
    assert made.in_error
    assert made.lo == 11


def test_a_winner_that_went_too_far_is_met_by_a_new_incarnation() -> None:
    made = running(machine(budget_bytes=100))
    one_step(made, 8, updates(5))
    made.handle(m.StepComputed(1))
    assert lost(made, 20) == []
    effects = made.handle(described(0, 8, 20, part("p20", 8, 20, size=300)))
    assert kinds(effects) == ["CancelWork", "PublishStatus", "RestoreState"]


def test_following_that_fails_starts_a_new_incarnation() -> None:
    made = running(machine())
    one_step(made, 8, updates(5))
    made.handle(m.StepComputed(1))
    (follow,) = lost(made, 8)
    assert isinstance(follow, m.FollowReplica)
    made.handle(m.StageFailed(1, follow.step.number, "ReadBelowSince: gone", restart=True))
    assert kinds(made.handle(m.RetryDue(1))) == ["CancelWork", "PublishStatus", "RestoreState"]
