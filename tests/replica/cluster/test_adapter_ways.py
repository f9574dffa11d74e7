"""Clients that come and go by slow ways to several workers: every verdict of the adapters is seen,
nothing is lost, and each rule matters."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from test_cluster import FIRST, HISTORY, installs  # type: ignore[import-not-found]

from actors.channel_adapter import ChannelAdapter, ClientTurns, NonceVerdict, StashRules
from actors.durable.persist import PersistClient
from actors.model.protocol.compute import (
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
)
from actors.model.protocol.internal import InputStarted, StartInputs
from actors.replica.cluster import WorkerCluster
from actors.replica.cluster.client import LocalClient
from actors.runtime.errors import PenstockError, ResourceClosed
from actors.runtime.kernel import ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.testing.probe import MessageProbe
from actors.testing.virtual_time import VirtualDeadlock, VirtualTimeLoop
from cluster_house import InlineClock, Stage, rows_of  # type: ignore[import-not-found]

WORKERS: Final = 3
CLIENTS: Final = 8
SEEDS: Final = range(12)
ROWS: Final = sorted(((k, "a", 1) for k in range(20)), key=str)


class SlowAddress(ActorAddress[Any]):
    """An adapter that each connection, and its worker, reaches by a slow way of its own: messages of
    one way keep their order, those of different ways overtake each other."""

    __slots__ = ("_dice", "_due", "_inner")

    def __init__(self, inner: ActorAddress[Any], dice: random.Random) -> None:
        super().__init__(inner._mailbox)
        self._inner = inner
        self._dice = dice
        self._due: dict[str, float] = {}

    async def send(self, message: Any) -> None:
        """Deliver later; the sender does not wait."""
        delay_s = self._dice.choice((0, 0, 0.001, 0.02))
        loop = asyncio.get_running_loop()
        due = max(self._due.get(message.nonce, 0), loop.time() + delay_s)
        self._due[message.nonce] = due + 1e-6
        loop.call_at(due, self._deliver, message)

    def send_nowait(self, message: Any) -> None:
        """See `send`."""
        loop = asyncio.get_running_loop()
        due = max(self._due.get(message.nonce, 0), loop.time())
        self._due[message.nonce] = due + 1e-6
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
        start = (Hello(f"n{number}"), CreateInstance(WORKERS), *HISTORY, InitializationComplete())
        for command in start:
            await client.send(command)
        if number and self.dice.random() < 0.5:
            # Displaced before it has an answer, with commands on their way.
            for _ in range(self.dice.randint(1, 6)):
                await client.send(Peek(f"unheard-{number}-{_}", IndexTarget("i1"), 5))
            self.late.append(client)
            return
        seen = 0
        while seen < 6:
            response = await client.receive()
            if isinstance(response, Frontiers) and response.write is not None:
                seen = response.write
        await client.send(Peek(f"p{number}", IndexTarget("i1"), 5))
        while not isinstance(response := await client.receive(), PeekResponse):
            pass
        assert response.uuid == f"p{number}"
        assert rows_of(response) == ROWS
        if self.dice.random() < 0.3:
            await client.close()

    async def statistics(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in (await self.cluster.statistics()).adapters:
            counts = {k: v for k, v in msgspec.structs.asdict(each).items() if k != "nonce"}
            found.update(counts)
        return found


async def campaign(seed: int, folder: Path, stash_max: int) -> Counter[str]:
    dice = random.Random(seed)
    settings = Settings(workers=WORKERS, stash_responses_max=stash_max)
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
            factory=stage.cast(),
            reach=lambda adapter: SlowAddress(adapter, dice),
        )
        run = Campaign(cluster, dice)
        first = await cluster.connect()
        for command in (
            Hello("first"),
            CreateInstance(WORKERS),
            *HISTORY,
            InitializationComplete(),
        ):
            await first.send(command)
        dataflow = await stage.dataflow()
        dataflow.tell_workers(StartInputs("i1", 1))
        await stage.message(dataflow, InputStarted, WORKERS)
        dataflow.tell_workers(*installs(WORKERS, 0, 6, FIRST, True))
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


def play(seed: int, folder: Path, stash_max: int = 100) -> Counter[str]:
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(campaign(seed, folder, stash_max))


def test_every_verdict_is_seen_and_no_client_lacks_an_answer(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total += play(seed, tmp_path, stash_max=1 if seed % 3 == 0 else 100)
    for verdict in ("forwarded", "delivered", "dropped", "commands", "commands_dropped"):
        assert total[verdict], f"no adapter has {verdict} anything: {total}"


def no_delivery(patch: pytest.MonkeyPatch) -> None:
    connect = StashRules.connect
    patch.setattr(StashRules, "connect", lambda self, nonce: connect(self, nonce) and [])


def no_served_rule(patch: pytest.MonkeyPatch) -> None:
    def judge(self: StashRules, tagged: Any) -> NonceVerdict:
        self._served.clear()
        return whole(self, tagged)

    whole = StashRules.judge
    patch.setattr(StashRules, "judge", judge)


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
    with pytest.raises((AssertionError, PenstockError, VirtualDeadlock, BaseExceptionGroup)):
        for seed in SEEDS:
            play(seed, tmp_path, stash_max=1)
