"""The relational trees and modes of the public queries, kept for each release of Spark.

A release of Spark may analyse a query to another plan, or rewrite it by other rules. The translated
plan is verified when a view is created, so a view is never wrong because of that. But a view that
was incremental may be recomputed, which a change of our own rules may cause as well. The files show
such changes. The file of the newest release has all trees, that of an older one those that differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from actors.engine.spark.spark_releases import NEWEST, installed_version, release_of

_TITLE: Final = "# "
DIFFERENCE_LINES_MAX: Final = 40


def _file_of(folder: Path, release: tuple[int, int]) -> Path:
    return folder / f"trees-{release[0]}.{release[1]}.txt"


def kept_trees(folder: Path, version: str = "") -> dict[str, str]:
    """Return the trees that are kept for a version of Spark; "" is the installed one."""
    release = release_of(version or installed_version())
    found: dict[str, str] = {}
    for each in dict.fromkeys((NEWEST, release)):
        file = _file_of(folder, each)
        if file.exists():
            found |= read_trees(file.read_text())
    return found


def keep_trees(folder: Path, made: Mapping[str, str], version: str = "") -> Path:
    """Keep new trees for a version of Spark, without changing those of other queries. Return the
    file."""
    release = release_of(version or installed_version())
    trees = kept_trees(folder, version) | dict(made)
    file = _file_of(folder, release)
    if release != NEWEST:
        newest = read_trees(_file_of(folder, NEWEST).read_text())
        trees = {
            name: tree
            for name, tree in trees.items()
            if difference({name: newest.get(name, "")}, {name: tree})
        }
    if trees:
        file.write_text(write_trees(trees))
    else:
        file.unlink(missing_ok=True)
    return file


def write_trees(trees: Mapping[str, str]) -> str:
    """Return the text of a file of trees.

    >>> write_trees({"tpch/q06": "Project a\\n  Scan t", "tpch/q01": "opaque: a reason"})
    '# tpch/q01\\nopaque: a reason\\n\\n# tpch/q06\\nProject a\\n  Scan t\\n'
    """
    return "\n\n".join(f"{_TITLE}{name}\n{trees[name]}" for name in sorted(trees)) + "\n"


def read_trees(text: str) -> dict[str, str]:
    """Parse the trees in the text of a file, by the names of their queries.

    >>> read_trees("# a\\nProject x\\n\\n# b\\nopaque: y\\n")
    {'a': 'Project x', 'b': 'opaque: y'}
    """
    parts = f"\n\n{text.rstrip()}".split(f"\n\n{_TITLE}")[1:]
    return dict(part.split("\n", 1) for part in parts)


def difference(kept: Mapping[str, str], made: Mapping[str, str]) -> str:
    """Return the differences between the new trees and the kept ones; "" if there are none. Kept
    trees without a new one are ignored, and so is the order of conjuncts.

    >>> difference({"a": "Project x", "b": "Scan t"}, {"a": "Project x"})
    ''
    >>> difference({"a": "Filter (x = 1) AND (y > x)"}, {"a": "Filter (y > x) AND (x = 1)"})
    ''
    >>> print(difference({"a": "Project x"}, {"a": "Project y"}))
    a
    -Project x
    +Project y
    """
    lines: list[str] = []
    for name, tree in made.items():
        before, now = kept.get(name, "").splitlines(), tree.splitlines()
        if list(map(_conjuncts, before)) != list(map(_conjuncts, now)):
            lines += [name, *list(difflib.unified_diff(before, now, lineterm="", n=0))[3:]]
    return "\n".join(lines[:DIFFERENCE_LINES_MAX])


def _conjuncts(line: str) -> list[str]:
    # Spark keeps some conjuncts in sets whose order depends on the queries analysed before.
    pieces = line.strip().removeprefix("Filter ").removeprefix("Join ")
    return sorted(pieces.replace(" and ", " AND ").split(" AND "))
