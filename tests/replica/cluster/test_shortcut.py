"""What a connection answers itself is what its workers would have answered, whatever happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pyarrow as pa
import pytest

from actors.durable.arrangement import partition
from actors.durable.persist import PersistClient
from actors.model.plan.schema import ERROR, TIME
from actors.model.plan.updates import consolidate, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekError,
    PeekResponse,
    PeekRows,
    PeekStashed,
    ScheduleDataflow,
    UpdateConfiguration,
)
from actors.model.protocol.internal import InstallUpdates
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster import shortcut as shortcut_module
from actors.replica.cluster.checked import CheckedClient
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.cluster.shortcut import PeekShortcut
from actors.replica.compute.index import ClusterPartitions, IndexInsertion, IndexPartition
from actors.replica.compute.peeks import POINT_ROWS_MAX, one_key_answer
from actors.runtime.errors import ReadBelowSince, ResourceClosed
from actors.runtime.kernel import ActorSystem
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe, settle
from cluster_house import (  # type: ignore[import-not-found]
    SCHEMA,
    InlineClock,
    Stage,
    index,
    rows_of,
    subscribe,
    updates,
)

KEYS = 6


def keys(*values: int) -> bytes:
    return to_ipc(pa.table({"k": pa.array(values, pa.int64())}))


def direct(uuid: str, key: int, time: int) -> Peek:
    return Peek(uuid, IndexTarget("i1"), time, ("k",), keys(key))


def roundabout(uuid: str, key: int, time: int) -> Peek:
    """The same rows, in a form that only the workers answer."""
    return Peek(uuid, IndexTarget("i1"), time, ("k",), keys(key), project=("k", "v"))


class Script:
    """A client, the dataflow of its index, and what each pair of peeks was answered."""

    def __init__(self, cluster: WorkerCluster, stage: Stage, workers: int, random: Random) -> None:
        self.cluster = cluster
        self.stage = stage
        self.workers = workers
        self.random = random
        self.fails = False
        """Whether there may be errors, which send all peeks the long way."""
        self.connections = 0
        self.dataflows = 0
        self.incarnation = 0
        self.peeks = 0
        self.asked = 0
        self.answers: dict[str, Any] = {}
        self.ended = 0

    # -- the client

    async def connect(self, description: DataflowDescription) -> None:
        self.connections += 1
        self.local = await self.cluster.connect()
        self.client = CheckedClient(self.local, Settings())
        self.asked = self.peeks
        self.description = description
        start: list[Command] = [Hello(f"n{self.connections}"), CreateInstance(self.workers)]
        start += [CreateDataflow(description), ScheduleDataflow("i1"), InitializationComplete()]
        for command in start:
            await self.client.send(command)
        await self.heard()

    async def heard(self) -> None:
        """Everything that is under way has come."""
        await settle()
        for response in self.client.receive_nowait(1_000):
            if isinstance(response, PeekResponse):
                assert response.uuid not in self.answers
                self.answers[response.uuid] = self.told(response)
            elif isinstance(response, Frontiers) and response.write == EMPTY:
                self.ended += 1
        await settle()

    def told(self, response: PeekResponse) -> Any:
        if isinstance(response.result, PeekError):
            return response.result.code
        if isinstance(response.result, PeekStashed):
            return "stashed", response.result.rows
        return rows_of(response)

    @property
    def shortcut(self) -> PeekShortcut:
        """What a connection over a wire asks, which has the same conversation."""
        conversation: Any = self.local._conversation
        shortcut: PeekShortcut = conversation.shortcut
        return shortcut

    async def ask(self) -> None:
        self.peeks += 1
        low = max(0, self.allowed - 2)
        time = self.random.randint(low, max(low, self.upper + 1))
        key = self.random.randrange(KEYS + 1)
        peek = direct(f"d{self.peeks}", key, time)
        rows = self.shortcut.answer(peek)
        if rows is None:
            await self.client.send(peek)
        else:
            self.answers[peek.uuid] = rows_of(PeekResponse(peek.uuid, rows))
        await self.client.send(roundabout(f"r{self.peeks}", key, time))
        await self.heard()

    # -- the dataflow

    async def start(self) -> None:
        """The dataflow that the workers have made last says what there is."""
        made = self.stage.of("dataflow")
        assert len(made) > self.dataflows, "it was made"
        self.dataflows = len(made)
        self.dataflow = made[-1]
        self.upper = self.allowed = self.description.as_of
        self.history: list[tuple[int, str, int, int]] = []
        self.held: Counter[tuple[int, str]] = Counter()
        await self.restart()

    async def restart(self) -> None:
        """A fresh incarnation: a snapshot at a time that may still be read."""
        self.incarnation += 1
        as_of = self.random.randint(self.allowed, max(self.allowed, self.upper - 1))
        self.history = [(k, v, max(t, as_of), d) for k, v, t, d in self.history]
        upper = as_of + 1
        snapshot = [row for row in self.history if row[2] < upper]
        later = [row for row in self.history if row[2] >= upper]
        self.install(0, upper, snapshot, True)
        if self.upper > upper:
            self.install(upper, self.upper, later, False)
        self.upper = max(self.upper, upper)
        await self.heard()

    async def step(self) -> None:
        lower = self.upper
        self.upper += self.random.randint(1, 3)
        rows = []
        for _ in range(self.random.randrange(4)):
            row = (self.random.randrange(KEYS), self.random.choice("ab"))
            diff = -1 if self.held[row] and self.random.random() < 0.4 else 1
            self.held[row] += diff
            rows.append((*row, self.random.randrange(lower, self.upper), diff))
        self.history += rows
        self.install(lower, self.upper, rows, False)
        await self.heard()

    def install(self, lower: int, upper: int, rows: list[Any], snapshot: bool) -> None:
        table = consolidate(updates(*rows))
        if self.fails and self.random.random() < 0.1 and not snapshot:
            table = with_error(table, upper - 1)
        parts = partition(table, ("k",), self.workers)
        messages = [
            InstallUpdates("i1", self.incarnation, lower, upper, part, snapshot) for part in parts
        ]
        self.dataflow.tell_workers(*messages)

    # -- what else may happen

    async def compact(self) -> None:
        self.allowed = self.random.randint(self.allowed, max(self.allowed, self.upper - 1))
        await self.client.send(AllowCompaction("i1", self.allowed))
        await self.heard()

    async def configure(self) -> None:
        limit = self.random.choice([700, 1_000_000])
        await self.client.send(UpdateConfiguration(result_bytes_max=limit))
        await self.heard()

    async def replace(self) -> None:
        """Dropped, and made anew under the same id with other contents."""
        ended = self.ended
        await self.client.send(AllowCompaction("i1", EMPTY))
        await self.ask()
        while self.ended == ended:
            await self.heard()
        self.description = index("i1", self.random.randrange(5))
        await self.client.send(CreateDataflow(self.description))
        await self.client.send(ScheduleDataflow("i1"))
        await self.heard()
        await self.start()

    async def displace(self) -> None:
        """Another client, of the same index or of another one under its name."""
        kept = self.random.random() < 0.6
        if kept:
            described = index("i1", self.random.randint(self.allowed, self.upper))
        else:
            described = DataflowDescription(
                "i1", "i1", index().imports, IndexExport(("k", "v"), SCHEMA), 0
            )
        made = len(self.stage.of("dataflow"))
        await self.connect(described)
        self.allowed = max(self.allowed, described.as_of)
        if not kept:
            await self.ask()
            await self.stage.dataflow(made)
            await self.start()
            ended = self.ended
            await self.client.send(AllowCompaction("i1", EMPTY))
            while self.ended == ended:
                await self.heard()
            await self.client.send(CreateDataflow(index("i1")))
            await self.client.send(ScheduleDataflow("i1"))
            await self.heard()
            self.description = index("i1")
            await self.start()

    def stashes(self, one: Any, other: Any) -> bool:
        """Near the limit the ways may differ in what they stash, and in nothing else."""
        return isinstance(one, list) and other == ("stashed", len(one))

    def compare(self) -> int:
        """Both of each pair were answered alike, or both not yet; how many were."""
        for number in range(self.asked + 1, self.peeks + 1):
            one, other = self.answers.get(f"d{number}"), self.answers.get(f"r{number}")
            assert one == other or self.stashes(one, other), number
        return len(self.answers) // 2


def with_error(table: pa.Table, time: int) -> pa.Table:
    """One error update among them."""
    plain = table.append_column(ERROR, pa.nulls(table.num_rows, pa.string()))
    failed = pa.table(
        {"k": [None], "v": [None], TIME: [time], "__diff": [1], ERROR: ["bad"]}, plain.schema
    )
    return pa.concat_tables([plain, failed])


@asynccontextmanager
async def script(place: Path, workers: int, seed: int) -> AsyncIterator[Script]:
    settings = Settings(workers=workers, maintenance_ms=5)
    clock, stage = InlineClock(), Stage()
    persist = await PersistClient.in_memory(settings, clock)
    with anyio.fail_after(200):
        async with ActorSystem(clock=clock, seed=1) as system:
            executor = MessageProbe.start(system, "executor")
            cluster = await WorkerCluster.start(
                system, settings, persist, executor.address, place, factory=stage.factory()
            )
            made = Script(cluster, stage, workers, Random(seed))
            made.fails = seed % 3 == 0
            await made.connect(index("i1"))
            await stage.dataflow()
            await made.start()
            yield made
    await persist.close()


@pytest.mark.parametrize("seed", range(30))
async def test_every_answer_is_the_workers(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    def counted(*args: Any) -> PeekRows | None:
        rows = one_key_answer(*args)
        given.append(rows is not None)
        return rows

    monkeypatch.setattr(shortcut_module, "one_key_answer", counted)
    async with script(tmp_path, 1 + seed % 4, seed) as made:
        events = [made.ask, made.step, made.compact, made.restart, made.configure]
        events += [made.replace, made.displace]
        for event in made.random.choices(events, (40, 20, 5, 2, 2, 1, 2), k=120):
            await event()
        compared = made.compare()
    assert compared > 20
    assert made.fails or any(given), "some went the short way"


# -- its conditions, one by one


def partition_of(place: Path, rows: pa.Table, upper: int, *, snapshot: bool = True) -> Any:
    made = IndexPartition(place, IndexExport(("k",), SCHEMA))
    nobody: Any = None
    made.done(
        made.perform(IndexInsertion(InstallUpdates("i1", 1, 0, upper, rows, snapshot), nobody))
    )
    return made


@pytest.fixture
def partitions(tmp_path: Path) -> ClusterPartitions:
    held = ClusterPartitions(2)
    for worker, rows in enumerate(partition(updates((1, "a", 4, 1), (2, "b", 4, 1)), ("k",), 2)):
        held.put("i1", worker, partition_of(tmp_path / str(worker), rows, 5))
    return held


def told(partitions: ClusterPartitions, *commands: Command, sealed: int = 5) -> PeekShortcut:
    made = PeekShortcut(partitions, ConnectionLimits(1 << 20))
    for command in (CreateDataflow(index("i1", 2)), *commands):
        made.note_command(command)
    made.note(Frontiers("i1", write=sealed))
    made.note(Frontiers("i1", input=100))
    made.note(Frontiers("i2", write=100))
    return made


def test_what_is_there_is_answered(partitions: ClusterPartitions) -> None:
    answers = [told(partitions).answer(direct("p", key, 4)) for key in (1, 2, 3)]
    rows = [rows_of(PeekResponse("p", answer)) for answer in answers if answer is not None]
    assert rows == [[(1, "a", 1)], [(2, "b", 1)], []]


def test_many_rows_under_one_key_go_the_long_way(tmp_path: Path) -> None:
    held = ClusterPartitions(1)
    rows = updates(*((1, str(number), 4, 1) for number in range(POINT_ROWS_MAX + 1)))
    held.put("i1", 0, partition_of(tmp_path, rows, 5))
    made = PeekShortcut(held, ConnectionLimits(1 << 20))
    made.note_command(CreateDataflow(index("i1", 2)))
    made.note(Frontiers("i1", write=5))
    assert made.answer(direct("p", 1, 4)) is None
    few = partition_of(tmp_path / "few", rows.slice(1), 5)
    held.put("i1", 0, few)
    answer = made.answer(direct("p", 1, 4))
    assert answer is not None
    assert answer.rows == POINT_ROWS_MAX


@pytest.mark.parametrize(
    ("case", "commands", "sealed", "peek"),
    [
        ("nobody has said that it is sealed", (), 0, direct("p", 1, 4)),
        ("not sealed in every worker", (), 4, direct("p", 1, 4)),
        ("not in this partition yet", (), 9, direct("p", 1, 5)),
        ("before the snapshot", (), 5, direct("p", 1, 3)),
        ("below the as_of", (), 5, direct("p", 1, 1)),
        ("allowed to be forgotten", (AllowCompaction("i1", 5),), 5, direct("p", 1, 4)),
        ("dropped", (AllowCompaction("i1", EMPTY),), 5, direct("p", 1, 4)),
        ("two keys", (), 5, Peek("p", IndexTarget("i1"), 4, ("k",), keys(1, 2))),
        ("all rows", (), 5, Peek("p", IndexTarget("i1"), 4)),
        ("another form", (), 5, roundabout("p", 1, 4)),
        ("another index", (), 5, Peek("p", IndexTarget("i2"), 4, ("k",), keys(1))),
    ],
)
def test_what_the_workers_are_asked(
    partitions: ClusterPartitions, case: str, commands: Any, sealed: int, peek: Peek
) -> None:
    assert told(partitions, *commands, sealed=sealed).answer(peek) is None, case


def test_no_dataflow_but_an_index_is_known(partitions: ClusterPartitions) -> None:
    made = PeekShortcut(partitions, ConnectionLimits(1 << 20))
    made.note_command(CreateDataflow(subscribe("i1")))
    made.note(Frontiers("i1", write=5))
    assert made.answer(direct("p", 1, 4)) is None


def test_an_error_in_any_partition_belongs_to_the_answer(
    partitions: ClusterPartitions, tmp_path: Path
) -> None:
    (owner,) = [
        number
        for number, found in enumerate(partition(updates((1, "a", 4, 1)), ("k",), 2))
        if found.num_rows
    ]
    failed = partition_of(tmp_path / "failed", with_error(updates(), 4), 5)
    partitions.put("i1", 1 - owner, failed)
    assert told(partitions).answer(direct("p", 1, 4)) is None


def test_a_partition_that_is_gone_or_closed(partitions: ClusterPartitions, tmp_path: Path) -> None:
    late = partition_of(tmp_path / "late", updates(), 5)
    first, _ = partitions.readable("i1") or ()
    partitions.put("i1", 1, late)
    partitions.take("i1", 1, partition_of(tmp_path / "stranger", updates(), 5))
    assert partitions.readable("i1") == [first, late.arrangement], "another's is left alone"
    first.close()
    assert told(partitions).answer(direct("p", 1, 4)) is None
    with pytest.raises(ResourceClosed):
        first.view(5)
    partitions.take("i1", 1, late)
    assert partitions.readable("i1") is None


def test_an_answer_over_the_limit(partitions: ClusterPartitions) -> None:
    made = PeekShortcut(partitions, ConnectionLimits(1 << 20, 100))
    made.note_command(CreateDataflow(index("i1")))
    made.note(Frontiers("i1", write=5))
    assert made.answer(direct("p", 1, 4)) is None


def test_nothing_is_in_a_partition_from_before_its_latest_snapshot(tmp_path: Path) -> None:
    made = partition_of(tmp_path, updates((1, "a", 8, 1)), 9)
    nobody: Any = None
    again = InstallUpdates("i1", 2, 0, 7, updates((1, "a", 6, 1)), True)
    made.done(made.perform(IndexInsertion(again, nobody)))
    with pytest.raises(ReadBelowSince):
        made.arrangement.view(7)
    made.done(made.perform(IndexInsertion(InstallUpdates("i1", 2, 7, 9, updates()), nobody)))
    assert made.arrangement.view(9).before == 9
