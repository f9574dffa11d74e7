"""A controller of a cluster in another process, made to be killed; see ``controller_campaign.py``.

It speaks the replica protocol over TCP and holds both sides to its rules. What it needs to go on
after a death is in one file, the catalog: which dataflows there are, and from when on each can be
read. The file is changed before the cluster hears of it, so that the cluster never has given up
what the catalog still promises.

The table's contents at a time are a formula, so every answer is checked here, at once. Lines of
standard output tell the campaign what was verified; exit status 3 says what was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import msgspec
import pyarrow as pa

from actors.engine.views.compile import compile_view
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Export,
    Frontiers,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardImport,
    ShardTarget,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeExport,
    SubscribeResponse,
    ViewExport,
)
from actors.replica.cluster import connect
from actors.replica.cluster.checked import CheckedClient
from actors.runtime.errors import PenstockError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.analysis import analyze_in_memory
from actors.testing.patience import PATIENCE_S

Row = tuple[int, ...]

WORKERS: Final = 2
ROWS: Final = 5
"""Inserted at each time."""
WINDOW: Final = 40
"""Times after which a row is deleted again."""
GROUPS: Final = 7
SQL: Final = "SELECT g, count(*) AS n, sum(v) AS s FROM t GROUP BY g"
TABLE: Final = TableSchema(
    tuple(TableColumn(name, "bigint", nullable=False) for name in ("id", "g", "v"))
)
SOURCE: Final = ShardImport("t", TABLE)
BASE_INDEX, BASE_VIEW, BASE_VIEW_INDEX = "base-index", "base-view", "base-view-index"
PERMANENT: Final = (BASE_INDEX, BASE_VIEW, BASE_VIEW_INDEX)

ANSWER_S: Final = PATIENCE_S
"""An answer that takes longer is missing: generous, for a busy machine."""
PAUSE_S: Final = 0.005
"""Between two operations."""
PEEKS_MAX: Final = 8
INDEXES_MAX, VIEWS_MAX, SUBSCRIBES_MAX = 4, 3, 3
HISTORY: Final = 300
"""Times that can be read, at least."""


class Wrong(Exception):
    """An answer that is wrong, or is missing."""


# -- what there is at a time ---------------------------------------------------------------------


def inserted(time: int) -> list[Row]:
    """The rows that come at a time (from 1 on); they go `WINDOW` times later."""
    ids = range(time * ROWS, (time + 1) * ROWS)
    return [(id_, id_ % GROUPS, id_ * 7919 % 1000) for id_ in ids]


def table_at(time: int) -> Counter[Row]:
    """The table's contents."""
    first = max(1, time - WINDOW + 1)
    return Counter(row for at in range(first, time + 1) for row in inserted(at))


def view_at(time: int) -> Counter[Row]:
    """The view's contents, from the table's."""
    groups: dict[int, tuple[int, int]] = {}
    for _, g, v in table_at(time):
        n, s = groups.get(g, (0, 0))
        groups[g] = (n + 1, s + v)
    return Counter((g, n, s) for g, (n, s) in groups.items())


async def compiled() -> DeltaPlan:
    """The view's plan: the same in every process."""
    return await compile_view(SQL, {"t": TABLE}, analyze_in_memory)


def shards_of(number: int, plan: DeltaPlan) -> tuple[str, tuple[str, ...]]:
    """The output shard and the hidden shards of view number `number`."""
    hidden = tuple(f"hidden-{number}-{index}" for index in range(len(plan.hidden)))
    return f"out-{number}", hidden


# -- the catalog ---------------------------------------------------------------------------------


class Entry(msgspec.Struct):
    """One dataflow. `over`: what it reads, "t" or the output of the permanent view; a view's
    number names its shards."""

    id: str
    kind: str
    key: str
    as_of: int
    over: str = "t"
    number: int = 0


class Catalog(msgspec.Struct):
    """All that outlives a controller."""

    next_id: int = 1
    next_view: int = 1
    entries: dict[str, Entry] = {}


class Store:
    """The catalog's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        held = path.read_bytes() if path.exists() else b""
        self.catalog = msgspec.json.decode(held, type=Catalog) if held else Catalog()

    def save(self) -> None:
        """As a whole, or not at all."""
        draft = self._path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self.catalog))
        os.replace(draft, self._path)


# -- the controller ------------------------------------------------------------------------------


class _Stream(msgspec.Struct):
    over: str
    as_of: int
    upper: int | None
    contents: Counter[Row]
    heard: float
    dropped: bool = False


class _Asked(msgspec.Struct):
    over: str
    time: int
    id: int | None
    since: float
    canceled: bool = False


def tell(*words: object) -> None:
    """A line for the campaign."""
    print(*words, flush=True)


class Controller:
    """One life of it."""

    def __init__(self, client: CheckedClient, store: Store, plan: DeltaPlan, dice: Random) -> None:
        self._client = client
        self._store = store
        self._plan = plan
        self._dice = dice
        self._views_max = 0
        self._frontiers: dict[str, int] = {}
        self._peeks: dict[str, _Asked] = {}
        self._streams: dict[str, _Stream] = {}
        self._dropped: set[str] = set()
        self._changed = anyio.Event()
        self._serial = 0

    @property
    def _entries(self) -> dict[str, Entry]:
        return self._store.catalog.entries

    def _now(self) -> int:
        """The latest time that is known to be readable."""
        return self._frontiers[BASE_INDEX] - 1

    def _fresh(self, what: str) -> str:
        catalog = self._store.catalog
        catalog.next_id += 1
        return f"{what}-{catalog.next_id}"

    async def introduce(self, nonce: str, views_max: int) -> None:
        """Says what is in the catalog; the first life fills it."""
        self._views_max = views_max
        if not self._entries:
            self._entries[BASE_INDEX] = Entry(BASE_INDEX, "index", "id", 1)
            self._entries[BASE_VIEW] = Entry(BASE_VIEW, "view", "", 1, number=0)
            self._entries[BASE_VIEW_INDEX] = Entry(BASE_VIEW_INDEX, "index", "g", 1, over="w")
            self._store.save()
        await self._client.send(Hello(nonce))
        await self._client.send(CreateInstance(WORKERS))
        for entry in list(self._entries.values()):
            await self._create(self._described(entry))
        await self._client.send(InitializationComplete())
        await self._client.send(AllowWrites())

    def _described(self, entry: Entry) -> DataflowDescription:
        source, export = SOURCE, self._export(entry)
        if entry.over == "w":
            source = ShardImport(shards_of(0, self._plan)[0], self._plan.output)
        return DataflowDescription(entry.id, entry.id, (source,), export, entry.as_of)

    def _export(self, entry: Entry) -> Export:
        if entry.kind == "view":
            return ViewExport(self._plan, *shards_of(entry.number, self._plan))
        return IndexExport((entry.key,), TABLE if entry.over == "t" else self._plan.output)

    async def _create(self, described: DataflowDescription) -> None:
        await self._client.send(CreateDataflow(described))
        await self._client.send(ScheduleDataflow(described.id))

    async def wait_until(self, what: str, holds: Any) -> None:
        """Waits for responses that make it so. Raises `Wrong` when they do not come."""
        try:
            with anyio.fail_after(ANSWER_S):
                while not holds():
                    await self._changed.wait()
        except TimeoutError:
            raise Wrong(f"{what}: not within {ANSWER_S} s; {self._frontiers}") from None

    async def ready(self) -> None:
        """Every dataflow of the catalog can be read."""
        await self.wait_until(
            "frontiers of all",
            lambda: all(
                self._frontiers.get(each.id, 0) > each.as_of for each in self._entries.values()
            ),
        )

    # -- responses -------------------------------------------------------------------------------

    async def hear(self) -> None:
        """Takes what comes, and checks it. Raises `Wrong`."""
        while True:
            response = await self._client.receive()
            match response:
                case Frontiers(id=id_, write=write):
                    if write is not None:
                        self._frontiers[id_] = write
                    if write is not None and write >= EMPTY:
                        self._dropped.discard(id_)
                case PeekResponse():
                    self._answered(response)
                case SubscribeResponse():
                    self._batch(response)
                case _:
                    pass
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    def _answered(self, response: PeekResponse) -> None:
        asked, result = self._peeks.pop(response.uuid), response.result
        if isinstance(result, PeekCanceled) and asked.canceled:
            tell("ok", "canceled")
            return
        if not isinstance(result, PeekRows):
            raise Wrong(f"{asked} was answered with {result}")
        found: Counter[Row] = Counter()
        if result.arrow:
            for row in from_ipc(result.arrow).to_pylist():
                diff = row.pop(DIFF)
                found[tuple(row.values())] += diff
        wanted = contents(asked.over, asked.time)
        if asked.id is not None:
            wanted = Counter({row: n for row, n in wanted.items() if row[0] == asked.id})
        if found != wanted:
            raise Wrong(f"{asked}: found {found}, should be {wanted}")
        tell("ok", "peek")

    def _batch(self, response: SubscribeResponse) -> None:
        stream, batch = self._streams[response.id], response.batch
        if isinstance(batch, SubscribeDropped):
            del self._streams[response.id]
            tell("ok", "subscribe dropped")
            return
        assert isinstance(batch, SubscribeBatch)
        if batch.error is not None:
            raise Wrong(f"a subscribe ended with {batch.error}")
        if batch.arrow is not None:
            for row in from_ipc(batch.arrow).to_pylist():
                time, diff = row.pop(TIME), row.pop(DIFF)
                if not (batch.lower <= time < batch.upper or stream.upper is None):
                    raise Wrong(f"an update at {time} in [{batch.lower}, {batch.upper})")
                stream.contents[tuple(row.values())] += diff
        stream.upper, stream.heard = batch.upper, anyio.current_time()
        found = Counter({row: n for row, n in stream.contents.items() if n})
        if stream.as_of < batch.upper < EMPTY and found != contents(stream.over, batch.upper - 1):
            raise Wrong(f"a subscribe of {stream.over} is wrong below {batch.upper}")
        tell("ok", "batch")

    def check_time(self) -> None:
        """Nothing waits for too long."""
        now = anyio.current_time()
        for asked in self._peeks.values():
            if now - asked.since > ANSWER_S:
                raise Wrong(f"no answer in {ANSWER_S} s: {asked}")
        for id_, stream in self._streams.items():
            if now - stream.heard > ANSWER_S:
                raise Wrong(f"nothing of {id_} in {ANSWER_S} s: {stream.upper}, at {self._now()}")

    # -- commands --------------------------------------------------------------------------------

    async def act(self) -> None:
        """One operation, drawn."""
        kinds = ("peek", "peek", "peek", "peek", "create", "drop", "subscribe", "end", "compact")
        match self._dice.choice(kinds):
            case "peek":
                if len(self._peeks) < PEEKS_MAX:
                    await self._peek()
            case "create":
                await self._create_new()
            case "drop":
                await self._drop()
            case "subscribe":
                await self._subscribe()
            case "end":
                early = self._dice.random() < 0.1
                live = [
                    id_
                    for id_, stream in self._streams.items()
                    if not stream.dropped and (early or (stream.upper or 0) > stream.as_of + 2)
                ]
                if live:
                    await self._end(self._dice.choice(live))
            case "compact":
                await self._compact()

    async def _peek(self) -> None:
        readable = [e for e in self._entries.values() if self._frontiers.get(e.id, 0) > e.as_of]
        entry = self._dice.choice(readable)
        last = self._now()
        time = max(entry.as_of, self._dice.randrange(last - 100, last + 3))
        self._serial += 1
        uuid, over = f"peek-{self._serial}", "w" if entry.kind == "view" else entry.over
        asked = _Asked(over, time, None, anyio.current_time())
        if entry.kind == "view":
            shard = shards_of(entry.number, self._plan)[0]
            peek = Peek(uuid, ShardTarget(entry.id, ShardImport(shard, self._plan.output)), time)
        elif entry.key == "id" and self._dice.random() < 0.6:
            asked.id = max(1, time - self._dice.randrange(WINDOW + 5)) * ROWS
            keys = to_ipc(pa.table({"id": pa.array([asked.id], pa.int64())}))
            peek = Peek(uuid, IndexTarget(entry.id), time, ("id",), keys)
        else:
            peek = Peek(uuid, IndexTarget(entry.id), time)
        self._peeks[uuid] = asked
        await self._client.send(peek)
        if self._dice.random() < 0.1 and uuid in self._peeks:
            asked.canceled = True
            await self._client.send(CancelPeek(uuid))

    async def _create_new(self) -> None:
        kinds = Counter(each.kind for each in self._entries.values())
        as_of = self._now()
        number = self._store.catalog.next_view
        if self._dice.random() < 0.4 and kinds["view"] <= VIEWS_MAX and number < self._views_max:
            self._store.catalog.next_view += 1
            entry = Entry(self._fresh("view"), "view", "", as_of, number=number)
        elif kinds["index"] <= INDEXES_MAX:
            over = self._dice.choice("tw")
            key = self._dice.choice(("id", "g")) if over == "t" else "g"
            entry = Entry(self._fresh("index"), "index", key, as_of, over=over)
        else:
            return
        self._entries[entry.id] = entry
        self._store.save()
        await self._create(self._described(entry))
        tell("made", entry.kind)

    async def _drop(self, *, permanent: bool = False) -> None:
        busy = {asked.over for asked in self._peeks.values()}
        free = [id_ for id_ in self._entries if permanent or id_ not in PERMANENT]
        if not free or busy:
            return  # a peek of what is dropped may be answered with an error
        id_ = self._dice.choice(free)
        del self._entries[id_]
        self._store.save()
        self._dropped.add(id_)
        await self._client.send(AllowCompaction(id_, EMPTY))
        tell("made", "drop")

    async def _subscribe(self) -> None:
        if len(self._streams) >= SUBSCRIBES_MAX:
            return
        id_, as_of, over = self._fresh("subscribe"), self._now(), self._dice.choice("tw")
        if over == "w":
            as_of = min(as_of, self._frontiers[BASE_VIEW] - 1)
        self._store.save()  # the id is spent
        self._streams[id_] = _Stream(over, as_of, None, Counter(), anyio.current_time())
        source = SOURCE
        if over == "w":
            source = ShardImport(shards_of(0, self._plan)[0], self._plan.output)
        export = SubscribeExport(source.schema)
        await self._create(DataflowDescription(id_, id_, (source,), export, as_of))
        tell("made", "subscribe")

    async def _end(self, id_: str) -> None:
        self._streams[id_].dropped = True
        await self._client.send(AllowCompaction(id_, EMPTY))

    async def _compact(self) -> None:
        entry = self._dice.choice(list(self._entries.values()))
        oldest = min((asked.time for asked in self._peeks.values()), default=self._now())
        frontier = min(oldest, self._now() - HISTORY)
        if frontier > entry.as_of and self._frontiers.get(entry.id, 0) > frontier:
            entry.as_of = frontier
            self._store.save()
            await self._client.send(AllowCompaction(entry.id, frontier))
            tell("made", "compaction")

    async def finish(self, operations: int) -> None:
        """So many more operations; then every answer must come, every subscribe (at least one)
        must have been heard of, and everything go."""
        for _ in range(operations):
            await self.act()
            await anyio.sleep(PAUSE_S)
        await self.wait_until("the answers", lambda: not self._peeks)
        living = self._streams.values()
        await self.wait_until("the ends", lambda: not any(each.dropped for each in living))
        await self._subscribe()
        await self.wait_until("batches", lambda: all(each.upper is not None for each in living))
        for id_, stream in list(self._streams.items()):
            if not stream.dropped:
                await self._end(id_)
        while self._entries:
            await self._drop(permanent=True)
        await self.wait_until("the ends", lambda: not self._streams and not self._dropped)


def contents(over: str, time: int) -> Counter[Row]:
    """Of the table ("t") or a view ("w")."""
    return table_at(time) if over == "t" else view_at(time)


def warm_up() -> None:
    """The first array that Arrow makes of Python's values takes seconds on a busy machine: it
    looks for other libraries."""
    from_ipc(to_ipc(pa.table({"id": pa.array([1], pa.int64())}))).to_pylist()


async def live(options: argparse.Namespace) -> None:
    """One life, begun at a word on standard input, so that starting Python takes no time."""
    plan = await compiled()
    settings = Settings()
    warm_up()
    await anyio.to_thread.run_sync(sys.stdin.readline)
    store = Store(options.catalog)
    client = CheckedClient(await connect(f"127.0.0.1:{options.port}", settings), settings)
    controller = Controller(client, store, plan, Random(options.seed))
    async with anyio.create_task_group() as group:
        group.start_soon(controller.hear)
        await controller.introduce(f"life-{options.seed}", options.views_max)
        await controller.ready()
        tell("ready", json.dumps(len(store.catalog.entries)))
        if options.finish:
            await controller.finish(options.finish)
            tell("finished")
            group.cancel_scope.cancel()
        while not options.finish:
            await controller.act()
            controller.check_time()
            await anyio.sleep(PAUSE_S)
    await client.close()


def main() -> int:
    """The exit status: 3 for a wrong answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--catalog", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--views-max", type=int, required=True)
    parser.add_argument("--finish", type=int, default=0)
    options = parser.parse_args()
    try:
        anyio.run(live, options)
    except BaseExceptionGroup as error:
        found, rest = error.split((Wrong, PenstockError))
        if rest is not None:
            raise
        tell("WRONG", repr(found))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
