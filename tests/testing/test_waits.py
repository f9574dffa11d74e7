"""Sends that wait form an acyclic graph: drawn from a run of the whole service, and checked."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.doors.client.client import Client
from actors.model.protocol.relations import RELATIONS
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem, ReplySlot
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine
from actors.testing.patience import PATIENCE_S
from tests.kit.waits import Edge, WaitingMailbox, by_role, cycle, drawing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "internals" / "waiting-sends.md"


@pytest.fixture
def edges(monkeypatch: pytest.MonkeyPatch) -> dict[Edge, set[str]]:
    """What the systems of this test note, from here on."""
    found: dict[Edge, set[str]] = {}
    monkeypatch.setattr(WaitingMailbox, "edges", found)
    monkeypatch.setattr(ActorSystem, "mailbox_type", WaitingMailbox)
    return found


def role(path: str) -> str:
    """Actors of one kind are one node; worker 0, which speaks to the others, is its own."""
    number = re.search(r"/worker-(\d+)", path)
    worker = "" if number is None else ("worker 0" if number[1] == "0" else "worker i")
    last = path.rsplit("/", 1)[-1]
    if path.startswith("/storage-acceptor/"):
        return "storage connection"
    if (task := re.match(r"(ingest|sink)-", last)) is not None:
        return task[1]
    if path.count("/") == 1 and worker:
        return worker
    return re.sub(r"-?[\d.]+", "", last).strip("-") or last


async def whole_service(state: Path) -> None:
    """Everything that a client can do, with two workers."""
    settings = Settings(
        state_dir=str(state),
        listen="127.0.0.1:0",
        cluster_listen="127.0.0.1:0",
        workers=2,
        hold_downgrade_ms=50,
        maintenance_ms=20,
        sink_dir=str(state / "out"),
    )
    (state / "out").mkdir(parents=True)
    numbers = itertools.count()
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.connect(service.address) as client,
    ):

        async def insert() -> int:
            return await client.insert("t", [{"k": next(numbers), "v": 1}])

        await client.create_table("t", {"k": "bigint", "v": "bigint"}, ["k"])
        await client.create_materialized_view("w", "SELECT v, count(*) AS n FROM t GROUP BY v")
        await client.create_materialized_view("x", "SELECT n FROM w WHERE n > 1")
        await client.create_index("i", "w", ["v"])
        await client.create_source("numbers", {"kind": "counter", "rate": 1_000})
        await client.create_materialized_view(
            "beside", "SELECT k FROM t JOIN numbers ON k = counter"
        )
        await client.create_sink("out", "w", "parquet", {"folder": str(state / "out" / "w")})
        await client.peek("beside")
        for _ in range(2):
            await insert()
        assert (await client.peek("x")).to_pylist() == [{"n": 2}]
        assert (await client.peek("w", key={"v": 1})).to_pylist() == [{"v": 1, "n": 2}]
        await client.explain("x")
        for relation in RELATIONS:
            await client.peek(relation)
        assert [batch.to_pylist() async for batch in client.query("SELECT sum(n) AS n FROM w")] == [
            [{"n": 2}]
        ]
        await client.status()
        await client.actors()
        stream = client.subscribe("w")
        await anext(stream)
        time = await insert()
        await client.wait_for("x", time)
        while (await anext(stream)).upper <= time:
            pass
        await stream.aclose()
        async with await Client.in_process(service) as other:
            assert (await other.peek("t")).num_rows == 3
        await client.drop_sink("out")
        for name in ("beside", "i", "x", "w", "t"):
            await client.drop(name)
        await client.drop_source("numbers")


async def test_sends_that_wait_have_no_cycle_and_are_drawn_in_the_docs(
    edges: dict[Edge, set[str]], tmp_path: Path
) -> None:
    with anyio.fail_after(60):
        await whole_service(tmp_path)
    found = by_role(edges, role)
    assert cycle(found) is None, edges
    text = PAGE.read_text()
    drawn = text.split("```mermaid\n")[1].split("\n```")[0]
    assert drawn == drawing(found), f"docs/{PAGE.name} is old. Now:\n{drawing(found)}\n{edges}"


def test_a_cycle_is_found_wherever_it_lies() -> None:
    assert cycle([("a", "b"), ("b", "c"), ("a", "c")]) is None
    assert cycle([("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")]) == ["b", "c", "d", "b"]
    assert cycle([("a", "a")]) == ["a", "a"]
    assert cycle([]) is None


class Player(Actor[Any]):
    """Sends on what it gets, in its handler or beside it."""

    def __init__(self) -> None:
        self.to: ActorAddress[Any] | None = None

    async def receive(self, message: Any) -> None:
        to = self.to
        match message:
            case ActorAddress():
                self.to = message
            case "beside":
                assert to is not None
                self.ctx.effect(lambda: to.send(0), done=lambda _: None)
            case "ask":
                assert to is not None
                await to.ask(lambda reply: reply)
            case ReplySlot():
                message.set(None)
            case int() if message:
                assert to is not None
                await to.send(message - 1)


async def test_a_ball_between_two_is_a_cycle_an_effect_and_an_answer_are_none(
    edges: dict[Edge, set[str]],
) -> None:
    async with ActorSystem() as system:
        left, right = system.spawn(Player, "left"), system.spawn(Player, "right")
        await left.send(right)
        await right.send(left)
        await left.send("beside")
        await right.ask(lambda reply: reply)
        assert not edges
        await left.send("ask")
        await left.ask(lambda reply: reply)
        assert edges == {("/left", "/right"): {"ReplySlot"}}
        await left.send(2)
        with anyio.fail_after(PATIENCE_S):
            while ("/right", "/left") not in edges:
                await anyio.lowlevel.checkpoint()
    assert cycle(edges) == ["/left", "/right", "/left"]
