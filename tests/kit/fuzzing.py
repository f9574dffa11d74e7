"""Runs random view scripts on an engine, and keeps the failing ones, shrunk.

A failing script is reduced as long as it still fails: first to a single view and the views that it
reads, then to fewer changes, by halves. The remainder is written as a script file that names the
difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from actors.runtime.errors import QueryRejected
from actors.testing.check_views import CheckReport, Show
from actors.testing.checking import CheckedScript, CheckOptions, CheckPlace, ViewResult, first_line
from actors.testing.stage import shard_name
from actors.testing.view_scripts import parse_script
from tests.kit.fuzz import FuzzCase, QueryWriter, make_case
from tests.kit.fuzz_names import with_odd_names

VIEWS_A_SCRIPT: Final = 4
SCRIPTS_AT_ONCE: Final = 2
ODD_EVERY: Final = 2
"""One of this many scripts has odd names."""
BASE_EVERY: Final = 12
"""One of this many scripts is checked over a base of additional rows."""
LIVE_EVERY: Final = 3
"""One of this many scripts also runs as dataflows."""
ATTEMPTS_MAX: Final = 40


async def fuzz(
    views: int,
    place: CheckPlace,
    options: CheckOptions,
    keep: Path,
    show: Show,
    grammar: type[QueryWriter] | None = None,
) -> CheckReport:
    """Make and check `views` random views, and write failing scripts to `keep`."""
    report = CheckReport()
    numbers = iter(range(-(-views // VIEWS_A_SCRIPT)))
    total = -(-views // VIEWS_A_SCRIPT) * VIEWS_A_SCRIPT

    async def work() -> None:
        for number in numbers:
            case = make_case(options.seed, number, VIEWS_A_SCRIPT, grammar)
            if number % ODD_EVERY == 1:
                case = with_odd_names(case, random.Random(f"{options.seed}/{number} names"))
            chosen = chosen_options(options, number)
            name = f"fuzz-{options.seed}-{number}"
            try:
                results = await _results(case, place, chosen, name)
            except Exception as error:  # noqa: BLE001 - noted in the script's results
                # There is no reference for a query that SQLite, the in-memory engine's oracle,
                # cannot run.
                unknown = isinstance(error, QueryRejected) and not options.exact_decimals
                verdict, text = "refused" if unknown else "WRONG", first_line(error)
                results = [
                    ViewResult(name, v.strip("`"), verdict, "refused", detail=text)
                    for v, _ in case.views
                ]
            for result in results:
                if result.verdict == "WRONG":
                    path = keep / f"{name}.{shard_name(result.view)}.view"
                    result.file = str(path)
                    await _keep(case, result, place, chosen, path)
                report.views.append(result)
                show(result, len(report.views), total)

    async with anyio.create_task_group() as group:
        for _ in range(SCRIPTS_AT_ONCE):
            group.start_soon(work)
    return report


def chosen_options(options: CheckOptions, number: int) -> CheckOptions:
    """Return the options of script `number`. Over many scripts, every combination occurs often
    enough."""
    live = number % LIVE_EVERY == 0
    base = 0
    if number % BASE_EVERY == BASE_EVERY - 1:
        drawn = random.Random(f"{options.seed}/{number} base").choice((20, 60, 200))
        base = 50 * drawn if options.exact_decimals else drawn  # the in-memory engine is slow
    return msgspec.structs.replace(options, splits=2, sample=1, live=live, base=base)


async def _results(
    case: FuzzCase, place: CheckPlace, options: CheckOptions, name: str
) -> list[ViewResult]:
    script = parse_script(case.text(), name)
    return await CheckedScript(script, place, options, name.replace(".", "-")).run()


async def _keep(
    case: FuzzCase, result: ViewResult, place: CheckPlace, options: CheckOptions, path: Path
) -> None:
    counter = iter(range(1, ATTEMPTS_MAX + 1))

    async def fails(smaller: FuzzCase) -> bool:
        attempt = next(counter, None)
        if attempt is None:
            return False
        name = f"{path.stem}-{attempt}.view"
        try:
            found = await _results(smaller, place, options, name)
        except Exception:  # noqa: BLE001 - it fails in another way
            return False
        return any(one.view == result.view and one.verdict == "WRONG" for one in found)

    small = await shrink_case(case, result.view, fails)
    file = anyio.Path(path)
    await file.parent.mkdir(parents=True, exist_ok=True)
    await file.write_text(small.text(f"{result.mode}: {result.detail}"))


async def shrink_case(case: FuzzCase, view: str, fails: Callable[[FuzzCase], Any]) -> FuzzCase:
    """Remove the parts of a case that are not needed for `fails` to hold."""
    wanted: set[str] = {view}
    for name, sql in reversed(case.views):
        if name.strip("`") in wanted:
            used = {other for other, _ in case.views if f"{other} " in sql + " "}
            wanted |= {other.strip("`") for other in used}
    fewer = tuple((name, sql) for name, sql in case.views if name.strip("`") in wanted)
    texts = " ".join(sql for _, sql in fewer)
    tables = tuple(table for table in case.tables if f"{table.name} " in texts + " ")
    kept = {table.name for table in tables}
    changes = tuple(change for change in case.changes if change.table in kept)
    candidate = msgspec.structs.replace(case, views=fewer, tables=tables, changes=changes)
    if candidate != case and await fails(candidate):
        case = candidate
    size = max(1, len(case.changes) // 2)
    while size:
        start = 0
        while start < len(case.changes):
            left = _without(case, range(start, start + size))
            if await fails(left):
                case = left
            else:
                start += size
        size //= 2
    trimmed = _without(case, ())
    return trimmed if trimmed != case and await fails(trimmed) else case


def _without(case: FuzzCase, dropped: Iterable[int]) -> FuzzCase:
    gone = set(dropped)
    changes = tuple(c for index, c in enumerate(case.changes) if index not in gone)
    used = {change.time for change in changes}
    times = tuple(time for time in case.times if time in used) or case.times[:1]
    return msgspec.structs.replace(case, changes=changes, times=times)
