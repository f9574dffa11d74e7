"""Takes rules out of modules, one at a time, and looks whether a test notices.

    python tests/proof/mutations.py [--list] [--only TEXT] [--sample N] [--seed S] [MODULE …]
    python tests/proof/mutations.py --rooms 200 --seed 7 [--jobs 2] [--json FILE]
    python tests/proof/mutations.py --mutants FILE [--survivors] [--against CHECKOUT] [--second]

The first call mutates the modules that are named, or all for which `module_tests.TESTS` names the
tests. The second draws mutants over all rooms, by the seed and the sources alone. The third runs
the mutants of an earlier run again, or those that survived it.

Each mutant is made in a copy of the sources (see `mutant_runs`), and the tests of its module (see
`module_tests`) are run against that. ``--against`` takes them from another checkout, for example
from the suite before a change. So one suite is compared with an older one:

    python tests/proof/mutations.py --rooms 200 --seed 7 --jobs 2 --json new.json
    python tests/proof/mutations.py --mutants new.json --survivors --against OLD --json old.json

A mutant that no test notices is printed as SURVIVED. Those of `mutant_campaign.KNOWN` change
nothing that could be noticed: the reason stands there. With ``--mutants`` one that died in the
older suite and survives in the newer one is printed as LOST. The older suite is that of
``--against`` if there is one, and that of the earlier run if not. ``--tests`` names the test files
that are run, in place of the module's own. ``--second`` runs the second lane of the tests, if the
suite has one, in place of the default one: what survives both is what no lane notices.

A run that was interrupted goes on with ``--resume``: what its JSON file has is not run again.

Exit status: with ``--mutants`` 1 if one is lost, else 1 if one survived that is not known.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from module_tests import TESTS
from mutant_campaign import DIED, MutantCampaign, MutantRecord, lost
from mutant_runs import ROOT, MutantCheckout, RunOutcome
from mutants import MODULES_APART, ROOMS_APART, Mutation, by_room, draw, mutations

ACTORS: Final = ROOT / "src" / "actors"
SECONDS_MAX: Final = 60.0
"""Of the tests of a module that is drawn."""


def main() -> int:
    """Choose the mutants, run them, and say what became of them."""
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    earlier = _earlier(given)
    mutants = list(earlier) if given.mutants else _chosen(given)
    if given.rooms:
        apart = {**ROOMS_APART, **MODULES_APART}
        for why in dict.fromkeys(apart.values()):
            names = [name for name, reason in apart.items() if reason == why]
            _print(f"not drawn: {', '.join(names)} ({why})")
    if given.list:
        print(*mutants, sep="\n")
        return 0
    suite = given.against.resolve() if given.against else ROOT
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        modules = dict.fromkeys(each.module for each in mutants)
        copies = [
            MutantCheckout(Path(place) / str(job), suite, modules, ["--second"] * given.second)
            for job in range(given.jobs)
        ]
        seconds_max = SECONDS_MAX if given.rooms or given.mutants else float("inf")
        campaign = MutantCampaign(mutants, copies, _print, given.seconds or seconds_max)
        campaign.check()
        campaign.choose(given.tests, given.second)
        done = _resumed(campaign, given, suite)
        campaign.measure()
        total = sum(campaign.seconds(each.module) for each in mutants) / given.jobs
        _print(f"{len(mutants)} mutants of {len(modules)} modules: {total / 60:.0f} min at most")
        if given.estimate:
            _write([], campaign, given, suite)
            return 0
        records = _run(campaign, given, suite, done)
    return _conclude(records, earlier, bool(given.against))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Takes rules out, one at a time.")
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--only", default="", help="mutations with this text")
    parser.add_argument("--sample", type=int, default=0, help="so many of a module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument("--rooms", type=int, default=0, help="draw so many over all rooms")
    parser.add_argument("--mutants", type=Path, help="those of an earlier run's JSON file")
    parser.add_argument("--survivors", action="store_true", help="only those that survived it")
    parser.add_argument("--against", type=Path, help="the checkout that has the tests")
    parser.add_argument("--tests", nargs="+", default=[], help="these files, below tests")
    parser.add_argument("--second", action="store_true", help="run the suite's second lane")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--seconds", type=float, help="the most that a module's tests may take")
    parser.add_argument("--estimate", action="store_true", help="only run tests without mutations")
    parser.add_argument("--json", type=Path, help="write what became of them")
    parser.add_argument("--resume", action="store_true", help="go on with that file's run")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="wal/quorum, for example")
    given = parser.parse_args()
    if (given.rooms > 0) + (given.mutants is not None) + bool(given.modules) > 1:
        parser.error("give modules, --rooms or --mutants, not several of them")
    return given


def _chosen(given: argparse.Namespace) -> list[Mutation]:
    """Return the mutants that the arguments name, or draw them."""
    if given.rooms:
        return [
            each for each in draw(by_room(ACTORS), given.rooms, given.seed) if _fits(each, given)
        ]
    chosen: list[Mutation] = []
    for module in given.modules or TESTS:
        found = [each for each in _mutations(module) if _fits(each, given)]
        if 0 < given.sample < len(found):
            found = Random(given.seed).sample(found, given.sample)
        chosen += found
    return chosen


def _fits(mutation: Mutation, given: argparse.Namespace) -> bool:
    return given.only in mutation.what


def _mutations(module: str) -> list[Mutation]:
    path = ACTORS / f"{module}.py"
    if not path.is_file():
        raise SystemExit(f"not a module of src/actors: {module}")
    return list(mutations(module, path.read_text()))


def _earlier(given: argparse.Namespace) -> dict[Mutation, MutantRecord]:
    """Return the mutants of an earlier run. They are found by their text, then by their line."""
    if given.mutants is None:
        return {}
    records = [MutantRecord(**each) for each in json.loads(given.mutants.read_text())["mutants"]]
    found = {}
    for record in records:
        if given.survivors and record.verdict != "survived":
            continue
        here = [each for each in _mutations(record.module) if each.what == record.what]
        if not here:
            raise SystemExit(f"not in these sources: {record.name}")
        found[min(here, key=lambda each: abs(each.line - record.line))] = record
    return found


def _resumed(
    campaign: MutantCampaign, given: argparse.Namespace, suite: Path
) -> list[MutantRecord]:
    """Return the records of an interrupted run, and leave its mutants out of the campaign."""
    if not given.resume:
        return []
    if given.json is None:
        raise SystemExit("--resume goes on with the run of --json FILE: name that file")
    before = json.loads(given.json.read_text())
    wanted = {"suite": str(suite), "rooms": given.rooms, "seed": given.seed}
    differing = [name for name, value in wanted.items() if before[name] != value]
    if differing:
        raise SystemExit(f"{given.json} is of another run: it differs in {', '.join(differing)}")
    campaign.outcomes = {name: RunOutcome(*each) for name, each in before["files"].items()}
    records = [MutantRecord(**each) for each in before["mutants"]]
    done = {record.name for record in records}
    left = [each for each in campaign.mutants if str(each) not in done]
    campaign.mutants = left
    _print(f"{len(records)} mutants have run before, {len(left)} are left")
    return records


def _run(
    campaign: MutantCampaign,
    given: argparse.Namespace,
    suite: Path,
    records: list[MutantRecord],
) -> list[MutantRecord]:
    """Run all mutants; print and write what became of each as soon as it has ended. `records` are
    those of an interrupted run."""
    count = len(records) + len(campaign.mutants)
    for record in campaign.run():
        records.append(record)
        _print(
            f"{len(records)}/{count} {record.verdict.upper()} {record.name}"
            f" ({record.seconds:.0f} s{', ' if record.noticed_by else ''}{record.noticed_by})"
        )
        _write(records, campaign, given, suite)
    return records


def _write(
    records: Sequence[MutantRecord],
    campaign: MutantCampaign,
    given: argparse.Namespace,
    suite: Path,
) -> None:
    """Write the JSON file, if one is wanted."""
    if given.json is None:
        return
    written: dict[str, Any] = {
        "suite": str(suite),
        "rooms": given.rooms,
        "seed": given.seed,
        "files": campaign.outcomes,
        "mutants": [asdict(each) for each in sorted(records, key=_place)],
    }
    given.json.write_text(json.dumps(written, indent=1) + "\n")


def _conclude(
    records: Sequence[MutantRecord], earlier: dict[Mutation, MutantRecord], against: bool
) -> int:
    """Print the counts of each module, and what is lost; return the exit status."""
    modules: dict[str, Counter[str]] = {}
    for record in sorted(records, key=_place):
        modules.setdefault(record.module, Counter())[record.verdict] += 1
    for module, counts in [*modules.items(), ("all", sum(modules.values(), Counter()))]:
        died = sum(counts[verdict] for verdict in DIED)
        _print(
            f"{module}: {counts.total()} mutations, {died} noticed, {counts['known']} known to"
            f" change nothing, {counts['survived']} survived"
        )
    if not earlier:
        return int(any(each.verdict == "survived" for each in records))
    now = {(each.module, each.line, each.what): each for each in records}
    found = 0
    for mutation, before in earlier.items():
        record = now[mutation.module, mutation.line, mutation.what]
        if lost(before.verdict, record.verdict, against):
            found += 1
            older = record if against else before
            _print(f"LOST {record.name} (noticed by {older.noticed_by or ' '.join(older.tests)})")
            newer = before if against else record
            file = older.noticed_by.partition("::")[0]
            if (ROOT / file).is_file() and file.removeprefix("tests/") not in newer.tests:
                _print(f"  {file} was not run against it in the newer suite: try it with --tests")
    _print(f"{found} of {len(earlier)} lost")
    return int(found > 0)


def _place(record: MutantRecord) -> tuple[str, int, str]:
    return record.module, record.line, record.what


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
