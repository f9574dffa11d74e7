"""Finds volatile calls in a query by the words of its text.

It serves engines that do not show Catalyst's own flags (a server behind Spark Connect where there
is no Java of our own, the in-memory one), and looks for names of functions that are called, words
that Spark takes for a call unless a column has that name, and literals that stand for the day. An
engine in our own JVM looks at the analysed plan instead (``PlanInspector.java``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from actors.plan.jobs import VolatileCall

_CLOCK_WORDS: Final = """
now current_timestamp current_date curdate localtimestamp current_time localtime
current_user user session_user current_database current_schema current_catalog
current_timezone version
"""
_CLOCK: Final = frozenset(_CLOCK_WORDS.split())
_CHANCE_WORDS: Final = """
rand random randn randstr uniform uuid shuffle monotonically_increasing_id
spark_partition_id input_file_name input_file_block_start input_file_block_length
reflect java_method try_reflect aes_encrypt
"""
_CHANCE: Final = frozenset(_CHANCE_WORDS.split())
_ORDER_DEPENDENT_WORDS: Final = """
first first_value last last_value any_value collect_list array_agg collect_set listagg
string_agg mode max_by min_by
"""
_ORDER_DEPENDENT: Final = frozenset(_ORDER_DEPENDENT_WORDS.split())
"""Aggregates where Spark itself is free to choose: not deterministic, but not refused."""
_BARE_WORDS: Final = """
current_catalog current_date current_schema current_time current_timestamp current_user
localtime localtimestamp session_user user
"""
_BARE: Final = frozenset(_BARE_WORDS.split())
"""Calls that may be written without parentheses."""
_MOVING_DAY: Final = re.compile(
    r"""(['"])\s*(?:now|today|yesterday|tomorrow)\b[^'"]*\1""", re.IGNORECASE
)
"""Literals that may stand for the day. More than do: words do not tell what they are compared
with."""
_QUOTED: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/""", re.DOTALL
)
_CALLED: Final = re.compile(r"([a-z_]\w*)\s*\(")
_WORD: Final = re.compile(r"[a-z_]\w*")
_NOW: Final = re.compile(r"\bunix_timestamp\s*\(\s*\)")


def volatility_of(sql: str, columns: Collection[str] = ()) -> VolatileCall | None:
    """Return the first call of a text that is volatile, or None. `columns`: names of all columns
    that it may read, in lower case."""
    moving = _MOVING_DAY.search(sql)
    if moving is not None:
        return VolatileCall(f"the literal {moving.group(0)}", clock=True)
    bare = _bare(sql)
    words = set(_WORD.findall(bare))
    # Spark takes a bare word for a column first.
    names = _called(bare) | (words & _BARE).difference(columns)
    for name in sorted(names & (_CLOCK | _CHANCE)):
        return VolatileCall(f"{name}()", clock=name in _CLOCK)
    # With an argument it is a function of that argument.
    if _NOW.search(bare):
        return VolatileCall("unix_timestamp()", clock=True)
    if "tablesample" in words:
        return VolatileCall("TABLESAMPLE")
    return None


def has_free_choice(sql: str) -> bool:
    """Return whether a text calls an aggregate that may choose among the rows of a group."""
    return bool(_called(_bare(sql)) & _ORDER_DEPENDENT)


def _bare(sql: str) -> str:
    """Return the text in lower case, without literals, quoted names and comments."""
    return _QUOTED.sub("''", sql).lower()


def _called(bare: str) -> set[str]:
    return set(_CALLED.findall(bare))
