"""Runs and compares one view script: the core of `penstock check-views`.

Theory of operation. A script's views are compiled in order. Then `maintain` runs each on the engine
several times, with the changes cut into steps in different *ways*: each time alone, all at once,
and at random. After that the views run once more as real dataflows on real shards (`stage`):
hydrated at some time, written in random groups, compacted, stopped and started again, and for some
scripts with the engine killed meanwhile. After each of these runs, the accumulated contents at each
time of the script are compared with the reference (`reference`), and no weight may be negative.
The last time deletes all remaining rows.

Rules
- Ways are independent and run concurrently; jobs are pure functions of their message.
- At a time at which plain Spark raises, a view must be in error or equal (*error or equal*). A view
  that is in error where plain Spark answers is wrong; but a dataflow that takes several times in
  one step may recover at the last of them.
- A view over one whose answer Spark may choose is compared with its own query over the actual
  contents of that view.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from actors.durable.persist.memory_stores import MemoryBlob
from actors.engine.views.compile import compile_view
from actors.engine.views.eager_choice import EagerChoice
from actors.engine.views.fingerprint import with_policy
from actors.model.plan.delta import AUTO, DeltaPlan
from actors.model.plan.jobs import ComputeDifference
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import DefiniteError, InvalidUsage, PenstockError, QueryRejected
from actors.runtime.kernel import ActorAddress, ActorSystem, SystemClock
from actors.runtime.settings import Settings
from actors.testing.check_stores import check_stores
from actors.testing.drawn_settings import ENGINE_SETTINGS, draw_settings, drawn_text
from actors.testing.maintain import EngineCaller, MaintainedView, accumulated, updates_of
from actors.testing.nodes import Update as Row
from actors.testing.reference import Bag, ViewReference
from actors.testing.view_scripts import (
    Constant,
    ScriptError,
    ScriptExpectation,
    ScriptUpdate,
    ViewScript,
    ViewText,
    foreign_constants,
    inlined,
    rows_of,
    times_of,
)

if TYPE_CHECKING:
    from actors.testing.stage import ScriptStage

WAYS_AT_ONCE: Final = 4
EAGER_SHARE: Final = 0.5
"""Share of scripts whose views sum below joins wherever that is sound."""
AS_DATAFLOWS: Final = 1 << 30
"""Number of the way "as dataflows", greater than that of any other way."""
DATAFLOW_SETTINGS: Final[dict[str, int]] = {
    "retry_delay_ms_min": 1,
    "retry_delay_ms_max": 20,
    "hold_downgrade_ms": 1,
    "batches_per_shard_max": 2,
}


class ViewResult(msgspec.Struct):
    """The findings about one view."""

    file: str
    """Path of the script."""
    view: str
    """Name of the view."""
    verdict: str
    """``exact``, ``WRONG``, ``refused``, or ``planned`` if nothing was computed."""
    mode: str
    """How the view is maintained; empty if refused."""
    reason: str = ""
    """Why the view is opaque, or why it was refused."""
    detail: str = ""
    """The first difference found, and in which way."""
    failed: str = ""
    """The expectation that was not met."""
    settings: str = ""
    """Settings that were drawn, for a view that is wrong."""

    def line(self) -> str:
        """Return the result as `check-views` prints it."""
        settings = self.settings and f"settings: {self.settings}"
        rest = "; ".join(part for part in (self.detail, self.failed, settings) if part)
        return f"{self.verdict}  {self.mode}  {self.file}:{self.view}" + (
            f"  {rest}" if rest else ""
        )


class CheckPlace(msgspec.Struct, frozen=True):
    """The system, engine and folder with which a script runs."""

    system: ActorSystem
    executor: ActorAddress[object]
    settings: Settings
    scratch: Path
    kill: Callable[[], None] | None = None
    """Kills the engine with SIGKILL; the engine recovers on its own."""


class CheckOptions(msgspec.Struct, frozen=True):
    """How thoroughly to check a script."""

    splits: int = 2
    seed: int = 0
    ends: bool = True
    """True to also cut the changes at every time, and not at all, in addition to random cuts."""
    sample: int = 0
    """Number of ways to draw from all of these; 0 for all."""
    live: bool = True
    """True to run the views as dataflows, too, with compaction and restarts."""
    base: int = 0
    """Number of additional rows per table over which the views run as dataflows (`base_check`)."""
    base_stays: bool = False
    """True to keep the base at the last time, and compare the views once."""
    exact_decimals: bool = True
    """True if the engine's own answers contain exact decimals (those of the in-memory one do
    not)."""
    batched: bool = True
    """True to compute the reference of many times with one query."""
    planned_only: bool = False
    """True to only plan the views and check their expected modes."""


class CheckedScript:
    """Checks one script."""

    def __init__(
        self, script: ViewScript, place: CheckPlace, options: CheckOptions, name: str
    ) -> None:
        self.plans: dict[str, DeltaPlan] = {}
        """Plans of the compiled views, by name."""
        self.script = script
        self._place = place
        self._options = options
        self._name = name
        self._engine = EngineCaller(place.executor, name)
        self._random = random.Random(f"{options.seed} {name}")
        self._results: dict[str, ViewResult] = {}
        """Results so far, by view."""
        self._references: dict[str, ViewReference] = {}
        """Reference of each view, by name."""
        self._expected: dict[str, dict[int, Bag | None]] = {}
        """Expected contents of each view at each time (None: an error); missing if they depend on
        Spark's choices."""
        self._errors: dict[str, set[int]] = {}
        """Times at which the view was in error in every way so far, by view."""
        self._faults: dict[str, tuple[int, str]] = {}
        """First fault of each view: the number of the way, and the text."""
        self._settings_text: dict[str, str] = {}
        """Settings drawn so far, by where they are used."""
        self.base: dict[str, list[Row]] = {name: [] for name in script.tables}
        """Updates of the tables, by name."""
        self.times: list[int] = []
        """All times of the script, ascending."""

    async def run(self, *, kill: bool = False) -> list[ViewResult]:
        """Return the results of the script's views. Raises `ScriptError`."""
        if self._options.planned_only:
            await self.compile(())
        else:
            await self._compute(kill)
        for expectation in self._expectations():
            if expectation.kind != "error" or self._computes_errors():
                self._expect(expectation)
        return self.results()

    def _computes_errors(self) -> bool:
        # Over a base, several times share a step.
        return not self._options.base and not self._options.planned_only

    async def _compute(self, kill: bool) -> None:
        await self.compile()
        if self.times and self.plans:
            await (self._over_base() if self._options.base else self._every_way(kill))
        await self.forget()

    async def _every_way(self, kill: bool) -> None:
        for name, plan in self.plans.items():
            await self._refer(name, plan)
        limiter = anyio.CapacityLimiter(WAYS_AT_ONCE)
        async with anyio.create_task_group() as group:
            for number, cuts in enumerate(self._ways()):
                group.start_soon(self._along, limiter, number, cuts)
            if self._options.live:
                group.start_soon(self._run_as_dataflows, limiter, kill)

    async def _over_base(self) -> None:
        from actors.testing.base_check import check_with_base

        seed = f"{self._options.seed}-{Path(self.script.path).stem}"
        options = self._options
        await check_with_base(self, self._place, options.base, seed, stays=options.base_stays)

    async def compile(self, updates: Sequence[ScriptUpdate] | None = None) -> None:
        """Read the changes, or use these `updates` instead; compile the views and register their
        plans with the engine."""
        if updates is None:
            updates = rows_of(self.script, await self._constants())
        tables: dict[str, TableSchema] = dict(self.script.tables)
        for view in self.script.views:
            if not view.materialized:
                continue
            result = ViewResult(self.script.path, view.name, "exact", "refused")
            self._results[view.name] = result
            try:
                plan = await self._plan(view, tables)
            except InvalidUsage as error:
                result.verdict = "refused"
                result.detail = str(error).splitlines()[0]
                continue
            tables[view.name] = plan.output
            result.mode, result.reason = plan.mode, plan.reason
            self.plans[view.name] = plan
            if self._options.planned_only:
                result.verdict = "planned"
        self._note(updates)

    async def _constants(self) -> dict[Constant, object]:
        """Return the values in changes that only the engine can evaluate."""
        wanted = foreign_constants(self.script, plain=self._options.exact_decimals)
        if not wanted:
            return {}
        items = ", ".join(f"CAST({t} AS {k}) AS c{i}" for i, (t, k) in enumerate(wanted))
        output = TableSchema(
            tuple(TableColumn(f"c{i}", kind) for i, (_, kind) in enumerate(wanted))
        )
        job_id = self._engine.job_id()
        job = ComputeDifference(job_id, f"SELECT {items}", (), output, 0, None, self.script.conf)
        try:
            table = await self._engine.rows(job)
        except (QueryRejected, DefiniteError) as error:
            raise ScriptError(f"{self.script.path}: a value of a change: {error}") from None
        return dict(zip(wanted, updates_of(table, output.names)[0][0], strict=True))

    async def _plan(self, view: ViewText, tables: Mapping[str, TableSchema]) -> DeltaPlan:
        sql = inlined(self.script, view)
        forced = view.name in self.script.eager
        drawn = random.Random(f"{self._options.seed} {self._name} eager").random() < EAGER_SHARE

        async def choose(_: Sequence[str]) -> EagerChoice:
            return EagerChoice(rows_min=0 if forced or drawn else None)

        async def check(plan: DeltaPlan) -> None:
            # Prepared under the name by which its steps run, so that it is prepared only once.
            await MaintainedView(self._engine, plan, self._dataflow(view.name)).prepare()

        analyze = self._engine.analyze()
        plan = await compile_view(
            sql, tables, analyze, self.script.conf, choose=choose, check=check
        )
        if forced and not plan.eager:
            self._results[view.name].failed = "nothing is summed below a join"
        return with_policy(plan, self.script.policies.get(view.name, AUTO))

    def _note(self, updates: Sequence[ScriptUpdate]) -> None:
        """Record all changes and times; the last time deletes all remaining rows."""
        for update in updates:
            self.base[update.table].append((update.row, update.time, update.diff))
        self.times = list(times_of(self.script))
        if self.times:
            end = self.times[-1] + 1
            for rows in self.base.values():
                left = accumulated(rows, end)
                rows += [(row, end, -weight) for row, weight in left.items()]
            self.times.append(end)

    def maintained(self, name: str, *, fuse: bool | None = None) -> MaintainedView:
        """Return a view before its first step, with the plan that the engine knows."""
        return MaintainedView(self._engine, self.plans[name], self._dataflow(name), fuse=fuse)

    def _dataflow(self, name: str) -> str:
        return f"{self._name}:{name}"

    def note(self, name: str, detail: str) -> None:
        """Record a remark about a view that is not wrong."""
        if self._results[name].verdict == "exact":
            self._results[name].detail = detail

    def results(self) -> list[ViewResult]:
        """Return the results of the views so far."""
        return list(self._results.values())

    async def forget(self) -> None:
        """Drop the plans in the engine."""
        for name in self.plans:
            await self.maintained(name).forget()

    # -- the reference ----------------------------------------------------------------------------

    async def _refer(self, name: str, plan: DeltaPlan) -> None:
        """Compute the view's contents at every time, unless they depend on Spark's choices."""
        reference = ViewReference(self._engine, plan, batched=self._options.batched)
        self._references[name] = reference
        if not self.script.determined:
            await reference.prepare()
        if any(self._is_open(name) for name in plan.inputs):
            return
        contents = {time: self._input_contents(plan, time, {}) for time in self.times}
        known = {time: bags for time, bags in contents.items() if bags is not None}
        answers = await reference.contents(known)
        self._expected[name] = {time: answers.get(time) for time in self.times}

    def _is_open(self, name: str) -> bool:
        """Return whether a view's contents are not determined by the tables'."""
        if name in self.base:
            return False
        return name not in self._expected or self._references[name].nondeterminism.kind != "none"

    def _input_contents(
        self, plan: DeltaPlan, time: int, found: Mapping[str, Mapping[int, Bag | None]]
    ) -> list[Bag] | None:
        """Return the inputs' contents at a time; None if one of them is in error."""
        bags: list[Bag] = []
        for name in plan.inputs:
            if name in self.base:
                bags.append(accumulated(self.base[name], time))
                continue
            at = found[name] if self._is_open(name) else self._expected[name]
            bag = at.get(time)
            if bag is None:
                return None
            bags.append(bag)
        return bags

    async def _expected_at(
        self, name: str, times: Sequence[int], found: Mapping[str, Mapping[int, Bag | None]]
    ) -> Mapping[int, Bag | None]:
        """Return the view's contents according to plain Spark at some times, None at a time in
        error. The contents of undetermined views below it come from `found`."""
        if name in self._expected:
            return self._expected[name]
        contents = {time: self._input_contents(self.plans[name], time, found) for time in times}
        known = {time: bags for time, bags in contents.items() if bags is not None}
        answers = await self._references[name].contents(known)
        return {time: answers.get(time) for time in times}

    async def _compare(
        self,
        name: str,
        way: tuple[int, str],
        found: Mapping[str, Mapping[int, Bag | None]],
        times: Sequence[int],
        recovering: Sequence[int] = (),
    ) -> None:
        """Record the first time at which a view differs from the reference.

        `found` is None where the view is in error; that is allowed where plain Spark raises, and
        after that at times in `recovering`.
        """
        reference = self._references[name]
        expected = await self._expected_at(name, times, found)
        for time in times:
            wanted, bag = expected[time], found[name][time]
            if wanted is None:
                continue
            if bag is None:
                raised = any(at <= time and bag is None for at, bag in expected.items())
                if not raised or time not in recovering:
                    self.note_wrong(name, f"at {time}: in error, but plain Spark answers", way)
                continue
            wrong = reference.differences(wanted, bag, exact_decimals=self._options.exact_decimals)
            negative = [row for row, weight in bag.items() if weight < 0]
            unknown = reference.nondeterminism.kind == "unknown"
            # No choice of Spark's explains a negative weight.
            if wrong and unknown and not negative:
                self._results[name].detail = f"not checked: {reference.nondeterminism.why}"
            elif wrong and not unknown:
                first = wrong[0]
                self.note_wrong(
                    name,
                    f"at {time}: {len(wrong)} rows differ, first {first.row}: "
                    f"weight {first.found}, not {first.expected}",
                    way,
                )
            elif negative:
                self.note_wrong(name, f"at {time}: negative weight of {negative[0]}", way)

    # -- ways -------------------------------------------------------------------------------------

    def _ways(self) -> list[list[int]]:
        """Return lists of `hi`: each time alone, all at once, and random ones."""
        ends = [time + 1 for time in self.times]
        ways = [ends, ends[-1:]] if self._options.ends else []
        for _ in range(self._options.splits):
            some = {end for end in ends[:-1] if self._random.random() < 0.4}
            ways.append([*sorted(some), ends[-1]])
        return self._random.sample(ways, min(self._options.sample or len(ways), len(ways)))

    async def _along(self, limiter: anyio.CapacityLimiter, number: int, cuts: list[int]) -> None:
        """Maintain all views in one way, and compare at all times."""
        async with limiter:
            way = (number, f"steps to {', '.join(map(str, cuts))}")
            views = {name: self.maintained(name) for name in self.plans}
            first = max(self.times[0], 1)
            lo = 0
            for hi in [first, *(cut for cut in cuts if cut > first)]:
                for name, view in views.items():
                    deltas = [self._delta(read, views, lo, hi) for read in view.plan.inputs]
                    try:
                        await view.advance(deltas, lo, hi)
                    except (PenstockError, AssertionError) as error:
                        self.note_wrong(name, f"step [{lo}, {hi}): {first_line(error)}", way)
                        return
                lo = hi
            found: dict[str, dict[int, Bag | None]] = {}
            for name, view in views.items():
                broken = self._broken(view, found)
                found[name] = {
                    time: None if time in broken else accumulated(view.output, time)
                    for time in self.times
                }
                self._errors[name] = self._errors.get(name, broken) & broken
                await self._compare(name, way, found, self.times)

    def _delta(self, name: str, views: Mapping[str, MaintainedView], lo: int, hi: int) -> list[Row]:
        updates = self.base[name] if name in self.base else views[name].output
        return [update for update in updates if lo <= update[1] < hi]

    def _broken(
        self, view: MaintainedView, found: Mapping[str, Mapping[int, Bag | None]]
    ) -> set[int]:
        """Return the script's times at which a view is in error: those at which an input is, and
        those from its own failure to the next change."""
        all_broken: set[int] = set()
        for name in view.plan.inputs:
            all_broken |= {time for time, bag in found.get(name, {}).items() if bag is None}
        changed = {time for updates in view.inputs for _, time, _ in updates}
        broken = False
        for time in sorted({*self.times, *view.errors}):
            broken = time in view.errors or (broken and time not in changed)
            if broken:
                all_broken.add(time)
        return all_broken & set(self.times)

    # -- as dataflows -----------------------------------------------------------------------------

    async def _run_as_dataflows(self, limiter: anyio.CapacityLimiter, kill: bool) -> None:
        from actors.testing.stage import ScriptStage

        async with limiter:
            settings = self._dataflow_settings("stores")
            try:
                async with check_stores(settings, lambda: MemoryBlob(SystemClock())) as persist:
                    stage = ScriptStage(
                        self._place.system,
                        self._place.executor,
                        persist,
                        self._place.scratch,
                        settings,
                        f"{self._name}-live",
                    )
                    try:
                        await stage.open(self.script.tables, self.plans)
                        await self._run_on_stage(stage, kill)
                    finally:
                        await stage.stop()
            except PenstockError as error:
                for name in self.plans:
                    self.note_wrong(name, first_line(error), (AS_DATAFLOWS, "as a dataflow"))

    def _dataflow_settings(self, moment: str) -> Settings:
        """Return settings drawn for this script: for the stores, or for a start of the
        dataflows."""
        base = msgspec.structs.replace(self._place.settings, **DATAFLOW_SETTINGS)
        kept = {*DATAFLOW_SETTINGS, *ENGINE_SETTINGS}
        # A shrunk script is named "<original>.<suffix>" and must draw the original's settings.
        seed = f"{self._options.seed} {Path(self.script.path).name.partition('.')[0]}"
        drawn = draw_settings(f"{seed} {moment}", base, kept)
        self._settings_text[moment] = drawn_text(base, drawn)
        return drawn

    async def _run_on_stage(self, stage: ScriptStage, kill: bool) -> None:
        """Hydrate, write in groups, compact, restart, and compare after each group."""
        choose = random.Random(f"{self._options.seed} {self._name} live")
        groups = self._groups(choose)
        restart, killing = choose.randrange(len(groups)), choose.randrange(len(groups))
        as_of, lo = groups[0][-1], 0
        since = as_of
        for number, times in enumerate(groups):
            hi = times[-1] + 1
            updates = {
                name: [u for u in rows if lo <= u[1] < hi] for name, rows in self.base.items()
            }
            await stage.write(updates, hi)
            if number == 0:
                await stage.start(as_of, self._dataflow_settings("first start"))
            if kill and number == killing and self._place.kill is not None:
                await anyio.sleep(choose.random() / 10)
                self._place.kill()
            await stage.wait(hi)
            await self._compare_dataflows(stage, times if number else times[-1:], f"to {hi}")
            if choose.random() < 0.5:
                since = choose.choice([since, times[-1]])
                await stage.compact(since)
            if number == restart:
                await stage.stop()
                await stage.start(as_of, self._dataflow_settings("second start"))
            lo = hi

    def _groups(self, choose: random.Random) -> list[list[int]]:
        """Return the times, cut at random into groups that are written together."""
        groups: list[list[int]] = [[]]
        for time in self.times:
            groups[-1].append(time)
            if choose.random() < 0.4:
                groups.append([])
        return [group for group in groups if group]

    async def _compare_dataflows(
        self, stage: ScriptStage, times: Sequence[int], where: str
    ) -> None:
        found: dict[str, Mapping[int, Bag | None]] = {}
        changed = [u[1] for rows in self.base.values() for u in rows if u[1] <= times[-1]]
        recovering = [time for time in times if time < max(changed, default=0)]
        for name in self.plans:
            found[name] = await stage.contents(name, times)
            way = (AS_DATAFLOWS, f"as a dataflow, written {where}")
            await self._compare(name, way, found, times, recovering)

    # -- verdicts ---------------------------------------------------------------------------------

    def note_wrong(self, name: str, detail: str, way: tuple[int, str] = (0, "")) -> None:
        """Record a difference. If several ways differ, the first way's is reported."""
        number, text = way
        found = (number, f"{detail} ({text})" if text else detail)
        self._faults[name] = min(self._faults.get(name, found), found, key=lambda fault: fault[0])
        result = self._results[name]
        result.verdict, result.detail = "WRONG", self._faults[name][1]
        if self._faults[name][0] == AS_DATAFLOWS:
            result.settings = "; ".join(f"{at}: {what}" for at, what in self._settings_text.items())

    def _expectations(self) -> list[ScriptExpectation]:
        """Return the expectations that apply to this engine: one that only parses may have its own
        modes."""
        everything = self.script.expectations
        if not self._engine.parses:
            return [each for each in everything if not each.parsed]
        own = {each.view.lower() for each in everything if each.parsed}
        return [each for each in everything if not each.is_mode() or each.view.lower() not in own]

    def _expect(self, expectation: ScriptExpectation) -> None:
        result = self._results.get(expectation.view.lower())
        if result is None:
            return
        where = f"line {expectation.line}: expected {expectation.kind}"
        if expectation.kind == "error":
            moments = [t for t in times_of(self.script) if expectation.start <= t < expectation.end]
            missing = set(moments) - self._errors.get(result.view, set())
            if missing:
                result.failed = f"{where}, but at {min(missing)} it answers"
        elif expectation.kind != result.mode:
            why = f" ({result.reason or result.detail})" if result.reason or result.detail else ""
            result.failed = f"{where}, found {result.mode}{why}"
        elif expectation.text and expectation.text not in (result.reason or result.detail):
            found = result.reason or result.detail
            result.failed = f"{where} with {expectation.text!r}, found {found!r}"


def first_line(error: BaseException) -> str:
    """Return an error as one line; if its first line announces a log, with the log's last line.

    >>> first_line(ValueError("it ended; its log ends:\\nat x.y\\nno such option\\n"))
    'ValueError: it ended; its log ends: no such option'
    """
    first, *rest = str(error).strip().splitlines() or [""]
    # The cause is there and nowhere else.
    ending = f" {rest[-1].strip()}" if rest and first.endswith(":") else ""
    return f"{type(error).__name__}: {first}{ending}"
