"""A private PostgreSQL server for tests and benchmarks: initialised, started, killed, restarted.

PostgreSQL refuses to run as root: then it runs as ``postgres`` or ``nobody``. It listens on a Unix
socket in a folder of its own, and on a port of the loopback interface that stays reserved for it
while it is down.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from actors.testing.patience import PATIENCE_S

_TIMEOUT_S: Final = PATIENCE_S
_GUARD: Final = 'cat >/dev/null; "$0" -D "$1/data" -m immediate stop >/dev/null 2>&1; rm -rf "$1"'
_PLACES: Final = "/usr/lib/postgresql/*/bin"


class NoPostgres(Exception):
    """Raised if this machine has no PostgreSQL, or it does not start. The text gives the reason and
    the remedy."""


class NotInstalled(NoPostgres):
    """Raised if this machine has no PostgreSQL."""


def binary(name: str) -> str:
    """Return the path of one of PostgreSQL's programs. Raises `NotInstalled`."""
    # Debian keeps them outside PATH, in one folder per version: use the newest.
    places = sorted(
        glob.glob(f"{_PLACES}/{name}"), key=lambda place: _version(Path(place).parts[-3])
    )
    found = places[-1] if places else shutil.which(name)
    if found is None:
        raise NotInstalled(
            f"{name} is neither in {_PLACES} nor on PATH: install PostgreSQL's server and clients"
            " (on Debian: apt-get install postgresql)"
        )
    return found


def _version(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _account() -> str | None:
    """Return the account that the server runs as; None for our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise NoPostgres("PostgreSQL refuses to run as root, and there is no other account")


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free port of the loopback interface while it is open."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Bound but not listening: servers, which set SO_REUSEADDR, can bind the port as well, and the
    # system gives it to no other socket.
    held.bind(("127.0.0.1", 0))
    return held


class PostgresServer:
    """One server with the superuser ``bench`` and the database ``postgres``; all connections are
    trusted."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        """Folder of the Unix socket and the data."""
        self._held = reserve_port()
        """Socket that reserves the port."""
        weakref.finalize(self, self._held.close)  # avoids a ResourceWarning without `guarded`
        self.port: int = self._held.getsockname()[1]
        self.user = "bench"
        self._data = folder / "data"
        self._account = _account()
        self._settings = dict(settings)
        if self._account is not None:
            shutil.chown(folder, self._account)
        # Not the environment's locale: in Turkish, upper and lower case of "i" differ, and names
        # would not be found.
        options = ["-U", "bench", "-A", "trust", "-N", "--locale=C.UTF-8", "--encoding=UTF8"]
        self._run([binary("initdb"), "-D", str(self._data), *options])

    def conninfo(self, **more: str) -> str:
        """Return the connection string for libpq, over the Unix socket."""
        parts = {"host": str(self.folder), "port": self.port, "user": "bench", "dbname": "postgres"}
        return " ".join(f"{key}={value}" for key, value in {**parts, **more}.items())

    def start(self, **settings: str) -> None:
        """Start the server, with these settings in addition to those given at creation."""
        options = [f"-h 127.0.0.1 -p {self.port} -k {self.folder}"]
        options += [f"-c {name}={value}" for name, value in (self._settings | settings).items()]
        self._control("-l", str(self.folder / "log"), "-o", " ".join(options), "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: ``smart``, ``fast`` or ``immediate``."""
        self._control("-m", mode, "stop")

    def kill(self) -> None:
        """Send ``kill -9`` to all its processes, as when the machine dies."""
        for process in self._signal(signal.SIGKILL):
            _wait_gone(process)
        # A zombie looks alive to the next server: remove the files that name it.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        (self.folder / f".s.PGSQL.{self.port}.lock").unlink(missing_ok=True)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend all its processes while the block runs: connections stay open, and nothing
        answers."""
        stopped = self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> list[int]:
        """Send a signal to all of the server's processes, and return them."""
        main = int((self._data / "postmaster.pid").read_text().split()[0])
        # List them while the parent lives: later their numbers may belong to other processes.
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        processes = [main, *map(int, children)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return processes

    def run(self, name: str, arguments: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> str:
        """Run one of the client programs against the server and return its output. Raises
        `NoPostgres`."""
        command = [binary(name), "-h", str(self.folder), "-p", str(self.port), "-U", "bench"]
        return self._run([*command, *arguments], timeout_s=timeout_s)

    def put(self, name: str, data: bytes) -> Path:
        """Write a file in the server's folder that only the server may read."""
        place = self.folder / name
        place.write_bytes(data)
        place.chmod(0o600)
        if self._account is not None:
            shutil.chown(place, self._account)
        return place

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Stop the server and remove its folder at the block's end, or when this process dies."""
        # A separate process reads our pipe to its end, which comes even after ``kill -9``.
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, binary("pg_ctl"), str(self.folder)],
            stdin=subprocess.PIPE,
            user=self._account,
            cwd="/",
            start_new_session=True,  # a Ctrl-C in our terminal does not interrupt it
        )
        with self._held, guard:
            yield

    def log(self) -> str:
        """Return the text of the server's log."""
        return (self.folder / "log").read_text()

    def _control(self, *arguments: str) -> None:
        self._run(
            [binary("pg_ctl"), "-D", str(self._data), "-w", "-t", str(_TIMEOUT_S), *arguments]
        )

    def _run(self, command: list[str], *, timeout_s: float = _TIMEOUT_S) -> str:
        done = subprocess.run(
            command,
            user=self._account,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if done.returncode:
            raise NoPostgres(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout


def _wait_gone(process: int) -> None:
    """Wait until a process is dead: its shared memory is in use until then."""
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(process)
        try:
            select.select([watch], [], [], _TIMEOUT_S)
        finally:
            os.close(watch)


@contextlib.contextmanager
def postgres_server(**settings: str) -> Iterator[PostgresServer]:
    """Run a server while the block executes, with these settings of postgresql.conf. Raises
    `NoPostgres`."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        server = PostgresServer(Path(folder), settings)
        with server._held:
            server.start()
            try:
                yield server
            finally:
                with contextlib.suppress(NoPostgres):  # a test may have stopped it
                    server.stop("immediate")
