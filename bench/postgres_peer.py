"""A throw-away PostgreSQL on the loopback interface, for the benchmarks that compare with one."""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


class NoPostgres(Exception):
    """There is none on this machine, or it does not start; says why."""


def _tool(name: str) -> str:
    found = shutil.which(name)
    # Debian keeps them out of the path.
    places = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    real = places[-1] if places else found
    if real is None:
        raise NoPostgres(f"{name} is not installed")
    return real


def _account() -> str | None:
    """Whom it runs as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            pwd.getpwnam(name)
            return name
    raise NoPostgres("PostgreSQL refuses root, and there is no other account to run it as")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(command: list[str], account: str | None, place: Path) -> None:
    done = subprocess.run(
        command, user=account, cwd=place, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise NoPostgres(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")


@contextlib.contextmanager
def postgres() -> Iterator[int]:
    """Runs one while the block lasts, on the port that is given. Raises `NoPostgres`."""
    initdb, control, account = _tool("initdb"), _tool("pg_ctl"), _account()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if account is not None:
            shutil.chown(place, account)
        data, port = place / "data", _free_port()
        _run([initdb, "-D", str(data), "-U", "bench", "-A", "trust", "-N"], account, place)
        options = f"-h 127.0.0.1 -p {port} -k {place} -c fsync=off"
        log = str(place / "log")
        _run([control, "-D", str(data), "-w", "-l", log, "-o", options, "start"], account, place)
        try:
            yield port
        finally:
            _run([control, "-D", str(data), "-w", "-m", "immediate", "stop"], account, place)
