"""The outbox: bounded, in order, coalesced; receipts come back exactly once."""

from __future__ import annotations

from actors.model.protocol.compute import (
    Frontiers,
    PeekCanceled,
    PeekResponse,
    PeekRows,
    StatusResponse,
    SubscribeBatch,
    SubscribeResponse,
)
from actors.replica.compute.outbox import ResponseOutbox


def outbox(messages: int = 4, size: int = 1000) -> ResponseOutbox[str]:
    box: ResponseOutbox[str] = ResponseOutbox(messages, size)
    box.switch("n1")
    return box


def batch(lower: int, arrow: bytes | None = None) -> SubscribeResponse:
    return SubscribeResponse("s", SubscribeBatch(lower, lower + 1, arrow))


def test_the_window_closes_and_opens() -> None:
    box = outbox(messages=2)
    for n in range(5):
        box.push(PeekResponse(f"p{n}", PeekCanceled()))
    assert [serial for serial, _ in box.take()] == [1, 2]
    assert box.take() == []
    box.acknowledge("n1", [2])
    assert box.take() == [(3, PeekResponse("p2", PeekCanceled()))]
    box.acknowledge("other", [1, 3])
    assert box.take() == []
    box.acknowledge("n1", [1, 2, 3, 99])
    assert len(box.take()) == 2
    assert len(box) == 0


def test_bytes_close_the_window_but_one_response_always_goes() -> None:
    box = outbox(size=10)
    box.push(PeekResponse("a", PeekRows(bytes(50))))
    box.push(PeekResponse("b", PeekRows(bytes(50))))
    assert len(box.take()) == 1
    assert box.take() == []
    box.acknowledge("n1", [1])
    assert len(box.take()) == 1


def test_what_waits_is_merged() -> None:
    box = outbox(messages=1)
    box.push(PeekResponse("a", PeekCanceled()))
    box.take()
    for time in range(1000):
        box.push(Frontiers("v", write=time))
        box.push(Frontiers("v", output=time))
        box.push(StatusResponse("v", "running", steps=time))
    assert len(box) == 2
    box.acknowledge("n1", [1])
    assert box.take() == [(2, Frontiers("v", write=999, output=999))]
    box.acknowledge("n1", [2])
    assert box.take() == [(3, StatusResponse("v", "running", steps=999))]


def test_batches_are_never_merged_and_give_their_receipts_once() -> None:
    box = outbox(messages=2)
    for n in range(3):
        box.push(batch(n), f"r{n}")
    assert box.take() == [(1, batch(0)), (2, batch(1))]
    assert box.acknowledge("n1", [2]) == ["r1"]
    assert box.acknowledge("n1", [2]) == []
    assert box.switch("n2") == ["r0", "r2"]
    assert box.acknowledge("n1", [1]) == []
    assert box.take() == []
    assert box.switch(None) == []
