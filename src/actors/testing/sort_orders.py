"""Sort orders of rows in pure Python, as Spark's ORDER BY defines them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, Final

from actors.testing.expressions import Columns, compile_text

_SORT: Final = re.compile(r"(.*) (ASC|DESC) NULLS (FIRST|LAST)", re.DOTALL)


def sort_key(order: tuple[str, ...], scope: Columns) -> Callable[[tuple[Any, ...]], Any]:
    """Return the function that maps a row to its sort key in an order."""
    made = []
    for each in order:
        found = _SORT.fullmatch(each)
        text, down, first = found.groups() if found else (each, "ASC", "FIRST")
        made.append((compile_text(text, scope)[1], down == "DESC", first == "FIRST"))

    def place(row: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = []
        for function, down, first in made:
            value = function(row)
            parts.append(_Placed(value, down, first))
        return tuple(parts)

    return place


@functools.total_ordering
class _Placed:
    """A value in a sort order: NULLs first or last, NaN above all numbers."""

    def __init__(self, value: Any, down: bool, nulls_first: bool) -> None:
        nan = isinstance(value, float) and math.isnan(value)
        self._outer = (value is None) != nulls_first
        self._inner: Any = (nan, 0.0 if nan or value is None else value)
        self._down = down

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Placed) and (self._outer, self._inner) == (
            other._outer,
            other._inner,
        )

    def __lt__(self, other: _Placed) -> bool:
        if self._outer != other._outer:
            return self._outer < other._outer
        if self._inner == other._inner:
            return False
        return bool(self._inner < other._inner) != self._down

    __hash__ = None  # type: ignore[assignment]
