"""Ten thousand hostile peers at each listener of a real service, beside right logins.

Run: ``python tests/proof/hostile_bytes.py [--peers 10000] [--tls] [--doors pg,client,…]``. A
service (`penstock serve`, with Spark) and an acceptor (`penstock wal serve`) are processes.
At one listener after the other peers of `tests.kit.hostile_peers` connect: random bytes, half
TLS handshakes, wrong lengths, bodies of half a megabyte, silence. Hundreds of their sockets stay
open. Now and then a right client logs in, at last beside 500 silent sockets.

For each listener it prints the process's memory before and after, and how long logins took. Exit
status 1 if memory has grown by more than 64 MiB, a login was refused, or one took longer than
``--latency-ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio
import anyio.to_thread
import grpc
import grpc.aio
import msgspec
import psycopg
import trustme
from pyspark.sql.connect.proto import base_pb2

from actors.doors.client.client import Client
from actors.replica.cluster import connect
from actors.runtime.settings import Settings
from tests.kit.hostile_peers import HostileCrowd

GROWTH_MB_MAX: Final = 64
LOGINS: Final = 40
"""Right logins beside the peers of one listener."""
WARM_PEERS: Final = 500
"""Peers before memory is first measured: caches fill."""
SILENT: Final = 500
TOKEN: Final = "c" * 32
PASSWORD: Final = "boss-password"
CONFIG: Final = "/spark.connect.SparkConnectService/Config"
Login = Callable[[], Awaitable[None]]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def start(command: list[str], given: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start a command of penstock with settings, and wait until it is ready."""
    path = folder / f"{command[0]}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.doors.commands.cli", *command],
            cwd=folder,
            env=os.environ | {f"PENSTOCK_{name.upper()}": text for name, text in given.items()},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    process.kill()
    raise SystemExit(f"{command} did not start: {path.read_text()[-2000:]}")


def resident_mb(process: subprocess.Popen[str]) -> float:
    """Return the memory of a process, without its children."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class HostileWorld:
    """The processes, and how a right client logs in at each listener."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.folder = folder
        self.ports = {
            name: free_port() for name in ("client", "pg", "cluster", "connect", "http", "wal")
        }
        self._token = ""
        self._tls = tls
        (folder / "tokens").write_text(TOKEN + "\n")
        (folder / "tokens").chmod(0o600)
        files: dict[str, str] = {"token_file": "tokens", "cluster_token_file": "tokens"}
        if tls:
            authority = trustme.CA()
            made = authority.issue_cert("127.0.0.1", "localhost")
            authority.cert_pem.write_to_path(folder / "ca.pem")
            made.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
            (folder / "both.pem").chmod(0o600)
            files |= {"tls_certificate": "both.pem", "tls_key": "both.pem"}
            files["tls_authority"] = "ca.pem"
        self._files = files
        given: dict[str, Any] = {name: str(folder / path) for name, path in files.items()}
        self.settings = Settings(**given)

    def run(self, processes: dict[str, subprocess.Popen[str]]) -> None:
        """Start the processes."""
        at = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        served = {
            "state_dir": "state",
            "listen": at["client"],
            "pg_listen": at["pg"],
            "cluster_listen": at["cluster"],
            "connect_listen": at["connect"],
            "metrics_listen": at["http"],
            "spark_driver_memory": "1g",
        }
        processes["service"] = start(["serve"], self._files | served, self.folder)
        accepted = {"wal_listen": at["wal"], "wal_dir": "wal"}
        processes["acceptor"] = start(["wal", "serve"], self._files | accepted, self.folder)

    async def make_role(self) -> None:
        """Make the role that logs in, and its token."""
        async with await self._pg("pg", "boss", TOKEN) as db:
            await db.execute(f"CREATE ROLE boss LOGIN PASSWORD '{PASSWORD}'")
        async with await self._pg("pg", "boss", PASSWORD) as db:
            found = await (await db.execute("CREATE TOKEN FOR ROLE boss")).fetchone()
            assert found is not None
            self._token = next(text for text in found if len(str(text)) > 20)

    async def _pg(self, door: str, user: str, password: str) -> psycopg.AsyncConnection[Any]:
        more: dict[str, Any] = {"sslmode": "disable"}
        if self._tls:
            more = {
                "sslmode": "verify-full",
                "sslrootcert": str(self.folder / "ca.pem"),
                "sslcert": str(self.folder / "both.pem"),
                "sslkey": str(self.folder / "both.pem"),
            }
        return await psycopg.AsyncConnection.connect(
            host="127.0.0.1",
            port=self.ports[door],
            user=user,
            password=password,
            dbname="x",
            autocommit=True,
            **more,
        )

    async def pg(self) -> None:
        """Log in at PostgreSQL's door."""
        async with await self._pg("pg", "boss", PASSWORD) as db:
            assert await (await db.execute("SHOW server_version")).fetchone()

    async def client(self) -> None:
        """Log in as a client of frames."""
        address = f"127.0.0.1:{self.ports['client']}"
        async with await Client.connect(address, settings=self.settings) as client:
            await client.status()

    async def cluster(self) -> None:
        """Show a controller's token."""
        controller = await connect(f"127.0.0.1:{self.ports['cluster']}", self.settings)
        await controller.close()

    async def connect(self) -> None:
        """Ask for a setting by Spark Connect."""
        request = base_pb2.ConfigRequest(session_id="00112233-4455-6677-8899-aabbccddeeff")
        request.user_context.user_id = "boss"
        request.operation.get.keys.append("spark.app.name")
        address = f"localhost:{self.ports['connect']}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._tls:
            credentials = grpc.ssl_channel_credentials((self.folder / "ca.pem").read_bytes())
            channel = grpc.aio.secure_channel(address, credentials, options)
        else:
            channel = grpc.aio.insecure_channel(address, options)
        async with channel:
            await channel.unary_unary(CONFIG)(
                request.SerializeToString(),
                metadata=(("authorization", f"Bearer {self._token}"),),
                timeout=60,
            )

    async def http(self) -> None:
        """Ask whether the service lives."""
        tls = self.settings_context() if self._tls else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["http"], ssl=tls)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()

    def settings_context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts the service."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))

    async def wal(self) -> None:
        """Ask an acceptor for a timeline."""
        async with await self._pg("wal", "x", TOKEN) as db:
            await db.execute("SHOW wal_segment_size")


class DoorReport(msgspec.Struct):
    """What was seen at one listener."""

    before_mb: float
    after_mb: float = 0.0
    taken_ms: list[float] = msgspec.field(default_factory=list)


async def timed(login: Login) -> float:
    """Log in, and return the milliseconds that it took."""
    begun = time.perf_counter()
    with anyio.fail_after(120):
        await login()
    return (time.perf_counter() - begun) * 1000


async def attack(
    address: str, login: Login, process: subprocess.Popen[str], peers: int, rng: Random
) -> DoorReport:
    """Attack one listener."""
    crowd = HostileCrowd(address, rng)
    silent: list[socket.socket] = []
    try:
        await timed(login)
        await crowd.attack(WARM_PEERS)
        await timed(login)
        report = DoorReport(resident_mb(process))
        for _ in range(LOGINS):
            await crowd.attack(peers // LOGINS)
            report.taken_ms.append(await timed(login))
        host, _, port = address.rpartition(":")
        silent += [socket.create_connection((host, int(port))) for _ in range(SILENT)]
        for _ in range(5):
            report.taken_ms.append(await timed(login))
        report.after_mb = resident_mb(process)
        return report
    finally:
        await crowd.aclose()
        for sock in silent:
            sock.close()


async def campaign(arguments: argparse.Namespace, folder: Path) -> int:
    """Return the exit status."""
    world = HostileWorld(folder, tls=arguments.tls)
    processes: dict[str, subprocess.Popen[str]] = {}
    wrong = 0
    try:
        await anyio.to_thread.run_sync(world.run, processes)
        await world.make_role()
        for number, door in enumerate(arguments.doors.split(",")):
            process = processes["acceptor" if door == "wal" else "service"]
            address = f"127.0.0.1:{world.ports[door]}"
            rng = Random(arguments.seed + number)
            login: Login = getattr(world, door)
            report = await attack(address, login, process, arguments.peers, rng)
            taken = sorted(report.taken_ms)
            grown = report.after_mb - report.before_mb
            bad = grown > GROWTH_MB_MAX or taken[-1] > arguments.latency_ms
            wrong += bad
            print(
                f"{door}: {arguments.peers} peers, memory {report.before_mb:.0f} -> "
                f"{report.after_mb:.0f} MiB ({grown:+.1f}), {len(taken)} logins: median "
                f"{median(taken):.0f} ms, slowest {taken[-1]:.0f} ms{': WRONG' if bad else ''}",
                flush=True,
            )
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()
    return 1 if wrong else 0


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=10_000, help="of each listener")
    parser.add_argument("--doors", default="pg,client,cluster,connect,http,wal")
    parser.add_argument("--tls", action="store_true", help="all listeners speak TLS")
    parser.add_argument("--latency-ms", type=float, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    # The crowd's sockets, and the silent ones.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with tempfile.TemporaryDirectory(prefix="penstock-hostile-") as folder:
        raise SystemExit(anyio.run(campaign, arguments, Path(folder)))


if __name__ == "__main__":
    main()
