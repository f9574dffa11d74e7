"""Events that the dataflow machine handles, effects that it returns, its step and states. Pure.

Events of the inputs (`PartsDescribed`, `PartFetched`, `FetchFailed`, `ListenFailed`) are the
protocol's own messages. An event that names an incarnation or the number of a step applies only to
that one. `machine` explains the states and contains the table of transitions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import pyarrow as pa

from actors.model.protocol.internal import FetchFailed, ListenFailed, PartFetched, PartsDescribed
from actors.replica.dataflow.dataflow_input import PartInterval
from actors.runtime.progress import Frontier, Time

E = TypeVar("E", bound=msgspec.Struct)


# A step's events carry its number, so that `DataflowMachine.handle` can recognize late events of a
# step that was abandoned.
class DataflowStep(msgspec.Struct, frozen=True, gc=False):
    """One step, named by (dataflow, incarnation, number)."""

    incarnation: int
    number: int
    lo: Time
    hi: Frontier
    times: tuple[Time, ...]
    """Distinct times at which the inputs changed, ascending. Empty if only the upper advances."""
    deltas: tuple[tuple[pa.Table, ...], ...]
    """Updates below `hi`, for each input."""
    in_error: bool
    """True if the collection holds a definite error before this step."""
    snapshot: bool = False
    """True for the first step of an index or subscribe, whose deltas are the contents at the
    as_of."""
    error: str | None = None
    """Definite error that is the result of this step."""
    followed: bool = False
    """True if another replica has committed the step."""

    def is_divisible(self, *, temporal: bool) -> bool:
        """Return whether the step may change the output at more than one time.

        These are the times of the step, or any time if the clock alone changes the output
        (`temporal`).
        """
        return self.hi - self.lo > 1 if temporal else len(self.times) > 1


# -- events ----------------------------------------------------------------------------------------


class SuspensionEnded(msgspec.Struct, frozen=True, gc=False):
    """The dataflow was scheduled, which ends its suspension."""


class StateRestored(msgspec.Struct, frozen=True, gc=False):
    """The durable state was read: steps continue from `lo`, and inputs are read from `as_of` on.

    The first step contains the snapshots of the inputs marked in `snapshots`.
    """

    incarnation: int
    lo: Time
    as_of: Time
    snapshots: tuple[bool, ...]
    in_error: bool = False


class InputsReady(msgspec.Struct, frozen=True, gc=False):
    """The listen and fetch tasks of this incarnation are running."""

    incarnation: int


class StepComputed(msgspec.Struct, frozen=True, gc=False):
    """The step's result was computed."""

    number: int


class FailedDefinitely(msgspec.Struct, frozen=True, gc=False):
    """The step failed with a definite error of the data."""

    number: int
    text: str


class StepCommitted(msgspec.Struct, frozen=True, gc=False):
    """The step became durable."""

    number: int


class UpperMismatched(msgspec.Struct, frozen=True, gc=False):
    """Another replica was first to advance the output's upper, to `upper`."""

    number: int
    upper: Frontier


class StandbyExpired(msgspec.Struct, frozen=True, gc=False):
    """No other replica committed the step within `standby_ms`."""

    number: int


class ReplicaFollowed(msgspec.Struct, frozen=True, gc=False):
    """Another replica's append was read. `error` is the output's error after it."""

    number: int
    error: str | None = None


class StepInstalled(msgspec.Struct, frozen=True, gc=False):
    """Arrangements and readers have received the step's delta."""

    number: int


class StageFailed(msgspec.Struct, frozen=True, gc=False):
    """A stage failed with an indefinite error of a store or the engine.

    Args:
        number: Number of the step; 0 while hydrating.
        restart: Repeating the stage cannot help; a new incarnation is needed.
        too_large: The step may be too large for the engine.
        final: The step is too large for the engine, and would be again.
    """

    incarnation: int
    number: int
    text: str
    restart: bool = False
    too_large: bool = False
    final: bool = False


class RetryDue(msgspec.Struct, frozen=True, gc=False):
    """The delay of retry number `attempt` has passed."""

    attempt: int


class StepDue(msgspec.Struct, frozen=True, gc=False):
    """The step after number `number` is due; if it came later the output would be too old."""

    number: int


class DropRequested(msgspec.Struct, frozen=True, gc=False):
    """The dataflow was dropped."""


Event: TypeAlias = (
    SuspensionEnded
    | StateRestored
    | InputsReady
    | PartsDescribed
    | PartFetched
    | FetchFailed
    | ListenFailed
    | StepComputed
    | FailedDefinitely
    | StepCommitted
    | UpperMismatched
    | StandbyExpired
    | ReplicaFollowed
    | StepInstalled
    | StageFailed
    | RetryDue
    | StepDue
    | DropRequested
)

# -- effects ---------------------------------------------------------------------------------------


class RestoreState(msgspec.Struct, frozen=True, gc=False):
    """Read the durable state, or compute it first if needed. Answered by `StateRestored`."""

    incarnation: int
    lo: Time


class StartTasks(msgspec.Struct, frozen=True, gc=False):
    """Start this incarnation's listen and fetch tasks. Answered by `InputsReady`."""

    incarnation: int


class StartListening(msgspec.Struct, frozen=True, gc=False):
    """Start listening to an input."""

    input_index: int
    as_of: Time
    snapshot: bool


class RequestPart(msgspec.Struct, frozen=True, gc=False):
    """Fetch a part."""

    input_index: int
    piece: PartInterval


class ReleaseParts(msgspec.Struct, frozen=True, gc=False):
    """Release the leases of parts that are no longer needed."""

    input_index: int
    keys: tuple[str, ...]


class GrantCredit(msgspec.Struct, frozen=True, gc=False):
    """Grant an input credit of `bytes`, because all parts of one description were consumed."""

    input_index: int
    bytes: int


class ComputeStep(msgspec.Struct, frozen=True, gc=False):
    """Compute the step. Answered by `StepComputed` or `FailedDefinitely`."""

    step: DataflowStep


class CommitStep(msgspec.Struct, frozen=True, gc=False):
    """Make the step durable. Answered by `StepCommitted` or `UpperMismatched`."""

    step: DataflowStep


class StandBy(msgspec.Struct, frozen=True, gc=False):
    """Wait for another replica to commit the step. Answered by `UpperMismatched` if one does,
    otherwise by `StandbyExpired`."""

    step: DataflowStep


class FollowReplica(msgspec.Struct, frozen=True, gc=False):
    """Read another replica's append from `lo` to `hi`. Answered by `ReplicaFollowed`."""

    step: DataflowStep


class InstallStep(msgspec.Struct, frozen=True, gc=False):
    """Pass the delta to arrangements and readers. Answered by `StepInstalled`."""

    step: DataflowStep


class ReportFrontier(msgspec.Struct, frozen=True, gc=False):
    """Report the new frontier. `step` advanced it; None: the restore did."""

    frontier: Frontier
    step: DataflowStep | None


class PublishStatus(msgspec.Struct, frozen=True, gc=False):
    """Publish the state and a text for the status."""

    state: str
    text: str


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Wait, longer with every attempt, then send `RetryDue`."""

    attempt: int


class PaceStep(msgspec.Struct, frozen=True, gc=False):
    """Send `StepDue` just before the output, which is complete below `lo`, gets too old."""

    number: int
    lo: Frontier


class CancelWork(msgspec.Struct, frozen=True, gc=False):
    """Cancel all work of this dataflow."""


class FinishDataflow(msgspec.Struct, frozen=True, gc=False):
    """End the dataflow, because `lo` reached `until` or the empty frontier."""

    lo: Frontier


Effect: TypeAlias = (
    RestoreState
    | StartTasks
    | StartListening
    | RequestPart
    | ReleaseParts
    | GrantCredit
    | ComputeStep
    | CommitStep
    | StandBy
    | FollowReplica
    | InstallStep
    | ReportFrontier
    | PublishStatus
    | RetryLater
    | PaceStep
    | CancelWork
    | FinishDataflow
)


# -- states and their transitions ------------------------------------------------------------------


class DataflowPhase(enum.Enum):
    """State of a dataflow; `machine` explains the states."""

    SUSPENDED = "suspended"
    HYDRATING = "hydrating"
    GATHERING = "gathering"
    STANDING_BY = "standing by"
    RUNNING = "running"
    COMMITTING = "committing"
    FOLLOWING = "following"
    INSTALLING = "installing"
    ERRORED = "errored"
    FROZEN = "frozen"
    DROPPED = "dropped"


REST: Final = (DataflowPhase.GATHERING, DataflowPhase.ERRORED)
CARRYING: Final = (
    DataflowPhase.STANDING_BY,
    DataflowPhase.RUNNING,
    DataflowPhase.COMMITTING,
    DataflowPhase.FOLLOWING,
    DataflowPhase.INSTALLING,
)
LIVE: Final = (DataflowPhase.HYDRATING, *REST, *CARRYING)


class StateTransition(msgspec.Struct, frozen=True, gc=False):
    """Handler of an event in a state, and the states to which it may lead."""

    handler: Callable[[Any, Any], list[Effect]]
    """Takes the machine and the event."""
    targets: frozenset[DataflowPhase]


TransitionTable: TypeAlias = dict[tuple[DataflowPhase, type[msgspec.Struct]], StateTransition]
"""Transition for each accepted pair of state and event."""


def same_targets(
    states: Iterable[DataflowPhase], *targets: DataflowPhase, stays: bool = False
) -> dict[DataflowPhase, frozenset[DataflowPhase]]:
    """Map each of `states` to the same targets, plus the state itself if it may stay."""
    return {state: frozenset((*targets, state) if stays else targets) for state in states}


def on_event(
    event: type[E],
    handler: Callable[[Any, E], list[Effect]],
    targets: Mapping[DataflowPhase, frozenset[DataflowPhase]],
) -> TransitionTable:
    """Return the transitions for one event. The keys of `targets` are the states that accept it."""
    return {(state, event): StateTransition(handler, found) for state, found in targets.items()}
