"""A bucket in memory with files in it, whose store fails, and sources of it."""

from __future__ import annotations

import io
from collections import Counter as Bag
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.store import MemoryStore
from source_lab import Contents, drive  # type: ignore[import-not-found]

from actors.connectors.sources.files import EXPORT, FilesConfig, FilesSource
from actors.connectors.sources.source import ConnectorContext, RunJob, SourceExport, no_engine
from actors.durable.object_store.bucket_store import BucketStore, ListedObject
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from files_below import files_below  # type: ignore[import-not-found]

COLUMNS = (TableColumn("k", "bigint"), TableColumn("v", "string"))
ROWS = SourceExport(EXPORT, TableSchema(COLUMNS))
URL = "s3://box/in"


class FaultyStore(BucketStore):
    """Counts calls, and fails the one of a number; tells most calls at a time."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory, memory, "s3://box", Settings())
        self.calls = 0
        self.fail_at = 0
        self.reading = self.most_reading = 0
        self.during: Callable[[], object] | None = None

    def _step(self, what: str) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise StorageError(f"could not {what} s3://box: the store failed", determinate=True)

    async def pages(self, prefix: str) -> AsyncGenerator[list[ListedObject], None]:
        async for page in super().pages(prefix):
            self._step("list")
            yield page

    async def piece(self, of: ListedObject, start: int, end: int) -> bytes | None:
        self._step("read")
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        try:
            await anyio.lowlevel.checkpoint()
            data = await super().piece(of, start, end)
        finally:
            self.reading -= 1
        if self.during is not None:
            self.during()
        return data


class BucketLab:
    """One bucket, and sources of it, one after another."""

    def __init__(self, place: Path, run_job: RunJob = no_engine) -> None:
        self.place = place
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.run_job = run_job
        self.contents = Contents()
        self.lives = 0

    def put(self, name: str, *keys: int) -> None:
        """Parquet with these keys."""
        file = io.BytesIO()
        pq.write_table(pa.table({"k": list(keys), "v": ["x"] * len(keys)}), file)
        self.put_bytes(name, file.getvalue())

    def put_bytes(self, name: str, data: bytes) -> None:
        obstore.put(self.memory, f"in/{name}", data)

    def around(self, **changes: Any) -> ConnectorContext:
        self.lives += 1
        given: dict[str, Any] = {"source_buckets": (URL,)} | changes
        scratch = self.place / f"life-{self.lives}"
        return ConnectorContext(SystemClock(), Settings(**given), scratch, self.run_job)

    def source(self, limits: dict[str, Any] | None = None, **more: Any) -> FilesSource:
        given: dict[str, Any] = {"format": "parquet", "columns": COLUMNS, "folder": URL} | more
        return FilesSource(
            FilesConfig(**given), self.around(**(limits or {})), lambda *_: self.store
        )

    async def drive(self, **more: Any) -> FilesSource:
        source = self.source(**more)
        await drive(source, (ROWS,), self.contents)
        return source

    @property
    def keys(self) -> list[int]:
        bag = self.contents.bags.get(EXPORT, Bag())
        return sorted(row[0] for row in bag.elements())

    def spooled(self) -> list[str]:
        """All that is left on disk."""
        return [str(path) for path in files_below(self.place)]
