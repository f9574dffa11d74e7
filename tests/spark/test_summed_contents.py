"""Contents of parts that hold a row and its deletion: a row that is gone makes nothing raise."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_child import (  # type: ignore[import-not-found]
    ChildProcess,
    job_id,
    table_of,
    updates,
)

from actors.plan.delta import DeltaPlan, Input, Select, Stratum
from actors.plan.jobs import JobFailed, Prepare, Prepared, Rows, Step
from actors.plan.relational import Named
from actors.plan.schema import Column, Schema

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TEXTS = Schema((Column("s", "string"), Column("f", "double")))
NUMBERS = Schema((Column("n", "int"), Column("f", "double")))
NODE = Select(Input("d0", ("s", "f")), (Named("n", "CAST(`s` AS int)"), Named("f", "f")))
PLAN = DeltaPlan(
    ("t",), (TEXTS,), NUMBERS, "select cast(s as int) as n, f from t", "incremental", "",
    (Stratum((), NODE, ("d0",)),),
)  # fmt: skip
LARGE_BYTES = 5 * 1024 * 1024
"""More than Spark is given as rows."""


def padding(size: int) -> list[tuple[object, ...]]:
    """Rows beside those of a test, so many bytes of them."""
    return [(str(number), number + 0.25, 1, 1) for number in range(size // 17)]


@pytest.mark.parametrize("size", [0, LARGE_BYTES], ids=["few", "many"])
@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "still there"])
def test_a_row_that_is_gone_raises_nothing(
    child: ChildProcess, tmp_path: Path, size: int, gone: bool
) -> None:
    more = padding(size)
    parts: list[pa.Table] = [
        updates(TEXTS, [("seven", -0.0, 1, 1), ("7", 0.5, 1, 2), *more]),
        updates(TEXTS, [("seven", -0.0, 2, -1), ("7", 0.5, 2, -1)] if gone else [("8", 1.0, 2, 2)]),
    ]
    files = []
    for number, part in enumerate(parts):
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(part, files[-1], compression="none", use_dictionary=False)
    name = job_id()
    assert isinstance(child.ask(Prepare(job_id(), name, PLAN)), Prepared)
    rows = Rows(TEXTS, files=tuple(files), advance_to=4)
    answer = child.ask(Step(job_id(), name, 0, 0, {"d0": rows}, 0, 5, at_once=True))
    if not gone:
        assert isinstance(answer, JobFailed)
        assert "CAST_INVALID_INPUT" in answer.text
        return
    found = table_of(answer).to_pylist()
    assert len(found) == len(more) + 1
    assert {"n": 7, "f": 0.5, "__time": 4, "__diff": 1} in found
