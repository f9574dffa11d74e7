"""Runs tests against mutants: each job in a copy of the checkout that no other job uses.

A copy holds the sources of this checkout, and the tests with their kit (`actors.testing`) and
pytest's settings of the *suite*: a checkout that may be another one. The modules that are to be
mutated are written without their comments first, as `mutants.mutated` writes them, so that nothing
but the rule that is taken out differs.

The copy is pytest's root: `pythonpath` in its pyproject.toml names the sources of the copy. So does
PYTHONPATH for the processes that tests start. Both come before an installed package of this name.
`MutantCheckout.check` proves it.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from mutants import Mutation, mutated, unmutated

ROOT: Final = Path(__file__).resolve().parents[2]
MEMORY_BYTES_MAX: Final = 4 << 30
"""Of each process: a loop whose end was taken out must not take the machine with it. It limits what
can be written, since a JVM reserves more addresses than it uses."""
ARGUMENTS: Final = (
    *("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=1"),
    *("-m", "not spark and not long", "--tb=no", "-rfE"),
)
NO_TESTS: Final = 5
"""pytest's exit status if no test was selected."""
CANARY: Final = "test_copy_is_imported.py"
CANARY_TEXT: Final = """
import subprocess, sys
from pathlib import Path
import actors

SOURCES = Path(__file__).resolve().parents[1] / "src" / "actors"
ASK = [sys.executable, "-c", "import actors; print(actors.__file__)"]

def test_copy_is_imported():
    assert Path(actors.__file__).parent == SOURCES

def test_processes_import_the_copy(tmp_path):
    asked = subprocess.run(ASK, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(asked.stdout.strip()).parent == SOURCES
"""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


class RunOutcome(NamedTuple):
    """Says how a run of tests ended."""

    verdict: str
    """`passed`, `failed`, `hung` or `empty`: no test was selected."""
    seconds: float
    failed: str = ""
    """The test that failed; "" if pytest did not name one."""


class MutantCheckout:
    """A copy of the checkout with a suite's tests, in which one module at a time is mutated."""

    def __init__(
        self, place: Path, suite: Path, modules: Iterable[str], options: Sequence[str] = ()
    ) -> None:
        self.root = place / "checkout"
        place.mkdir()
        place.parent.chmod(0o755)  # for other users too, see `run`
        self._temporary = place / "t"  # short: Unix sockets have paths of 107 bytes at most
        self._log = place / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._options = options
        _copy(suite, self.root)
        actors = self.root / "src" / "actors"
        for path in (ROOT / "src" / "actors").iterdir():
            if path.name != "testing":
                _copy_entry(path, actors / path.name)
        _copy_entry(suite / "src" / "actors" / "testing", actors / "testing")
        for module in modules:
            self._write(module, unmutated(self._path(module).read_text()))
        (self.root / "tests" / CANARY).write_text(CANARY_TEXT)

    def check(self) -> None:
        """Prove that the copy is what tests import: a mutant that must die does."""
        self._options, options = (), self._options  # the canary is in the default lane
        outcome = self.run([CANARY], None)
        assert outcome.verdict == "passed", f"the copy is not imported: {self._log.read_text()}"
        errors = self._path("runtime/errors")
        with self._replaced(
            "runtime/errors", errors.read_text() + "\nraise RuntimeError('must die')\n"
        ):
            outcome = self.run([CANARY], None)
        assert outcome.verdict == "failed", "a module that raises an error is not noticed"
        self._options = options

    def run_mutant(self, mutation: Mutation, files: Sequence[str], timeout_s: float) -> RunOutcome:
        """Run test files against a mutant."""
        source = (ROOT / "src" / "actors" / f"{mutation.module}.py").read_text()
        with self._replaced(mutation.module, mutated(source, mutation)):
            return self.run(files, timeout_s)

    def run(self, files: Sequence[str], timeout_s: float | None) -> RunOutcome:
        """Run test files, named below `tests`, until one test fails."""
        if self._killed:
            raise RuntimeError("this copy has been killed")
        self._temporary.mkdir()
        self._temporary.chmod(0o1777)  # a PostgreSQL that root starts runs as another user
        command = [sys.executable, "-m", "pytest", *ARGUMENTS, *self._options]
        command += [f"--basetemp={self._temporary / 'b'}", *(f"tests/{name}" for name in files)]
        env = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "TMPDIR": str(self._temporary),
        }
        began = perf_counter()
        with self._log.open("wb") as log:
            process = self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status: int | None = None
        try:
            resource.prlimit(
                process.pid, resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)
            )
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            self._end(process)
        seconds = round(perf_counter() - began, 2)
        found = _FAILED.findall(self._log.read_text(errors="replace"))
        verdict = {None: "hung", 0: "passed", NO_TESTS: "empty"}.get(status, "failed")
        return RunOutcome(verdict, seconds, found[0] if found and verdict == "failed" else "")

    def kill(self) -> None:
        """End the test process of a run that another thread waits for, and start no other."""
        self._killed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End a run with all processes that its tests have started."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in self._left_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process = None
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _left_processes(self) -> Iterator[int]:
        """Yield processes in groups of their own: their environment names this copy's folder."""
        mark = f"{self.root.parent}/".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    if mark in (folder / "environ").read_bytes():
                        yield int(folder.name)

    @contextmanager
    def _replaced(self, module: str, text: str) -> Iterator[None]:
        original = self._path(module).read_text()
        self._write(module, text)
        try:
            yield
        finally:
            self._write(module, original)

    def _write(self, module: str, text: str) -> None:
        path = self._path(module)
        path.write_text(text)
        # Python takes a compiled file for current by its seconds and size: two mutants can agree.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _path(self, module: str) -> Path:
        return self.root / "src" / "actors" / f"{module}.py"


def _copy(suite: Path, place: Path) -> None:
    """Copy the tests and pytest's settings; what they read beside is linked."""
    (place / "src" / "actors").mkdir(parents=True)
    for path in suite.iterdir():
        if path.name in ("tests", "pyproject.toml"):
            _copy_entry(path, place / path.name)
        elif path.name != "src" and not path.name.startswith("."):
            (place / path.name).symlink_to(path.resolve())


def _copy_entry(path: Path, place: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, place, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(path, place)
