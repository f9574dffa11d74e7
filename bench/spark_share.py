"""Spark's share of a small step, against the minimum cost of a Spark SQL query.

The child's engine runs in this process, so that both sides share one session. A step has 100
changes and the rows that they match in a state of a million, looked up as the dataflow does, which
is not timed. Ours is the time that the engine reports for the step. The floor is a one-stage
aggregate over 100 local rows, built each time and read with `toArrow`. ``anew``: the same steps
with their plans built each time. The 95th percentiles have no target.

``_10M``: ours is the same step over a state of ten million rows, the peer that over the first size.
All are measured in alternation, so that the JVM is equally warm for both sizes. The environment
variable ROWS sets other sizes (ROWS=1000000 omits the large one).
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.arrangement import Arrangement
from actors.engine.spark.java import JavaHome, find_java
from actors.engine.spark.jobs import JobTicket, SparkEngine
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.session import open_session, spark_conf
from actors.model.plan.delta import (
    AccumulateTotals,
    AdditiveMeasure,
    ConsolidateRows,
    DeltaPlan,
    FilterRows,
    HiddenState,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    ReduceGroups,
    SelectColumns,
)
from actors.model.plan.jobs import JobRows, RowsDone, RunStep
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.settings import Settings
from measure import Measure as Figure
from measure import Report, median, percentile, size_name, sizes

CHANGES = 100
GROUPS = 1000
SIZES = (1_000_000, 10_000_000)
SIZES_QUICK = (10_000, 100_000)
CHUNK = 500_000
"""Rows of state generated at a time: some 50 MB in memory, whatever the size of the state."""
TARGET_GROWTH = 1.1
TARGETS = {"stateless": 0.8, "aggregate": 1.0, "join3_aggregate": 1.0}
TARGETS_ANEW = {"aggregate": 4.0}
ORDERS = TableSchema(
    (
        TableColumn("id", "bigint"),
        TableColumn("customer", "bigint"),
        TableColumn("amount", "decimal(12,2)"),
    )
)
CUSTOMERS = TableSchema(
    (TableColumn("id", "bigint"), TableColumn("nation", "bigint"), TableColumn("name", "string"))
)
NATIONS = TableSchema((TableColumn("id", "bigint"), TableColumn("name", "string")))
HIDDEN = TableSchema(
    (TableColumn("g", "string"), TableColumn("n", "bigint"), TableColumn("m", "decimal(38,2)"))
)


def named(name: str, prefix: str, schema: TableSchema) -> SelectColumns:
    """Return an input with its columns prefixed."""
    columns = tuple(NamedExpression(f"{prefix}_{column}", column) for column in schema.names)
    return SelectColumns(NamedInput(name, schema.names), columns)


DELTA = named("d0", "o", ORDERS)
STATELESS = ConsolidateRows(
    SelectColumns(
        FilterRows(DELTA, "o_amount > 20"),
        (
            NamedExpression("id", "o_id"),
            NamedExpression("taxed", "o_amount * 1.19"),
            NamedExpression("c", "o_customer"),
        ),
    )
)
JOINED = PairRows(
    PairRows(DELTA, named("s1", "c", CUSTOMERS), (("o_customer", "c_id"),)),
    named("s2", "n", NATIONS),
    (("c_nation", "n_id"),),
)


def grouped(below: Node, key: str) -> Node:
    """Return the sum of amounts by group, with its hidden state."""
    sums = (AdditiveMeasure("m", "sum", "o_amount", "decimal(38,2)"),)
    made = ReduceGroups(below, (NamedExpression("g", key),), sums)
    return ConsolidateRows(AccumulateTotals(made, NamedInput("h0", HIDDEN.names), ("g",), ("m",)))


def plan_of(node: Node) -> DeltaPlan:
    """Return a plan with one stratum. Its declared output does not matter here."""
    return DeltaPlan(
        ("orders", "customers", "nations"),
        (ORDERS, CUSTOMERS, NATIONS),
        HIDDEN,
        "",
        "incremental",
        "",
        (PlanStratum((), node, ()),),
        (HiddenState(HIDDEN, ("g",)),),
    )


class State(msgspec.Struct):
    """The state that steps read: arrangements by key."""

    customers: Arrangement
    nations: Arrangement
    groups: Arrangement


def customers(count: int) -> Iterator[pa.Table]:
    """Yield `count` customers in chunks."""
    for start in range(0, count, CHUNK):
        ids = numpy.arange(start, min(start + CHUNK, count), dtype=numpy.int64)
        names = pc.binary_join_element_wise("customer", pa.array(ids).cast(pa.string()), " ")
        yield pa.table({"id": ids, "nation": ids % GROUPS, "name": names})


def load(folder: Path, count: int) -> State:
    """Load `count` customers, their nations, and the groups' sums."""

    def arranged(
        name: str, schema: TableSchema, key: str, chunks: Iterator[pa.Table]
    ) -> Arrangement:
        wanted = schema.arrow_updates()
        made = Arrangement(folder / name, schema, (key,))
        for chunk in chunks:
            ones = pa.array(numpy.ones(chunk.num_rows, numpy.int64))
            whole = pa.Table.from_arrays([*chunk.columns, ones, ones], wanted.names)
            made.fill(whole.cast(wanted))
        made.insert(wanted.empty_table(), 2)
        made.maintain()
        return made

    names = pa.array([f"nation {number}" for number in range(GROUPS)])
    whole = pa.array([count] * GROUPS)
    nations = pa.table({"id": range(GROUPS), "name": names})
    sums = pa.table({"g": names, "n": whole, "m": whole.cast(HIDDEN.arrow().field("m").type)})
    return State(
        arranged("c", CUSTOMERS, "id", customers(count)),
        arranged("n", NATIONS, "id", iter([nations])),
        arranged("g", HIDDEN, "g", iter([sums])),
    )


def rows(table: pa.Table, schema: TableSchema) -> JobRows:
    """Return rows in the form that a step carries."""
    return JobRows(schema, arrow=to_ipc(table.cast(schema.arrow_updates())))


def step_inputs(state: State, count: int, time_: int, random_: random.Random) -> dict[str, JobRows]:
    """Return 100 changes of orders and all rows that they match."""
    orders = pa.table(
        {
            "id": pa.array([random_.randrange(1 << 40) for _ in range(CHANGES)], pa.int64()),
            "customer": pa.array([random_.randrange(count) for _ in range(CHANGES)], pa.int64()),
            "amount": pa.array([Decimal(random_.randrange(100)) for _ in range(CHANGES)]),
            "__time": pa.array([time_ + random_.randrange(5) for _ in range(CHANGES)], pa.int64()),
            "__diff": pa.array([random_.choice([1, -1]) for _ in range(CHANGES)], pa.int64()),
        }
    )
    customers = state.customers.lookup(pa.table({"id": orders["customer"]}), 2)
    nations = state.nations.lookup(pa.table({"id": customers["nation"]}), 2)
    groups = state.groups.lookup(pa.table({"g": nations["name"]}), 2)
    return {
        "d0": rows(orders, ORDERS),
        "s1": rows(customers, CUSTOMERS),
        "s2": rows(nations, NATIONS),
        "h0": rows(groups, HIDDEN),
    }


class Bench:
    """The engine, and the floor query in its session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = Settings()
        session = open_session(spark_conf(settings, folder), folder)
        self.engine = SparkEngine(session, settings, folder)
        self.slot = self.engine.slot()
        self.numbers = 0
        few = [(n % 10, n) for n in range(CHANGES)]
        self.local = pa.table({"k": [k for k, _ in few], "v": [v for _, v in few]})

    def step(self, plan: PreparedPlan, inputs: Mapping[str, JobRows], lo: int) -> float:
        """Return the milliseconds of one step. At `lo` 0 its plan is built again."""
        self.numbers += 1
        name = f"s{self.numbers}"
        job = RunStep(name, "bench", 0, 0, dict(inputs), lo, lo + 5)
        answer = self.engine.run(self.slot, JobTicket(job, name, plan), "pool")
        assert isinstance(answer, RowsDone), answer
        assert answer.rows > 0
        assert answer.prepared == (lo > 0)
        return answer.spark_ms

    def floor(self) -> float:
        """Return the milliseconds of a one-stage aggregate."""
        session: Any = self.slot.sessions.get((), small=True).session
        started = time.perf_counter()
        made = session.createDataFrame(self.local).coalesce(1).groupBy("k").sum("v").toArrow()
        assert made.num_rows == 10
        return (time.perf_counter() - started) * 1000


def run(report: Report, folder: Path) -> None:
    """Warm up, then take all measures in alternation."""
    counts = sizes(SIZES_QUICK if report.quick else SIZES)
    warm, counted = (5, 10) if report.quick else (300, 100)
    states = {count: load(folder / str(count), count) for count in counts}
    bench = Bench(folder)
    plans = {
        "stateless": PreparedPlan(plan_of(STATELESS)),
        "aggregate": PreparedPlan(plan_of(grouped(DELTA, "concat('nation ', o_customer % 1000)"))),
        "join3_aggregate": PreparedPlan(plan_of(grouped(JOINED, "n_name"))),
    }
    times: dict[tuple[str, int], list[float]] = {}
    random_ = random.Random(1)

    def note(name: str, count: int, measure: Callable[[], float], number: int) -> None:
        value = measure()
        if number >= warm:
            times.setdefault((name, count), []).append(value)

    for number in range(warm + counted):
        note("floor", 0, bench.floor, number)
        for name, plan in plans.items():
            # Each size comes first in half of the rounds.
            for count in counts if number % 2 else counts[::-1]:
                inputs = step_inputs(states[count], count, 10, random_)
                note(name, count, partial(bench.step, plan, inputs, 10), number)
                if number % 5 == 0 and count == counts[0]:
                    note(f"{name}_anew", count, partial(bench.step, plan, inputs, 0), number)
    show(report, times, counts)


def show(report: Report, times: Mapping[tuple[str, int], list[float]], counts: list[int]) -> None:
    """Add the measures: the first size against the floor, the others against the first."""
    floor = median(times["floor", 0])
    for name, target in TARGETS.items():
        first = times[name, counts[0]]
        label = f"spark_share_{name}"
        report.add(Figure(label, median(first), floor, target=target))
        report.add(Figure(f"{label}_p95", percentile(first, 0.95), floor))
        anew = median(times[f"{name}_anew", counts[0]])
        report.add(Figure(f"{label}_anew", anew, floor, target=TARGETS_ANEW.get(name)))
        for count in counts[1:]:
            grown = median(times[name, count])
            whole = f"{label}_{size_name(count)}"
            report.add(Figure(whole, grown, median(first), target=TARGET_GROWTH))


def main() -> None:
    """Run the benchmark."""
    logging.getLogger("SQLQueryContextLogger").disabled = True
    report = Report("Spark's share of a step of 100 changes, against the floor of a Spark query.")
    with tempfile.TemporaryDirectory() as folder:
        java = find_java(Path(folder) / "java")
        if not isinstance(java, JavaHome):
            raise java
        os.environ["JAVA_HOME"] = str(java.home)
        run(report, Path(folder))
        report.close()


if __name__ == "__main__":
    main()
