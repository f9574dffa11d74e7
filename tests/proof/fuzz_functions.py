"""Every function of Spark, called by a login without rights, watched at the system's calls.

    .venv/bin/python tests/proof/fuzz_functions.py [--seconds 600] [--seed 1] [--json FILE]
        [--python .venv/spark/4.1/bin/python] [--without-strace]

A service runs as a separate process, with a secret in its environment, in a property of its JVM
and in a file. A role with LOGIN alone calls each of Spark's built-in functions in turn, with drawn
arguments that name the file, a folder, a port, a host and a class (`function_calls`). Meanwhile
`strace` watches all processes of the service: no call of theirs may name any of these, none may
start a program, and the port must not be called. Without strace the folder (by inotify) and the
port are watched all the same. No answer may hold a secret. Exit status 1 for anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from function_calls import CALLABLE, TABLE_CALLABLE, CallDrawer, Canaries

from actors.engine.spark.java import JavaHome, find_java
from actors.testing.patience import PATIENCE_S, PROGRAM_S

ROOT = Path(__file__).resolve().parents[2]
CALLS_PER_QUERY = 8
SECRETS = ("CNRSECRETENV0001", "CNRSECRETPROPERTY2", "CNRSECRETFILE00003")
_OPENED, _ACCESSED, _CREATED = 0x20, 0x1, 0x100
_STARTED = re.compile(r"execve\(|clone3?\((?!.*CLONE_THREAD)|v?fork\(")
_LOOKED_UP = re.compile(r"htons\(53\)|/etc/(?:hosts|resolv\.conf|nsswitch\.conf)")
SYSTEM_CALLS = "%file,%process,connect,bind,sendmmsg"
"""Without those that read and write: the statements themselves go over sockets."""
_OPENED_FILE = re.compile(r'open(?:at)?\((?:AT_FDCWD, )?"([^"]+)"')
EXAMPLES_OF = """
import json, re
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
registry = spark._jsparkSession.sessionState().functionRegistry()
names, found = registry.listFunction().iterator(), {}
while names.hasNext():
    info = registry.lookupFunction(names.next()).get()
    texts = re.findall(r"> SELECT (.*?);\\n", info.getExamples() + "\\n", re.DOTALL)
    found[info.getName()] = texts
print(json.dumps(found))
"""
"""A program that prints the documented examples of each function, as JSON."""


class FolderWatch:
    """Tells by inotify whether anything in a folder was opened, read or made."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        wanted = _OPENED | _ACCESSED | _CREATED
        if self._libc.inotify_add_watch(self._fd, os.fsencode(folder), wanted) < 0:
            raise OSError(ctypes.get_errno(), f"inotify: {folder}")

    def touched(self) -> bool:
        """Whether something was, since the last call."""
        try:
            return bool(os.read(self._fd, 65536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """End the watch."""
        os.close(self._fd)


class CanaryPlaces:
    """The file, the port and the folder, and what is seen of them."""

    def __init__(self, folder: Path) -> None:
        (folder / "canaries").mkdir()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.canaries = Canaries(str(folder / "canaries"), port, SECRETS)
        Path(self.canaries.path).write_text(f"<a><b>{SECRETS[2]}</b></a>\n")
        self._watch = FolderWatch(folder / "canaries")

    def reached(self) -> str:
        """What was reached since the last call; empty if nothing was."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return "a file of the folder" if self._watch.touched() else ""
        connection.close()
        return "the port"

    def close(self) -> None:
        """End the watch."""
        self._listener.close()
        self._watch.close()


@contextmanager
def running_service(folder: Path, python: str) -> Iterator[tuple[str, int]]:
    """A service with a role without rights: its address for PostgreSQL's clients, and its pid."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = f"-Dpenstock.canary={SECRETS[1]} -XX:TieredStopAtLevel=1"
    command = [python, "-m", "actors.doors.commands.cli", "serve", "--log-level", "error"]
    command += ["--state-dir", str(folder / "state"), "--listen", "127.0.0.1:0"]
    command += ["--set", f"pg_listen=127.0.0.1:{port}", "--set"]
    command.append(f"spark_conf.spark.driver.extraJavaOptions={options}")
    environment = os.environ | {"PENSTOCK_CANARY": SECRETS[0]}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            if not any(line.startswith("ready") for line in process.stdout):
                raise RuntimeError("the service did not begin")
            with psycopg.connect(_dsn(port, "boss", ""), autocommit=True) as first:
                first.execute("CREATE ROLE boss LOGIN PASSWORD 'b'")
                first.execute("CREATE ROLE app LOGIN PASSWORD 'a'")
            yield _dsn(port, "app", "a"), process.pid
        finally:
            process.terminate()
            process.wait(PROGRAM_S)


def _dsn(port: int, role: str, password: str) -> str:
    return f"postgresql://{role}:{password}@127.0.0.1:{port}/penstock"


# -- what is watched -------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """The process and all that it has started."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    # One that has ended and was not asked about yet cannot be watched.
    return [each for each in found if "State:\tZ" not in Path(f"/proc/{each}/status").read_text()]


class SystemTrace:
    """`strace` of all processes of a service."""

    def __init__(self, pids: list[int], file: Path) -> None:
        command = ["strace", "-f", "-qq", "-s", "400", "-e", f"trace={SYSTEM_CALLS}"]
        command += ["-o", str(file), *(part for pid in pids for part in ("-p", str(pid)))]
        self._process = subprocess.Popen(command)
        self._file = file
        self._read = 0
        ends = time.monotonic() + PATIENCE_S
        while any(not _is_traced(pid) for pid in pids):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("strace does not watch: is ptrace permitted here?")
            os.sched_yield()

    def lines(self) -> list[str]:
        """What was called since the last call of this."""
        with self._file.open(errors="replace") as file:
            file.seek(self._read)
            found = file.readlines()
            self._read = file.tell()
        return found

    def close(self) -> None:
        """End the watch."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PROGRAM_S)


def _is_traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return "TracerPid:\t0\n" not in status


def wrong_calls(lines: list[str], canaries: Canaries, places: tuple[str, ...]) -> list[str]:
    """The lines of a trace that no function may cause: `places` are folders of Spark's own."""
    return [
        line
        for line in lines
        if _STARTED.search(line)
        or _LOOKED_UP.search(line)
        or any(mark in line for mark in canaries.marks)
        or (
            (found := _OPENED_FILE.search(line))
            and found[1].startswith("/")
            and not found[1].startswith(places)
        )
    ]


def documented_examples(python: str) -> dict[str, list[str]]:
    """What the documentation of each function shows."""
    command = [python, "-c", EXAMPLES_OF]
    with tempfile.TemporaryDirectory() as folder:
        java = find_java(Path(folder))
        if not isinstance(java, JavaHome):
            raise java
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=True,
            env=os.environ | {"JAVA_HOME": str(java.home)},
        )
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- the campaign ----------------------------------------------------------------------------------


class FunctionCampaign:
    """Calls functions, and judges what is seen."""

    def __init__(
        self,
        db: psycopg.Connection[Any],
        places: CanaryPlaces,
        rng: Random,
        examples: dict[str, list[str]],
        folders: tuple[str, ...] = (),
    ) -> None:
        self._db = db
        self._examples = examples
        self._folders = folders
        self._places = places
        self._rng = rng
        self._drawer = CallDrawer(rng, places.canaries)
        self.trace: SystemTrace | None = None
        self.outcomes: Counter[str] = Counter()
        self.answered: set[str] = set()
        """Functions that were computed at least once."""
        self.wrong: list[str] = []
        self._names: list[str] = []

    def warm_up(self) -> None:
        """Let Spark load what its first queries need."""
        for text in ("SELECT 1 AS a", "SELECT count(*) AS n FROM range(10)", "SELECT nothing(1)"):
            self._ask(text)
        self._call(list(CALLABLE[:: len(CALLABLE) // 24]))
        self._places.reached()
        self.outcomes.clear()

    def one_turn(self) -> None:
        """Call a few functions that were not called for the longest time."""
        if not self._names:
            self._names = [*CALLABLE]
            self._rng.shuffle(self._names)
            for name in TABLE_CALLABLE:
                self._judge(self._drawer.table_query(name), [])
        names, self._names = self._names[:CALLS_PER_QUERY], self._names[CALLS_PER_QUERY:]
        self._call(names)

    def _call(self, names: list[str]) -> None:
        """Call functions: each is analysed by itself, and those that can be are run together."""
        fit: list[tuple[str, str]] = []
        for name in names:
            for text in self._examples.get(name, ())[:2]:
                self._judge(f"SELECT {self._drawer.example(text)}", [name])
            for _ in range(2):
                call = self._drawer.call(name)
                if self._judge(f"DESCRIBE QUERY {self._drawer.query([call])}", []) == "answered":
                    fit.append((name, call))
                    break
        if not fit:
            return
        text = self._drawer.query([call for _, call in fit])
        if self._judge(text, [name for name, _ in fit]) != "answered" and len(fit) > 1:
            # One of them fails for its values.
            for name, call in fit:
                self._judge(self._drawer.query([call]), [name])

    def _judge(self, text: str, names: list[str]) -> str:
        """Send a text, look at what it has done, and return its outcome."""
        outcome, told = self._ask(text)
        self.outcomes[outcome] += 1
        if outcome == "answered":
            self.answered.update(names)
        seen = [secret for secret in SECRETS if secret in told]
        if seen:
            self._note(f"the answer holds {', '.join(seen)}", text)
        reached = self._places.reached()
        if reached:
            self._note(f"{reached} was reached", text)
        if self.trace is not None:
            for line in wrong_calls(self.trace.lines(), self._places.canaries, self._folders)[:5]:
                self._note(f"the system was called: {line.strip()}", text)
        return outcome

    def _note(self, what: str, text: str) -> None:
        self.wrong.append(f"{what}: {text}")
        print(f"WRONG: {what}\n  {text[:400]}", flush=True)

    def _ask(self, text: str) -> tuple[str, str]:
        try:
            found = self._db.execute(text.encode()).fetchall()
        except psycopg.errors.InsufficientPrivilege as error:
            return "denied", str(error)
        except psycopg.OperationalError:
            if self._db.closed:
                raise
            return "refused", ""
        except psycopg.Error as error:
            return "refused", str(error)
        return "answered", str(found)


def run(arguments: argparse.Namespace) -> int:
    """Run for the given time; the exit status."""
    watched = not arguments.without_strace
    if watched and shutil.which("strace") is None:
        print("strace is missing: only the folder, the port and the answers are watched")
        watched = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-calls-")))
        places = CanaryPlaces(folder)
        stack.callback(places.close)
        dsn, pid = stack.enter_context(running_service(folder, arguments.python))
        db = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        db.prepare_threshold = None
        examples = documented_examples(arguments.python)
        own = (
            str(folder / "state"),
            "/proc/",
            "/sys/",
            "/dev/",
            "/usr/",
            "/lib",
            "/etc/localtime",
            str(ROOT),
        )
        known = (*own, *{os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)}, sys.prefix)
        rng = Random(arguments.seed)
        campaign = FunctionCampaign(db, places, rng, examples, known)
        campaign.warm_up()
        if watched:
            campaign.trace = SystemTrace(descendants(pid), folder / "trace")
            stack.callback(campaign.trace.close)
        ends = time.monotonic() + arguments.seconds
        turns = 0
        while time.monotonic() < ends:
            campaign.one_turn()
            turns += 1
            if turns % 20 == 0:
                print(f"{dict(campaign.outcomes)}, {len(campaign.wrong)} wrong", flush=True)
    never = sorted(set(CALLABLE) - campaign.answered)
    print(f"{dict(campaign.outcomes)}: {len(campaign.wrong)} wrong")
    print(f"computed: {len(campaign.answered)} of {len(CALLABLE)} functions; not: {never[:400]}")
    if arguments.json:
        found = {"outcomes": dict(campaign.outcomes), "wrong": campaign.wrong, "never": never}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if campaign.wrong or not campaign.answered else 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of another release's environment")
    parser.add_argument("--without-strace", action="store_true")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
