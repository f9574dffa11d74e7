"""A folder as a source, and a copy from files; Spark is played by Arrow
(`tests/engine/spark/test_taking` has the real one)."""

from __future__ import annotations

import os
from collections import Counter as Bag
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from source_lab import Contents, around, drive, on_virtual_time  # type: ignore[import-not-found]

from actors.connectors.sources import file_reading, parquet_bounds
from actors.connectors.sources.file_reading import MalformedFile, reads_like_spark
from actors.connectors.sources.files import EXPORT, FilesConfig, FilesSource
from actors.connectors.sources.kinds import decode, encode, make_source
from actors.connectors.sources.oneshot import CopyFromConfig, OneshotCopy
from actors.connectors.sources.source import (
    ConnectorContext,
    PositionMark,
    SourceExport,
    SourceIdle,
    SourceRows,
    SourceUnreachable,
)
from actors.model.plan.jobs import (
    Answer,
    FileDone,
    InferFiles,
    Job,
    QueryAnalyzed,
    RowsDone,
    TakeFiles,
)
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.runtime.errors import DefiniteError, EngineLost, InvalidUsage, ResourceBusy
from suite_lanes import examples  # type: ignore[import-not-found]

COLUMNS = (TableColumn("k", "bigint"), TableColumn("v", "string"))
ROWS = SourceExport(EXPORT, TableSchema(COLUMNS))


class FakeSpark:
    """Reads CSV and Parquet as Arrow does; a file with ``bad`` in it is malformed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.jobs: list[Job] = []
        self.tells_file = True
        self.as_files = False
        self.fails: Exception | None = None
        self.during: Any = None

    async def run_job(self, job: Job) -> Answer:
        self.jobs.append(job)
        if self.fails is not None:
            raise self.fails
        if isinstance(job, InferFiles):
            return QueryAnalyzed(job.job_id, TableSchema(COLUMNS))
        assert isinstance(job, TakeFiles)
        for path in job.paths:
            if _is_bad(path):
                raise DefiniteError(f"{path}: [MALFORMED]" if self.tells_file else "[MALFORMED]")
        tables = [self._read(path, job) for path in job.paths]
        table = pa.concat_tables(tables).select(list(job.keep))
        if self.during is not None:
            self.during()
        if not self.as_files:
            return RowsDone(job.job_id, table.num_rows, arrow=to_ipc(table))
        made = self.scratch / f"answer-{len(self.jobs)}.parquet"
        pq.write_table(table, made)
        files = (FileDone(str(made), table.num_rows),)
        return RowsDone(job.job_id, table.num_rows, files=files)

    def _read(self, path: str, job: TakeFiles) -> pa.Table:
        shape = job.read.arrow()
        if job.format == "parquet":
            return pq.read_table(path, partitioning=None).cast(shape)
        if not Path(path).stat().st_size:
            return shape.empty_table()
        options = pa.csv.ReadOptions(column_names=shape.names)
        kinds = pa.csv.ConvertOptions(column_types=shape)
        return pa.csv.read_csv(path, read_options=options, convert_options=kinds)


def _is_bad(path: str) -> bool:
    return b"bad" in Path(path).read_bytes()


class Lab:
    """A folder with files, and sources of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "in"
        self.folder.mkdir()
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        self.spark = FakeSpark(scratch)
        self.contents = Contents()
        self.number = 0

    def config(self, **more: Any) -> FilesConfig:
        given: dict[str, Any] = {"format": "csv", "columns": COLUMNS} | more
        return FilesConfig(folder=str(self.folder), **given)

    def around(self) -> ConnectorContext:
        root = str(self.folder)
        made = around(self.spark.scratch, self.spark.run_job, source_dirs=root)
        assert isinstance(made, ConnectorContext)
        return made

    def put(self, name: str, text: str, at: int | None = None) -> Path:
        """A file comes in as it should: renamed, whole."""
        self.number += 1
        part = self.folder / f"_{name}.part"
        part.write_text(text)
        stamp = self.number * 1_000 if at is None else at
        os.utime(part, ns=(stamp, stamp))
        return part.rename(self.folder / name)

    async def drive(self, *, marks: int | None = None, **more: Any) -> FilesSource:
        source = FilesSource(self.config(**more), self.around())
        await drive(source, (ROWS,), self.contents, marks=marks)
        return source

    @property
    def keys(self) -> list[int]:
        bag = self.contents.bags.get(EXPORT, Bag())
        return sorted(row[0] for row in bag.elements())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_files_are_taken_once_over_restarts(lab: Lab) -> None:
    async def main() -> None:
        lab.put("a.csv", "1,x\n2,y\n")
        await lab.drive()
        assert lab.keys == [1, 2]
        assert all(rows.snapshot for rows in lab.contents.given)
        lab.put("b.csv", "3,z\n")
        await lab.drive()
        await lab.drive()
        assert lab.keys == [1, 2, 3]
        assert not lab.contents.given[-1].snapshot

    on_virtual_time(main)


@given(st.data())
@settings(max_examples=examples(40))
def test_stopped_anywhere_every_file_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    wanted: list[int] = []

    async def main() -> None:
        for _ in range(data.draw(st.integers(1, 5))):
            for _ in range(data.draw(st.integers(0, 4))):
                key = len(wanted)
                lab.put(f"{key}.csv", f"{key},x\n", data.draw(st.integers(0, 10_000)))
                wanted.append(key)
            files_max = data.draw(st.integers(1, 3))
            config = lab.config(batch_files_max=files_max)
            source = FilesSource(config, lab.around())
            lab.contents.waiting = []
            await source.open((ROWS,), lab.contents.position)
            for _ in range(data.draw(st.integers(0, 6))):
                if isinstance(found := await source.next(), SourceIdle):
                    break
                lab.contents.take(found)
            await source.close()
        await lab.drive()

    on_virtual_time(main)
    assert lab.keys == wanted


def test_an_empty_folder_has_a_mark_and_then_is_idle(lab: Lab) -> None:
    async def main() -> None:
        source = FilesSource(lab.config(poll_ms=500), lab.around())
        await source.open((ROWS,), None)
        assert isinstance(await source.next(), PositionMark)
        assert isinstance(await source.next(), SourceIdle)
        with anyio.move_on_after(5) as waiting:
            await source.next()
        assert waiting.cancelled_caught
        lab.put("a.csv", "1,x\n")
        rows = await source.next()
        assert isinstance(rows, SourceRows)
        assert rows.updates.to_pylist() == [{"k": 1, "v": "x", DIFF: 1}]
        assert source.lag().known == "a.csv"
        assert source.lag().bytes_behind == 4
        mark = await source.next()
        assert isinstance(mark, PositionMark)
        assert mark.messages == 1
        assert source.lag().bytes_behind == 0
        await source.close()

    on_virtual_time(main)


@pytest.mark.parametrize("tells_file", [True, False])
def test_a_malformed_file_stops_it_where_it_stands_until_it_is_repaired(
    lab: Lab, tells_file: bool
) -> None:
    lab.spark.tells_file = tells_file

    async def main() -> None:
        for number in range(5):
            lab.put(f"{number}.csv", "bad" if number == 3 else f"{number},x\n")
        for _ in range(2):
            with pytest.raises(MalformedFile) as caught:
                await lab.drive()
            assert str(lab.folder / "3.csv") in str(caught.value)
            assert "repair" in caught.value.hint
            assert lab.keys == [0, 1, 2]
        lab.put("3.csv", "3,x\n", at=4_000)
        await lab.drive()
        assert lab.keys == [0, 1, 2, 3, 4]

    on_virtual_time(main)


def test_a_file_that_changes_while_it_is_read_is_not_taken(lab: Lab) -> None:
    async def main() -> None:
        path = lab.put("a.csv", "1,x\n")
        lab.spark.during = lambda: path.write_text("1,x\n2,y\n")
        with pytest.raises(SourceUnreachable, match=r"a\.csv changed while it was being read"):
            await lab.drive()
        assert lab.keys == []
        lab.spark.during = None
        await lab.drive()
        assert lab.keys == [1, 2]

    on_virtual_time(main)


def test_what_is_not_taken_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.connectors.sources.file_listing.RECENT_MAX", 1)

    async def main() -> None:
        lab.put("a.csv", "1,x\n", at=100)
        lab.put("b.csv", "2,x\n", at=200)
        assert (await lab.drive()).lag().notes == ()
        lab.contents.wait_for_tick(lab.folder)
        lab.put("late.csv", "3,x\n", at=50)
        lab.put("b.csv", "4,x\n", at=300)
        (lab.folder / "out.csv").symlink_to("/etc/hostname")
        source = await lab.drive()
        assert lab.keys == [1, 2]
        warning = "; ".join(source.lag().notes)
        assert "appeared too late" in warning
        assert "late.csv" in warning
        assert "changed after it was ingested: b.csv" in warning
        assert "source_dirs: out.csv" in warning
        for _ in range(2):
            source = await lab.drive()
            assert "b.csv" in "; ".join(source.lag().notes)  # nothing was marked since
        os.utime(lab.folder / "late.csv", ns=(400, 400))  # as `touch` does
        await lab.drive()
        assert lab.keys == [1, 2, 3]

    on_virtual_time(main)


def test_answers_as_files_are_read_and_removed(lab: Lab) -> None:
    lab.spark.as_files = True

    async def main() -> None:
        lab.put("a.csv", "1,x\n2,y\n")
        await lab.drive()
        assert lab.keys == [1, 2]
        assert list(lab.spark.scratch.iterdir()) == []

    on_virtual_time(main)


def test_malformed_records_fail_unless_something_else_was_asked_for(lab: Lab) -> None:
    async def main() -> None:
        lab.put("a.csv", "1,x\n")
        await lab.drive()
        lab.put("b.csv", "2,x\n")
        await lab.drive(options={"Mode": "DROPMALFORMED"})
        first, second = (job for job in lab.spark.jobs if isinstance(job, TakeFiles))
        assert first.options == (("mode", "FAILFAST"),)
        assert second.options == (("Mode", "DROPMALFORMED"),)
        assert first.paths == (str(lab.folder / "a.csv"),)
        assert first.bytes == 4

    on_virtual_time(main)


@pytest.mark.parametrize("error", [EngineLost("gone"), ResourceBusy("many")])
def test_an_engine_that_fails_is_a_reason_to_try_again(lab: Lab, error: Exception) -> None:
    lab.spark.fails = error

    async def main() -> None:
        lab.put("a.csv", "1,x\n")
        with pytest.raises(SourceUnreachable, match="the engine could not read"):
            await lab.drive()

    on_virtual_time(main)


def test_a_folder_that_is_gone_is_waited_for(lab: Lab) -> None:
    async def main() -> None:
        lab.put("a.csv", "1,x\n")
        await lab.drive()
        moved = lab.folder.rename(lab.folder.with_name("away"))
        with pytest.raises(SourceUnreachable, match="cannot list"):
            await lab.drive()
        moved.rename(lab.folder)
        await lab.drive()
        assert lab.keys == [1]

    on_virtual_time(main)


def test_null_where_none_may_be_is_malformed(lab: Lab) -> None:
    columns = (TableColumn("k", "bigint", False), TableColumn("v", "string"))

    async def main() -> None:
        lab.put("a.csv", ",x\n")
        source = FilesSource(lab.config(columns=columns), lab.around())
        exports = await source.describe(None)
        assert exports[0].schema.columns == columns
        with pytest.raises(MalformedFile, match="column k is NOT NULL, but contains NULL"):
            await drive(source, exports, Contents())

    on_virtual_time(main)


# -- what can be known before ---------------------------------------------------------------------


def test_columns_are_inferred_or_declared(lab: Lab) -> None:
    async def main() -> None:
        source = FilesSource(lab.config(columns=()), lab.around())
        with pytest.raises(InvalidUsage, match="declare columns"):
            await source.describe(None)
        lab.put("a.csv", "1,x\n")
        assert await source.describe(None) == (ROWS,)
        (job,) = lab.spark.jobs
        assert isinstance(job, InferFiles)
        assert dict(job.options)["inferSchema"] == "true"
        with pytest.raises(InvalidUsage, match="declare all"):
            await source.describe({EXPORT: ("k",)})
        (chosen,) = await FilesSource(lab.config(), lab.around()).describe({EXPORT: ("k",)})
        assert chosen.schema.names == ("v",)
        await drive(FilesSource(lab.config(), lab.around()), (chosen,), lab.contents)
        assert lab.contents.bags[EXPORT] == Bag([("x",)])

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"options": {"path": "/etc"}}, "unknown option 'path' for csv"),
        ({"options": {"recursiveFileLookup": "true"}}, "recursiveFileLookup"),
        ({"format": "parquet", "options": {"header": "true"}}, "'header'"),
        (
            {"columns": (TableColumn("a", "bigint"), TableColumn("A", "int"))},
            "duplicate column names: A, a",
        ),
        ({"columns": (TableColumn("a", "wrong"),)}, "wrong"),
        ({"poll_ms": 0}, "invalid poll_ms 0"),
        ({"batch_files_max": 0}, "invalid batch_files_max 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(lab: Lab, more: Any, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        make_source(lab.config(**more), lab.around())


def test_a_folder_that_is_not_allowed_is_refused(lab: Lab, tmp_path: Path) -> None:
    async def main() -> None:
        for folder in (str(tmp_path), "/etc", f"{lab.folder}/.."):
            config = FilesConfig(folder=folder, format="csv", columns=COLUMNS)
            with pytest.raises(InvalidUsage, match="source_dirs"):
                await FilesSource(config, lab.around()).describe(None)
            with pytest.raises(InvalidUsage, match="source_dirs"):
                await FilesSource(config, lab.around()).open((ROWS,), None)
        with pytest.raises(InvalidUsage, match="absolute"):
            FilesConfig(folder="in", format="csv").check()

    on_virtual_time(main)


def test_configurations_travel(lab: Lab) -> None:
    config = lab.config(options={"header": "true"}, pattern="*.csv", recursive=True)
    assert decode(encode(config)) == config


# -- Parquet, read without the engine -------------------------------------------------------------


def written(path: Path, columns: dict[str, Any], **more: Any) -> str:
    pq.write_table(pa.table(columns), path, **more)
    return str(path)


def test_parquet_of_the_very_types_needs_no_engine(lab: Lab) -> None:
    async def main() -> None:
        for number in range(3):
            columns = {"v": pa.array(["x"] * 10), "more": [1] * 10, "k": list(range(10))}
            written(lab.folder / f"{number}.parquet", columns)
        await lab.drive(format="parquet")
        assert lab.keys == sorted(list(range(10)) * 3)
        assert lab.spark.jobs == []

    on_virtual_time(main)


def test_other_parquet_goes_to_the_engine_whole_batches(lab: Lab) -> None:
    async def main() -> None:
        written(lab.folder / "a.parquet", {"k": [1], "v": ["x"]})
        written(lab.folder / "b.parquet", {"k": pa.array([2], pa.int32()), "v": ["y"]})
        await lab.drive(format="parquet")
        assert lab.keys == [1, 2]
        (job,) = lab.spark.jobs
        assert isinstance(job, TakeFiles)
        assert len(job.paths) == 2

    on_virtual_time(main)


def test_a_torn_parquet_file_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its footer is whole, a page is not: only reading it tells.
    path = Path(written(lab.folder / "a.parquet", {"k": list(range(1000)), "v": ["x"] * 1000}))
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    assert reads_like_spark(str(path), ROWS.schema.arrow())

    async def main() -> None:
        with pytest.raises(MalformedFile, match=r"a\.parquet"):
            await lab.drive(format="parquet")

    on_virtual_time(main)


@pytest.mark.parametrize("fault", ["NULL", "torn", "NULL, read by Spark"])
def test_a_malformed_file_behind_given_rows_does_not_hold_up_those_before_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The rows of the files before it become durable once, also when the first pieces of the batch,
    or even of the malformed file, were given already."""
    monkeypatch.setattr("actors.connectors.sources.file_reading.PIECE_BYTES", 100_000)
    monkeypatch.setattr(parquet_bounds, "BATCH_ROWS", 1_000)
    strict = TableSchema((TableColumn("k", "bigint", nullable=False), COLUMNS[1]))

    def put(name: str, keys: list[int | None]) -> Path:
        path = lab.folder / name
        table = pa.table({"k": pa.array(keys, pa.int64()), "v": ["x"] * len(keys)})
        pq.write_table(table, path, row_group_size=10_000, compression="none")
        return path

    async def main() -> None:
        put("a.parquet", list(range(20_000)))
        Contents.wait_for_tick(lab.folder)
        path = put("b.parquet", [*range(20_000, 39_999), None if "NULL" in fault else 39_999])
        if fault == "torn":
            data = bytearray(path.read_bytes())
            second = pq.ParquetFile(path).metadata.row_group(1).column(0)
            start = second.dictionary_page_offset or second.data_page_offset
            data[start : start + 400] = bytes(400)
            path.write_bytes(data)
        if "Spark" in fault:
            monkeypatch.setattr(file_reading, "reads_like_spark", lambda *_: False)
            lab.spark.as_files = True
        for _ in range(2):
            with pytest.raises(MalformedFile) as caught:
                source = FilesSource(lab.config(format="parquet"), lab.around())
                await drive(source, (SourceExport(EXPORT, strict),), lab.contents)
            assert str(path) in str(caught.value)
            assert lab.keys == list(range(20_000))
        where = {"NULL": "in row 20000", "torn": "after row 10000"}.get(fault, "")
        assert where in str(caught.value)

    on_virtual_time(main)


def test_pieces_are_bounded_and_small_files_share_one(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        for number in range(20):
            written(lab.folder / f"{number}.parquet", {"k": [number], "v": ["x"]})
        await lab.drive(format="parquet")
        assert len(lab.contents.given) == 1
        monkeypatch.setattr("actors.connectors.sources.file_reading.PIECE_BYTES", 100_000)
        monkeypatch.setattr(parquet_bounds, "BATCH_ROWS", 1_000)
        written(lab.folder / "large.parquet", {"k": list(range(50_000)), "v": ["x"] * 50_000})
        await lab.drive(format="parquet")
        sizes = [rows.updates.nbytes for rows in lab.contents.given[1:]]
        assert len(sizes) > 5
        assert max(sizes) < 200_000

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("kind", "values", "ours"),
    [
        ("bigint", pa.array([1]), True),
        ("bigint", pa.array([1], pa.int32()), False),
        ("bigint", pa.array([1], pa.uint64()), False),
        ("string", pa.array(["x"], pa.large_string()), True),
        ("string", pa.array(["x"], pa.string_view()), True),
        ("string", pa.array([b"x"]), False),
        ("string", pa.array(["x"]).dictionary_encode(), False),
        ("binary", pa.array([b"x"]), True),
        ("date", pa.array([1], pa.date32()), True),
        ("decimal(9,2)", pa.array([1]).cast(pa.decimal128(19, 0)).cast(pa.decimal128(9, 2)), True),
        ("decimal(9,2)", pa.array([1]).cast(pa.decimal128(19, 0)).cast(pa.decimal128(8, 2)), False),
        ("timestamp", pa.array([1], pa.timestamp("us", tz="UTC")), True),
        ("timestamp", pa.array([1], pa.timestamp("ms", tz="Europe/Oslo")), True),
        ("timestamp", pa.array([1], pa.timestamp("us")), False),
        ("timestamp", pa.array([1000], pa.timestamp("ns", tz="UTC")), False),
        ("timestamp_ntz", pa.array([1], pa.timestamp("us")), True),
        ("array<int>", pa.array([[1]], pa.list_(pa.int32())), False),
    ],
)
def test_what_is_beyond_doubt(tmp_path: Path, kind: str, values: pa.Array, ours: bool) -> None:
    path = written(tmp_path / "a.parquet", {"c": values})
    assert reads_like_spark(path, TableSchema((TableColumn("c", kind),)).arrow()) == ours


def test_doubtful_files_are_for_spark(tmp_path: Path) -> None:
    shape = TableSchema((TableColumn("c", "date"),)).arrow()
    dates = pa.array([1], pa.date32())
    legacy = pa.table({"c": dates}).replace_schema_metadata(
        {"org.apache.spark.version": "3.0.1", "org.apache.spark.legacyDateTime": ""}
    )
    pq.write_table(legacy, tmp_path / "legacy.parquet")
    old = pa.table({"c": dates}).replace_schema_metadata({"org.apache.spark.version": "2.4.8"})
    pq.write_table(old, tmp_path / "old.parquet")
    written(tmp_path / "twice.parquet", {"c": dates, "C": dates})
    written(tmp_path / "other.parquet", {"C": dates})
    (tmp_path / "torn.parquet").write_text("PAR1")
    for name in ("legacy", "old", "twice", "other", "torn", "absent"):
        assert not reads_like_spark(str(tmp_path / f"{name}.parquet"), shape), name


# -- a copy from files ----------------------------------------------------------------------------


async def copied(copy: OneshotCopy) -> list[dict[str, Any]]:
    await copy.prepare()
    rows: list[dict[str, Any]] = []
    async for piece in copy.pieces():
        rows += piece.to_pylist()
    return rows


def test_a_copy_gives_all_rows_and_how_far_it_is(lab: Lab) -> None:
    target = TableSchema((*COLUMNS, TableColumn("note", "string")))

    async def main() -> None:
        lab.put("a.csv", "x,1\n")
        lab.put("b.csv", "y,2\nz,3\n")
        lab.put("c.txt", "no")
        request = CopyFromConfig(
            path=str(lab.folder), format="csv", columns=("v", "k"), pattern="*.csv"
        )
        copy = OneshotCopy(request, target, lab.around())
        rows = await copied(copy)
        assert sorted(rows, key=lambda row: row["k"]) == [
            {"k": 1, "v": "x", "note": None, DIFF: 1},
            {"k": 2, "v": "y", "note": None, DIFF: 1},
            {"k": 3, "v": "z", "note": None, DIFF: 1},
        ]
        done = copy.progress()
        assert (done.files_done, done.files, done.rows) == (2, 2, 3)
        assert done.bytes_done == done.bytes == 12
        single = CopyFromConfig(path=str(lab.folder / "a.csv"), format="csv", columns=("v", "k"))
        assert len(await copied(OneshotCopy(single, target, lab.around()))) == 1

    on_virtual_time(main)


def test_a_copy_fills_what_its_files_lack(lab: Lab) -> None:
    note = TableColumn("note", "string", nullable=False)
    target = TableSchema((*COLUMNS, note, TableColumn("due", "date")))

    async def main() -> None:
        lab.put("a.csv", "x,1\n")
        request = CopyFromConfig(
            path=str(lab.folder),
            format="csv",
            columns=("v", "k"),
            defaults=to_ipc(pa.table({"note": ["new"]})),
        )
        assert await copied(OneshotCopy(request, target, lab.around())) == [
            {"k": 1, "v": "x", "note": "new", "due": None, DIFF: 1}
        ]
        changes: list[tuple[dict[str, Any], str]] = [
            ({"computed": ("due",)}, "must have due, whose defaults are computed only by SQL"),
            ({"defaults": b""}, "must have note, which may not be NULL"),
        ]
        for changed, problem in changes:
            wrong = replace(request, **changed)
            with pytest.raises(InvalidUsage, match=problem):
                await OneshotCopy(wrong, target, lab.around()).prepare()

    on_virtual_time(main)


def test_a_copy_goes_batch_by_batch(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.connectors.sources.oneshot.FILES_AT_ONCE", 2)

    async def main() -> None:
        for number in range(5):
            lab.put(f"{number}.csv", f"{number},x\n")
        copy = OneshotCopy(
            CopyFromConfig(path=str(lab.folder), format="csv"), ROWS.schema, lab.around()
        )
        await copy.prepare()
        seen = [copy.progress().files_done async for _ in copy.pieces()]
        assert seen == [0, 2, 4]
        assert copy.progress().files_done == 5

    on_virtual_time(main)


@pytest.mark.parametrize("tells_file", [True, False])
def test_a_copy_fails_whole_and_names_the_file(lab: Lab, tells_file: bool) -> None:
    lab.spark.tells_file = tells_file

    async def main() -> None:
        for number in range(7):
            lab.put(f"{number}.csv", "bad" if number == 4 else f"{number},x\n")
        copy = OneshotCopy(
            CopyFromConfig(path=str(lab.folder), format="csv"), ROWS.schema, lab.around()
        )
        with pytest.raises(MalformedFile, match=r"4\.csv"):
            await copied(copy)

    on_virtual_time(main)


def test_a_copy_of_a_file_that_changes_meanwhile_fails(lab: Lab) -> None:
    async def main() -> None:
        path = lab.put("a.csv", "1,x\n")
        copy = OneshotCopy(CopyFromConfig(path=str(path), format="csv"), ROWS.schema, lab.around())
        await copy.prepare()
        with pytest.raises(SourceUnreachable, match="changed while it was being copied"):
            async for _ in copy.pieces():
                path.write_text("2,yy\n")

    on_virtual_time(main)


def refused(lab: Lab) -> Sequence[tuple[dict[str, Any], str]]:
    return (
        ({"path": "/etc/passwd"}, "source_dirs"),
        ({"columns": ("k", "w")}, "no column w"),
        ({"columns": ("k", "k")}, "duplicate column names"),
        ({"columns": ("v",)}, "must have k"),
        ({"options": {"path": "x"}}, "'path'"),
        ({"pattern": "*.json"}, "no file"),
    )


def test_a_copy_that_cannot_be_is_refused_before_it_begins(lab: Lab) -> None:
    target = TableSchema((TableColumn("k", "bigint", False), TableColumn("v", "string")))

    async def main() -> None:
        lab.put("a.csv", "1,x\n")
        for more, said in refused(lab):
            request = CopyFromConfig(**{"path": str(lab.folder), "format": "csv"} | more)
            with pytest.raises(InvalidUsage, match=said):
                await OneshotCopy(request, target, lab.around()).prepare()
        missing = CopyFromConfig(path=str(lab.folder / "absent.csv"), format="csv")
        with pytest.raises(SourceUnreachable, match="cannot read"):
            await OneshotCopy(missing, target, lab.around()).prepare()

    on_virtual_time(main)
