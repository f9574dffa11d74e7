"""Rules over the source text: what a reviewer should not have to say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "actors"
FILE_LINES_MAX = 800
TEST_FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
TIMELESS = ("kernel", "spark", "testing")
"""Rooms that may touch clocks, tasks and randomness directly."""
BANNED = (
    "asyncio.sleep",
    "asyncio.create_task",
    "asyncio.ensure_future",
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.sleep",
)
LAYERS: tuple[tuple[str, ...], ...] = (
    ("threshold_probes",),
    ("telemetry", "spans", "settings", "progress", "errors", "memory_ledger"),
    ("tracing",),
    ("kernel",),
    ("plan",),
    ("catalyst",),
    ("protocol",),
    ("sql",),
    ("pg_catalog",),
    ("object_store", "transport"),
    ("pgwire",),
    ("access",),
    ("client",),
    ("persist",),
    ("wal",),
    ("connectors.sources",),
    ("views", "spark", "arrangement", "connectors.sinks"),
    ("sql_session",),
    ("connectors.ingest",),
    (
        "channel_adapter",
        "sequencer",
        "listen_task",
        "fetch_task",
        "spark_executor",
        "connectors",
    ),
    ("dataflow",),
    ("compute", "storage"),
    ("worker",),
    ("cluster",),
    ("controller",),
    ("connectors.factory", "connect_gateway"),
    ("pg_server",),
    ("service",),
    ("commands.console",),
    ("commands.status", "wal.push_command", "wal.relay_server"),
    ("wal.relay_command",),
    ("commands.shard_reports", "commands.stores"),
    (
        "commands.inspect",
        "commands.backup",
        "commands.copy_to",
        "commands.copy_from",
        "commands.connectors",
        "commands.ddl",
        "commands.shards",
        "commands.sql_shell",
        "wal.commands",
    ),
    ("demo", "commands"),
)
"""Lowest first. A room imports only what stands lower, or itself. `testing` may import all."""
WITHIN = {
    "telemetry": {"errors"},
    "spans": {"telemetry", "errors"},
    "settings": {"errors"},
    "progress": {"errors"},
    "commands": {"demo", "testing"},
    "demo": {"testing"},
}
"""The exceptions: what may be imported from the same layer, and from `testing` by what runs it."""
SPARK_CHILD_MAY = (
    "spark",
    "plan",
    "catalyst",
    "errors",
    "settings",
    "threshold_probes",
    "progress",
    "protocol.frames",
    "protocol.msgpack_bounds",
    "telemetry",
)
"""The engine's child is a program of its own; of the protocol it needs the framing alone."""
SPARK_PARENT_SIDE = ("launch.py",)
"""What stands in spark/ and runs in the service: it starts the child and talks to it."""
SPARK_USERS_SIDE = "source"
"""A folder of spark/ that runs in a user's own Spark."""
SPARK_PROTOCOL = ("connect_gateway", "pyspark.sql.connect.proto")
"""The room that speaks Spark Connect needs the classes of its messages, and nothing else of
PySpark: they are generated, and start no Spark."""
NAMES = ("utils", "helpers", "manager", "common")

FILES = sorted(SOURCE.rglob("*.py"))
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
        "docs/*",
        "requirements/*",
        "src/**/*.py",
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


def room_of(path: Path) -> str:
    """A file's room: the longest entry of `LAYERS` that its dotted name begins with."""
    return room_named(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def room_named(module: str) -> str:
    parts = module.split(".")
    heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((head for head in heads if rank(head) is not None), parts[0])


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
    """(line, dotted name) of everything imported, wherever it stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "actors":
                for alias in node.names:
                    yield node.lineno, f"actors.{alias.name}"
            else:
                yield node.lineno, node.module


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def rank(room: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if room in layer), None)


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

    assert all_wrong([path for path in FILES if room_of(path) not in TIMELESS], wrong) == []


def test_layers() -> None:
    """A room imports only what stands lower; only spark/ imports PySpark, but for messages."""
    bound = [path for path in FILES if room_of(path) not in ("testing", "__init__")]
    assert all_wrong(bound, out_of_layer) == []


def out_of_layer(path: Path) -> list[str]:
    room = room_of(path)
    here = rank(room)
    if here is None:
        return [f"{room} stands in no layer"]
    wrong = []
    for line, module in imported(nodes_of(path)):
        if (
            module.split(".")[0] in ("pyspark", "py4j")
            and room != "spark"
            and (room, module) != SPARK_PROTOCOL
        ):
            wrong.append(f"line {line}: {module}")
        if not module.startswith("actors."):
            continue
        other = room_named(module.removeprefix("actors."))
        allowed = other == room or other in WITHIN.get(room, ())
        there = rank(other)
        if not allowed and (there is None or there >= here):
            wrong.append(f"line {line}: {module}")
        below = module.removeprefix("actors.")
        if (
            room == "spark"
            and path.name not in SPARK_PARENT_SIDE
            and path.parent.name != SPARK_USERS_SIDE
            and not any(below == may or below.startswith(f"{may}.") for may in SPARK_CHILD_MAY)
        ):
            wrong.append(f"line {line}: {module}: the engine's child may not import it")
    return wrong


def module_named(path: Path) -> str:
    base = ROOT / "src" if SOURCE in path.parents else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def test_every_layer_is_there_or_later() -> None:
    """No room without a layer, so that none escapes `test_layers`."""
    rooms = {room_of(path) for path in FILES} - {"__init__", "testing"}
    assert sorted(room for room in rooms if rank(room) is None) == []


def test_the_architecture_page_tells_the_rooms() -> None:
    """In the order of `LAYERS`, a row of the table for each."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("| room | what is in it |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.M)
    rooms = [
        tuple(name.rstrip("/").replace("/", ".") for name in re.findall(r"`([^`]+)`", cell))
        for cell in cells
    ]
    assert rooms == list(LAYERS)


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
