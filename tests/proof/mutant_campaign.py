"""Runs many mutants, several at a time, and says which of them the tests notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Final, TypeVar

from module_tests import ModuleTests
from mutant_runs import MutantCheckout, RunOutcome
from mutants import Mutation

HUNG_SECONDS: Final = 30.0
HUNG_FACTOR: Final = 5
"""A mutant hangs when its tests take so many times as long as without it, and `HUNG_SECONDS`."""
FILE_SECONDS_MAX: Final = 300.0
"""A test file that takes longer is not used."""
KNOWN: Final[dict[tuple[str, str], str]] = {
    ("wal/registry", "slot == len(self._slots) | always True"): "one slot more stays empty",
    ("wal/registry", "value == self._value | always False"): "a task that is woken looks again",
    (
        "wal/registry",
        "not future.done() or future.cancelled() | always True",
    ): "a future that is not in the list cannot be removed from it",
}
"""(module, mutation as printed without its line) -> why nothing can notice it."""
DIED: Final = ("died", "hung")

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class MutantRecord:
    """Says what became of a mutant."""

    module: str
    line: int
    what: str
    verdict: str = ""
    """`died`, `hung`, `survived` or `known`: a survivor of `KNOWN`; "" before it has run."""
    seconds: float = 0.0
    tests: Sequence[str] = ()
    noticed_by: str = ""
    """The test that failed; "" if the tests could not be collected."""

    @property
    def name(self) -> str:
        """Return what is printed of it."""
        return f"{self.module}:{self.line}: {self.what}"


@dataclass
class MutantCampaign:
    """Mutants with the tests that are to notice them, and the copies in which they run."""

    mutants: Sequence[Mutation]
    copies: Sequence[MutantCheckout]
    report: Callable[[str], None]
    seconds_max: float
    """Of a module's tests; at least one file is run."""
    tests: dict[str, list[str]] = field(default_factory=dict)
    """The test files of each module."""
    outcomes: dict[str, RunOutcome] = field(default_factory=dict)
    """How each file ended without any mutation; those that are here already are not run."""

    def choose(self, named: Sequence[str], second: bool) -> None:
        """Choose the test files of each module: those that are named, if some are."""
        modules = dict.fromkeys(each.module for each in self.mutants)
        suite = None if named else ModuleTests(self.copies[0].root, second)
        self.tests = {each: suite.of(each) if suite else list(named) for each in modules}

    def check(self) -> None:
        """Prove that the copies are what tests import."""
        for copy in self.copies:
            copy.check()

    def measure(self) -> None:
        """Run the files without any mutation, and keep those that pass and take little time."""
        wanted = {name for names in self.tests.values() for name in names}
        files = sorted(wanted - self.outcomes.keys())
        for done, (name, outcome) in enumerate(self._each(files, _passes), 1):
            self.outcomes[name] = outcome
            if outcome.verdict not in ("passed", "empty"):
                why = outcome.failed or outcome.verdict
                self.report(f"LEFT OUT tests/{name}, without any mutation: {why}")
            elif not done % 20:
                self.report(f"{done} of {len(files)} test files have run without any mutation")
        for module, names in self.tests.items():
            passed = [name for name in names if self.outcomes[name].verdict == "passed"]
            self.tests[module] = kept = list(self._within_time(passed))
            if not kept:
                self.report(f"NO TESTS of {module}")

    def seconds(self, module: str) -> float:
        """Return how long a module's tests take without any mutation."""
        return sum(self.outcomes[name].seconds for name in self.tests[module])

    def run(self) -> Iterator[MutantRecord]:
        """Run all mutants; yield each when it has ended."""
        for mutation, outcome in self._each(self.mutants, self._run_one):
            verdict = {"failed": "died", "hung": "hung"}.get(outcome.verdict, "survived")
            if verdict == "survived" and mutation.key in KNOWN:
                verdict = "known"
            yield MutantRecord(
                mutation.module,
                mutation.line,
                mutation.what,
                verdict,
                outcome.seconds,
                tuple(self.tests[mutation.module]),
                outcome.failed,
            )

    def _within_time(self, names: Iterable[str]) -> Iterator[str]:
        left = self.seconds_max
        for place, name in enumerate(names):
            seconds = self.outcomes[name].seconds
            if seconds <= left or not place:
                left -= seconds
                yield name

    def _run_one(self, copy: MutantCheckout, mutation: Mutation) -> RunOutcome:
        files = self.tests[mutation.module]
        if not files:
            return RunOutcome("passed", 0.0)
        timeout_s = HUNG_SECONDS + HUNG_FACTOR * self.seconds(mutation.module)
        return copy.run_mutant(mutation, files, timeout_s)

    def _each(
        self, given: Iterable[Given], work: Callable[[MutantCheckout, Given], Found]
    ) -> Iterator[tuple[Given, Found]]:
        """Work on each item in a copy that nothing else uses; yield results as they come."""
        free: Queue[MutantCheckout] = Queue()
        for copy in self.copies:
            free.put(copy)

        def in_a_copy(item: Given) -> Found:
            copy = free.get()
            try:
                return work(copy, item)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(len(self.copies)) as pool, self._ended_on_error(pool):
            waiting = {pool.submit(in_a_copy, item): item for item in given}
            for done in as_completed(waiting):
                yield waiting[done], done.result()

    @contextmanager
    def _ended_on_error(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """End what runs when the caller gives up, by an interrupt for example."""
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in self.copies:
                copy.kill()
            raise


def _passes(copy: MutantCheckout, name: str) -> RunOutcome:
    """Run a file without any mutation; once more when it fails, since the machine may be busy."""
    first = copy.run([name], FILE_SECONDS_MAX)
    return first if first.verdict in ("passed", "empty") else copy.run([name], FILE_SECONDS_MAX)


def lost(before: str, now: str, against: bool) -> bool:
    """Return whether a mutant that died in the older suite survives in the newer one.

    Args:
        before: The verdict of the earlier run.
        now: The verdict of this run.
        against: Whether this run has the older suite.
    """
    older, newer = (now, before) if against else (before, now)
    return older in DIED and newer not in DIED
