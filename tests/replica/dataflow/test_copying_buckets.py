"""Copies into buckets, on a real S3 server: whole, or not there at all, wherever it fails."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from copying_house import (  # type: ignore[import-not-found]
    described,
    read_file,
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

from actors.connectors.sinks import copy_output
from actors.connectors.sinks.copy_output import copy_storage, output_opener
from actors.connectors.sinks.sink_storage import BucketSinkStorage
from actors.durable.object_store import bucket_store
from actors.durable.object_store.bucket_paths import BucketPath, bucket_path
from actors.durable.object_store.bucket_store import BucketStore
from actors.durable.persist import PersistClient
from actors.model.plan.copy_manifest import MANIFEST, CopyManifest
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import CopyDone, CopyFailed, DataflowDescription, StatusResponse
from actors.model.protocol.internal import CopyFinished, DataflowScheduled, WritesAllowed
from actors.replica.dataflow.copying import CopyTask, copy
from actors.runtime.errors import InvalidUsage, StorageError
from actors.runtime.kernel.clock import SystemClock
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_MS, PATIENCE_S, growing_deadlines_ms
from actors.testing.probe import MessageProbe
from s3_server import KEY_ID, S3, SECRET, Fate, point_to, serving  # type: ignore[import-not-found]

PIECE = 8_192
Row = tuple[Any, ...]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as served:
        yield served


class House:
    """One bucket, and copies into it."""

    def __init__(self, s3: S3, persist: PersistClient, system: Any, place: Path) -> None:
        self.s3 = s3
        self.persist = persist
        self.system = system
        self.place = place
        self.bucket = s3.new_bucket()
        self.to = f"s3://{self.bucket}/exports/out"
        self.settings: Settings = settings_of(
            place,
            copy_buckets=(f"s3://{self.bucket}/exports",),
            copy_request_timeout_ms=PATIENCE_MS,
            copy_request_retries_max=1,
        )

    async def copied(
        self, description: DataflowDescription, attempt: str = "1", **changes: Any
    ) -> CopyDone:
        """The copy, run to its end."""
        clock = SystemClock()
        settings = msgspec.structs.replace(self.settings, **changes)
        make = output_opener(settings, clock, self.place / "spool", attempt)
        with anyio.fail_after(200):
            return await copy(
                self.persist, clock, description, make, self.place / "scratch", lambda _: None
            )

    def described(self, schema: TableSchema, name: str = "numbers", **changes: Any) -> Any:
        return described(schema, name, **({"destination": self.to} | changes))

    async def three_files(self, **changes: Any) -> DataflowDescription:
        """A copy of three files; the first two go up in pieces."""
        made = await three_files(self.persist)
        export = msgspec.structs.replace(made.export, destination=self.to)
        found: DataflowDescription = msgspec.structs.replace(made, export=export, **changes)
        return found

    @property
    def keys(self) -> list[str]:
        return [key.removeprefix("exports/out/") for key in self.s3.keys(self.bucket)]

    def manifest(self) -> CopyManifest:
        data = self.s3.get(self.bucket, f"exports/out/{MANIFEST}")
        return msgspec.json.decode(data, type=CopyManifest)

    def read(self, schema: TableSchema) -> list[Row]:
        """The rows of the files that the manifest names."""
        manifest = self.manifest()
        rows: list[Row] = []
        for number, file in enumerate(manifest.files):
            data = self.s3.get(self.bucket, f"exports/out/{file.path}")
            assert len(data) == file.bytes
            local = self.place / f"read-{number}"
            local.write_bytes(data)
            found = read_file(local, manifest.format, schema)
            assert len(found) == file.rows
            rows += found
        assert len(rows) == manifest.rows
        return rows

    def nothing_is_left(self) -> None:
        assert self.keys == []
        assert self.s3.uploads(self.bucket) == []
        assert not (self.place / "spool").exists()


@pytest.fixture
async def house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: S3
) -> AsyncIterator[House]:
    server.forget()
    point_to(monkeypatch, server)
    monkeypatch.setattr(bucket_store, "PIECE_BYTES", PIECE)
    async with surroundings(clock=SystemClock()) as (system, persist):
        yield House(server, persist, system, tmp_path)
    server.forget()


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
@pytest.mark.parametrize("retracts", [False, True], ids=["as it is read", "summed up"])
async def test_a_copy_holds_the_contents_at_its_time(
    house: House, format: str, retracts: bool
) -> None:
    await shard(house.persist, "pairs", PAIRS)
    first = table(PAIRS, (1, 2, 1, 1), (3, 4, 2, 3), (5, None, 3, 1))
    await write(house.persist, "pairs", 5, first)
    gone = [(1, 2, 6, -1), (7, 7, 6, 2)] if retracts else [(7, 7, 6, 2)]
    await write(house.persist, "pairs", 9, table(PAIRS, *gone, (8, 8, 8, 1)))
    done = await house.copied(house.described(PAIRS, "pairs", format=format, as_of=7))
    rows = [(3, 4)] * 3 + [(5, None)] + [(7, 7)] * 2 + [(1, 2)] * (not retracts)
    assert Counter(house.read(PAIRS)) == Counter(rows)
    assert done == CopyDone(len(rows), 1, f"{house.to}/{MANIFEST}")
    assert (house.manifest().object, house.manifest().as_of) == ("pairs", 7)
    assert house.keys == [MANIFEST, f"copy-t1-1/00001.{format}"]
    assert not (house.place / "spool").exists()


async def test_large_files_go_up_in_pieces_and_few_at_a_time(house: House) -> None:
    await shard(house.persist, "numbers", NUMBERS)
    rows = [((n * 7_919) ** 3 % 1_000_000_007, 1, 1) for n in range(30_000)]
    await write(house.persist, "numbers", 5, table(NUMBERS, *rows))
    house.s3.put_at_once = 0
    done = await house.copied(house.described(NUMBERS, format="csv", size=120_000))
    assert Counter(house.read(NUMBERS)) == Counter((row[0],) for row in rows)
    sizes = [file.bytes for file in house.manifest().files]
    assert done.files == len(sizes) > 2
    assert max(sizes) <= 120_000 * 1.1
    pieces = sum("partNumber" in line for line in house.s3.calls)
    assert pieces >= sum(sizes) // PIECE
    assert 1 <= house.s3.put_at_once <= bucket_store.PIECES_AT_ONCE + 1
    assert house.s3.uploads(house.bucket) == []


async def test_nothing_is_copied_as_nothing(house: House) -> None:
    await shard(house.persist, "numbers", NUMBERS)
    await write(house.persist, "numbers", 5, table(NUMBERS))
    done = await house.copied(house.described(NUMBERS))
    assert (done.rows, done.files, house.keys) == (0, 0, [MANIFEST])


# -- faults at every request -----------------------------------------------------------------------


class Trap:
    """A fate for the request of that number, and for what looks like it; or for it alone."""

    def __init__(self, at: int, fate: Fate, *, once: bool, then: Callable[[], Any] = int) -> None:
        self.at, self.fate, self.once, self.then = at, fate, once, then
        self.count = 0
        self.line = ""
        self._lock = threading.Lock()

    def __call__(self, line: str) -> Fate:
        with self._lock:
            self.count += 1
            if self.count == self.at:
                self.line = line
                self.then()
                return self.fate
            return self.fate if line == self.line and not self.once else None


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("fate", ["fail", "deny", "late"])
async def test_a_copy_that_fails_at_any_request_leaves_nothing(house: House, fate: Fate) -> None:
    description = await house.three_files()
    failed = 0
    for at in range(1, 100):
        house.s3.rule = trap = Trap(at, fate, once=False)
        uploads = house.s3.uploads(house.bucket)
        try:
            done = await house.copied(description)
        except StorageError as error:
            failed += 1
            house.s3.forget()
            # Whoever was not told of an upload that he has begun cannot end it.
            unknown = fate == "late" and trap.line.endswith("?uploads=")
            assert house.s3.uploads(house.bucket) == uploads or unknown, trap.line
            if MANIFEST in trap.line and not error.determinate:
                # It cannot know whether the manifest is there: the files stay, for whoever looks.
                assert trap.line.startswith("PUT")
                assert fate != "deny"
            else:
                assert house.keys == [], trap.line
            await house.copied(msgspec.structs.replace(description, id="t2"))
            assert len(house.read(NUMBERS)) == 3_000
            names = {key.partition("/")[0] for key in house.keys}
            assert names == {MANIFEST, "copy-t2-1"}, trap.line
        else:
            assert len(house.read(NUMBERS)) == 3_000, trap.line
            assert done.files == len(house.manifest().files)
        for key in house.s3.keys(house.bucket):
            house.s3.ask("DELETE", f"/{house.bucket}/{key}")
        if not trap.line:
            break
        assert not (house.place / "spool").exists()
    assert at > 12
    assert failed > 8 if fate != "late" else failed


async def test_one_failed_request_is_no_failed_copy(house: House) -> None:
    description = await house.three_files()
    for at in range(1, 100):
        house.s3.rule = trap = Trap(at, "fail", once=True)
        await house.copied(msgspec.structs.replace(description, id=f"t{at}"))
        assert len(house.read(NUMBERS)) == 3_000, trap.line
        house.s3.ask("DELETE", f"/{house.bucket}/exports/out/{MANIFEST}")
        if not trap.line:
            break
    assert at > 12


async def test_a_manifest_that_was_written_and_not_answered_counts(house: House) -> None:
    description = await house.three_files()
    house.s3.rule = lambda line: "late" if line.startswith("PUT") and MANIFEST in line else None
    done = await house.copied(description)
    assert (done.rows, len(house.read(NUMBERS))) == (3_000, 3_000)


async def test_a_copy_that_is_canceled_at_any_request_leaves_nothing(house: House) -> None:
    description = await house.three_files()
    loop = asyncio.get_running_loop()
    canceled = 0
    for at in range(1, 100):
        scope = anyio.CancelScope()
        cancel = scope.cancel
        house.s3.rule = trap = Trap(
            at,
            None,
            once=True,
            then=lambda: loop.call_soon_threadsafe(cancel),  # noqa: B023
        )
        with scope:
            await house.copied(description)
        if scope.cancelled_caught:
            canceled += 1
            house.s3.forget()
            house.nothing_is_left()
        else:
            assert len(house.read(NUMBERS)) == 3_000
        for key in house.s3.keys(house.bucket):
            house.s3.ask("DELETE", f"/{house.bucket}/{key}")
        if not trap.line:
            break
    assert canceled > 6


# -- a store that hangs ----------------------------------------------------------------------------


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "part", ["GET .*manifest", "uploads", "partNumber", "POST .*uploadId", f"PUT .*{MANIFEST}"]
)
async def test_a_store_that_hangs_fails_the_copy_within_its_limits(house: House, part: str) -> None:
    description = await house.three_files()
    met: list[str] = []

    def rule(line: str) -> Fate:
        if re.search(part, line):
            met.append(line)
            return "hang"
        return None

    house.s3.rule = rule
    limits: dict[str, Any] = {"copy_request_retries_max": 0}
    for limits["copy_request_timeout_ms"] in growing_deadlines_ms():
        with pytest.raises(StorageError, match=r"did not respond|it may or may not"):
            await house.copied(description, str(limits["copy_request_timeout_ms"]), **limits)
        if met:
            break
    assert met
    house.s3.forget()
    assert MANIFEST not in house.keys


async def test_a_dropped_copy_does_not_wait_for_a_store_that_hangs(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_store, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(copy_output, "GIVE_UP_S", 0.2)
    description = await house.three_files()
    hangs = anyio.Event()
    loop = asyncio.get_running_loop()

    def rule(line: str) -> Fate:
        if "partNumber" in line:
            loop.call_soon_threadsafe(hangs.set)
            return "hang"
        return None

    house.s3.rule = rule
    worker = MessageProbe.start(house.system, "worker")
    address = house.system.spawn(
        lambda: CopyTask(
            description,
            (worker.address,),
            house.persist,
            house.settings,
            house.place / "scratch",
        ),
        "copy",
    )
    for message in (DataflowScheduled(), WritesAllowed()):
        await address.send(message)
    await worker.expect(StatusResponse, state="waiting")
    with anyio.fail_after(200):
        await hangs.wait()
        # The copy's thread, actor and loop are free: others go on.
        await write(house.persist, "numbers", 9, table(NUMBERS, (1, 7, 1)))
        cell = house.system.cells[address.path]
        assert cell.statistics().doing == "waiting"
        cell.request_stop()
        await cell.stopped.wait()
    house.s3.forget()
    assert MANIFEST not in house.keys


async def test_the_actor_copies_and_answers_once(house: House) -> None:
    description = await house.three_files()
    worker = MessageProbe.start(house.system, "worker")
    for number, wanted in enumerate((CopyDone, CopyFailed)):
        made = msgspec.structs.replace(description, id=f"t{number}")
        address = house.system.spawn(
            lambda: CopyTask(
                made,  # noqa: B023
                (worker.address,),
                house.persist,
                house.settings,
                house.place / "scratch",
            ),
            f"copy-{number}",
        )
        for message in (DataflowScheduled(), WritesAllowed()):
            await address.send(message)
        last: Any = None
        while not isinstance(last, CopyFinished):
            last = await worker.expect(object)
        assert isinstance(last.result, wanted), "the second one finds a copy there"
        await worker.expect_nothing()
    assert len(house.read(NUMBERS)) == 3_000


# -- several copies to one place -------------------------------------------------------------------


async def test_a_copy_that_is_there_is_refused_or_replaced(house: House) -> None:
    await shard(house.persist, "numbers", NUMBERS)
    await write(house.persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
    await write(house.persist, "numbers", 9, table(NUMBERS, (2, 7, 1)))
    first = await house.copied(house.described(NUMBERS, id="a"))
    with pytest.raises(InvalidUsage, match="already contains a copy of numbers at 4"):
        await house.copied(house.described(NUMBERS, id="b", as_of=8))
    assert await house.copied(house.described(NUMBERS, id="a"), attempt="2") == first
    assert house.read(NUMBERS) == [(1,)]
    house.s3.ask("PUT", f"/{house.bucket}/exports/out/copy-mine/notes.txt")
    house.s3.ask("PUT", f"/{house.bucket}/exports/out/copy-c-1/00001.csv")
    house.s3.ask("PUT", f"/{house.bucket}/exports/out/deeper/copy-c-1/00001.csv")
    await house.copied(house.described(NUMBERS, id="b", as_of=8, overwrite=True))
    assert sorted(house.read(NUMBERS)) == [(1,), (2,)]
    kept = ["copy-mine/notes.txt", "deeper/copy-c-1/00001.csv"]
    assert house.keys == [MANIFEST, "copy-b-1/00001.parquet", *kept]
    house.s3.ask("PUT", f"/{house.bucket}/exports/theirs/{MANIFEST}")
    with pytest.raises(InvalidUsage, match="not the manifest of a copy"):
        await house.copied(house.described(NUMBERS, destination=house.to[:-3] + "theirs"))


def held_at_its_manifest(house: House) -> tuple[anyio.Event, threading.Event]:
    """Hold the first copy that writes its manifest: (it is there, it may go on)."""
    loop, here, goes = asyncio.get_running_loop(), anyio.Event(), threading.Event()

    def rule(line: str) -> Fate:
        if line.startswith("PUT") and MANIFEST in line:
            house.s3.rule = lambda _: None
            loop.call_soon_threadsafe(here.set)
            assert goes.wait(PATIENCE_S)
        return None

    house.s3.rule = rule
    return here, goes


@pytest.mark.parametrize("overwrite", [False, True])
async def test_of_two_copies_to_one_place_one_is_whole(house: House, overwrite: bool) -> None:
    """The slower one stops before its manifest; the faster one removes its files even."""
    slow = await house.three_files()
    if overwrite:
        await house.copied(msgspec.structs.replace(slow, id="t0"))
        export = msgspec.structs.replace(slow.export, overwrite=True)
        slow = msgspec.structs.replace(slow, export=export)
    fast = msgspec.structs.replace(slow, id="t2")
    here, goes = held_at_its_manifest(house)
    async with anyio.create_task_group() as group:

        async def fails() -> None:
            with pytest.raises(InvalidUsage, match="another copy was written"):
                await house.copied(slow)

        group.start_soon(fails)
        await here.wait()
        await house.copied(fast)
        assert {key.partition("/")[0] for key in house.keys} == {MANIFEST, "copy-t2-1"}
        goes.set()
    assert len(house.read(NUMBERS)) == 3_000
    assert house.manifest().copy == "t2"
    assert {key.partition("/")[0] for key in house.keys} == {MANIFEST, "copy-t2-1"}


async def test_another_attempt_at_the_same_copy_is_the_same_answer(house: House) -> None:
    """A replica was lost, and is not gone: both make the copy."""
    description = await house.three_files()
    here, goes = held_at_its_manifest(house)
    done: list[CopyDone] = []
    async with anyio.create_task_group() as group:

        async def other() -> None:
            done.append(await house.copied(description, attempt="other"))

        group.start_soon(other)
        await here.wait()
        done.append(await house.copied(description))
        goes.set()
    assert done[0] == done[1]
    assert len(house.read(NUMBERS)) == 3_000
    assert {key.partition("/")[0] for key in house.keys} == {MANIFEST, "copy-t1-1"}


# -- who may write where, and what is told ---------------------------------------------------------


def test_places_are_below_what_is_allowed() -> None:
    settings = Settings(copy_buckets=("s3://box/a/b/", "gs://other"))

    def bucket_place(url: str, settings: Settings) -> BucketPath:
        storage = copy_storage(url, settings, Path("spool"))
        assert isinstance(storage, BucketSinkStorage)
        return storage.place

    assert bucket_place("s3://box/a/b", settings) == BucketPath("s3", "box", ("a", "b"))
    assert str(bucket_place("s3://box/a/b/c=1/", settings)) == "s3://box/a/b/c=1"
    assert bucket_place("gs://other/x", settings).prefix == "x"
    for url in ("s3://box/a", "s3://box/a/bc", "gs://box/a/b", "s3://other/x", "az://other/x"):
        with pytest.raises(InvalidUsage, match="copy_buckets"):
            bucket_place(url, settings)
    with pytest.raises(InvalidUsage, match="whole bucket"):
        bucket_place("gs://other/", settings)
    with pytest.raises(InvalidUsage, match="at or below none"):
        bucket_place("s3://box/a/b", Settings())


@pytest.mark.parametrize(
    "url",
    [
        "s3://box/a/../b",
        "s3://box/./b",
        "s3://box//b",
        "s3://box/a b",
        "s3://box/a%2e",
        "s3://box:80/a",
        "s3://key:secret@box/a",
        "s3://box/a?x=1",
        "s3://box/a#x",
        "s3:box",
        "s3://B/a",
    ],
)
def test_what_is_no_plain_url_of_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidUsage, match="invalid bucket URL") as caught:
        bucket_path(url)
    assert "secret" not in str(caught.value)


async def test_no_error_and_no_log_tells_a_secret(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    description = await house.three_files()
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    faults: list[tuple[str, Fate]] = [
        ("GET", "deny"),
        ("PUT", "deny"),
        ("POST", "deny"),
        ("PUT", "fail"),
    ]
    for part, fate in faults:
        house.s3.rule = lambda line: fate if line.startswith(part) else None  # noqa: B023
        with pytest.raises(StorageError) as caught:
            await house.copied(description)
        told.append(f"{caught.value!r} {caught.value.__cause__!r}")
    house.s3.forget()
    assert "do not allow it (403 AccessDenied)" in told[0]
    elsewhere = described(NUMBERS, destination="s3://no-such-bucket/x")
    with pytest.raises(StorageError, match="the bucket does not exist") as caught:
        await house.copied(elsewhere, copy_buckets=("s3://no-such-bucket",))
    told.append(str(caught.value))
    told += [record.getMessage() for record in caplog.records]
    for text in told:
        assert SECRET not in text
        assert KEY_ID not in text
        assert "Signature" not in text


async def test_a_store_that_is_not_there_is_told(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = await house.three_files()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be reached"):
        await house.copied(description)
    house.nothing_is_left()


async def test_the_other_kinds_are_opened_and_tell_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No server of theirs is at hand: only that they are reached for, and that it is told."""
    settings = Settings(copy_request_timeout_ms=PATIENCE_MS, copy_request_retries_max=1)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "nobody")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    store = BucketStore.open("az", "box", settings)
    with pytest.raises(StorageError, match="az://box/a/b: the store cannot be reached"):
        await store.get("a/b", 10)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT")
    with pytest.raises(StorageError, match="could not open az://box"):
        BucketStore.open("az", "box", settings)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "not a key: hush")
    with pytest.raises(StorageError, match="gs://box") as caught:
        await BucketStore.open("gs", "box", settings).get("a/b", 10)
    assert "hush" not in str(caught.value)
