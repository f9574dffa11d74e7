"""What a cluster may answer, and what a checked client makes of either side's mistakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    ConnectionRefused,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToResponse,
    CreateDataflow,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekResponse,
    PeekRows,
    Response,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
)
from actors.replica.cluster.checked import CheckedClient
from actors.replica.cluster.rules import ResponseRules
from actors.runtime.errors import LocalProtocolError, RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from cluster_house import copy, index, subscribe  # type: ignore[import-not-found]

START: list[Command] = [
    Hello("a"),
    CreateInstance(2),
    CreateDataflow(index("i1", 5)),
    CreateDataflow(subscribe("t1", 5)),
    CreateDataflow(copy("c1", 5)),
    InitializationComplete(),
]
DROPS: list[Command] = [AllowCompaction("i1", EMPTY), AllowCompaction("t1", EMPTY)]
PEEK = Peek("p", IndexTarget("i1"), 6)
ROWS = PeekResponse("p", PeekRows(b"", 0))
CANCELED = PeekResponse("p", PeekCanceled())
Said = list[Command | Response]


def batch(lower: int, upper: int, **fields: Any) -> SubscribeResponse:
    return SubscribeResponse("t1", SubscribeBatch(lower, upper, **fields))


def dropped(frontier: int) -> SubscribeResponse:
    return SubscribeResponse("t1", SubscribeDropped(frontier))


def talk(*said: Command | Response) -> ResponseRules:
    rules = ResponseRules()
    for message in (*START, *said):
        if isinstance(message, Response):
            rules.check(message)
        else:
            rules.note_command(message)
    return rules


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        ([Frontiers("i1", 5), Frontiers("i1", 6, 6), Frontiers("i1", None, 7, 5)], []),
        ([*DROPS, Frontiers("i1", 9), Frontiers("i1", EMPTY, EMPTY, EMPTY)], ["i1"]),
        ([PEEK, ROWS, PEEK, ROWS], []),
        ([PEEK, CancelPeek("p"), CANCELED], []),
        ([PEEK, CancelPeek("p"), ROWS], []),
        ([batch(0, 6), batch(6, 9), *DROPS, dropped(9)], ["t1"]),
        ([*DROPS, dropped(0)], ["t1"]),
        ([batch(0, 6), batch(6, EMPTY)], ["t1"]),
        ([CopyToResponse("c1", CopyDone(1, 1, "m"))], ["c1"]),
        ([AllowCompaction("c1", EMPTY), CopyToResponse("c1", CopyDropped())], ["c1"]),
        ([AllowCompaction("c1", EMPTY), CopyToResponse("c1", CopyDone(1, 1, "m"))], ["c1"]),
        ([StatusResponse("unknown", "x"), ConnectionRefused("ResourceClosed", "over")], []),
    ],
)
def test_what_may_come(said: Said, ended: list[str]) -> None:
    assert talk(*said).ended == ended


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([Frontiers("i2", 5)], "i2, which this connection does not know"),
        ([Frontiers("i1", 4)], "below its as_of 5"),
        ([Frontiers("i1", 7), Frontiers("i1", 6)], "did not advance: from 7 to 6"),
        ([Frontiers("i1", 7), Frontiers("i1", 7)], "did not advance"),
        ([Frontiers("i1", EMPTY), Frontiers("i1", EMPTY)], "did not advance"),
        ([Frontiers("t1", 7)], "which is a subscribe"),
        (
            [*DROPS, Frontiers("i1", EMPTY, EMPTY, EMPTY), Frontiers("i1", 7)],
            "i1, which this connection does not know",
        ),
        ([ROWS], "answered twice, or was never sent"),
        ([PEEK, ROWS, ROWS], "answered twice, or was never sent"),
        ([PEEK, CANCELED], "but was not canceled"),
        ([batch(0, 6), batch(7, 9)], "is at 6, but its next batch is"),
        ([batch(6, 6)], "an empty interval"),
        ([batch(0, 5)], "does not cover its as_of 5"),
        ([batch(0, EMPTY), batch(EMPTY, EMPTY + 1)], "after its end"),
        ([batch(0, 6, error=("X", "x")), batch(6, 7)], "after its end"),
        ([dropped(0)], "but was not dropped"),
        ([batch(0, 6), *DROPS, dropped(7)], "its last batch ended at 6"),
        ([*DROPS, dropped(0), batch(0, 6)], "t1, which this connection does not know"),
        ([SubscribeResponse("i1", SubscribeBatch(0, 6))], "i1, which is not a subscribe"),
        ([CopyToResponse("t1", CopyDropped())], "t1 is not a copy"),
        (
            [CopyToResponse("c1", CopyFailed("X", "x"))] * 2,
            "c1 is not a copy, or was already answered",
        ),
        ([CopyToResponse("c2", CopyFailed("X", "x"))], "c2, which this connection does not know"),
        ([Frontiers("c1", 7)], "a subscribe or a copy"),
    ],
)
def test_what_may_not(said: Said, text: str) -> None:
    talk(*said[:-1])
    with pytest.raises(RemoteProtocolError, match=text):
        talk(*said)


def test_nothing_comes_before_the_initialization_is_complete() -> None:
    assert START[-1] == InitializationComplete()
    rules = ResponseRules()
    for command in START[:-1]:
        rules.note_command(command)
        for response in (StatusResponse("i1", "x"), Frontiers("i1", 6), batch(0, 6)):
            with pytest.raises(RemoteProtocolError, match="before InitializationComplete"):
                rules.check(response)
        rules.check(ConnectionRefused("ResourceClosed", "this may be said at any time"))
    rules.note_command(START[-1])
    rules.check(batch(0, 6))


@pytest.mark.parametrize("snapshot", [True, False])
def test_the_first_batch_says_what_it_covers(snapshot: bool) -> None:
    """Of a subscribe as of 5: the contents at 5 are in it, or it begins behind them."""

    def first(lower: int, upper: int, error: tuple[str, str] | None = None) -> None:
        rules = ResponseRules()
        rules.note_command(Hello("a"))
        rules.note_command(CreateDataflow(subscribe("t2", 5, snapshot)))
        rules.note_command(InitializationComplete())
        rules.check(SubscribeResponse("t2", SubscribeBatch(lower, upper, None, error)))

    right, wrong = (0, 6) if snapshot else (6, 0)
    first(right, 9)
    first(0, 6, ("ViewInError", "division by zero"))
    with pytest.raises(RemoteProtocolError, match=f"must start at {right}"):
        first(wrong, 9)
    with pytest.raises(RemoteProtocolError, match="must start at"):
        first(3, 9, ("ViewInError", "division by zero"))
    with pytest.raises(RemoteProtocolError, match="does not cover its as_of 5"):
        first(0, 5)


def test_a_subscribe_that_has_gone_on_begins_where_its_client_is() -> None:
    """Compacted in the replayed history: it was told all up to there, and needs no snapshot."""
    for allowed, begin in ((3, 0), (8, 9)):
        rules = ResponseRules()
        for command in (*START[:-1], AllowCompaction("t1", allowed), START[-1]):
            rules.note_command(command)
        with pytest.raises(RemoteProtocolError, match=f"must start at {begin}"):
            rules.check(batch(begin + 1, 12))
        rules.check(batch(begin, 12))
        rules.note_command(AllowCompaction("t1", 10))


def test_nothing_is_remembered_of_what_is_over() -> None:
    end = Frontiers("i1", EMPTY, EMPTY, EMPTY)
    over: Said = [AllowCompaction("c1", EMPTY), CopyToResponse("c1", CopyDropped())]
    rules = talk(PEEK, ROWS, *DROPS, end, batch(0, 6), dropped(6), *over)
    assert rules.ended == ["i1", "t1", "c1"]
    assert not rules._objects
    assert not rules._peeks


class Script:
    """A cluster's end that says what it was told to."""

    def __init__(self, *says: Response) -> None:
        self.says = deque(says)
        self.sent: list[Command] = []
        self.closed = False
        self.room = 0

    async def send(self, command: Any) -> None:
        self.sent.append(command)

    def try_send(self, commands: Sequence[Any]) -> int:
        taken = commands[: self.room]
        self.room -= len(taken)
        self.sent.extend(taken)
        return len(taken)

    async def receive(self) -> Response:
        return self.says.popleft()

    def receive_nowait(self, count_max: int) -> list[Response]:
        return [self.says.popleft() for _ in range(min(count_max, len(self.says)))]

    async def close(self) -> None:
        self.closed = True


async def test_what_may_not_be_said_is_not_sent_and_the_conversation_goes_on() -> None:
    inner = Script(ROWS, Frontiers("i1", EMPTY, EMPTY, EMPTY))
    client = CheckedClient(inner, Settings())
    with pytest.raises(LocalProtocolError, match="before Hello"):
        await client.send(PEEK)
    for command in (*START, PEEK):
        await client.send(command)
    with pytest.raises(LocalProtocolError, match="peek p is still pending"):
        await client.send(PEEK)
    assert await client.receive() == ROWS
    await client.send(PEEK)
    await client.send(DROPS[0])
    with pytest.raises(LocalProtocolError, match="end has not been reported yet"):
        await client.send(START[2])
    await client.receive()
    await client.send(START[2])
    assert inner.sent == [*START, PEEK, PEEK, DROPS[0], START[2]]
    await client.close()
    assert inner.closed


async def test_a_response_that_breaks_a_rule_ends_the_conversation() -> None:
    inner = Script(ROWS, StatusResponse("i1", "x"))
    client = CheckedClient(inner, Settings())
    for command in START:
        await client.send(command)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="never sent"):
            await client.receive()
    with pytest.raises(RemoteProtocolError, match="never sent"):
        await client.send(PEEK)
    assert inner.closed


async def test_what_finds_no_room_is_judged_once() -> None:
    inner = Script()
    client = CheckedClient(inner, Settings())
    commands = [*START, PEEK, DROPS[0]]
    inner.room = 2
    assert client.try_send(commands) == 2
    assert client.try_send(commands[2:]) == 0
    await client.send(commands[2])
    inner.room = 100
    with pytest.raises(LocalProtocolError, match="already exists"):
        client.try_send(commands[2:])
    assert client.try_send(commands[3:]) == len(commands) - 3
    other = Peek("q", IndexTarget("i1"), 6)
    assert client.try_send([AllowWrites(), other, other]) == 2, "up to what may not be said"
    with pytest.raises(LocalProtocolError, match="peek q is still pending"):
        client.try_send([other])
    assert inner.sent == [*commands, AllowWrites(), other]


async def test_a_response_among_those_at_hand_that_breaks_a_rule() -> None:
    inner = Script(ROWS, StatusResponse("i1", "x"), ROWS, StatusResponse("i1", "y"))
    client = CheckedClient(inner, Settings())
    for command in (*START, PEEK):
        await client.send(command)
    assert await client.receive() == ROWS
    assert client.receive_nowait(10) == [StatusResponse("i1", "x")]
    assert client.receive_nowait(10) == []
    with pytest.raises(RemoteProtocolError, match="answered twice"):
        await client.receive()
    assert inner.closed
