"""Views of Spark's functions over bad operands: each must have contents or a definite error.

A documented example (`SELECT sequence(1, 5, 2)`) becomes a view of a table that has a column for
each constant of the example, and a row with the example's values. Then a row of bad operands is
inserted, and deleted again. After each step the view must equal plain Spark's answer, or be in
error if plain Spark raises one. A step must not fail in any other way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from random import Random
from typing import Any, Final

import msgspec

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import DefiniteError, InvalidUsage, PenstockError, SqlSyntaxError
from actors.testing.maintain import EngineCaller, MaintainedView, accumulated

_CONSTANT: Final = re.compile(
    r"""'(?:[^'\\]|''|\\.)*'|(?<![\w.'"`])\d+(?:\.\d+)?(?![\w.'"`])""", re.DOTALL
)
_OVER_VALUES: Final = re.compile(
    r"(?P<listed>.*?)\s+FROM\s+VALUES\s*\((?P<row>[^()]*)\).*\bAS\s+\w+\((?P<names>[^()]*)\)\s*",
    re.DOTALL | re.IGNORECASE,
)
_ORDERED: Final = re.compile(
    r"\b(?:collect_list|array_agg|listagg|string_agg|first|first_value|last|last_value|any_value"
    r"|max_by|min_by|mode|skewness|kurtosis|std\w*|var\w*|corr|covar\w*|regr\w*)\("
)
"""Aggregates that depend on the order of rows, so that plain Spark's answer is one of many."""
_DECIMAL: Final = "decimal(38,18)"
BAD: Final[dict[str, tuple[Any, ...]]] = {
    "string": ("", "x", "(", "[", "%", "%z", "\\", "9999-99-99", "-1", "\u00e9\ud7ff", "{", None),
    "int": (0, -1, -(2**31), 99_999, None),
    _DECIMAL: (Decimal(0), Decimal("-0.5"), Decimal("9999999999999999999.9999"), None),
}
"""Operands by type. Without 2^31 - 1, because `repeat` and the like would fill the engine's
memory."""
WHOLE_MAX: Final = 12
"""Number of texts to try for one example until Spark accepts one."""


class OperandView(msgspec.Struct, frozen=True):
    """The text of a view over the table `t`, and the row with the example's values."""

    sql: str
    schema: TableSchema
    good: tuple[Any, ...]


def draw_row(schema: TableSchema, good: Sequence[Any], random: Random) -> tuple[Any, ...]:
    """Return the row with one or several bad operands."""
    places = random.sample(range(len(good)), random.randint(1, len(good)))
    row = list(good)
    for place in places:
        row[place] = random.choice(BAD[schema.columns[place].type])
    return tuple(row)


def draw_views(example: str, random: Random) -> Iterator[OperandView]:
    """Yield views of an example (given without its SELECT), the one with the most operands first.

    >>> view = next(draw_views("sequence(1, 5)", Random(1)))
    >>> view.sql, view.good
    ('SELECT sequence(a0, a1) AS r FROM t', (1, 5))
    >>> view = next(draw_views("max(col) FROM VALUES (10), (50) AS tab(col)", Random(1)))
    >>> view.sql, view.good
    ('SELECT max(col) AS r FROM t', (10,))
    """
    if _ORDERED.search(example):
        return
    over = _OVER_VALUES.fullmatch(example)
    if over is not None:
        constants = _CONSTANT.findall(over["row"])
        names = [name.strip() for name in over["names"].split(",")]
        if len(names) == len(constants) == over["row"].count(",") + 1:
            yield from _shown(over["listed"], names, constants)
        return
    if re.search(r"\bFROM\b(?![^(]*\))", example, re.IGNORECASE):
        return
    found = list(_CONSTANT.finditer(example))
    choices = [list(found), *([each] for each in random.sample(found, len(found)))]
    for chosen in choices[:WHOLE_MAX]:
        text, end, names = "", 0, []
        for number, constant in enumerate(chosen):
            names.append(f"a{number}")
            text += example[end : constant.start()] + names[-1]
            end = constant.end()
        if chosen:
            yield from _shown(text + example[end:], names, [each[0] for each in chosen])


def _shown(listed: str, names: Sequence[str], constants: Sequence[str]) -> Iterator[OperandView]:
    values = tuple(map(_value, constants))
    kinds = {str: "string", int: "int", Decimal: _DECIMAL}
    columns = tuple(
        TableColumn(name, kinds[type(value)]) for name, value in zip(names, values, strict=True)
    )
    for shown in ("{}", "CAST({} AS string)"):  # show what cannot be stored as text
        sql = f"SELECT {shown.format(listed)} AS r FROM t"
        yield OperandView(sql, TableSchema(columns), values)


def _value(constant: str) -> str | int | Decimal:
    if constant.startswith("'"):
        return re.sub(r"\\(.)", r"\1", constant[1:-1].replace("''", "'"))
    number = Decimal(constant)
    return int(number) if "." not in constant and number < 2**31 else number


class OperandCheck:
    """Creates views of examples in an engine, and judges them."""

    def __init__(self, engine: EngineCaller, random: Random) -> None:
        self._engine = engine
        self._random = random
        self.views = self.in_error = 0
        """Number of views that were judged, and of bad rows that were an error."""
        self.wrong: list[str] = []
        self._number = 0

    async def judge(self, example: str, rows: int = 3) -> bool:
        """Create a view of an example and judge it with `rows` bad rows. Return False if Spark
        accepts none of its texts as a view."""
        for drawn in draw_views(example, self._random):
            self._number += 1
            dataflow = f"operands-{self._number}"

            async def check(plan: DeltaPlan, dataflow: str = dataflow) -> None:
                await MaintainedView(self._engine, plan, dataflow).prepare()

            try:
                tables = {"t": drawn.schema}
                plan = await compile_view(drawn.sql, tables, self._engine.analyze(), check=check)
            except (InvalidUsage, SqlSyntaxError, DefiniteError):
                continue
            except PenstockError as error:
                self._note(drawn, (), f"not made: {type(error).__name__}: {error}")
                return True
            self.views += 1
            for _ in range(rows):
                bad = draw_row(drawn.schema, drawn.good, self._random)
                try:
                    await self._lead(drawn, MaintainedView(self._engine, plan, dataflow), bad)
                except (PenstockError, AssertionError, OverflowError, ValueError) as error:
                    self._note(drawn, bad, f"{type(error).__name__}: {error}")
            await MaintainedView(self._engine, plan, dataflow).forget()
            return True
        return False

    async def _lead(self, drawn: OperandView, view: MaintainedView, bad: tuple[Any, ...]) -> None:
        """Insert the example's row, then a bad one, which is deleted again."""
        begun: Any = None
        changes = ((drawn.good, 1), (bad, 1), (bad, -1))
        for time, (row, diff) in enumerate(changes, 1):
            await view.advance([[(row, time, diff)]], 0 if time == 1 else time, time + 1)
            contents = [accumulated(updates, time) for updates in view.inputs]
            found = None if view.in_error else accumulated(view.output, time)
            try:
                plain = await self._engine.query(view.plan, contents, time)
                expected = accumulated(plain, time)
            except DefiniteError:
                expected = None
            # Whether try_… catches an error of its operand depends on how Spark evaluates it.
            lenient = expected is None and "try_" in drawn.sql
            assert found == expected or lenient, f"at {time}: {found} in place of {expected}"
            begun = found if time == 1 else begun
            self.in_error += time == 2 and found is None
        assert found == begun, f"after the row had gone: {found} in place of {begun}"

    def _note(self, drawn: OperandView, bad: tuple[Any, ...], what: str) -> None:
        self.wrong.append(f"{drawn.sql} {drawn.good} {bad}: {what}")
