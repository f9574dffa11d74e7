"""Types whose equality is equality of exact values, so that rows can be looked up by key.

Spark widens both sides of ``=`` to a common type. Where that rounds (bigint = double), reads text
(string = int), needs a time zone (date = timestamp) or overflows (decimals of more than 38 digits
together), many held values equal one given value, and no lookup finds them all. Arrangements draw
the same line: for other types they read everything.
"""

from __future__ import annotations

import re
from typing import Final

_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_DECIMAL_DIGITS_MAX: Final = 38
_OTHER_NAMES: Final = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
    "dec": "decimal",
    "numeric": "decimal",
}


def is_key_comparable(given: str, held: str) -> bool:
    """Return whether a lookup by values of one Spark type finds all equal values of another."""
    one, other = _plain(given), _plain(held)
    # NULL equals nothing, so a lookup by it misses nothing.
    if one == other or "void" in (one, other):
        return True
    if {one, other} == {"float", "double"}:
        return True
    digits = [_digits(one), _digits(other)]
    if one in _INTEGER_DIGITS and other in _INTEGER_DIGITS:
        return True
    # Exact numbers stay exact while their common decimal has at most 38 digits.
    (before, after), (before2, after2) = digits
    return min(before, before2) >= 0 and (
        max(before, before2) + max(after, after2) <= _DECIMAL_DIGITS_MAX
    )


def _plain(kind: str) -> str:
    low = kind.strip().lower()
    name, bracket, rest = low.partition("(")
    if name in ("varchar", "char"):
        return "string"
    return _OTHER_NAMES.get(name, name) + bracket + rest


def _digits(kind: str) -> tuple[int, int]:
    """Return (digits before, digits after the point); negative if the type is no exact number."""
    if kind in _INTEGER_DIGITS:
        return _INTEGER_DIGITS[kind], 0
    if not re.fullmatch(r"decimal(\(.*\))?", kind):
        return -1, 0
    found = [int(part) for part in re.findall(r"\d+", kind)] or [10]
    precision, scale = found[0], found[1] if len(found) > 1 else 0
    return precision - scale, scale
