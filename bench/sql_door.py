"""The PostgreSQL listener against PostgreSQL itself, with the same client (psycopg).

A service with its own Spark and a PostgreSQL server (with its defaults: commits are durable) hold
the same table of a million rows. ``sql_point_select_N``: a prepared SELECT by an indexed column, by
N clients at once. ``sql_insert_N``: a durable INSERT of one row. Both are the p50 of one statement,
and for 16 clients the total time per statement (the inverse of the throughput).
``sql_rows_binary``: a million rows to psycopg in binary. ``sql_copy_out``: the same by COPY in
binary. ``sql_copy_in``: COPY of as many rows in text into a table.

The environment variable ROWS sets another number of rows than a million.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from actors.testing.postgres_server import NoPostgres, postgres_server
from measure import Measure, Report, median

ROWS = int(os.environ.get("ROWS", "1000000"))
CLIENTS = 16
SELECTS = 2_000
INSERTS = 1_000
TABLE = "CREATE TABLE points (id bigint PRIMARY KEY, name text, value float8, at timestamptz)"
READ_BYTES = 1 << 16


def lines(first: int, count: int) -> Iterator[bytes]:
    """Yield rows in COPY's text format, in chunks."""
    for start in range(first, first + count, 1_000):
        last = min(start + 1_000, first + count)
        yield "".join(
            f"{n}\tname {n}\t{n / 8}\t2026-01-01 00:00:00.{n % 1000:03}+00\n"
            for n in range(start, last)
        ).encode()


@contextmanager
def connected(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as db:
        yield db


def copied_in(dsn: str, first: int, count: int) -> float:
    pieces = list(lines(first, count))  # generated before the clock starts
    with connected(dsn) as db, db.cursor() as cursor:
        began = time.perf_counter()
        with cursor.copy("COPY points FROM STDIN") as copy:
            for piece in pieces:
                copy.write(piece)
        return (time.perf_counter() - began) * 1000


def copied_out(dsn: str) -> float:
    with connected(dsn) as db, db.cursor() as cursor:
        began = time.perf_counter()
        size = 0
        with cursor.copy("COPY points TO STDOUT (FORMAT binary)") as copy:
            for piece in copy:
                size += len(piece)
        assert size > 0
        return (time.perf_counter() - began) * 1000


def read_all(dsn: str) -> float:
    with connected(dsn) as db, db.cursor(binary=True) as cursor:
        began = time.perf_counter()
        found = cursor.execute("SELECT id, name, value, at FROM points").fetchall()
        assert found
        return (time.perf_counter() - began) * 1000


def timed(dsn: str, count: int, run: Callable[[psycopg.Cursor, int], object]) -> list[float]:
    """Return the ms of each of `count` statements on one connection."""
    found = []
    with connected(dsn) as db, db.cursor() as cursor:
        for number in range(count // 10):
            run(cursor, number)
        for number in range(count):
            began = time.perf_counter()
            run(cursor, number)
            found.append((time.perf_counter() - began) * 1000)
    return found


def together(dsn: str, count: int, run: Callable[[psycopg.Cursor, int], object]) -> float:
    """Return the ms per statement of `CLIENTS` connections running at once."""
    each = count // CLIENTS
    ready = threading.Barrier(CLIENTS + 1)

    def client(place: int) -> None:
        with connected(dsn) as db, db.cursor() as cursor:
            run(cursor, place)
            ready.wait()
            for number in range(each):
                run(cursor, place * each + number)

    threads = [threading.Thread(target=client, args=(place,)) for place in range(CLIENTS)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) * 1000 / (each * CLIENTS)


def select(cursor: psycopg.Cursor, number: int) -> object:
    text = "SELECT name, value FROM points WHERE id = %s"
    return cursor.execute(text, (number * 37 % 50_000,), prepare=True).fetchone()


class Inserts:
    """INSERTs of rows that are new to both sides."""

    def __init__(self) -> None:
        self._next = 10 * ROWS
        self._lock = threading.Lock()

    def __call__(self, cursor: psycopg.Cursor, _: int) -> object:
        with self._lock:
            self._next += 1
            number = self._next
        text = "INSERT INTO points VALUES (%s, %s, %s, '2026-01-01 00:00:00+00')"
        return cursor.execute(text, (number, "new", 1.5), prepare=True)


def measure(report: Report, ours: str, peer: str) -> None:
    count = 50_000 if report.quick else ROWS
    copies = copied_in(ours, 0, count), copied_in(peer, 0, count)
    report.add(Measure("sql_copy_in", *copies, target=1 / 0.3))
    with connected(peer) as db:
        db.execute("ANALYZE points")
    rounds = 1 if report.quick else 3
    for name, run in (("sql_rows_binary", read_all), ("sql_copy_out", copied_out)):
        times = [(run(ours), run(peer)) for _ in range(rounds)]
        mine, theirs = zip(*times, strict=True)
        report.add(Measure(name, median(mine), median(theirs), target=1.0))
    insert = Inserts()
    selects, inserts = (200, 100) if report.quick else (SELECTS, INSERTS)
    report.add(
        Measure(
            "sql_point_select_1",
            median(timed(ours, selects, select)),
            median(timed(peer, selects, select)),
            target=3.0,
        )
    )
    report.add(
        Measure(
            f"sql_point_select_{CLIENTS}",
            together(ours, selects, select),
            together(peer, selects, select),
            target=1 / 0.3,
        )
    )
    report.add(
        Measure(
            "sql_insert_1",
            median(timed(ours, inserts, insert)),
            median(timed(peer, inserts, insert)),
            target=2.0,
        )
    )
    report.add(
        Measure(
            f"sql_insert_{CLIENTS}",
            together(ours, inserts, insert),
            together(peer, inserts, insert),
            target=2.0,
        )
    )


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run a service in a separate process, as PostgreSQL is, and yield its PostgreSQL address."""
    command = [sys.executable, "-m", "actors.doors.commands.cli", "serve"]
    command += ["--state-dir", str(folder), "--listen", "127.0.0.1:0"]
    command += ["--set", "pg_listen=127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = ""
            for line in process.stdout:
                if "PostgreSQL" in line:
                    address = line.split()[-1]
                if line.startswith("ready"):
                    break
            yield f"postgresql://bench@{address}/penstock"
        finally:
            process.terminate()


def main() -> None:
    report = Report(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder, postgres_server() as server:
        peer = server.conninfo()
        with service(Path(folder) / "state") as ours:
            for dsn in (ours, peer):
                with connected(dsn) as db:
                    db.execute(TABLE)
            with connected(ours) as db:
                db.execute("CREATE INDEX ON points (id)")
            measure(report, ours, peer)
    report.close()


if __name__ == "__main__":
    try:
        main()
    except NoPostgres as error:
        raise SystemExit(str(error)) from None
