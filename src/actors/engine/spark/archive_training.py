"""Writes a class archive: ``python -m actors.engine.spark.archive_training ARCHIVE SCRATCH``.

Starts an engine as a service would, runs jobs of every kind so that the classes they need are
loaded, and shuts its JVM down cleanly, which writes the archive
(`actors.engine.spark.class_archive`). The jobs must be answered, but their answers are not read.
The exit status is 0, or 2 after a line that says what failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from actors.engine.spark.class_archive import recording_options
from actors.engine.spark.jobs import JobTicket, SparkEngine
from actors.engine.spark.prepared_plan import PreparedPlan
from actors.engine.spark.session import JAVA_OPTIONS, open_session, spark_conf
from actors.model.plan.delta import (
    AdditiveMeasure,
    ConsolidateRows,
    DeltaPlan,
    NamedInput,
    Node,
    PairRows,
    PlanStratum,
    ReduceGroups,
    SelectColumns,
)
from actors.model.plan.input_names import InputKind
from actors.model.plan.jobs import (
    AnalyzeStatement,
    ComputeDifference,
    Job,
    JobFailed,
    JobRows,
    PreparePlan,
    RunStep,
)
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.settings import Settings

STATUS_FAILED: Final = 2
CHANGES: Final = InputKind.CHANGES.text(0)
STATE: Final = InputKind.STATE.text(1)
TABLE: Final = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "string")))
JOINED: Final = PairRows(
    SelectColumns(
        NamedInput(CHANGES, TABLE.names),
        (NamedExpression("a_k", "k"), NamedExpression("a_v", "upper(v)")),
    ),
    SelectColumns(
        NamedInput(STATE, TABLE.names), (NamedExpression("b_k", "k"), NamedExpression("b_v", "v"))
    ),
    (("a_k", "b_k"),),
)
COUNTED: Final = ReduceGroups(
    NamedInput(CHANGES, TABLE.names),
    (NamedExpression("k", "k"),),
    (AdditiveMeasure("m", "count", "v", "bigint"),),
)
PLANS: Final[dict[str, tuple[Node, TableSchema]]] = {
    "join": (ConsolidateRows(JOINED), TableSchema(tuple(
        TableColumn(name, kind) for name, kind in
        (("a_k", "bigint"), ("a_v", "string"), ("b_k", "bigint"), ("b_v", "string"))
    ))),
    "count": (COUNTED, TableSchema(tuple(TableColumn(name, "bigint") for name in ("k", "n", "m")))),
}  # fmt: skip
QUERY: Final = "SELECT v, count(*) AS n FROM t WHERE k > 0 GROUP BY v"
COUNTS: Final = TableSchema((TableColumn("v", "string"), TableColumn("n", "bigint")))


def _rows(*rows: tuple[int, str]) -> JobRows:
    columns: list[Sequence[Any]] = [*zip(*rows, strict=True), [1] * len(rows), [1] * len(rows)]
    wanted = TABLE.arrow_updates()
    arrays = [pa.array(values, f.type) for values, f in zip(columns, wanted, strict=True)]
    return JobRows(TABLE, arrow=to_ipc(pa.Table.from_arrays(arrays, schema=wanted)))


def jobs() -> Iterator[tuple[Job, PreparedPlan | None]]:
    """Yield jobs of every kind, each with the plan that it names."""
    given = _rows((1, "a"), (2, "b"))
    yield AnalyzeStatement("analyze", (("t", TABLE),), QUERY, translate=True), None
    yield AnalyzeStatement("refuse", (("t", TABLE),), "SELECT rand() AS r FROM t"), None
    yield ComputeDifference("difference", QUERY, (("t", given),), COUNTS, 1, given_counts()), None
    for name, (node, output) in PLANS.items():
        strata = (PlanStratum((), node, ()),)
        plan = DeltaPlan(("t", "u"), (TABLE, TABLE), output, "", "incremental", "", strata)
        prepared = PreparedPlan(plan)
        inputs = {CHANGES: given} | ({STATE: given} if name == "join" else {})
        yield PreparePlan(f"prepare {name}", name, plan), prepared
        for lo in (0, 1, 1):  # Planned from scratch; prepared; executed again.
            yield RunStep(f"step {name}", name, 0, 0, inputs, lo, 2), prepared


def given_counts() -> JobRows:
    """Return the old contents for the difference, which are empty."""
    return JobRows(COUNTS, arrow=to_ipc(COUNTS.arrow_updates().empty_table()))


def train(archive: Path, scratch: Path) -> str:
    """Run the engine and shut it down; return what failed, or ""."""
    options = {JAVA_OPTIONS: recording_options(archive)}
    settings = Settings(spark_master="local[1]", spark_conf=options)
    engine = SparkEngine(open_session(spark_conf(settings, scratch), scratch), settings, scratch)
    slot = engine.slot()
    for job, prepared in jobs():
        answer = engine.run(slot, JobTicket(job, job.job_id, prepared), "training")
        if isinstance(answer, JobFailed):
            return f"{job.job_id}: {answer.text}"
    process = engine.session.sparkContext._gateway.proc
    # Not `SparkEngine.end`, which kills the JVM: only a JVM that exits normally writes the archive.
    engine.session.stop()
    process.stdin.close()  # The gateway's program ends when its standard input is closed.
    status = process.wait()
    return f"the JVM exited with status {status}" if status else ""


def main(arguments: Sequence[str]) -> int:
    """Write the archive that the arguments name; return the exit status."""
    archive, scratch = map(Path, arguments)
    failed = train(archive, scratch)
    if failed:
        print(f"training failed: {failed}", file=sys.stderr, flush=True)
    return STATUS_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
