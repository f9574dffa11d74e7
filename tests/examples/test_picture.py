from __future__ import annotations

import io

import pyarrow as pa
import pytest
from rich.console import Console

from actors.model.plan.schema import DIFF, TIME
from actors.model.protocol.api import ObjectStatus
from actors.runtime.progress import EMPTY
from penstock_flights import picture
from penstock_flights.flights import FlightDelta, FlightTransaction
from penstock_flights.picture import DemoBoard, ViewContents, moment, percentiles
from penstock_flights.play import VIEWS

WEATHER = {"visibility": "fog", "flights": 1234, "mean_delay": 31.25, "share_cancelled": 0.5}
CARRIER = {"carrier": "JetBlue", "flights": 2, "mean_delay": None, "share_cancelled": 0.0}
LATE = {
    "id": 1,
    "carrier": "B6",
    "flight": 7,
    "origin": "JFK",
    "destination": "Burlington",
    "lat": 44.5,
    "lon": -73.2,
    "dep_delay": 45,
}


def updates(*rows: tuple[dict[str, object], int]) -> pa.Table:
    return pa.Table.from_pylist([{**row, TIME: 5, DIFF: diff} for row, diff in rows])


def status(name: str, steps: int = 3, step_ms: float = 120.0) -> ObjectStatus:
    return ObjectStatus(
        name=name,
        kind="view",
        since=0,
        upper=3_723_004,
        lag_ms=140,
        mode="incremental",
        steps=steps,
        step_ms=step_ms,
        spark_ms=60.0,
    )


@pytest.fixture
def board() -> DemoBoard:
    carriers = pa.table({"carrier": ["B6"], "name": ["JetBlue"]})
    stream = [
        FlightTransaction(22_616_940 + 60 * hour, (FlightDelta("carriers", insert=carriers),), note)
        for hour, note in enumerate(["", "B6 moves", ""])
    ]
    made = DemoBoard(VIEWS, stream, 100.0)
    made.written(102.0, stream[1])
    made.follow("delay_by_weather", 6, updates((WEATHER, 1)))
    made.follow("delay_by_carrier", 6, updates((CARRIER, 1)))
    made.follow("late_now", 7, updates((LATE, 1)))
    made.report([status(view.name) for view in VIEWS] + [status("flights")])
    return made


def test_contents_are_the_sum_of_the_changes() -> None:
    contents = ViewContents()
    assert contents.table() is None
    contents.apply(
        3,
        updates((WEATHER, 2), (CARRIER | {"visibility": "x"}, 1)).select(
            ["visibility", TIME, DIFF]
        ),
    )
    contents.apply(5, None)
    contents.apply(9, updates((WEATHER, -2)).select(["visibility", TIME, DIFF]))
    table = contents.table()
    assert table is not None
    assert table.to_pylist() == [{"visibility": "x"}]
    assert (contents.upper, contents.changes) == (9, 5)


def test_the_picture_shows_everything(board: DemoBoard) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(board.picture(103.0))
    text = out.getvalue()
    for part in ("2/3", "fog", "1,234", "31.2", "50.0%", "JetBlue", "B6 7", "Burlington"):
        assert part in text
    for part in ("01:02:03.004", "140 ms", "120 ms", "60 ms", "incremental", "B6 moves"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= picture.WIDTH_MIN
    assert len(text.splitlines()) <= 24, "an ordinary terminal's height"


@pytest.mark.parametrize(("columns", "width"), [(40, 80), (80, 80), (93, 93), (200, 100)])
def test_the_picture_takes_the_width_there_is(board: DemoBoard, columns: int, width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(board.picture(103.0, columns))
    assert {len(line) for line in out.getvalue().splitlines()} == {width}


def test_the_line_shows_progress_and_lag(board: DemoBoard) -> None:
    line = board.line(103.0)
    assert "\n" not in line
    for part in ("2/3 transactions", "2 changes", "late_now: 1 rows, lag 140 ms, step 120 ms"):
        assert part in line


def test_a_view_without_status_is_being_made(board: DemoBoard) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(DemoBoard(VIEWS, board.stream, 0.0).picture(1.0))
    assert out.getvalue().count("creating") == 3


def test_step_times_are_taken_once_a_step(board: DemoBoard) -> None:
    board.report([status("late_now", 3, 120.0)])
    board.report([status("late_now", 5, 80.0)])
    assert board.step_ms["late_now"] == [120.0, 80.0]
    assert len(board.lag_ms) == 4


def test_the_rate_forgets(board: DemoBoard) -> None:
    assert board.rate(102.0) == pytest.approx(0.5)
    assert board.rate(120.0) == 0.0


def test_followed_is_the_least_of_all(board: DemoBoard) -> None:
    moved = board.moved
    assert board.followed() == 6
    board.follow("delay_by_carrier", 9, None)
    board.follow("delay_by_weather", 8, None)
    assert board.followed() == 7
    assert moved.is_set()
    assert not board.moved.is_set()


def test_frontiers_as_times_of_day() -> None:
    assert moment(3_723_004) == "01:02:03.004"
    assert moment(EMPTY) == "[]"


def test_percentiles() -> None:
    assert percentiles([]) == {"median": 0.0, "p95": 0.0}
    assert percentiles([float(number) for number in range(100)]) == {"median": 50.0, "p95": 95.0}
