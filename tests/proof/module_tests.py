"""Chooses the test files that must notice when a rule of a module is taken out.

`TESTS` names them for some modules. For the others they follow from the imports:

1. the files named after the module (`test_shard.py`, `test_shard_rules.py` and
   `test_persist_shard.py` for `durable/persist/shard`) that import it, themselves or through a
   helper,
2. the files that import it themselves and are in the test folder of its room,
3. the other files that import it themselves,
4. files that import it by way of other modules: those named after it, then those in the test folder
   of its room or named after the room, then the nearest ones, counted in imports.

The first three groups give at most `FILES_MAX` files. The fourth fills up what they lack: to
`FILES_MIN` files if they have any, to `FILES_MAX` if they have none. The first group begins with
the file that has exactly the module's name. Otherwise the file that imports the fewest modules
comes first, since it is about fewer things; in the fourth group it is the one that imports the most
modules of the room, since it uses more of it.

A name that a package re-exports counts as an import of the module that defines it. The name of a
module in a text counts too (`monkeypatch.setattr("actors.…")`). The test folder of a room has the
name of one of the module's own folders, or stands in `HOMES`; for modules of the top level `HOMES`
names them. Left out are the folders of `APART`, and files whose tests all have marks of
`LEFT_OUT_MARKS`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

FILES_MAX: Final = 6
FILES_MIN: Final = 3
HOMES: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("replica", "service"),
    "object_store": ("persist", "sinks"),
    "sql_session": ("pg_server",),
    "transport": ("cluster",),
}
"""Test folders of rooms, besides those of their own name."""
APART: Final = ("clients", "corpora", "deploy", "docs", "proof", "scripts", "simulators")
"""Folders of `tests` that are not about modules: programs of clients, pages, campaigns."""
SECOND: Final = "second"
"""The mark of tests that only the second lane runs."""
LEFT_OUT_MARKS: Final = frozenset({"spark", "long", SECOND})
OWN: Final = 1
"""Distance of a module that a test file imports itself."""
HELPED: Final = 2
"""Distance of a module that a helper of the test file imports."""
NEAR: Final = 3
"""The first groups: of the last one only as many files are taken as are lacking."""
ACCEPTOR: Final = (
    "wal/test_acceptor.py",
    "wal/test_acceptor_failures.py",
    "wal/test_acceptor_machine.py",
)
VIEWS: Final = (
    "engine/views/test_compile_view.py",
    "engine/views/test_rules_of_rows.py",
    "testing/test_check_views.py",
    "engine/views/test_relational_maintained.py",
    "engine/views/test_maintained_views.py",
)
EAGER: Final = ("engine/views/test_eager_sums.py", "service/test_upgrades.py")
TESTS: Final[Mapping[str, tuple[str, ...]]] = {
    "wal/acceptor": ACCEPTOR,
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
    "wal/history": ("wal/test_term_history.py", "wal/test_acceptor.py"),
    "wal/listener": ("wal/test_wal_send.py", "wal/test_wal_served.py"),
    "wal/replication": ("wal/test_wal_replication.py", "wal/test_wal_send.py"),
    "wal/timeline": ("wal/test_wal_send.py", "wal/test_wal_receiver.py", "wal/test_wal_offload.py"),
    "wal/timelines": ("wal/test_wal_send.py", "wal/test_wal_served.py"),
    "wal/peers": ("wal/test_wal_recovery.py", "wal/test_wal_peers.py"),
    "wal/storage": ("wal/test_wal_storage.py", "wal/test_wal_disk.py"),
    "wal/segments": ("wal/test_wal_storage.py", "wal/test_wal_disk.py"),
    "wal/control": ("wal/test_wal_control.py",),
    "wal/offload": ("wal/test_wal_offload.py",),
    "wal/archive": ("wal/test_wal_offload.py",),
    "model/plan/nearby": (
        "engine/views/test_nearby_rows.py",
        "model/plan/test_covered.py",
        "model/plan/test_compared_range.py",
    ),
    "model/plan/plan_splitting": (
        "model/plan/test_plan_splitting.py",
        "engine/views/test_plan_growth.py",
    ),
    "engine/views/common_subplans": (
        "engine/views/test_common_subplans.py",
        "house/test_doctests.py",
    ),
    "engine/views/rule_constants": VIEWS,
    "engine/views/rule_single_rows": VIEWS,
    "engine/views/rule_range_lookup": ("engine/views/test_rule_range_lookup.py",),
    "engine/views/input_uses": ("engine/views/test_input_uses.py",),
    "engine/views/rule_eager": EAGER,
    "engine/views/eager_choice": EAGER,
    "replica/dataflow/policy": ("replica/dataflow/test_policy.py",),
    "replica/dataflow/state_lookups": (
        "replica/dataflow/test_state_lookups.py",
        "durable/arrangement/test_met_pairs.py",
    ),
    "durable/arrangement/shared": ("durable/arrangement/test_shared.py",),
    "engine/views/measures": VIEWS,
    "engine/views/rule_distinct": VIEWS,
    "engine/views/rule_expansion": VIEWS,
    "engine/views/rule_extreme": VIEWS,
    "engine/views/rule_group": VIEWS,
    "engine/views/rule_join": VIEWS,
    "engine/views/rule_stored_rows": VIEWS,
    "engine/views/rule_linear": VIEWS,
    "engine/views/rule_outer": VIEWS,
    "engine/views/rule_recompute": VIEWS,
    "engine/views/rule_temporal": VIEWS,
    "engine/views/rule_top": VIEWS,
    "engine/views/rule_window": (
        "engine/views/test_window_reach.py",
        "engine/views/test_rules_of_rows.py",
        "engine/views/test_nearby_rows.py",
    ),
    "doors/commands/backup": ("durable/persist/test_backups.py", "doors/commands/test_cli.py"),
    "doors/commands/shard_reports": ("doors/commands/test_shards.py",),
    "doors/commands/stores": ("doors/commands/test_shards.py", "durable/persist/test_backups.py"),
    "doors/commands/sql_shell": ("doors/commands/test_cli.py",),
    "runtime/memory_ledger": ("service/test_memory.py",),
    "worker": (
        "replica/test_worker.py",
        "testing/test_simulated_workers.py",
        "replica/cluster/test_cluster.py",
    ),
}
"""The tests of modules of which imports say too little, or too much."""
_MODULE: Final = re.compile(r"actors(?:\.\w+)+")


class SuiteFile(NamedTuple):
    """A test file, and how far each module of the sources is from it, in imports."""

    path: Path
    distances: Mapping[str, int]
    own: frozenset[str]
    """Those that it imports itself."""


class SourceImports:
    """Knows the modules of the sources, and which of them each one imports."""

    def __init__(self, sources: Path) -> None:
        trees = {
            ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__"): (
                path,
                ast.parse(path.read_text()),
            )
            for path in sorted((sources / "actors").rglob("*.py"))
        }
        self._modules = set(trees)
        # Packages re-export names, some of them for types alone: they are imported on first use.
        self._exports = {
            name: {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for name, (path, tree) in trees.items()
            if path.name == "__init__.py"
        }
        # A package leads no further: who takes a name from it needs the module of that name alone.
        self.of = {
            name: set() if name in self._exports else self.imported_by(tree) - {name}
            for name, (_, tree) in trees.items()
        }

    def imported_by(self, tree: ast.Module) -> set[str]:
        """Return the modules that a file imports, or names in a text."""
        texts = (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _MODULE.fullmatch(node.value)
        )
        return {found for name in {*_imported(tree), *texts} for found in self._resolved(name)}

    def distances(self, own: set[str], helped: set[str]) -> dict[str, int]:
        """Return the number of imports on the shortest way to each module."""
        found = dict.fromkeys(helped, HELPED) | dict.fromkeys(own, OWN)
        level, distance = set(found), HELPED
        while level:
            distance += 1
            level = {other for module in level for other in self.of[module]} - found.keys()
            found |= dict.fromkeys(level, distance)
        return found

    def _resolved(self, name: str) -> Iterator[str]:
        """Yield the module that defines a dotted name, and packages that re-export it."""
        while name and name not in self._modules:
            package, _, last = name.rpartition(".")
            if last in self._exports.get(package, {}):
                yield package
            name = self._exports.get(package, {}).get(last, package)
        if name:
            yield name


class ModuleTests:
    """Knows which modules the test files of a checkout import."""

    def __init__(self, checkout: Path, second: bool = False) -> None:
        self._tests = checkout / "tests"
        self._left_out = LEFT_OUT_MARKS - {SECOND} if second else LEFT_OUT_MARKS
        self._imports = SourceImports(checkout / "src")
        paths = sorted(self._tests.rglob("*.py"))
        # Most test folders are not packages: a helper is imported by the name of its file alone.
        packages = {path.parent for path in paths if path.name == "__init__.py"}
        self._helpers = {
            ".".join(path.relative_to(checkout).with_suffix("").parts)
            if path.parent in packages
            else path.stem: path
            for path in paths
            if not path.name.startswith(("test_", "conftest"))
        }
        self._files = [
            file for path in paths if path.stem.startswith("test_") for file in self._read(path)
        ]

    def of(self, module: str) -> list[str]:
        """Return the test files of a module (``wal/quorum``), below `tests`, the best one first."""
        # The suite may be another one, in which these files have other names.
        if named := [each for each in TESTS.get(module, ()) if (self._tests / each).is_file()]:
            return named
        name = f"actors.{module.replace('/', '.')}".removesuffix(".__init__")
        found = sorted(
            (self._order(file, module, file.distances[name]), self._shown(file))
            for file in self._files
            if name in file.distances
        )
        near = sum(group <= NEAR for (group, *_), _ in found)
        count = max(near, FILES_MIN) if near else FILES_MAX
        return [shown for _, shown in found[: min(count, FILES_MAX)]]

    def _order(self, file: SuiteFile, module: str, distance: int) -> tuple[int, ...]:
        """Return the group of a file, and its order within the group."""
        *folders, own = module.split("/")
        homes = {*folders, *(home for each in folders or [""] for home in HOMES.get(each, ()))}
        place = file.path.relative_to(self._tests).parts[:-1]
        at_home = place[-1] in homes if place else not folders
        named = _is_named_after(file.path.stem, own, folders)
        if named and distance <= HELPED:
            return 1, file.path.stem != f"test_{own}", len(file.own)
        if distance == OWN:
            return (2 if at_home else 3), len(file.own)
        at_home |= any(_is_named_after(file.path.stem, folder, []) for folder in folders)
        room = ".".join(["actors", *folders, ""])
        mates = sum(each.startswith(room) for each in file.own)
        return 4, not named, not at_home, 0 if at_home else distance, -mates, len(file.own)

    def _shown(self, file: SuiteFile) -> str:
        return file.path.relative_to(self._tests).as_posix()

    def _read(self, path: Path) -> Iterator[SuiteFile]:
        """Yield the file, if some of its tests can be run here."""
        tree = ast.parse(path.read_text())
        if set(path.relative_to(self._tests).parts) & set(APART) or self._leaves_out(tree):
            return
        own = self._imports.imported_by(tree)
        waiting, helpers, helped = self._helpers_of(tree), set[Path](), set[str]()
        while waiting:
            helper = waiting.pop()
            helpers.add(helper)
            helper_tree = ast.parse(helper.read_text())
            helped |= self._imports.imported_by(helper_tree)
            waiting |= self._helpers_of(helper_tree) - helpers
        yield SuiteFile(path, self._imports.distances(own, helped), frozenset(own))

    def _helpers_of(self, tree: ast.Module) -> set[Path]:
        names = {way for name in _imported(tree) for way in (name, name.rpartition(".")[0])}
        return {self._helpers[name] for name in names if name in self._helpers}

    def _leaves_out(self, tree: ast.Module) -> bool:
        """Return whether all tests of a file are marked to be left out."""
        marked = [node for node in tree.body if isinstance(node, ast.Assign) and self._marks(node)]
        if any(ast.unparse(node.targets[0]) == "pytestmark" for node in marked):
            return True
        tests = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
        ]
        return bool(tests) and all(
            any(self._marks(each) for each in test.decorator_list) for test in tests
        )

    def _marks(self, node: ast.AST) -> bool:
        """Return whether a mark below this node leaves a test out."""
        return any(
            isinstance(each, ast.Attribute)
            and each.attr in self._left_out
            and isinstance(each.value, ast.Attribute)
            and each.value.attr == "mark"
            for each in ast.walk(node)
        )


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a file imports, but not those that only types need."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        match waiting.pop():
            case ast.Import(names=names):
                yield from (f"{alias.name}." for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                waiting += orelse
            case node:
                waiting += ast.iter_child_nodes(node)


def _is_named_after(stem: str, own: str, folders: list[str]) -> bool:
    """Return whether a test file has the name of the module, alone or among other words.

    >>> [_is_named_after(f"test_{each}", "shard", ["persist"]) for each in ("shard", "shards")]
    [True, False]
    """
    name = f"_{stem.removeprefix('test_')}_"
    return f"_{own}_" in name or name == "".join(f"_{each}" for each in (*folders, own)) + "_"
