"""Verifies modes by measurement: the rows read by a step's lookups must not grow with the state.

`measure_reads` runs the views of a checked script twice over the same last changes: once on the
script's own state, and once on ten times as much. For the latter, nine copies of every row are
added whose values all differ, so that they join among themselves and lie in groups that the changes
do not touch. The rows that lookups return are counted. A view that is labelled incremental or keyed
and reads more than `GROWTH_MAX` times as many rows on the larger state is WRONG: its cost depends
on the state, not on the change.

The plan is checked as well. If it reads a column of a table that the view's text does not name,
updates of that column would cause lookups and jobs for nothing, which is also WRONG.

Rules: the first half of the script's changes is the state, each later timestamp is a step, and
strata run one by one. A NULL becomes a value in the copies, because they would otherwise share the
group of NULL keys; Booleans stay as they are. A view in error is not measured. A key that maps many
values to few (``k % 2``) puts copies into touched groups, so it cannot be measured this way.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from actors.engine.views.delta import SINGLE_ROW_READ
from actors.engine.views.input_uses import input_uses
from actors.model.plan.delta import columns_kept
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import PenstockError
from actors.testing.checking import CheckedScript, ViewResult
from actors.testing.expressions import INTEGERS, WIDE, decimal_digits
from actors.testing.maintain import MaintainedView
from actors.testing.nodes import Update as Row
from actors.testing.view_scripts import inlined, random_value

COPIES: Final = 9
_COUNTED: Final = re.compile(r"\bcount\s*\(\s*\*\s*\)")
_ALL_COLUMNS: Final = re.compile(r"(?:\bselect|\bdistinct|\ball|,|\.)\s*\*|\bnatural\b")
"""Matches a query that reads columns without naming them."""
GROWTH_MAX: Final = 1.2
_STEP: Final = 1000
_DAYS: Final = 4000


class ScalingReads(dict[str, int]):
    """Rows read by lookups, by view; -1 for a view that could not be measured."""


async def measure_reads(check: CheckedScript) -> list[ViewResult]:
    """Return the views of the script. They are WRONG if they read more on more state, or if a view
    that is declared growing does not. Raises `ScriptError`."""
    await check.compile()
    results = check.results()
    wanted = [
        r
        for r in results
        # The reason of a view says so if it reads a state in full for a single changed row.
        if r.mode in ("incremental", "keyed")
        and r.verdict == "exact"
        and SINGLE_ROW_READ not in r.reason
    ]
    times = check.times[:-1]
    if not wanted or len(times) < 2:
        return results
    small = await _reads(check, times, 0)
    large = await _reads(check, times, COPIES)
    for result in wanted:
        few, many = small[result.view], large[result.view]
        if few < 0 or many < 0:
            result.detail = "not measured: in error"
            continue
        result.detail = f"{few} rows read, {many} of {COPIES + 1} times the state"
        if (many > GROWTH_MAX * few) != (result.view in check.script.growing):
            result.verdict = "WRONG"
        unnamed = _unnamed_read(check, result.view)
        if unnamed:
            result.verdict, result.detail = "WRONG", f"reads {unnamed}, which it does not name"
    await check.forget()
    return results


def _unnamed_read(check: CheckedScript, name: str) -> str:
    """Return a column of a table that a view's plan reads and its text does not name; "" if there
    is none, or if the text names columns in another way. Key columns are exempt, because they
    identify rows."""
    (view,) = (each for each in check.script.views if each.name == name)
    text = _COUNTED.sub("", inlined(check.script, view).lower())
    if _ALL_COLUMNS.search(text):
        return ""
    plan = check.plans[name]
    for read, use in zip(plan.inputs, input_uses(plan), strict=True):
        schema = check.script.tables.get(read, TableSchema(()))
        counted = columns_kept(schema, set())  # the column that is kept if no column is read
        for column in use.schema.columns:
            word = rf"(?<!\w){re.escape(column.name.lower())}(?!\w)"
            named = column.name in schema.key or re.search(word, text)
            if column in schema.columns and not named and use.schema.columns != counted:
                return f"{read}.{column.name}"
    return ""


async def _reads(check: CheckedScript, times: list[int], copies: int) -> ScalingReads:
    middle = times[len(times) // 2]
    base = {name: list(rows) for name, rows in check.base.items()}
    for name, rows in base.items():
        schema = check.script.tables[name]
        kinds = [column.type for column in schema.columns]
        state: Counter[Any] = Counter()
        for row, time, diff in rows:
            if time < middle:
                state[row] += diff
        for copy in range(1, copies + 1):
            for row, weight in state.items():
                other = tuple(
                    shift_value(value, kind, copy) for value, kind in zip(row, kinds, strict=True)
                )
                rows.append((other, max(middle - 1, 0), weight))
    views: dict[str, MaintainedView] = {}
    found = ScalingReads()
    for name in check.plans:
        views[name] = check.maintained(name, fuse=False)
        found[name] = 0
    lo = 0
    for hi in [middle, *(time + 1 for time in times if time >= middle)]:
        if hi <= lo:
            continue
        for name, view in views.items():
            deltas = [_delta(base, views, read, lo, hi) for read in view.plan.inputs]
            try:
                await view.advance(deltas, lo, hi)
            except PenstockError:
                found[name] = -1
            if view.in_error:
                found[name] = -1
        lo = hi
    for name, view in views.items():
        if found[name] == 0:
            found[name] = sum(view.rows_read[1:])
    return found


def _delta(
    base: dict[str, list[Row]], views: dict[str, MaintainedView], name: str, lo: int, hi: int
) -> list[Row]:
    updates = base[name] if name in base else views[name].output
    return [update for update in updates if lo <= update[1] < hi]


def shift_value(value: Any, kind: str, copy: int) -> Any:
    """Return another value of a type for each copy, if the type has so many values."""
    if value is None:
        return (
            shift_value(random_value(kind, random.Random(7)), kind, copy) if _simple(kind) else None
        )
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        bits = INTEGERS.get(kind, 64)
        step = _STEP if bits > 8 else 11
        made = value + step * copy
        return made if made < 1 << (bits - 1) else value - step * copy
    if isinstance(value, float):
        return value + _STEP * copy if math.isfinite(value) else float(_STEP * copy)
    if isinstance(value, Decimal):
        precision, scale = decimal_digits(kind)
        far = copy * Decimal(10) ** max(-scale, min(3, precision - scale - 2))
        wider = WIDE.add(value, far)
        fits = wider.copy_abs() < 10 ** (precision - scale)
        return wider if fits else WIDE.subtract(value, far)
    if isinstance(value, str):
        return f"{value}~{copy}"
    if isinstance(value, bytes):
        return value + bytes([copy])
    if isinstance(value, date | datetime):
        return value + timedelta(days=_DAYS * copy)
    return value


def _simple(kind: str) -> bool:
    return "<" not in kind and kind not in ("void", "boolean", "variant")
