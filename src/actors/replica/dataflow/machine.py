"""The state machine of one dataflow: events in, effects out. Pure.

Theory of operation. A dataflow advances its lower frontier `lo` in steps ``[lo, hi)``:

1. *suspended* until it is scheduled, then *hydrating*: the actor restores the durable state (or
   computes it at the `as_of`) and starts this incarnation's inputs.
2. *gathering* (*errored* while the collection holds a definite error): `hi` is chosen from what
   every input has described and the budget allows, and the parts below it are requested. Once
   every time below `hi` is sealed for every input, the step is cut.
3. *running*: the actor computes the step's result. Meanwhile parts of the next step are fetched
   as far as the budget has room. A definite failure over several distinct times halves the
   interval; at a single time it becomes the step's result, an error.
4. *committing*: durable parts and one compare-and-set. A mismatch means that another replica was
   first. This replica then *follows*: it reads the other's append, up to the upper it found.
5. *installing*: arrangements and readers get the delta, and then `lo` becomes `hi`.

A replica that has lost a race *stands by* at its next steps: it waits a while for another replica's
append and follows it; if none comes, it computes the step. It stops standing by once it wins a
race. So one of several replicas computes, and the others stay ready.

A *paced* dataflow keeps gathering after a step until the next one is due, unless its parts fill the
budget or change nothing. A step without updates skips 3 and only advances the frontier. The output
of a *temporal* dataflow changes with the clock: its step includes its last time among its times,
may change the output at any time, and is halved by its interval.

A failed input *freezes* the dataflow at the missing part. Steps before it are still made, but none
beyond it, and a new incarnation starts after a delay. After an indefinite failure the stage is
repeated after a delay. *dropped* is final.

Invariants (`check_machine`): `lo` never goes back within an incarnation; `reported` and `write`
(the output is known to be durable below it) never go back at all. A step covers ``lo <= time < hi``
with ``hi > lo``. At most one step exists, and only in states that carry one. Rows that were taken
lie below `hi`, and all others stay held. Unless it follows another replica, an opaque view's step
has at most one distinct time, and no healthy step contains an error of an input.

`DataflowMachine.TRANSITIONS` lists the events that each state accepts and the states to which they
may lead. Any other event, or one of another incarnation or step, is stale: it is ignored and
counted in `ignored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec
import pyarrow as pa

from actors.model.protocol.internal import FetchFailed, ListenFailed, PartFetched, PartsDescribed
from actors.replica.dataflow.dataflow_input import (
    DataflowInput,
    PartInterval,
    SnapshotProgress,
    ask_parts,
    total_reading,
)
from actors.replica.dataflow.events import (
    CARRYING,
    LIVE,
    REST,
    CancelWork,
    CommitStep,
    ComputeStep,
    DataflowPhase,
    DataflowStep,
    DropRequested,
    Effect,
    Event,
    FailedDefinitely,
    FinishDataflow,
    FollowReplica,
    GrantCredit,
    InputsReady,
    InstallStep,
    PaceStep,
    PublishStatus,
    ReleaseParts,
    ReplicaFollowed,
    ReportFrontier,
    RequestPart,
    RestoreState,
    RetryDue,
    RetryLater,
    StageFailed,
    StandBy,
    StandbyExpired,
    StartListening,
    StartTasks,
    StateRestored,
    StepCommitted,
    StepComputed,
    StepDue,
    StepInstalled,
    SuspensionEnded,
    TransitionTable,
    UpperMismatched,
    on_event,
    same_targets,
)
from actors.replica.dataflow.step_choice import (
    error_times_of,
    limit_hi_by_bytes,
    limit_hi_by_times,
    pick_hi,
    put_back,
    take_rows,
    times_of,
)
from actors.runtime.errors import PenstockError, ProtocolError, UnsoundFilter
from actors.runtime.progress import EMPTY, Frontier, Time, is_empty
from actors.runtime.threshold_probes import STEP_ROWS

_DISTRUSTED: Final = (ProtocolError, UnsoundFilter)  # earlier descriptions may be wrong as well


# -- targets that several transitions share --------------------------------------------------------

_COMPUTED: Final = (DataflowPhase.COMMITTING, DataflowPhase.INSTALLING)
_NEXT: Final = (
    *REST,
    DataflowPhase.STANDING_BY,
    DataflowPhase.RUNNING,
    *_COMPUTED,
    DataflowPhase.DROPPED,
)
"""States after which a dataflow that follows no other replica continues: at rest, in the next step,
or dropped."""
_CONTINUES: Final = same_targets(
    REST,
    *(*CARRYING, DataflowPhase.HYDRATING, DataflowPhase.FROZEN, DataflowPhase.DROPPED),
    stays=True,
)
"""Targets of an event at rest after which the dataflow continues (`DataflowMachine._go_on`)."""
_INPUT_FAILS: Final = (
    _CONTINUES
    | same_targets(CARRYING, DataflowPhase.FROZEN, stays=True)
    | same_targets([DataflowPhase.HYDRATING], DataflowPhase.FROZEN)
)


class DataflowMachine:
    """State of one dataflow; see the module's docstring."""

    def __init__(
        self,
        *,
        inputs: int,
        durable: bool,
        opaque: bool = False,
        temporal: bool = False,
        paced: bool = False,
        as_of: Time = 0,
        until: Frontier | None = None,
        budget_bytes: int,
        fetches_max: int,
    ) -> None:
        self.durable = durable
        self.opaque = opaque
        self.temporal = temporal
        self.paced = paced
        self.as_of = as_of
        self.until = until
        self.budget_bytes = budget_bytes
        """Budget in bytes for the parts of a step; reduced after a step that was too large."""
        self.budget_bytes_max = budget_bytes
        """The configured budget."""
        self.fetches_max = fetches_max
        self.input_count = inputs
        self.state = DataflowPhase.SUSPENDED
        """State; only handlers of `TRANSITIONS` change it."""
        self.incarnation = 0  # number of the current one; 0 before the first
        self.number = 0  # of the latest step that was cut
        self.attempt = 0  # number of failures since the last installed step
        self.steps = 0  # number of steps installed so far
        self.lo: Frontier = 0
        """Frontier below which the output is installed."""
        self.hi: Frontier | None = None
        """Upper of the current or the next step, once chosen."""
        self.write: Frontier = 0
        """Frontier below which the output is known to be durable."""
        self.reported: Frontier | None = None
        """Frontier last reported; None before the first report."""
        self.in_error = False  # True while the collection holds a definite error
        self.inputs: tuple[DataflowInput, ...] = ()
        """The inputs of this incarnation, once restored."""
        self.step: DataflowStep | None = None
        """The current step, from its cut until it is installed."""
        self.ignored = 0  # number of events that were ignored as stale
        self._step_bytes = 0
        """Bytes of the rows that the current step has taken."""
        self._restored_from: StateRestored | None = None
        """Event that restored this incarnation; None before it."""
        self._snapshot_due = False
        """True until the first step has taken the snapshots."""
        self._retrying = False
        """True from a failed stage until its retry."""
        self._restart_due = False
        """True if the next retry must start a new incarnation."""
        self._too_large = False
        """True if the failed step may be too large."""
        self._is_standby = False
        """True after a lost race until this replica wins one."""
        self._following = False
        """True while an append of another replica remains to be followed."""
        self._due = True
        """False while the next step of a paced dataflow must wait."""
        self._frozen: PenstockError | None = None
        """Error of the first failed input of this incarnation."""
        self._complete_below: Frontier = EMPTY
        """Frontier below which all times are described and fetchable; beyond it an input has
        failed."""

    def handle(self, event: Event) -> list[Effect]:
        """Apply an event, and return its effects. Raise `LocalProtocolError` for an invalid
        description."""
        transition = self.TRANSITIONS.get((self.state, type(event)))
        if transition is None or not self._current(event):
            self.ignored += 1
            return []
        effects = transition.handler(self, event)
        assert self.state in transition.targets, (type(event).__name__, self.state)
        return effects

    def _current(self, event: Event) -> bool:
        incarnation = getattr(event, "incarnation", self.incarnation)
        number = getattr(event, "number", 0)
        return incarnation == self.incarnation and number in (0, self.number)

    # -- starting ----------------------------------------------------------------------------------

    def _scheduled(self, _: Event) -> list[Effect]:
        return self._restart()

    def _restart(self) -> list[Effect]:
        """Start a new incarnation, and forget all state that is not durable."""
        self.state = DataflowPhase.HYDRATING
        self.incarnation += 1
        self.inputs = ()
        self.step = None
        self.hi = None
        self._restored_from = None
        self._retrying = self._restart_due = self._too_large = self._following = False
        self._due = True
        self._frozen, self._complete_below = None, EMPTY
        return [PublishStatus("hydrating", ""), RestoreState(self.incarnation, self.lo)]

    def _restored(self, event: StateRestored) -> list[Effect]:
        if self._restored_from is not None:
            # A second `StartTasks` would start tasks with the same incarnation again.
            self.ignored += 1
            return []
        self._restored_from = event
        self.lo = event.lo
        self.in_error = event.in_error
        self._snapshot_due = any(event.snapshots)
        self.inputs = tuple(
            DataflowInput(index, event.as_of, snapshot=snapshot)
            for index, snapshot in enumerate(event.snapshots)
        )
        effects = self._report(None) if self.durable else []
        if self.inputs and self.lo < EMPTY:
            return [*effects, StartTasks(self.incarnation)]
        self.state = self._resting()
        return [*effects, *self._go_on()]

    def _inputs_ready(self, _: InputsReady) -> list[Effect]:
        restored = self._restored_from
        if restored is None:
            return []
        self.state = self._resting()
        listens: list[Effect] = [
            StartListening(index, restored.as_of, snapshot)
            for index, snapshot in enumerate(restored.snapshots)
        ]
        return [*listens, PublishStatus(self.state.value, "")]

    # -- gathering ---------------------------------------------------------------------------------

    def _described(self, event: PartsDescribed) -> list[Effect]:
        input_ = self.inputs[event.input_index]
        return [*self._done_with(input_, input_.describe(event)), *self._go_on()]

    def _done_with(self, input_: DataflowInput, pieces: list[PartInterval]) -> list[Effect]:
        effects: list[Effect] = []
        if pieces:
            effects.append(ReleaseParts(input_.index, tuple(piece.part.key for piece in pieces)))
        effects += [GrantCredit(input_.index, size) for size in input_.answers(pieces)]
        return effects

    def _fetched(self, event: PartFetched) -> list[Effect]:
        input_ = self.inputs[event.input_index]
        piece, rows = input_.fetched(event)
        input_.hold(rows)
        return [*self._done_with(input_, [piece]), *self._go_on()]

    def _go_on(self) -> list[Effect]:
        """Freeze, finish, request parts, or cut the next step."""
        if self._retrying:
            return []
        if self.state not in REST:
            return self._ask_ahead()
        # Steps before the failure are made as long as one fits; a followed step cannot be
        # shortened.
        next_hi = self.hi if self._following and self.hi else self.lo + 1
        if self._frozen and next_hi > self._complete_below:
            return self._freeze(self._frozen)
        end = EMPTY if self.until is None else self.until
        if self.lo >= end:
            self.state = DataflowPhase.DROPPED
            return [CancelWork(), FinishDataflow(self.lo)]
        waiting = None if self._due else self._waiting_for_more(end)
        if waiting is not None:
            return waiting
        if self.hi is None or self.hi > self._complete_below:
            until = min(end, self._complete_below)
            self.hi = pick_hi(self.lo, self.inputs, self.budget_bytes, until)
            if self._snapshot_due and self.hi is not None:
                # The first step is exactly the snapshot.
                reach = self._input_as_of() + 1
                there = reach <= self._complete_below and all(
                    s.progress >= reach for s in self.inputs
                )
                self.hi = reach if there else None
        if self.hi is None and self._frozen is not None:
            # Another input is not described beyond `lo`, so no step fits before the failure.
            return self._freeze(self._frozen)
        if self.hi is None:
            return self._ask(self._input_as_of() + 1) if self._snapshot_due else []
        if self._following and self._is_too_far_behind(self.hi):
            return [CancelWork(), *self._restart()]
        if all(input_.sealed(self.hi) for input_ in self.inputs):
            return self._cut(self.hi)
        return self._ask(self.hi)

    def _waiting_for_more(self, end: Frontier) -> list[Effect] | None:
        """Request parts of a later step. Return None if the step need not wait.

        A step that changes nothing need not wait, unless the clock itself changes the output.
        """
        if self._frozen is not None or self._following or self._snapshot_due:
            return None
        reach = min([end, *(input_.progress for input_ in self.inputs)])
        if reach <= self.lo:
            return []
        # The parts described so far fill the budget, so waiting would not make the step larger.
        if pick_hi(self.lo, self.inputs, self.budget_bytes, end, forced=False) != reach:
            return None
        if not self.temporal and not any(each.has_rows_below(reach) for each in self.inputs):
            return None
        return self._ask(reach)

    def _step_due(self, _: StepDue) -> list[Effect]:
        self._due = True
        return self._go_on()

    def _input_as_of(self) -> Time:
        """Return the time from which this incarnation's inputs are read."""
        return self._restored_from.as_of if self._restored_from is not None else self.as_of

    def _ask(self, before: Frontier) -> list[Effect]:
        """Request parts below `before`; the `hi` of a step was chosen within the budget."""
        asked = ask_parts(self.inputs, before, self.fetches_max)
        return [RequestPart(input_.index, piece) for input_, piece in asked]

    def _ask_ahead(self) -> list[Effect]:
        """Request parts of the next step during the current one, as far as the budget has room."""
        step = self.step
        if step is None or step.snapshot or self._frozen is not None:
            return []
        # The rows of the current step are still in memory.
        room = self.budget_bytes - self._step_bytes
        before = pick_hi(step.hi, self.inputs, room, self.until, forced=False)
        return [] if before is None else self._ask(before)

    # -- a step ------------------------------------------------------------------------------------

    def _cut(self, hi: Frontier) -> list[Effect]:
        """Receive the step's rows. Shorten the step if several of its times must not share a
        step."""
        deltas = self._take(hi)
        flat = [table for tables in deltas for table in tables]
        times = times_of(flat)
        if self._following:
            self._set_step(hi, times, deltas)
            return self._follow()
        # A step in error is computed only at its last time, so it may contain any times. Indexes
        # and subscribes carry errors as updates.
        if self.durable and not self.in_error:
            shorter = limit_hi_by_times(times, error_times_of(flat), opaque=self.opaque)
            if shorter is None and STEP_ROWS.crossed(self._step_bytes > self.budget_bytes):
                shorter = limit_hi_by_bytes(flat, times, self.budget_bytes)
            if shorter is not None:
                hi = shorter
                put_back(self.inputs, deltas)
                deltas = self._take(hi)
        self._set_step(hi, times, deltas)
        assert self.step is not None
        if self._is_standby:
            self.state = DataflowPhase.STANDING_BY
            return [*self._ask_ahead(), StandBy(self.step)]
        return self._compute_step()

    def _compute_step(self, _: StandbyExpired | None = None) -> list[Effect]:
        """Make the step in this replica."""
        assert self.step is not None
        if self._retrying:
            return []  # reading the upper failed, so another replica may have committed the step
        if self.step.times or self._snapshot_due:
            self.state = DataflowPhase.RUNNING
            return [*self._ask_ahead(), ComputeStep(self.step)]
        return self._computed(None)

    def _set_step(
        self, hi: Frontier, times: Sequence[Time], deltas: tuple[tuple[pa.Table, ...], ...]
    ) -> None:
        self.number += 1
        self.hi = hi
        if self.temporal:
            # The clock may change the output at the last time even without updates.
            times = sorted({*(time for time in times if time < hi), hi - 1})
        self.step = DataflowStep(
            self.incarnation,
            self.number,
            self.lo,
            hi,
            tuple(time for time in times if time < hi),
            deltas,
            self.in_error,
            self._snapshot_due,
        )

    def _take(self, hi: Frontier) -> tuple[tuple[pa.Table, ...], ...]:
        """Receive a step's rows, and record their size."""
        held = sum(input_.held_bytes for input_ in self.inputs)
        deltas = take_rows(self.inputs, hi)
        self._step_bytes = held - sum(input_.held_bytes for input_ in self.inputs)
        return deltas

    def _computed(self, _: Event | None) -> list[Effect]:
        assert self.step is not None
        if not self.durable:
            self.state = DataflowPhase.INSTALLING
            return [InstallStep(self.step)]
        self.state = DataflowPhase.COMMITTING
        return [CommitStep(self.step)]

    def _failed_definitely(self, event: FailedDefinitely) -> list[Effect]:
        step = self.step
        assert step is not None
        if step.is_divisible(temporal=self.temporal) and not step.in_error:
            return self._halve(step)
        self.step = msgspec.structs.replace(step, error=event.text)
        return self._computed(None)

    def _halve(self, step: DataflowStep) -> list[Effect]:
        """Compute the first half of the step's times instead, and put the other rows back."""
        half = step.lo + (step.hi - step.lo) // 2
        hi = half if self.temporal else step.times[len(step.times) // 2]
        put_back(self.inputs, step.deltas)
        self._set_step(hi, step.times, self._take(hi))
        assert self.step is not None
        return [ComputeStep(self.step)]

    def _committed(self, _: StepCommitted) -> list[Effect]:
        assert self.step is not None
        # This replica was first, so the others now stand by.
        self._is_standby = False
        self.write = max(self.write, self.step.hi)
        self.state = DataflowPhase.INSTALLING
        return [InstallStep(self.step)]

    # -- another replica's steps -------------------------------------------------------------------

    def _mismatched(self, event: UpperMismatched) -> list[Effect]:
        """Put the step's rows back, and follow the other replica to its upper."""
        step = self.step
        assert step is not None
        self._is_standby = True
        self.write = max(self.write, event.upper)
        if event.upper <= self.lo or is_empty(event.upper):
            # There is no append to follow: only the durable state shows how to continue.
            return [CancelWork(), *self._restart()]
        # The followed step ends at that upper. Its rows are taken once everything below it is held.
        put_back(self.inputs, step.deltas)
        self.step = None
        self.hi = event.upper
        self._following = True
        self.state = self._resting()
        return self._go_on()

    def _is_too_far_behind(self, hi: Frontier) -> bool:
        """Return whether the rows up to `hi` exceed the allowed memory, so that the durable state
        must be read instead."""
        if any(input_.progress < hi for input_ in self.inputs):
            return False
        room = 2 * self.budget_bytes_max
        return pick_hi(self.lo, self.inputs, room, hi, forced=False) != hi

    def _follow(self) -> list[Effect]:
        assert self.step is not None
        self.step = msgspec.structs.replace(self.step, followed=True)
        self.state = DataflowPhase.FOLLOWING
        return [FollowReplica(self.step)]

    def _followed(self, event: ReplicaFollowed) -> list[Effect]:
        assert self.step is not None
        self._following = False
        self.step = msgspec.structs.replace(self.step, error=event.error)
        self.state = DataflowPhase.INSTALLING
        return [InstallStep(self.step)]

    def _installed(self, _: StepInstalled) -> list[Effect]:
        step = self.step
        assert step is not None
        # A step without updates leaves the error state unchanged.
        if step.times or step.followed:
            self.in_error = step.error is not None
        self.lo = step.hi
        self.hi = None
        self.step = None
        self._snapshot_due = False
        self.attempt = 0
        self.steps += 1
        # The budget was quartered if a step was too large. Double it again with every success.
        self.budget_bytes = min(self.budget_bytes_max, 2 * self.budget_bytes)
        self.state = self._resting()
        if not self.paced:
            return [*self._report(step), *self._go_on()]
        self._due = False
        return [*self._report(step), *self._go_on(), PaceStep(self.number, self.lo)]

    def _report(self, step: DataflowStep | None) -> list[Effect]:
        """Report `lo` if it has reached the as_of and has advanced since the last report."""
        if self.lo < self.as_of or (self.reported is not None and self.lo <= self.reported):
            return []
        self.reported = self.lo
        return [ReportFrontier(self.lo, step)]

    def _resting(self) -> DataflowPhase:
        return DataflowPhase.ERRORED if self.in_error else DataflowPhase.GATHERING

    # -- failures ----------------------------------------------------------------------------------

    def _input_failed(self, event: FetchFailed | ListenFailed) -> list[Effect]:
        """Record an input's failure. Steps before the missing part are still made."""
        error = self._frozen = self._frozen or event.error
        if not self.inputs:
            return self._freeze(error)
        if isinstance(event.error, _DISTRUSTED):
            # The input was described wrongly, so the current step may be wrong too. Freeze
            # immediately.
            self._complete_below = 0
            durable = self.state in (DataflowPhase.COMMITTING, DataflowPhase.INSTALLING)
            return [] if durable else self._freeze(error)
        input_ = self.inputs[event.input_index]
        whole = input_.lose(event).lower if isinstance(event, FetchFailed) else input_.progress
        self._complete_below = min(self._complete_below, whole)
        if self.state in CARRYING:
            return []
        return self._go_on() if self.state in REST else self._freeze(error)

    def _freeze(self, error: PenstockError) -> list[Effect]:
        self.state = DataflowPhase.FROZEN
        self.step = None
        self.attempt += 1
        text = f"{type(error).__name__}: {error}"
        return [CancelWork(), PublishStatus("frozen", text), RetryLater(self.attempt)]

    def _failed(self, event: StageFailed) -> list[Effect]:
        """Repeat the stage after a delay, because the failure is indefinite.

        However, if a step of a single time is finally too large, this is the step's result, like a
        definite error.
        """
        step = self.step
        one_result = step is not None and (
            step.in_error or not step.is_divisible(temporal=self.temporal)
        )
        if event.final and one_result and self.state is DataflowPhase.RUNNING:
            return self._failed_definitely(FailedDefinitely(event.number, event.text))
        self.attempt += 1
        self._retrying = True
        self._restart_due = self._restart_due or event.restart
        self._too_large = self._too_large or event.too_large
        return [PublishStatus("stalled", event.text), RetryLater(self.attempt)]

    def _retry_due(self, event: RetryDue) -> list[Effect]:
        if event.attempt != self.attempt or not (
            self._retrying or self.state is DataflowPhase.FROZEN
        ):
            self.ignored += 1
            return []
        self._retrying = False
        step = self.step
        if self.state is DataflowPhase.RUNNING and step is not None and not self._restart_due:
            too_large, self._too_large = self._too_large, False
            if too_large and step.is_divisible(temporal=self.temporal):
                # The budget is doubled when the halved step succeeds, so the next step takes at
                # most half of these bytes.
                self.budget_bytes = max(1, min(self.budget_bytes, self._step_bytes) // 4)
                return self._halve(step)
            return [ComputeStep(step)]
        # A failed commit is indeterminate: only the durable state shows whether it happened. A
        # failed installation may have left arrangements half updated.
        return [CancelWork(), *self._restart()]

    def _dropped(self, _: DropRequested) -> list[Effect]:
        self.state = DataflowPhase.DROPPED
        self.step = None
        self.inputs = ()
        return [CancelWork()]

    def reading(self) -> SnapshotProgress | None:
        """Return the progress of reading this incarnation's snapshots, or None once they are
        read."""
        return total_reading(self.inputs) if self._snapshot_due else None

    def waiting_for(self) -> str:
        """Return what the dataflow is waiting for, as readable text."""
        if self._retrying:
            return f"{self.state.value}, attempt {self.attempt} failed"
        if self.state not in REST:
            return str(self.state.value)
        parts = [
            f"input {s.index} described to {s.progress}, {sum(s.counts.values())} fetches out"
            for s in self.inputs
        ]
        return f"{self.state.value} from {self.lo}: " + "; ".join(parts)

    TRANSITIONS: ClassVar[TransitionTable] = (
        on_event(
            SuspensionEnded,
            _scheduled,
            same_targets([DataflowPhase.SUSPENDED], DataflowPhase.HYDRATING),
        )
        # Without inputs no task is started, and the only step is cut immediately.
        | on_event(
            StateRestored, _restored, same_targets([DataflowPhase.HYDRATING], *_NEXT, stays=True)
        )
        | on_event(
            InputsReady, _inputs_ready, same_targets([DataflowPhase.HYDRATING], *REST, stays=True)
        )
        | on_event(PartsDescribed, _described, _CONTINUES | same_targets(CARRYING, stays=True))
        | on_event(PartFetched, _fetched, _CONTINUES | same_targets(CARRYING, stays=True))
        | on_event(FetchFailed, _input_failed, _INPUT_FAILS)
        | on_event(ListenFailed, _input_failed, _INPUT_FAILS)
        | on_event(StepComputed, _computed, same_targets([DataflowPhase.RUNNING], *_COMPUTED))
        | on_event(
            FailedDefinitely,
            _failed_definitely,
            same_targets([DataflowPhase.RUNNING], *_COMPUTED, stays=True),
        )
        | on_event(
            StepCommitted,
            _committed,
            same_targets([DataflowPhase.COMMITTING], DataflowPhase.INSTALLING),
        )
        | on_event(
            UpperMismatched,
            _mismatched,
            same_targets(
                [DataflowPhase.STANDING_BY, DataflowPhase.COMMITTING],
                *(*REST, DataflowPhase.HYDRATING, DataflowPhase.FOLLOWING, DataflowPhase.FROZEN),
            ),
        )
        | on_event(
            StandbyExpired,
            _compute_step,
            same_targets(
                [DataflowPhase.STANDING_BY],
                *(DataflowPhase.RUNNING, DataflowPhase.COMMITTING),
                stays=True,
            ),
        )
        | on_event(
            ReplicaFollowed,
            _followed,
            same_targets([DataflowPhase.FOLLOWING], DataflowPhase.INSTALLING),
        )
        # Parts that are already described may start the next step immediately.
        | on_event(
            StepInstalled,
            _installed,
            same_targets([DataflowPhase.INSTALLING], *_NEXT, DataflowPhase.FROZEN, stays=True),
        )
        | on_event(
            StageFailed,
            _failed,
            same_targets(LIVE, stays=True)
            | same_targets([DataflowPhase.RUNNING], *_COMPUTED, stays=True),
        )
        | on_event(
            RetryDue,
            _retry_due,
            same_targets([*LIVE, DataflowPhase.FROZEN], DataflowPhase.HYDRATING, stays=True),
        )
        | on_event(StepDue, _step_due, _CONTINUES)
        | on_event(
            DropRequested,
            _dropped,
            same_targets(set(DataflowPhase) - {DataflowPhase.DROPPED}, DataflowPhase.DROPPED),
        )
    )
    """All transitions. Any other event is ignored. `handle` checks the resulting states."""


def check_machine(machine: DataflowMachine) -> None:
    """Assert the invariants listed in the module's docstring. Tests call this after every event."""
    assert (machine.step is not None) == (machine.state in CARRYING), (machine.state, machine.step)
    if machine.hi is not None:
        assert machine.hi > machine.lo
    if machine.step is not None:
        assert machine.step.lo == machine.lo
        assert machine.step.hi == machine.hi
        assert all(time < machine.step.hi for time in machine.step.times)
        assert not (machine.opaque and machine.durable and not machine.in_error) or (
            len(machine.step.times) <= 1 or machine.step.followed
        )
    assert machine.reported is None or machine.reported >= machine.as_of
    for input_ in machine.inputs:
        input_.validate()
