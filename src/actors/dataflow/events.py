"""Events that the dataflow machine handles, effects that it returns, and its step. Pure.

Events of the sources (`Described`, `Fetched`, `FetchFailed`, `ListenFailed`) are the protocol's own
messages. An event that names an incarnation or a step's number applies to that one only.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import pyarrow as pa

from actors.dataflow.gather import Piece
from actors.progress import Frontier, Time
from actors.protocol.internal import Described, Fetched, FetchFailed, ListenFailed


class Step(msgspec.Struct, frozen=True, gc=False):
    """One step, named by (dataflow, incarnation, number)."""

    incarnation: int
    number: int
    lo: Time
    hi: Frontier
    times: tuple[Time, ...]
    """Distinct times at which the inputs changed, ascending; empty if only the upper moves."""
    deltas: tuple[tuple[pa.Table, ...], ...]
    """Updates below `hi`, for each source."""
    in_error: bool
    """True if the collection holds a definite error before this step."""
    snapshot: bool = False
    """True for the first step of a pass-through incarnation, whose deltas are contents at the
    as_of."""
    error: str | None = None
    """Definite error that is this step's result."""
    followed: bool = False
    """True if another replica has committed the step."""

    def is_divisible(self, *, temporal: bool) -> bool:
        """Return whether the step may change the output at more than one time.

        Those are its own times; if the clock alone changes the output (`temporal`), any time.
        """
        return self.hi - self.lo > 1 if temporal else len(self.times) > 1


# -- events ----------------------------------------------------------------------------------------


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """The dataflow was scheduled, which ends its suspension."""


class Restored(msgspec.Struct, frozen=True, gc=False):
    """The durable state was read: steps continue from `lo`, and sources read from `as_of`.

    Snapshots (of the sources marked in `snapshots`) are the rows of the first step.
    """

    incarnation: int
    lo: Time
    as_of: Time
    snapshots: tuple[bool, ...]
    in_error: bool = False


class SourcesReady(msgspec.Struct, frozen=True, gc=False):
    """The listen and fetch tasks of this incarnation run."""

    incarnation: int


class Computed(msgspec.Struct, frozen=True, gc=False):
    """The step's result was computed."""

    number: int


class FailedDefinitely(msgspec.Struct, frozen=True, gc=False):
    """The step failed with a definite error of the data."""

    number: int
    text: str


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The step became durable."""

    number: int


class Mismatched(msgspec.Struct, frozen=True, gc=False):
    """Another replica moved the output's upper first, to `upper`."""

    number: int
    upper: Frontier


class Unclaimed(msgspec.Struct, frozen=True, gc=False):
    """No other replica committed the step within `standby_ms`."""

    number: int


class Followed(msgspec.Struct, frozen=True, gc=False):
    """Another replica's append was read; `error` is the output's error after it."""

    number: int
    error: str | None = None


class Installed(msgspec.Struct, frozen=True, gc=False):
    """Arrangements and readers have the step's delta."""

    number: int


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A stage failed with an indefinite error of a store or the engine.

    Args:
        number: The step's, 0 while hydrating.
        restart: Only a new incarnation can help; repeating the stage cannot.
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
    """The step after number `number` is due: later the output would be too old."""

    number: int


class Drop(msgspec.Struct, frozen=True, gc=False):
    """The dataflow was dropped."""


Event: TypeAlias = (
    Schedule
    | Restored
    | SourcesReady
    | Described
    | Fetched
    | FetchFailed
    | ListenFailed
    | Computed
    | FailedDefinitely
    | Committed
    | Mismatched
    | Unclaimed
    | Followed
    | Installed
    | Failed
    | RetryDue
    | StepDue
    | Drop
)

# -- effects ---------------------------------------------------------------------------------------


class Restore(msgspec.Struct, frozen=True, gc=False):
    """Read (or first compute) the durable state; answered by `Restored`."""

    incarnation: int
    lo: Time


class StartTasks(msgspec.Struct, frozen=True, gc=False):
    """Start this incarnation's listen and fetch tasks; answered by `SourcesReady`."""

    incarnation: int


class Listen(msgspec.Struct, frozen=True, gc=False):
    """Start listening to a source."""

    source: int
    as_of: Time
    snapshot: bool


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Fetch a part."""

    source: int
    piece: Piece


class Return(msgspec.Struct, frozen=True, gc=False):
    """Release the leases of parts that are no longer needed."""

    source: int
    keys: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, gc=False):
    """Grant credit of `bytes` to a source: all parts of one description were consumed."""

    source: int
    bytes: int


class Compute(msgspec.Struct, frozen=True, gc=False):
    """Compute the step; answered by `Computed` or `FailedDefinitely`."""

    step: Step


class Commit(msgspec.Struct, frozen=True, gc=False):
    """Make the step durable; answered by `Committed` or `Mismatched`."""

    step: Step


class StandBy(msgspec.Struct, frozen=True, gc=False):
    """Let another replica make the step; answered by `Mismatched` if it has, or `Unclaimed`."""

    step: Step


class Follow(msgspec.Struct, frozen=True, gc=False):
    """Read another replica's append from `lo` to `hi`; answered by `Followed`."""

    step: Step


class Install(msgspec.Struct, frozen=True, gc=False):
    """Pass the delta to arrangements and readers; answered by `Installed`."""

    step: Step


class Report(msgspec.Struct, frozen=True, gc=False):
    """Report the new frontier; `step` moved it (None: the restore)."""

    frontier: Frontier
    step: Step | None


class Show(msgspec.Struct, frozen=True, gc=False):
    """Publish the state, for people."""

    state: str
    text: str


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Wait, longer with every attempt, then send `RetryDue`."""

    attempt: int


class PaceStep(msgspec.Struct, frozen=True, gc=False):
    """Send `StepDue` just before the output, complete below `lo`, gets too old."""

    number: int
    lo: Frontier


class CancelWork(msgspec.Struct, frozen=True, gc=False):
    """Cancel all work of this dataflow."""


class Finish(msgspec.Struct, frozen=True, gc=False):
    """End the dataflow: `lo` reached `until` or the empty frontier."""

    lo: Frontier


Effect: TypeAlias = (
    Restore
    | StartTasks
    | Listen
    | Ask
    | Return
    | Answer
    | Compute
    | Commit
    | StandBy
    | Follow
    | Install
    | Report
    | Show
    | RetryLater
    | PaceStep
    | CancelWork
    | Finish
)
