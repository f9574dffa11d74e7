"""The adapters of both halves: the rules table of nonces, and the actors between a client and a
worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actors.channel_adapter import (
    AdapterStatistics,
    ChannelAdapter,
    ClientGone,
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    InspectAdapter,
    NonceVerdict,
    ResponsesAcked,
    ResponsesForwarded,
    StashRules,
    StorageAdapter,
    StorageFromClient,
    StorageFromWorker,
    StorageGone,
    StoragePassed,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Frontiers,
    Hello,
    Response,
    TaggedCommand,
    TaggedResponse,
)
from actors.model.protocol.storage import FrontierUpper, StorageTagged, StorageTaggedResponse
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.neighbours import NeighbourProbe


class Checked(StashRules):
    """Checks its invariants after every event."""

    def connect(self, nonce: str) -> list[Response]:
        kept = super().connect(nonce)
        self.validate()
        return kept

    def disconnect(self, nonce: str) -> bool:
        gone = super().disconnect(nonce)
        self.validate()
        return gone

    def judge(self, tagged: TaggedResponse | StorageTaggedResponse) -> NonceVerdict:
        verdict = super().judge(tagged)
        self.validate()
        return verdict


def response(nonce: str, number: int = 0) -> TaggedResponse:
    return TaggedResponse(nonce, Frontiers("v", write=number), number + 1)


def served(rules: StashRules, *nonces: str) -> StashRules:
    for nonce in nonces:
        rules.connect(nonce)
    return rules


@pytest.mark.parametrize(
    ("nonce", "verdict"),
    [
        ("current", NonceVerdict.FORWARD),
        ("past", NonceVerdict.DROP),
        ("future", NonceVerdict.STASH),
    ],
)
def test_past_current_and_future_nonces(nonce: str, verdict: NonceVerdict) -> None:
    rules = served(Checked(10), "past", "current")
    assert rules.judge(response(nonce)) is verdict


def test_without_a_client_the_current_nonce_is_dropped() -> None:
    rules = served(Checked(10), "current")
    assert not rules.disconnect("other")
    assert rules.disconnect("current")
    assert not rules.disconnect("current")
    assert rules.judge(response("current")) is NonceVerdict.DROP
    assert rules.judge(response("future")) is NonceVerdict.STASH


def test_the_stash_is_delivered_first_and_drops_what_is_older() -> None:
    rules = Checked(10)
    rules.judge(response("a"))
    for number in range(3):
        rules.judge(response("b", number))
    rules.judge(response("c", 9))
    assert rules.stashed == 5
    assert rules.connect("b") == [response("b", number).response for number in range(3)]
    assert rules.stashed == 1
    assert rules.connect("c") == [response("c", 9).response]
    assert rules.stashed == 0


def test_the_first_match_drops_the_whole_stash() -> None:
    rules = served(Checked(10), "a")
    rules.judge(response("x"))
    rules.judge(response("y"))
    assert rules.connect("b") == []
    assert rules.stashed == 2  # they may still be in the future
    assert rules.judge(response("b")) is NonceVerdict.FORWARD
    assert rules.stashed == 0


def test_the_stash_is_bounded_and_evicts_nothing() -> None:
    rules = Checked(2)
    verdicts = [rules.judge(response("x", number)) for number in range(3)]
    assert verdicts == [NonceVerdict.STASH, NonceVerdict.STASH, NonceVerdict.HOLD]
    assert len(rules.connect("x")) == 2


class Half(msgspec.Struct, frozen=True):
    """The messages of one half's adapter."""

    adapter: type[Any]
    from_client: type[Any]
    from_worker: type[Any]
    tagged: type[Any]
    forwarded: type[Any]
    gone: type[Any]
    response: Callable[..., TaggedResponse | StorageTaggedResponse]


COMPUTE = Half(
    ChannelAdapter,
    FromClient,
    FromWorker,
    TaggedCommand,
    ResponsesForwarded,
    ClientGone,
    response,
)
STORAGE = Half(
    StorageAdapter,
    StorageFromClient,
    StorageFromWorker,
    StorageTagged,
    StoragePassed,
    StorageGone,
    lambda nonce, number=0: StorageTaggedResponse(nonce, FrontierUpper("u1", number), number + 1),
)
both_halves = pytest.mark.parametrize("half", [COMPUTE, STORAGE], ids=["compute", "storage"])


def house(
    stage: ActorIsolation, half: Half, stash: int = 10
) -> tuple[SubjectActor[Any], NeighbourProbe, NeighbourProbe]:
    """(adapter, worker, client)."""
    worker, client = stage.probe("worker"), stage.probe("client")
    adapter = stage.start(lambda: half.adapter(3, worker.address, stash), "adapter")
    return adapter, worker, client


async def inspect(adapter: SubjectActor[Any]) -> AdapterStatistics:
    statistics: AdapterStatistics = await adapter.ask(InspectAdapter)
    return statistics


@both_halves
async def test_commands_are_tagged_and_responses_acknowledged(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    await adapter.send(half.from_client("a", AllowWrites()))  # nobody is connected: dropped
    await adapter.send(ConnectClient("a", client.address))
    await adapter.send(half.from_client("a", Hello("a")))
    await adapter.send(half.from_client("z", AllowWrites()))
    await worker.expect(half.tagged, nonce="a", command=Hello("a"))
    adapter.reply(half.response("a", 5))
    first = half.response("a", 5).response
    await client.expect(half.from_worker, worker=3, nonce="a", response=first, serial=6)
    await worker.expect_nothing()  # not passed before the client took it
    await adapter.send(ResponsesAcked("a", (6,)))
    await worker.expect(half.forwarded, nonce="a", serials=(6,))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(half.gone, nonce="a")
    adapter.reply(half.response("a", 6))
    await worker.expect(half.forwarded, nonce="a", serials=(7,))  # drained
    await client.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(1, 1, 0, 0)


@both_halves
async def test_commands_in_flight_of_a_displaced_connection_are_dropped(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    second = stage.probe("second")
    await adapter.send(ConnectClient("a", client.address))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(half.gone, nonce="a")
    await adapter.send(ConnectClient("b", second.address))
    await adapter.send(half.from_client("a", AllowCompaction("u1", 1 << 62)))
    await adapter.send(half.from_client("b", Hello("b")))
    await worker.expect(half.tagged, nonce="b", command=Hello("b"))
    await worker.expect_nothing()
    adapter.reply(half.response("a", 1))  # what its worker had said to it
    await worker.expect(half.forwarded, nonce="a", serials=(2,))
    await client.expect_nothing()
    await second.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(0, 1, 0, 0)


@both_halves
async def test_a_stranger_waits_for_its_client_and_is_taken_once(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    for number in range(2):
        adapter.reply(half.response("b", number))
        await worker.expect(half.forwarded, nonce="b", serials=(number + 1,))
    await adapter.send(ConnectClient("b", client.address))
    for number in range(2):
        stashed = half.response("b", number).response
        await client.expect(half.from_worker, response=stashed, serial=0)
    adapter.reply(half.response("b", 2))
    await client.expect(half.from_worker, response=half.response("b", 2).response, serial=3)
    await adapter.send(ResponsesAcked("b", (0, 0, 3)))
    await worker.expect(half.forwarded, nonce="b", serials=(3,))  # the others were passed before
    await adapter.send(ResponsesAcked("b", (0,)))
    await worker.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(3, 0, 0, 0)


@both_halves
async def test_at_the_bound_the_worker_is_not_read_and_nothing_is_lost(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half, stash=2)
    for number in range(4):
        adapter.reply(half.response("b", number))
    await worker.expect(half.forwarded, serials=(1,))
    await worker.expect(half.forwarded, serials=(2,))
    await worker.expect_nothing()
    assert await inspect(adapter) == AdapterStatistics(0, 0, 2, 2)
    await adapter.send(ConnectClient("b", client.address))
    for number in range(4):
        await client.expect(half.from_worker, response=half.response("b", number).response)


@both_halves
async def test_strangers_that_were_held_go_with_the_stash(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half, stash=1)
    for number in range(3):
        adapter.reply(half.response("x", number))
    await worker.expect(half.forwarded, nonce="x")
    await adapter.send(ConnectClient("b", client.address))
    adapter.reply(half.response("b", 7))
    await client.expect(half.from_worker, nonce="b")
    await worker.expect(half.forwarded, nonce="x")
    await worker.expect(half.forwarded, nonce="x")
    assert await inspect(adapter) == AdapterStatistics(1, 2, 0, 0)


@both_halves
async def test_a_worker_that_takes_nothing_holds_up_commands_and_loses_none(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    worker.stall()
    await adapter.send(ConnectClient("a", client.address))
    for nonce in ("first", "second"):
        await adapter.send(half.from_client("a", Hello(nonce)))
    await worker.expect_nothing()
    assert adapter.statistics().state == f"handles {half.from_client.__name__}"
    worker.resume()
    for nonce in ("first", "second"):
        await worker.expect(half.tagged, nonce="a", command=Hello(nonce))


@both_halves
@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_worker_that_is_gone_is_no_fault_of_the_adapter(
    stage: ActorIsolation, half: Half, how: str
) -> None:
    adapter, worker, client = house(stage, half)
    await adapter.send(ConnectClient("a", client.address))
    await (worker.stop() if how == "stop" else worker.crash())
    await adapter.send(half.from_client("a", AllowWrites()))
    await adapter.send(DisconnectClient("a"))
    assert await inspect(adapter) == AdapterStatistics(0, 0, 0, 0)
