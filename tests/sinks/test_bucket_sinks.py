"""Sinks into buckets: exactly once, whatever fails and whoever is killed. Parquet in memory, with
a store that fails; both kinds on S3's own protocol in `test_bucket_sinks_on_s3`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import msgspec
import obstore
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from sink_house import SCHEMA, Update, bag, tuples, updates  # type: ignore[import-not-found]

from actors.connectors.sinks import outlets
from actors.connectors.sinks.outlets import BucketOutlet, newest_number
from actors.connectors.sinks.parquet import (
    MANIFESTS,
    BatchManifest,
    ParquetConfig,
    ParquetSink,
)
from actors.connectors.sources.source import SourceUnreachable
from actors.errors import InvalidUsage, StorageError, WriterFenced
from actors.kernel import SystemClock
from actors.object_store import bucket_calls
from actors.object_store.bucket_calls import BucketCalls
from actors.object_store.bucket_paths import BucketPath
from actors.object_store.bucket_store import FetchedObject, ObjectVersion
from actors.progress import EMPTY
from actors.settings import Settings
from suite_lanes import examples  # type: ignore[import-not-found]

R = TypeVar("R")

PLACE = BucketPath("s3", "box", ("out", "p"))
FIRST: list[Update] = [(1, "x", 5, 2), (2, None, 5, 1)]


class Clock(SystemClock):
    """The machine's, with calls inline."""

    async def run_blocking(self, function: Any) -> Any:
        return function()


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


class Lab:
    """A place in a bucket, and sinks into it, one after another."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.memory = MemoryStore()
        self.calls = FaultyCalls(self.memory)
        self.lives = 0

    def sink(self, *, creation: str = "c", **given: Any) -> ParquetSink:
        self.lives += 1
        spool = self.place / f"life-{self.lives}"
        outlet = BucketOutlet(PLACE, spool, Settings(), lambda *_: self.calls)
        config = ParquetConfig(str(PLACE), creation=creation, **given)
        return ParquetSink(config, outlet, "u1", f"life{self.lives}", Settings(), Clock())

    def keys(self) -> list[str]:
        """All below the place."""
        pages = self.memory.list("out/p")
        return sorted(each["path"].removeprefix("out/p/") for page in pages for each in page)

    def get(self, name: str) -> bytes:
        return bytes(self.memory.get(f"out/p/{name}").bytes())

    def manifests(self) -> list[BatchManifest]:
        names = [key for key in self.keys() if key.startswith(MANIFESTS)]
        return [msgspec.json.decode(self.get(name), type=BatchManifest) for name in names]

    def rows(self) -> list[Update]:
        """All that the manifests name; each is checked to be what its manifest says."""
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

    def named(self) -> set[str]:
        return {file.path for each in self.manifests() for file in each.files}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


async def batch(made: ParquetSink, lower: int, upper: int, *rows: Update) -> None:
    if rows:
        await made.write(updates(rows))
    await made.commit(lower, upper)


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
    counts = made.statistics()
    assert (counts.rows_committed, counts.rows_staged, counts.commits) == (4, 0, 3)
    assert counts.bytes_committed == sum(len(lab.get(name)) for name in lab.data())
    again = lab.sink()
    assert await again.open(SCHEMA) == 12
    await batch(again, 12, EMPTY)
    assert await lab.sink().open(SCHEMA) == EMPTY
    assert [path for path in lab.place.rglob("*") if path.is_file()] == []


async def test_contents_once(lab: Lab) -> None:
    made = lab.sink(once=True)
    assert await made.open(SCHEMA) is None
    await batch(made, 5, EMPTY, *FIRST)
    assert bag(lab.rows()) == bag([(1, "x"), (1, "x"), (2, None)])


async def test_of_two_writers_one_is_fenced(lab: Lab) -> None:
    first = lab.sink()
    await first.open(SCHEMA)
    await batch(first, 5, 6, *FIRST)
    kept = lab.data()
    await first.write(updates([(7, "lost", 6, 1)]))
    second = lab.sink()
    assert await second.open(SCHEMA) == 6
    with pytest.raises(WriterFenced, match="taken over s3://box/out/p"):
        await first.commit(6, 8)
    assert lab.data() == kept
    await batch(second, 6, 9, (7, "kept", 8, 1))
    assert bag(lab.rows()) == bag([*FIRST, (7, "kept", 8, 1)])


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
async def test_failing_or_killed_anywhere_every_batch_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        page = data.draw(st.sampled_from([2, 1_000]))
        patch.setattr(bucket_calls, "PAGE_KEYS", page)
        patch.setattr(outlets, "PAGE_KEYS", page)
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
    assert lab.data() == lab.named()


async def _stands(lab: Lab) -> int:
    """The upper outside, by the manifests alone."""
    return max((each.upper or 0 for each in lab.manifests()), default=0)


async def test_what_is_there_and_not_ours_is_refused(lab: Lab) -> None:
    obstore.put(lab.memory, "out/p/x", b"")
    with pytest.raises(InvalidUsage, match=r"s3://box/out/p holds other files \(x\)"):
        await lab.sink().check(SCHEMA)
    lab.memory.delete("out/p/x")
    obstore.put(lab.memory, "out/pq", b"beside")
    await lab.sink().open(SCHEMA)
    with pytest.raises(InvalidUsage, match="what another sink"):
        await lab.sink(creation="another").open(SCHEMA)
    obstore.put(lab.memory, f"out/p/{MANIFESTS}/{2:020d}.json", b"{")
    with pytest.raises(InvalidUsage, match="not the manifest"):
        await lab.sink().open(SCHEMA)


async def test_files_of_others_stay(lab: Lab) -> None:
    """Only what no commit can name goes: not what stands below the upper, nor others' files."""
    made = lab.sink()
    await made.open(SCHEMA)
    await batch(made, 0, 7, *FIRST)
    names = [
        f"penstock-{6:020d}-a-1-00001.parquet",
        "penstock-notes.parquet",
        "part-1.parquet",
        f"zone/penstock-{8:020d}-a-1-00001.parquet",
    ]
    for name in [*names, f"penstock-{7:020d}-a-1-00001.parquet"]:
        obstore.put(lab.memory, f"out/p/{name}", b"x")
    assert await lab.sink().open(SCHEMA) == 7
    assert lab.data() - lab.named() == set(names)


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
