"""Spends a new user's first hour: PostgreSQL under pgbench, five views, and every command on them.

Run: ``python tests/proof/user_hour.py [--scale 10] [--seconds 60] [--rate 50] [--kills 3]``.

Everything is done by the command line, as the documentation shows it, over tables of a million
rows (scale 10) with names of the user's own:

1. a source with renamed tables, and at once, before it is filled, five views on it: a join and
   grouping, a filter whose result is empty, the top customers, distinct counts, an outer join;
2. pgbench writes; the views are read, queried and subscribed to meanwhile;
3. pgbench writes, and the service is killed with ``kill -9`` at random moments and started again;
4. a copy of each view into files; what the subscriber printed, summed up;
5. all is dropped and made again under the same names.

After each of these every view equals the same query in PostgreSQL, nothing is stalled, and no
error is told. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow.parquet as pq
from crash_campaign import free_port

from actors.testing.postgres_server import PostgresServer, binary, postgres_server

TABLES: Final = {
    "pgbench_accounts": "accounts",
    "public.pgbench_branches": "Branch Offices",
    "pgbench_tellers": "tellers",
    "pgbench_history": "order",
}
"""As the user names them: qualified and bare; with a space, capitals and a keyword."""
VIEWS: Final = {
    "by_branch": "SELECT b.bid, count(*) AS n, sum(a.abalance) AS total FROM accounts a"
    " JOIN `Branch Offices` b ON a.bid = b.bid GROUP BY b.bid",
    "ruined": "SELECT aid, abalance FROM accounts WHERE abalance < -400000000",
    "Top Customers": "SELECT aid, bid, abalance FROM accounts ORDER BY abalance DESC, aid LIMIT 10",
    "distincts": "SELECT bid, count(DISTINCT abalance) AS balances,"
    " count(DISTINCT CASE WHEN abalance > 0 THEN aid % 100 END) AS rich,"
    " count(DISTINCT aid % 7) AS week FROM accounts GROUP BY bid",
    "outer": "SELECT t.tid, t.bid, h.aid, h.delta FROM tellers t"
    " LEFT JOIN `order` h ON t.tid = h.tid",
}
QUERY: Final = (
    "SELECT o.bid, count(*) AS n, max(h.delta) AS most FROM `order` h"
    " JOIN `Branch Offices` o ON h.bid = o.bid GROUP BY o.bid"
)
STUCK_S: Final = 1_200
"""A wait without an end in sight is a fault; a slow machine is none."""

Rows = Counter[tuple[Any, ...]]


class Different(Exception):
    """Something is not as PostgreSQL has it; says what."""


class Terminal:
    """The command line of one user, and the service that the user runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listen = f"127.0.0.1:{free_port()}"
        self._environment = os.environ | {"PENSTOCK_LISTEN": self._listen}
        self._service: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the service, and wait until it says that it is ready."""
        log = self._folder / "service.log"
        start = log.stat().st_size if log.exists() else 0
        command = ["serve", "--state-dir", str(self._folder / "state"), "--listen", self._listen]
        with log.open("ab") as out:
            self._service = subprocess.Popen(
                self._command(command), env=self._environment, stdout=out, stderr=out
            )
        self.wait("ready", lambda: "\nready\n" in log.read_text()[start:])

    def kill(self) -> None:
        """Kill the service with ``kill -9``."""
        assert self._service is not None
        self._service.kill()
        self._service.wait()

    def stop(self) -> None:
        """End the service as a user does."""
        if self._service is not None and self._service.poll() is None:
            self._service.terminate()
            self._service.wait()

    def run(self, *arguments: str) -> str:
        """Return what a command prints. Raises `Different` when it fails."""
        done = subprocess.run(
            self._command(arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Different(f"penstock {' '.join(arguments)}: {done.stderr.strip()[-400:]}")
        return done.stdout

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the rows that a command prints as JSON."""
        return [json.loads(line) for line in self.run(*arguments, "--json").splitlines()]

    def follow(self, name: str, out: Path) -> subprocess.Popen[bytes]:
        """Start printing an object's changes into a file."""
        with out.open("wb") as lines:
            return subprocess.Popen(
                self._command(["subscribe", name, "--json", "--progress"]),
                env=self._environment,
                stdout=lines,
                stderr=subprocess.DEVNULL,
            )

    def wait(self, what: str, holds: Any) -> Any:
        """Wait until `holds()` is true and return it. Raises `Different` when it never is."""
        end = time.monotonic() + STUCK_S
        while time.monotonic() < end:
            found = holds()
            if found:
                return found
            assert self._service is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = self._service.wait(0.2)
                raise Different(f"{what}: the service ended with {ended}")
        raise Different(f"{what}: not so after {STUCK_S} s\n{self.run('status')}")

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "actors.doors.commands.cli", *arguments]


class Bank:
    """The database: pgbench's tables, and the queries of the views in its own words."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server

    def fill(self, scale: int) -> None:
        """Make pgbench's tables."""
        self.server.run("pgbench", ["-i", "-q", "-s", str(scale), "postgres"], timeout_s=STUCK_S)
        self.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
        self.execute("CREATE SCHEMA named")
        for outside, name in TABLES.items():
            self.execute(f'CREATE VIEW named."{name}" AS SELECT * FROM {outside}')

    def write(self, rate: int, seconds: int) -> subprocess.Popen[bytes]:
        """Start pgbench's transactions."""
        command = [binary("pgbench"), "-h", str(self.server.folder), "-p", str(self.server.port)]
        command += ["-U", "bench", "-n", "-c", "2", "-R", str(rate), "-T", str(seconds), "postgres"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def execute(self, text: str) -> None:
        """Run a statement."""
        with psycopg.connect(self.server.conninfo(), autocommit=True) as wire:
            wire.execute(text.encode())

    def rows(self, query: str) -> Rows:
        """Return the rows of a view's query, as PostgreSQL answers it."""
        # The user's names are views there, in a schema of their own.
        with psycopg.connect(self.server.conninfo(options="'-c search_path=named'")) as wire:
            text = query.replace("`", '"')
            return Counter(wire.execute(text.encode()).fetchall())


def counted(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Return rows as a bag."""
    return Counter(tuple(row.values()) for row in rows)


def compare(terminal: Terminal, bank: Bank, when: str) -> None:
    """Wait until every view equals PostgreSQL, which nobody writes to.

    Raises `Different` when one never does, or when anything is told to be wrong.
    """
    started = time.monotonic()
    for name, query in VIEWS.items():
        wanted = bank.rows(query)

        def equal(name: str = name, wanted: Rows = wanted) -> bool:
            check_state(terminal, name)
            return counted(terminal.rows("peek", name, "--limit", "10000000")) == wanted

        terminal.wait(f"{name} equals PostgreSQL {when}", equal)
    errors = terminal.rows("peek", "penstock.errors")
    if errors:
        raise Different(f"errors {when}: {errors}")
    wanted, found = bank.rows(QUERY), counted(terminal.rows("query", QUERY))
    if found != wanted:
        raise Different(f"the query {when}: {found - wanted} too many, {wanted - found} missing")
    print(f"{when}: all equal, {time.monotonic() - started:.0f} s after the load", flush=True)


def check_state(terminal: Terminal, name: str) -> None:
    """Raise `Different` for an object that is stalled."""
    (found,) = [row for row in terminal.rows("peek", "penstock.objects") if row["name"] == name]
    if found["state"] in ("stalled", "failed"):
        raise Different(f"{name} is {found['state']}: {found}")


def make(terminal: Terminal, bank: Bank, again: str = "") -> None:
    """Make the source and, before it is filled, the views."""
    server = bank.server
    options = [f"host '{server.folder}'", f"port {server.port}", "user bench", "poll_ms 500"]
    tables = ", ".join(f"{outside} AS `{name}`" for outside, name in TABLES.items())
    source = f"CREATE SOURCE `Bank & Co` USING postgres OPTIONS ({', '.join(options)})"
    terminal.run("sql", "-c", f"{source} FOR TABLES ({tables})")
    for name, query in VIEWS.items():
        terminal.run("sql", "-c", f"CREATE MATERIALIZED VIEW `{name}` AS {query}")
    print(f"the source and {len(VIEWS)} views are made{again}", flush=True)


def load(terminal: Terminal, bank: Bank, rate: int, seconds: int, kills: int, seed: int) -> None:
    """Write for so long, and kill the service so often meanwhile."""
    dice = random.Random(seed)
    writing = bank.write(rate, seconds)
    for _ in range(kills):
        with contextlib.suppress(subprocess.TimeoutExpired):
            writing.wait(dice.uniform(0.2, 1.0) * seconds / (kills + 1))
        terminal.kill()
        terminal.serve()
    if writing.wait():
        raise Different(f"pgbench ended with {writing.returncode}")


def summed(lines: Path) -> tuple[Rows, int]:
    """Return what the printed changes add up to, up to the last time that is told whole."""
    total, later, upper = Rows(), list[tuple[int, tuple[Any, ...], int]](), 0
    for line in lines.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break  # the last line was cut off by the end of the command
        if "__upper" in row:
            upper = row["__upper"]
            continue
        at, diff = row.pop("__time"), row.pop("__diff")
        later.append((at, tuple(row.values()), diff))
    for at, values, diff in later:
        if at < upper:
            total[values] += diff
    return Rows({values: n for values, n in total.items() if n}), upper


def followed(terminal: Terminal, bank: Bank, lines: Path) -> None:
    """Wait until what was printed adds up to what PostgreSQL has."""
    wanted = bank.rows(VIEWS["outer"])
    terminal.wait("what the subscriber printed", lambda: summed(lines)[0] == wanted)
    print(f"the subscriber's changes add up to {wanted.total()} rows", flush=True)


def copied(terminal: Terminal, bank: Bank, folder: Path) -> None:
    """Copy every view into files, and compare these."""
    for number, (name, query) in enumerate(VIEWS.items()):
        place = folder / f"copy {number}"
        told = terminal.run("copy-to", name, str(place)).strip()
        manifest = told.partition(" files: ")[2]
        files = json.loads(Path(manifest).read_text())["files"]
        found = Rows()
        for file in files:
            found += counted(pq.read_table(Path(manifest).parent / file["path"]).to_pylist())
        if found != bank.rows(query):
            raise Different(f"the copy of {name} has {found.total()} rows, which differ")
    print("copies of all views are equal", flush=True)


def hour(scale: int, seconds: int, rate: int, kills: int, seed: int) -> None:
    """Do all of it. Raises `Different`."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-hour-") as name,
        postgres_server(wal_level="logical", wal_sender_timeout="30s") as server,
    ):
        folder = Path(name)
        bank = Bank(server)
        bank.fill(scale)
        os.environ["PENSTOCK_COPY_DIR"] = str(folder)
        terminal = Terminal(folder)
        following: subprocess.Popen[bytes] | None = None
        try:
            terminal.serve()
            make(terminal, bank)
            load(terminal, bank, rate, seconds, 0, seed)
            compare(terminal, bank, "after the first load")
            lines = folder / "changes"
            following = terminal.follow("outer", lines)
            load(terminal, bank, rate, seconds, 0, seed)
            compare(terminal, bank, "with a subscriber")
            followed(terminal, bank, lines)
            following.kill()
            following.wait()
            following = None
            load(terminal, bank, rate, seconds, kills, seed)
            compare(terminal, bank, f"after {kills} kills")
            copied(terminal, bank, folder)
            for each in VIEWS:
                terminal.run("sql", "-c", f"DROP MATERIALIZED VIEW `{each}`")
            terminal.run("sql", "-c", "DROP SOURCE `Bank & Co`")
            make(terminal, bank, " again")
            load(terminal, bank, rate, seconds, 0, seed)
            compare(terminal, bank, "made again")
        except Different:
            print((folder / "service.log").read_text()[-4000:], flush=True)
            raise
        finally:
            if following is not None:
                following.kill()
                following.wait()
            terminal.stop()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--scale", type=int, default=10, help="of pgbench: 100,000 accounts each")
    parser.add_argument("--seconds", type=int, default=60, help="of each of four loads")
    parser.add_argument("--rate", type=int, default=50, help="transactions a second")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.monotonic()
    try:
        hour(given.scale, given.seconds, given.rate, given.kills, given.seed)
    except Different as different:
        print(f"DIFFERENT: {different}", flush=True)
        return 1
    print(f"the user's hour took {time.monotonic() - started:.0f} s: nothing differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
