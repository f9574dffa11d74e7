"""Messages encoded on their way: what is copied, what is carried, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest
from test_waits import whole_service  # type: ignore[import-not-found]

from actors.runtime.errors import InvalidUsage, LeaseLost
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem, BoundedMailbox, ReplySlot
from actors.testing import encoding
from actors.testing.encoding import (
    BY_REFERENCE,
    NotEncodable,
    carry_by_reference,
    encode_all,
    encode_and_decode,
)
from actors.testing.isolation import ActorIsolation


class Inner(msgspec.Struct, frozen=True):
    rows: list[int]


class Holder(msgspec.Struct, frozen=True):
    inner: Inner
    table: pa.Table
    error: Exception
    to: Any


class Handle:
    """Lives in one place."""


class Taker(Actor[Any]):
    """Spoils what it is sent."""

    def receive(self, message: Any) -> None:
        message.inner.rows.append(99)
        if isinstance(message.to, ReplySlot):
            message.to.set(message.inner)


def holder(to: Any) -> Holder:
    error = LeaseLost("the lease is gone", determinate=True)
    return Holder(Inner([1, 2]), pa.table({"a": [1, None], "b": ["x", "y"]}), error, to)


def test_data_are_copied_and_ways_to_speak_are_carried() -> None:
    address: ActorAddress[Any] = ActorAddress(BoundedMailbox("/x", 1))
    sent = holder((address, print, Holder))
    got = encode_and_decode(sent)
    assert got is not sent
    assert got.inner == sent.inner
    assert got.inner.rows is not sent.inner.rows
    assert got.table.equals(sent.table)
    assert got.table.column(0).chunk(0).buffers()[1].address != _address(sent.table)
    assert got.to[0] is address
    assert got.to[1:] == (print, Holder)
    assert (type(got.error), str(got.error)) == (LeaseLost, "the lease is gone")
    assert got.error.determinate  # type: ignore[attr-defined]
    assert got.error is not sent.error


def _address(table: pa.Table) -> int:
    address: int = table.column(0).chunk(0).buffers()[1].address
    return address


def test_what_is_neither_data_nor_a_handle_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NotEncodable, match=r"Holder holds.*Handle is not data"):
        encode_and_decode(holder(Handle()))
    monkeypatch.setattr(encoding, "BY_REFERENCE", [*BY_REFERENCE])
    carry_by_reference(Handle)
    handle = Handle()
    assert encode_and_decode(holder(handle)).to is handle


async def test_a_receiver_that_spoils_a_message_spoils_its_own(stage: ActorIsolation) -> None:
    async with ActorIsolation(encoded=True) as apart:
        for way in ("send", "send_nowait", "reply"):
            taker, sent = apart.start(Taker, way), holder(None)
            result = getattr(taker, way)(sent)
            if way == "send":
                await result
            await apart.idle()
            assert taker.statistics().received == 1
            assert sent.inner.rows == [1, 2]


@pytest.fixture
def all_encoded() -> Iterator[None]:
    """In this mode as long as the test lasts, and in the mode of the suite after it."""
    before = ActorSystem.mailbox_type is not BoundedMailbox
    encode_all(True)
    yield
    encode_all(before)


async def test_answers_are_encoded_too(all_encoded: None) -> None:
    async with ActorSystem() as system:
        kept = Inner([1])

        class Giver(Actor[Any]):
            def receive(self, message: Any) -> None:
                message.set(kept)

        giver: ActorAddress[Any] = system.spawn(Giver, "giver")
        got = await giver.ask(lambda reply: reply)
        assert got == kept
        assert got is not kept
        with pytest.raises(InvalidUsage, match="as it is"):
            await system.spawn(Refuser, "refuser").ask(lambda reply: reply)


class Refuser(Actor[Any]):
    """Fails what it is asked."""

    def receive(self, message: Any) -> None:
        message.fail(InvalidUsage("as it is"))


async def test_the_whole_service_shares_nothing(
    all_encoded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of what ``pytest --messages-encoded`` runs with all tests."""
    kinds: Counter[str] = Counter()

    def encoded(message: Any) -> Any:
        kinds[type(message).__name__] += 1
        return encode_and_decode(message)

    monkeypatch.setattr(encoding, "encode_and_decode", encoded)
    with anyio.fail_after(60):
        await whole_service(tmp_path)
    # Of clients, of both halves and of the engine, and answers to asks.
    assert kinds.keys() >= {"SubmitRequest", "TaggedCommand", "SubmitJob"}
    assert kinds.keys() >= {"TaggedResponse", "PartFetched", "RowsDone", "WorkerStatistics"}
