"""A whole service whose source and sinks are in a bucket, killed (SIGKILL) at requests of its own:
every row of every object is in every sink once."""

from __future__ import annotations

import io
from collections import Counter as Bag
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from obstore.store import S3Store

from actors.connectors.sinks.parquet import MANIFESTS, BatchManifest
from actors.doors.client.client import Client
from files_below import files_below  # type: ignore[import-not-found]
from s3_server import S3, Fate, point_to, serving  # type: ignore[import-not-found]
from service_house import service_process  # type: ignore[import-not-found]

KILL_AT = (("PUT", 19, True), ("GET", 40, False))
"""Of the requests of one life: which kind, the how many-th, whether it is served."""
COLUMNS = [{"name": "k", "type": "bigint"}, {"name": "v", "type": "string"}]


class Place:
    """A bucket, and services that use it, one after another."""

    def __init__(self, s3: S3, state: Path) -> None:
        self.s3 = s3
        self.state = state
        self.bucket = s3.new_bucket()
        self.url = f"s3://{self.bucket}"
        self.keys: Bag[int] = Bag()

    def put(self, count: int) -> None:
        """One more object, of so many rows."""
        first = self.keys.total()
        keys = list(range(first, first + count))
        file = io.BytesIO()
        pq.write_table(pa.table({"k": keys, "v": ["x"] * count}), file)
        self.s3.ask("PUT", f"/{self.bucket}/in/{first:06}.parquet", file.getvalue())
        self.keys += Bag(keys)

    # -- what is outside --------------------------------------------------------------------------

    def in_files(self) -> Bag[int]:
        """What the manifests name."""
        found: Bag[int] = Bag()
        store = S3Store(self.bucket, client_options={"allow_http": True})
        pages = store.list(f"out/files/{MANIFESTS}")
        for key in (each["path"] for page in pages for each in page):
            if key.endswith(".json"):
                data = self.s3.get(self.bucket, key)
                for file in msgspec.json.decode(data, type=BatchManifest).files:
                    data = self.s3.get(self.bucket, f"out/files/{file.path}")
                    self._add(found, pq.read_table(io.BytesIO(data)))
        return found

    def in_table(self, name: str) -> Bag[int]:
        found: Bag[int] = Bag()
        self._add(found, DeltaTable(f"{self.url}/out/{name}").to_pyarrow_table())
        return found

    def _add(self, found: Bag[int], rows: pa.Table) -> None:
        diffs = rows["_diff"].to_pylist() if "_diff" in rows.column_names else [1] * len(rows)
        for key, diff in zip(rows["k"].to_pylist(), diffs, strict=True):
            found[key] += diff


class KillAt:
    """A rule that kills at a request."""

    def __init__(self, process: anyio.abc.Process, method: str, at: int, served: bool) -> None:
        self.process = process
        self.method = method
        self.left = at
        self.served = served
        self.killed = False

    def __call__(self, line: str) -> Fate:
        if line.startswith(self.method) and not self.killed:
            self.left -= 1
            if self.left == 0:
                self.killed = True
                self.process.kill()
        return "late" if self.killed and self.served else "fail" if self.killed else None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with serving() as s3:
        point_to(monkeypatch, s3)
        place = Place(s3, tmp_path / "state")
        for name, value in {
            "SOURCE_BUCKETS": f"{place.url}/in",
            "SINK_BUCKETS": f"{place.url}/out",
            "SINK_COMMIT_MS": "50",
            "SOURCE_TICK_MS": "20",
            "RETRY_DELAY_MS_MAX": "200",
        }.items():
            monkeypatch.setenv(f"PENSTOCK_{name}", value)
        yield place


async def begin(client: Client, place: Place) -> None:
    """Makes the source and the sinks."""
    source = {
        "kind": "files",
        "folder": f"{place.url}/in",
        "format": "parquet",
        "columns": COLUMNS,
        "poll_ms": 50,
        "batch_files_max": 2,
    }
    await client.create_source("clicks", source, {"rows": "clicks_in"})
    for kind, options in (
        ("parquet", {"folder": f"{place.url}/out/files"}),
        ("delta", {"folder": f"{place.url}/out/changes"}),
        ("delta", {"folder": f"{place.url}/out/current", "mode": "current"}),
    ):
        name = options["folder"].rpartition("/")[2]
        await client.create_sink(name, "clicks_in", kind, options)


@pytest.mark.long
async def test_a_service_killed_at_its_requests_skips_nothing_and_repeats_nothing(
    place: Place,
) -> None:
    with anyio.fail_after(200):
        for method, at, served in KILL_AT:
            async with service_process(place.state) as (client, process):
                if not place.keys:
                    place.put(10)
                    await begin(client, place)
                rule = place.s3.rule = KillAt(process, method, at, served)
                while not rule.killed:
                    place.put(3)
                    await anyio.sleep(0.05)
                await process.wait()
            place.s3.forget()
        async with service_process(place.state) as (client, process):
            place.put(1)

            async def everywhere() -> bool:
                for read in (
                    place.in_files,
                    lambda: place.in_table("changes"),
                    lambda: place.in_table("current"),
                ):
                    found = await anyio.to_thread.run_sync(read)
                    assert found <= place.keys
                    if found != place.keys:
                        return False
                return True

            while not await everywhere():
                await anyio.sleep(0.25)
            rows = await client.peek("clicks_in")
            assert Bag(rows["k"].to_pylist()) == place.keys
            scratch = files_below(place.state / "scratch")
            assert [path for path in scratch if "spool-" in path.parent.name] == []
