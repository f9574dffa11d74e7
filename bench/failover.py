"""The time from the SIGKILL of the service that owns its stores to a write acknowledged by another.

Two services with `--standby`, with the default `heartbeat_ms` and `takeover_ms`, share documents in
an SQLite file and blobs in a folder. A client writes to the owner; the owner is killed; the client
writes to the other service as soon as it accepts connections. Then the killed service restarts as
the standby, and so on. ``failover``: the median. There is no peer: the target limits ours.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from measure import Measure, Report, median

WAIT_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class StandbyService:
    """One of the two services, at the same address after each restart."""

    def __init__(self, folder: Path, name: str) -> None:
        self.port = free_port()
        self._log = folder / f"{name}.log"
        self._command = [
            *(sys.executable, "-m", "actors.doors.commands.cli", "serve", "--standby"),
            *("--state-dir", str(folder / name), "--listen", "127.0.0.1:0"),
            *("--set", f"pg_listen=127.0.0.1:{self.port}"),
            *("--set", f"blob_url=file:{folder}/blobs"),
            *("--set", f"consensus_url=sqlite:{folder}/documents.db"),
        ]

    def start(self) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stood_by(self) -> None:
        """Wait until the service says that it stands by."""
        deadline = time.monotonic() + WAIT_SECONDS
        while "standing by" not in self._log.read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(self._log.read_text())
            time.sleep(0.05)

    def written(self, number: int) -> None:
        """Wait until a write of row `number` is acknowledged."""
        deadline = time.monotonic() + WAIT_SECONDS
        dsn = f"postgresql://bench@127.0.0.1:{self.port}/penstock"
        while True:
            try:
                with psycopg.connect(dsn, autocommit=True) as db:
                    db.execute("CREATE TABLE IF NOT EXISTS beats (id bigint PRIMARY KEY)")
                    db.execute("INSERT INTO beats VALUES (%s)", (number,))
                    return
            except psycopg.OperationalError:
                # It does not accept connections yet.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def failovers(folder: Path, count: int) -> list[float]:
    """Return the duration of each takeover in ms."""
    owner, waiting = (StandbyService(folder, name) for name in ("one", "two"))
    found = []
    try:
        owner.start()
        owner.written(-1)
        waiting.start()
        for number in range(count):
            waiting.stood_by()
            owner.written(1_000 + number)
            began = time.perf_counter()
            owner.kill()
            waiting.written(number)
            found.append((time.perf_counter() - began) * 1000)
            owner, waiting = waiting, owner
            waiting.start()
    finally:
        for each in (owner, waiting):
            each.kill()
    return found


def main() -> None:
    report = Report(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        took = failovers(Path(folder), 3 if report.quick else 10)
    report.add(Measure("failover", median(took), 0.0, most=5_000.0))
    report.close()


if __name__ == "__main__":
    main()
