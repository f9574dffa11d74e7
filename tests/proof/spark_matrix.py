"""Run tests of the service on each supported release of Spark.

    python tests/proof/spark_matrix.py [--releases 4.0,4.3] [--trials "views,view scripts"]
        [--every 8] [--environments .venv/spark] [--write]

Each release has its own environment (`make matrix` creates them) and runs the plans of the public
queries, the tests that need Spark, and all view scripts. Prints one line per trial, with the name
of its log if it fails. The exit status is 1 if a trial fails. ``--write`` writes the results into
docs/reference/spark-releases.md and keeps earlier results of other trials.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from actors.engine.spark.spark_releases import NEWEST, RELEASES

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "spark-releases.md"
BEGIN: Final = "<!-- results of `make matrix` -->\n"
END: Final = "<!-- end of results -->\n"
TRIAL_SECONDS_MAX: Final = 3 * 3600
PYTEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rsf", "-m", "spark")
PENSTOCK: Final = ("-c", "import sys; from actors.doors.commands.cli import main; sys.exit(main())")
SCRIPTS: Final = "tests/scripts/*.view"
TRIALS: Final[Mapping[str, tuple[str, ...]]] = {
    "plans of the public queries": ("tests/proof/conformance.py", "--modes"),
    "modes of all view scripts": (*PENSTOCK, "check-views", "--modes", "tests/scripts"),
    "prepared steps": (*PYTEST, "tests/engine/spark/test_prepared_steps.py"),
    "delta nodes": (*PYTEST, "tests/engine/spark/test_delta_nodes.py"),
    "Spark Connect": (*PYTEST, "tests/engine/spark/test_connect.py"),
    "shards in Spark": (*PYTEST, "--whole", "tests/engine/spark/test_source_on_spark.py"),
    "streams of changes": (
        *PYTEST,
        "--whole",
        "tests/doors/connect_gateway/test_streams_on_spark.py",
    ),
    "parts in buckets": (*PYTEST, "--whole", "tests/engine/spark/test_bucket_parts.py"),
    "Connect gateway": (*PYTEST, "tests/doors/connect_gateway"),
    "views": (*PYTEST, "tests/engine/views"),
    "engine, all": (*PYTEST, "tests/engine/spark"),
    "view scripts": (*PENSTOCK, "check-views", SCRIPTS),
}
"""Arguments of Python for each trial."""
NOT_TRIED: Final = "–"
_SUMMARY: Final = re.compile(
    r"^\d+ (?:queries|views): .*$|^(?:\d+ \w+(?:, )?)+(?: in [\d.]+s.*)?$", re.MULTILINE
)


class TrialResult(NamedTuple):
    """The result of one trial on one release."""

    ok: bool
    told: str
    """The last line of its output."""


def python_of(release: tuple[int, int], environments: Path) -> Path:
    """Return the Python of a release's environment."""
    if release == NEWEST:
        return Path(sys.executable)
    return environments / text_of(release) / "bin" / "python"


def text_of(release: tuple[int, int]) -> str:
    """Return a release as users write it."""
    return f"{release[0]}.{release[1]}"


def version_of(python: Path) -> str:
    """Return the PySpark version installed for a Python."""
    asked = "import importlib.metadata as m; print(m.version('pyspark'))"
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def with_scripts(arguments: tuple[str, ...], every: int) -> list[str]:
    """Return the arguments, with every `every`-th view script."""
    made: list[str] = []
    for each in arguments:
        found = sorted(ROOT.glob(SCRIPTS))[::every] if each == SCRIPTS else [each]
        made += map(str, found)
    return made


def chosen_trials(text: str) -> list[str]:
    """Return the trials in a comma-separated list. Names may themselves contain commas. Raises
    `ValueError` for an unknown name.

    >>> chosen_trials("views, engine, all,Spark Connect")
    ['Spark Connect', 'views', 'engine, all']
    >>> chosen_trials("views, engine")
    Traceback (most recent call last):
    ...
    ValueError: unknown trial 'engine'
    """
    known = "|".join(re.escape(name) for name in TRIALS)
    whole = re.compile(rf"(?:^|(?<=,))\s*({known})\s*(?:,|$)")
    unknown = whole.sub("", text).strip(", ")
    if unknown or not text.strip():
        raise ValueError(f"unknown trial {unknown!r}")
    found = whole.findall(text)
    return [name for name in TRIALS if name in found]


def run_trial(python: Path, arguments: list[str], log: Path) -> TrialResult:
    """Run one trial. Its output goes to `log`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with log.open("w") as out:
        done = subprocess.run(
            [str(python), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=TRIAL_SECONDS_MAX,
            check=False,
        )
    return TrialResult(done.returncode == 0, summary_of(log.read_text(errors="replace")))


def summary_of(text: str) -> str:
    """Return the summary line of an output, without the duration, or else its last line.

    >>> summary_of("....\\n2 failed, 31 passed, 4 deselected in 5.01s (0:00:05)\\n")
    '2 failed, 31 passed'
    >>> summary_of("[1/2] a\\n2 views: 2 exact, 0 wrong\\n")
    '2 views: 2 exact, 0 wrong'
    >>> summary_of("Traceback …\\nKeyError: 'a'\\n")
    "KeyError: 'a'"
    """
    found = _SUMMARY.findall(text)
    line: str = found[-1] if found else ["", *text.strip().splitlines()][-1][:200]
    line = re.sub(r",? in [\d.]+s.*$", "", line)
    return re.sub(r", \d+ (?:deselected|warnings?)\b", "", line).strip()


def try_release(
    release: tuple[int, int], trials: list[str], given: argparse.Namespace, logs: Path
) -> Iterator[tuple[str, str, TrialResult]]:
    """Run trials on one release, and yield its version, the trial and the result."""
    python = python_of(release, given.environments)
    version = version_of(python)
    for number, name in enumerate(trials):
        log = logs / f"{version}-{number}.log"
        started = time.monotonic()
        found = run_trial(python, with_scripts(TRIALS[name], given.every), log)
        seconds = time.monotonic() - started
        where = "" if found.ok else f"  FAILED: {log}"
        print(f"Spark {version}, {name}: {found.told} ({seconds:.0f} s){where}", flush=True)
        yield version, name, found


def table_of(seen: Mapping[str, Mapping[str, TrialResult]]) -> str:
    """Return the table of results by version.

    >>> print(table_of({"4.1.4": {"view scripts": TrialResult(False, "3 views: 1 wrong")}}), end="")
    | | Spark 4.1.4 |
    |---|---|
    | view scripts | **3 views: 1 wrong** |
    """
    versions = sorted(seen, key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
    lines = [
        f"| | {' | '.join(f'Spark {version}' for version in versions)} |",
        "|---" * (len(versions) + 1) + "|",
    ]
    for name in dict.fromkeys(name for version in versions for name in seen[version]):
        cells = [seen[version].get(name, TrialResult(True, NOT_TRIED)) for version in versions]
        shown = [each.told if each.ok else f"**{each.told}**" for each in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, dict[str, TrialResult]]:
    """Parse a table into results by version.

    >>> seen = {"4.1.4": {"view scripts": TrialResult(False, "3 views: 1 wrong")}}
    >>> read_table(table_of(seen)) == seen
    True
    """
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    found: dict[str, dict[str, TrialResult]] = {}
    for place, head in enumerate(rows[0][1:] if rows else [], 1):
        version = head.removeprefix("Spark ")
        found[version] = {
            row[0]: TrialResult(not row[place].startswith("**"), row[place].strip("*"))
            for row in rows[1:]
            if row[place] != NOT_TRIED
        }
    return found


def write_page(version: str, name: str, found: TrialResult) -> None:
    """Write a result into the page, which keeps only the latest version of each release."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    release = version.rpartition(".")[0]
    seen = {
        each: cells
        for each, cells in read_table(old).items()
        if each == version or each.rpartition(".")[0] != release
    }
    cells = seen.setdefault(version, {})
    cells[name] = found
    seen = {each: {n: got[n] for n in TRIALS if n in got} for each, got in seen.items()}
    PAGE.write_text(f"{before}{BEGIN}\n{table_of(seen)}\n{END}{after}")


def main() -> int:
    """Run the matrix, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    every = ",".join(map(text_of, RELEASES))
    parser.add_argument("--releases", default=every, help=f"comma-separated, of {every}")
    parser.add_argument("--trials", default=",".join(TRIALS), help="comma-separated names")
    parser.add_argument("--every", type=int, default=1, help="run every N-th view script")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "spark")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    chosen = [each for each in RELEASES if text_of(each) in given.releases.split(",")]
    if len(chosen) != len(given.releases.split(",")):
        parser.error(f"--releases {given.releases}: expected some of {every}")
    try:
        trials = chosen_trials(given.trials)
    except ValueError as error:
        parser.error(f"--trials: {error}: expected some of {'; '.join(TRIALS)}")
    logs = Path(tempfile.mkdtemp(prefix="penstock-matrix-"))
    all_well = True
    for release in chosen:
        for version, name, found in try_release(release, trials, given, logs):
            all_well = all_well and found.ok
            if given.write:
                write_page(version, name, found)
    if all_well:
        shutil.rmtree(logs)
    else:
        print(f"logs of failed trials: {logs}", flush=True)
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
