"""A join with an aggregate as a plan of two strata: its rows, its parts, and what it makes."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from delta_model import Model, Updates, consolidated  # type: ignore[import-not-found]
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    ipc,
    job_id,
    table_of,
    updates,
)

from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    ConsolidateRows,
    DeltaPlan,
    HiddenState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    ReduceGroups,
    SelectColumns,
    UnionRows,
)
from actors.model.plan.jobs import (
    ComputeDifference,
    JobRows,
    PlanPrepared,
    PreparePlan,
    RowsDone,
    RunStep,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema

LEFT = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("v", "int"), TableColumn("s", "string"))
)
RIGHT = TableSchema((TableColumn("k", "bigint"), TableColumn("w", "decimal(12,2)")))
GROUPS = TableSchema(
    (TableColumn("g", "string"), TableColumn("n", "bigint"), TableColumn("m", "decimal(38,2)"))
)
TO = TableColumn("__to", "int")


def left(name: str) -> Node:
    made = (NamedExpression("a_k", "k"), NamedExpression("a_v", "v"), NamedExpression("a_s", "s"))
    return SelectColumns(NamedInput(name, LEFT.names), made)


def right(name: str) -> Node:
    return SelectColumns(
        NamedInput(name, RIGHT.names), (NamedExpression("b_k", "k"), NamedExpression("b_w", "w"))
    )


def pair(one: str, other: str) -> Node:
    return PairRows(left(one), right(other), (("a_k", "b_k"),), "a_v < b_w")


def named(columns: tuple[str, ...], prefix: str) -> tuple[NamedExpression, ...]:
    return tuple(NamedExpression(f"{prefix}{name}", name) for name in columns)


JOINED = UnionRows((pair("d0", "s1"), pair("s0", "d1"), pair("d0", "d1")))
CONTRIBUTIONS = ReduceGroups(
    JOINED,
    (NamedExpression("g", "upper(a_s)"),),
    (AdditiveMeasure("m", "sum", "b_w", "decimal(38,2)"),),
)
TOTALS = AccumulateTotals(
    NamedInput("r0", GROUPS.names), NamedInput("h0", GROUPS.names), ("g",), ("m",)
)
BOTH = (*named(GROUPS.names, "o_"), *named(GROUPS.names, "h0_"), NamedExpression("__to", "3"))
PLAN = DeltaPlan(
    inputs=("l", "r"),
    input_schemas=(LEFT, RIGHT),
    output=GROUPS,
    sql="",
    mode="incremental",
    reason="",
    strata=(
        PlanStratum((), CONTRIBUTIONS, ()),
        PlanStratum((), ConsolidateRows(SelectColumns(TOTALS, BOTH)), ()),
    ),
    hidden=(HiddenState(GROUPS, ("g",)),),
)
MEANINGS = {
    "a_v < b_w": lambda row: (
        None if row["a_v"] is None or row["b_w"] is None else row["a_v"] < row["b_w"]
    ),
    "upper(a_s)": lambda row: None if row["a_s"] is None else row["a_s"].upper(),
    "3": lambda row: 3,
}


class History:
    """The updates of a table: rows come, and rows that are there go."""

    def __init__(self, schema: TableSchema, seed: int) -> None:
        self.schema = schema
        self.rows: list[Any] = []
        self._there: list[tuple[Any, ...]] = []
        self._random = random.Random(seed)

    def grow(self, lo: int, hi: int) -> list[Any]:
        """Updates at times in ``[lo, hi)``, in the order of time."""
        made = []
        for time in sorted(self._random.choices(range(lo, hi), k=12)):
            if self._there and self._random.random() < 0.35:
                at = self._random.randrange(len(self._there))
                made.append((*self._there.pop(at), time, -1))
            else:
                row = tuple(self._value(column) for column in self.schema.columns)
                self._there.append(row)
                made.append((*row, time, 1))
        self.rows += made
        return made

    def _value(self, column: TableColumn) -> Any:
        if self._random.random() < 0.15:
            return None
        if column.type == "string":
            return self._random.choice(["x", "X", "y", "ä"])
        if column.type.startswith("decimal"):
            return Decimal(self._random.randrange(900)) / 100
        return self._random.randrange(4)


def as_model(schema: TableSchema, rows: list[Any]) -> Updates:
    return [(dict(zip(schema.names, row[:-2], strict=True)), row[-2], row[-1]) for row in rows]


def from_table(table: Any) -> Updates:
    return [
        ({k: v for k, v in row.items() if k not in (TIME, DIFF)}, row[TIME], row[DIFF])
        for row in table.to_pylist()
    ]


def rows_of(schema: TableSchema, rows: list[Any]) -> JobRows:
    return JobRows(schema, arrow=ipc(schema, rows))


def modeled(inputs: dict[str, tuple[TableSchema, list[Any]]], lo: int, hi: int) -> Counter[Any]:
    given = {name: as_model(schema, rows) for name, (schema, rows) in inputs.items()}
    model = Model(given, MEANINGS, lo, hi)
    for index, stratum in enumerate(PLAN.strata):
        given[f"r{index}"] = model.run(stratum.node)
    return Counter(consolidated(given["r1"]))


def view_of(lefts: list[Any], rights: list[Any]) -> Counter[Any]:
    """The view from scratch: (g, n, m) → 1, from whole contents."""
    counts: Counter[Any] = Counter()
    sums: Counter[Any] = Counter()
    for k, v, s, _, one in lefts:
        for key, w, _, other in rights:
            if None not in (k, key, v, w) and k == key and v < w:
                group = None if s is None else s.upper()
                counts[group] += one * other
                sums[group] += w * one * other
    return Counter({(group, n, sums[group]): 1 for group, n in counts.items() if n})


def padding(schema: TableSchema, time: int) -> list[Any]:
    """Rows at a time that no job asks for, enough to make parts too large for the driver."""
    assert schema == LEFT
    random_ = random.Random(5)
    return [(7, n, random_.randbytes(60).hex(), time, 1) for n in range(50_000)]


def write_parts(folder: Path, rows: list[Any], later: int) -> tuple[str, ...]:
    part, large = folder / "part.parquet", folder / "large.parquet"
    pq.write_table(updates(LEFT, rows), part)
    noise = updates(LEFT, padding(LEFT, later))
    pq.write_table(noise, large, compression="none", use_dictionary=False)
    assert large.stat().st_size > 4 * 1024 * 1024
    return str(part), str(large)


def check_maintained(engine: ChildProcess) -> list[bool]:
    """Steps one after the other, each as the model says, and the view right after each. Returns
    which of them were prepared."""
    prepared = []
    answer = engine.ask(PreparePlan(job_id(), "view", PLAN))
    assert isinstance(answer, PlanPrepared), answer
    lefts, rights = History(LEFT, 1), History(RIGHT, 2)
    hidden: list[Any] = []
    for lo in range(0, 40, 10):
        old = {"s0": list(lefts.rows), "s1": list(rights.rows), "h0": list(hidden)}
        new = {"d0": lefts.grow(lo, lo + 10), "d1": rights.grow(lo, lo + 10)}
        schemas = {"s0": LEFT, "d0": LEFT, "s1": RIGHT, "d1": RIGHT, "h0": GROUPS}
        inputs = {name: (schemas[name], rows) for name, rows in (old | new).items()}
        given = {name: rows_of(schema, rows) for name, (schema, rows) in inputs.items()}
        answer = engine.ask(RunStep(job_id(), "view", 0, 1, given, lo, lo + 10))
        assert isinstance(answer, RowsDone), answer
        prepared.append(answer.prepared)
        found = from_table(table_of(answer))
        assert consolidated(found) == modeled(inputs, lo, lo + 10)
        hidden += [
            (row["h0_g"], row["h0_n"], row["h0_m"], time, diff)
            for row, time, diff in found
            if row[TO.name] == 3
        ]
        held: Counter[Any] = Counter()
        for row in hidden:
            held[row[:3]] += row[-1]
        assert +held == view_of(lefts.rows, rights.rows)
        assert all(weight >= 0 for weight in held.values())
    assert len(+held) > 2
    return prepared


def check_large_step(engine: ChildProcess, folder: Path) -> int:
    """A step over parts that Spark reads itself. Returns how many updates it made."""
    assert isinstance(engine.ask(PreparePlan(job_id(), "large", PLAN)), PlanPrepared)
    lefts, rights = History(LEFT, 3).grow(0, 10), History(RIGHT, 4).grow(0, 10)
    files = write_parts(folder, lefts, 99)
    given = {"d0": JobRows(LEFT, files=files, lower=0, upper=10), "d1": rows_of(RIGHT, rights)}
    answer = engine.ask(RunStep(job_id(), "large", 0, 1, given, 0, 10))
    found = consolidated(from_table(table_of(answer)))
    assert found == modeled({"d0": (LEFT, lefts), "d1": (RIGHT, rights)}, 0, 10)
    assert not answer.prepared
    return len(found)


DIFFERENCE = {("a", 3, 50, 1), ("a", 2, 50, -1), (None, 1, 50, 1), ("gone", 1, 50, -2)}


def check_differences(engine: ChildProcess, folder: Path) -> list[set[tuple[Any, ...]]]:
    """Plain Spark over parts that it reads itself, and over rows sent along. Returns both results,
    which should be `DIFFERENCE`."""
    output = TableSchema((TableColumn("s", "string"), TableColumn("c", "bigint")))
    rows: list[Any] = [(1, 1, "a", 1, 1), (1, 1, "a", 3, 2), (2, 2, "a", 2, 1), (2, 2, "a", 5, -1)]
    rows.append((3, None, None, 4, 1))
    files = write_parts(folder, rows, 99)
    old = rows_of(output, [("a", 2, 7, 1), ("gone", 1, 7, 2)])
    sql = "SELECT s, count(*) FROM t GROUP BY s"
    made = []
    for given in (JobRows(LEFT, files=files, lower=0, upper=50), rows_of(LEFT, rows)):
        answer = engine.ask(ComputeDifference(job_id(), sql, (("t", given),), output, 50, old))
        made.append({(r["s"], r["c"], r[TIME], r[DIFF]) for r in table_of(answer).to_pylist()})
    return made
