"""The dataflow machine when an input fails: what is whole before what is missing is taken."""

from __future__ import annotations

import pytest
from test_dataflow_machine import (  # type: ignore[import-not-found]
    answer,
    asks,
    computing,
    described,
    finish,
    kinds,
    machine,
    part,
    running,
    updates,
)

from actors.model.protocol.internal import FetchFailed, ListenFailed
from actors.replica.dataflow import events as m
from actors.replica.dataflow.events import DataflowPhase
from actors.runtime.errors import CorruptData, LocalProtocolError, PenstockError, UnsoundFilter


def test_what_was_described_together_is_taken_up_to_the_missing_part() -> None:
    made = running(machine(fetches_max=2))
    parts = (part("p", 5, 7), part("q", 7, 9), part("r", 9, 12))
    ask, lost = asks(made.handle(described(0, 5, 12, *parts)))
    error = CorruptData("part q", determinate=True)
    effects = made.handle(FetchFailed("d", 1, 0, lost.piece.time, "q", error))
    assert effects == [], "nothing beyond it is asked for; what is before it is waited for"
    compute = computing(answer(made, ask, updates(5, 6)))
    assert (compute.step.lo, compute.step.hi, compute.step.times) == (5, 7, (5, 6))
    assert kinds(finish(made)) == ["ReportFrontier", "CancelWork", "PublishStatus", "RetryLater"]
    assert (made.lo, made.state) == (7, DataflowPhase.FROZEN)


def test_a_missing_part_leaves_its_place_to_the_other_fetches() -> None:
    made = running(machine(fetches_max=1))
    parts = (part("q", 7, 9), part("p", 5, 7))
    (lost,) = asks(made.handle(described(0, 5, 9, *parts)))
    error = CorruptData("part q", determinate=True)
    (ask,) = asks(made.handle(FetchFailed("d", 1, 0, lost.piece.time, "q", error)))
    assert computing(answer(made, ask, updates(6))).step.hi == 7


def test_a_listing_that_fails_freezes_behind_what_it_has_described() -> None:
    made = running(machine())
    (ask,) = asks(made.handle(described(0, 5, 8, part("p", 5, 8))))
    assert made.handle(ListenFailed("d", 1, 0, CorruptData("x", determinate=True))) == []
    assert computing(answer(made, ask, updates(6))).step.hi == 8
    assert kinds(finish(made)) == ["ReportFrontier", "CancelWork", "PublishStatus", "RetryLater"]
    assert (made.lo, made.state) == (8, DataflowPhase.FROZEN)


def test_a_failed_input_waits_for_no_other_that_is_described_no_further() -> None:
    made = running(machine(inputs=2))
    assert made.handle(described(0, 5, 8)) == [m.GrantCredit(0, 0)]
    effects = made.handle(ListenFailed("d", 1, 0, CorruptData("x", determinate=True)))
    assert kinds(effects) == ["CancelWork", "PublishStatus", "RetryLater"]
    assert (made.lo, made.state) == (5, DataflowPhase.FROZEN)


@pytest.mark.parametrize(
    "error", [UnsoundFilter("s", determinate=True), LocalProtocolError("a gap")]
)
def test_an_input_that_told_what_is_not_so_freezes_at_once(error: PenstockError) -> None:
    made = running(machine())
    made.handle(described(0, 5, 8, part("p", 5, 8)))
    effects = made.handle(ListenFailed("d", 1, 0, error))
    assert kinds(effects) == ["CancelWork", "PublishStatus", "RetryLater"]
    assert (made.lo, made.state) == (5, DataflowPhase.FROZEN)
