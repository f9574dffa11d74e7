"""Rewrites aggregates that are not sums as calls with a formula whose value depends only on the bag
of rows.

A touched group is recomputed before and after a change, and the value before must equal the one
that was emitted. So an aggregate whose value depends on the order of rows is replaced by a formula
that gives one of its possible results and does not depend on the order. All other aggregates here
(percentiles, bits, counts by sketch) are functions of the bag already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.engine.catalyst.blocks import ColumnBinding, WrittenExpression
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_tree import (
    TreeNode,
    attribute_ids,
    attribute_in_place_of,
    is_nullable,
    type_of,
)
from actors.model.plan.relational import AggregateCall, AggregateFormula

# -- moments ---------------------------------------------------------------------------------------

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
"""Formulas by Catalyst's name. They use the count, the means x and y of the first and second
argument, and the sums of products of the deviations from these means."""
_OF_VALUES: Final = {
    "Kurtosis": "s.n * s.x4 / nullif(s.xx * s.xx, 0D) - 3D",
    "Skewness": "sqrt(s.n) * s.x3 / nullif(sqrt(s.xx * s.xx * s.xx), 0D)",
}
MOMENTS: Final = frozenset(_OF_PAIRS) | frozenset(_OF_VALUES)


def moment_formula(
    kind: str, values: tuple[str, ...], filter_clause: str, *, distinct: bool
) -> str:
    """Return the text of an aggregate of `MOMENTS` over one or two values (covariance, correlation,
    regression, skewness or kurtosis) as a function of the bag of rows.

    Spark merges moments in the order in which rows arrive, so floats differ in their last bits.
    Here they are summed over the sorted values, after the means: the result is equal for equal
    bags, and just as exact.

    Source: Spark's ``Covariance``, ``PearsonCorrelation``, ``CentralMomentAgg`` and
    ``linearRegression.scala`` define which results are NULL; the first argument of ``regr_*(y, x)``
    is y.

    Args:
        kind: Catalyst's name of the aggregate.
        values: The texts of the arguments.
        filter_clause: FILTER (WHERE …), or "".
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
    rows = f"array_sort({gathered}({row}){filter_clause})"
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


# -- calls -----------------------------------------------------------------------------------------

WriteExpression = Callable[[TreeNode, Mapping[int, ColumnBinding]], WrittenExpression]
"""Writes an expression over the columns below a grouping and the given columns."""
_FIRST_PLACE: Final = -1_000_000
"""Number of the attribute that stands for a formula's first argument; those of later arguments
count down."""
_MARK: Final = re.compile("\ue000(\\d+)\ue001")
_UNORDERED: Final = ("map<", "variant", "interval")
_DECIMAL_DIGITS_MAX: Final = 26
"""Maximum number of digits of values whose partial sums always fit into Spark's 38 digits."""
_EXACT: Final = ("tinyint", "smallint", "int")


class _Call(msgspec.Struct, frozen=True):
    """The parts of a formula, as texts with placeholders."""

    kind: str
    written: str
    values: tuple[str, ...]
    """The arguments as written in the call: a placeholder, or the text of a constant."""
    types: tuple[str, ...]
    row: tuple[str, ...]
    """Placeholders of all values that are read from the same row."""
    filter_clause: str
    """FILTER (WHERE …), or ""."""
    distinct: bool


_Formula = Callable[[_Call], str]


def formula_call(node: TreeNode, write: WriteExpression, row: Sequence[TreeNode]) -> AggregateCall:
    """Return the call, without a name, for an aggregate expression of Catalyst's.

    `row`: the values that this call and others read from one row. Raises `NotRendered` for an
    aggregate whose value may not be a function of the bag of rows.
    """
    inner = node.children[0]
    formula = _formula_of(inner)
    of_a_row = inner.name in _OF_A_ROW and not inner.fields["ignoreNulls"]
    places = _Placeholders(write, all_of_them=inner.name not in _WITH_CONSTANTS)
    made = node.replaced([places.replaced(inner), *map(places.placed, node.children[1:])])
    filter_clause = [places.text(each) for each in made.children[1:]]
    call = _Call(
        inner.name,
        places.text(made),
        tuple(places.text(each) for each in made.children[0].children),
        tuple(type_of(each) for each in inner.children if each.name != "SortOrder"),
        tuple(places.text(places.placed(each)) for each in row) if of_a_row else (),
        f" FILTER (WHERE {filter_clause[0]})" if filter_clause else "",
        bool(node.fields["isDistinct"]),
    )
    chosen = formula(call)
    arguments = places.arguments
    for each in arguments:
        if any(word in each.type for word in _UNORDERED):
            raise NotRendered(f"the aggregate {inner.name} over {each.type}")
    test = "" if not filter_clause else arguments[int(filter_clause[0].strip("{}"))].text
    # Rows that FILTER drops are not computed: Spark does not compute them either, and they might
    # raise an error.
    guarded = [
        f"CASE WHEN {test} THEN {each.text} END" if test and each.text != test else each.text
        for each in arguments
    ]
    fields = ", ".join(f"'c{place}', {text}" for place, text in enumerate(guarded))
    kinds = ",".join(f"c{place}:{each.type}" for place, each in enumerate(arguments))
    one = len(arguments) == 1
    return AggregateCall(
        "",
        call.written.partition("(")[0],
        guarded[0] if one else f"named_struct({fields})",
        type_of(inner),
        arguments[0].type if one else f"struct<{kinds}>",
        True,
        call.distinct and formula is _as_written,
        AggregateFormula(call.written, chosen, tuple(each.text for each in arguments)),
    )


class _Placeholders:
    """The arguments of a formula and their placeholders; equal arguments share one."""

    def __init__(self, write: WriteExpression, *, all_of_them: bool) -> None:
        """`all_of_them`: true if constants also get placeholders."""
        self._write = write
        self._all_of_them = all_of_them
        # The columns given to placeholders so far, by the numbers of their attributes.
        self._columns: dict[int, ColumnBinding] = {}
        # The distinct arguments so far; a placeholder is an index into them.
        self.arguments: list[WrittenExpression] = []

    def replaced(self, node: TreeNode) -> TreeNode:
        """Return an aggregate function over placeholders."""
        children = [self._argument(child) for child in node.children]
        if not self.arguments:
            raise NotRendered(f"the aggregate {node.name} of constants")
        return node.replaced(children)

    def _argument(self, node: TreeNode) -> TreeNode:
        if node.name == "SortOrder":
            return node.replaced([self._argument(each) for each in node.children])
        return self.placed(node) if self._all_of_them or attribute_ids(node) else node

    def placed(self, node: TreeNode) -> TreeNode:
        """Return a placeholder for an expression."""
        written = self._write(node, {})
        if written not in self.arguments:
            self.arguments.append(written)
        place = self.arguments.index(written)
        number = _FIRST_PLACE - place
        mark = f"\ue000{place}\ue001"
        self._columns[number] = ColumnBinding(mark, written.type, is_nullable(node))
        return attribute_in_place_of(node, number)

    def text(self, node: TreeNode) -> str:
        """Return the text of an expression over placeholders: ``{0}`` for the first argument."""
        text = self._write(node, self._columns).text
        return _MARK.sub(r"{\1}", text.replace("{", "{{").replace("}", "}}"))


def values_of_rows(
    nodes: Iterable[TreeNode], write: WriteExpression
) -> dict[str, tuple[TreeNode, ...]]:
    """Return the values that the ``first``, ``last`` and ``any_value`` calls among aggregate
    expressions read from one row, by the text of their FILTER."""
    found: dict[str, dict[str, TreeNode]] = {}
    for node in nodes:
        inner = node.children[0]
        if inner.name in _OF_A_ROW and not inner.fields["ignoreNulls"]:
            asked = found.setdefault(filter_text(node, write), {})
            asked.setdefault(write(inner.children[0], {}).text, inner.children[0])
    return {text: tuple(asked.values()) for text, asked in found.items()}


def filter_text(node: TreeNode, write: WriteExpression) -> str:
    """Return the text of an aggregate expression's FILTER; "" if it has none."""
    return write(node.children[1], {}).text if node.children[1:] else ""


def is_trying(node: TreeNode) -> bool:
    """Return whether an expression gives NULL instead of raising an error (``try_sum``)."""
    mode = node.fields.get("evalMode")
    context = node.fields.get("evalContext")
    if isinstance(context, dict):
        mode = context.get("evalMode", mode)
    return mode == "TRY" or (isinstance(mode, str) and mode.endswith("TRY"))


# -- formulas --------------------------------------------------------------------------------------


def _as_written(call: _Call) -> str:
    """Return the call itself, whose value depends only on the bag of rows."""
    return call.written


def _of_a_row(function: str) -> _Formula:
    def chosen(call: _Call) -> str:
        if not call.row:
            # With IGNORE NULLS each call takes its own least value, since there is no common row.
            return f"{function}({call.values[0]}){call.filter_clause}"
        # All such calls of a grouping read the same row: the least in the order of all their
        # values.
        fields = ", ".join(f"'c{number}', {each}" for number, each in enumerate(call.row))
        number = call.row.index(call.values[0])
        # ``first`` and ``any_value`` read the least row, ``last`` the greatest.
        return f"({function}(named_struct({fields})){call.filter_clause}).c{number}"

    return chosen


def _by(function: str) -> _Formula:
    def chosen(call: _Call) -> str:
        # Of several rows with the same order, max_by takes the greatest value and min_by the least:
        # the value is part of the compared pair.
        value, order = call.values
        pair = f"named_struct('o', {order}, 'v', {value})"
        # Spark's max_by ignores rows whose order is NULL.
        pair = f"CASE WHEN {order} IS NOT NULL THEN {pair} END"
        return f"({function}({pair}){call.filter_clause}).v"

    return chosen


def _sorted_values(call: _Call) -> str:
    # Spark collects values in the order of the rows. Sorted, the array depends only on the bag.
    gathered = "collect_set" if call.distinct or call.kind == "CollectSet" else "collect_list"
    return f"array_sort({gathered}({call.values[0]}){call.filter_clause})"


def _least_mode(call: _Call) -> str:
    if "WITHIN GROUP" in call.written:
        return call.written
    # With an order, Spark returns the first of several modes in that order: the least.
    return f"mode() WITHIN GROUP (ORDER BY {call.values[0]}){call.filter_clause}"


def _exact_percentile(call: _Call) -> str:
    """Return the value of the least rank that the percentage allows.

    Source: ``QuantileSummaries.query`` over rows that were not compressed.
    """
    value, wanted, _ = call.values
    # Spark's sketch depends on the order of rows; this percentile is exact.
    gathered = "collect_set" if call.distinct else "collect_list"
    values = f"array_sort({gathered}({value}){call.filter_clause})"
    place = f"greatest(1, CAST(ceil(size({values}) * CAST(p AS double)) AS int))"
    several = call.types[1].startswith("array")
    listed = wanted if several else f"array({wanted})"
    found = f"transform({listed}, p -> element_at({values}, {place}))"
    return f"CASE WHEN size({values}) > 0 THEN {found}{'' if several else '[0]'} END"


def _summed_in_order(call: _Call) -> str:
    exact = [kind for kind in call.types if kind.startswith("decimal")]
    if exact and call.kind in ("RegrAvgX", "RegrAvgY"):
        raise NotRendered(f"the aggregate {call.kind} over {exact[0]}")
    # Spark merges moments in the order of the rows; the formula sums in the order of the values.
    return moment_formula(call.kind, call.values, call.filter_clause, distinct=call.distinct)


def _joined_texts(call: _Call) -> str:
    value, delimiter, *orders = call.values
    word = "DISTINCT " if call.distinct else ""
    if not (call.distinct and orders):
        # Rows with the same order are ordered by their value. DISTINCT allows no other order than
        # the one written.
        orders.append(value)
    order = ", ".join(orders)
    return (
        f"listagg({word}{value}, {delimiter}) WITHIN GROUP (ORDER BY {order}){call.filter_clause}"
    )


def _tried_sum(call: _Call) -> str:
    kind = call.types[0]
    if kind in _EXACT:
        return call.written
    # A partial sum may overflow in some orders of rows only. Summed as decimals, only the total
    # decides.
    if kind == "bigint":
        total = f"sum(CAST({call.values[0]} AS decimal(38,0))){call.filter_clause}"
        return f"try_cast({total} AS bigint)"
    digits = re.fullmatch(r"decimal\((\d+),\d+\)", kind)
    if digits is not None and int(digits[1]) <= _DECIMAL_DIGITS_MAX:
        return call.written
    raise NotRendered(f"the aggregate try_sum({kind})")


def _tried_average(call: _Call) -> str:
    if call.types[0] in _EXACT:
        return call.written
    raise NotRendered(f"the aggregate try_avg({call.types[0]})")


_OF_A_ROW: Final = frozenset({"AnyValue", "First", "Last"})
_FORMULAS: Final[dict[str, _Formula]] = {
    "AnyValue": _of_a_row("min"),
    "ApproximatePercentile": _exact_percentile,
    "BitAndAgg": _as_written,
    "BitOrAgg": _as_written,
    "BitXorAgg": _as_written,
    "CollectList": _sorted_values,
    "CollectSet": _sorted_values,
    "First": _of_a_row("min"),
    "HyperLogLogPlusPlus": _as_written,
    "Last": _of_a_row("max"),
    "ListAgg": _joined_texts,
    "MaxBy": _by("max"),
    "Median": _as_written,
    "MinBy": _by("min"),
    "Mode": _least_mode,
    "Percentile": _as_written,
    "PercentileCont": _as_written,
    "PercentileDisc": _as_written,
    "RegrCount": _as_written,
} | dict.fromkeys(MOMENTS, _summed_in_order)
_TRIED: Final[dict[str, _Formula]] = {"Average": _tried_average, "Sum": _tried_sum}
_WITH_CONSTANTS: Final = frozenset(
    {
        "ApproximatePercentile",
        "HyperLogLogPlusPlus",
        "ListAgg",
        "Percentile",
        "PercentileCont",
        "PercentileDisc",
    }
)
"""Aggregates for which some arguments must be constants."""


def _formula_of(inner: TreeNode) -> _Formula:
    """Return the function that makes an aggregate function's formula. Raises `NotRendered`."""
    known = _TRIED if is_trying(inner) else _FORMULAS
    found = known.get(inner.name)
    if found is None:
        word = "try_" if is_trying(inner) else ""
        raise NotRendered(f"the aggregate {word}{inner.name}")
    return found
