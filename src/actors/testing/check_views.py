"""`penstock check-views`: runs view scripts through compiler and engine, and compares.

For each view and each time: the accumulated output equals the query over the accumulated inputs
as the engine evaluates the view's own text (`Difference`, which shares no code with the
compiler); no accumulated weight is negative; the same for every way to split the changes into
steps (each time alone, all at once, seeded random); and with everything deleted. Views that read
views are fed the outputs of those, and compared with the query over the *queries*.

A time at which plain Spark raises is *error or equal*; a view in error where plain Spark answers
is wrong.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from actors.errors import DefiniteError, InvalidUsage, PenstockError, QueryRejected
from actors.kernel import Address, System
from actors.plan.delta import DeltaPlan
from actors.plan.jobs import Difference
from actors.plan.schema import Column, Schema
from actors.settings import Settings
from actors.testing.maintain import Engine, Maintained, accumulated, updates_of
from actors.testing.nodes import Update as Row
from actors.testing.oracle import differences
from actors.testing.view_scripts import (
    Constant,
    Expectation,
    Script,
    ScriptError,
    Update,
    ViewText,
    foreign_constants,
    inlined,
    parse_script,
    rows_of,
    times_of,
)
from actors.views.compile import compile_view


class ViewResult(msgspec.Struct):
    """What was found of one view."""

    file: str
    view: str
    verdict: str
    """``exact``, ``WRONG`` or ``refused``."""
    mode: str
    reason: str = ""
    detail: str = ""
    failed: str = ""
    """The expectation that did not hold."""

    def line(self) -> str:
        """As `check-views` prints it."""
        rest = "; ".join(part for part in (self.detail, self.failed) if part)
        return f"{self.verdict}  {self.mode}  {self.file}:{self.view}" + (
            f"  {rest}" if rest else ""
        )


class Report(msgspec.Struct):
    """All results."""

    views: list[ViewResult] = []

    @property
    def ok(self) -> bool:
        """Nothing wrong, every expectation held."""
        return not any(view.verdict == "WRONG" or view.failed for view in self.views)

    def summary(self) -> str:
        """The last line."""
        verdicts = Counter(view.verdict for view in self.views)
        modes = Counter(view.mode for view in self.views)
        return (
            f"{len(self.views)} views: {verdicts['exact']} exact, {verdicts['WRONG']} wrong, "
            f"{verdicts['refused']} refused; {modes['incremental']} incremental, "
            f"{modes['keyed']} keyed, {modes['opaque']} opaque"
        )


def main(
    paths: Sequence[Path], splits: int, seed: int, json: Path | None, settings: Settings
) -> int:
    """The command: prints one line a view and a summary; 0 when all is well, else 1."""
    return anyio.run(_main, paths, splits, seed, json, settings)


async def _main(
    paths: Sequence[Path], splits: int, seed: int, json: Path | None, settings: Settings
) -> int:
    from actors.spark_executor import SparkExecutor

    with tempfile.TemporaryDirectory(prefix="penstock-check-") as place:
        async with System(seed=seed) as system:
            executor = system.spawn(lambda: SparkExecutor(settings, Path(place)), "engine")
            try:
                report = await check_scripts(paths, executor, splits, seed, show=_show())
            except PenstockError as error:
                sys.stderr.write(f"{error}\n")
                return 1
    sys.stdout.write(report.summary() + "\n")
    if json is not None:
        _write_json(json, report)
    return 0 if report.ok else 1


def _write_json(path: Path, report: Report) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


def _show() -> Callable[[ViewResult, int, int], None]:
    """Prints each result; on a terminal with a line of progress below."""
    terminal = sys.stdout.isatty()

    def show(result: ViewResult, done: int, total: int) -> None:
        clear = "\r\x1b[K" if terminal else ""
        sys.stdout.write(f"{clear}{result.line()}\n")
        if terminal and done < total:
            width = 30 * done // max(total, 1)
            sys.stdout.write(f"[{'#' * width}{'.' * (30 - width)}] {done}/{total}")
        sys.stdout.flush()

    return show


def script_files(paths: Sequence[Path]) -> list[Path]:
    """The scripts named, folders searched for ``*.view``. Raises `InvalidUsage`."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*.view"))
        elif path.is_file():
            found.append(path)
        else:
            raise InvalidUsage(f"no such file or folder: {path}")
    return found


async def check_scripts(
    paths: Sequence[Path],
    executor: Address[Any],
    splits: int = 3,
    seed: int = 0,
    *,
    exact_decimals: bool = True,
    show: Callable[[ViewResult, int, int], None] | None = None,
) -> Report:
    """Checks all scripts. Raises `ScriptError` and what the engine fails with for good.

    `exact_decimals`: the engine's own answers hold decimals exactly (the in-memory one's do
    not).
    """
    scripts = [parse_script(path.read_text(), str(path)) for path in script_files(paths)]
    total = sum(view.materialized for script in scripts for view in script.views)
    report = Report()
    for number, script in enumerate(scripts):
        engine = Engine(executor, f"check{number}")
        check = _Check(script, engine, splits, seed, exact_decimals)
        for result in await check.run():
            report.views.append(result)
            if show is not None:
                show(result, len(report.views), total)
    return report


class _Check:
    """One script."""

    def __init__(
        self, script: Script, engine: Engine, splits: int, seed: int, exact_decimals: bool
    ) -> None:
        self._script = script
        self._engine = engine
        self._splits = splits
        self._random = random.Random(seed)
        self._exact_decimals = exact_decimals
        self._results: dict[str, ViewResult] = {}
        self._plans: dict[str, DeltaPlan] = {}
        self._errors: dict[str, set[int]] = {}
        self._expected: dict[tuple[str, int], Counter[tuple[Any, ...]] | None] = {}
        self._base: dict[str, list[Row]] = {name: [] for name in script.tables}
        self._runs = 0

    async def run(self) -> list[ViewResult]:
        """The results of the script's views."""
        updates = rows_of(self._script, await self._constants())
        await self._compile()
        times = self._note(updates)
        if times:
            for cuts in self._ways(times):
                await self._maintain(times, cuts)
        for expectation in self._script.expectations:
            self._expect(expectation)
        return list(self._results.values())

    async def _constants(self) -> dict[Constant, Any]:
        """Values of changes that only the engine can evaluate."""
        wanted = foreign_constants(self._script)
        if not wanted:
            return {}
        items = ", ".join(f"CAST({t} AS {k}) AS c{i}" for i, (t, k) in enumerate(wanted))
        output = Schema(tuple(Column(f"c{i}", kind) for i, (_, kind) in enumerate(wanted)))
        job_id = self._engine.job_id()
        job = Difference(job_id, f"SELECT {items}", (), output, 0, None, self._script.conf)
        try:
            table = await self._engine.rows(job)
        except (QueryRejected, DefiniteError) as error:
            raise ScriptError(f"{self._script.path}: a value of a change: {error}") from None
        return dict(zip(wanted, updates_of(table, output.names)[0][0], strict=True))

    async def _compile(self) -> None:
        tables: dict[str, Schema] = dict(self._script.tables)
        for view in self._script.views:
            if not view.materialized:
                continue
            result = ViewResult(self._script.path, view.name, "exact", "refused")
            self._results[view.name] = result
            try:
                plan = await self._plan(view, tables)
            except InvalidUsage as error:
                result.verdict = "refused"
                result.detail = str(error).splitlines()[0]
                continue
            self._plans[view.name] = plan
            tables[view.name] = plan.output
            result.mode, result.reason = plan.mode, plan.reason

    async def _plan(self, view: ViewText, tables: Mapping[str, Schema]) -> DeltaPlan:
        sql = inlined(self._script, view)
        plan = await compile_view(sql, tables, self._engine.analyze(), self._script.conf)
        policy = self._script.policies.get(view.name, "auto")
        if policy == "incremental strict" and plan.mode == "opaque":
            raise InvalidUsage(f"the policy is incremental strict, but: {plan.reason}")
        if policy == "full":
            plan = msgspec.structs.replace(
                plan, mode="opaque", reason="the policy is full", strata=(), hidden=None
            )
        return plan

    def _note(self, updates: Sequence[Update]) -> list[int]:
        """All times, the one at which everything left is deleted last."""
        for update in updates:
            self._base[update.table].append((update.row, update.time, update.diff))
        times = list(times_of(self._script))
        if times:
            end = times[-1] + 1
            for rows in self._base.values():
                left = accumulated(rows, end)
                rows += [(row, end, -weight) for row, weight in left.items()]
            times.append(end)
        return times

    def _ways(self, times: list[int]) -> list[list[int]]:
        """Lists of `hi`: each time alone, all at once, and random ones."""
        ends = [time + 1 for time in times]
        ways = [ends, ends[-1:]]
        for _ in range(self._splits):
            some = {end for end in ends[:-1] if self._random.random() < 0.4}
            ways.append([*sorted(some), ends[-1]])
        return ways

    async def _maintain(self, times: list[int], cuts: list[int]) -> None:
        """Maintains all views along one way, and compares at all times."""
        self._runs += 1
        views: dict[str, Maintained] = {}
        for name, plan in self._plans.items():
            views[name] = Maintained(self._engine, plan, f"{self._script.path}:{name}:{self._runs}")
            await views[name].prepare()
        first = max(times[0], 1)
        lo = 0
        for hi in [first, *(cut for cut in cuts if cut > first)]:
            for view in views.values():
                deltas = [self._updates(source, views, lo, hi) for source in view.plan.sources]
                await self._advance(view, deltas, lo, hi)
            lo = hi
        for name, view in views.items():
            await self._compare(name, view, times)
            await view.forget()

    async def _advance(self, view: Maintained, deltas: list[list[Row]], lo: int, hi: int) -> None:
        try:
            await view.advance(deltas, lo, hi)
        except (PenstockError, AssertionError) as error:
            name = next(n for n, plan in self._plans.items() if plan is view.plan)
            self._wrong(name, f"step [{lo}, {hi}): {type(error).__name__}: {error}")

    def _updates(self, source: str, views: Mapping[str, Maintained], lo: int, hi: int) -> list[Row]:
        updates = self._base[source] if source in self._base else views[source].output
        return [update for update in updates if lo <= update[1] < hi]

    async def _compare(self, name: str, view: Maintained, times: list[int]) -> None:
        errors = set(view.errors)
        for source in view.plan.sources:
            errors |= self._errors.get(source, set())
        in_error: set[int] = set()
        broken = False
        moments = set(times) | errors
        changed = {time for updates in view.inputs for _, time, _ in updates}
        for time in sorted(moments):
            broken = time in errors or (broken and time not in changed)
            if broken:
                in_error.add(time)
            if time not in times:
                continue
            expected = await self._reference(name, time)
            if expected is None:
                continue
            if broken:
                self._wrong(name, f"at {time}: in error, but plain Spark answers")
                continue
            found = accumulated(view.output, time)
            wrong = differences(expected, found, exact_decimals=self._exact_decimals)
            negative = [row for row, weight in found.items() if weight < 0]
            if wrong:
                first = wrong[0]
                self._wrong(
                    name,
                    f"at {time}: {len(wrong)} rows differ, first {first.row}: "
                    f"weight {first.found}, not {first.expected}",
                )
            elif negative:
                self._wrong(name, f"at {time}: negative weight of {negative[0]}")
        self._errors[name] = in_error

    async def _reference(self, name: str, time: int) -> Counter[tuple[Any, ...]] | None:
        """The view's contents by its own text, None where that raises."""
        if (name, time) not in self._expected:
            self._expected[name, time] = await self._evaluate(name, time)
        return self._expected[name, time]

    async def _evaluate(self, name: str, time: int) -> Counter[tuple[Any, ...]] | None:
        plan = self._plans[name]
        contents = []
        for source in plan.sources:
            if source in self._base:
                contents.append(accumulated(self._base[source], time))
                continue
            upstream = await self._reference(source, time)
            if upstream is None:
                return None
            contents.append(upstream)
        try:
            return accumulated(await self._engine.query(plan, contents, time), time)
        except DefiniteError:
            return None

    def _wrong(self, name: str, detail: str) -> None:
        result = self._results[name]
        if result.verdict != "WRONG":
            result.verdict, result.detail = "WRONG", detail

    def _expect(self, expectation: Expectation) -> None:
        result = self._results.get(expectation.view.lower())
        if result is None:
            return
        where = f"line {expectation.line}: expected {expectation.kind}"
        if expectation.kind == "error":
            moments = [
                t for t in times_of(self._script) if expectation.start <= t < expectation.end
            ]
            missing = set(moments) - self._errors.get(result.view, set())
            if missing:
                result.failed = f"{where}, but at {min(missing)} it answers"
        elif expectation.kind != result.mode:
            why = f" ({result.reason or result.detail})" if result.reason or result.detail else ""
            result.failed = f"{where}, found {result.mode}{why}"
        elif expectation.text and expectation.text not in (result.reason or result.detail):
            found = result.reason or result.detail
            result.failed = f"{where} with {expectation.text!r}, found {found!r}"
