"""Arithmetic, conditionals and scalar functions of the in-memory engine (see `expressions`)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from sqlglot import exp

from actors.runtime.errors import DefiniteError, QueryRejected
from actors.testing.expressions import (
    INTEGERS,
    WIDE,
    Columns,
    Compiled,
    Function,
    Row,
    cast_to_common_type,
    cast_to_type,
    cast_value,
    common_type,
    compare_values,
    compile_expression,
    decimal_digits,
    decimal_type,
    fit_decimal,
    is_numeric,
)


def compile_function(tree: Any, columns: Columns) -> Compiled:
    """Return (type, function of a row). Raises `QueryRejected` for functions outside the subset."""
    for kinds, compiler in _COMPILERS:
        if isinstance(tree, kinds):
            return compiler(tree, columns)
    simple = _SIMPLE.get(type(tree))
    if simple is not None:
        return _call(simple, [tree.this], columns)
    raise QueryRejected(f"the in-memory engine does not know {tree.sql(dialect='spark')[:80]}")


def _call(spec: tuple[str, Callable[..., Any]], trees: list[Any], columns: Columns) -> Compiled:
    """Compile a function that returns NULL if an argument is NULL."""
    kind, function = spec
    arguments = [compile_expression(tree, columns) for tree in trees]
    result = arguments[0][0] if kind == "same" else kind

    def value(row: Row) -> Any:
        values = [argument(row) for _, argument in arguments]
        return None if any(found is None for found in values) else function(*values)

    return result, value


def arithmetic_type(tree: Any, left: str, right: str) -> str:
    """Return Spark's result type of an arithmetic operator."""
    if left == right == "void":
        return "double" if isinstance(tree, exp.Div) else "int"
    left, right = (right, right) if left == "void" else (left, left if right == "void" else right)
    if "string" in (left, right):
        left, right = (("double" if kind == "string" else kind) for kind in (left, right))
    if not (is_numeric(left) and is_numeric(right)):
        raise QueryRejected(f"[DATATYPE_MISMATCH] {tree.sql()}: {left} and {right}")
    if isinstance(tree, exp.IntDiv):
        return "bigint"
    if "double" in (left, right) or "float" in (left, right):
        return "double" if isinstance(tree, exp.Div) else common_type(left, right)
    if left in INTEGERS and right in INTEGERS:
        return "double" if isinstance(tree, exp.Div) else common_type(left, right)
    return _decimal_result(tree, left, right)


def _decimal_result(tree: Any, left: str, right: str) -> str:
    (p1, s1), (p2, s2) = _digits(tree.left, left), _digits(tree.right, right)
    if isinstance(tree, exp.Mul):
        return decimal_type(p1 + p2 + 1, s1 + s2)
    if isinstance(tree, exp.Div):
        scale = max(6, s1 + p2 + 1)
        return decimal_type(p1 - s1 + s2 + scale, scale)
    if isinstance(tree, exp.Mod):
        scale = max(s1, s2)
        return decimal_type(min(p1 - s1, p2 - s2) + scale, scale)
    scale = max(s1, s2)
    return decimal_type(max(p1 - s1, p2 - s2) + scale + 1, scale)


def _digits(tree: Any, kind: str) -> tuple[int, int]:
    """Return (precision, scale). A literal integer counts only its own digits."""
    if isinstance(tree, exp.Literal) and kind in INTEGERS:
        return len(str(tree.this)), 0
    return decimal_digits(kind)


def _arithmetic(tree: Any, columns: Columns) -> Compiled:
    left = compile_expression(tree.left, columns)
    right = compile_expression(tree.right, columns)
    kind = arithmetic_type(tree, left[0], right[0])
    compute = _operator(tree, kind)
    first, second = left[1], right[1]

    def value(row: Row) -> Any:
        a, b = first(row), second(row)
        if a is None or b is None:
            return None
        return cast_value(compute(_operand(a, kind), _operand(b, kind)), kind)

    return kind, value


def _operand(value: Any, kind: str) -> Any:
    if kind in ("double", "float"):
        return float(value)
    return value if isinstance(value, Decimal | int) else Decimal(str(value))


def _operator(tree: Any, kind: str) -> Callable[[Any, Any], Any]:
    if isinstance(tree, exp.Div | exp.IntDiv | exp.Mod):
        divide = {exp.Div: _divide, exp.IntDiv: _whole_part, exp.Mod: _remainder}[type(tree)]

        def checked(a: Any, b: Any) -> Any:
            if b == 0:
                raise DefiniteError("[DIVIDE_BY_ZERO] Division by zero: use try_divide")
            return divide(a, b)

        return checked
    plain: dict[type[Any], Callable[[Any, Any], Any]] = {
        exp.Add: operator.add,
        exp.Sub: operator.sub,
        exp.Mul: operator.mul,
    }
    exact: dict[type[Any], Callable[[Any, Any], Any]] = {
        exp.Add: WIDE.add,
        exp.Sub: WIDE.subtract,
        exp.Mul: WIDE.multiply,
    }
    return exact[type(tree)] if kind.startswith("decimal") else plain[type(tree)]


def _divide(a: Any, b: Any) -> Any:
    return a / b if isinstance(a, float) else WIDE.divide(Decimal(a), Decimal(b))


def _whole_part(a: Any, b: Any) -> int:
    quotient = abs(a) // abs(b)
    return int(quotient if (a < 0) == (b < 0) else -quotient)


def _remainder(a: Any, b: Any) -> Any:
    rest = abs(a) % abs(b)
    return -rest if a < 0 else rest


def _negate(tree: Any, columns: Columns) -> Compiled:
    kind, inner = compile_expression(tree.this, columns)

    def value(row: Row) -> Any:
        found = inner(row)
        return None if found is None else cast_value(-found, kind)

    return kind, value


def _case(tree: Any, columns: Columns) -> Compiled:
    subject = tree.args.get("this")
    branches = []
    for branch in tree.args["ifs"]:
        condition = branch.this if subject is None else exp.EQ(this=subject, expression=branch.this)
        branches.append((condition, branch.args["true"]))
    return _choose(branches, tree.args.get("default"), columns)


def _if(tree: Any, columns: Columns) -> Compiled:
    return _choose([(tree.this, tree.args["true"])], tree.args.get("false"), columns)


def _choose(branches: list[tuple[Any, Any]], default: Any, columns: Columns) -> Compiled:
    tests = [compile_expression(test, columns)[1] for test, _ in branches]
    results = [compile_expression(result, columns) for _, result in branches]
    results.append(compile_expression(exp.Null() if default is None else default, columns))
    kind, values = unify_types(results)

    def value(row: Row) -> Any:
        for test, result in zip(tests, values, strict=False):
            if test(row) is True:
                return result(row)
        return values[-1](row)

    return kind, value


def unify_types(compiled: list[Compiled]) -> tuple[str, list[Function]]:
    """Return the common type, and all functions cast to it."""
    kind = "void"
    for other, _ in compiled:
        kind = common_type(kind, other)
    return kind, [cast_to_type(one, kind) for one in compiled]


def _coalesce(tree: Any, columns: Columns) -> Compiled:
    trees = [tree.this, *tree.expressions]
    kind, values = unify_types([compile_expression(one, columns) for one in trees])

    def value(row: Row) -> Any:
        return next((found for one in values if (found := one(row)) is not None), None)

    return kind, value


def _nullif(tree: Any, columns: Columns) -> Compiled:
    same = exp.EQ(this=tree.this, expression=tree.expression)
    return _choose([(same, exp.Null())], tree.this, columns)


def _extreme(tree: Any, columns: Columns) -> Compiled:
    trees = [tree.this, *tree.expressions]
    kind, values = unify_types([compile_expression(one, columns) for one in trees])
    sign = 1 if isinstance(tree, exp.Greatest) else -1

    def value(row: Row) -> Any:
        best = None
        for one in values:
            found = one(row)
            if found is not None and (best is None or compare_values(found, best) == sign):
                best = found
        return best

    return kind, value


def _in(tree: Any, columns: Columns) -> Compiled:
    if tree.args.get("query") is not None:
        raise QueryRejected("the in-memory engine does not know IN (subquery)")
    tests = [exp.EQ(this=tree.this, expression=item) for item in tree.expressions]
    found = [compile_expression(test, columns)[1] for test in tests]

    def value(row: Row) -> Any:
        answers = [test(row) for test in found]
        return True if True in answers else None if None in answers else False

    return "boolean", value


def _between(tree: Any, columns: Columns) -> Compiled:
    low = exp.GTE(this=tree.this, expression=tree.args["low"])
    high = exp.LTE(this=tree.this, expression=tree.args["high"])
    return compile_expression(exp.And(this=low, expression=high), columns)


def _like(tree: Any, columns: Columns) -> Compiled:
    left, right = cast_to_common_type(
        compile_expression(tree.this, columns), compile_expression(tree.expression, columns)
    )
    flags = re.DOTALL | (re.IGNORECASE if isinstance(tree, exp.ILike) else 0)

    def value(row: Row) -> Any:
        text, pattern = left(row), right(row)
        if text is None or pattern is None:
            return None
        parts = {"%": ".*", "_": "."}
        regex = "".join(parts.get(char, re.escape(char)) for char in pattern)
        return re.fullmatch(regex, text, flags) is not None

    return "boolean", value


def _concat(tree: Any, columns: Columns) -> Compiled:
    trees = tree.expressions or [tree.this, tree.expression]
    values = [cast_to_type(compile_expression(one, columns), "string") for one in trees]

    def value(row: Row) -> Any:
        texts = [one(row) for one in values]
        return None if None in texts else "".join(texts)

    return "string", value


def _substring(tree: Any, columns: Columns) -> Compiled:
    trees = [tree.this, tree.args["start"]]
    if tree.args.get("length") is not None:
        trees.append(tree.args["length"])

    def cut(text: str, start: int, length: int | None = None) -> str:
        first = start - 1 if start > 0 else max(len(text) + start, 0) if start < 0 else 0
        return text[first:] if length is None else text[first : first + max(length, 0)]

    return _call(("string", cut), trees, columns)


def _round(tree: Any, columns: Columns) -> Compiled:
    kind, inner = compile_expression(tree.this, columns)
    places = int(tree.args["decimals"].sql()) if tree.args.get("decimals") is not None else 0
    if kind.startswith("decimal"):
        precision, scale = decimal_digits(kind)
        kept = min(scale, max(places, 0))
        kind = f"decimal({min(38, precision - scale + kept + (kept < scale))},{kept})"

    def value(row: Row) -> Any:
        found = inner(row)
        if found is None or isinstance(found, int):
            return found
        exact = Decimal(str(found)).quantize(Decimal(1).scaleb(-places), context=WIDE)
        return float(exact) if isinstance(found, float) else fit_decimal(exact, 38, max(places, 0))

    return kind, value


def _date_part(tree: Any, columns: Columns) -> Compiled:
    inner = tree.this.this if isinstance(tree.this, exp.TsOrDsToDate) else tree.this
    name = {exp.Year: "year", exp.Month: "month", exp.Day: "day", exp.DayOfMonth: "day"}.get(
        type(tree), tree.key
    )
    return _call(("int", operator.attrgetter(name)), [inner], columns)


def _pmod(tree: Any, columns: Columns) -> Compiled:
    if tree.name.lower() != "pmod":
        raise QueryRejected(f"the in-memory engine does not know {tree.name}()")
    return _call(("same", operator.mod), tree.expressions, columns)


_SIMPLE: Final[dict[type[Any], tuple[str, Callable[..., Any]]]] = {
    exp.Upper: ("string", str.upper),
    exp.Lower: ("string", str.lower),
    exp.Length: ("int", len),
    exp.Trim: ("string", lambda text: text.strip(" ")),
    exp.Abs: ("same", abs),
    exp.Sqrt: ("double", lambda x: math.sqrt(x) if x >= 0 else math.nan),
}

_COMPILERS: Final[tuple[tuple[Any, Callable[[Any, Columns], Compiled]], ...]] = (
    ((exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod), _arithmetic),
    (exp.Neg, _negate),
    (exp.Case, _case),
    (exp.If, _if),
    (exp.Coalesce, _coalesce),
    (exp.Nullif, _nullif),
    ((exp.Greatest, exp.Least), _extreme),
    (exp.Anonymous, _pmod),
    (exp.In, _in),
    (exp.Between, _between),
    ((exp.Like, exp.ILike), _like),
    ((exp.Concat, exp.DPipe), _concat),
    (exp.Substring, _substring),
    (exp.Round, _round),
    ((exp.Year, exp.Month, exp.Day, exp.DayOfMonth, exp.Hour, exp.Minute), _date_part),
)
