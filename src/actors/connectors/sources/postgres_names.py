"""Names of PostgreSQL's tables and columns: in SQL, as exports, and as local columns. Pure.

Local names are case-insensitive, as in Spark; PostgreSQL distinguishes ``v`` from ``V``. A column
keeps its name where possible. It gets its name plus its column number, which never changes, if an
earlier column has the same local name, or if its name starts with two underscores, starts or ends
with whitespace, or contains unprintable characters:

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
    """Return the name of a table as an export: ``schema.table``. A part that contains a dot or a
    quotation mark is quoted as in SQL, so that no two tables share a name."""
    return ".".join(
        quote_name(part) if "." in part or '"' in part else part for part in (schema, table)
    )


def split_name(name: str) -> tuple[str, str]:
    """Split ``orders`` (in schema ``public``), ``shop.orders`` or ``shop."a.b"`` into schema and
    table. Case-sensitive. Raises `InvalidUsage`."""
    match = _QUALIFIED.fullmatch(name)
    if match is None:
        raise InvalidUsage(
            f"invalid table name {name!r}: expected table or schema.table; quote a part that "
            'contains a dot or starts with a quotation mark, as in public."a.b"'
        )
    schema, table = (
        part[1:-1].replace('""', '"') if part and part.startswith('"') else part
        for part in match.groups()
    )
    return schema or "public", table or ""


def fold(name: str) -> str:
    """Return the case-folded form of a local name. Names that Spark may treat as equal have equal
    forms."""
    # Upper case first: it unifies letters with several lower-case forms (final sigma).
    return name.upper().lower()


def local_column_names(
    columns: Iterable[tuple[int, str]], others: Iterable[str] = ()
) -> dict[int, str]:
    """Map column numbers to local names, for (number, name) pairs in order of their numbers.

    `others` are the table's columns that are not ingested; no generated name may equal one of them.
    """
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
    """Return whether `local_column_names` may give the name `here` to the column with this number
    and name."""
    return here == name or here.rstrip("_") == _numbered(number, name).rstrip("_")


def numbers_of(here: Sequence[str], columns: Sequence[tuple[int, str]]) -> tuple[int, ...]:
    """Return the column number of each local name; 0 where no column matches."""
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
