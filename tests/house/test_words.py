"""Measures the words of the source: names of classes, docstrings and comments."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "actors"
EXAMPLES = ROOT / "examples"
FILES = sorted([*SOURCE.rglob("*.py"), *EXAMPLES.rglob("*.py")])
CAST = {"channel_adapter", "fetch_task", "listen_task", "service", "worker"}
WORDS_MIN = 2.0
"""Of a public class name, on average."""
COMMENTS_MIN = 0.0228
"""Comment lines inside of definitions, for each line of the product. Titles of sections and blocks
at the margin do not count: such a block is most often a docstring that lost its module."""
FRAGMENTS = frozenset({"What", "Of", "Who", "Whose", "Whether"})
"""Words that begin a fragment instead of a sentence."""
REASON = re.compile(r" +#(?!.*----$)")
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")

pytestmark = pytest.mark.usefixtures("collector_is_off")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def public_classes() -> dict[str, list[str]]:
    """The files of each public class name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of attributes too."""
    for node in ast.walk(tree_of(path)):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or isinstance(node, ast.If | ast.For | ast.While | ast.With):
            continue
        for each in body:
            match each:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield each.lineno, text


def test_public_class_names_are_unique() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}


def test_class_names_are_noun_phrases() -> None:
    names = public_classes()
    assert sum(len(WORD.findall(name)) for name in names) / len(names) >= WORDS_MIN


def test_docstrings_are_sentences() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.split()[0]} …"
        for path in FILES
        for line, text in docstrings(path)
        if text.split() and text.split()[0].strip(",:") in FRAGMENTS
    ]
    assert wrong == []


def test_reasons_stand_at_their_lines() -> None:
    lines = comments = 0
    for path in FILES:
        if "testing" not in path.parts:
            text = path.read_text().splitlines()
            lines += len(text)
            comments += sum(bool(REASON.match(line)) for line in text)
    assert comments / lines >= COMMENTS_MIN


def test_the_root_holds_the_cast_alone() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == CAST | {"__init__"}
