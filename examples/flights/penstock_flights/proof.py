"""The demo's proof: comparing the service's views with plain Spark over the demo's own log.

For each timestamp, the tables' contents are computed from `ChangeLog` and written as Parquet. A
separate process (`actors.engine.spark.reference_spark`) runs each view's query over them, and the
service reads the view ``AS OF`` the same timestamp. Both results are compared as bags. Floats may
differ by `TOLERANCE`, because sums of floats depend on their order; all other values must be equal.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.runtime.errors import EngineError
from actors.runtime.progress import Time
from penstock_flights.play import ChangeLog, DemoView

TOLERANCE: Final = 1e-9
LOOKED_BACK: Final = 24
SHOWN_MAX: Final = 5
"""Limit of the differing rows to show for one comparison."""

Answers: TypeAlias = dict[tuple[str, Time], pa.Table]
Row: TypeAlias = tuple[Any, ...]


class DemoReader(Protocol):
    """The part of `actors.Client` that the proof uses."""

    async def peek(self, name: str, as_of: Time | None = None) -> pa.Table:
        """Return the contents as of a timestamp."""
        ...


class ViewComparison(msgspec.Struct, frozen=True):
    """The comparison of one view at one timestamp."""

    view: str
    time: Time
    rows: int
    """Number of rows in Spark's result."""
    differences: tuple[str, ...] = ()
    """Readable descriptions of the differences; empty if the results are equal."""


def choose_times(log: ChangeLog, count: int) -> list[Time]:
    """Choose up to `count` timestamps from the whole stream, including the last write."""
    last = len(log.entries) - 1
    chosen = {last}
    for number in range(count - 1):
        index = last * (2 * number + 1) // (2 * count)
        # The largest of the preceding writes, because at night a view may be empty. Entry 0, with
        # the initial rows, is not a tick of the stream.
        window = range(max(min(1, index), index - LOOKED_BACK + 1), index + 1)
        chosen.add(max(window, key=lambda i: (_changes(log, i), i)))
    return [log.entries[index].time for index in sorted(chosen)]


def _changes(log: ChangeLog, index: int) -> int:
    return sum(delta.changes for delta in log.entries[index].deltas)


async def prove(
    client: DemoReader,
    log: ChangeLog,
    views: Sequence[DemoView],
    times: Sequence[Time],
    scratch: Path,
    report: Callable[[ViewComparison], None] = lambda comparison: None,
) -> list[ViewComparison]:
    """Compare all views at all timestamps. Raises `EngineError` if plain Spark cannot run."""
    wanted = await expected(log, views, times, scratch)
    made = []
    for time in times:
        for view in views:
            found = await client.peek(view.name, as_of=time)
            right = wanted[view.name, time]
            comparison = ViewComparison(
                view.name, time, right.num_rows, tuple(differences(right, found))
            )
            report(comparison)
            made.append(comparison)
    return made


async def expected(
    log: ChangeLog, views: Sequence[DemoView], times: Sequence[Time], scratch: Path
) -> Answers:
    """Compute plain Spark's results by view and timestamp. Raises `EngineError`."""
    request, outputs = await anyio.to_thread.run_sync(_lay_out, log, views, times, scratch)
    command = [sys.executable, "-m", "actors.engine.spark.reference_spark", str(request)]
    done = await anyio.run_process(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        raise EngineError(f"plain Spark failed: {lines[-1] if lines else 'no output'}")
    return {key: pq.read_table(path) for key, path in outputs.items()}


def _lay_out(
    log: ChangeLog, views: Sequence[DemoView], times: Sequence[Time], scratch: Path
) -> tuple[Path, dict[tuple[str, Time], Path]]:
    """Write the tables at each timestamp, and a request file. Return the path of the request, and
    the paths of the results."""
    queries: list[dict[str, Any]] = []
    outputs: dict[tuple[str, Time], Path] = {}
    for time in times:
        tables: dict[str, str] = {}
        for name, rows in log.contents(time).items():
            path = scratch / f"{name}-{time}.parquet"
            pq.write_table(rows, path)
            tables[name] = str(path)
        for view in views:
            output = outputs[view.name, time] = scratch / f"answer-{view.name}-{time}.parquet"
            queries.append({"sql": view.sql, "tables": tables, "output": str(output)})
    request = scratch / "request.json"
    request.write_bytes(msgspec.json.encode({"queries": queries, "scratch": str(scratch)}))
    return request, outputs


def differences(right: pa.Table, found: pa.Table) -> list[str]:
    """Compare two bags of rows. Return readable differences; empty if the bags are equal."""
    if right.schema.names != found.schema.names:
        return [f"columns are {found.schema.names}: expected {right.schema.names}"]
    wrong_types = [
        f"column {a.name} is {b.type}: expected {a.type}"
        for a, b in zip(right.schema, found.schema, strict=True)
        if a.type != b.type
    ]
    if wrong_types:
        return wrong_types
    wanted, given = _bag(right), _bag(found)
    lines: list[str] = []
    for exact in sorted(wanted.keys() | given.keys(), key=repr):
        missing, extra = _unmatched(wanted.get(exact, []), given.get(exact, []))
        lines += [f"missing {exact + floats}" for floats in missing]
        lines += [f"extra   {exact + floats}" for floats in extra]
    if len(lines) > SHOWN_MAX:
        return [*lines[:SHOWN_MAX], f"and {len(lines) - SHOWN_MAX} more rows"]
    return lines


def _bag(table: pa.Table) -> dict[Row, list[Row]]:
    """Group the float columns of the rows by all other columns."""
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    exact = [name for name in table.column_names if name not in floats]
    groups: dict[Row, list[Row]] = defaultdict(list)
    exact_rows, float_rows = _tuples(table, exact), _tuples(table, floats)
    for key, values in zip(exact_rows, float_rows, strict=True):
        groups[key].append(values)
    return groups


def _tuples(table: pa.Table, names: Sequence[str]) -> list[Row]:
    if not names:
        return [()] * table.num_rows
    columns = [
        # Converting timestamps to integers avoids the need for a time zone database.
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in (table[name] for name in names)
    ]
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _unmatched(right: Sequence[Row], found: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of floats without a match in the other list, for both lists."""
    left_over = list(found)
    missing = []
    for row in right:
        partner = next((other for other in left_over if _close(row, other)), None)
        if partner is None:
            missing.append(row)
        else:
            left_over.remove(partner)
    return missing, left_over


def _close(one: Row, other: Row) -> bool:
    return all(
        a is b
        or (
            a is not None
            and b is not None
            # NaN counts as equal to NaN.
            and (math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b))
        )
        for a, b in zip(one, other, strict=True)
    )
