"""Kills a process that sinks a stream, with SIGKILL, and checks what stands outside.

Run: ``python tests/proof/sink_campaign.py [--kills 200] [--seed 1]``.

The process (`sink_writer.py`) makes a stream with inserts, deletes, copies of rows and stretches
in error, compacts it at once, and sinks it into a Delta table of changes, one of current contents,
and Parquet files. It is killed at random moments, or kills itself at the N-th fsync or link, and
is started again. Meanwhile the tables are compacted (OPTIMIZE) from here. At the end all sinks
stand at the shard's upper, and

1. the table of changes and the files hold each update of the stream exactly once, at its time
   (those of a stretch in error at its end);
2. the table of contents holds what they sum up to;
3. uppers that were told never went back, and nothing lies outside that no commit has named.

Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from sink_writer import SINKS, shifted, updates_at

from actors.connectors.sinks.parquet import MANIFESTS, BatchManifest

SCRIPT = Path(__file__).with_name("sink_writer.py")
LINES_MAX = 60
"""Of a life that is killed from outside."""
OPERATIONS_MAX = 250
"""Of one that kills itself."""
OPTIMIZE_SHARE = 0.1
"""Of the lines that it prints: then a table is compacted."""
DRAIN_S = 120.0


class Campaign:
    """One run in a folder."""

    def __init__(self, place: Path, seed: int) -> None:
        self._place = place
        self._chance = random.Random(seed)
        self.told = dict.fromkeys(SINKS, 0)
        self.kills = 0
        self.optimized = 0
        self.wrong: list[str] = []

    def live(self) -> None:
        """One life, and its end."""
        own = self._chance.random() < 0.5
        environment = dict(os.environ)
        if own:
            environment["PENSTOCK_KILL_AT"] = str(self._chance.randrange(1, OPERATIONS_MAX))
        lines = self._chance.randrange(1, LINES_MAX)
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self._place)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                self._hear(line)
                if self._chance.random() < OPTIMIZE_SHARE:
                    self._optimize()
                lines -= 1
                if lines == 0 and not own:
                    child.kill()
        if child.wait() != -9:
            self.wrong.append(f"the process ended by itself, with status {child.returncode}")
        self.kills += 1

    def _optimize(self) -> None:
        """Moves rows between the files of a table, under the sink's feet."""
        name = self._chance.choice(["changes", "current"])
        try:
            DeltaTable(self._place / "out" / name).optimize.compact()
        except CommitFailedError:
            return  # the sink was first
        except TableNotFoundError:
            return
        self.optimized += 1

    def _hear(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        if not line.endswith("\n"):
            return
        if not rest.isdigit():
            self.wrong.append(f"it said {line.strip()!r}")
        elif name in self.told:
            if int(rest) < self.told[name]:
                self.wrong.append(f"{name} went back from {self.told[name]} to {rest}")
            self.told[name] = int(rest)

    def drain(self) -> int:
        """The last life: until all is outside; the upper."""
        child = subprocess.run(
            [sys.executable, str(SCRIPT), str(self._place), "drain"],
            capture_output=True,
            text=True,
            timeout=DRAIN_S,
            check=False,
        )
        *lines, last = child.stdout.splitlines(keepends=True) or [""]
        for line in lines:
            self._hear(line)
        if child.returncode or not last.startswith("drained "):
            raise RuntimeError(f"the last life failed: {child.stdout[-500:]}{child.stderr[-2000:]}")
        return int(last.split()[1])

    def check(self, upper: int) -> None:
        """Compares what is outside to the stream below `upper`."""
        out = self._place / "out"
        wanted: Counter[str] = Counter()
        contents: Counter[str] = Counter()
        for time in range(upper):
            for *row, at, diff in updates_at(time):
                wanted[repr((*row, shifted(at)))] += diff
                contents[repr(tuple(row))] += diff
        wanted = Counter({key: diff for key, diff in wanted.items() if diff})
        changes = DeltaTable(out / "changes").to_pyarrow_table().to_pylist()
        self._compare("the table of changes", changes, wanted)
        manifests = [
            msgspec.json.decode(path.read_bytes(), type=BatchManifest)
            for path in sorted((out / "files" / MANIFESTS).glob("*.json"))
        ]
        files = [file.path for manifest in manifests for file in manifest.files]
        rows = [row for path in files for row in pq.read_table(out / "files" / path).to_pylist()]
        self._compare("the files", rows, wanted)
        table = DeltaTable(out / "current").to_pyarrow_table().to_pylist()
        found = Counter(repr(tuple(row.values())) for row in table)
        if found != +contents:
            self.wrong.append(f"the contents differ: {_differences(found, +contents)}")
        for name in ("changes", "current"):
            self._no_orphans(out / name, _named(out / name))
        self._no_orphans(out / "files", set(files))
        bounds = [(each.lower, each.upper) for each in manifests if each.lower != each.upper]
        if any(low != high for (_, high), (low, _) in pairwise(bounds)):
            self.wrong.append(f"the manifests' intervals do not touch: {bounds}")

    def _compare(self, what: str, rows: list[dict[str, Any]], wanted: Counter[str]) -> None:
        keys = [repr(tuple(list(row.values())[:-1])) for row in rows]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        found = Counter({key: row["_diff"] for key, row in zip(keys, rows, strict=True)})
        if twice or found != wanted:
            told = f"twice: {twice[:5]}" if twice else _differences(found, wanted)
            self.wrong.append(f"{what} differ(s): {told}")

    def _no_orphans(self, folder: Path, named: set[str]) -> None:
        there = {path.name for path in folder.iterdir() if path.match("*penstock-*.parquet")}
        if there - named:
            self.wrong.append(f"no commit has named {sorted(there - named)[:5]} of {folder.name}")


def _named(folder: Path) -> set[str]:
    """All files that the log has ever added."""
    lines = (
        line
        for path in (folder / "_delta_log").glob("*.json")
        for line in path.read_text().splitlines()
    )
    actions = [json.loads(line) for line in lines if line]
    return {action["add"]["path"] for action in actions if "add" in action}


def _differences(found: Counter[str], wanted: Counter[str]) -> str:
    keys: Iterable[str] = sorted({*found, *wanted})
    shown = [f"{key}: {found[key]}, not {wanted[key]}" for key in keys if found[key] != wanted[key]]
    return "; ".join(shown[:5])


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "out").mkdir()
        campaign = Campaign(Path(place), chosen.seed)
        while campaign.kills < chosen.kills and not campaign.wrong:
            campaign.live()
        upper = campaign.drain()
        campaign.check(upper)
    for each in campaign.wrong:
        print(each)
    print(
        f"{campaign.kills} kills, {campaign.optimized} OPTIMIZEs, {upper} times; "
        f"{len(campaign.wrong)} differences"
    )
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
