"""The relational trees and modes of the public queries, kept in one file per release of Spark.

A release of Spark may analyse a text to another plan, or rewrite it by other rules. The translated
plan is proven when a view is made, so that a view is never wrong for it; but a view may be
recomputed that was incremental, as a change of our own rules may bring about, too. The file shows
such changes.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_TITLE: Final = "# "
DIFFERENCE_LINES_MAX: Final = 40


def trees_file(folder: Path) -> Path:
    """Return the path of the trees of the installed Spark."""
    return folder / f"trees-{importlib.metadata.version('pyspark')}.txt"


def write_trees(trees: Mapping[str, str]) -> str:
    """Return the text of a file of trees.

    >>> write_trees({"tpch/q06": "Project a\\n  Scan t", "tpch/q01": "opaque: a reason"})
    '# tpch/q01\\nopaque: a reason\\n\\n# tpch/q06\\nProject a\\n  Scan t\\n'
    """
    return "\n\n".join(f"{_TITLE}{name}\n{trees[name]}" for name in sorted(trees)) + "\n"


def read_trees(text: str) -> dict[str, str]:
    """Return the trees of a file's text, by the names of their queries.

    >>> read_trees("# a\\nProject x\\n\\n# b\\nopaque: y\\n")
    {'a': 'Project x', 'b': 'opaque: y'}
    """
    parts = f"\n\n{text.rstrip()}".split(f"\n\n{_TITLE}")[1:]
    return dict(part.split("\n", 1) for part in parts)


def difference(kept: Mapping[str, str], made: Mapping[str, str]) -> str:
    """Return the differences of the new trees from the kept ones; "" if there are none. Kept trees
    without a new one are ignored, and so is the order of conjuncts.

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
