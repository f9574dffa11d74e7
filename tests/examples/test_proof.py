from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.engine.spark import reference_spark
from actors.runtime.errors import EngineError
from actors.runtime.progress import Time
from penstock_flights import flights, proof
from penstock_flights.play import VIEWS, ChangeLog

EXPECTED = proof.expected


def bag(*rows: tuple[str | None, float | None]) -> pa.Table:
    return pa.table(
        {
            "name": pa.array([name for name, _ in rows], pa.string()),
            "mean": pa.array([mean for _, mean in rows], pa.float64()),
        }
    )


def test_equal_bags_in_any_order() -> None:
    nan = float("nan")
    one = bag(("a", 1.0), ("b", None), (None, nan), ("a", 2.0), ("a", 1.0))
    other = bag(("a", 2.0), (None, nan), ("a", 1.0 + 1e-12), ("b", None), ("a", 1.0))
    assert proof.differences(one, other) == []


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (bag(("a", 1.0)), ["missing ('a', 1.0)"]),
        (bag(("a", 1.0), ("a", 1.0), ("a", 1.0)), ["extra   ('a', 1.0)"]),
        (bag(("a", 1.0), ("a", 1.001)), ["missing ('a', 1.0)", "extra   ('a', 1.001)"]),
        (bag(("a", 1.0), ("a", None)), ["missing ('a', 1.0)", "extra   ('a', None)"]),
        (bag(("a", 1.0), ("b", 1.0)), ["missing ('a', 1.0)", "extra   ('b', 1.0)"]),
    ],
)
def test_every_kind_of_difference_is_shown(found: pa.Table, lines: list[str]) -> None:
    assert proof.differences(bag(("a", 1.0), ("a", 1.0)), found) == lines


def test_columns_and_types_count_too() -> None:
    right = bag(("a", 1.0))
    assert "columns are" in proof.differences(right, right.rename_columns(["x", "mean"]))[0]
    other = right.set_column(1, "mean", right["mean"].cast(pa.float32()))
    assert proof.differences(right, other) == ["column mean is float: expected double"]


def test_a_long_list_is_cut() -> None:
    found = bag(*((f"r{number}", 0.0) for number in range(20)))
    lines = proof.differences(bag(), found)
    assert len(lines) == proof.SHOWN_MAX + 1
    assert lines[-1] == "and 15 more rows"


@pytest.fixture(scope="module")
def log() -> ChangeLog:
    made = ChangeLog()
    for number, transaction in enumerate(flights.history(flights.read(), days=2)):
        made.add(1000 + number, transaction.deltas)
    return made


@pytest.mark.parametrize("count", [1, 3, 24])
def test_times_are_spread_and_end_with_the_last(log: ChangeLog, count: int) -> None:
    times = proof.choose_times(log, count)
    assert times == sorted(set(times))
    assert times[-1] == log.times[-1]
    assert set(times) <= set(log.times)
    assert 1 <= len(times) <= count


class Service:
    """Serves what plain Spark has answered, one of it changed."""

    def __init__(self, wrong: tuple[str, Time]) -> None:
        self.answers: proof.Answers = {}
        self.wrong = wrong

    async def expected(self, *given: Any) -> proof.Answers:
        """Plain Spark's answers, kept on their way to the proof."""
        self.answers = await EXPECTED(*given)
        return self.answers

    async def peek(self, name: str, as_of: Time | None = None) -> pa.Table:
        assert as_of is not None
        table = self.answers[name, as_of]
        return table.slice(1) if (name, as_of) == self.wrong else table


@pytest.mark.long
@pytest.mark.spark
async def test_plain_spark_answers_and_a_wrong_view_is_found(
    log: ChangeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [log.times[20], log.times[-1]]
    service = Service(("delay_by_carrier", times[1]))
    monkeypatch.setattr(proof, "expected", service.expected)
    shown: list[proof.ViewComparison] = []
    made = await proof.prove(service, log, VIEWS, times, tmp_path, shown.append)
    assert made == shown
    assert service.answers.keys() == {(view.name, time) for view in VIEWS for time in times}
    assert all(service.answers["delay_by_carrier", time].num_rows > 10 for time in times)
    wrong = [(found.view, found.time) for found in made if found.differences]
    assert wrong == [("delay_by_carrier", times[1])]


async def test_plain_spark_that_fails_says_why(
    log: ChangeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*_: Any) -> tuple[Path, dict[Any, Any]]:
        return tmp_path / "absent.json", {}

    monkeypatch.setattr(proof, "_lay_out", empty)
    with pytest.raises(EngineError, match="FileNotFoundError"):
        await proof.expected(log, VIEWS, [log.times[0]], tmp_path)


def test_contents_written_for_spark_keep_their_types(log: ChangeLog, tmp_path: Path) -> None:
    request, outputs = proof._lay_out(log, VIEWS, [log.times[5]], tmp_path)
    decoded = msgspec.json.decode(request.read_bytes(), type=reference_spark.ReferenceRequest)
    assert len(decoded.queries) == len(outputs) == len(VIEWS)
    table = pq.read_table(decoded.queries[0].tables["flights"])
    assert table.schema == flights.arrow_schema("flights")
