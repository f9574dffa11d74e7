"""The stages of a maintained view: what each effect of the machine does.

`ViewStages` holds the memory of one incarnation: state lookups, and the errors of the imports and
the output. Each stage is one coroutine that runs outside the actor; the machine ensures that stages
never overlap. `warm` and `merge` run alongside them.

Errors are data. While an import holds an error, or the data make the query fail, the output holds
an error and keeps its last good contents. Such a view makes one step of all changes since then
(`HeldChanges`) to the last time of each step, or is recomputed in full there. When that succeeds,
the difference is appended and the error is retracted there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import BatchPart, PersistClient
from actors.engine.views.input_uses import input_uses
from actors.model.plan.jobs import JobRows
from actors.model.plan.updates import concat
from actors.model.protocol.compute import DataflowDescription, ViewExport
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.commit import ErrorChange, commit, move_holds
from actors.replica.dataflow.contents import (
    contents,
    error_sums,
    errors_held,
    split_errors,
    truncated,
)
from actors.replica.dataflow.engine import EngineClient
from actors.replica.dataflow.events import DataflowStep
from actors.replica.dataflow.filling import fill_hidden, make_ready
from actors.replica.dataflow.held_changes import HeldChanges
from actors.replica.dataflow.hydrate import ResumedHydration, restore
from actors.replica.dataflow.policy import StepChoice, StepChooser, StepDeclined
from actors.replica.dataflow.recompute import (
    RecomputeSuspension,
    chain_differences,
    find_job_too_large,
    recompute,
)
from actors.replica.dataflow.replica_follower import ReplicaFollower
from actors.replica.dataflow.state_lookups import StateLookups
from actors.replica.dataflow.step import StepDeltas, Weigh, delta_step, empty_deltas, likely_runs
from actors.runtime.errors import ERROR_TEXT_BYTES_MAX, DefiniteError, JobTooLarge
from actors.runtime.progress import Frontier, Time, is_empty

COLD_STEPS: Final = 5
"""Number of first steps of a dataflow whose time is not measured if they build their plans."""
QUIET_STEPS = 2
"""After more than this many consecutive steps without effect, a step first runs its first stratum
alone."""


class StepOutcome(msgspec.Struct, frozen=True):
    """A computed step: its deltas and the changes of the output's errors."""

    deltas: StepDeltas
    errors: tuple[ErrorChange, ...] = ()
    rows_read: int = 0
    """Number of state rows that lookups returned."""
    recomputed: bool = False
    """True if the view was recomputed in full."""
    rejected: str = ""
    """The rejected alternative and its estimated cost."""


class ViewStages:
    """Runs the stages of one view."""

    def __init__(
        self,
        engine: EngineClient,
        persist: PersistClient,
        description: DataflowDescription,
        export: ViewExport,
        scratch: Path,
        arrangements: SharedArrangements,
        *,
        raced: bool = False,
    ) -> None:
        self._raced = raced
        """True if other replicas run the same view."""
        self._follower: ReplicaFollower | None = None
        """Reads other replicas' appends; None until needed."""
        self._engine = engine
        self._persist = persist
        self._description = description
        self._export = export
        self._scratch = scratch
        self._arrangements = arrangements
        self._chooser = StepChooser(export.plan.policy, keeps_state=export.plan.keeps_state)
        self._steps = 0
        """Number of steps that were computed."""
        self._unchanged = 0
        """Number of consecutive steps that changed neither the output nor a hidden state."""
        self._state_rows = 0
        """Approximate number of rows of the imports."""
        self._touched: StateLookups | None = None
        """State lookups of this incarnation; None before it is restored or if the view has
        ended."""
        self._hidden_lock = anyio.Lock()
        """Held while the hidden states are read, and while a step changes them."""
        self._plain_of: tuple[DataflowStep | None, list[pa.Table]] = (None, [])
        """The current step and its plain updates, which are used twice."""
        self._uses = input_uses(export.plan)
        self._used_of: tuple[DataflowStep | None, list[pa.Table]] = (None, [])
        """The current step and the part of its plain updates that the view uses."""
        self._suspension = RecomputeSuspension(engine.settings)
        self._rehearsal = anyio.Lock()
        """Held during a rehearsal, so that only one runs at a time."""
        self._output_errors: tuple[str, ...] = ()
        """Errors that the output holds."""
        self._input_errors: tuple[dict[str, int], ...] = ()
        """Sums of the error updates of each import."""
        self._held = HeldChanges(description.id, export.plan.input_schemas)
        persist.ledger.add(self._held.memory)
        self._written: tuple[tuple[BatchPart, ...], ...] = ()
        """Parts of a step that executors wrote, until its commit starts."""

    async def restore(
        self, incarnation: int, hydrating: Callable[[], None], *, writable: bool
    ) -> ResumedHydration:
        """Return the durable state, hydrating the view first if needed."""
        before, self._touched = self._touched, None
        self._close_follower()
        self._drop_written()
        try:
            if self._raced:
                # Acquire the leases before the upper is read, to keep later appends readable.
                await self._open_follower(incarnation)
            resumed = await restore(
                self._engine,
                self._persist,
                self._description,
                self._export,
                incarnation,
                self._scratch,
                self._arrangements,
                self._chooser,
                hydrating,
                writable=writable,
            )
        finally:
            if before is not None:
                # Close it last, so that arrangements that both incarnations use stay open.
                before.close()
        if self._follower is not None and not is_empty(resumed.lo):
            await self._follower.moved(resumed.lo)
        self._touched = resumed.touched
        self._held.release()
        self._state_rows = resumed.state_rows
        self._output_errors = resumed.output_errors
        text = find_job_too_large(resumed.output_errors)
        if text and not self._suspension.active:
            self._suspension.begin(text, self._engine.clock.monotonic_ms())
        self._input_errors = resumed.input_errors
        return resumed

    async def warm(self, incarnation: int) -> None:
        """Fill the arrangements and build plans, before the first step."""
        touched = self._touched
        if touched is not None:
            await self._make_ready(incarnation)
            await self._engine.clock.run_blocking(touched.merge)
            whole = touched.hidden_whole(self._engine.settings.hidden_rows_whole_max)
            await self._rehearse_likely(incarnation, "again", hidden_whole=whole)

    async def rehearse_first(self, incarnation: int) -> None:
        """Have the engine build plans of steps while the first contents are computed."""
        await self._engine.prepared()
        # The size of the hidden states is not known yet; assume that they are small.
        await self._rehearse_likely(incarnation, "first", hidden_whole=True)

    async def _rehearse_likely(self, incarnation: int, what: str, *, hidden_whole: bool) -> None:
        runs = likely_runs(self._export.plan, hidden_whole=hidden_whole)
        if runs:
            async with self._rehearsal:  # a second rehearsal finds the plans of the first
                await self._engine.rehearse(runs, incarnation, what)

    @property
    def rehearsal_due(self) -> bool:
        """Return whether `rehearse` has something to do."""
        return self._engine.frequent is not None

    async def rehearse(self, incarnation: int) -> None:
        """Have the engine build the plan of frequent steps. Runs alongside the steps."""
        run, self._engine.frequent = self._engine.frequent, None
        if run is not None:
            await self._engine.rehearse([run], incarnation, "own")

    async def _make_ready(self, incarnation: int) -> None:
        touched = self._touched
        if touched is None or touched.ready:
            return
        reader_id = self._engine.job_id(incarnation, 0, "fill")
        imports = self._description.imports
        await make_ready(self._engine, self._persist, touched.imports, imports, reader_id)
        # Either `warm` or a step reads them, whichever is first; the other one waits.
        async with self._hidden_lock:
            if not touched.hidden_filled:
                await fill_hidden(self._engine, self._persist, touched, reader_id)

    async def compute(self, step: DataflowStep) -> StepOutcome:
        """Return the step's deltas. Raise `DefiniteError`, and the errors of the stores and the
        engine."""
        time = step.times[-1]
        held = errors_after(self._input_errors, step, time)
        if held:
            raise DefiniteError(held[0])
        self._drop_written()
        if step.in_error or not self._export.plan.strata:
            outcome = await self._step_since_error(step, time)
            if outcome is None:
                outcome = StepOutcome(await self._recompute(step, time), recomputed=True)
            changes = tuple(ErrorChange(text, time, -1) for text in self._output_errors)
            return msgspec.structs.replace(outcome, errors=changes)
        used = await self._used(step)
        rows = sum(table.num_rows for table in used)
        # The plan reads none of the changed columns and rows.
        if not rows and not self._export.plan.temporal:
            return StepOutcome(empty_deltas(self._export.plan))
        choices: list[StepChoice] = []

        def weigh(work: int) -> bool:
            choices.append(self._chooser.choose(work, self._state_rows, len(step.times)))
            # A temporal view changes at many times, so recomputing it in full is never cheaper.
            return choices[0].full and not self._export.plan.temporal

        # Decide before the lookups, because they are part of a step's cost.
        surely = self._chooser.favors_full(rows, self._state_rows, len(step.times))
        if surely and weigh(rows):
            return await self._recompute_instead(step, choices[0])
        await self._make_ready(step.incarnation)
        started = self._engine.clock.monotonic_ms()
        try:
            outcome = await self._step(step, None if surely else weigh)
        except StepDeclined:
            return await self._recompute_instead(step, choices[0])
        except (DefiniteError, JobTooLarge) as error:
            # If most rows change, the remaining contents may be small enough. If few do, the row
            # that is too large is also in the full contents.
            few = isinstance(error, JobTooLarge) and 2 * rows <= self._state_rows
            if few or step.is_divisible(temporal=self._export.plan.temporal):
                raise
            # A step also joins rows that never exist at the same time. Only the full query can tell
            # whether it fails.
            return StepOutcome(await self._recompute(step, time), recomputed=True)
        self._steps += 1
        # Steps that build their plans are not measured, unless all of them do.
        if outcome.deltas.prepared or self._steps > COLD_STEPS:
            elapsed = self._engine.clock.monotonic_ms() - started
            work, ms = outcome.deltas.work, max(0.0, elapsed - outcome.deltas.wait_ms)
            self._chooser.stepped(work, ms)
        rejected = [msgspec.structs.replace(choice, full=False).text() for choice in choices]
        return msgspec.structs.replace(outcome, rejected="".join(rejected))

    async def _step_since_error(self, step: DataflowStep, time: Time) -> StepOutcome | None:
        """Return the step from before the error to `time`, or None if only the full query can tell
        whether the view is still in error."""
        lo = self._held.lo
        if lo is None:
            return None
        plain = await self._plain(step)
        rows = sum(table.num_rows for table in plain)
        deltas = await self._engine.work(rows, partial(self._held.at, time, plain))
        since = msgspec.structs.replace(step, lo=lo, times=(time,), deltas=deltas)
        if not any(used.num_rows for used in await self._used(since)):
            return StepOutcome(empty_deltas(self._export.plan))
        await self._make_ready(step.incarnation)
        try:
            return await self._step(since, None)
        except (DefiniteError, JobTooLarge):
            # The step also joins rows that never exist at the same time.
            return None

    async def _recompute_instead(self, step: DataflowStep, choice: StepChoice) -> StepOutcome:
        """Recompute the view in full at each time, because that is cheaper."""
        deltas = await self._recompute_at_each(step)
        return StepOutcome(deltas, recomputed=True, rejected=choice.text())

    async def _recompute(self, step: DataflowStep, time: Time, *, alone: bool = True) -> StepDeltas:
        """Return the difference to the view recomputed in full at `time`.

        Executors may write the rows only if this is the step's only difference (`alone`).
        """
        started = self._engine.clock.monotonic_ms()
        self._suspension.check(started)
        try:
            with (
                AnswerFolders(self._persist, self._export, wanted=alone) as folders,
                self._engine.failures.judged(),
            ):
                deltas = await recompute(
                    self._engine,
                    self._persist,
                    self._export,
                    self._description.imports,
                    time,
                    step.lo,
                    (step.incarnation, step.number),
                    folders=folders,
                )
                self._written = deltas.written
        except JobTooLarge as error:
            self._suspension.begin(str(error), self._engine.clock.monotonic_ms())
            raise
        self._suspension.end()
        elapsed = self._engine.clock.monotonic_ms() - started - deltas.wait_ms
        self._chooser.recomputed(self._state_rows, max(0.0, elapsed))
        return deltas

    async def _recompute_at_each(self, step: DataflowStep) -> StepDeltas:
        """Return the differences to the view recomputed in full at each time of the step."""
        # Differences of several times are chained here, which requires their rows.
        made = await self._recompute(step, step.times[0], alone=len(step.times) == 1)
        for time in step.times[1:]:
            before, now = made, await self._recompute(step, time, alone=False)
            made = await self._engine.clock.run_blocking(
                partial(chain_differences, before, now, time)
            )
        return made

    async def _step(self, step: DataflowStep, weigh: Weigh | None) -> StepOutcome:
        """Return the deltas that the plan's strata produce. Raise `StepDeclined`."""
        name = (step.incarnation, step.number)
        touched = self._touched
        assert touched is not None, "an incremental view has state lookups"
        read_before = touched.rows_read
        with (
            AnswerFolders(self._persist, self._export) as folders,
            self._engine.failures.judged(),
        ):
            deltas = await delta_step(
                self._engine,
                self._export.plan,
                touched,
                await self._used(step),
                (step.lo, step.hi),
                name,
                partial(self._whole_state, step),
                folders,
                quiet=self._unchanged > QUIET_STEPS,
                divisible=len(step.times) > 1,
                weigh=weigh,
            )
            self._written = deltas.written
        self._unchanged = 0 if deltas.changed else self._unchanged + 1
        return StepOutcome(deltas, rows_read=touched.rows_read - read_before)

    @asynccontextmanager
    async def _whole_state(self, step: DataflowStep, input_index: int) -> AsyncIterator[JobRows]:
        """Yield an import's contents below the step's `lo`, for a step that touches much of it."""
        imported = self._description.imports[input_index]
        reader_id = self._engine.job_id(step.incarnation, step.number, f"state{input_index}")
        as_of = step.lo - 1
        async with contents(
            self._persist, self._engine, imported.shard, imported.schema, as_of, reader_id
        ) as found:
            yield found.rows

    async def _plain(self, step: DataflowStep) -> list[pa.Table]:
        """Return the plain updates of the step, for each input."""
        known, found = self._plain_of
        if known is step:
            return found

        def together() -> list[pa.Table]:
            schemas = self._export.plan.input_schemas
            return [
                concat([split_errors(table)[0] for table in tables], schema.arrow_updates())
                for tables, schema in zip(step.deltas, schemas, strict=True)
            ]

        rows = sum(table.num_rows for tables in step.deltas for table in tables)
        found = await self._engine.work(rows, together)
        self._plain_of = step, found
        return found

    async def _used(self, step: DataflowStep) -> list[pa.Table]:
        """Return the rows and columns of the step's plain updates that the view uses, for each
        input."""
        known, found = self._used_of
        if known is step:
            return found
        plain = await self._plain(step)

        def kept() -> list[pa.Table]:
            return [use.kept(rows) for use, rows in zip(self._uses, plain, strict=True)]

        found = await self._engine.work(sum(rows.num_rows for rows in plain), kept)
        self._used_of = step, found
        return found

    def without_change(self, step: DataflowStep) -> StepOutcome:
        """Return the outcome of a step that computed nothing, or failed definitely."""
        changes: tuple[ErrorChange, ...] = ()
        # A collection that already holds an error keeps that one.
        if step.error is not None and not step.in_error:
            bytes_max = ERROR_TEXT_BYTES_MAX
            text = truncated(step.error, bytes_max)
            changes = (ErrorChange(text, step.times[-1], 1),)
        return StepOutcome(empty_deltas(self._export.plan), changes)

    async def commit(self, step: DataflowStep, outcome: StepOutcome) -> Frontier | None:
        """Append the step. Return the output's upper if another replica was first."""
        deltas = outcome.deltas
        interval = (step.lo, step.hi)
        self._written = ()  # from here on the append owns the parts
        found = await commit(
            self._persist,
            self._export,
            interval,
            deltas.output,
            deltas.hidden,
            outcome.errors,
            deltas.written,
        )
        # Advance the follower's leases, so that they do not hold back compaction.
        if found is None and self._follower is not None:
            await self._follower.moved(step.hi)
        return found

    async def install(self, step: DataflowStep, outcome: StepOutcome) -> None:
        """Apply the step to the state in memory, up to its `hi`, or keep its changes if the view is
        in error."""
        was_in_error = bool(self._output_errors)
        self._input_errors = tuple(
            {text: diff for text, diff in merged.items() if diff}
            for merged in _error_sums_after(self._input_errors, step, step.hi)
        )
        sums = dict.fromkeys(self._output_errors, 1)
        for change in outcome.errors:
            sums[change.text] = sums.get(change.text, 0) + change.diff
        self._output_errors = errors_held(sums)
        self._state_rows += sum(
            pc.sum(table["__diff"]).as_py() or 0 for tables in step.deltas for table in tables
        )
        touched = self._touched
        if touched is None:
            return
        plain = await self._plain(step) if step.times else []
        self._plain_of = self._used_of = None, []
        # Once the state of an import has advanced without the others, no step leads from before the
        # error.
        together = self._held.lo is not None or not was_in_error
        if together and self._can_hold() and self._held.hold(step.lo, plain):
            return
        held = self._held.release()
        if touched.empty:
            return
        if any(table.num_rows for table in held):
            pairs = zip(held, plain, strict=True) if plain else ((table,) for table in held)
            plain = [concat(tables, tables[0].schema) for tables in pairs]
        hidden = outcome.deltas.hidden if step.times or step.followed else ()
        apply = partial(touched.step, plain, hidden, step.hi)
        if not any(rows.num_rows for rows in hidden):
            await self._engine.clock.run_blocking(apply)
            return
        # Rows that another replica wrote may arrive while the states are being read.
        async with self._hidden_lock:
            await self._engine.clock.run_blocking(apply)

    def _drop_written(self) -> None:
        """Let the parts of a step that was not committed become orphans."""
        written, self._written = self._written, ()
        self._persist.offer_parts([part for each in written for part in each])

    def _can_hold(self) -> bool:
        """Return whether a later step may end the error that the output holds."""
        plan, touched = self._export.plan, self._touched
        # The clock alone changes a temporal view, at times of its own.
        return (
            bool(self._output_errors and plan.strata)
            and not plan.temporal
            and not find_job_too_large(self._output_errors)
            and touched is not None
            and touched.ready
        )

    # -- other replicas ----------------------------------------------------------------------------

    async def stand_by(self, step: DataflowStep) -> Frontier:
        """Return the output's upper once another replica has advanced it beyond the step's `lo`."""
        shard = self._export.shard
        await self._persist.wait_upper(shard, step.lo)
        return await self._persist.upper(shard)

    async def follow(self, step: DataflowStep) -> tuple[StepOutcome, str | None]:
        """Return another replica's append as the step, and the error that the output holds after
        it.

        Raise `ReadBelowSince` if only a restart from the durable state can help.
        """
        follower = self._follower or await self._open_follower(step.incarnation)
        found = await follower.read(step.lo, step.hi)
        await follower.moved(step.hi)
        output = self._export.plan.output.arrow_updates().empty_table()
        error = found.error_after(self._output_errors)
        return StepOutcome(StepDeltas(output, found.hidden), found.errors), error

    async def _open_follower(self, incarnation: int) -> ReplicaFollower:
        reader_id = self._engine.job_id(incarnation, 0, "follow")
        # Shield this: a cancellation in the middle would leak leases.
        with anyio.CancelScope(shield=True):
            follower = await ReplicaFollower.open(self._persist, self._export, reader_id)
            self._close_follower()  # a cancelled restore may have opened one meanwhile
            self._follower = follower
        return follower

    def _close_follower(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    @property
    def held_error(self) -> str:
        """Return the error that the output holds, or ""."""
        return next(iter(self._output_errors), "")

    def merge_due(self) -> bool:
        """Return whether `merge` has something to do."""
        return self._touched is not None and self._touched.merge_due()

    async def merge(self) -> None:
        """Merge the runs that steps added to arrangements. Runs alongside the steps."""
        touched = self._touched
        if touched is not None:
            await self._engine.clock.run_blocking(touched.merge)

    async def move_holds(self, lo: Frontier) -> bool:
        """Advance the durable holds to a committed `lo`."""
        return await move_holds(self._persist, self._description, self._export, lo)

    async def close(self) -> None:
        """Remove the view's own arrangements, and release the shared ones."""
        self._close_follower()
        self._drop_written()
        touched, self._touched = self._touched, None
        if touched is not None:
            await self._engine.clock.run_blocking(touched.close)

    def abandon(self) -> None:
        """Do the same as `close`, without waiting."""
        self._close_follower()
        self._drop_written()
        touched, self._touched = self._touched, None
        if touched is not None:
            touched.close()


def _error_sums_after(
    before: tuple[dict[str, int], ...], step: DataflowStep, until: Frontier
) -> list[dict[str, int]]:
    """Return each input's error sums after the step's error updates below `until`."""
    after = []
    for sums, tables in zip(before, step.deltas, strict=True):
        added = [errors for table in tables if (errors := split_errors(table)[1]) is not None]
        early = [table.filter(table["__time"].to_numpy() < until) for table in added]
        merged = dict(sums)
        for text, diff in error_sums(early).items():
            merged[text] = merged.get(text, 0) + diff
        after.append(merged)
    return after


def errors_after(
    before: tuple[dict[str, int], ...], step: DataflowStep, time: Time
) -> tuple[str, ...]:
    """Return the errors that any input holds at `time`, which is a time of the step."""
    sums = _error_sums_after(before, step, time + 1)
    return tuple(sorted({text for merged in sums for text in errors_held(merged)}))
