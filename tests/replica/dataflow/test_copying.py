"""Copies: contents of a shard at one time as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from copying_house import (  # type: ignore[import-not-found]
    copied,
    described,
    left_behind,
    manifest_of,
    output_in,
    read,
    settings_of,
    three_files,
)
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    PAIRS,
    shard,
    surroundings,
    table,
    write,
)

from actors.connectors.sinks.copy_output import copy_storage
from actors.connectors.sinks.formats import FILE_BYTES_MIN, check_format, repeated
from actors.connectors.sinks.local_folders import local_path
from actors.connectors.sinks.sink_storage import FolderSinkStorage
from actors.durable.persist import PersistClient
from actors.model.plan.copy_manifest import MANIFEST
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import SLICE_ROWS
from actors.model.protocol.compute import (
    CopyDone,
    CopyFailed,
    CopyToExport,
    StatusResponse,
)
from actors.model.protocol.internal import CopyFinished, DataflowScheduled, WritesAllowed
from actors.replica.dataflow import copying
from actors.replica.dataflow.copying import CopyTask
from actors.runtime.errors import InvalidUsage, ViewInError
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe

FORMATS = ("parquet", "csv", "json")
Row = tuple[Any, ...]
MIXED = TableSchema(
    (
        TableColumn("i", "bigint"),
        TableColumn("s", "string"),
        TableColumn("f", "double"),
        TableColumn("d", "decimal(12,2)"),
        TableColumn("b", "boolean"),
        TableColumn("at", "timestamp"),
        TableColumn("day", "date"),
        TableColumn("x", "binary"),
    )
)


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("retracts", [False, True], ids=["as it is read", "summed up"])
async def test_a_copy_holds_the_contents_at_its_time(
    tmp_path: Path, format: str, retracts: bool
) -> None:
    async with surroundings() as (_, persist):
        await shard(persist, "pairs", PAIRS)
        await write(persist, "pairs", 5, table(PAIRS, (1, 2, 1, 1), (3, 4, 2, 3), (5, None, 3, 1)))
        gone = [(1, 2, 6, -1), (7, 7, 6, 2)] if retracts else [(7, 7, 6, 2)]
        await write(persist, "pairs", 9, table(PAIRS, *gone, (8, 8, 8, 1)))
        description = described(PAIRS, "pairs", format=format, as_of=7)
        done = await copied(persist, tmp_path, description)
        rows = [(3, 4)] * 3 + [(5, None)] + [(7, 7)] * 2 + [(1, 2)] * (not retracts)
        assert Counter(read(tmp_path, PAIRS)) == Counter(rows)
        place = tmp_path / "copies" / "out" / MANIFEST
        assert done == CopyDone(len(rows), 1, str(place))
        manifest = manifest_of(tmp_path)
        assert (manifest.object, manifest.as_of, manifest.copy) == ("pairs", 7, "t1")
        assert manifest.schema == PAIRS.columns
        assert left_behind(tmp_path) == [MANIFEST, "copy-t1-1", f"copy-t1-1/00001.{format}"]


VALUES: list[Row] = [
    (1, 'with "quotes", and\nlines', 0.5, "1.10", True, 1_700_000_000_123_456, 19_000, b"\x00\xff"),
    (2, "", -1e300, "-0.01", False, 0, 0, b""),
    (3, None, None, None, None, None, None, None),
]


async def _mixed(persist: PersistClient) -> None:
    arrow = MIXED.arrow()
    columns = [
        pa.array([Decimal(v) if v and f.name == "d" else v for v in values], f.type)
        for f, values in zip(arrow, zip(*VALUES, strict=True), strict=True)
    ]
    rows = pa.Table.from_arrays(columns, schema=arrow)
    count = [1] * rows.num_rows
    updates = rows.append_column(TIME, pa.array(count, pa.int64()))
    await shard(persist, "mixed", MIXED)
    await write(persist, "mixed", 5, updates.append_column(DIFF, pa.array(count, pa.int64())))


async def test_every_format_keeps_every_value(tmp_path: Path) -> None:
    async with surroundings() as (_, persist):
        await _mixed(persist)
        for format in FORMATS:
            description = described(MIXED, "mixed", format=format, destination=format)
            await copied(persist, tmp_path, description)
        exact = sorted(read(tmp_path, MIXED, "parquet"))
        assert exact[0][3:6] == (Decimal("1.10"), True, exact[0][5])
        base64 = [
            (*row[:-1], None if row[-1] is None else text)
            for row, text in zip(exact, ("AP8=", "", None), strict=True)
        ]
        assert sorted(read(tmp_path, MIXED, "csv")) == base64
        as_json = sorted(read(tmp_path, MIXED, "json"))
        first = as_json[0]
        assert first[:2] == exact[0][:2]
        assert first[2:5] == (Decimal("0.5"), Decimal("1.10"), True)
        assert first[5:] == ("2023-11-14T22:13:20.123456Z", "2022-01-08", "AP8=")
        assert as_json[1][1] == ""
        assert as_json[2] == (3, *[None] * 7)


async def test_json_holds_nested_values_and_what_is_not_finite(tmp_path: Path) -> None:
    schema = TableSchema(
        (
            TableColumn("f", "double"),
            TableColumn("l", "array<double>"),
            TableColumn("m", "map<date,float>"),
            TableColumn("t", "struct<a:double,b:string>"),
        )
    )
    nan = float("nan")
    rows = [
        {"f": nan, "l": [1.0, None, -float("inf")], "m": [(0, 1.5)], "t": {"a": nan, "b": "x"}},
        {"f": None, "l": None, "m": None, "t": None},
    ]
    count = pa.array([1, 1], pa.int64())
    updates = pa.Table.from_pylist(rows, schema=schema.arrow())
    updates = updates.append_column(TIME, count).append_column(DIFF, count)
    async with surroundings() as (_, persist):
        await shard(persist, "nested", schema)
        await write(persist, "nested", 5, updates)
        await copied(persist, tmp_path, described(schema, "nested", format="json"))
        path = tmp_path / "copies" / "out" / manifest_of(tmp_path).files[0].path
        lines = {json.dumps(json.loads(text)) for text in path.read_text().splitlines()}
        assert lines == {
            '{"f": "NaN", "l": [1.0, null, "-Infinity"], "m": {"1970-01-01": 1.5}, '
            '"t": {"a": "NaN", "b": "x"}}',
            '{"f": null, "l": null, "m": null, "t": null}',
        }


@pytest.mark.parametrize("format", FORMATS)
async def test_files_have_about_the_size_that_was_asked_for(tmp_path: Path, format: str) -> None:
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        rows = [((n * 7_919) ** 3 % 1_000_000_007, 1, 1) for n in range(20_000)]
        await write(persist, "numbers", 5, table(NUMBERS, *rows))
        size = 16_384
        done = await copied(persist, tmp_path, described(NUMBERS, format=format, size=size))
        sizes = [file.bytes for file in manifest_of(tmp_path).files]
        assert done.files == len(sizes) > 4
        assert max(sizes) <= size * 1.1
        assert min(sizes[:-1]) >= size // 3
        assert Counter(read(tmp_path, NUMBERS)) == Counter((row[0],) for row in rows)


async def test_nothing_is_copied_as_nothing(tmp_path: Path) -> None:
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS))
        done = await copied(persist, tmp_path, described(NUMBERS))
        assert (done.rows, done.files) == (0, 0)
        assert read(tmp_path, NUMBERS) == []


def test_rows_are_repeated_in_bounded_pieces() -> None:
    rows = pa.table({"a": [1, 2, 3], DIFF: pa.array([1, 2 * SLICE_ROWS, 3], pa.int64())})
    pieces = list(repeated(rows))
    assert [piece.num_rows for piece in pieces] == [SLICE_ROWS, SLICE_ROWS, 4]
    counts = Counter(value for piece in pieces for value in piece["a"].to_pylist())
    assert counts == {1: 1, 2: 2 * SLICE_ROWS, 3: 3}


async def test_large_contents_that_retract_are_summed_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.durable.arrangement.gathered_updates.HELD_BYTES_MAX", 4_096)
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, *[(n, 1, 2) for n in range(3_000)]))
        gone = [(n, 6, -2) for n in range(1_000)] + [(n, 6, -1) for n in range(1_000, 2_000)]
        await write(persist, "numbers", 9, table(NUMBERS, *gone))
        seen: list[copying.CopyPosition] = []
        description = described(NUMBERS, as_of=8)
        done = await copied(persist, tmp_path, description, far=seen.append)
        assert done.rows == 3_000
        rows = [(n,) for n in range(1_000, 2_000)] + [(n,) for n in range(2_000, 3_000)] * 2
        assert Counter(read(tmp_path, NUMBERS)) == Counter(rows)
        assert not (tmp_path / "scratch" / "gathered").exists()
        assert (seen[-1].rows, seen[-1].parts_read) == (3_000, seen[-1].parts_total)


# -- what is refused -------------------------------------------------------------------------------


async def test_a_view_in_error_is_not_copied(tmp_path: Path) -> None:
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        shape = NUMBERS.arrow_updates().append(pa.field(ERROR, pa.string()))
        rows: list[dict[str, Any]] = [
            {"a": 1, TIME: 2, DIFF: 1},
            {"a": None, TIME: 3, DIFF: 1, ERROR: "bad cast"},
        ]
        await write(persist, "numbers", 5, pa.Table.from_pylist(rows, schema=shape))
        rows[1][DIFF] = -1
        rows[1][TIME] = 6
        await write(persist, "numbers", 9, pa.Table.from_pylist(rows[1:], schema=shape))
        with pytest.raises(ViewInError, match="bad cast"):
            await copied(persist, tmp_path, described(NUMBERS, as_of=4))
        assert left_behind(tmp_path) == []
        await copied(persist, tmp_path, described(NUMBERS, as_of=7))
        assert read(tmp_path, NUMBERS) == [(1,)]


def test_csv_refuses_nested_columns() -> None:
    schema = TableSchema((TableColumn("a", "bigint"), TableColumn("l", "array<int>")))
    with pytest.raises(InvalidUsage, match="l array<int>"):
        check_format(schema, CopyToExport(schema, "x", "csv", FILE_BYTES_MIN))
    check_format(schema, CopyToExport(schema, "x", "json", FILE_BYTES_MIN))
    with pytest.raises(InvalidUsage, match="file_bytes_max"):
        check_format(schema, CopyToExport(schema, "x", "json", FILE_BYTES_MIN - 1))


@pytest.mark.parametrize(
    ("destination", "path"),
    [
        ("a/b", "a/b"),
        ("/x/y", "/x/y"),
        ("file:///x/a%20b", "/x/a b"),
        ("file://localhost/x", "/x"),
        ("file:/x", "/x"),
    ],
)
def test_a_destination_is_a_path_or_a_file_url(destination: str, path: str) -> None:
    assert local_path(destination) == path


@pytest.mark.parametrize(
    "destination",
    ["ftp://bucket/x", "file://elsewhere/x", "file:///x?y", "", " ", "a\0b", "file://"],
)
def test_other_destinations_are_refused(destination: str) -> None:
    with pytest.raises(InvalidUsage):
        local_path(destination)


def test_copies_stay_below_their_folder(tmp_path: Path) -> None:
    def place_of(destination: str, settings: Settings) -> Path:
        return Path(copy_storage(destination, settings, tmp_path / "spool").where)

    settings = settings_of(tmp_path)
    below = tmp_path.resolve() / "copies"
    assert place_of("a/b", settings) == below / "a" / "b"
    assert place_of(f"file://{below}/x", settings) == below / "x"
    assert place_of("a/../b", settings) == below / "b"
    below.mkdir()
    (tmp_path / "outside").mkdir()
    (below / "link").symlink_to(tmp_path / "outside")
    (below / "loop").symlink_to(below / "loop")
    for destination in ("..", "a/../..", ".", str(tmp_path), "/", "link/x", "loop/x"):
        with pytest.raises(InvalidUsage):
            place_of(destination, settings)
    default = Settings(state_dir=str(tmp_path / "state"))
    assert place_of("a", default) == tmp_path.resolve() / "state" / "copies" / "a"


def test_a_place_refuses_names_that_are_no_names(tmp_path: Path) -> None:
    for name in ("../x", "", "a/b", "x" * 65):
        with pytest.raises(InvalidUsage):
            output_in(FolderSinkStorage(tmp_path), name)


# -- the actor -------------------------------------------------------------------------------------


class Stand:
    """A copy's actor before a probe that is worker 0."""

    def __init__(
        self, system: ActorSystem, persist: PersistClient, place: Path, **changes: Any
    ) -> None:
        self.worker = MessageProbe.start(system, "worker")
        self.place = place
        description = described(NUMBERS, **changes)
        self.address = system.spawn(
            lambda: CopyTask(
                description,
                (self.worker.address,),
                persist,
                settings_of(place),
                place / "scratch",
            ),
            "copy",
        )

    async def said(self) -> Iterator[Any]:
        """What worker 0 was told, up to the result."""
        found: list[Any] = []
        while not found or not isinstance(found[-1], CopyFinished):
            found.append(await self.worker.expect(object))
        return iter(found)


async def test_it_begins_when_scheduled_and_allowed_to_write(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        stand = Stand(system, persist, tmp_path)
        await stand.address.send(DataflowScheduled())
        await stand.worker.expect_nothing()
        await stand.address.send(WritesAllowed())
        await stand.worker.expect(StatusResponse, state="waiting")
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        *shown, last = await stand.said()
        assert isinstance(last.result, CopyDone)
        states = [status.state for status in shown]
        assert states == ["copying", "copied"]
        assert (shown[0].parts_read, shown[0].parts_total, shown[0].rows_out) == (1, 1, 1)
        await stand.address.send(DataflowScheduled())
        await stand.worker.expect_nothing()


async def test_its_failure_is_its_answer(tmp_path: Path) -> None:
    async with surroundings() as (system, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        stand = Stand(system, persist, tmp_path, destination="../outside")
        for message in (DataflowScheduled(), WritesAllowed()):
            await stand.address.send(message)
        *_, last = await stand.said()
        assert isinstance(last.result, CopyFailed)
        assert last.result.code == "InvalidUsage"
        assert "copy_dir" in last.result.text


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "writing"])
async def test_a_dropped_copy_removes_what_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    async with surroundings() as (system, persist):
        await three_files(persist)
        hangs = anyio.Event()
        fetch: Callable[..., Any] = persist.fetch

        async def slow(*given: Any) -> Any:
            hangs.set()
            await anyio.sleep_forever()
            return await fetch(*given)

        if not waits:
            monkeypatch.setattr(persist, "fetch", slow)
        stand = Stand(system, persist, tmp_path, as_of=99 if waits else 4)
        for message in (DataflowScheduled(), WritesAllowed()):
            await stand.address.send(message)
        await stand.worker.expect(StatusResponse, state="waiting")
        if not waits:
            await hangs.wait()
        cell = system.cells[stand.address.path]
        cell.request_stop()
        with anyio.fail_after(200):
            await cell.stopped.wait()
        assert left_behind(tmp_path) == []
        await stand.worker.expect_nothing()
