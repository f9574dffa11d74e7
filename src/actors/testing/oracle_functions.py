"""Spark functions that SQLite lacks, for the oracle: registered on its connection.

Scalars: ``/``, ``div``, ``%`` and CAST as in ANSI Spark (division by zero and malformed input raise
`DefiniteError`), parts of dates, least and greatest that skip NULL. Aggregates: standard deviations
and variances, bool_and and bool_or, count over the distinct values of several columns, max_by and
min_by. All skip NULL and are NULL over no values, except that counts are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import apsw

from actors.runtime.errors import DefiniteError
from actors.testing.expressions import cast_value


def register(connection: apsw.Connection) -> None:
    """Register the functions on a connection."""
    for name, (count, function) in _SCALARS.items():
        connection.create_scalar_function(name, function, count, deterministic=True)
    for name, (count, finish) in _AGGREGATES.items():
        connection.create_aggregate_function(name, _factory(finish), count)


def to_sqlite(value: Any) -> Any:
    """Return a Spark value as SQLite stores it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(sep=" ")
    # SQLite has no nested values: a query may pass them through, and compares their texts.
    if isinstance(value, list | dict):
        return str(value)
    return value.isoformat() if isinstance(value, date) else value


def _factory(finish: Callable[[list[Any]], Any]) -> Callable[[], Any]:
    """Return an aggregate in the form that apsw takes: (state, step, end), the state a list of
    values."""

    def step(values: list[Any], *row: Any) -> None:
        values.append(row[0] if len(row) == 1 else row)

    return lambda: ([], step, finish)


def _plain(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _spread(*, root: bool, whole: bool) -> Callable[[list[Any]], Any]:
    def finish(values: list[Any]) -> Any:
        numbers = [float(value) for value in _plain(values)]
        count = len(numbers) if whole else len(numbers) - 1
        if count <= 0:
            return None
        mean = sum(numbers) / len(numbers)
        variance = sum((number - mean) ** 2 for number in numbers) / count
        return math.sqrt(variance) if root else variance

    return finish


def _truth(combine: Callable[[list[Any]], bool]) -> Callable[[list[Any]], Any]:
    def finish(values: list[Any]) -> Any:
        plain = _plain(values)
        return int(combine(plain)) if plain else None

    return finish


def _count_distinct(rows: list[Any]) -> int:
    return len({row for row in rows if None not in (row if isinstance(row, tuple) else (row,))})


def _best_by(choose: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def finish(rows: list[Any]) -> Any:
        plain = [row for row in rows if row[1] is not None]
        return choose(plain, key=lambda row: row[1])[0] if plain else None

    return finish


def _null_or(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return None if any(value is None for value in values) else function(*values)

    return call


def _nonzero(divisor: Any) -> Any:
    if divisor == 0:
        raise DefiniteError("[DIVIDE_BY_ZERO] Division by zero: use try_divide")
    return divisor


def _div(a: Any, b: Any) -> int:
    return math.trunc(Decimal(str(a)) / Decimal(str(_nonzero(b))))


def _mod(a: Any, b: Any) -> Any:
    """Return the remainder with the sign of the dividend, as in Spark."""
    if not (math.isfinite(a) and math.isfinite(_nonzero(b))):
        # Infinity has no remainder; a number divided by infinity remains as it is.
        return a if math.isfinite(a) and math.isinf(b) else math.nan
    # Exact: floats would lose the low digits of a bigint. SQLite stores decimals as floats, for
    # which 1.0 % 0.1 is not 0.
    left, right = Fraction(str(a)), Fraction(str(b))
    rest = left - math.trunc(left / right) * right
    return int(rest) if isinstance(a, int) and isinstance(b, int) else float(rest)


def _cast(value: Any, kind: str) -> Any:
    return None if value is None else to_sqlite(cast_value(value, kind))


def _try_cast(value: Any, kind: str) -> Any:
    try:
        return _cast(value, kind)
    except DefiniteError:
        return None


def _extreme(choose: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        plain = _plain(list(values))
        return choose(plain) if plain else None

    return call


_SCALARS: Final[dict[str, tuple[int, Callable[..., Any]]]] = {
    "spark_divide": (2, _null_or(lambda a, b: a / _nonzero(b))),
    "spark_div": (2, _null_or(_div)),
    "spark_mod": (2, _null_or(_mod)),
    "spark_cast": (2, _cast),
    "spark_try_cast": (2, _try_cast),
    "spark_greatest": (-1, _extreme(max)),
    "spark_least": (-1, _extreme(min)),
    "year": (1, _null_or(lambda text: int(str(text)[:4]))),
    "month": (1, _null_or(lambda text: int(str(text)[5:7]))),
    "day": (1, _null_or(lambda text: int(str(text)[8:10]))),
    "hour": (1, _null_or(lambda text: int(str(text)[11:13]))),
}

_AGGREGATES: Final[dict[str, tuple[int, Callable[[list[Any]], Any]]]] = {
    "spark_stddev_samp": (1, _spread(root=True, whole=False)),
    "spark_stddev_pop": (1, _spread(root=True, whole=True)),
    "spark_var_samp": (1, _spread(root=False, whole=False)),
    "spark_var_pop": (1, _spread(root=False, whole=True)),
    "spark_bool_and": (1, _truth(all)),
    "spark_bool_or": (1, _truth(any)),
    "spark_count_distinct": (-1, _count_distinct),
    "spark_count_all": (-1, lambda rows: sum(None not in row for row in rows)),
    "spark_max_by": (2, _best_by(max)),
    "spark_min_by": (2, _best_by(min)),
}
