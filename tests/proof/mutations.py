"""Takes each rule out of a module, one at a time, and looks whether a test notices.

    python tests/proof/mutations.py [--list] [--only TEXT] [--sample N] [--seed S] [MODULE …]

A mutation leaves out a statement, answers a condition with a constant, moves the boundary of a
comparison, leaves out one side of an ``and``/``or``, or takes one argument of ``min``/``max``. Each
is made in a copy of the sources and the module's tests are run against that. One that no test
notices is printed. Those of `KNOWN` change nothing that could be noticed: the reason stands there.
Exit status 1 when any other survives. What only describes (log lines, texts, invariant checks,
`describe`) is not mutated.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
MEMORY_BYTES_MAX: Final = 4 << 30
"""Of a run of tests: a loop whose end was taken out must not take the machine with it."""
SLOWER_MAX: Final = 20
"""A mutation whose tests take so many times as long as without it hangs: that is noticed."""
ACCEPTOR: Final = (
    "wal/test_acceptor.py",
    "wal/test_acceptor_failures.py",
    "wal/test_acceptor_machine.py",
)
VIEWS: Final = ("views", "testing_kit/test_check_views.py")
TESTS: Final = {
    "wal/acceptor": ACCEPTOR,
    "wal/admission": ACCEPTOR,
    "wal/accepting": ("wal/test_wal_receiver.py",),
    "wal/receiver": ("wal/test_wal_receiver.py",),
    "wal/registry": (
        "wal/test_wal_registry.py",
        "wal/test_wal_receiver.py",
        "wal/test_wal_recovery.py",
    ),
    "wal/candidate": ("wal/test_proposer.py",),
    "wal/proposer": ("wal/test_proposer.py",),
    "wal/quorum": ("wal/test_proposer.py",),
    "wal/tail": ("wal/test_proposer.py",),
    "wal/history": ("wal/test_term_history.py", "wal/test_acceptor.py"),
    "wal/send": ("wal/test_wal_send.py",),
    "wal/replication": ("wal/test_wal_replication.py", "wal/test_wal_send.py"),
    "wal/timeline": ("wal/test_wal_send.py", "wal/test_wal_receiver.py", "wal/test_wal_offload.py"),
    "wal/timelines": ("wal/test_wal_send.py", "wal/test_wal_served.py"),
    "wal/donors": ("wal/test_wal_peers.py", "wal/test_wal_recovery.py"),
    "wal/peers": ("wal/test_wal_recovery.py", "wal/test_wal_peers.py"),
    "wal/recovery": ("wal/test_wal_storage.py", "wal/test_wal_disk.py"),
    "wal/storage": ("wal/test_wal_storage.py", "wal/test_wal_disk.py"),
    "wal/segments": ("wal/test_wal_storage.py", "wal/test_wal_disk.py"),
    "wal/control": ("wal/test_wal_control.py",),
    "wal/offload": ("wal/test_wal_offload.py",),
    "wal/archive": ("wal/test_wal_offload.py",),
    "plan/nearby": ("views/test_nearby_rows.py",),
    "plan/plan_splitting": ("plan/test_plan_splitting.py", "views/test_plan_growth.py"),
    "plan/covered": ("plan/test_covered.py",),
    "plan/compared_range": ("plan/test_compared_range.py",),
    "views/common_subplans": ("views/test_common_subplans.py", "test_doctests.py"),
    "views/rule_compared": ("views/test_rule_compared.py",),
    "views/window_reach": ("views/test_window_reach.py",),
    "views/input_uses": ("views/test_input_uses.py",),
    "views/rule_eager": ("views/test_eager_sums.py", "test_upgrades.py"),
    "views/eager_choice": ("views/test_eager_sums.py", "test_upgrades.py"),
    "arrangement/met_pairs": ("arrangement/test_met_pairs.py",),
    "dataflow/policy": ("dataflow/test_policy.py",),
    "arrangement/shared": ("arrangement/test_shared.py",),
    "views/rule_top": VIEWS,
    "views/rule_extreme": VIEWS,
    "views/rule_outer": VIEWS,
    "views/rule_one_row": VIEWS,
    "views/rule_expansion": VIEWS,
    "views/rule_distinct": VIEWS,
    "views/rule_temporal": VIEWS,
    "views/rule_kept": VIEWS,
}
"""The rules' modules, and the tests that must notice when a rule is taken out."""
KNOWN: Final[dict[tuple[str, str], str]] = {
    ("wal/registry", "slot == len(self._slots) | always True"): "one slot more stays empty",
}
"""(module, mutation as printed without its line) -> why nothing can notice it."""
UNTOLD: Final = {"validate", "describe", "history_text", "positions", "_tell_election", "text"}
"""Functions that only check or describe."""


class Mutation(NamedTuple):
    """One rule taken out: where, what, and the whole module without it."""

    module: str
    line: int
    what: str
    source: str

    @property
    def key(self) -> tuple[str, str]:
        """By which `KNOWN` names it."""
        return self.module, self.what


def mutations(module: str, source: str) -> Iterator[Mutation]:
    """Yield all of a module."""
    tree = ast.parse(source)
    nodes = list(_rules(tree))
    for index, node in enumerate(nodes):
        for what, change in _changes(node):
            other = copy.deepcopy(tree)
            twin = list(_rules(other))[index]
            change(twin)
            text = f"{_shown(node)} | {what}"
            line = getattr(node, "lineno", 0)
            yield Mutation(module, line, text, ast.unparse(ast.fix_missing_locations(other)))


def _rules(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions that do something, in a fixed order."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name in UNTOLD:
            continue
        if isinstance(child, ast.Assert | ast.AnnAssign) or _is_told(child):
            continue
        if isinstance(child, ast.Raise):
            continue
        yield child
        yield from _rules(child)


def _is_told(node: ast.AST) -> bool:
    """Whether it is a log line or a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return ast.unparse(node.value).startswith(("log.", "super().__init__", "assert_never"))


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield what to do to a node, with a name for it."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        for value in (True, False):
            if isinstance(node, ast.While) and value:
                continue
            yield f"always {value}", partial(_set, field="test", value=value)
    if isinstance(node, ast.Expr):
        yield "left out", partial(_set, field="value", value=None)
    if isinstance(node, ast.Assign | ast.AugAssign) and _is_state(node):
        yield "left out", _void
    if isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            shown = ast.unparse(node.values[at])
            yield f"without {shown}", partial(_drop, at=at)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        flipped = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
        kind = flipped.get(type(node.ops[0]))
        if kind is not None:
            yield "boundary", partial(_compare, kind=kind)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max"):
        for at in range(len(node.args) if len(node.args) > 1 else 0):
            yield f"only {ast.unparse(node.args[at])}", partial(_keep, at=at)


def _is_state(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def _set(twin: ast.AST, field: str, value: bool | None) -> None:
    setattr(twin, field, ast.Constant(value))


def _void(twin: ast.Assign | ast.AugAssign) -> None:
    """Keep the value's effects, and lose the assignment."""
    name = ast.Name("_left_out", ast.Store())
    if isinstance(twin, ast.Assign):
        twin.targets = [name]
    else:
        twin.__class__ = ast.Assign  # type: ignore[assignment]
        twin.targets = [name]  # type: ignore[attr-defined]


def _drop(twin: ast.BoolOp, at: int) -> None:
    twin.values.pop(at)


def _compare(twin: ast.Compare, kind: type[ast.cmpop]) -> None:
    twin.ops[0] = kind()


def _keep(twin: ast.Call, at: int) -> None:
    twin.args = [ast.Tuple([twin.args[at]], ast.Load())]
    twin.keywords = []


def _shown(node: ast.AST) -> str:
    shown = ast.unparse(node.test) if isinstance(node, ast.If | ast.While) else ast.unparse(node)
    return " ".join(shown.split())[:100]


class Copy:
    """The sources with one module of a room replaced; the other rooms are links."""

    def __init__(self, place: Path, room: str) -> None:
        self._sources = place / "src"
        self.timeout_s: float | None = None
        actors = self._sources / "actors"
        actors.mkdir(parents=True)
        for each in (ROOT / "src" / "actors").iterdir():
            if each.name not in (room, "__pycache__"):
                (actors / each.name).symlink_to(each)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "actors" / room, actors / room, ignore=ignored)

    def survives(self, mutation: Mutation) -> bool:
        """Return whether the module's tests pass all the same."""
        place = self._sources / "actors" / f"{mutation.module}.py"
        original = place.read_text()
        place.write_text(mutation.source)
        try:
            return self.passes(mutation.module)
        finally:
            place.write_text(original)

    def passes(self, module: str) -> bool:
        """Run a module's tests against the copy."""
        files = [str(ROOT / "tests" / name) for name in TESTS[module]]
        plain = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=1")
        env = {**os.environ, "PYTHONPATH": str(self._sources), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *plain, *files],
                env=env,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=self.timeout_s,
                preexec_fn=_bound_memory,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    """Mutate the modules that are named, or all."""
    parser = argparse.ArgumentParser(description="Takes rules out, one at a time.")
    parser.add_argument("--list", action="store_true", help="only print them")
    parser.add_argument("--only", default="", help="mutations with this text")
    parser.add_argument("--sample", type=int, default=0, help="so many of a module; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="which are in the sample")
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    given = parser.parse_args()
    failed = 0
    for module in given.modules:
        with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as place:
            trial = Copy(Path(place), module.split("/", maxsplit=1)[0])
            source = (ROOT / "src" / "actors" / f"{module}.py").read_text()
            found = [each for each in mutations(module, source) if given.only in each.what]
            if 0 < given.sample < len(found):
                found = random.Random(given.seed).sample(found, given.sample)
            if given.list:
                print(*(f"{each.module}:{each.line}: {each.what}" for each in found), sep="\n")
                continue
            trial.timeout_s, began = None, perf_counter()
            assert trial.passes(module), f"the tests of {module} fail without any mutation"
            trial.timeout_s = SLOWER_MAX * (perf_counter() - began)
            known = new = 0
            for each in found:
                if not trial.survives(each):
                    continue
                if each.key in KNOWN:
                    known += 1
                    continue
                new += 1
                print(f"SURVIVED {each.module}:{each.line}: {each.what}", flush=True)
            failed += new
            print(
                f"{module}: {len(found)} mutations, {len(found) - known - new} noticed, {known}"
                f" known to change nothing, {new} survived",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
