"""The NEXMark queries as concurrent views: the highest sustainable rate, and their staleness.

Every `CHUNK_SECONDS` the events that are due are written: to us as one transaction, to the peer as
one durable Parquet file per table, in a folder that its queries stream from. A rate is sustained if
all views are beyond the last event within `BEHIND_SECONDS_MAX` of the end. The highest rate is
searched by doubling, with short trials, and confirmed for a minute. The age of what a reader sees
is sampled ten times a second over all views: the current time minus the time up to which all events
are in the view. It is measured for a minute at half of the highest rate.

``nexmark_all_…``: our views of all queries; the peer is our own figure of the next measure.
``nexmark_streamed_…``: the queries that Structured Streaming can express (`STREAMED`), against it.
Rates are compared as the ms that 1,000 events may take, ages at half of the lower rate. Its queries
run in one session, with the best settings that `streaming` knows, and each batch is written durably
(`write_durably`).

Environment variables: RATE sets the first rate to try (events a second), SECONDS another length
than a minute.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests.kit`
import anyio
import anyio.to_thread
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors import Client, Service, Settings, TableWrite
from actors.connectors.sources import nexmark
from corpus_views import chosen
from measure import Measure, Report, median, percentile
from streaming import BEST, Peer, write_durably
from tests.kit.corpora import CORPORA, CorpusQuery

CHUNK_SECONDS = 0.2
SAMPLE_SECONDS = 0.1
BEHIND_SECONDS_MAX = 5.0
CATCH_UP_SECONDS_MAX = 60.0
RATE_MAX = 256_000
WARM_TRIALS_MAX = 12
STREAMED = {
    "append": ("q00", "q01", "q02", "q03", "q10", "q13", "q14", "q20", "q21", "q22", "q23"),
    "update": ("q12", "q17"),
}
"""The queries that Structured Streaming can express. It cannot express distinct counts, ranks,
sessions shown before they end, or an aggregate of an aggregate without a watermark."""
TARGET_RATE, TARGET_AGE = 1.0, 0.5


class Trial(msgspec.Struct):
    """The result of one trial: the ages in ms, and how long the views lagged behind at its end."""

    ages: list[float]
    behind_seconds: float


class Side(Protocol):
    """A system that maintains the queries' results."""

    async def write(self, events: Mapping[str, pa.Table]) -> None:
        """Write events durably."""
        ...

    async def seen(self) -> list[float]:
        """Return, for each view, the `time.time` up to which all written events are in it."""
        ...


class Events:
    """Generates the NEXMark events in order. Event time follows the rate."""

    def __init__(self) -> None:
        self._names = frozenset(CORPORA["nexmark"].tables)
        self._next = 0
        self._at_ms = nexmark.NexmarkConfig().start_ms

    def set_rate(self, rate: int) -> None:
        """Space the following events so that `rate` of them make a second of event time."""
        # The series counts time from its first event.
        start_ms = max(0, int(self._at_ms - self._next * 1000 / rate))
        self._rate = rate
        config = nexmark.NexmarkConfig(start_ms=start_ms, event_rate=float(rate))
        self._series = nexmark.NexmarkSeries(config)

    def take(self, count: int) -> dict[str, pa.Table]:
        """Return the rows of the next `count` events by table."""
        start, self._next = self._next, self._next + count
        self._at_ms += int(count * 1000 / self._rate)
        return {
            rows.export: rows.updates.select(CORPORA["nexmark"].tables[rows.export].names)
            for rows in self._series.changes(start, self._next, self._names)
        }


class Ours:
    """The service and its views."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._names: set[str] = set()
        self._written = 0

    async def start(self, queries: Sequence[CorpusQuery]) -> None:
        """Create the views, replacing the existing ones."""
        for name in self._names:
            await self._client.drop(name)
        for query in queries:
            await self._client.create_materialized_view(query.name, query.sql)
        self._names = {query.name for query in queries}

    async def write(self, events: Mapping[str, pa.Table]) -> None:
        """Write events in one transaction."""
        changes = {n: TableWrite(insert=rows) for n, rows in events.items()}
        self._written = await self._client.write(changes)

    async def seen(self) -> list[float]:
        """Return the upper of each view, in seconds."""
        now, written = time.time(), self._written
        uppers = [o.upper for o in (await self._client.status()).objects if o.name in self._names]
        # Uppers do not advance without writes.
        return [now if upper > written else upper / 1000 for upper in uppers]


class Streaming:
    """Structured Streaming with one query per view, all in one session. Its calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peer = Peer(folder)
        self._session = self._peer.session
        for key, value in BEST.items():
            self._session.conf.set(key, value)
        self._queries: list[Any] = []
        self._files = 0
        self._written: dict[str, list[tuple[int, float]]] = {}
        """For each table, its files' numbers and the time at which each was started."""
        self._names: list[str] = []
        self._read: dict[str, dict[str, set[int]]] = {}
        """For each query and each table that it reads, the files in committed batches."""
        self._noted: set[Path] = set()

    def start(self, queries: Sequence[CorpusQuery], sample: Mapping[str, pa.Table]) -> None:
        """Start the queries. `sample` has rows with the tables' types."""
        for name, rows in sample.items():
            place = self._folder / "events" / name
            place.mkdir(parents=True)
            kinds = self._folder / f"{name}.parquet"
            pq.write_table(rows, kinds)
            schema = self._session.read.parquet(str(kinds)).schema
            self._session.readStream.schema(schema).parquet(str(place)).createTempView(name)
            self._written[name] = []
        for query in queries:
            self._names.append(query.name)
            read = re.findall(r"\b(?:from|join)\s+(\w+)", query.sql)
            self._read[query.name] = {name: set() for name in sample if name in read}
            out = self._folder / "out" / query.name
            out.mkdir(parents=True)
            mode = next(mode for mode, names in STREAMED.items() if query.name in names)
            writer = self._session.sql(query.sql).writeStream.outputMode(mode)
            writer = writer.option("checkpointLocation", str(self._folder / "at" / query.name))
            self._queries.append(writer.foreachBatch(partial(write_durably, out)).start())

    async def write(self, events: Mapping[str, pa.Table]) -> None:
        """Write events as one durable file per table."""
        await anyio.to_thread.run_sync(self._write, events)

    def _write(self, events: Mapping[str, pa.Table]) -> None:
        begun = time.time()
        self._files += 1
        for name, rows in events.items():
            if not rows.num_rows:
                continue
            place = self._folder / "events" / name / f"{self._files}.parquet"
            hidden = place.with_name(f".{place.name}")
            with hidden.open("wb") as file:
                pq.write_table(rows, file)
                file.flush()
                os.fsync(file.fileno())
            self._written[name].append((self._files, begun))
            hidden.rename(place)

    async def seen(self) -> list[float]:
        """Return, for each query, the time up to which all written events are in committed batches.

        Reads the queries' checkpoints: a call into the JVM could wait forever for a thread in which
        a batch calls Python.
        """
        return await anyio.to_thread.run_sync(lambda: [self._seen_by(name) for name in self._names])

    def _seen_by(self, name: str) -> float:
        """Return the time of the first file that is not in a committed batch, or now."""
        place, now = self._folder / "at" / name, time.time()
        committed = max((int(f.name) for f in _files(place / "commits")), default=-1)
        offsets = place / "offsets" / str(committed)
        lines = offsets.read_text().splitlines()[2:] if committed >= 0 else []
        for source, line in enumerate(lines):
            if line != "-":
                self._note(name, place / "sources" / str(source), json.loads(line)["logOffset"])
        unread = [
            begun
            for table in self._read[name]
            for number, begun in self._written[table]
            if number not in self._read[name][table]
        ]
        return min(unread, default=now)

    def _note(self, name: str, log: Path, last: int) -> None:
        """Add the files of a source's log, up to an entry."""
        for file in _files(log):
            entry = int(file.name.partition(".")[0])
            if entry <= last and file not in self._noted:
                self._noted.add(file)
                for line in file.read_text().splitlines()[1:]:
                    path = Path(json.loads(line)["path"])
                    self._read[name][path.parent.name].add(int(path.stem))

    def close(self) -> None:
        """Stop the queries and the session."""
        for query in self._queries:
            query.stop()
        self._peer.close()


def _files(folder: Path) -> list[Path]:
    """Return the entries of a log."""
    if not folder.is_dir():
        return []
    return [file for file in folder.iterdir() if file.name[0].isdigit()]


async def trial(side: Side, events: Events, rate: int, seconds: float) -> Trial:
    """Write events at a rate for `seconds`, sample ages, and wait until all views are up to
    date."""
    ages: list[float] = []
    events.set_rate(rate)
    begun, wrote = time.time(), 0
    first_unwritten = begun

    async def sample() -> None:
        while True:
            seen = await side.seen()
            now = time.time()
            # Events that are due but not written yet are missing from every view.
            ages.extend(1000 * max(0.0, now - min(each, first_unwritten)) for each in seen)
            await anyio.sleep(SAMPLE_SECONDS)

    async with anyio.create_task_group() as group:
        group.start_soon(sample)
        while (elapsed := time.time() - begun) < seconds:
            due = int(rate * elapsed)
            if due > wrote:
                rows = await anyio.to_thread.run_sync(events.take, due - wrote)
                await side.write(rows)
                wrote = due
            first_unwritten = begun + (wrote + 1) / rate
            await anyio.sleep(max(0.0, begun + elapsed + CHUNK_SECONDS - time.time()))
        group.cancel_scope.cancel()
    ended = time.time()
    while min(await side.seen()) < ended and time.time() < ended + CATCH_UP_SECONDS_MAX:
        await anyio.sleep(SAMPLE_SECONDS)
    late = max(0.0, ended - begun - seconds)
    return Trial(ages, time.time() - ended + late)


async def greatest_rate(side: Side, events: Events, first: int, seconds: float) -> int:
    """Return the highest rate sustained for `seconds`, to within a fifth."""
    for _ in range(WARM_TRIALS_MAX):  # builds plans and compiles code
        if (await trial(side, events, first, seconds / 3)).behind_seconds <= 1.0:
            break
    rate = first
    while rate < RATE_MAX:
        tried = await trial(side, events, 2 * rate, seconds / 3)
        print(f"  {2 * rate} a second: {tried.behind_seconds:.1f} s behind", flush=True)
        if tried.behind_seconds > BEHIND_SECONDS_MAX / 2:
            break
        rate *= 2
    rate = rate * 3 // 2
    while rate > 1:
        tried = await trial(side, events, rate, seconds)
        print(f"  {rate} for {seconds:.0f} s: {tried.behind_seconds:.1f} s behind", flush=True)
        if tried.behind_seconds <= BEHIND_SECONDS_MAX:
            break
        rate = rate * 4 // 5
    return rate


async def run(report: Report) -> None:
    """Measure ours with all views, ours with the peer's views, and the peer."""
    seconds = float(os.environ.get("SECONDS", "6" if report.quick else "60"))
    first = int(os.environ.get("RATE", "50"))
    queries = chosen("nexmark")
    streamed = [q for q in queries if any(q.name in names for names in STREAMED.values())]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        settings = Settings(state_dir=str(folder / "state"), listen="127.0.0.1:0")
        async with Service(settings) as service, await Client.in_process(service) as client:
            for name, schema in CORPORA["nexmark"].tables.items():
                types = {column.name: column.type for column in schema.columns}
                await client.create_table(name, types, primary_key=list(schema.key))
            ours, events = Ours(client), Events()
            await ours.start(queries)
            all_rate = await greatest_rate(ours, events, first, seconds)
            all_ages = (await trial(ours, events, all_rate // 2, seconds)).ages
            await ours.start(streamed)
            our_rate = await greatest_rate(ours, events, first, seconds)
            peer, theirs = await anyio.to_thread.run_sync(Streaming, folder / "peer"), Events()
            theirs.set_rate(first)
            await anyio.to_thread.run_sync(peer.start, streamed, theirs.take(1000))
            peer_rate = await greatest_rate(peer, theirs, first, seconds)
            half = min(our_rate, peer_rate) // 2
            our_ages = (await trial(ours, events, half, seconds)).ages
            peer_ages = (await trial(peer, theirs, half, seconds)).ages
            await anyio.to_thread.run_sync(peer.close)
    report.add(Measure("nexmark_all_ms_per_1000_events", 1e6 / all_rate, 1e6 / our_rate))
    report.add(Measure("nexmark_all_age_p50", median(all_ages), median(our_ages)))
    rates = 1e6 / our_rate, 1e6 / peer_rate
    report.add(Measure("nexmark_streamed_ms_per_1000_events", *rates, target=TARGET_RATE))
    ages = median(our_ages), median(peer_ages)
    report.add(Measure("nexmark_streamed_age_p50", *ages, target=TARGET_AGE))
    p95 = percentile(our_ages, 0.95), percentile(peer_ages, 0.95)
    report.add(Measure("nexmark_streamed_age_p95", *p95))


if __name__ == "__main__":
    logging.getLogger("SQLQueryContextLogger").disabled = True
    made = Report("NEXMark's queries as concurrent views, against Structured Streaming.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
