"""A real PostgreSQL's log through `penstock wal relay` to three acceptors, under pgbench and kills.

Run: ``python tests/proof/wal_relay.py [--kills 20] [--seed 1] [--transactions 2000]``.

The server counts the relay as its synchronous standby: no commit is acknowledged before a majority
of the acceptors has it on disk. pgbench (TPC-B) runs; at random moments an acceptor, the relay or
the whole server is killed with ``kill -9`` and started again, or another relay takes over; now and
then a segment is switched just before. After each strike a mark is committed: so the stream has
come to life again. In the end, up to the LSN that an acceptor calls committed:

1. its segments equal the server's, byte for byte;
2. ``pg_waldump`` reads them without an error, to that very LSN;
3. (not in the ``--short`` form) a base backup of the beginning, recovered with the acceptor's
   segments alone, has every mark and every transaction that pgbench counted, and the sums of TPC-B
   are equal.

Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from wal_bank import Wrong
from wal_crash_processes import TENANT, TIMELINE, AcceptorProcess, Lines, Stuck

from actors.testing.postgres_server import NoPostgres, PostgresServer, binary, postgres_server
from actors.wal.lsn import SEGMENT_BYTES, lsn_text, parse_lsn

RELAY = (sys.executable, "-c", "from actors.doors.commands.cli import main; main()", "wal", "relay")
ENDED_BY_ANOTHER = 2
STUCK_S = 600
PAUSE_S = 1.0
VICTIMS = {"acceptor": 4, "relay": 3, "server": 2, "acceptor and relay": 2, "replaced": 1}
"""The last: another relay takes over, and the first one must end."""
CLIENTS = 4
SWITCH_EVERY = 3
"""Strikes. A segment is switched just before."""
SUMS = (
    "SELECT sum(abalance) FROM pgbench_accounts",
    "SELECT sum(bbalance) FROM pgbench_branches",
    "SELECT sum(tbalance) FROM pgbench_tellers",
    "SELECT coalesce(sum(delta), 0) FROM pgbench_history",
)


class Relay:
    """The relay's process."""

    def __init__(self, addresses: str, server: PostgresServer) -> None:
        self._command = [*RELAY, addresses, server.conninfo(), "--slot", "relay", "--create-slot"]
        self._command += ["--tenant", TENANT, "--timeline", TIMELINE, "--quiet"]
        self._process: Process | None = None
        self._lines: Lines | None = None

    async def start(self) -> int:
        """Where it begins. Raises `ViewStuck`."""
        self._process = await anyio.open_process(self._command, stderr=None)
        self._lines = Lines(self._process)
        with anyio.move_on_after(STUCK_S):
            line = await self._lines.next()
            if line is not None and line.startswith("relaying from "):
                return parse_lsn(line.split()[2])
        raise Stuck("the relay does not start")

    async def kill(self) -> None:
        """With SIGKILL."""
        if self._process is not None:
            if self._process.returncode is not None:
                raise Stuck(f"the relay ended by itself: {self._process.returncode}")
            self._process.kill()
            await self._process.aclose()
        self._process = None

    async def replace(self) -> None:
        """By another one. Raises `Wrong` when the first one does not end by itself."""
        old = self._process
        assert old is not None
        await self.start()
        with anyio.fail_after(STUCK_S):
            status = await old.wait()
        await old.aclose()
        if status != ENDED_BY_ANOTHER:
            raise Wrong(f"a relay that was replaced ended with {status}")

    async def end(self) -> int:
        """With SIGINT; what it calls committed."""
        assert self._process is not None
        assert self._lines is not None
        self._process.send_signal(signal.SIGINT)
        last = ""
        with anyio.fail_after(STUCK_S):
            while (line := await self._lines.next()) is not None:
                last = line
            status = await self._process.wait()
        self._process = None
        if status or not last.startswith("ended: "):
            raise Wrong(f"the relay ended with {status}: {last!r}")
        return parse_lsn(last.split()[1])


class Stage:
    """The server, its log's way, and who disturbs it."""

    def __init__(self, folder: Path, server: PostgresServer, transactions: int) -> None:
        self.server = server
        self.acceptors = [AcceptorProcess(folder, number, "") for number in (1, 2, 3)]
        self.relay = Relay(",".join(each.address for each in self.acceptors), server)
        self.begin_lsn = 0
        self.processed = 0
        """Transactions that pgbench counted."""
        self._transactions = transactions
        self._marks = 0
        self._bench: subprocess.Popen[str] | None = None

    async def start(self, *, loads: bool) -> None:
        """All, and the tables. `loads`: what fills them goes through the relay, too."""
        for each in self.acceptors:
            await each.start()
        fill = ["-i", "-q", "dbname=postgres"]
        if not loads:
            fill[-1] += " options='-c synchronous_commit=local'"
            await anyio.to_thread.run_sync(self.server.run, "pgbench", fill)
            await self.switch()
            await self._psql("CHECKPOINT")  # the slot will keep the log from here on
        self.begin_lsn = await self.relay.start()
        await self._psql("CREATE TABLE marks (n int)")
        if loads:
            await anyio.to_thread.run_sync(self.server.run, "pgbench", fill)

    def bench(self) -> None:
        """pgbench goes on, if it has ended."""
        if self._bench is None or self._bench.poll() is not None:
            self._count()
            command = [binary("pgbench"), "-h", str(self.server.folder), "-U", "bench", "-n"]
            command += ["-p", str(self.server.port), "-c", str(CLIENTS)]
            command += ["-t", str(self._transactions // CLIENTS), "postgres"]
            self._bench = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )

    def _count(self) -> None:
        if self._bench is not None:
            said = self._bench.communicate()[0]
            found = re.search(r"transactions actually processed: (\d+)", said)
            self.processed += int(found.group(1)) if found else 0

    async def benched(self) -> None:
        """Until pgbench has ended."""
        await anyio.to_thread.run_sync(self._count, abandon_on_cancel=True)
        self._bench = None

    async def mark(self) -> None:
        """A commit that is acknowledged."""
        with anyio.move_on_after(STUCK_S):
            await self._psql(f"INSERT INTO marks VALUES ({self._marks})")
            self._marks += 1
            return
        raise Stuck(f"no commit is acknowledged in {STUCK_S} s")

    async def _psql(self, text: str) -> str:
        def run() -> str:
            return self.server.run("psql", ["-XAtc", text, "postgres"], timeout_s=STUCK_S)

        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)

    async def switch(self) -> None:
        """The server begins a new segment: the rest of the last one is zeros."""
        await self._psql("SELECT pg_switch_wal()")

    async def strike(self, kind: str, victim: AcceptorProcess) -> None:
        """Kills, and starts again."""
        if "acceptor" in kind:
            await victim.kill()
        if "relay" in kind:
            await self.relay.kill()
        if kind == "acceptor":
            await self.mark()  # two are enough
        if "acceptor" in kind:
            await victim.start()
        if "relay" in kind:
            await self.relay.start()
        if kind == "replaced":
            await self.relay.replace()
        if kind == "server":
            self.server.kill()
            await anyio.to_thread.run_sync(self.server.start)
        await self.mark()

    async def stop(self) -> None:
        """Whatever still runs."""
        if self._bench is not None:
            self._bench.kill()
            self._bench.communicate()
        with contextlib.suppress(Stuck):
            await self.relay.kill()
        for each in self.acceptors:
            with contextlib.suppress(Stuck):
                await each.kill()

    # -- checks -----------------------------------------------------------------------------------

    @property
    def marks(self) -> int:
        """Acknowledged."""
        return self._marks

    def compare(self, acceptor: AcceptorProcess, end_lsn: int) -> None:
        """Its segments and the server's. Raises `Wrong`."""
        ours, theirs = acceptor.segments(), self.server.folder / "data" / "pg_wal"
        for number in range(self.begin_lsn // SEGMENT_BYTES, -(-end_lsn // SEGMENT_BYTES)):
            name = f"{1:08X}{number >> 8:08X}{number & 0xFF:08X}"
            begin = max(self.begin_lsn - number * SEGMENT_BYTES, 0)
            end = min(end_lsn - number * SEGMENT_BYTES, SEGMENT_BYTES)
            if ours[name].read_bytes()[begin:end] != (theirs / name).read_bytes()[begin:end]:
                raise Wrong(f"segment {name} of acceptor {acceptor.node_id} is not the server's")

    def dump(self, acceptor: AcceptorProcess, end_lsn: int, place: Path) -> int:
        """pg_waldump reads it; how many records. Raises `Wrong`."""
        copied(acceptor, place)
        command = [binary("pg_waldump"), "-p", str(place)]
        command += ["-s", lsn_text(self.begin_lsn), "-e", lsn_text(end_lsn)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:
            raise Wrong(f"pg_waldump of acceptor {acceptor.node_id}: {done.stderr.strip()[-500:]}")
        return done.stdout.count("\n")


def copied(acceptor: AcceptorProcess, place: Path) -> None:
    """Its segments, under the names that they have when they are whole."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, path in acceptor.segments().items():
        shutil.copyfile(path, place / name)


def recover(stage: Stage, acceptor: AcceptorProcess, backup: Path) -> None:
    """A server made of the backup and the acceptor's segments. Raises `Wrong`."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        server = PostgresServer(Path(folder), {})
        data = Path(folder) / "data"
        shutil.rmtree(data)
        shutil.copytree(backup, data)
        copied(acceptor, data / "pg_wal")
        subprocess.run(["chown", "-R", f"--reference={folder}", str(data)], check=True)
        data.chmod(0o700)
        server.start()
        try:
            marks, history = (
                int(server.run("psql", ["-XAtc", f"SELECT count(*) FROM {table}", "postgres"]))
                for table in ("marks", "pgbench_history")
            )
            sums = {server.run("psql", ["-XAtc", query, "postgres"]) for query in SUMS}
        finally:
            server.stop("immediate")
        if marks < stage.marks or history < stage.processed or len(sums) != 1:
            raise Wrong(
                f"recovered from acceptor {acceptor.node_id}: {marks} marks, {stage.marks} were"
                f" acknowledged; {history} transactions, {stage.processed} were; sums {sums}"
            )


@asynccontextmanager
async def staged(transactions: int, *, loads: bool) -> AsyncIterator[tuple[Stage, Path]]:
    """Everything up, and a folder."""
    with (
        tempfile.TemporaryDirectory() as folder,
        postgres_server(
            synchronous_standby_names="penstock",
            wal_keep_size="2GB",
            wal_sender_timeout="30s",
            checkpoint_timeout="30s",
        ) as server,
    ):
        stage = Stage(Path(folder), server, transactions)
        try:
            await stage.start(loads=loads)
            yield stage, Path(folder)
        finally:
            await stage.stop()


async def campaign(strikes: Sequence[str], seed: int, transactions: int, *, recovers: bool) -> None:
    """All of it. Raises `Wrong`, `ViewStuck`."""
    dice = random.Random(seed)
    async with staged(transactions, loads=recovers) as (stage, folder):
        backup = stage.server.folder / "backup"
        if recovers:
            await anyio.to_thread.run_sync(
                stage.server.run, "pg_basebackup", ["-D", str(backup), "-X", "none", "-c", "fast"]
            )
        for number, kind in enumerate(strikes, 1):
            stage.bench()
            await anyio.sleep(dice.random() * PAUSE_S)
            if number % SWITCH_EVERY == 0:
                await stage.switch()
            await stage.strike(kind, dice.choice(stage.acceptors))
            print(f"{number}: {kind}, {stage.marks} marks", flush=True)
        stage.bench()
        await stage.benched()
        await stage.mark()
        end_lsn = await stage.relay.end()
        for acceptor in stage.acceptors:
            # Whoever lags is brought up by the next leader; what it has must be right in any case.
            own_lsn = min(end_lsn, await acceptor.commit_lsn())
            stage.compare(acceptor, own_lsn)
            records = stage.dump(acceptor, own_lsn, folder / "dumped")
            print(
                f"acceptor {acceptor.node_id}: {records} records in"
                f" {own_lsn - stage.begin_lsn} bytes, to {lsn_text(own_lsn)}"
            )
            if recovers:
                recover(stage, acceptor, backup)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transactions", type=int, default=2_000, help="of each run of pgbench")
    parser.add_argument("--short", action="store_true", help="no backup, tables filled before")
    parser.add_argument("--strikes", help="instead of --kills: whom, one after another")
    given = parser.parse_args()
    dice = random.Random(given.seed)
    strikes = dice.choices([*VICTIMS], [*VICTIMS.values()], k=given.kills)
    if given.strikes is not None:
        strikes = given.strikes.split(",")
    try:
        anyio.run(
            lambda: campaign(strikes, given.seed, given.transactions, recovers=not given.short)
        )
    except (Wrong, Stuck, NoPostgres) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{len(strikes)} strikes {dict(Counter(strikes))}: nothing was lost, nothing differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
