"""What the dataflow machine hears and what it answers with: events, effects, and its step. Pure.

Events of the sources (`Described`, `Fetched`, `FetchFailed`, `ListenFailed`) are the protocol's
own messages. An event that names an incarnation or a step's number belongs to that one alone.
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
    """Distinct times at which the inputs changed, ascending; empty: only the upper moves."""
    deltas: tuple[tuple[pa.Table, ...], ...]
    """Per source, its updates below `hi`."""
    in_error: bool
    """The collection holds a definite error before this step."""
    snapshot: bool = False
    """First step of a pass-through incarnation whose deltas are contents at the as_of."""
    error: str | None = None
    """The definite failure that is this step's result."""
    followed: bool = False
    """Another replica has made it."""

    def is_divisible(self, *, temporal: bool) -> bool:
        """Return whether it may change the output at more than one time: one of its own times, or
        where the clock alone changes it (`temporal`), any."""
        return self.hi - self.lo > 1 if temporal else len(self.times) > 1


# -- events ----------------------------------------------------------------------------------------


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """The suspension ends."""


class Restored(msgspec.Struct, frozen=True, gc=False):
    """What was durable has been read: go on from `lo`; sources read from `as_of`.

    Snapshots (of the sources so marked in `snapshots`) are the rows of the first step.
    """

    incarnation: int
    lo: Time
    as_of: Time
    snapshots: tuple[bool, ...]
    in_error: bool = False


class SourcesReady(msgspec.Struct, frozen=True, gc=False):
    """Listen and fetch tasks of this incarnation run."""

    incarnation: int


class Computed(msgspec.Struct, frozen=True, gc=False):
    """The step's result is there."""

    number: int


class FailedDefinitely(msgspec.Struct, frozen=True, gc=False):
    """The data make the step fail."""

    number: int
    text: str


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The step is durable."""

    number: int


class Mismatched(msgspec.Struct, frozen=True, gc=False):
    """Another replica moved the output's upper first: it is `upper` now."""

    number: int
    upper: Frontier


class Unclaimed(msgspec.Struct, frozen=True, gc=False):
    """No other replica has made the step in time."""

    number: int


class Followed(msgspec.Struct, frozen=True, gc=False):
    """What another replica appended has been read; `error`: what the output holds after it."""

    number: int
    error: str | None = None


class Installed(msgspec.Struct, frozen=True, gc=False):
    """Arrangements and readers have the step's delta."""

    number: int


class Failed(msgspec.Struct, frozen=True, gc=False):
    """A stage failed indefinitely: a store or the engine; `number` 0: while hydrating.

    `restart`: repeating the stage cannot help, only a new incarnation can. `too_large`: the step
    may be too large for the engine. `final`: it is, and the same step would be again.
    """

    incarnation: int
    number: int
    text: str
    restart: bool = False
    too_large: bool = False
    final: bool = False


class RetryDue(msgspec.Struct, frozen=True, gc=False):
    """The delay of retry number `attempt` is over."""

    attempt: int


class StepDue(msgspec.Struct, frozen=True, gc=False):
    """Tells that the step after number `number` is due: later the output would be too old."""

    number: int


class Drop(msgspec.Struct, frozen=True, gc=False):
    """Nobody needs the dataflow any more."""


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
    """Read (or first make) the durable state; answer `Restored`."""

    incarnation: int
    lo: Time


class StartTasks(msgspec.Struct, frozen=True, gc=False):
    """Start this incarnation's listen and fetch tasks; answer `SourcesReady`."""

    incarnation: int


class Listen(msgspec.Struct, frozen=True, gc=False):
    """The start signal of a source."""

    source: int
    as_of: Time
    snapshot: bool


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Fetch a part."""

    source: int
    piece: Piece


class Return(msgspec.Struct, frozen=True, gc=False):
    """The parts are done with: their leases return."""

    source: int
    keys: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, gc=False):
    """All parts of one description are done with: as many bytes may be described again."""

    source: int
    bytes: int


class Compute(msgspec.Struct, frozen=True, gc=False):
    """Compute the step; answer `Computed` or `FailedDefinitely`."""

    step: Step


class Commit(msgspec.Struct, frozen=True, gc=False):
    """Make the step durable; answer `Committed` or `Mismatched`."""

    step: Step


class StandBy(msgspec.Struct, frozen=True, gc=False):
    """Let another replica make the step; answer `Mismatched` when it has, or `Unclaimed`."""

    step: Step


class Follow(msgspec.Struct, frozen=True, gc=False):
    """Read what another replica has appended from `lo` to `hi`; answer `Followed`."""

    step: Step


class Install(msgspec.Struct, frozen=True, gc=False):
    """Give the delta to arrangements and readers; answer `Installed`."""

    step: Step


class Report(msgspec.Struct, frozen=True, gc=False):
    """The frontier moved; `step`: by this step (None: restored)."""

    frontier: Frontier
    step: Step | None


class Show(msgspec.Struct, frozen=True, gc=False):
    """State for people."""

    state: str
    text: str


class RetryLater(msgspec.Struct, frozen=True, gc=False):
    """Wait (longer with every attempt), then `RetryDue`."""

    attempt: int


class PaceStep(msgspec.Struct, frozen=True, gc=False):
    """Wait until the output, which has everything before `lo`, is about to be too old, then
    `StepDue`."""

    number: int
    lo: Frontier


class CancelWork(msgspec.Struct, frozen=True, gc=False):
    """Whatever runs for this dataflow is of no use any more."""


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Nothing more will come: `lo` reached `until` or the empty frontier."""

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
