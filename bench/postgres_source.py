"""The PostgreSQL source against PostgreSQL's own tools, in rows a second and as times.

``postgres_stream``: single-row changes in transactions of ten until they are durable here, against
``pg_recvlogical`` writing the same stream to a file with fsync. ``postgres_snapshot_…``: the
snapshot of a table of ROWS rows until it is durable here, against ``COPY … TO`` a file. Ours is the
source alone: its output is written as Parquet parts with fsync, one per position mark or piece, in
a thread while the next is read. Both measures are times: a ratio of 2 is half the rate.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.lowlevel
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from actors.connectors.sources.postgres import PostgresSource
from actors.connectors.sources.postgres_config import PostgresConfig
from actors.connectors.sources.source import (
    Given,
    PositionMark,
    SourceExport,
    SourceRows,
    SourceUnreachable,
    SourceUpserts,
)
from actors.runtime.kernel.clock import SystemClock
from actors.testing.postgres_server import NoPostgres, PostgresServer, postgres_server
from measure import Measure, Report, median, size_name, sizes

STREAM_TARGET = 2.0
SNAPSHOT_TARGET = 2.5
BATCH_BYTES = 16 * 1024 * 1024
COLUMNS = "id bigint PRIMARY KEY, product bigint, region text, amount numeric(12,2), at timestamptz"
ROW = (
    "i, i::bigint * 7919 % 10000, (array['north', 'east', 'south', 'west'])[i % 4 + 1],"
    " (i % 99700) / 100.0, '2024-01-01'::timestamptz + i * interval '1 second'"
)


class Parts:
    """Writes its input as Parquet files with fsync, one at a time, concurrently with the
    reading."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._clock = SystemClock()
        self._held: list[pa.Table] = []
        self._bytes = 0
        self._number = 0
        self.rows = 0

    def add(self, given: SourceRows | SourceUpserts) -> None:
        """Keep a piece."""
        table = given.updates if isinstance(given, SourceRows) else given.changes
        self._held.append(table)
        self._bytes += table.nbytes
        self.rows += table.num_rows

    @property
    def many(self) -> bool:
        """Return whether there is enough for a file."""
        return self._bytes >= BATCH_BYTES

    async def write(self) -> None:
        """Make the kept pieces durable."""
        tables, self._held, self._bytes = self._held, [], 0
        if tables:
            self._number += 1
            place = self._folder / f"{self._number}.parquet"
            await self._clock.run_blocking(lambda: _write(pa.concat_tables(tables), place))


def _write(table: pa.Table, place: Path) -> None:
    with place.open("wb") as file:
        pq.write_table(table, file, compression="zstd", write_statistics=False)
        file.flush()
        os.fsync(file.fileno())


async def ours(
    source: PostgresSource,
    exports: tuple[SourceExport, ...],
    position: str | None,
    rows: int,
    place: Path,
    *,
    take: bool = True,
) -> float:
    """Return the seconds until `rows` rows are durable. Without `take` nothing is acknowledged to
    the server, so the same rows can be read again."""
    parts = Parts(place)
    started = time.perf_counter()
    await opened(source, exports, position)
    mark: PositionMark | None = None
    given: Given

    async def write(made: PositionMark | None) -> None:
        await parts.write()
        if made is not None and take:
            await source.taken(made.position)

    while parts.rows < rows or mark is None:
        async with anyio.create_task_group() as both:
            if mark is not None or parts.many:
                both.start_soon(write, mark)
                await anyio.lowlevel.checkpoint()  # it takes the kept pieces first
            mark = None
            while mark is None and not parts.many and parts.rows < rows + 1:
                given = await source.next()
                if isinstance(given, PositionMark):
                    mark = given
                elif isinstance(given, SourceRows | SourceUpserts):
                    parts.add(given)
    await write(mark)
    await source.close()
    return time.perf_counter() - started


async def opened(
    source: PostgresSource, exports: tuple[SourceExport, ...], position: str | None
) -> None:
    """Open the source once the server has noticed that the slot's former reader disconnected."""
    while True:
        try:
            await source.open(exports, position)
            return
        except SourceUnreachable as error:
            if "is in use by process" not in str(error):
                raise


def source_of(server: PostgresServer, id: str) -> PostgresSource:
    """Return a source of the benchmark's database."""
    config = PostgresConfig(host=str(server.folder), port=server.port, user="bench")
    return PostgresSource(config, id)


async def stream(report: Report, server: PostgresServer, admin: Any, folder: Path) -> None:
    """Measure changes that are already in the log, until they are durable."""
    rows = 20_000 if report.quick else 400_000
    await admin.execute(f"CREATE TABLE changes ({COLUMNS})")
    source = source_of(server, "stream")
    exports = await source.describe({"changes": ()})
    await source.open(exports, None)
    first = await source.next()
    assert isinstance(first, PositionMark)
    await source.close()
    await admin.execute("SELECT pg_create_logical_replication_slot('peer', 'pgoutput')")
    await admin.execute(
        f"DO $$ BEGIN FOR k IN 0 .. {rows // 10 - 1} LOOP INSERT INTO changes SELECT {ROW}"
        " FROM generate_series(k * 10, k * 10 + 9) i; COMMIT; END LOOP; END $$"
    )
    (end,) = await (await admin.execute("SELECT pg_current_wal_lsn()::text")).fetchone()
    here, there = [], []
    for turn in range(1 if report.quick else 3):
        again = source_of(server, "stream")
        place = folder / f"stream{turn}"
        seconds = await ours(again, exports, first.position, rows, place, take=False)
        here.append(seconds)
        there.append(
            await SystemClock().run_blocking(lambda: receive(server, end, "penstock_stream"))
        )
    report.add(
        Measure("postgres_stream", median(here) * 1000, median(there) * 1000, target=STREAM_TARGET)
    )
    print(f"  {rows / median(here):,.0f} rows/s, peer {rows / median(there):,.0f} rows/s")


def receive(server: PostgresServer, end: str, publication: str) -> float:
    """Return the seconds that pg_recvlogical takes. Resets the slot afterwards."""
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("SELECT pg_copy_logical_replication_slot('peer', 'turn', false)")
        file = server.folder / "received"
        started = time.perf_counter()
        server.run(
            "pg_recvlogical",
            [
                "-d",
                "postgres",
                "-S",
                "turn",
                "--start",
                "--no-loop",
                "-f",
                str(file),
                "-E",
                end,
                "-F",
                "1",
                "-o",
                "proto_version=1",
                "-o",
                f"publication_names={publication}",
            ],
            timeout_s=600,
        )
        seconds = time.perf_counter() - started
        file.unlink()
        admin.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_name = 'turn'"
        )
    return seconds


async def snapshot(
    report: Report, server: PostgresServer, admin: Any, folder: Path, rows: int
) -> None:
    """Measure the snapshot of a table, until it is durable."""
    await admin.execute(f"CREATE TABLE contents ({COLUMNS})")
    await admin.execute(f"INSERT INTO contents SELECT {ROW} FROM generate_series(1, {rows}) i")
    await admin.execute("VACUUM (FREEZE, ANALYZE) contents")
    here, there = [], []
    for turn in range(1 if report.quick else 3):
        file = server.folder / "copied"
        started = time.perf_counter()
        await admin.execute(f"COPY contents TO '{file}'")
        there.append(time.perf_counter() - started)
        file.unlink()
        source = source_of(server, f"snapshot{turn}")
        exports = await source.describe({"contents": ()})
        place = folder / f"snapshot{rows}_{turn}"
        seconds = await ours(source, exports, None, rows, place)
        here.append(seconds)
        await source.forget()
        for part in place.iterdir():
            part.unlink()
    name = f"postgres_snapshot_{size_name(rows)}"
    report.add(Measure(name, median(here) * 1000, median(there) * 1000, target=SNAPSHOT_TARGET))
    print(f"  {rows / median(here):,.0f} rows/s, peer {rows / median(there):,.0f} rows/s")
    await admin.execute("DROP TABLE contents")


async def run(report: Report) -> None:
    """Measure both."""
    with (
        TemporaryDirectory() as place,
        postgres_server(
            wal_level="logical",
            max_wal_size="1GB",
            shared_buffers="512MB",
            synchronous_commit="off",
        ) as server,
    ):
        folder = Path(place)
        async with await psycopg.AsyncConnection.connect(
            server.conninfo(), autocommit=True
        ) as admin:
            await stream(report, server, admin, folder)
            for rows in sizes([50_000] if report.quick else [5_000_000]):
                await snapshot(report, server, admin, folder, rows)


if __name__ == "__main__":
    made = Report("The PostgreSQL source against pg_recvlogical and COPY.")
    try:
        anyio.run(run, made, backend_options={"use_uvloop": True})
    except NoPostgres as error:
        for name in ("postgres_stream", "postgres_snapshot"):
            made.add(Measure(name, 0.0, 0.0, missing=str(error)))
    made.close()
