"""Processes that see no file of one another: each in its own mount namespace and folder.

All folders lie below one, the *ground*. Over the ground each process has an empty file system, in
which its own folder alone stands; the program's code and Python are seen by all of them, as an
installation on each machine would be. `assert_apart` proves it for processes that run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from crash_campaign import descendants

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engine" / "spark"))
from standalone_cluster import LoggedProcess  # type: ignore[import-not-found] # noqa: E402

END_SECONDS: Final = 30
WHOSE: Final = "whose"
"""The file in each folder that names its process."""
APART: Final = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    # Its own folder is reached by the working directory, which the empty file system does not hide.
    'cd "$1" && mount -t tmpfs none "$0" && mkdir -p "$1"'
    ' && mount -c --bind /proc/self/cwd "$1" && cd "$1" && shift && exec "$@"',
)
"""Runs a program where all of a folder but one below it is hidden: `$0` hides, `$1` stays."""


def can_be_apart() -> bool:
    """Whether a process may have mounts of its own here."""
    try:
        return subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0
    except OSError:
        return False


def hidden_ground(folder: Path) -> Path:
    """What is hidden from each process: the machine's temporary files with the ground in it, or
    the ground alone if there is code among them."""
    temporary = Path(tempfile.gettempdir()).resolve()
    code = (ROOT, Path(sys.prefix).resolve(), Path(sys.executable).resolve())
    if not folder.resolve().is_relative_to(temporary):
        return folder
    return folder if any(path.is_relative_to(temporary) for path in code) else temporary


class ApartProcess:
    """One process in its own folder and namespace, which can be killed and started again."""

    def __init__(
        self,
        ground: Path,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        commanded: bool = False,
    ) -> None:
        """Makes its folder. `commanded`: it reads lines."""
        self.name = name
        self.folder = ground / name
        self.command = list(command)
        self.environment = {**environment, "TMPDIR": str(self.folder)}
        self._ground, self._commanded = ground, commanded
        self._logs: list[LoggedProcess] = []
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)  # a PostgreSQL of root's runs as another user
        (self.folder / WHOSE).write_text(name)

    @property
    def log(self) -> LoggedProcess:
        """Its present life."""
        return self._logs[-1]

    @property
    def pid(self) -> int:
        """The process: `unshare` and the shell become the program."""
        found: int = self.log.process.pid
        return found

    @property
    def text(self) -> str:
        """What it has written in all its lives."""
        return "\n--- killed, and started again ---\n".join(log.text for log in self._logs)

    def start(self) -> None:
        """Starts it."""
        cover = [*APART, str(hidden_ground(self._ground)), str(self.folder)]
        started = LoggedProcess(
            [*cover, *self.command], self.environment, commanded=self._commanded
        )
        self._logs.append(started)

    def kill(self) -> None:
        """Kills it with all that it has started: SIGKILL."""
        # Listed while it lives: later its children have another parent.
        below = [pid for pid, _ in descendants(self.pid)]
        self.log.kill()
        for pid in below:
            kill_process(pid)

    def end(self) -> None:
        """End it: one that reads lines by the end of these, any other by SIGKILL."""
        if self._commanded and not self.has_ended:
            self.log.end_input()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.log.process.wait(END_SECONDS)
        self.kill()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self.log.process.poll() is not None


def kill_process(pid: int) -> None:
    """SIGKILL for one process, if it is there still."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def assert_apart(processes: Iterable[ApartProcess]) -> int:
    """Fail if a process, or one that it started, sees a file of another one; return how many were
    looked at."""
    everyone = list(processes)
    seen = 0
    for process in everyone:
        for pid in (process.pid, *(pid for pid, _ in descendants(process.pid))):
            root = Path(f"/proc/{pid}/root")
            try:
                own = (root / str(process.folder).lstrip("/") / WHOSE).read_text()
            except OSError:
                if not Path(f"/proc/{pid}/root").exists():
                    continue  # it has ended meanwhile
                raise
            assert own == process.name, f"{process.name} ({pid}) sees the folder of {own}"
            for other in everyone:
                if other is not process:
                    # Executors make the path of an answer, not knowing that it is another one's.
                    there = root / str(other.folder).lstrip("/") / WHOSE
                    assert not os.path.lexists(there), f"{process.name} ({pid}) sees {there}"
            seen += 1
    return seen
