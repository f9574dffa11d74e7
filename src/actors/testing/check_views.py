"""`penstock check-views`: runs view scripts through compiler and engine, and compares the results.

`checking` defines how a script is checked. This module finds and reads the scripts, runs them one
after the other on one engine, and reports: a line per view, a progress bar on a terminal, a
summary, and JSON on request. In a seeded sample of the scripts the engine is killed with SIGKILL
while it works; its automatic recovery takes seconds.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actors.engine.spark.launch import EngineProcess, launch
from actors.engine.spark.remote_address import is_remote
from actors.engine.spark.spark_releases import installed_version, release_of
from actors.engine.spark_executor import SparkExecutor
from actors.runtime.errors import InvalidUsage, PenstockError
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.kernel.clock import ActorClock
from actors.runtime.settings import Settings
from actors.testing.checking import CheckedScript, CheckOptions, CheckPlace, ViewResult, first_line
from actors.testing.drawn_settings import (
    ENGINE_SETTINGS,
    SMALL_VALUES,
    draw_constants,
    draw_settings,
    drawn_text,
    use_constants,
)
from actors.testing.view_scripts import ViewScript, for_release, parse_script

Show: TypeAlias = Callable[[ViewResult, int, int], None]
"""Called with each result, the number of views done, and the number of all views."""
Judge: TypeAlias = Callable[[CheckedScript], Awaitable[list[ViewResult]]]
"""Checks a script, instead of `CheckedScript.run`."""

KILL_FROM: Final = 10
"""Fewest scripts for which the engine is killed: with fewer, a new engine takes longer than all of
them."""
KILL_EVERY: Final = 50
SMALL_RESERVES: Final = (1, 1, 2, 5)
"""Scripts have too few rows to use up a limit's reserve of any other size."""
SCRIPTS_FEW: Final = 20
"""Most scripts for which the JVM's second compiler does not pay off."""
PREPARED_EVERY: Final = 4
"""One in this many seeds of generated views executes prepared plans of steps repeatedly."""


class CheckReport(msgspec.Struct):
    """Results of all views."""

    views: list[ViewResult] = []
    """One result per view, in the order in which they were checked."""

    @property
    def ok(self) -> bool:
        """Return whether no view is wrong and every expectation was met."""
        return not any(view.verdict == "WRONG" or view.failed for view in self.views)

    def summary(self) -> str:
        """Return the last line of the output."""
        verdicts = Counter(view.verdict for view in self.views)
        modes = Counter(view.mode for view in self.views)
        planned = f", {verdicts['planned']} planned alone" if verdicts["planned"] else ""
        return (
            f"{len(self.views)} views: {verdicts['exact']} exact, {verdicts['WRONG']} wrong, "
            f"{verdicts['refused']} refused{planned}; {modes['incremental']} incremental, "
            f"{modes['keyed']} keyed, {modes['opaque']} opaque"
        )


class CheckCommand(msgspec.Struct, frozen=True):
    """Options of the command."""

    paths: Sequence[Path] = ()
    splits: int = 2
    seed: int = 0
    json: Path | None = None
    base: int = 0
    """Number of additional rows in each of a script's tables."""
    base_stays: bool = False
    """True to keep the base at the last time; see `CheckOptions.base_stays`."""
    modes: bool = False
    """True to only plan the views; see `CheckOptions.planned_only`."""


def main(command: CheckCommand, settings: Settings) -> int:
    """Run the command: print one line per view and a summary. Return 0 if all is well, else 1."""
    return anyio.run(_main, command, settings)


async def _main(command: CheckCommand, settings: Settings) -> int:
    options = CheckOptions(
        command.splits,
        command.seed,
        base=command.base,
        base_stays=command.base_stays,
        planned_only=command.modes,
    )
    try:
        scripts = read_for_release(command.paths)
    except PenstockError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    many_rows = command.base > 0
    if len(scripts) <= SCRIPTS_FEW and not many_rows:
        settings = for_short_lives(settings)
    chosen = with_drawn_engine(settings, command.seed, plans_once=False)

    async def check(place: CheckPlace, show: Show) -> CheckReport:
        return await check_scripts(scripts, place, options, show=show)

    return await report_on_spark(
        check, settings, chosen, command.seed, command.json, many_rows=many_rows
    )


async def report_on_spark(
    check: Callable[[CheckPlace, Show], Awaitable[CheckReport]],
    given: Settings,
    chosen: Settings,
    seed: int,
    json: Path | None = None,
    *,
    many_rows: bool = False,
) -> int:
    """Run `check` on an engine on Spark, print each result and a summary, and write all results to
    `json`. Return 0 if all is well, else 1.

    The engine gets the settings `chosen`. Prints those drawn at random, that is, those that differ
    from `given`, and the constants (`drawn_constants`).
    """
    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        async with ActorSystem(seed=seed) as system:
            with _shown() as show:
                constants = drawn_constants(seed, many_rows=many_rows)
                use_constants(constants)
                text = f"{drawn_text(given, chosen)}; {constants}"
                sys.stdout.write(f"seed {seed}, engine's settings: {text}\n")
                try:
                    report = await check(place_on_spark(system, chosen, Path(folder)), show)
                except PenstockError as error:
                    sys.stderr.write(f"{error}\n")
                    return 1
    sys.stdout.write(report.summary() + "\n")
    if json is not None:
        written = msgspec.json.format(msgspec.json.encode(report), indent=2)
        await anyio.Path(json).write_bytes(written)
    return 0 if report.ok else 1


def for_short_lives(settings: Settings) -> Settings:
    """Return settings for an engine that runs many plans, each for few steps.

    The JVM's second compiler costs more than it gains before such a campaign is over. Without it
    the JVM reserves too little room for the first compiler's code. The JVM's locale is Turkish,
    where upper and lower case of "i" differ: no rule may depend on the machine's locale. A server's
    JVM, which is already running, is left alone: it would refuse the setting.
    """
    if is_remote(settings.spark_master):
        return settings
    conf = {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m "
        "-Duser.language=tr -Duser.country=TR"
    }
    return msgspec.structs.replace(settings, spark_conf=conf | settings.spark_conf)


def for_plans_run_once(settings: Settings, seed: int) -> Settings:
    """Return settings for plans that run once or twice.

    Compiling such a plan costs Spark more than running it, and so does preparing its steps for
    reuse or planning queries that duplicate rows: one seed in `PREPARED_EVERY` does these anyway.
    (Drawn settings reach these two only with that seed.)
    """
    conf = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    given = settings.spark_conf
    once = {"prepared_slot_bytes_max": 1, "engine_plan_nodes_max": 60}
    limits = {} if seed % PREPARED_EVERY == 0 else once
    return msgspec.structs.replace(settings, spark_conf=conf | given, **limits)


def with_drawn_engine(settings: Settings, seed: int, *, plans_once: bool) -> Settings:
    """Return settings with random values for those that an engine takes at its start; the others
    are drawn for each script. `plans_once`: see `for_plans_run_once`."""
    kept = SMALL_VALUES.keys() - ENGINE_SETTINGS
    if plans_once:
        settings = for_plans_run_once(settings, seed)
        if seed % PREPARED_EVERY:
            kept |= {"prepared_slot_bytes_max", "engine_plan_nodes_max"}
    return draw_settings(f"engine {seed}", settings, kept)


def drawn_constants(seed: int, *, many_rows: bool) -> dict[str, Any]:
    """Return the drawn constants of a run. A run over many rows draws only a limit's reserve, since
    splitting data into many small pieces would take too long."""
    drawn = {} if many_rows else draw_constants(f"engine {seed}")
    reserve = random.Random(f"reserve {seed}").choice(SMALL_RESERVES)
    return drawn | {"engine.views.rule_top.RESERVE_ROWS": reserve}


def place_on_spark(system: ActorSystem, settings: Settings, folder: Path) -> CheckPlace:
    """Start an engine on Spark that can be killed."""
    children: list[EngineProcess] = []

    async def launched(settings: Settings, directory: Path, clock: ActorClock) -> EngineProcess:
        child = await launch(settings, directory, clock)
        children[:] = [child]
        return child

    def kill() -> None:
        for child in children:
            child.kill()

    executor: ActorAddress[Any] = system.spawn(
        lambda: SparkExecutor(settings, folder / "engine", launched), "engine"
    )
    return CheckPlace(system, executor, settings, folder, kill)


@contextlib.contextmanager
def _shown() -> Iterator[Show]:
    """Print each result, on a terminal with a progress bar below."""
    if not sys.stdout.isatty():
        yield _print
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("views", total=None)

        def show(result: ViewResult, done: int, total: int) -> None:
            progress.console.print(result.line(), markup=False, highlight=False, soft_wrap=True)
            progress.update(task, completed=done, total=total)

        yield show


def _print(result: ViewResult, done: int, total: int) -> None:
    del done, total
    sys.stdout.write(f"{result.line()}\n")
    sys.stdout.flush()


def script_files(paths: Sequence[Path]) -> list[Path]:
    """Return the named scripts; folders are searched for ``*.view``. Raises `InvalidUsage`."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*.view"))
        elif path.is_file():
            found.append(path)
        else:
            raise InvalidUsage(f"no such file or folder: {path}")
    return found


def read(paths: Sequence[Path]) -> list[ViewScript | ViewResult]:
    """Return all scripts, and a wrong result for each that cannot be read. Raises
    `InvalidUsage`."""
    found: list[ViewScript | ViewResult] = []
    for path in script_files(paths):
        try:
            found.append(parse_script(path.read_text(), str(path)))
        except (PenstockError, ValueError, OSError, RecursionError) as error:
            found.append(ViewResult(str(path), "", "WRONG", "refused", detail=first_line(error)))
    return found


def read_for_release(paths: Sequence[Path]) -> list[ViewScript | ViewResult]:
    """Return what `read` does, without the views for which the installed Spark is too old."""
    release = release_of(installed_version())
    return [
        each if isinstance(each, ViewResult) else for_release(each, release) for each in read(paths)
    ]


def failed_results(script: ViewScript, check: CheckedScript, error: Exception) -> list[ViewResult]:
    """Return the results of a script whose check failed: each view not found wrong yet becomes
    wrong."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    known = {result.view: result for result in check.results()}
    results = []
    for view in script.views:
        if view.materialized:
            unknown = ViewResult(script.path, view.name, "WRONG", "refused")
            result = known.get(view.name, unknown)
            if result.verdict != "WRONG" or result is unknown:
                result.verdict, result.detail = "WRONG", f"not checked: {first_line(error)}"
            results.append(result)
    return results


async def check_scripts(
    scripts: Sequence[ViewScript | ViewResult],
    place: CheckPlace,
    options: CheckOptions,
    *,
    show: Show | None = None,
    judge: Judge | None = None,
) -> CheckReport:
    """Check all scripts, or have `judge` do it. A script that fails for any reason is reported as
    wrong, and the others continue."""
    total = sum(
        1 if isinstance(script, ViewResult) else sum(view.materialized for view in script.views)
        for script in scripts
    )
    killed: set[int] = set()
    if len(scripts) >= KILL_FROM:
        sample = len(scripts) // KILL_EVERY + 1
        killed = set(random.Random(options.seed).sample(range(len(scripts)), sample))
    report = CheckReport()
    for number, script in enumerate(scripts):
        if isinstance(script, ViewResult):
            results = [script]
        else:
            check = CheckedScript(script, place, options, f"check{number}")
            try:
                results = await (judge(check) if judge else check.run(kill=number in killed))
            except Exception as error:  # noqa: BLE001 - noted in the script's results
                results = failed_results(script, check, error)
        for result in results:
            report.views.append(result)
            if show is not None:
                show(result, len(report.views), total)
    return report
