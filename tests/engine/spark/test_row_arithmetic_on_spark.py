"""Arithmetic of assignments that is computed without Spark is what Spark computes."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]

from actors.doors.sql_session.row_arithmetic import arithmetic_of, computed_array
from actors.doors.sql_session.row_values import NotLocal
from actors.engine.sql.statements import generated_span
from actors.engine.sql.tokens import SqlDialect
from actors.model.plan.jobs import JobRows, SelectContents
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc

pytestmark = pytest.mark.spark

SCHEMA = TableSchema(
    (
        TableColumn("t", "tinyint"),
        TableColumn("s", "smallint"),
        TableColumn("i", "int"),
        TableColumn("l", "bigint"),
        TableColumn("d", "decimal(10,2)"),
        TableColumn("w", "decimal(38,6)"),
        TableColumn("f", "double"),
    )
)


def drawn(random: Random, depth: int = 0) -> str:
    if depth > 2 or random.random() < 0.4:
        return random.choice(
            [
                *("t", "s", "i", "l", "d", "w", "x.l", "f", "x.f", "f", "f"),
                *("3", "7L", "2S", "1.5", "0.1", "0.25BD", "2147483647"),
            ]
        )
    sides = (drawn(random, depth + 1) for _ in range(2))
    return f"({next(sides)} {random.choice('+-*')} {next(sides)})"


def test_spark_computes_the_same(child: ChildProcess) -> None:
    random = Random(7)
    values = [
        {
            "t": random.randint(-9, 9),
            "s": random.randint(-99, 99),
            "i": random.choice([None, random.randint(-(10**4), 10**4)]),
            "l": random.randint(-(10**9), 10**9),
            "d": Decimal(random.randint(-(10**6), 10**6)) / 100,
            "w": random.choice([None, Decimal(random.randint(-(10**9), 10**9)) / 1000]),
            "f": random.choice([None, -0.0, 1e308, float("inf"), random.uniform(-9, 9), 0.1, 3e-9]),
        }
        for _ in range(20)
    ]
    rows = pa.Table.from_pylist(values, SCHEMA.arrow())
    here: list[tuple[str, TableColumn, list[Any]]] = []
    for _ in range(600):
        text, column = drawn(random), random.choice(SCHEMA.columns)
        try:
            node = arithmetic_of(generated_span(SqlDialect.SPARK, text), ())
            found = computed_array(node, rows, SCHEMA, "x", column)
        except NotLocal:
            continue
        here.append((text, column, found.to_pylist()))
    assert len(here) > 100, "too little is computed here: the test shows nothing"
    assert sum(column.type == "double" for _, column, _ in here) > 20
    counted = rows.append_column("n", pa.array(range(len(values)), pa.int64()))
    ones = pa.array([1] * len(values), pa.int64())
    shape = TableSchema((*SCHEMA.columns, TableColumn("n", "bigint")))
    given = JobRows(
        shape, arrow=to_ipc(counted.append_column(TIME, ones).append_column(DIFF, ones))
    )
    listed = ", ".join(
        f"CAST({text} AS {column.type}) AS c{number}"
        for number, (text, column, _) in enumerate(here)
    )
    output = TableSchema(
        tuple(TableColumn(f"c{number}", each[1].type) for number, each in enumerate(here))
    )
    sql = f"SELECT {listed} FROM accounts x ORDER BY n"
    answer = table_of(child.ask(SelectContents(job_id(), sql, (("accounts", given),), output)))
    for number, (text, _, wanted) in enumerate(here):
        # Texts, as NaN equals nothing and -0.0 equals 0.0.
        assert list(map(repr, answer[f"c{number}"].to_pylist())) == list(map(repr, wanted)), text
