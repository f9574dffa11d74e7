"""Parquet files and their manifests, in a folder and in a bucket: exactly once, whatever fails and
whoever is killed, and nothing that no manifest names stays. The bucket is in memory, with a store
that fails; buckets on S3's own protocol are in `test_bucket_sinks_on_s3`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias, TypeVar

import msgspec
import obstore
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from sink_house import (  # type: ignore[import-not-found]
    FIRST,
    SCHEMA,
    InlineClock,
    Update,
    bag,
    batch,
    in_files,
    manifests,
    settings_of,
    tuples,
    updates,
)

from actors.connectors.sinks import sink_storage, staging
from actors.connectors.sinks.parquet import MANIFESTS, BatchManifest, ParquetConfig, ParquetSink
from actors.connectors.sinks.sink_storage import BucketSinkStorage, FolderSinkStorage, newest_number
from actors.connectors.sources.source import SourceUnreachable
from actors.durable.object_store import bucket_calls
from actors.durable.object_store.bucket_calls import BucketCalls
from actors.durable.object_store.bucket_paths import BucketPath
from actors.durable.object_store.bucket_store import FetchedObject, ObjectVersion
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, StorageError, WriterFenced
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from suite_lanes import examples  # type: ignore[import-not-found]

R = TypeVar("R")

PLACE = BucketPath("s3", "box", ("out", "p"))


class FolderLab:
    """A folder, and sinks into it, one after another."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "p"
        self.name = str(self.folder)
        self.lives = 0

    def sink(self, *, creation: str = "c", **given: Any) -> ParquetSink:
        self.lives += 1
        config = ParquetConfig(self.folder.name, creation=creation, **given)
        limits, outlet = settings_of(self.folder.parent), FolderSinkStorage(self.folder)
        return ParquetSink(config, outlet, "u1", f"life{self.lives}", limits, InlineClock())

    def keys(self) -> list[str]:
        """All below the place."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def put(self, name: str, data: bytes = b"") -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def manifests(self) -> list[BatchManifest]:
        return manifests(self.folder)  # type: ignore[no-any-return]

    def rows(self) -> list[Update]:
        return in_files(self.folder)  # type: ignore[no-any-return]

    def data(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.suffix == ".parquet"}

    def left(self) -> list[Path]:
        """Files of this machine that no reader of the place needs."""
        return []


class FaultyCalls(BucketCalls):
    """Counts calls, and fails the one of a number, before or after it was done."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory, memory, PLACE)
        self.done = self.at = 0
        self.after = False

    def arm(self, at: int, after: bool) -> None:
        self.done, self.at, self.after = 0, at, after

    def _do(self, function: Callable[[], R]) -> R:
        self.done += 1
        mine = self.done == self.at
        if mine and not self.after:
            raise StorageError("could not be done", determinate=False)
        result = function()
        if mine:
            raise StorageError("the answer was lost", determinate=False)
        return result

    def get(self, name: str, bytes_max: int) -> FetchedObject | None:
        return self._do(lambda: BucketCalls.get(self, name, bytes_max))

    def put_if(self, name: str, data: bytes, expected: ObjectVersion | None) -> bool:
        return self._do(lambda: BucketCalls.put_if(self, name, data, expected))

    def upload(self, name: str, path: Path, bytes_total: int, stopped: Event) -> None:
        self._do(lambda: BucketCalls.upload(self, name, path, bytes_total, stopped))

    def delete(self, names: list[str]) -> None:
        self._do(lambda: BucketCalls.delete(self, names))

    def names(self, folder: str = "", after: str = "") -> Iterator[list[str]]:
        return iter(self._do(lambda: list(BucketCalls.names(self, folder, after))))


class BucketLab:
    """A place in a bucket, and sinks into it, one after another."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.name = "s3://box/out/p"
        self.memory = MemoryStore()
        self.calls = FaultyCalls(self.memory)
        self.lives = 0

    def sink(self, *, creation: str = "c", **given: Any) -> ParquetSink:
        self.lives += 1
        spool = self.place / f"life-{self.lives}"
        outlet = BucketSinkStorage(PLACE, spool, Settings(), lambda *_: self.calls)
        config = ParquetConfig(str(PLACE), creation=creation, **given)
        return ParquetSink(config, outlet, "u1", f"life{self.lives}", Settings(), InlineClock())

    def keys(self) -> list[str]:
        pages = self.memory.list("out/p")
        return sorted(each["path"].removeprefix("out/p/") for page in pages for each in page)

    def put(self, name: str, data: bytes = b"") -> None:
        obstore.put(self.memory, f"out/p/{name}", data)

    def remove(self, name: str) -> None:
        self.memory.delete(f"out/p/{name}")

    def get(self, name: str) -> bytes:
        return bytes(self.memory.get(f"out/p/{name}").bytes())

    def manifests(self) -> list[BatchManifest]:
        names = [key for key in self.keys() if key.startswith(MANIFESTS)]
        return [msgspec.json.decode(self.get(name), type=BatchManifest) for name in names]

    def rows(self) -> list[Update]:
        found: list[Update] = []
        for number, manifest in enumerate(self.manifests(), 1):
            assert manifest.number == number
            for file in manifest.files:
                data = self.get(file.path)
                assert len(data) == file.bytes
                found += tuples(pq.read_table(io.BytesIO(data)))
        return found

    def data(self) -> set[str]:
        return {key for key in self.keys() if key.endswith(".parquet")}

    def left(self) -> list[Path]:
        return [path for path in self.place.rglob("*") if path.is_file()]


Lab: TypeAlias = FolderLab | BucketLab


@pytest.fixture(params=[FolderLab, BucketLab], ids=["folder", "bucket"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    made: Lab = request.param(tmp_path)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> FolderLab:
    return FolderLab(tmp_path)


@pytest.fixture
def bucket(tmp_path: Path) -> BucketLab:
    return BucketLab(tmp_path)


def named(lab: Lab) -> set[str]:
    return {file.path for each in lab.manifests() for file in each.files}


async def test_changes_and_their_intervals(lab: Lab) -> None:
    made = lab.sink()
    await made.check(SCHEMA)
    assert lab.keys() == []
    assert await made.open(SCHEMA) is None
    await batch(made, 5, 6, *FIRST)
    await batch(made, 6, 9)
    await batch(made, 9, 12, (1, "x", 9, -1), (3, "", 11, 1))
    await made.close()
    assert bag(lab.rows()) == bag([*FIRST, (1, "x", 9, -1), (3, "", 11, 1)])
    told = [(each.lower, each.upper, each.rows) for each in lab.manifests()]
    assert told == [(None, None, 0), (5, 6, 2), (6, 9, 0), (9, 12, 2)]
    names = pq.read_schema(io.BytesIO(lab.get(min(lab.data())))).names
    assert names == ["a", "b", "_time", "_diff"]
    counts = made.statistics()
    assert (counts.rows_committed, counts.rows_staged, counts.commits) == (4, 0, 3)
    assert counts.bytes_committed == sum(len(lab.get(name)) for name in lab.data())
    again = lab.sink()
    assert await again.open(SCHEMA) == 12
    await batch(again, 12, EMPTY)
    assert [each.ended for each in lab.manifests()[-2:]] == [False, True]
    assert await lab.sink().open(SCHEMA) == EMPTY
    assert lab.left() == []


async def test_a_check_makes_no_folder(folder: FolderLab) -> None:
    await folder.sink().check(SCHEMA)
    assert not folder.folder.exists()


async def test_contents_once(lab: Lab) -> None:
    made = lab.sink(once=True)
    assert made.once
    assert not made.keeps_times
    assert await made.open(SCHEMA) is None
    await batch(made, 5, EMPTY, *FIRST)
    assert bag(lab.rows()) == bag([(1, "x"), (1, "x"), (2, None)])
    assert await lab.sink(once=True).open(SCHEMA) == EMPTY


async def test_of_two_writers_one_is_fenced(lab: Lab) -> None:
    first = lab.sink()
    assert await first.open(SCHEMA) is None
    await batch(first, 5, 6, *FIRST)
    kept = lab.data()
    await first.write(updates([(7, "lost", 6, 1)]))
    second = lab.sink()
    assert await second.open(SCHEMA) == 6
    with pytest.raises(WriterFenced, match=f"taken over.*{lab.name}"):
        await first.commit(6, 8)
    assert lab.data() == kept
    await batch(second, 6, 9, (7, "kept", 8, 1))
    assert bag(lab.rows()) == bag([*FIRST, (7, "kept", 8, 1)])


async def test_what_is_there_and_not_ours_is_refused(lab: Lab) -> None:
    lab.put("x")
    with pytest.raises(InvalidUsage, match=r"contains other files \(x\)"):
        await lab.sink().check(SCHEMA)
    lab.remove("x")
    await lab.sink().open(SCHEMA)
    with pytest.raises(InvalidUsage, match="belongs to another sink"):
        await lab.sink(creation="another").open(SCHEMA)
    with pytest.raises(InvalidUsage, match="with different columns"):
        await lab.sink().open(TableSchema((TableColumn("a", "int"),)))
    with pytest.raises(InvalidUsage, match="with different columns"):
        await lab.sink(once=True).open(SCHEMA)
    lab.put(f"{MANIFESTS}/{9:020d}.json", b"{")
    with pytest.raises(InvalidUsage, match="invalid sink manifest"):
        await lab.sink().open(SCHEMA)


# -- in a folder -----------------------------------------------------------------------------------


async def test_what_a_killed_writer_left_goes(folder: FolderLab) -> None:
    first = folder.sink()
    await first.open(SCHEMA)
    await batch(first, 5, 6, *FIRST)
    kept = folder.data()
    await first.write(updates([(9, "y", 6, 1)]))
    assert first._files is not None
    first._files.finish()
    folder.put(f"{MANIFESTS}/_one")
    assert folder.data() > kept
    assert await folder.sink().open(SCHEMA) == 6
    assert folder.data() == kept
    assert "/_" not in " ".join(folder.keys())
    assert bag(folder.rows()) == bag(FIRST)


@pytest.mark.parametrize("at", range(1, 9))
async def test_a_failure_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A disk that fails at one operation of a batch, before or after it was done: the batch is
    there whole or not at all, and `open` says which."""
    done = 0

    def trap(real: Any, after: bool) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal done
            done += 1
            if done == at and not after:
                raise OSError("no disk")
            result = real(*args, **given)
            if done == at:
                raise OSError("the answer was lost")
            return result

        return call

    for after in (False, True):
        lab = FolderLab(tmp_path / f"{after}")
        lab.folder.parent.mkdir()
        made = lab.sink()
        await made.open(SCHEMA)
        await batch(made, 5, 6, *FIRST)
        done = 0
        with monkeypatch.context() as patch:
            for name in ("link", "fsync"):
                patch.setattr(os, name, trap(getattr(os, name), after))
            failed = False
            try:
                await batch(made, 6, 9, (3, "", 7, 1))
            except SourceUnreachable:
                failed = True
        assert failed or done < at
        await made.close()
        again = lab.sink()
        upper = await again.open(SCHEMA)
        assert upper in ((6, 9) if failed else (9,))
        if upper == 6:
            await batch(again, 6, 9, (3, "", 7, 1))
        assert bag(lab.rows()) == bag([*FIRST, (3, "", 7, 1)])
        assert lab.data() == named(lab)


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceUnreachable, match="could not"):
        await FolderLab(tmp_path / "file").sink().open(SCHEMA)


def test_files_of_a_batch_are_known_by_name(tmp_path: Path) -> None:
    """Only what no commit can name goes: not what stands below the upper, nor others' files."""
    older, newer = staging.FolderStaging(tmp_path, "a"), staging.FolderStaging(tmp_path, "b")
    for made, upper in ((older, 7), (newer, 9)):
        place = made.place(upper)
        place.seal(place.create("00001.parquet"))
    (tmp_path / "penstock-notes.parquet").touch()
    (tmp_path / "part-1.parquet").touch()
    newer.remove_orphans(9)
    assert sorted(os.listdir(tmp_path)) == [
        "part-1.parquet",
        f"penstock-{7:020d}-a-1-00001.parquet",
        "penstock-notes.parquet",
    ]
    with pytest.raises(StorageError, match="could not look into"):
        staging.FolderStaging(tmp_path / "gone", "c").remove_orphans(None)


# -- in a bucket -----------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
async def test_failing_or_killed_anywhere_every_batch_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lab = BucketLab(tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        page = data.draw(st.sampled_from([2, 1_000]))
        patch.setattr(bucket_calls, "PAGE_KEYS", page)
        patch.setattr(sink_storage, "PAGE_KEYS", page)
        wanted: list[Update] = []
        made: ParquetSink | None = None
        upper, key = 0, 0
        for _ in range(data.draw(st.integers(1, 6))):
            lab.calls.arm(data.draw(st.integers(0, 14)), data.draw(st.booleans()))
            rows = [(key + n, "x", upper, 1) for n in range(data.draw(st.integers(0, 2)))]
            try:
                if made is None:
                    made = lab.sink()
                    assert (await made.open(SCHEMA) or 0) == upper
                await batch(made, upper, upper + 1, *rows)
            except SourceUnreachable:
                if made is not None and data.draw(st.booleans()):
                    await made.close()
                made = None
            else:
                if data.draw(st.booleans()):
                    made = None  # killed
            lab.calls.arm(0, False)
            stands = await _stands(lab)
            assert stands in ((upper, upper + 1) if made is None else (upper + 1,))
            if stands == upper + 1:
                wanted += rows
            upper, key = stands, key + 2
        await lab.sink().open(SCHEMA)
    assert bag(lab.rows()) == bag(wanted)
    assert lab.data() == named(lab)


async def _stands(lab: Lab) -> int:
    """The upper outside, by the manifests alone."""
    return max((each.upper or 0 for each in lab.manifests()), default=0)


async def test_what_stands_beside_the_place_is_not_looked_at(bucket: BucketLab) -> None:
    obstore.put(bucket.memory, "out/pq", b"beside")
    await bucket.sink().check(SCHEMA)
    assert await bucket.sink().open(SCHEMA) is None


async def test_files_of_others_stay(bucket: BucketLab) -> None:
    """Only what no commit can name goes: not what stands below the upper, nor others' files."""
    made = bucket.sink()
    await made.open(SCHEMA)
    await batch(made, 0, 7, *FIRST)
    names = [
        f"penstock-{6:020d}-a-1-00001.parquet",
        "penstock-notes.parquet",
        "part-1.parquet",
        f"zone/penstock-{8:020d}-a-1-00001.parquet",
    ]
    for name in [*names, f"penstock-{7:020d}-a-1-00001.parquet"]:
        bucket.put(name, b"x")
    assert await bucket.sink().open(SCHEMA) == 7
    assert bucket.data() - named(bucket) == set(names)


@given(st.integers(0, 3_000), st.integers(0, 3_000), st.integers(1, 50))
def test_the_newest_of_many_is_found_by_few_questions(first: int, count: int, page: int) -> None:
    asked = 0

    def after(number: int) -> tuple[list[int], bool]:
        nonlocal asked
        asked += 1
        start = max(first, number + 1)
        found = list(range(start, min(first + count, start + page)))
        return found, len(found) == page

    assert newest_number(after) == (first + count - 1 if count else None)
    assert asked <= 30
