"""The NEXMark queries as views kept at once: the rate kept up with, and how old the views are.

Every `CHUNK_SECONDS` the events that are due are written: to us as one transaction, to the peer
as one durable Parquet file a table, in a folder that its queries stream from. A rate is kept up
with if all views are beyond the last event within `BEHIND_SECONDS_MAX` of the end. The greatest
one is looked for by doubling, with short trials, and confirmed for a minute. Ages are of what a
reader sees, sampled ten times a second over all views: now less the time until which all events
are in the view. They are measured for a minute at half of the greatest rate.

``nexmark_all_…``: our views of all queries; the peer is the same figure of ours below.
``nexmark_streamed_…``: the queries that Structured Streaming can express (`STREAMED`), beside it.
Rates are compared as the ms that 1,000 events may take, ages at half of the lower rate. Its
queries run in one session, with the best settings that `streaming` knows, and each batch is
written durably (`write_durably`).

The environment's RATE gives the first rate that is tried (events a second), SECONDS another
length than a minute.
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
"""What Structured Streaming can express: not distinct counts, ranks, sessions that are shown
before they end, nor an aggregate of an aggregate without a watermark."""
TARGET_RATE, TARGET_AGE = 1.0, 0.5


class Trial(msgspec.Struct):
    """What one trial showed: the ages in ms, and how long the views were behind at its end."""

    ages: list[float]
    behind_seconds: float


class Side(Protocol):
    """A system that keeps the queries' answers."""

    async def write(self, events: Mapping[str, pa.Table]) -> None:
        """Write events durably."""
        ...

    async def seen(self) -> list[float]:
        """Return, for each view, the `time.time` until which all written events are in it."""
        ...


class Events:
    """Makes the events of NEXMark, one after another; event time goes with the rate."""

    def __init__(self) -> None:
        self._names = frozenset(CORPORA["nexmark"].tables)
        self._next = 0
        self._at_ms = nexmark.NexmarkConfig().start_ms

    def set_rate(self, rate: int) -> None:
        """Make the events that follow come at `rate` a second of event time."""
        # The series counts time from its first event on.
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
        """Make the views, in place of those that there are."""
        for name in self._names:
            await self._client.drop(name)
        for query in queries:
            await self._client.create_materialized_view(query.name, query.sql)
        self._names = {query.name for query in queries}

    async def write(self, events: Mapping[str, pa.Table]) -> None:
        """See `Side`."""
        changes = {n: TableWrite(insert=rows) for n, rows in events.items()}
        self._written = await self._client.write(changes)

    async def seen(self) -> list[float]:
        """See `Side`."""
        now, written = time.time(), self._written
        uppers = [o.upper for o in (await self._client.status()).objects if o.name in self._names]
        # Without writes, uppers rest.
        return [now if upper > written else upper / 1000 for upper in uppers]


class Streaming:
    """Structured Streaming: a query a view, all in one session; blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peer = Peer(folder)
        self._session = self._peer.session
        for key, value in BEST.items():
            self._session.conf.set(key, value)
        self._queries: list[Any] = []
        self._files = 0
        self._written: dict[str, list[tuple[int, float]]] = {}
        """Of each table, its files' numbers and when they were begun."""
        self._names: list[str] = []
        self._read: dict[str, dict[str, set[int]]] = {}
        """Of each query and each table that it reads, the files that are in committed batches."""
        self._noted: set[Path] = set()

    def start(self, queries: Sequence[CorpusQuery], sample: Mapping[str, pa.Table]) -> None:
        """Start the queries; `sample`: rows that tell the tables' types."""
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
        """See `Side`."""
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
        """See `Side`. Read off the queries' checkpoints: a call into the JVM that waits for a
        thread in which a batch calls Python would wait for ever."""
        return await anyio.to_thread.run_sync(lambda: [self._seen_by(name) for name in self._names])

    def _seen_by(self, name: str) -> float:
        """The time of the first file that is not in a committed batch; now if there is none."""
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
        """Note the files of a source's log up to an entry."""
        for file in _files(log):
            entry = int(file.name.partition(".")[0])
            if entry <= last and file not in self._noted:
                self._noted.add(file)
                for line in file.read_text().splitlines()[1:]:
                    path = Path(json.loads(line)["path"])
                    self._read[name][path.parent.name].add(int(path.stem))

    def close(self) -> None:
        """End the queries and the session."""
        for query in self._queries:
            query.stop()
        self._peer.close()


def _files(folder: Path) -> list[Path]:
    """A log's entries."""
    if not folder.is_dir():
        return []
    return [file for file in folder.iterdir() if file.name[0].isdigit()]


async def trial(side: Side, events: Events, rate: int, seconds: float) -> Trial:
    """Write events at a rate for so long, sample ages, and wait until all views are up to date."""
    ages: list[float] = []
    events.set_rate(rate)
    begun, wrote = time.time(), 0
    first_unwritten = begun

    async def sample() -> None:
        while True:
            seen = await side.seen()
            now = time.time()
            # What is due and not written yet is missing from every view.
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
    """Return the greatest rate that is kept up with for `seconds`, to a fifth."""
    for _ in range(WARM_TRIALS_MAX):  # plans are built, code is compiled
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
    """Ours with all views, ours with those that the peer has, and the peer."""
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
    made = Report("NEXMark's queries as views at once, beside Structured Streaming.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
