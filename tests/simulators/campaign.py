"""Campaigns of simulated runs: many seeds, and for a failure its seed and a shrunk schedule.

A failure is shrunk by leaving out operations and faults, halves first, then one by one, as long
as the run still fails by the same checker; the effort is bounded (`SHRINK_RUNS_MAX`).
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice
from time import perf_counter
from typing import Any, Final, TypeVar

import msgspec

from tests.simulators.halves import run as halves
from tests.simulators.halves import schedule as halves_schedule
from tests.simulators.service.cluster import RunReport, settings_text, simulate
from tests.simulators.service.faults import InjectedFault
from tests.simulators.service.schedule import describe, draw, has_source
from tests.simulators.shards import run as shards
from tests.simulators.shards import schedule as shard_schedule
from tests.simulators.wal import run as wal
from tests.simulators.wal import schedule as wal_schedule

T = TypeVar("T")

SHRINK_RUNS_MAX: Final = 250
FAILURES_MAX: Final = 10
"""Number of failures after which a campaign stops."""


class SimulationKind(msgspec.Struct, frozen=True):
    """A kind of simulation. Its schedules are records with `operations` and `faults`."""

    draw: Callable[[int], Any]
    """Draws the schedule of a seed."""
    run: Callable[..., RunReport]
    """Runs a schedule; with `keep_trace` its steps are kept."""
    describe: Callable[[Any], str]
    """Describes an operation or a fault in one line."""
    option: str = ""
    """Option of the command that replays a seed."""
    settings: Callable[[Any], str] = lambda _: ""
    """Describes the settings that a schedule draws."""


SERVICE: Final = SimulationKind(
    lambda seed: draw(seed),
    lambda schedule, **more: simulate(schedule, **more),
    describe,
    settings=lambda schedule: settings_text(schedule),
)
"""The whole service."""
SHARDS: Final = SimulationKind(
    shard_schedule.draw,
    shards.simulate,
    shard_schedule.describe,
    "--persist ",
    shards.settings_text,
)
"""Persist alone."""
HALVES: Final = SimulationKind(
    halves_schedule.draw, halves.simulate, halves_schedule.describe, "--halves "
)
"""Both halves of a replica's workers alone."""
WAL: Final = SimulationKind(wal_schedule.draw, wal.simulate, wal_schedule.describe, "--wal ")
"""Acceptors and proposers of the WAL alone."""
WAL_FILES: Final = SimulationKind(
    wal_schedule.draw_files, wal.simulate, wal_schedule.describe, "--wal-files "
)
"""Acceptors and proposers of the WAL alone, the logs in files."""


class SeedFailure(msgspec.Struct, frozen=True):
    """A seed that fails."""

    seed: int
    violation: str
    operations: tuple[str, ...]
    faults: tuple[str, ...]
    """Faults of the shrunk schedule."""
    shrunk_violation: str
    runs: int
    """Number of runs that shrinking took."""
    option: str = ""
    """Option of the command that replays it."""
    settings: str = ""
    """Settings that were drawn, which the seed alone draws again."""


class SimulationCampaign(msgspec.Struct, frozen=True):
    """The result of a campaign."""

    first: int
    last: int
    runs: int
    seconds: float
    steps: int
    faults: dict[str, int]
    failures: tuple[SeedFailure, ...]

    @property
    def runs_per_second(self) -> float:
        """Return the runs per second of one core, without shrinking."""
        return self.runs / self.seconds if self.seconds else 0.0


def campaign(
    seeds: Iterable[int],
    told: Callable[[SeedFailure], None] | None = None,
    kind: SimulationKind = SERVICE,
) -> SimulationCampaign:
    """Run every seed; stop after `FAILURES_MAX` failures."""
    gc.collect()
    gc.freeze()
    runs = steps = 0
    seconds = 0.0
    first = last = None
    faults: Counter[str] = Counter()
    failures: list[SeedFailure] = []
    for seed in seeds:
        first, last = seed if first is None else first, seed
        began = perf_counter()
        report = kind.run(kind.draw(seed))
        seconds += perf_counter() - began
        runs += 1
        steps += report.steps
        faults.update(report.faults)
        if report.violation:
            failure = shrink_schedule(report, kind)
            failures.append(failure)
            if told is not None:
                told(failure)
            if len(failures) >= FAILURES_MAX:
                break
    gc.unfreeze()
    struck = dict(sorted(faults.items()))
    return SimulationCampaign(first or 0, last or 0, runs, seconds, steps, struck, tuple(failures))


def shrink_schedule(report: RunReport, kind: SimulationKind = SERVICE) -> SeedFailure:
    """Return the failure with a schedule as small as still fails by the same checker."""
    checker = report.violation.partition(":")[0]
    best, last, runs = kind.draw(report.seed), report, 0

    def fails(schedule: Any) -> bool:
        nonlocal best, last, runs
        if runs >= SHRINK_RUNS_MAX:
            return False
        runs += 1
        again = kind.run(schedule)
        if again.violation.partition(":")[0] != checker:
            return False
        best, last = schedule, again
        return True

    def with_operations(kept: Sequence[Any]) -> bool:
        return fails(msgspec.structs.replace(best, operations=tuple(kept)))

    def with_faults(kept: Sequence[InjectedFault]) -> bool:
        return fails(msgspec.structs.replace(best, faults=tuple(kept)))

    for _ in range(2):
        _reduce(best.faults, with_faults)
        _reduce(best.operations, with_operations)
    return SeedFailure(
        report.seed,
        report.violation,
        tuple(map(kind.describe, best.operations)),
        tuple(map(kind.describe, best.faults)),
        last.violation,
        runs,
        kind.option,
        kind.settings(best),
    )


def _reduce(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> None:
    """Leave out ever smaller pieces; `fails` remembers the last schedule that failed."""
    kept = list(items)
    size = max(1, len(kept))
    while kept:
        at = 0
        while at < len(kept):
            less = kept[:at] + kept[at + size :]
            if fails(less):
                kept = less
            else:
                at += size
        if size == 1:
            return
        size //= 2


def replay_and_print(
    seed: int, *, as_json: bool = False, trace: bool = False, kind: SimulationKind = SERVICE
) -> bool:
    """Print one run, made twice; return True if it failed or the two differ (then the simulation
    itself is at fault)."""
    first = kind.run(kind.draw(seed), keep_trace=trace)
    second = kind.run(kind.draw(seed))
    same = first.hash == second.hash
    if as_json:
        shown = msgspec.to_builtins(first) | {"second_hash": second.hash}
        print(json.dumps(shown))
        return bool(first.violation) or not same
    print("\n".join(first.trace), end="\n" if trace else "")
    struck = ", ".join(f"{kind} {count}" for kind, count in first.faults.items()) or "none"
    print(f"seed {seed}: {first.steps} steps; faults: {struck}")
    print(f"trace hash {first.hash}, again {second.hash}{'' if same else ': NOT THE SAME'}")
    if first.violation:
        print(failure_as_text(shrink_schedule(first, kind)))
    else:
        print("nothing was wrong")
    return bool(first.violation) or not same


def run_and_print_campaign(
    runs: int,
    seed: int,
    *,
    as_json: bool = False,
    sources: bool = False,
    kind: SimulationKind = SERVICE,
) -> bool:
    """Print a campaign of `runs` seeds from `seed` on, of those with a source only if `sources`;
    return True if one failed."""

    def tell(failure: SeedFailure) -> None:
        if not as_json:
            print(failure_as_text(failure), flush=True)

    seeds = (each for each in count(seed) if has_source(each) or not sources)
    found = campaign(islice(seeds, runs), tell, kind)
    print(_as_json(found) if as_json else as_text(found))
    return bool(found.failures)


def _as_json(found: SimulationCampaign) -> str:
    """Return the result as JSON."""
    shown: dict[str, Any] = msgspec.to_builtins(found)
    return json.dumps(shown | {"runs_per_second": round(found.runs_per_second, 2)})


def as_text(found: SimulationCampaign) -> str:
    """Return the result as text."""
    faults = ", ".join(f"{kind} {count}" for kind, count in found.faults.items()) or "none"
    return (
        f"{found.runs} runs (seeds {found.first} to {found.last}), "
        f"{found.runs_per_second:.1f} runs/s, {found.steps} steps\n"
        f"faults: {faults}\n"
        f"failures: {len(found.failures)}"
    )


def failure_as_text(failure: SeedFailure) -> str:
    """Return the seed, the violation, and the shrunk schedule."""
    lines = [f"seed {failure.seed} fails: {failure.violation}"]
    lines.append(f"shrunk in {failure.runs} runs to: {failure.shrunk_violation}")
    lines += [f"  {line}" for line in (*failure.operations, *failure.faults)]
    if failure.settings:
        lines.append(f"settings: {failure.settings}")
    lines.append(f"replay it: python -m tests.simulators {failure.option}--seed {failure.seed}")
    return "\n".join(lines)
