"""No test knows how fast the machine is, or which release of a program it has.

A deadline on real time that a slow machine may miss makes a test red for no fault of the code. The
rules look at the syntax of all files below `tests`:

- a deadline of less than `LEAST_S` is refused: in calls that wait, in settings and constants that
  are named as one, in comparisons with a clock, and in loops of so many short sleeps;
- so is a limit of pytest's for one test that is not above the general one;
- so is an exact version of a program of the machine.

Time that the test has in its own hands is not real: the fixture `stage` and `VirtualTimeLoop`, the
fixture `patient_loop` and `PatientLoop`, and `Deadlines`. A deadline that is meant to pass says so
in its line or the one above, with the reason for which nothing else is hit: ``# expires: …``. A
version that is the project's own: ``# version: …``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("collector_is_off")

LEAST_S = 30
REMEDY = (
    "wait for PATIENCE_S, run on virtual time (`stage`), on a `patient_loop` or by `Deadlines`; "
    "if it is meant to pass, say so in its line: # expires: …"
)
MARK = re.compile(r"#.*\b(?:expires|version): \S")
DEADLINE = re.compile(
    r"(?:.*_)?(?:timeout|deadline|patience|takeover|lease|silence|idle)(?P<unit>_ms|_s|_seconds)?",
    re.IGNORECASE,
)
"""Names of deadlines. Without a unit they are seconds, and only `BARE` are taken for deadlines."""
BARE = re.compile(r"(?:.*_)?(?:timeout|deadline|patience)", re.IGNORECASE)
WAITS: Mapping[str, int] = {
    "fail_after": 0,
    "move_on_after": 0,
    "asyncio.timeout": 0,
    "asyncio.wait_for": 1,
    "settimeout": 0,
    "select.select": 3,
    "join": 0,
    "wait": 0,
}
"""Calls with the place of their limit, in seconds; without a dot methods of that name too."""
POLLS = ("join", "wait", "select.select")
"""In a `while` they are pauses of a loop that looks again."""
CLOCKS = ("monotonic", "perf_counter", "time.time")
DURATION = re.compile(r"(\d+)(ms|s|min|h)")
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
VERSIONS = ("server_version", "server_version_num", "java_version", "version_info", "__version__")
OWN_TIME = ("on_virtual_time", "VirtualTimeLoop", "PatientLoop", "ActorIsolation")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def general_limit_s() -> float:
    """The limit that pytest has for each test."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    return float(options["timeout"])


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def is_named(name: str, known: str) -> bool:
    return name == known or name.endswith(f".{known}")


class DeadlineRules(ast.NodeVisitor):
    """Finds what a file has against the rules, as (line, text)."""

    def __init__(self, text: str) -> None:
        self.found: list[tuple[int, str]] = []
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._numbers = self._constants()
        self._timed: set[str] = set()
        """Names of this function whose values come from a clock."""
        self._sleeps = False
        self._loops = 0
        self._driven = False
        """True where a test lets deadlines of messages pass itself."""

    def look(self) -> list[tuple[int, str]]:
        if not self._owns_time(self._tree.body):
            self.visit(self._tree)
        return sorted(set(self.found))

    # -- values --------------------------------------------------------------------------------

    def _constants(self) -> dict[str, float]:
        """Numbers of the module that are not marked: those that are say what they are."""
        found: dict[str, float] = {}
        for node in self._tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = self._number(node.value, found)
                if value is not None and not self._is_marked(node):
                    found |= {each.id: value for each in targets if isinstance(each, ast.Name)}
        return found

    def _number(self, node: ast.AST | None, known: Mapping[str, float]) -> float | None:
        match node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                return known.get(name)
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.Add() as op, right=right):
                one, other = self._number(left, known), self._number(right, known)
                if one is None or other is None:
                    return None
                if isinstance(op, ast.Div):
                    return one / other
                return one * other if isinstance(op, ast.Mult) else one + other
        return None

    def _is_short(self, node: ast.AST | None, unit_s: float = 1.0) -> bool:
        value = self._number(node, self._numbers)
        return value is not None and 0 < value * unit_s < LEAST_S

    def _is_marked(self, node: ast.AST) -> bool:
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        above = self._lines[max(first - 2, 0) : first - 1]
        lines = [
            *(line for line in above if line.lstrip().startswith("#")),
            *self._lines[first - 1 : last],
        ]
        return any(MARK.search(line) for line in lines)

    def _refuse(self, node: ast.AST, text: str) -> None:
        if not self._is_marked(node):
            self.found.append((getattr(node, "lineno", 1), text))

    # -- whose time it is ----------------------------------------------------------------------

    def _owns_time(self, body: list[ast.stmt]) -> bool:
        """Whether a module runs on a loop of its own: by its marks, or as a script."""
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                    if self._has_fixture(value):
                        return True
                case ast.ImportFrom(names=names):
                    if any(alias.name == "PatientLoop" for alias in names):
                        return True
        return False

    def _has_fixture(self, node: ast.AST) -> bool:
        return any(
            isinstance(each, ast.Constant) and each.value in ("stage", "patient_loop")
            for each in ast.walk(node)
        )

    def _is_virtual(self, node: Function | ast.ClassDef) -> bool:
        if any(self._has_fixture(each) for each in node.decorator_list):
            return True
        if isinstance(node, ast.ClassDef):
            return any(self._is_virtual(each) for each in node.body if isinstance(each, Function))
        return any(
            (isinstance(each, ast.arg) and each.arg in ("stage", "patient_loop"))
            or (isinstance(each, ast.Name | ast.Attribute) and dotted(each) in OWN_TIME)
            for each in ast.walk(node)
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not self._is_virtual(node):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        if self._is_virtual(node):
            return
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(reversed(arguments), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        for argument, default in defaults:
            self._named(argument.arg, default)
        before = self._timed, self._loops, self._driven
        self._timed, self._loops = set(self._timed), 0
        self._driven |= any(
            isinstance(each, ast.Call) and dotted(each.func) == "Deadlines"
            for each in ast.walk(node)
        )
        self.generic_visit(node)
        self._timed, self._loops, self._driven = before

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    # -- what is refused -----------------------------------------------------------------------

    def _named(self, name: str, value: ast.AST | None) -> None:
        """Refuse a short value of something that is named as a deadline."""
        found = DEADLINE.fullmatch(name)
        if value is None or found is None or (self._driven and name == "deadline_ms"):
            return
        if found["unit"] is None and not BARE.fullmatch(name):
            return
        short = self._is_short(value, 0.001 if (found["unit"] or "").lower() == "_ms" else 1.0)
        match value:
            case ast.Constant(value=str(text)) if duration := DURATION.fullmatch(text):
                short = int(duration[1]) * UNITS[duration[2]] < LEAST_S
        if short:
            self._refuse(value, f"{name} = {ast.unparse(value)} is below {LEAST_S} s: {REMEDY}")

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assigned(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node.target, node.value)
        self.generic_visit(node)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        self._named(dotted(target).rpartition(".")[2], value)
        if isinstance(target, ast.Name) and self._reads_clock(value):
            self._timed.add(target.id)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._named(key.value, value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func)
        for keyword in node.keywords:
            self._named(keyword.arg or "", keyword.value)
        for known, place in WAITS.items():
            if is_named(name, known) and len(node.args) > place:
                polls = known in POLLS and self._loops > 0
                if not polls and self._is_short(node.args[place]):
                    self._refuse(node, f"{ast.unparse(node)} is below {LEAST_S} s: {REMEDY}")
        if is_named(name, "mark.timeout") and node.args:
            limit_s = self._number(node.args[0], self._numbers)
            if limit_s is not None and limit_s <= general_limit_s():
                self._refuse(node, f"{ast.unparse(node)}: every test has {general_limit_s():g} s")
        before, self._sleeps = self._sleeps, self._sleeps or is_named(name, "sleep")
        self.generic_visit(node)
        self._sleeps = before

    def _reads_clock(self, node: ast.AST) -> bool:
        return any(
            (isinstance(each, ast.Call) and any(is_named(dotted(each.func), c) for c in CLOCKS))
            or (isinstance(each, ast.Name) and each.id in self._timed)
            for each in ast.walk(node)
        )

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add) and not self._sleeps:
            for clock, more in ((node.left, node.right), (node.right, node.left)):
                if self._reads_clock(clock) and self._is_short(more):
                    self._refuse(node, f"{ast.unparse(node)} is below {LEAST_S} s: {REMEDY}")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            if isinstance(op, ast.Gt | ast.GtE):
                left, right = right, left
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and (
                self._reads_clock(left) and self._is_short(right)
            ):
                self._refuse(node, f"{ast.unparse(node)} is below {LEAST_S} s: {REMEDY}")
            if isinstance(op, ast.Eq | ast.In) and any(
                dotted(one).rpartition(".")[2] in VERSIONS and _is_literal(other)
                for one, other in ((left, right), (right, left))
            ):
                self._refuse(
                    node,
                    f"{ast.unparse(node)}: another release has another version; compare what both "
                    "sides have, or if it is the project's own say so: # version: …",
                )
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        match node.iter:
            case ast.Call(func=ast.Name(id="range"), args=[count]) if _may_end_early(node):
                times = self._number(count, self._numbers)
                pause_s = sum(
                    self._number(each.args[0], self._numbers) or 0.0
                    for each in ast.walk(node)
                    if isinstance(each, ast.Call)
                    and is_named(dotted(each.func), "anyio.sleep")
                    and each.args
                )
                if times is not None and 0 < times * pause_s < LEAST_S:
                    self._refuse(node.iter, f"{times:g} looks, {pause_s:g} s apart: {REMEDY}")
        self.generic_visit(node)


def _may_end_early(loop: ast.For | ast.AsyncFor) -> bool:
    """Whether a loop looks for something: it ends when that is there."""
    return any(isinstance(each, ast.Break | ast.Return) for each in ast.walk(loop))


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Tuple | ast.List) and all(map(_is_literal, node.elts))
    )


def checked_files() -> Iterator[Path]:
    """All files of tests but the simulators, which run on virtual time, and this one's samples."""
    simulators = ROOT / "tests" / "simulators"
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if simulators not in path.parents and path != Path(__file__).resolve():
            yield path


def test_no_test_depends_on_the_machines_speed_or_releases() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in checked_files()
        for line, text in DeadlineRules(path.read_text()).look()
    ]
    assert not wrong, "\n".join(wrong)


# -- the rules themselves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "async def test(): await asyncio.wait_for(x, 5)",
        "async def test():\n    async with asyncio.timeout(5): pass",
        "def test():\n    with anyio.fail_after(5): pass",
        "def test():\n    with fail_after(0.5 * 3): pass",
        "LIMIT = 10\ndef test():\n    with anyio.move_on_after(LIMIT): pass",
        "def test(): subprocess.run(['x'], timeout=20)",
        "def test(): thread.join(2)",
        "def test(): thread.join(timeout=2)",
        "def test(): assert event.wait(1.5)",
        "def test(): Settings(connect_timeout_ms=800)",
        "def test(): replace(settings, idle_timeout_ms=400, keepalive_ms=20)",
        "QUICK = Settings(reader_lease_ms=1_000)",
        "STANDBY = {'takeover_ms': 6_000}",
        "READ_TIMEOUT_S = 5.0",
        "IDLE_MS: Final = 400",
        "async def ask(number, deadline_ms=5000): pass",
        "async def ask(number, *, deadline_ms: float = 5000): pass",
        "with postgres_server(wal_sender_timeout='10s') as server: pass",
        "@pytest.mark.timeout(60)\ndef test(): pass",
        "pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]",
        "def test():\n    assert time.monotonic() - began < 5",
        "def test():\n    assert 5 > perf_counter() - began",
        "def test():\n    took = time.perf_counter() - began\n    assert took <= 0.5",
        "def test():\n    end = time.monotonic() + 10\n    while time.monotonic() < end: pass",
        "def test():\n    for _ in range(50):\n        if x: break\n        await anyio.sleep(0.1)",
        "def test(): assert db.info.server_version == 150018",
        "def test(): assert '17.0.1' == ready.java_version",
        "def test(): assert sys.version_info in ((3, 11), (3, 12))",
        "def test(stage): pass\ndef other(): thread.join(2)",
    ],
)
def test_what_is_refused(text: str) -> None:
    assert len(DeadlineRules(text).look()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def test():\n    with anyio.fail_after(PATIENCE_S): pass",
        "def test():\n    with anyio.fail_after(200): pass",
        "def test(): subprocess.run(['x'], timeout=PROGRAM_S)",
        "async def test(): await client.wait_for('v', 5)",
        "async def test(stage): await asyncio.wait_for(x, 5)",
        "async def test(stage):\n    async def ask(): await asyncio.wait_for(x, 5)",
        "def test():\n    async def main(): await asyncio.wait_for(x, 5)\n    on_virtual_time(m)",
        "class House:\n    def __init__(self, stage): pass\n    def ask(self, deadline_ms=5): pass",
        "@pytest.mark.usefixtures('patient_loop')\nasync def test(): Settings(idle_timeout_ms=5)",
        "pytestmark = pytest.mark.usefixtures('patient_loop')\nQUICK = Settings(idle_timeout_ms=5)",
        "from actors.testing.patient_loop import PatientLoop\nCALL_TIMEOUT_S = 5",
        "def test():\n    deadlines = Deadlines(patch, Late)\n    ask(deadline_ms=20)",
        "SOON_TIMEOUT_S = 5  # expires: it hangs\nwith anyio.fail_after(SOON_TIMEOUT_S):\n    pass",
        "def test():\n    with anyio.move_on_after(0.1):  # expires: nothing comes\n        pass",
        "def test():\n    # expires: nothing comes\n    Settings(idle_timeout_ms=5)",
        "def test():\n    while thread.is_alive():\n        thread.join(0.2)",
        "def test(): refused(deadline_ms=0)",
        "def test(): Settings(keepalive_ms=20, maintenance_ms=5)",
        "@pytest.mark.timeout(1800)\ndef test(): pass",
        "def test():\n    assert time.monotonic() - began >= 0.5",
        "def test():\n    print(time.monotonic() - began)",
        "def test():\n    for _ in range(100):\n        if x: return\n        await anyio.sleep(1)",
        "def test():\n    for _ in range(3):\n        await anyio.sleep(1)",
        "def test(): await anyio.sleep(time.monotonic() + 0.1 - time.monotonic())",
        "with postgres_server(checkpoint_timeout='30s', wal_sender_timeout='1min') as server: pass",
        "def test(): assert wire.server_version >= 130_000",
        "def test(): assert db.info.server_version == other.server_version",
        "def test(): assert db.info.server_version == 150000  # version: the one that we declare",
        "def test(): assert state.version == 3",
    ],
)
def test_what_passes(text: str) -> None:
    assert DeadlineRules(text).look() == []


def test_a_finding_says_what_to_do() -> None:
    ((line, text),) = DeadlineRules("def test():\n    thread.join(2)\n").look()
    assert line == 2
    assert "thread.join(2) is below 30 s" in text
    assert "PATIENCE_S" in text
    assert "# expires:" in text
