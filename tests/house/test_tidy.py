"""Rules over the source text: what a reviewer should not have to say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "actors"
EXAMPLES = ROOT / "examples" / "flights"
FILE_LINES_MAX = 800
TEST_FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
TIMELESS = ("runtime.kernel", "engine.spark", "testing")
"""Boxes that may touch clocks, tasks and randomness directly."""
BANNED = (
    "asyncio.sleep",
    "asyncio.create_task",
    "asyncio.ensure_future",
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.sleep",
)
ROOMS = (
    "runtime",
    "model",
    "durable",
    "engine",
    "wal",
    "connectors",
    "replica",
    "control",
    "doors",
)
"""Lowest first. A room imports only itself and rooms that stand before it."""
CAST = ("channel_adapter", "fetch_task", "listen_task", "worker")
"""Actors of a replica, at the root: they import what `replica` may, and it imports them."""
ROOT_FILES = (*CAST, "service")
"""Files at the root, besides the public names. `service` puts all rooms together."""
EXAMPLE = "penstock_flights"
"""The demo, a program that uses the product."""
BESIDES = {
    "doors.commands": {"service", "testing", EXAMPLE},
    EXAMPLE: {"service", "testing"},
}
"""Exceptions: what boxes may import besides rooms. `penstock` starts services, checks and the
demo."""
ARROWS_MAX = 231
"""Pairs of boxes of which one imports the other."""
ROOM_ARROWS_MAX = 85
"""Such pairs of rooms (and files at the root), and of boxes within a room."""
GLUED = frozenset(
    {
        "control.controller.replicas.instance",
        "control.controller.replicas.replica",
        "doors.commands.wal_relay",
    }
)
"""Modules in which another file's text still stands under a title. None may be added."""
TITLE = re.compile(r"# -- .*----$")
"""The title of a section, at the margin."""
SPARK = "engine.spark"
SPARK_CHILD_MAY = (
    "engine.spark",
    "model.plan",
    "engine.catalyst",
    "runtime.errors",
    "runtime.settings",
    "runtime.threshold_probes",
    "runtime.progress",
    "runtime.frames",
    "runtime.msgpack_bounds",
    "runtime.telemetry",
)
"""The engine's child is a program of its own: it needs the framing, and no messages of others."""
SPARK_PARENT_SIDE = ("launch.py",)
"""What stands in engine/spark/ and runs in the service: it starts the child and talks to it."""
SPARK_USERS_SIDE = "source"
"""A folder of engine/spark/ that runs in a user's own Spark."""
SPARK_PROTOCOL = ("doors.connect_gateway", "pyspark.sql.connect.proto")
"""The box that speaks Spark Connect needs the classes of its messages, and nothing else of
PySpark: they are generated, and start no Spark."""
NAMES = ("utils", "helpers", "manager", "common")

FILES = sorted([*SOURCE.rglob("*.py"), *EXAMPLES.rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "Makefile",
        "Dockerfile",
        "deploy/*",
        "deploy/helm/**/*",
        ".ci/run",
        "docs/**/*",
        "requirements/*",
        "src/**/*.py",
        "examples/**/*.py",
        "tests/**/*.py",
        "bench/**/*.py",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path != Path(__file__).resolve()
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax, the module first: parsed and walked once for all rules."""
    return tuple(ast.walk(ast.parse(text_of(path))))


def module_named(path: Path) -> str:
    base = next((each for each in (SOURCE.parent, EXAMPLES) if each in path.parents), ROOT)
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def box_of(module: str) -> str:
    """The box of a module: a folder of a room, a room's loose files, or a file at the root."""
    parts = module.removeprefix("actors.").split(".")
    is_folder = len(parts) > 2 or (SOURCE / "/".join(parts)).is_dir()
    return ".".join(parts[:2]) if parts[0] in ROOMS and is_folder else parts[0]


MODULES = {module_named(path) for path in FILES}
BOUND = [path for path in FILES if module_named(path).split(".")[1:2] not in ([], ["testing"])]
"""All but the public names, and the testing kit, which may import anything."""

pytestmark = pytest.mark.usefixtures("collector_is_off")


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """The process goes on to other tests without the syntax trees."""
    yield
    text_of.cache_clear()
    nodes_of.cache_clear()


def all_wrong(paths: Iterable[Path], wrong: Callable[[Path], list[str]]) -> list[str]:
    """What of each file is against a rule. A rule is one test: one a file is slow to collect."""
    return [f"{name_of(path)}: {what}" for path in paths for what in wrong(path)]


def functions(nodes: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = 0
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        docstring = (first.end_lineno or 0) - first.lineno + 1
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every module that is imported, wherever it stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else node.module


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_files_and_functions_are_short() -> None:
    def wrong(path: Path) -> list[str]:
        lines = len(text_of(path).splitlines())
        long = [
            f"{node.name} (line {node.lineno}): {code_lines(node)} lines"
            for node in functions(nodes_of(path))
            if code_lines(node) > FUNCTION_LINES_MAX
        ]
        within = lines <= (TEST_FILE_LINES_MAX if path in TESTS else FILE_LINES_MAX)
        return long if within else [f"{lines} lines", *long]

    assert all_wrong(FILES + TESTS, wrong) == []


def test_public_things_are_documented() -> None:
    """Modules with code, public classes, and public functions and methods outside nested ones."""

    def wrong(path: Path) -> list[str]:
        tree = nodes_of(path)[0]
        assert isinstance(tree, ast.Module)
        if not tree.body:
            return []
        missing = [] if ast.get_docstring(tree) else ["the module"]
        for node in tree.body:
            match node:
                case (
                    ast.ClassDef(name=name)
                    | ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                ) if not name.startswith("_") and not ast.get_docstring(node):
                    missing.append(f"{name} (line {node.lineno})")
        return missing

    assert all_wrong(FILES, wrong) == []


def test_a_file_is_one_text() -> None:
    """Two files that were put together are made one text: loggers and type variables stand above
    the first definition, and a title is one line, whose rules are in docstrings."""

    def wrong(path: Path) -> list[str]:
        if module_named(path).removeprefix("actors.") in GLUED:
            return []
        tree = nodes_of(path)[0]
        assert isinstance(tree, ast.Module)
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        begun = next((node.lineno for node in tree.body if isinstance(node, definitions)), 0)
        late = [
            f"line {node.lineno}: {dotted(node.value.func)} stands after the first definition"
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and dotted(node.value.func) in ("logging.getLogger", "TypeVar", "ParamSpec")
            and 0 < begun < node.lineno
        ]
        lines = text_of(path).splitlines()
        return late + [
            f"line {number}: more than a title"
            for number, (line, below) in enumerate(pairwise(lines), 1)
            if TITLE.match(line) and below.startswith("#")
        ]

    assert all_wrong(FILES, wrong) == []


def test_clocks_tasks_and_randomness_come_through_the_context() -> None:
    def wrong(path: Path) -> list[str]:
        found = [
            f"line {node.lineno}: {dotted(node)}"
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and dotted(node) in BANNED
        ]
        # `from random import Random` is a type: what draws must be handed in
        found += [
            f"line {node.lineno}: import random"
            for node in nodes_of(path)
            if isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names)
        ]
        return found

    assert (
        all_wrong([path for path in FILES if box_of(module_named(path)) not in TIMELESS], wrong)
        == []
    )


def test_layers() -> None:
    """A room imports only what stands lower; only engine/spark imports PySpark, but for
    messages."""
    assert all_wrong(BOUND, out_of_layer) == []


def out_of_layer(path: Path) -> list[str]:
    box = box_of(module_named(path))
    room = box.split(".")[0]
    if room not in (*ROOMS, *ROOT_FILES, EXAMPLE):
        return [f"{room} is no room"]
    wrong = []
    for line, module in imported(nodes_of(path)):
        if (
            module.split(".")[0] in ("pyspark", "py4j")
            and box != SPARK
            and (box, module) != SPARK_PROTOCOL
        ):
            wrong.append(f"line {line}: {module}")
        if not module.startswith(("actors.", EXAMPLE)):
            continue
        other = box_of(module)
        if not may_import(box, other):
            wrong.append(f"line {line}: {module}")
        below = module.removeprefix("actors.")
        if (
            box == SPARK
            and path.name not in SPARK_PARENT_SIDE
            and path.parent.name != SPARK_USERS_SIDE
            and not any(below == may or below.startswith(f"{may}.") for may in SPARK_CHILD_MAY)
        ):
            wrong.append(f"line {line}: {module}: the engine's child may not import it")
    return wrong


def may_import(box: str, other: str) -> bool:
    """Return whether a box may import another one, circles apart."""
    room, there = box.split(".")[0], other.split(".")[0]
    if box == other or other in BESIDES.get(box, ()):
        return True
    if there in ROOMS:
        return room not in ROOMS + CAST or height(there) <= height(room)
    return there in CAST and (room == "replica" or room in ROOT_FILES)


def height(room: str) -> int:
    return ROOMS.index("replica" if room in CAST else room)


def arrows() -> dict[str, set[str]]:
    """The boxes that each box imports."""
    found: dict[str, set[str]] = {}
    for path in BOUND:
        box = box_of(module_named(path))
        mine = found.setdefault(box, set())
        for _, module in imported(nodes_of(path)):
            if module.startswith("actors."):
                mine.add(box_of(module))
    for box, others in found.items():
        others.discard(box)
        others.discard("testing")
    return {box: others for box, others in found.items() if box != EXAMPLE}


def test_boxes_have_no_circle() -> None:
    """Folders of rooms, their loose files, and the files at the root can be put in an order."""
    left = arrows()
    while ready := [box for box, others in left.items() if not others & left.keys()]:
        for box in ready:
            del left[box]
    assert {box: sorted(others & left.keys()) for box, others in left.items()} == {}


def test_boxes_have_few_arrows() -> None:
    """A new arrow is a decision: another one goes for it."""
    found = [(box, other) for box, others in arrows().items() for other in others]
    rooms = [(box.split(".")[0], other.split(".")[0]) for box, other in found]
    within = sum(room == other for room, other in rooms)
    between = {(room, other) for room, other in rooms if room != other}
    assert len(found) <= ARROWS_MAX
    assert within + len(between) <= ROOM_ARROWS_MAX


def imported_at_once(body: Iterable[ast.stmt], modules: Iterable[str]) -> Iterator[str]:
    """Modules that are loaded with this one: neither in functions nor for types alone."""
    for node in body:
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    whole = f"{module}.{alias.name}"
                    yield whole if whole in modules else module
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If() | ast.Try():
                yield from imported_at_once(node.body, modules)


def test_no_circle_of_imports() -> None:
    """Of the product, and of the simulators: modules can be put in an order."""
    paths = [*FILES, *sorted((ROOT / "tests" / "simulators").rglob("*.py"))]
    modules = {module_named(path): path for path in paths}
    left = {}
    for name, path in modules.items():
        tree = nodes_of(path)[0]
        assert isinstance(tree, ast.Module)
        left[name] = {each for each in imported_at_once(tree.body, modules) if each in modules}
        left[name].discard(name)
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    assert sorted(left) == []


def test_the_architecture_page_tells_the_rooms() -> None:
    """In the order of `ROOMS`, a row of the table for each, with its folders and loose files."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| room | folders and files | what is in it |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)/` \| (.*?) \|", table, re.M)
    assert [room for room, _ in rows] == list(ROOMS)
    for room, cell in rows:
        folder = SOURCE / room
        there = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        told = re.findall(r"`([\w/]+)`", cell)
        # Rooms of many loose files and no folders tell them as a whole.
        assert set(told) == (there | files if there else set()), room
        assert len(told) == len(set(told)), room


def test_the_architecture_page_draws_the_rooms() -> None:
    """Each room, highest first, before all rooms that it imports."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    begin = "Each room, and those that it imports:\n\n```\n"
    picture = page.partition(begin)[2].partition("```")[0]
    above: dict[str, set[str]] = {room: set() for room in ROOMS}
    for box, others in arrows().items():
        room = box.split(".")[0]
        above.get(room, set()).update({other.split(".")[0] for other in others} - {room})
    lines = [line.split() for line in picture.splitlines()]
    highest = ROOMS[::-1]
    assert lines == [[room, *(each for each in highest if each in above[room])] for room in highest]


def test_names_say_something() -> None:
    def wrong(path: Path) -> list[str]:
        parts = (part.removesuffix(".py") for part in path.relative_to(ROOT).parts)
        return [part for part in parts if part in NAMES]

    assert all_wrong(FILES + TESTS, wrong) == []


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    assert all_wrong(FILES, lambda path: words.findall(text_of(path))) == []


def test_tests_neither_sleep_nor_skip() -> None:
    words = re.compile(r"(?:time|asyncio)\.sleep\(|mark\.(?:skip|flaky|xfail)")
    # Simulators run in virtual time: a sleep there is a condition.
    simulators = ROOT / "tests" / "simulators"
    others = [
        path
        for path in TESTS
        if path != Path(__file__).resolve() and simulators not in path.parents
    ]
    assert all_wrong(others, lambda path: words.findall(text_of(path))) == []


def test_test_files_have_unique_names() -> None:
    """Test folders are no packages: two files of one name would shadow each other."""
    packaged = ROOT / "tests" / "simulators"
    names = [
        path.name for path in TESTS if path.name != "conftest.py" and packaged not in path.parents
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    loose = {path.parent for path in (ROOT / "tests").rglob("__init__.py")}
    assert [each for each in loose if packaged not in (each, *each.parents)] == []


def test_no_place_of_one_machine() -> None:
    """No path of a person's machine, no registry's host, no bench-mate's folder."""
    places = re.compile(
        r"/(?:home|Users|root|work)/[\w.-]+|files\.pythonhosted|pypi\.org|\.\./shared"
    )
    assert all_wrong(TEXTS, lambda path: places.findall(text_of(path))) == []


def test_requirements_are_pinned_with_hashes() -> None:
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        text = path.read_text()
        assert "://" not in text, path.name
        blocks = re.split(r"\n(?=\S)", text.strip())
        for block in (block for block in blocks if not block.startswith("#")):
            assert "==" in block.splitlines()[0], (path.name, block)
            assert "--hash=sha256:" in block, (path.name, block)
