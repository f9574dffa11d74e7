"""A bucket as a source, and a copy from one: in memory, with stores that fail; and on S3's own
protocol (`test_bucket_source_on_s3`)."""

from __future__ import annotations

import asyncio
from collections import Counter as Bag
from pathlib import Path
from typing import Any

import pytest
from bucket_lab import COLUMNS, ROWS, URL, BucketLab  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st
from test_files import FakeSpark  # type: ignore[import-not-found]

from actors.connectors.sources import bucket_location, object_listing
from actors.connectors.sources.file_reading import MalformedFile
from actors.connectors.sources.files import EXPORT, FilesConfig
from actors.connectors.sources.kinds import make_source
from actors.connectors.sources.oneshot import CopyFromConfig, OneshotCopy
from actors.connectors.sources.source import (
    PositionMark,
    SourceIdle,
    SourceRows,
    SourceUnreachable,
)
from actors.model.plan.jobs import InferFiles, TakeFiles
from actors.model.plan.schema import DIFF, TableSchema
from actors.runtime.errors import InvalidUsage
from suite_lanes import examples  # type: ignore[import-not-found]


@pytest.fixture
def lab(tmp_path: Path) -> BucketLab:
    return BucketLab(tmp_path)


async def test_objects_are_taken_once_over_restarts(lab: BucketLab) -> None:
    lab.put("a.parquet", 1, 2)
    await lab.drive()
    assert all(rows.snapshot for rows in lab.contents.given)
    lab.put("b.parquet", 3)
    lab.put("sub/c.parquet", 4)
    lab.put("_d.parquet", 5)
    await lab.drive()
    await lab.drive()
    assert lab.keys == [1, 2, 3]
    assert not lab.contents.given[-1].snapshot
    await lab.drive(recursive=True)
    assert lab.keys == [1, 2, 3, 4]
    assert lab.spooled() == []


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
async def test_killed_or_failing_anywhere_every_object_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lab = BucketLab(tmp_path_factory.mktemp("lab"))
    wanted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_location, "PIECE_BYTES", data.draw(st.sampled_from([300, 1 << 20])))
        patch.setattr(object_listing, "PENDING_MAX", data.draw(st.integers(1, 4)))
        for _ in range(data.draw(st.integers(1, 5))):
            for _ in range(data.draw(st.integers(0, 4))):
                key = len(wanted)
                lab.put(f"{data.draw(st.integers(0, 99)):02}-{key}.parquet", key)
                wanted.append(key)
            lab.store.calls, lab.store.fail_at = 0, data.draw(st.integers(0, 12))
            source = lab.source(batch_files_max=data.draw(st.integers(1, 3)))
            lab.contents.waiting = []
            try:
                await source.open((ROWS,), lab.contents.position)
                for _ in range(data.draw(st.integers(0, 6))):
                    if isinstance(found := await source.next(), SourceIdle):
                        break
                    lab.contents.take(found)
            except SourceUnreachable as error:
                assert "the store failed" in str(error)  # noqa: PT017 - it need not come
            if data.draw(st.booleans()):
                await source.close()
                assert not list((lab.place / f"life-{lab.lives}").rglob("*"))
        lab.store.fail_at = 0
        await lab.drive()
    assert lab.keys == wanted


async def test_an_object_that_changes_while_it_is_read_is_not_taken(
    lab: BucketLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_location, "PIECE_BYTES", 200)
    lab.put("a.parquet", 1)
    lab.put("b.parquet", 2)

    def change() -> None:
        lab.store.during = None
        lab.put("a.parquet", 7, 8)
        lab.put("b.parquet", 9)

    lab.store.during = change
    with pytest.raises(
        SourceUnreachable, match=r"in/[ab]\.parquet changed while it was being read"
    ):
        await lab.drive()
    assert lab.keys == []
    assert lab.spooled() == []
    await lab.drive()
    assert lab.keys == [7, 8, 9]


async def test_an_object_that_is_gone_is_not_waited_for(lab: BucketLab) -> None:
    lab.put("a.parquet", 1)
    lab.put("b.parquet", 2)
    lab.store.during = lambda: lab.memory.delete("in/b.parquet")
    with pytest.raises(SourceUnreachable, match=r"b\.parquet changed"):
        await lab.drive(batch_files_max=1)
    assert lab.keys == [1]
    lab.store.during = None
    await lab.drive()
    assert lab.keys == [1]


async def test_what_was_changed_after_it_was_taken_is_told(lab: BucketLab) -> None:
    lab.put("a.parquet", 1)
    await lab.drive()
    lab.put("a.parquet", 2, 3)
    source = await lab.drive()
    assert lab.keys == [1]
    assert source.lag().notes == ("changed after it was ingested: a.parquet",)


async def test_a_late_object_is_counted(lab: BucketLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_listing, "RECENT_MAX", 1)
    for number in range(3):
        lab.put(f"{number}.parquet", number)
    source = await lab.drive()
    assert source.lag().notes == ()
    position = lab.contents.marks[-1].position
    low = object_listing.IngestedObjects.of(position)
    assert low.forgotten == 2
    # As of a store that dates an object before what was taken already.
    lab.contents.marks.append(PositionMark(low._replace(forgotten=1).position()))
    source = await lab.drive()
    assert "appeared too late" in "; ".join(source.lag().notes)


async def test_lag_tells_what_waits(lab: BucketLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_listing, "PENDING_MAX", 2)
    sizes = []
    for number in range(4):
        lab.put(f"{number}.parquet", number)
        sizes.append(lab.memory.head(f"in/{number}.parquet")["size"])
    source = lab.source(batch_files_max=1)
    await source.open((ROWS,), None)
    assert isinstance(await source.next(), SourceRows)
    assert source.lag().known == "3.parquet, and 3 before it"
    assert source.lag().bytes_behind == sum(sizes)
    mark = await source.next()
    assert isinstance(mark, PositionMark)
    assert mark.messages == 1
    assert source.lag().bytes_behind == sum(sizes[1:])
    seen = [await source.next() for _ in range(7)]
    assert isinstance(seen[-1], SourceIdle)
    assert (source.lag().known, source.lag().bytes_behind) == ("", 0)
    assert all(each.snapshot for each in seen if isinstance(each, SourceRows))
    await source.close()


async def test_few_objects_are_fetched_at_a_time_and_few_lie_on_disk(
    lab: BucketLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_location, "PIECE_BYTES", 500)
    for number in range(20):
        lab.put(f"{number}.parquet", *range(100))
    size = lab.memory.head("in/1.parquet")["size"]
    held: list[int] = []
    lab.store.during = lambda: held.append(sum(Path(path).stat().st_size for path in lab.spooled()))
    await lab.drive(limits={"source_spool_bytes_max": size * 7})
    assert len(lab.keys) == 2_000
    assert lab.store.most_reading == bucket_location.FETCHES_AT_ONCE
    assert 0 < max(held) <= size * 7
    assert len(lab.contents.marks) == 3
    lab.put("large.parquet", *range(20_000))
    with pytest.raises(
        MalformedFile,
        match=r"large\.parquet is too large to download: \d+ bytes.*source_spool_bytes_max",
    ):
        await lab.drive(limits={"source_spool_bytes_max": size * 7})


async def test_a_source_that_is_cancelled_while_it_fetches_leaves_nothing(lab: BucketLab) -> None:
    lab.put("a.parquet", 1)
    source = lab.source()
    await source.open((ROWS,), None)
    begun = asyncio.Event()
    lab.store.during = begun.set
    asking = asyncio.create_task(source.next())
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await source.close()
    assert lab.spooled() == []
    lab.store.during = None
    await lab.drive()
    assert lab.keys == [1]


# -- through the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("tells_file", [True, False])
async def test_text_goes_through_the_engine_and_errors_name_the_object(
    tmp_path: Path, tells_file: bool
) -> None:
    spark = FakeSpark(tmp_path)
    spark.tells_file = tells_file
    lab = BucketLab(tmp_path / "lab", spark.run_job)
    for number in range(5):
        lab.put_bytes(f"{number}.csv.txt", b"bad" if number == 3 else b"%d,x\n" % number)
    with pytest.raises(MalformedFile, match=rf"{URL}/3\.csv\.txt") as caught:
        await lab.drive(format="csv")
    assert str(lab.place) not in str(caught.value)
    assert lab.keys == [0, 1, 2]
    lab.put_bytes("3.csv.txt", b"3,x\n")
    await lab.drive(format="csv")
    assert lab.keys == [0, 1, 2, 3, 4]
    jobs = [job for job in spark.jobs if isinstance(job, TakeFiles)]
    assert all(path.endswith(".csv.txt") for job in jobs for path in job.paths)
    assert lab.spooled() == []


async def test_columns_are_inferred_of_objects(tmp_path: Path) -> None:
    spark = FakeSpark(tmp_path)
    lab = BucketLab(tmp_path / "lab", spark.run_job)
    with pytest.raises(InvalidUsage, match=f"no file in {URL}"):
        await lab.source(format="csv", columns=()).describe(None)
    lab.put_bytes("a.csv", b"1,x\n")
    assert await lab.source(format="csv", columns=()).describe(None) == (ROWS,)
    (job,) = spark.jobs
    assert isinstance(job, InferFiles)
    assert lab.spooled() == []


# -- what may be read -----------------------------------------------------------------------------


async def test_a_bucket_that_is_not_allowed_is_refused(lab: BucketLab) -> None:
    for url in ("s3://box", "s3://box/inner", "gs://box/in", "s3://other/in"):
        with pytest.raises(InvalidUsage, match="source_buckets"):
            await lab.source(folder=url).describe(None)
        with pytest.raises(InvalidUsage, match="source_buckets"):
            await lab.source(folder=url).open((ROWS,), None)
    with pytest.raises(InvalidUsage, match="none"):
        await lab.source(limits={"source_buckets": ()}).describe(None)
    assert (await lab.source(folder=f"{URL}/below").describe(None)) == (ROWS,)
    for url in ("s3://key:word@box/in", "s3://box/in?x=1", "s3://box/../in", "s3://"):
        config = FilesConfig(folder=url, format="csv", columns=COLUMNS)
        with pytest.raises(InvalidUsage, match="invalid bucket URL") as caught:
            make_source(config, lab.around())
        assert "word" not in str(caught.value)


# -- a copy ---------------------------------------------------------------------------------------


async def copied(copy: OneshotCopy) -> list[dict[str, Any]]:
    await copy.prepare()
    return [row async for piece in copy.pieces() for row in piece.to_pylist()]


def a_copy(lab: BucketLab, path: str = URL, **more: Any) -> OneshotCopy:
    request = CopyFromConfig(path=path, format="parquet", **more)
    return OneshotCopy(request, TableSchema(COLUMNS), lab.around(), lambda *_: lab.store)


async def test_a_copy_of_a_bucket_or_of_one_object(
    lab: BucketLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.connectors.sources.oneshot.FILES_AT_ONCE", 2)
    for number in range(5):
        lab.put(f"{number}.parquet", number)
    lab.put_bytes("note.txt", b"no")
    copy = a_copy(lab, pattern="*.parquet")
    rows = await copied(copy)
    assert Bag(row["k"] for row in rows) == Bag(range(5))
    assert {row[DIFF] for row in rows} == {1}
    done = copy.progress()
    assert (done.files_done, done.files, done.rows) == (5, 5, 5)
    assert done.bytes_done == done.bytes > 0
    (row,) = await copied(a_copy(lab, f"{URL}/3.parquet"))
    assert row["k"] == 3
    assert lab.spooled() == []


async def test_a_copy_fails_whole(lab: BucketLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.connectors.sources.oneshot.FILES_AT_ONCE", 1)
    for number in range(3):
        lab.put(f"{number}.parquet", number)
    copy = a_copy(lab)
    await copy.prepare()
    with pytest.raises(SourceUnreachable, match=r"2\.parquet changed"):
        async for _ in copy.pieces():
            lab.put("2.parquet", 7)
    lab.put_bytes("0.parquet", b"bad")
    lab.run_job = FakeSpark(lab.place).run_job
    with pytest.raises(MalformedFile, match=rf"{URL}/0\.parquet"):
        await copied(a_copy(lab))
    for path, said in (("s3://box/other", "source_buckets"), (f"{URL}/none", "no file")):
        with pytest.raises(InvalidUsage, match=said):
            await a_copy(lab, path).prepare()
    monkeypatch.setattr(bucket_location, "LISTED_MAX", 2)
    with pytest.raises(InvalidUsage, match="more than 2 objects"):
        await a_copy(lab).prepare()


async def test_a_store_that_fails_is_told(lab: BucketLab) -> None:
    lab.put("a.parquet", 1)
    lab.store.fail_at = 1
    with pytest.raises(SourceUnreachable, match="could not list") as caught:
        await lab.drive()
    assert "will retry" in caught.value.hint
    assert EXPORT not in lab.contents.bags
