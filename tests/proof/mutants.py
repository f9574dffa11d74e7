"""Makes mutants: versions of a module with one rule taken out. Draws a sample over all rooms.

A mutation leaves out a statement, answers a condition with a constant, moves the boundary of a
comparison, leaves out one side of an ``and``/``or``, or takes one argument of ``min``/``max``. What
only describes (log lines, texts, invariant checks, `describe`) is not mutated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

ROOM_MUTANTS_MIN: Final = 3
"""Each room has so many in a draw, if it has so many mutations."""
ROOMS_APART: Final[Mapping[str, str]] = {
    "testing": "the kit with which tests are written: a weaker kit is no bug of the service",
}
"""Rooms that are never drawn, and why."""
SPARK_ONLY: Final = "runs in the engine's child: no test reaches one of its functions without Spark"
MODULES_APART: Final[Mapping[str, str]] = {
    f"engine/spark/{name}": SPARK_ONLY
    for name in (
        "analysis",
        "answer_files",
        "archive_training",
        "bridge",
        "bucket_reading",
        "bucket_tasks",
        "bucket_writing",
        "catalyst_front",
        "connect",
        "difference",
        "plan_reader",
        "prepared_plan",
        "reference_spark",
        "remote",
        "stored_contents",
        "subtraction",
    )
}
"""Modules that are never drawn, and why. The draw must not depend on the tests: this is a table."""
UNTOLD: Final = {"validate", "describe", "history_text", "positions", "_tell_election", "text"}
"""Functions that only check or describe."""
NEVER: Final = {"TYPE_CHECKING", "__name__ == '__main__'"}
"""Conditions that are the same in every test."""
FLIPPED: Final = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}

Change = Callable[[Any], None]


class Mutation(NamedTuple):
    """Names one rule of a module, and what is done to it."""

    module: str
    line: int
    what: str
    node: int
    """Index of the rule's node among those that `_rules` yields."""
    change: int
    """Index of the change among those of the node."""

    @property
    def key(self) -> tuple[str, str]:
        """Return the name under which `KNOWN` has it."""
        return self.module, self.what

    @property
    def room(self) -> str:
        """Return the room with its folder (``durable/persist``, ``wal``), or a module of the top
        level itself."""
        *folders, own = self.module.split("/")
        return "/".join(folders[:2]) or own

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


def mutations(module: str, source: str) -> Iterator[Mutation]:
    """Yield all mutations of a module, in the order of its text."""
    for index, node in enumerate(_rules(ast.parse(source))):
        shown = ""
        for number, (what, _) in enumerate(_changes(node)):
            shown = shown or _shown(node)
            yield Mutation(module, getattr(node, "lineno", 0), f"{shown} | {what}", index, number)


def mutated(source: str, mutation: Mutation) -> str:
    """Return the text of the module with the rule taken out."""
    tree = ast.parse(source)
    node = list(_rules(tree))[mutation.node]
    change = list(_changes(node))[mutation.change][1]
    change(node)
    return ast.unparse(ast.fix_missing_locations(tree))


def unmutated(source: str) -> str:
    """Return the text as `mutated` writes it, with all rules."""
    return ast.unparse(ast.parse(source))


def modules_of(actors: Path) -> dict[str, Path]:
    """Return the modules that can be drawn, by name (``wal/quorum``), with their files."""
    found = {}
    for path in sorted(actors.rglob("*.py")):
        module = path.relative_to(actors).with_suffix("").as_posix()
        if module.partition("/")[0] not in ROOMS_APART and module not in MODULES_APART:
            found[module] = path
    return found


def draw(rooms: Mapping[str, list[Mutation]], count: int, seed: int) -> list[Mutation]:
    """Draw mutants of all rooms. Each room has `ROOM_MUTANTS_MIN`, and its part of the others.

    A room's mutants come from its own order, which depends on the seed and on its mutations
    alone. A change of another room only moves the place at which that order is cut off.
    """
    drawn = []
    for room, share in shares({room: len(found) for room, found in rooms.items()}, count).items():
        order = Random(f"{seed}:{room}").sample(rooms[room], len(rooms[room]))
        drawn += sorted(order[:share])
    return drawn


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide `count` over rooms of so many mutations, by largest remainders.

    >>> shares({"wal": 100, "views": 50, "sequencer": 4}, 20)
    {'sequencer': 3, 'views': 7, 'wal': 10}
    """
    found = {room: min(ROOM_MUTANTS_MIN, sizes[room]) for room in sorted(sizes) if sizes[room]}
    left = {room: sizes[room] - share for room, share in found.items()}
    others = max(0, min(count - sum(found.values()), sum(left.values())))
    exact = {room: others * size / max(1, sum(left.values())) for room, size in left.items()}
    for room, part in exact.items():
        found[room] += int(part)
    last = others - sum(int(part) for part in exact.values())
    for room in sorted(exact, key=lambda room: (int(exact[room]) - exact[room], room))[:last]:
        found[room] += 1
    return found


def by_room(actors: Path) -> dict[str, list[Mutation]]:
    """Return all mutations that can be drawn, by their room."""
    rooms: dict[str, list[Mutation]] = {}
    for module, path in modules_of(actors).items():
        for each in mutations(module, path.read_text()):
            rooms.setdefault(each.room, []).append(each)
    return rooms


def _rules(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions that do something, in a fixed order."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name in UNTOLD:
            continue
        if isinstance(child, ast.Assert | ast.AnnAssign) or _is_told(child):
            continue
        if isinstance(child, ast.Raise):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in NEVER:
            continue
        yield child
        yield from _rules(child)


def _is_told(node: ast.AST) -> bool:
    """Return whether it is a log line or a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return ast.unparse(node.value).startswith(("log.", "super().__init__", "assert_never"))


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
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
        kind = FLIPPED.get(type(node.ops[0]))
        if kind is not None:
            yield "boundary", partial(_compare, kind=kind)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max"):
        for at in range(len(node.args) if len(node.args) > 1 else 0):
            yield f"only {ast.unparse(node.args[at])}", partial(_keep, at=at)


def _is_state(node: ast.Assign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)


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
