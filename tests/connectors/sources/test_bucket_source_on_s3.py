"""A bucket as a source on S3's own protocol: names, versions, and errors by their names."""

from __future__ import annotations

import io
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_lab import COLUMNS, ROWS  # type: ignore[import-not-found]
from source_lab import Contents, drive  # type: ignore[import-not-found]

from actors.connectors.sources import bucket_location
from actors.connectors.sources.files import EXPORT, FilesConfig, FilesSource
from actors.connectors.sources.oneshot import CopyFromConfig, OneshotCopy
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.model.plan.schema import TableSchema
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.patience import PATIENCE_MS, growing_deadlines_ms
from s3_server import KEY_ID, S3, SECRET, point_to, serving  # type: ignore[import-not-found]

NAMES = ("a.parquet", "b c.parquet", "ü#%41?.parquet", "k=1,2@+.parquet", "p%20q.parquet")


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as served:
        yield served


class Lab:
    """A bucket, and sources of it."""

    def __init__(self, s3: S3, place: Path) -> None:
        self.s3 = s3
        self.bucket = s3.new_bucket()
        self.url = f"s3://{self.bucket}/in"
        self.place = place
        self.contents = Contents()

    def put(self, name: str, *keys: int) -> None:
        file = io.BytesIO()
        pq.write_table(pa.table({"k": list(keys), "v": ["x"] * len(keys)}), file)
        data = file.getvalue() if keys else b""
        self.s3.ask("PUT", f"/{self.bucket}/in/{urllib.parse.quote(name)}", data)

    def around(self, **changes: Any) -> ConnectorContext:
        given: dict[str, Any] = {
            "source_buckets": (f"s3://{self.bucket}",),
            "copy_request_timeout_ms": PATIENCE_MS,
            "copy_request_retries_max": 1,
        }
        return ConnectorContext(SystemClock(), Settings(**given | changes), self.place)

    def source(self, url: str = "", **changes: Any) -> FilesSource:
        config = FilesConfig(
            folder=url or self.url, format="parquet", columns=COLUMNS, recursive=True
        )
        return FilesSource(config, self.around(**changes))

    async def drive(self, **changes: Any) -> list[int]:
        await drive(self.source(**changes), (ROWS,), self.contents)
        return sorted(row[0] for row in self.contents.bags.get(EXPORT, {}))


@pytest.fixture
def lab(server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    point_to(monkeypatch, server)
    server.forget()
    yield Lab(server, tmp_path)
    server.forget()


async def test_objects_of_any_name_are_taken_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_location, "PIECE_BYTES", 300)
    for number, name in enumerate(NAMES):
        lab.put(name, number)
    lab.put("sub/")  # as tools make folders
    lab.put("sub/d.parquet", 5)
    assert await lab.drive() == [0, 1, 2, 3, 4, 5]
    lab.put("e.parquet", 6)
    assert await lab.drive() == [0, 1, 2, 3, 4, 5, 6]
    assert [path for path in lab.place.rglob("*") if path.is_file()] == []
    request = CopyFromConfig(path=f"{lab.url}/sub/d.parquet", format="parquet")
    copy = OneshotCopy(request, TableSchema(COLUMNS), lab.around())
    await copy.prepare()
    assert [piece.num_rows async for piece in copy.pieces()] == [1]


async def test_more_objects_than_a_page(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        lab.put(f"{number}.parquet", number)
    monkeypatch.setattr("actors.durable.object_store.bucket_store.PAGE_KEYS", 2)
    assert await lab.drive() == list(range(7))


async def test_an_object_that_changes_while_it_is_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_location, "PIECE_BYTES", 300)
    lab.put("a.parquet", 1)

    def rule(line: str) -> None:
        if line.startswith("GET") and "a.parquet" in line:
            lab.s3.rule = lambda _: None
            lab.put("a.parquet", 2, 3)

    lab.s3.rule = rule
    with pytest.raises(SourceUnreachable, match=r"a\.parquet changed while it was being read"):
        await lab.drive()
    assert await lab.drive() == [2, 3]


@pytest.mark.parametrize(
    ("method", "fate", "said", "hint"),
    [
        ("list", "deny", "could not list .*do not allow it .403 AccessDenied", "s3:ListBucket"),
        ("read", "deny", "could not read .*a.parquet.*do not allow it .403", "s3:GetObject"),
        (
            "list",
            "fail",
            "could not list .*the store failed .500 InternalError",
            "the service will retry",
        ),
        ("read", "hang", "could not read .*the store did not respond", "the service will retry"),
    ],
)
async def test_errors_by_their_names_and_without_secrets(
    lab: Lab, method: str, fate: Any, said: str, hint: str
) -> None:
    lab.put("a.parquet", 1)

    def rule(line: str) -> Any:
        return fate if ("list-type" in line) == (method == "list") else None

    lab.s3.rule = rule
    for timeout_ms in growing_deadlines_ms():
        limits = {"copy_request_timeout_ms": timeout_ms, "copy_request_retries_max": 0}
        with pytest.raises(SourceUnreachable) as caught:
            await lab.drive(**(limits if fate == "hang" else {}))
        if fate != "hang" or "could not list" not in str(caught.value):
            break
    assert re.search(said, str(caught.value))
    assert hint in caught.value.hint
    for secret in (KEY_ID, SECRET):
        assert secret not in str(caught.value) + caught.value.hint
    assert caught.value.__cause__ is None
    lab.s3.forget()
    assert await lab.drive() == [1]


async def test_what_is_not_there_or_not_reached(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lab.source("s3://no-such-bucket/x", source_buckets=("s3://no-such-bucket",))
    with pytest.raises(SourceUnreachable, match="the bucket does not exist") as caught:
        await drive(source, (ROWS,), Contents())
    assert "create the bucket" in caught.value.hint
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(SourceUnreachable, match="does not use https"):
        await lab.drive()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(SourceUnreachable, match="cannot be reached") as caught:
        await lab.drive()
    assert "reach the store" in caught.value.hint
