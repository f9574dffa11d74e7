"""What can be wrong with words: a class name used twice, a fragment for a docstring, a name of a
module or file that does not exist (any more), a page that the site does not list."""

from __future__ import annotations

import ast
import re
import tomllib
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
FRAGMENTS = frozenset({"What", "Of", "Where", "Who", "Whose", "Whether"})
"""Words that begin a fragment instead of a sentence."""
MODULE = re.compile(r"(?<![\w./])actors(?:\.[a-z_]\w*)+")
FILE = re.compile(
    r"(?<![\w./-])(?:src|tests|docs|bench|deploy|examples)/[\w./-]+\.(?:py|md|toml|yaml|view)\b"
)
INVENTED = {
    "actors.connectors.sources.primes",
    "bench/NAME.py",
    "src/actors/connectors/sources/primes.py",
    "tests/scripts/spark_pairs_counted.view",
}
"""Modules and files of examples, which do not exist."""

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


def test_docstrings_are_sentences() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.split()[0]} …"
        for path in FILES
        for line, text in docstrings(path)
        if text.split() and text.split()[0].strip(",:") in FRAGMENTS
    ]
    assert wrong == []


def names_of_modules() -> set[str]:
    """The dotted names of all modules and of what they define, at two levels."""
    found = {"actors"}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found |= {module, module.rpartition(".")[0]}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{module}.{node.name}")
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{module}.{each.asname or each.name}" for each in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(f"{module}.{node.id}")
    return found


def texts() -> Iterator[tuple[Path, str]]:
    """Docs, and the docstrings of the source."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if path.name != "CHANGELOG.md":  # tells of names that are gone
            yield path, path.read_text()
    for path in FILES:
        for _, text in docstrings(path):
            yield path, text


def test_names_of_modules_and_files_exist() -> None:
    known, wrong = names_of_modules(), []
    for path, text in texts():
        where = path.relative_to(ROOT)
        for name in MODULE.findall(text):
            owner = name.rpartition(".")[0]
            is_method = owner in known and owner.rpartition(".")[2][:1].isupper()
            if name not in known | INVENTED and not is_method:
                wrong.append(f"{where}: {name}")
        missing = {name for name in FILE.findall(text) if not (ROOT / name).exists()}
        wrong += [f"{where}: {name}" for name in sorted(missing - INVENTED)]
    assert wrong == []


def test_every_page_is_on_the_site() -> None:
    """`zensical.toml` lists every page of docs/, once."""

    def pages(entry: object) -> list[str]:
        match entry:
            case str():
                return [entry]
            case dict():
                return [page for each in entry.values() for page in pages(each)]
            case list():
                return [page for each in entry for page in pages(each)]
        raise TypeError(entry)

    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = [page for page in pages(site) if page.startswith("docs/")]
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
    )


def test_the_root_holds_the_cast_alone() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == CAST | {"__init__"}
