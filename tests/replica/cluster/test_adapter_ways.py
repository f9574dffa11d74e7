"""Clients that come and go by slow ways to several workers: every verdict of the adapters is seen,
nothing is lost, and each rule matters."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from msgspec.structs import replace
from test_cluster import FIRST, installs  # type: ignore[import-not-found]

from actors.channel_adapter import (
    ChannelAdapter,
    ClientTurns,
    DisconnectClient,
    NonceVerdict,
    StashRules,
)
from actors.durable.persist import PersistClient
from actors.model.protocol.compute import (
    CreateDataflow,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    ScheduleDataflow,
)
from actors.model.protocol.internal import InputStarted, StartInputs
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.client import LocalClient
from actors.runtime.errors import PenstockError, ResourceClosed
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe
from actors.testing.virtual_time import VirtualTimeLoop
from cluster_house import InlineClock, Stage, index, rows_of  # type: ignore[import-not-found]

WORKERS: Final = 3
CLIENTS: Final = 8
SEEDS: Final = range(12)
INDEXES: Final = ("i1", "i2", "i3")
START: Final = tuple(
    command for id_ in INDEXES for command in (CreateDataflow(index(id_)), ScheduleDataflow(id_))
)
ROWS: Final = sorted(((k, "a", 1) for k in range(20)), key=str)


class SlowAddress(ActorAddress[Any]):
    """An adapter that its worker and each connection reach by slow ways of their own, and the
    acceptor, which reports clients that left, by another: messages of one way keep their order,
    those of different ways overtake each other."""

    __slots__ = ("_dice", "_due", "_inner")

    def __init__(self, inner: ActorAddress[Any], dice: random.Random) -> None:
        super().__init__(inner._mailbox)
        self._inner = inner
        self._dice = dice
        self._due: dict[tuple[str, str, bool], float] = {}

    async def send(self, message: Any) -> None:
        """Deliver later; the sender does not wait."""
        self._deliver_later(message, self._dice.choice((0, 0, 0.001, 0.02)))

    def send_nowait(self, message: Any) -> None:
        """Deliver later."""
        self._deliver_later(message, self._dice.choice((0, 0.001)))

    def reply(self, message: Any) -> bool:
        """Deliver a response of the worker later."""
        self._deliver_later(message, self._dice.choice((0, 0, 0.001, 0.02)), "worker")
        return True

    def _deliver_later(self, message: Any, delay_s: float, sender: str = "client") -> None:
        loop = asyncio.get_running_loop()
        nonce = message.nonce if sender == "client" else ""
        way = sender, nonce, isinstance(message, DisconnectClient)
        due = max(self._due.get(way, 0), loop.time() + delay_s)
        self._due[way] = due + 1e-6
        loop.call_at(due, self._deliver, message)

    def _deliver(self, message: Any) -> None:
        with suppress(ResourceClosed):
            self._inner.reply(message)


class Campaign:
    """One run: clients displace one another; each asks for what all workers have."""

    def __init__(self, cluster: WorkerCluster, dice: random.Random) -> None:
        self.cluster = cluster
        self.dice = dice
        self.late: list[LocalClient] = []

    async def client(self, number: int) -> None:
        client = await self.cluster.connect()
        start = (Hello(f"n{number}"), CreateInstance(WORKERS), *START, InitializationComplete())
        for command in start:
            await client.send(command)
        is_late = number < CLIENTS - 1 and self.dice.random() < 0.6
        # Displaced before it was attached everywhere, or with commands on their way.
        if not is_late or self.dice.random() < 0.5:
            await self.hear(client)
        if is_late:
            for count in range(self.dice.randint(1, 6)):
                await client.send(Peek(f"unheard-{number}-{count}", IndexTarget("i1"), 5))
            self.late.append(client)
            return
        await client.send(Peek(f"p{number}", IndexTarget("i1"), 5))
        answer = await client.receive()
        assert isinstance(answer, PeekResponse)
        assert answer.uuid == f"p{number}"
        assert rows_of(answer) == ROWS
        if self.dice.random() < 0.3:
            await client.close()

    async def hear(self, client: LocalClient) -> None:
        """Wait until all workers have reported all indexes."""
        seen: set[str] = set()
        while seen != set(INDEXES):
            response = await client.receive()
            assert isinstance(response, Frontiers)
            assert response.write == 6
            seen.add(response.id)

    async def statistics(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in (await self.cluster.statistics()).adapters:
            counts = {
                k: v
                for k, v in msgspec.structs.asdict(each).items()
                if k not in ("nonce", "since_ms")
            }
            found.update(counts)
        return found


async def campaign(seed: int, folder: Path, stash_max: int) -> Counter[str]:
    dice = random.Random(seed)
    settings = Settings(workers=WORKERS, stash_responses_max=stash_max, maintenance_ms=1000)
    clock, stage = InlineClock(), Stage()
    persist = await PersistClient.in_memory(settings, clock)
    async with ActorSystem(clock=clock, seed=seed) as system:
        executor = MessageProbe.start(system, "executor")
        cluster = await WorkerCluster.start(
            system,
            settings,
            persist,
            executor.address,
            folder,
            factory=stage.factory(),
            reach=lambda adapter: SlowAddress(adapter, dice),
        )
        run = Campaign(cluster, dice)
        first = await cluster.connect()
        for command in (
            Hello("first"),
            CreateInstance(WORKERS),
            *START,
            InitializationComplete(),
        ):
            await first.send(command)
        for number, id_ in enumerate(INDEXES):
            dataflow = await stage.dataflow(number)
            dataflow.tell_workers(StartInputs(id_, 1))
            await stage.message(dataflow, InputStarted, WORKERS)
            updates = installs(WORKERS, 0, 6, FIRST, True)
            dataflow.tell_workers(*(replace(each, dataflow=id_, incarnation=1) for each in updates))
        for number in range(CLIENTS):
            await run.client(number)
        for client in run.late:
            with pytest.raises(PenstockError):
                while True:
                    await client.receive()
        # What is on its way arrives.
        await anyio.sleep(1)
        found = await run.statistics()
    await persist.close()
    return found


@pytest.fixture(autouse=True)
def checked_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters check their invariants after each message."""
    whole = ChannelAdapter.receive

    async def receive(self: ChannelAdapter, message: Any) -> None:
        await whole(self, message)
        self._rules.validate()
        self._turns.validate()

    monkeypatch.setattr(ChannelAdapter, "receive", receive)


def play(seed: int, folder: Path, stash_max: int = 100) -> Counter[str]:
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(bounded(campaign(seed, folder, stash_max)))


async def bounded(run: Coroutine[Any, Any, Counter[str]]) -> Counter[str]:
    """A run that hangs ends: in virtual time, which a slow machine does not shorten."""
    with anyio.fail_after(60):
        return await run


def test_every_verdict_is_seen_and_no_client_lacks_an_answer(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total += play(seed, tmp_path, stash_max=1 if seed % 3 == 0 else 100)
    for verdict in ("forwarded", "delivered", "dropped", "commands", "commands_dropped"):
        assert total[verdict], f"no adapter has {verdict} anything: {total}"


def no_delivery(patch: pytest.MonkeyPatch) -> None:
    connect = StashRules.connect
    patch.setattr(StashRules, "connect", lambda self, nonce: connect(self, nonce) and [])


class NeverServed(OrderedDict[str, None]):
    """Nonces of which none is remembered as served."""

    def __contains__(self, nonce: object) -> bool:
        return False


def no_served_rule(patch: pytest.MonkeyPatch) -> None:
    whole = StashRules.__init__

    def init(self: StashRules, limit: int) -> None:
        whole(self, limit)
        self._served = NeverServed()

    patch.setattr(StashRules, "__init__", init)


def no_nonce_check(patch: pytest.MonkeyPatch) -> None:
    whole = ChannelAdapter.receive

    async def receive(self: ChannelAdapter, message: Any) -> None:
        if type(message).__name__ == "FromClient" and self._rules.current is not None:
            await self._command(self._rules.current, message.command)
        else:
            await whole(self, message)

    patch.setattr(ChannelAdapter, "receive", receive)


def no_turns(patch: pytest.MonkeyPatch) -> None:
    def arrive(self: ClientTurns, nonce: str) -> str:
        self.served = nonce
        return nonce

    patch.setattr(ClientTurns, "arrive", arrive)


def drop_at_the_bound(patch: pytest.MonkeyPatch) -> None:
    whole = StashRules.judge

    def judge(self: StashRules, tagged: Any) -> NonceVerdict:
        verdict = whole(self, tagged)
        return NonceVerdict.DROP if verdict is NonceVerdict.HOLD else verdict

    patch.setattr(StashRules, "judge", judge)


@pytest.mark.parametrize(
    "rule", [no_delivery, no_served_rule, no_nonce_check, no_turns, drop_at_the_bound]
)
def test_each_rule_is_needed(
    rule: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises((AssertionError, PenstockError, TimeoutError, BaseExceptionGroup)):
        for seed in SEEDS:
            play(seed, tmp_path, stash_max=1)
