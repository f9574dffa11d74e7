"""Commits a second of 100 clients, each of which waits until a majority of three has it on disk.

Ours: 100 tasks append through one proposer to three ``penstock wal serve`` processes. Each appends
a record of `RECORD_BYTES`, the size of the peer's commit, and waits for its acknowledgement. Peer:
PostgreSQL with 100 pgbench clients, each of whose transactions inserts a row, and two standbys of
which one must have flushed it (``ANY 1`` in synchronous_standby_names): the primary and one of two
standbys are a majority of three as well. All are on one disk of one machine, with fsync, in
alternation. The measure is milliseconds per commit (the time of a run divided by its commits), the
median of the rounds; the target is 0.7 of the peer's rate. Without PostgreSQL there is no peer.

    python bench/wal_quorum.py [--json FILE] [--quick]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import uvloop

from actors.testing.postgres_server import NoPostgres, PostgresServer, postgres_server
from actors.wal.dialling import parse_addresses
from actors.wal.framing import START_LSN, encode, framed_bytes_max
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import propose
from measure import Measure, Report, median
from wal_lone import TENANT, acceptor

CLIENTS = 100
SHARE = 0.7
PAYLOAD_BYTES = 150
RECORD_BYTES = framed_bytes_max(PAYLOAD_BYTES)
"""Upper bound; a transaction of the script below writes about 150 to 250 bytes of WAL."""
WHAT = "a change of some fifty bytes, as rows have"
SCRIPT = f"INSERT INTO written (client, what) VALUES (:client_id, '{WHAT}');\n"
STANDBYS = ("standby_1", "standby_2")


async def ours(ports: list[int], timeline: str, seconds: float) -> float:
    """Return our milliseconds per commit."""
    config = ProposerConfig(TENANT, timeline, START_LSN)
    addresses = parse_addresses(",".join(f"127.0.0.1:{port}" for port in ports))
    done = 0
    async with propose(config, addresses) as log:
        await log.elected()
        began = perf_counter()

        async def client() -> None:
            nonlocal done
            payload = os.urandom(PAYLOAD_BYTES)
            while perf_counter() - began < seconds:
                await log.append_at(lambda lsn: encode(payload, lsn), RECORD_BYTES)
                done += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return (perf_counter() - began) * 1000 / done


@contextlib.contextmanager
def replicated() -> Iterator[PostgresServer]:
    """Run a primary with two standbys, one of which must have flushed each commit."""
    with ExitStack() as stack:
        primary = stack.enter_context(
            postgres_server(max_connections="150", max_wal_senders="10", wal_level="replica")
        )
        primary.run(
            "psql", ["-d", "postgres", "-c", "CREATE TABLE written (client int, what text)"]
        )
        for name in STANDBYS:
            stack.enter_context(standby(primary, name))
        names = ", ".join(STANDBYS)
        for statement in (
            f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 ({names})'",
            "SELECT pg_reload_conf()",
        ):
            primary.run("psql", ["-d", "postgres", "-c", statement])
        yield primary


@contextlib.contextmanager
def standby(primary: PostgresServer, name: str) -> Iterator[None]:
    """Run a standby of the primary while the block lasts."""
    data = primary.folder / name
    primary.run("pg_basebackup", ["-D", str(data), "-c", "fast", "-X", "stream"])
    folder = primary.folder
    info = f"host={folder} port={primary.port} user=bench application_name={name}"
    with (data / "postgresql.auto.conf").open("a") as file:
        file.write(f"primary_conninfo = '{info}'\nport = {primary.port + 1}\n")
        file.write("listen_addresses = ''\nhot_standby = off\n")
    (data / "standby.signal").touch()
    sockets = folder / f"{name}-socket"
    sockets.mkdir()
    from actors.testing.postgres_server import binary

    for made in (sockets, data / "standby.signal"):
        own(made, data)
    options = f"-k {sockets}"
    control = [binary("pg_ctl"), "-D", str(data)]
    # It accepts no clients, so waiting for it (-w) would never end.
    primary._run([*control, "-W", "-l", str(folder / f"{name}.log"), "-o", options, "start"])
    try:
        yield
    finally:
        with contextlib.suppress(NoPostgres):
            primary._run([*control, "-m", "immediate", "stop"])


def own(made: Path, like: Path) -> None:
    """Give a path to the owner of another one."""
    there = like.stat()
    os.chown(made, there.st_uid, there.st_gid)


def theirs(primary: PostgresServer, seconds: float) -> float:
    """Return PostgreSQL's milliseconds per commit."""
    script = primary.put("script.sql", SCRIPT.encode())
    arguments = ["-n", "-c", str(CLIENTS), "-j", "2", "-T", str(max(1, round(seconds)))]
    said = primary.run("pgbench", [*arguments, "-f", str(script), "postgres"])
    found = re.search(r"tps = ([\d.]+)", said)
    assert found is not None, said
    return 1000 / float(found[1])


def main() -> None:
    """Run the benchmark."""
    report = Report(__doc__ or "")
    rounds, seconds = (1, 2.0) if report.quick else (3, 10.0)
    name = f"wal_commit_of_{CLIENTS}_clients_by_a_quorum_of_3"
    found: list[float] = []
    peer: list[float] = []
    missing = ""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = [
            stack.enter_context(acceptor(Path(folder) / str(node_id), node_id))
            for node_id in (1, 2, 3)
        ]
        try:
            primary = stack.enter_context(replicated())
        except NoPostgres as error:
            missing = str(error)
        for number in range(rounds):
            found.append(uvloop.run(ours(ports, f"{number + 1:032x}", seconds)))
            if not missing:
                peer.append(theirs(primary, seconds))
    middle = median(peer) if peer else 0.0
    report.add(Measure(name, median(found), middle, target=round(1 / SHARE, 2), missing=missing))
    report.close()


if __name__ == "__main__":
    main()
