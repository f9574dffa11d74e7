"""Moves money between accounts in concurrent transactions, while both doors read and follow it.

Run: ``python tests/proof/transfers.py [--seconds 120] [--writers 4]``.

A service process holds 200 accounts in 10 groups, and two views: the total, and the total of each
group. Writers move money by transactions of PostgreSQL's protocol, which are repeated where two
meet. Meanwhile one connection reads ``sum(balance)`` of the table and the total by the view, one
follows a SUBSCRIBE of the groups' totals, an unmodified PySpark reads the total, and another one
streams the changes of the groups' totals. Each of them must find one total at every time. At last
each balance must be what the acknowledged transfers make of it. Exit status 1 when anything
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import psycopg
import pyarrow.parquet as pq
from pyspark.logger import PySparkLogger
from pyspark.sql.connect.session import SparkSession

ACCOUNTS: Final = 200
GROUPS: Final = 10
EACH: Final = 1_000
TOTAL: Final = ACCOUNTS * EACH
JOIN_SECONDS: Final = 300.0


class TransferProof:
    """What all threads share: when to end, what was done, and what was wrong."""

    def __init__(self, pg: str, remote: str) -> None:
        self.pg = pg
        self.remote = remote
        self.over = threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.moved: Counter[int] = Counter()
        """Sums of the acknowledged transfers, by account."""
        self._lock = threading.Lock()

    def note(self, what: str, count: int = 1) -> None:
        """Count what was seen."""
        with self._lock:
            self.counts[what] += count

    def check(self, where: str, found: Any, right: Any) -> None:
        """Note what was found where, and that it is wrong if it is."""
        self.note(where)
        if found != right:
            with self._lock:
                self.wrong.append(f"{where}: {found!r} in place of {right!r}")
            self.over.set()

    def transferred(self, giver: int, taker: int, amount: int) -> None:
        """Note an acknowledged transfer."""
        with self._lock:
            self.moved[giver] -= amount
            self.moved[taker] += amount

    def guarded(self, run: Callable[[], None]) -> None:
        """Run what a thread does; an error ends all."""
        try:
            run()
        except Exception as error:  # noqa: BLE001 - told below
            with self._lock:
                self.wrong.append(f"{run}: {type(error).__name__}: {error}")
            self.over.set()

    # -- threads -------------------------------------------------------------------------------

    def write(self, seed: int) -> None:
        """Transfer until it is over."""
        random = Random(seed)
        with psycopg.connect(self.pg) as db:
            while not self.over.is_set():
                giver, taker = random.sample(range(ACCOUNTS), 2)
                amount = random.randint(1, 50)
                try:
                    with db.transaction():
                        for account, change in ((giver, -amount), (taker, amount)):
                            db.execute(
                                "UPDATE accounts SET balance = balance + %s WHERE id = %s",
                                (change, account),
                            )
                except psycopg.errors.SerializationFailure:
                    self.note("transfers that met another one")
                    continue
                self.transferred(giver, taker, amount)
                self.note("transfers")

    def read(self) -> None:
        """Read the total by the table and by the view, by PostgreSQL's door."""
        with psycopg.connect(self.pg, autocommit=True) as db:
            while not self.over.is_set():
                for text in ("SELECT s FROM total", "SELECT sum(balance) AS s FROM accounts"):
                    found = db.execute(text).fetchone()
                    self.check(f"pg: {text}", found and int(found[0]), TOTAL)

    def follow(self) -> None:
        """Follow the groups' totals by SUBSCRIBE, and look at their sum at each time."""
        sums: Counter[int] = Counter()
        with psycopg.connect(self.pg, autocommit=True) as db:
            # The end of the proof cancels it.
            stopper = threading.Thread(target=self._cancel_at_end, args=(db,))
            stopper.start()
            at = -1
            try:
                with (
                    db.cursor() as cursor,
                    cursor.copy("COPY (SUBSCRIBE groups WITH (PROGRESS)) TO STDOUT") as rows,
                ):
                    for row in rows:
                        fields = bytes(row).decode().rstrip("\n").split("\t")
                        # A line of progress: all changes before its time have come.
                        if fields[1] == "t":
                            if sums:
                                self.check("pg: times of a subscribe", sum(sums.values()), TOTAL)
                            at = int(fields[0])
                            continue
                        assert int(fields[0]) >= at, (fields, at)
                        sums[int(fields[3])] += int(fields[2]) * int(fields[4])
            except psycopg.errors.QueryCanceled:
                pass
            finally:
                self.over.set()
                stopper.join()

    def _cancel_at_end(self, db: psycopg.Connection[Any]) -> None:
        self.over.wait()
        db.cancel_safe()

    def read_spark(self) -> None:
        """Read the total by an unmodified PySpark."""
        spark = SparkSession(self.remote)
        try:
            while not self.over.is_set():
                self.check("spark: total", spark.table("total").collect()[0][0], TOTAL)
                summed = spark.sql("SELECT sum(s) FROM groups").collect()
                self.check("spark: sum of groups", summed[0][0], TOTAL)
        finally:
            spark.stop()

    def stream(self, folder: Path) -> None:
        """Stream the changes of the groups' totals, and look at their sum at each time."""
        spark = SparkSession(self.remote)
        try:
            frame = spark.readStream.table("groups").select("_time", "_diff", "g", "s")
            query = (
                frame.writeStream.format("parquet")
                .option("path", str(folder / "out"))
                .option("checkpointLocation", str(folder / "checkpoint"))
                .trigger(processingTime="1 second")
                .start()
            )
            while not self.over.wait(1.0):
                if not query.isActive:
                    raise RuntimeError(f"the stream has ended: {query.exception()}")
            query.processAllAvailable()
            query.stop()
        finally:
            spark.stop()
        rows = pq.read_table(folder / "out").to_pylist()
        rows.sort(key=lambda row: row["_time"])
        total = 0
        for number, row in enumerate(rows):
            total += row["_diff"] * int(row["s"])
            if number + 1 == len(rows) or rows[number + 1]["_time"] != row["_time"]:
                self.check("spark: times of a stream", total, TOTAL)


@contextmanager
def serving(folder: Path) -> Iterator[TransferProof]:
    """A service process with both doors."""
    command = [sys.executable, "-m", "actors.doors.commands.cli", "serve", "--log-level", "error"]
    command += ["--state-dir", str(folder / "state"), "--listen", "127.0.0.1:0"]
    command += ["--set", "pg_listen=127.0.0.1:0", "--set", "connect_listen=127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pg = remote = ""
            for line in process.stdout:
                pg = line.split()[-1] if "PostgreSQL" in line else pg
                remote = line.split()[-1] if "Spark Connect" in line else remote
                if line.startswith("ready"):
                    break
            yield TransferProof(f"postgresql://u@{pg}/penstock", f"sc://{remote}")
        finally:
            process.terminate()


def prepare(pg: str) -> None:
    """Make the accounts and the views, and wait for their contents."""
    with psycopg.connect(pg, autocommit=True) as db:
        db.execute("CREATE TABLE accounts (id INT PRIMARY KEY, g INT, balance BIGINT)")
        db.execute(
            f"INSERT INTO accounts SELECT CAST(id AS INT), CAST(id % {GROUPS} AS INT), {EACH} "
            f"FROM range({ACCOUNTS}) AS r (id)"
        )
        db.execute("CREATE MATERIALIZED VIEW total AS SELECT sum(balance) AS s FROM accounts")
        db.execute(
            "CREATE MATERIALIZED VIEW groups AS "
            "SELECT g, sum(balance) AS s FROM accounts GROUP BY g"
        )
        assert db.execute("SELECT count(*) FROM groups").fetchone() == (GROUPS,)


def main() -> int:
    """Run the proof; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--writers", type=int, default=4)
    given = parser.parse_args()
    # Two sessions of this process end their queries in turn.
    PySparkLogger.getLogger("pyspark").setLevel("ERROR")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as proof:
        prepare(proof.pg)
        runs: list[Callable[[], None]] = [proof.read, proof.follow, proof.read_spark]
        runs.append(lambda: proof.stream(Path(folder)))
        runs += [partial(proof.write, seed) for seed in range(given.writers)]
        threads = [threading.Thread(target=proof.guarded, args=(run,)) for run in runs]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        proof.over.wait(given.seconds)
        proof.over.set()
        for thread in threads:
            thread.join(JOIN_SECONDS)
        with psycopg.connect(proof.pg, autocommit=True) as db:
            for account, balance in db.execute("SELECT id, balance FROM accounts").fetchall():
                proof.check("balances", balance, EACH + proof.moved[account])
    print(f"{time.monotonic() - began:.0f} s")
    for what, count in sorted(proof.counts.items()):
        print(f"{count:8} {what}")
    needed = ("transfers", "pg: times of a subscribe", "spark: times of a stream")
    missing = [what for what in needed if not proof.counts[what]]
    for text in [*proof.wrong[:10], *(f"none of: {what}" for what in missing)]:
        print(f"WRONG {text}")
    return 1 if proof.wrong or missing else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
