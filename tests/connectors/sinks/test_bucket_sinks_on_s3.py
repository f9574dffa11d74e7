"""Sinks into a bucket on S3's own protocol: Delta tables and Parquet, whatever requests fail."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from sink_house import FIRST, SCHEMA, Update, bag, batch, tuples, updates  # type: ignore[import-not-found]

from actors.connectors.sinks.delta import DeltaConfig
from actors.connectors.sinks.kinds import SinkConfig, make_sink
from actors.connectors.sinks.parquet import MANIFESTS, BatchManifest, ParquetConfig
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sources.source import SourceUnreachable
from actors.runtime.errors import InvalidUsage, WriterFenced
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_MS, growing_deadlines_ms
from s3_server import KEY_ID, S3, SECRET, Fate, point_to, serving  # type: ignore[import-not-found]

LATER: list[Update] = [(1, "x", 6, -1), (3, "", 7, 1)]
KINDS = ("changes", "current", "files")
OUTAGES = {"changes": (2, 7, 12), "current": (3, 10, 17), "files": (1, 2)}
"""The request of a batch from which on the store fails."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as served:
        yield served


class Lab:
    """A bucket, and sinks into it."""

    def __init__(self, s3: S3, place: Path) -> None:
        self.s3 = s3
        self.place = place
        self.bucket = s3.new_bucket()
        self.lives = 0
        self.settings = Settings(
            sink_buckets=(f"s3://{self.bucket}/out",),
            copy_request_timeout_ms=PATIENCE_MS,
            copy_request_retries_max=1,
            retry_delay_ms_max=100,
        )

    def url(self, kind: str) -> str:
        return f"s3://{self.bucket}/out/{kind}"

    def sink(self, kind: str, **changes: Any) -> SinkConnector:
        self.lives += 1
        url = self.url(kind)
        config: SinkConfig = ParquetConfig(url, creation="c")
        if kind != "files":
            config = DeltaConfig(url, kind, creation="c")  # type: ignore[arg-type]
        limits = msgspec.structs.replace(self.settings, **changes)
        spool = self.place / f"life-{self.lives}"
        made: SinkConnector = make_sink(
            config, "u1", limits, SystemClock(), Random(self.lives), spool
        )
        return made

    def rows(self, kind: str) -> list[Update]:
        if kind != "files":
            table: list[Update] = tuples(DeltaTable(self.url(kind)).to_pyarrow_table())
            return table
        found: list[Update] = []
        for key in sorted(self.s3.keys(self.bucket)):
            if MANIFESTS in key:
                data = self.s3.get(self.bucket, key)
                for file in msgspec.json.decode(data, type=BatchManifest).files:
                    data = self.s3.get(self.bucket, f"out/{kind}/{file.path}")
                    found += tuples(pq.read_table(io.BytesIO(data)))
        return found

    def staged(self, kind: str, upper: int) -> list[str]:
        """Files of batches that begin there."""
        keys = [key for key in self.s3.keys(self.bucket) if f"penstock-{upper:020d}" in key]
        return [key for key in keys if key.startswith(f"out/{kind}/")]


@pytest.fixture
def lab(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    point_to(monkeypatch, server)
    server.forget()
    yield Lab(server, tmp_path)
    server.forget()


def wanted(kind: str) -> Counter[str]:
    """After `FIRST` and `LATER`."""
    if kind == "current":
        return bag([(1, "x"), (2, None), (3, "")])  # type: ignore[no-any-return]
    return bag([*FIRST, *LATER])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
async def test_batches_and_writers(lab: Lab, kind: str) -> None:
    first = lab.sink(kind)
    await first.check(SCHEMA)
    assert lab.s3.keys(lab.bucket) == []
    assert await first.open(SCHEMA) is None
    await batch(first, 5, 6, *FIRST)
    await first.write(updates([(7, "lost", 6, 1)]))
    second = lab.sink(kind)
    assert await second.open(SCHEMA) == 6
    with pytest.raises(WriterFenced, match="taken over s3://"):
        await first.commit(6, 8)
    await first.close()
    assert lab.staged(kind, 6) == []
    await batch(second, 6, 9, *LATER)
    assert bag(lab.rows(kind)) == wanted(kind)
    assert second.statistics().rows_committed == 2
    await second.close()
    assert [path for path in lab.place.rglob("*") if path.is_file()] == []
    third = lab.sink(kind)
    assert await third.open(SCHEMA) == 9
    await third.close()


async def test_a_table_that_others_optimize_and_write(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.connectors.sinks.delta_rewrite.HELD_BYTES_MAX", 30)
    made = lab.sink("current")
    await made.open(SCHEMA)
    await batch(made, 5, 6, *FIRST)
    await batch(made, 6, 7, (4, "w", 6, 1))
    DeltaTable(lab.url("current")).optimize.compact()
    await batch(made, 7, 8, (1, "x", 7, -1), (4, "w", 7, -1), (5, "v", 7, 1))
    assert bag(lab.rows("current")) == bag([(1, "x"), (2, None), (5, "v")])
    DeltaTable(lab.url("current")).delete("a = 2")
    await made.write(updates([(8, "y", 8, 1)]))
    with pytest.raises(InvalidUsage, match="DELETE"):
        await made.commit(8, 9)
    assert lab.staged("current", 8) == []
    await made.close()


class Outage:
    """From a request of that number on the store fails; the first may have been served."""

    def __init__(self, at: int, fate: Fate) -> None:
        self.at = at
        self.fate = fate
        self.seen = 0

    def __call__(self, line: str) -> Fate:
        self.seen += 1
        return None if self.seen < self.at else self.fate if self.seen == self.at else "fail"


@pytest.mark.parametrize(
    ("kind", "at"),
    [(kind, at) for kind, ats in OUTAGES.items() for at in ats],
)
async def test_an_outage_anywhere(lab: Lab, kind: str, at: int) -> None:
    """The batch is there whole or not at all, and `open` says which."""
    made = lab.sink(kind)
    await made.open(SCHEMA)
    await batch(made, 5, 6, *FIRST)
    lab.s3.rule = Outage(at, "late" if at % 2 else "fail")
    failed = False
    try:
        await batch(made, 6, 9, *LATER)
    except SourceUnreachable:
        failed = True
    await made.close()
    lab.s3.forget()
    again = lab.sink(kind)
    upper = await again.open(SCHEMA)
    assert upper in ((6, 9) if failed else (9,))
    if upper == 6:
        assert lab.staged(kind, 6) == []
        await batch(again, 6, 9, *LATER)
    await again.close()
    assert bag(lab.rows(kind)) == wanted(kind)


@pytest.mark.parametrize("kind", ["changes", "files"])
async def test_errors_by_their_names_and_without_secrets(
    lab: Lab, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = lab.sink(kind)
    lab.s3.rule = lambda _: "deny"
    with pytest.raises(SourceUnreachable, match="403 AccessDenied") as caught:
        await made.open(SCHEMA)
    assert "PutObject" in caught.value.hint
    await made.close()
    lab.s3.forget()
    made = lab.sink(kind)
    await made.open(SCHEMA)
    await made.write(updates(FIRST))
    lab.s3.rule = lambda line: "deny" if line.startswith("PUT") else None
    with pytest.raises(SourceUnreachable, match="403") as denied:
        await made.commit(5, 6)
    await made.close()
    for secret in (KEY_ID, SECRET):
        for error in (caught.value, denied.value):
            assert secret not in str(error) + error.hint
            assert secret not in repr(error.__cause__)
        assert secret not in caplog.text


@pytest.mark.parametrize("kind", ["changes", "files"])
async def test_a_store_that_does_not_answer(lab: Lab, kind: str) -> None:
    for timeout_ms in growing_deadlines_ms():
        made = lab.sink(kind, copy_request_timeout_ms=timeout_ms, copy_request_retries_max=0)
        with suppress(SourceUnreachable):
            await made.open(SCHEMA)
            break
        await made.close()
    lab.s3.rule = lambda _: "hang"
    with pytest.raises(SourceUnreachable):
        await batch(made, 5, 6, *FIRST)
    await made.close()
    lab.s3.forget()
    again = lab.sink(kind)
    assert await again.open(SCHEMA) in (None, 6)
    await again.close()


async def test_what_may_be_written(lab: Lab) -> None:
    for folder, said in (
        (f"s3://{lab.bucket}/other", "sink_buckets"),
        (f"s3://{lab.bucket}", "sink_buckets"),
        ("gs://else/out", "sink_buckets"),
        ("s3://key:word@else/out", "invalid bucket URL"),
    ):
        config = ParquetConfig(folder, creation="c")
        with pytest.raises(InvalidUsage, match=said) as caught:
            make_sink(config, "u1", lab.settings, SystemClock(), Random(1), lab.place)
        assert "word" not in str(caught.value)
    whole = msgspec.structs.replace(lab.settings, sink_buckets=(f"s3://{lab.bucket}",))
    with pytest.raises(InvalidUsage, match="a whole bucket"):
        make_sink(
            ParquetConfig(f"s3://{lab.bucket}"), "u1", whole, SystemClock(), Random(1), lab.place
        )


async def test_a_bucket_that_is_not_there(lab: Lab) -> None:
    limits = msgspec.structs.replace(lab.settings, sink_buckets=("s3://no-such-bucket",))
    for config in (
        ParquetConfig("s3://no-such-bucket/x", creation="c"),
        DeltaConfig("s3://no-such-bucket/x", creation="c"),
    ):
        made = make_sink(config, "u1", limits, SystemClock(), Random(1), lab.place / "x")
        with pytest.raises(SourceUnreachable, match="the bucket does not exist"):
            await made.open(SCHEMA)
        await made.close()
