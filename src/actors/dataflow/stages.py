"""Stages of a view that races with other replicas, and the event that ends each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from actors.dataflow import events as m
from actors.dataflow.events import DataflowStep
from actors.dataflow.view import StepOutcome, ViewStages
from actors.progress import Frontier


class StageDone(msgspec.Struct, frozen=True, gc=False):
    """Message of the actor to itself: a stage ended with this event and result."""

    event: m.Event
    result: Any = None


Stage: TypeAlias = tuple[int, Callable[[], Awaitable[Any]], Callable[[Any], StageDone]]
"""The step's number, the function to run, and the one that maps its result to an event."""


def committing(view: ViewStages, step: DataflowStep, outcome: StepOutcome) -> Stage:
    """Return the stage that appends the step, unless another replica was first."""
    number = step.number

    def committed(upper: Frontier | None) -> StageDone:
        return StageDone(
            m.StepCommitted(number) if upper is None else m.UpperMismatched(number, upper)
        )

    return number, lambda: view.commit(step, outcome), committed


def standing_by(view: ViewStages, step: DataflowStep) -> Stage:
    """Return the stage that waits until another replica has committed the step."""
    number = step.number

    def overtaken(upper: Frontier) -> StageDone:
        return StageDone(m.UpperMismatched(number, upper))

    return number, lambda: view.stand_by(step), overtaken


def following(view: ViewStages, step: DataflowStep) -> Stage:
    """Return the stage that reads another replica's append."""
    number = step.number

    def followed(made: tuple[StepOutcome, str | None]) -> StageDone:
        return StageDone(m.ReplicaFollowed(number, made[1]), made[0])

    return number, lambda: view.follow(step), followed
