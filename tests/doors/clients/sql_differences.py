"""The section of the compatibility page on results that differ from PostgreSQL. Uses only the
standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

TITLE: Final = "Results that differ from PostgreSQL"
ERROR: Final = "an error"
"""Shown in place of a value."""
_TOLD: Final = f"""\
## {TITLE}

Functions and operators are Spark's, whichever protocol a client uses. This table lists expressions
that PostgreSQL and Penstock evaluate to different values, as psql shows them (semicolons separate
rows). Tests find them by running `tests/corpora/postgres-expressions.txt` on both.

The table omits numbers that differ only in type or trailing zeros: `extract` and ranks are `int`,
an average of integers is a `double`. Syntax that Spark does not have (`~`, `FOR UPDATE`,
`DISTINCT ON`, `AT TIME ZONE`) is refused.

| SELECT … | PostgreSQL | Penstock |
|---|---|---|
"""
_ROW: Final = re.compile(r"^\| `` (.+) `` \| (.*) \| (.*) \|$", re.MULTILINE)


class SqlDifference(NamedTuple):
    """An expression, and its two results."""

    text: str
    """The SQL after SELECT."""
    postgres: str
    here: str


def section_of(differences: Sequence[SqlDifference]) -> str:
    """Return the section of the page."""
    return _TOLD + "".join(
        f"| `` {_escaped(each.text)} `` | {_cell(each.postgres)} | {_cell(each.here)} |\n"
        for each in differences
    )


def read_section(page: str) -> list[SqlDifference]:
    """Parse the section of a page."""
    section = page.partition(f"## {TITLE}\n")[2].partition("\n## ")[0]
    return [
        SqlDifference(*(cell.replace("\\|", "|").strip("`") for cell in cells))
        for cells in _ROW.findall(section)
    ]


def are_alike(first: str, second: str) -> bool:
    """Return whether two results have the same values. Numbers may differ after the twelfth digit.

    >>> are_alike("1, a; 2.50, b", "1, a; 2.5, b"), are_alike("1; 2", "2; 1")
    (True, False)
    """
    rows, others = ([row.split(", ") for row in each.split("; ")] for each in (first, second))
    if list(map(len, rows)) != list(map(len, others)):
        return False
    return all(map(_same, chain(*rows), chain(*others)))


def _same(first: str, second: str) -> bool:
    if first == second:
        return True
    try:
        one, other = float(first), float(second)
    except ValueError:
        return False
    return one == other or abs(one - other) <= 1e-12 * abs(one)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(shown: str) -> str:
    return shown if shown == ERROR else f"`{_escaped(shown)}`" if shown else ""
