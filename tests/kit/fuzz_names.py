"""Odd names for random scripts, such as users give to their tables and columns.

`with_odd_names` renames the tables, views and columns of a case. All names are quoted: keywords,
names of functions, capitals, spaces, punctuation, letters beyond ASCII. The names of one case
differ in more than case. Aliases are not changed.
"""

from __future__ import annotations

import random
import re
from typing import Final

import msgspec

from tests.kit.fuzz import FuzzCase, FuzzColumn, FuzzTable

ODD_NAMES: Final = (
    "select", "from", "order", "group", "table", "index", "where", "values", "user", "key", "case",
    "when", "end", "null", "true", "interval", "date", "timestamp", "row", "partition", "over",
    "left", "natural", "using", "exists", "not", "in", "is", "all", "union", "distinct", "cast",
    "count", "sum", "min", "max", "avg", "first", "coalesce", "year", "now", "current_date",
    "upper", "concat", "struct", "array", "map", "explode", "length", "rank", "lag", "rand",
    "Amount", "ID", "CamelCase", "UPPER_CASE", "unit price", "a b c", " lead", "trail ", "größe",
    "名前", "1st", "a-b", "a,b", "it's", "50%", "x#y", "a.b", "(n)", "a=b", "n", "w", "t", "d0",
    "s0", "h0", "r0", "i0", "i0_k", "o_x", "diff", "time", "error", "weight", "value", "temp", "id",
)  # fmt: skip
_OWN: Final = re.compile(r"'[^']*'|\b(?:[kg]|[caxktv]\d+|cte)\b")
"""Matches a text in quotes, or a name made by the fuzzer."""


def with_odd_names(case: FuzzCase, pick: random.Random) -> FuzzCase:
    """Return the same case with other names."""
    names = list(ODD_NAMES)
    pick.shuffle(names)
    free = list({name.lower(): name for name in names}.values())
    chosen: dict[str, str] = {}

    def odd(name: str) -> str:
        if name not in chosen:
            number = len(chosen)
            word = free[number % len(free)]
            chosen[name] = f"`{word}`" if number < len(free) else f"`{word} {number}`"
        return chosen[name]

    def renamed(text: str) -> str:
        return _OWN.sub(lambda found: found[0] if found[0][0] == "'" else odd(found[0]), text)

    tables = tuple(
        FuzzTable(
            odd(table.name),
            tuple(FuzzColumn(odd(c.ref), c.type) for c in table.columns),
            table.keyed,
        )
        for table in case.tables
    )
    views = tuple((odd(name), renamed(sql)) for name, sql in case.views)
    changes = tuple(
        msgspec.structs.replace(change, table=odd(change.table)) for change in case.changes
    )
    return msgspec.structs.replace(case, tables=tables, views=views, changes=changes)
