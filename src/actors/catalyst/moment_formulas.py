"""Covariance, correlation, regression, skewness and kurtosis as functions of the bag of rows.

Spark merges moments in the order in which rows come, so that floats differ in their last bits. Here
they are summed over the sorted values, the means first: equal for equal rows, and as exact.

Source: Spark's ``Covariance``, ``PearsonCorrelation``, ``CentralMomentAgg`` and
``linearRegression.scala`` define which results are NULL; the first argument of ``regr_*(y, x)`` is
y.
"""

from __future__ import annotations

from typing import Final

_OF_PAIRS: Final = {
    "Corr": "s.xy / nullif(sqrt(s.xx * s.yy), 0D)",
    "CovPopulation": "s.xy / nullif(s.n, 0D)",
    "CovSample": "CASE WHEN s.n > 1D THEN s.xy / (s.n - 1D) END",
    "RegrAvgX": "s.y",
    "RegrAvgY": "s.x",
    "RegrIntercept": "s.x - s.xy / nullif(s.yy, 0D) * s.y",
    "RegrR2": "CASE WHEN s.yy = 0D THEN NULL WHEN s.xx = 0D THEN 1D "
    "ELSE s.xy / nullif(sqrt(s.xx * s.yy), 0D) * (s.xy / nullif(sqrt(s.xx * s.yy), 0D)) END",
    "RegrSXX": "CASE WHEN s.n > 0D THEN s.yy END",
    "RegrSXY": "CASE WHEN s.n > 0D THEN s.xy END",
    "RegrSYY": "CASE WHEN s.n > 0D THEN s.xx END",
    "RegrSlope": "s.xy / nullif(s.yy, 0D)",
}
"""Formulas by Catalyst's name, over the count, the means x and y of the first and second argument,
and the sums of products of the deviations from them."""
_OF_VALUES: Final = {
    "Kurtosis": "s.n * s.x4 / nullif(s.xx * s.xx, 0D) - 3D",
    "Skewness": "sqrt(s.n) * s.x3 / nullif(sqrt(s.xx * s.xx * s.xx), 0D)",
}
MOMENTS: Final = frozenset(_OF_PAIRS) | frozenset(_OF_VALUES)


def moment_formula(kind: str, values: tuple[str, ...], behind: str, *, distinct: bool) -> str:
    """Return the text of an aggregate of `MOMENTS` over one or two values.

    Args:
        kind: Catalyst's name of the aggregate.
        values: Texts of the arguments.
        behind: FILTER (WHERE …), or an empty text.
        distinct: True if each value, or pair, counts once.

    >>> moment_formula("CovSample", ("a", "b"), "", distinct=False)[:71]
    'aggregate(array_sort(collect_list(CASE WHEN a IS NOT NULL AND b IS NOT '
    """
    names = ("x", "y")[: len(values)]
    there = " AND ".join(f"{value} IS NOT NULL" for value in values)
    doubles = (
        (name, f"CAST({value} AS double)") for name, value in zip(names, values, strict=True)
    )
    row = f"CASE WHEN {there} THEN {_struct(*doubles)} END"
    gathered = "collect_set" if distinct else "collect_list"
    rows = f"array_sort({gathered}({row}){behind})"
    sums = _struct(("n", "s.n + 1D"), *((name, f"s.{name} + p.{name}") for name in names))
    away = {name: f"(p.{name} - s.{name})" for name in names}
    powers: dict[str, tuple[str, ...]] = {"xx": ("x", "x"), "yy": ("y", "y"), "xy": ("x", "y")}
    if kind in _OF_VALUES:
        powers = {"xx": ("x", "x"), "x3": ("x", "x", "x"), "x4": ("x", "x", "x", "x")}
    means = [("n", "s.n"), *((name, f"s.{name} / nullif(s.n, 0D)") for name in names)]
    zero = _struct(("n", "0D"), *((name, "0D") for name in names))
    begun = _struct(*means, *((name, "0D") for name in powers))
    # Two passes: deviations from the means do not cancel as a difference of large sums would.
    mean = f"aggregate({rows}, {zero}, (s, p) -> {sums}, s -> {begun})"
    kept = [(name, f"s.{name}") for name in ("n", *names)]
    added = [
        (name, f"s.{name} + {' * '.join(away[each] for each in of)}") for name, of in powers.items()
    ]
    result = (_OF_PAIRS | _OF_VALUES)[kind]
    return f"aggregate({rows}, {mean}, (s, p) -> {_struct(*kept, *added)}, s -> {result})"


def _struct(*fields: tuple[str, str]) -> str:
    written = ", ".join(f"'{name}', {text}" for name, text in fields)
    return f"named_struct({written})"
