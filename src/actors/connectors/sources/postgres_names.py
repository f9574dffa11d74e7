"""Names of PostgreSQL's tables and columns, in SQL and as columns here. Pure.

Names here are compared without regard to case, as in Spark; PostgreSQL tells ``v`` and ``V`` apart.
A column keeps its name where possible. One that cannot (an earlier column has the same name here;
two underscores at the beginning; blanks at an end, or unprintable characters) gets its name and its
number in PostgreSQL's catalog, which never changes:

>>> local_column_names([(1, "v"), (2, "V"), (3, "__time"), (4, "a ")])
{1: 'v', 2: 'V_2', 3: '_time_3', 4: 'a_4'}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from actors.model.pgwire.quoting import quote_name
from actors.runtime.errors import InvalidUsage

_PART: Final = r'("(?:[^"]|"")+"|[^".][^.]*)'
_QUALIFIED: Final = re.compile(rf"(?:{_PART}\.)?{_PART}", re.DOTALL)


def qualified_name(schema: str, table: str) -> str:
    """Return the name that a table has as an export: ``schema.table``. A part with a dot or a
    quotation mark in it is quoted as in SQL, so that no two tables share a name."""
    return ".".join(
        quote_name(part) if "." in part or '"' in part else part for part in (schema, table)
    )


def split_name(name: str) -> tuple[str, str]:
    """Return schema and table of ``orders`` (of ``public``), ``shop.orders`` or ``shop."a.b"``;
    case counts. Raises `InvalidUsage`."""
    match = _QUALIFIED.fullmatch(name)
    if match is None:
        raise InvalidUsage(
            f"{name!r} names no table: give table or schema.table, and quote a part that has a dot"
            ' or begins with a quotation mark: public."a.b"'
        )
    schema, table = (
        part[1:-1].replace('""', '"') if part and part.startswith('"') else part
        for part in match.groups()
    )
    return schema or "public", table or ""


def fold(name: str) -> str:
    """Return the form by which names here are compared: equal for names that Spark may take for
    one."""
    # Upper case first: it joins letters with several lower-case forms (final sigma).
    return name.upper().lower()


def local_column_names(
    columns: Iterable[tuple[int, str]], others: Iterable[str] = ()
) -> dict[int, str]:
    """Return the names here of (number, name) in order of their numbers. `others`: names of the
    table's columns that are not ingested, which no generated name may equal."""
    columns = list(columns)
    there = {fold(name) for _, name in columns} | {fold(name) for name in others}
    used: set[str] = set()
    found = {}
    for number, name in columns:
        here = name
        if _is_unfit(name) or fold(name) in used:
            here = _numbered(number, name)
            while fold(here) in there | used:
                here += "_"
        used.add(fold(here))
        found[number] = here
    return found


def has_local_name(here: str, number: int, name: str) -> bool:
    """Say whether `local_column_names` may give the column of that number and name this name."""
    return here == name or here.rstrip("_") == _numbered(number, name).rstrip("_")


def numbers_of(here: Sequence[str], columns: Sequence[tuple[int, str]]) -> tuple[int, ...]:
    """Return the number of the column for each name here; 0 where there is none."""
    own = {name: number for number, name in columns}
    found = []
    for each in here:
        made = (number for number, name in columns if has_local_name(each, number, name))
        found.append(own.get(each) or next(made, 0))
    return tuple(found)


def _is_unfit(name: str) -> bool:
    return name.startswith("__") or name != name.strip() or not name.isprintable()


def _numbered(number: int, name: str) -> str:
    printed = "".join(char if char.isprintable() else "_" for char in name).strip()
    return f"{re.sub(r'^__+', '_', printed)}_{number}"
