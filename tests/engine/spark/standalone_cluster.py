"""A standalone cluster on loopback from the installed package: a master and two workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pyspark

from actors.engine.spark.class_archive import archive_options, find_archive
from actors.engine.spark.environment import DROPPED_VARIABLES
from actors.engine.spark.java import JavaHome

SECONDS_MAX: Final = 200
WORKERS: Final = 2
QUICK_JAVA: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
"""What runs for a minute is not worth more than one compiler."""
HIDING: Final = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs none "$0" && exec "$@"',
)
"""Runs a program in a mount namespace of its own, with an empty folder in place of a given one."""
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class LoggedProcess:
    """A process whose output is read as it is written.

    It leads a process group, so that its end takes along what it started; and it ends with this
    process even when that is killed, or when the thread ends that has started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        *,
        commanded: bool = False,
    ) -> None:
        """Starts it in a folder. `commanded`: it reads lines (see `tell`)."""
        self._lines: list[str] = []
        self._grown = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if commanded else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """What it has written until now."""
        with self._grown:
            return "".join(self._lines)

    def wait_for(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Waits for the line number `count` that matches; fails with the log."""

        def found() -> list[re.Match[str]]:
            return [m for m in (re.search(pattern, line) for line in self._lines) if m]

        with self._grown:
            self._grown.wait_for(lambda: self._ended or len(found()) >= count, SECONDS_MAX)
            matches = found()
            assert len(matches) >= count, f"no {pattern!r} in:\n{''.join(self._lines)}"
            return matches[count - 1]

    def tell(self, line: str) -> None:
        """Writes a line that it reads."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kills it, and all that is still of its group: SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS_MAX)
        self._reader.join(SECONDS_MAX)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.end_input()

    def end_input(self) -> None:
        """Ends the lines that it reads."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line)
        self._note(None)

    def _note(self, line: str | None) -> None:
        with self._grown:
            if line is None:
                self._ended = True
            else:
                self._lines.append(line)
            self._grown.notify_all()


class Daemon(LoggedProcess):
    """A process of Spark's."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        folder: Path | None = None,
        hidden: Path | None = None,
    ) -> None:
        """Starts it. `hidden`: a folder that it sees empty, for which the tests must be root."""
        program = str(spark_home() / "bin" / "spark-class")
        cover = [] if hidden is None else [*HIDING, str(hidden)]
        super().__init__([*cover, program, *arguments], environment, folder)


class Cluster:
    """The master's address, the master, and where the workers keep what executors write."""

    def __init__(self, url: str, master: Daemon, folder: Path, workers: list[Daemon]) -> None:
        self.url = url
        self.master = master
        self.workers = workers
        self._folder = folder

    def end_application(self) -> None:
        """Removes the application that runs, as an operator may on the master's page."""
        port = self.master.wait_for(r"service 'MasterUI' on port (\d+)").group(1)
        page = HTTPConnection("127.0.0.1", int(port), timeout=SECONDS_MAX)  # past any proxy
        with contextlib.closing(page):
            page.request("GET", "/")
            text = page.getresponse().read().decode()
            (form,) = re.findall(r"<form[^>]*app/kill/.*?</form>", text, re.DOTALL)
            fields = dict(map(_field, re.findall(r"<input[^>]*>", form)))
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            page.request("POST", "/app/kill/", urlencode(fields), kind)
            answer = page.getresponse()
            assert answer.status == 302, answer.read()
        self.master.wait_for(f"Removing app {fields['id']}")

    def executor_logs(self, word: str) -> list[str]:
        """What each executor of any application has logged, once all have and one of them a word:
        its worker writes down what it says, some time after it was said."""
        while True:
            paths = sorted(self._folder.glob("worker-*/app-*/*/stderr"))
            logs = [path.read_text(errors="replace") for path in paths]
            if len(logs) >= WORKERS and any(word in log for log in logs):
                return logs
            threading.Event().wait(0.05)


def _field(text: str) -> tuple[str, str]:
    """Name and value of a form's input."""
    found = dict(re.findall(r"""(\w+)=["']([^"']*)["']""", text))
    return found["name"], found["value"]


def spark_home() -> Path:
    """The installed package, which holds the programs and jars of a cluster."""
    return Path(next(iter(pyspark.__path__)))


def quick_java(java: JavaHome) -> str:
    """Options of a JVM that runs for a minute."""
    return f"{QUICK_JAVA} {archive_options(find_archive(java))}".strip()


def environment_of(folder: Path, java: JavaHome) -> dict[str, str]:
    """The environment of a daemon: nothing of another Spark, everything temporary in `folder`."""
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED_VARIABLES}
    return kept | {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{quick_java(java)} -Djava.io.tmpdir={folder}",
    }


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    java: JavaHome,
    variables: Mapping[str, str] = {},
    hidden: Path | None = None,
) -> Iterator[Cluster]:
    """A master and `WORKERS` workers of one core and 512 MiB each; killed at the end.

    `variables`: of the workers' environment alone. `hidden`: a folder that they see empty.
    """
    environment = environment_of(folder, java)
    place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    kind = "org.apache.spark.deploy"
    with contextlib.ExitStack() as daemons:
        master = Daemon([f"{kind}.master.Master", *place], environment)
        daemons.callback(master.kill)
        url = master.wait_for(r"Starting Spark master at (spark://[\d.]+:\d+)").group(1)
        workers: list[Daemon] = []
        for number in range(WORKERS):
            work = folder / f"worker-{number}"
            size = ["--cores", "1", "--memory", "512m", "--work-dir", str(work)]
            arguments = [f"{kind}.worker.Worker", *place, *size, url]
            workers.append(Daemon(arguments, {**environment, **variables}, None, hidden))
            daemons.callback(workers[-1].kill)
        yield Cluster(url, master, folder, workers)
