"""The adapters of both halves: the rules table of nonces, and the actors between a client and a
worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.channel_adapter import (
    ChannelAdapter,
    ClientGone,
    ClientTurns,
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    InspectAdapter,
    NonceVerdict,
    ResponsesAcked,
    ResponsesForwarded,
    StashRules,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Frontiers,
    Hello,
    Response,
)
from actors.model.protocol.internal import (
    AdapterStatistics,
    AnyResponse,
    Half,
    TaggedCommand,
    TaggedResponse,
)
from actors.model.protocol.storage import FrontierUpper
from actors.runtime.errors import ResourceClosed
from actors.runtime.kernel import ReplySlot
from actors.runtime.metric_table import ADAPTER_RESPONSES
from actors.testing.isolation import ActorIsolation, SubjectActor
from actors.testing.peer_probes import PeerProbe


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

    def judge(self, tagged: TaggedResponse) -> NonceVerdict:
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


RESPONSES: dict[Half, Callable[[int], AnyResponse]] = {
    "compute": lambda number: Frontiers("v", write=number),
    "storage": lambda number: FrontierUpper("u1", number),
}


def of(half: Half, nonce: str, number: int = 0) -> TaggedResponse:
    """A response of one half."""
    return TaggedResponse(nonce, RESPONSES[half](number), number + 1)


both_halves = pytest.mark.parametrize("half", RESPONSES)


def house(
    stage: ActorIsolation, half: Half, stash: int = 10
) -> tuple[SubjectActor[Any], PeerProbe, PeerProbe]:
    """(adapter, worker, client)."""
    worker, client = stage.probe("worker"), stage.probe("client")
    adapter = stage.start(lambda: ChannelAdapter(3, worker.address, stash, half=half), "adapter")
    return adapter, worker, client


async def counts(adapter: SubjectActor[Any]) -> dict[str, Any]:
    """The statistics that are not zero."""
    statistics: AdapterStatistics = await adapter.ask(InspectAdapter)
    found = {name: value for name, value in msgspec.structs.asdict(statistics).items() if value}
    found.pop("since_ms", None)
    return found


@both_halves
async def test_commands_are_tagged_and_responses_acknowledged(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    await adapter.send(FromClient("a", AllowWrites()))  # nobody is connected: dropped
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    await adapter.send(FromClient("a", Hello("a")))
    await adapter.send(FromClient("z", AllowWrites()))
    await worker.expect(TaggedCommand, half=half, nonce="a", command=Hello("a"))
    adapter.reply(of(half, "a", 5))
    first = of(half, "a", 5).response
    await client.expect(FromWorker, worker=3, nonce="a", response=first, serial=6)
    await worker.expect_nothing()  # not passed before the client took it
    await adapter.send(ResponsesAcked("a", (6,)))
    await worker.expect(ResponsesForwarded, half=half, nonce="a", serials=(6,))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(ClientGone, half=half, nonce="a")
    adapter.reply(of(half, "a", 6))
    await worker.expect(ResponsesForwarded, half=half, nonce="a", serials=(7,))  # drained
    await client.expect_nothing()
    assert await counts(adapter) == {
        "forwarded": 1,
        "dropped": 1,
        "commands": 1,
        "commands_dropped": 2,
    }


@both_halves
async def test_commands_in_flight_of_a_displaced_connection_are_dropped(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    second = stage.probe("second")
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    await adapter.send(DisconnectClient("a"))
    await worker.expect(ClientGone, half=half, nonce="a")
    await adapter.send(ConnectClient("b", second.address, ReplySlot()))
    await adapter.send(FromClient("a", AllowCompaction("u1", 1 << 62)))
    await adapter.send(FromClient("b", Hello("b")))
    await worker.expect(TaggedCommand, half=half, nonce="b", command=Hello("b"))
    await worker.expect_nothing()
    adapter.reply(of(half, "a", 1))  # what its worker had said to it
    await worker.expect(ResponsesForwarded, half=half, nonce="a", serials=(2,))
    await client.expect_nothing()
    await second.expect_nothing()
    assert await counts(adapter) == {
        "dropped": 1,
        "commands": 1,
        "commands_dropped": 1,
        "nonce": "b",
    }


@both_halves
async def test_a_stranger_waits_for_its_client_and_is_taken_once(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    for number in range(2):
        adapter.reply(of(half, "b", number))
        await worker.expect(ResponsesForwarded, half=half, nonce="b", serials=(number + 1,))
    await adapter.send(ConnectClient("b", client.address, ReplySlot()))
    for number in range(2):
        stashed = of(half, "b", number).response
        await client.expect(FromWorker, response=stashed, serial=0)
    adapter.reply(of(half, "b", 2))
    await client.expect(FromWorker, response=of(half, "b", 2).response, serial=3)
    await adapter.send(ResponsesAcked("b", (0, 0, 3)))
    # The others were passed before.
    await worker.expect(ResponsesForwarded, half=half, nonce="b", serials=(3,))
    await adapter.send(ResponsesAcked("b", (0,)))
    await worker.expect_nothing()
    assert await counts(adapter) == {"forwarded": 1, "delivered": 2, "nonce": "b"}


@both_halves
async def test_at_the_bound_the_worker_is_not_read_and_nothing_is_lost(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half, stash=2)
    for number in range(4):
        adapter.reply(of(half, "b", number))
    await worker.expect(ResponsesForwarded, half=half, serials=(1,))
    await worker.expect(ResponsesForwarded, half=half, serials=(2,))
    await worker.expect_nothing()
    assert await counts(adapter) == {"stashed": 2, "holding": 2}
    await adapter.send(ConnectClient("b", client.address, ReplySlot()))
    for number in range(4):
        await client.expect(FromWorker, response=of(half, "b", number).response)
    adapter.reply(of(half, "a"))
    assert (await counts(adapter))["stashed"] == 1
    measured = {
        each.labels: each.value
        for each in stage.system.measures()
        if each.metric is ADAPTER_RESPONSES
    }
    assert measured == {
        (half, "forward"): 2,
        (half, "deliver"): 2,
        (half, "drop"): 0,
        (half, "stash"): 3,
        (half, "hold"): 2,
    }


@both_halves
async def test_strangers_that_were_held_go_with_the_stash(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half, stash=1)
    for number in range(3):
        adapter.reply(of(half, "x", number))
    await worker.expect(ResponsesForwarded, half=half, nonce="x")
    await adapter.send(ConnectClient("b", client.address, ReplySlot()))
    adapter.reply(of(half, "b", 7))
    await client.expect(FromWorker, nonce="b")
    await worker.expect(ResponsesForwarded, half=half, nonce="x")
    await worker.expect(ResponsesForwarded, half=half, nonce="x")
    assert await counts(adapter) == {"forwarded": 1, "dropped": 3, "nonce": "b"}


@both_halves
async def test_a_worker_that_takes_nothing_holds_up_commands_and_loses_none(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    worker.stall()
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    for nonce in ("first", "second"):
        await adapter.send(FromClient("a", Hello(nonce)))
    await worker.expect_nothing()
    assert adapter.statistics().state == "handles FromClient"
    worker.resume()
    for nonce in ("first", "second"):
        await worker.expect(TaggedCommand, half=half, nonce="a", command=Hello(nonce))


@both_halves
@pytest.mark.parametrize("how", ["stop", "crash"])
async def test_a_worker_that_is_gone_is_no_fault_of_the_adapter(
    stage: ActorIsolation, half: Half, how: str
) -> None:
    adapter, worker, client = house(stage, half)
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    await (worker.stop() if how == "stop" else worker.crash())
    await adapter.send(FromClient("a", AllowWrites()))
    await adapter.send(DisconnectClient("a"))
    assert await counts(adapter) == {"commands": 1}


# -- clients that arrive and leave in any order ----------------------------------------------------


@both_halves
async def test_a_client_waits_until_its_predecessor_has_left(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    second = stage.probe("second")
    await adapter.send(ConnectClient("a", client.address, ReplySlot()))
    served = ReplySlot[None]()
    await adapter.send(ConnectClient("b", second.address, served))
    await stage.idle()
    assert not served.future.done()
    # Its worker has heard of it already.
    adapter.reply(of(half, "b", 1))
    await worker.expect(ResponsesForwarded, half=half, nonce="b", serials=(2,))
    await second.expect_nothing()
    adapter.reply(of(half, "a", 1))
    await client.expect(FromWorker, nonce="a")
    await adapter.send(FromClient("a", AllowWrites()))
    await worker.expect(TaggedCommand, half=half, nonce="a")
    assert (await counts(adapter))["waiting"] == 1
    await adapter.send(DisconnectClient("a"))
    await worker.expect(ClientGone, half=half, nonce="a")
    await served.future
    await adapter.send(FromClient("a", AllowWrites()))  # late: it never reaches the worker
    await adapter.send(FromClient("b", Hello("b")))
    await worker.expect(TaggedCommand, half=half, nonce="b", command=Hello("b"))
    await worker.expect_nothing()


@both_halves
async def test_a_client_that_left_before_it_arrived_is_never_served(
    stage: ActorIsolation, half: Half
) -> None:
    adapter, worker, client = house(stage, half)
    await adapter.send(DisconnectClient("a"))
    late, waited = ReplySlot[None](), ReplySlot[None]()
    await adapter.send(ConnectClient("a", client.address, late))
    with pytest.raises(ResourceClosed, match="client a has left"):
        await late.future
    await adapter.send(ConnectClient("b", client.address, ReplySlot()))
    await adapter.send(ConnectClient("c", client.address, waited))
    await adapter.send(DisconnectClient("c"))
    with pytest.raises(ResourceClosed, match="client c has left"):
        await waited.future
    await worker.expect_nothing()
    assert await counts(adapter) == {"nonce": "b"}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=30))
def test_one_client_is_served_at_a_time_and_each_at_most_once(
    events: list[tuple[bool, int]],
) -> None:
    turns = ClientTurns()
    arrived: list[str] = []
    left: list[str] = []
    served: list[str] = []
    for arrives, number in events:
        nonce = f"n{number}"
        if arrives and nonce not in arrived:
            arrived.append(nonce)
            found = turns.arrive(nonce)
        elif not arrives and nonce not in left:
            left.append(nonce)
            assert turns.leave(nonce) is (nonce in served and nonce in arrived)
            found = turns.next()
        else:
            continue
        turns.validate()
        if found is not None:
            served.append(found)
        present = [each for each in arrived if each not in left]
        assert turns.served == (present[0] if present else None)
        assert turns.waiting == max(0, len(present) - 1)
    assert served == [each for each in served if each in arrived]
    assert len(set(served)) == len(served)
