"""A service, its stores and its Spark as processes that see no file of one another.

`FarWorld` starts an S3 server, the master and two workers of a standalone cluster, perhaps a Spark
Connect server that runs on that cluster, and the service: a controller, another one that stands by
and a replica, over documents in PostgreSQL; or one whole process. The workers have credentials in
their own environment, and a Python without this package. A process that was killed is started
again by whoever killed it; nothing else here starts anything anew.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import anyio.to_thread
from crash_campaign import descendants
from far_processes import ROOT, ApartProcess, assert_apart

from actors import Client
from actors.engine.spark.class_archive import archives_folder
from actors.engine.spark.environment import DROPPED_VARIABLES
from actors.engine.spark.java import JavaHome, find_java
from actors.runtime.errors import PenstockError
from actors.testing.postgres_server import reserve_port

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "engine" / "spark"))
from connect_server import STARTED, server_arguments  # type: ignore[import-not-found]
from standalone_cluster import (  # type: ignore[import-not-found]
    environment_of,
    quick_java,
    spark_home,
)

import s3_server  # type: ignore[import-not-found]

WORKERS: Final = {"worker-0": "127.0.0.2", "worker-1": "127.0.0.3"}
"""Hosts of their own: executors of one host read one another's files."""
CONTROLLERS: Final = ("controller-0", "controller-1")
SPARK_CLASS: Final = str(spark_home() / "bin" / "spark-class")
DEPLOY: Final = "org.apache.spark.deploy"
PORTS: Final = ("--port", "0", "--webui-port", "0")
START_SECONDS: Final = 240
QUICK_ENGINE: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""A JVM that lives for minutes: its second compiler takes more than it gives back."""
SETTINGS: Final = {
    "retain_history_ms": 86_400_000,
    "spark_driver_memory": "512m",
    "engine_jobs_in_flight_max": 2,
    # Small enough that executors read and write most of what there is.
    "engine_inline_bytes_max": 64 * 1024,
    "engine_collected_bytes_max": 64 * 1024,
    "lookup_rows_max": 2_000,
    # Most steps are jobs, whose executors write what is large.
    "prepared_slot_bytes_max": 64 * 1024,
}


def found_java() -> JavaHome:
    """The machine's Java. Raises `EngineUnavailable`."""
    found = find_java(archives_folder())
    if not isinstance(found, JavaHome):
        raise found
    return found


class FarWorld:
    """All processes, by name."""

    def __init__(self, ground: Path, *, whole: bool, connect: bool) -> None:
        """`whole`: the service is one process. `connect`: its Spark is a Connect server."""
        self.whole, self.connect = whole, connect
        self.processes: dict[str, ApartProcess] = {}
        self.addresses: dict[str, str] = {}
        self._ground = ground
        self._java = found_java()
        self._ports = ExitStack()
        self._bucket: dict[str, str] = {}
        self.blob_url = ""
        self.master = ""
        self.spark_master = ""

    @property
    def controllers(self) -> tuple[str, ...]:
        """Names of the processes that clients connect to, one of which serves."""
        return ("service",) if self.whole else CONTROLLERS

    # -- starting ------------------------------------------------------------------------------

    async def start_cluster(self) -> None:
        """Start the bucket, the cluster, and the Connect server if there is one."""
        # Processes are started by this thread: they die with the thread that has started them.
        bucket = self._start("s3", self._store("s3"), self._python(), commanded=True)
        found = await self._told(bucket, r"^serving (\S+) (\S+)$")
        self._bucket = s3_server.variables(SimpleNamespace(url=found[1]))
        self.blob_url = f"s3://{found[2]}/x"
        command = [SPARK_CLASS, f"{DEPLOY}.master.Master", "--host", "127.0.0.1", *PORTS]
        master = self._start("master", command, self._daemon("master"))
        self.master = (await self._told(master, r"Starting Spark master at (spark://\S+)"))[1]
        for name, host in WORKERS.items():
            size = ["--cores", "4", "--memory", "2g", "--work-dir", f"{self._ground / name}/work"]
            place = ["--host", host, *PORTS, *size, self.master]
            environment = self._daemon(name) | self._bucket | self._bare(name)
            environment["SPARK_LOCAL_IP"] = host
            self._start(name, [SPARK_CLASS, f"{DEPLOY}.worker.Worker", *place], environment)
        for name in WORKERS:
            await self._told(self.processes[name], "Successfully registered with master")
        self.spark_master = self.master
        if self.connect:
            await self._start_connect()

    async def start_service(self) -> None:
        """Start the service, and wait until it serves clients."""
        if self.whole:
            self._serve("service")
        else:
            await self._start_roles()
        with anyio.fail_after(START_SECONDS):
            async with self.client():
                pass

    async def _start_connect(self) -> None:
        port = self._port()
        folder = self._ground / "connect"
        arguments = server_arguments(folder, self._java, port, self._spark_conf(), self.master)
        environment = self._daemon("connect") | self._bucket
        environment |= {"SPARK_DAEMON_MEMORY": "1g", "PYSPARK_PYTHON": sys.executable}
        server = self._start("connect", [SPARK_CLASS, *arguments], environment)
        await self._told(server, STARTED)
        self.spark_master = f"sc://127.0.0.1:{port}"

    async def _start_roles(self) -> None:
        documents = self._start(
            "documents", self._store("postgres"), self._python(), commanded=True
        )
        address = (await self._told(documents, r"^serving (\S+)$"))[1]
        url = f"consensus_url=postgresql://bench@{address}/postgres?schema=far"
        replica = ["--role", "replica", "--cluster-listen", f"127.0.0.1:{self._port()}"]
        self._serve("replica", "--set", url, *replica)
        for name in CONTROLLERS:
            self._serve(name, "--set", url, "--role", "controller", "--standby")

    def _serve(self, name: str, *options: str) -> None:
        """Start a process of the service, which has one address for all its lives."""
        port = self._port()
        self.addresses[name] = f"127.0.0.1:{port}"
        settings: dict[str, object] = {
            **SETTINGS,
            "state_dir": self._ground / name / "state",
            "blob_url": self.blob_url,
            "spark_master": self.spark_master,
            "listen": self.addresses[name],
        }
        if not self.connect:
            settings |= {f"spark_conf.{key}": text for key, text in self._spark_conf().items()}
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "actors.doors.commands.cli", "serve", *given, *options]
        self._start(name, command, self.service_environment())

    def _start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        *,
        commanded: bool = False,
    ) -> ApartProcess:
        process = ApartProcess(self._ground, name, command, environment, commanded=commanded)
        self.processes[name] = process
        process.start()
        return process

    async def _told(self, process: ApartProcess, pattern: str) -> re.Match[str]:
        """Wait for a line of a process."""
        found: re.Match[str] = await anyio.to_thread.run_sync(process.log.wait_for, pattern)
        return found

    def run_command(self, name: str, *arguments: str, **settings: str) -> ApartProcess:
        """Start a command of `penstock`, with settings in its environment."""
        given = {f"PENSTOCK_{key.upper()}": text for key, text in settings.items()}
        command = [sys.executable, "-m", "actors.doors.commands.cli", *arguments]
        return self._start(name, command, self.service_environment() | given)

    # -- environments --------------------------------------------------------------------------

    def _python(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in DROPPED_VARIABLES}
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**kept, "PYTHONPATH": os.pathsep.join(paths)}

    def _store(self, kind: str) -> list[str]:
        return [sys.executable, str(ROOT / "tests" / "proof" / "far_store.py"), kind]

    def _daemon(self, name: str) -> dict[str, str]:
        found: dict[str, str] = environment_of(self._ground / name, self._java)
        return found

    def _bare(self, name: str) -> dict[str, str]:
        """A Python without this package."""
        bare = self._ground / name / "bare"
        bare.mkdir(parents=True)
        text = "raise ImportError('the executors have no such package')\n"
        (bare / "actors.py").write_text(text)
        return {"PYTHONPATH": str(bare)}

    def service_environment(self) -> dict[str, str]:
        """The environment of a process that uses the bucket and the cluster."""
        java = {"JAVA_HOME": str(self._java.home), "JDK_JAVA_OPTIONS": QUICK_ENGINE}
        python = {"PYSPARK_PYTHON": sys.executable}
        return self._python() | self._bucket | java | python

    def _spark_conf(self) -> dict[str, str]:
        return {
            # An application takes all cores otherwise, and leaves none to the next one.
            "spark.cores.max": "2",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": quick_java(self._java),
        }

    def _port(self) -> int:
        """A port that stays this world's, also while nobody listens there."""
        held = self._ports.enter_context(reserve_port())
        port: int = held.getsockname()[1]
        return port

    # -- running -------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client of the process that serves, once there is one."""
        async with await self._connect() as client:
            yield client

    async def _connect(self) -> Client:
        while True:
            for name in self.controllers:
                try:
                    return await Client.connect(self.addresses[name])
                except (PenstockError, OSError):
                    await anyio.sleep(0.05)

    async def serving(self) -> str:
        """The name of the process that serves clients."""
        while True:
            for name in self.controllers:
                try:
                    async with await Client.connect(self.addresses[name]):
                        return name
                except (PenstockError, OSError):
                    await anyio.sleep(0.05)

    async def process_below(self, names: tuple[str, ...], word: str) -> list[int]:
        """The processes that these have started whose command has a word, once there are any."""
        with anyio.fail_after(START_SECONDS):
            while True:
                found = [
                    pid
                    for name in names
                    for pid, command in descendants(self.processes[name].pid)
                    if word in command
                ]
                if found:
                    return found
                await anyio.sleep(0.05)

    async def in_thread(self, function: Callable[..., Any], *given: Any) -> None:
        """Do what waits for processes."""
        await anyio.to_thread.run_sync(function, *given)

    def assert_apart(self) -> int:
        """Fail if one of the processes sees a file of another one."""
        return assert_apart(self.processes.values())

    def ended(self) -> list[str]:
        """Names of processes that have ended by themselves."""
        return [name for name, process in self.processes.items() if process.has_ended]

    def stop(self) -> None:
        """End all that runs."""
        for process in reversed(self.processes.values()):
            process.end()
        self._ports.close()

    def keep_logs(self, folder: Path) -> None:
        """Write what all processes have written into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, process in self.processes.items():
            (folder / f"{name}.log").write_text(process.text)
            for path in process.folder.glob("**/engine.log*"):
                (folder / f"{name}-{path.name}").write_bytes(path.read_bytes())
