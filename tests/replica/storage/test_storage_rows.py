"""What the storage half of a worker tells of itself, as rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from storage_house import (  # type: ignore[import-not-found]
    oneshot,
    run,
    sink,
    source,
)

from actors.connectors.ingest_task import IngestRunning
from actors.connectors.sinks.messages import SinkProgress
from actors.connectors.sinks.sink import SinkStatistics
from actors.connectors.storage_connectors import StorageConnectors
from actors.model.protocol.compute import AllowWrites, Hello, InitializationComplete
from actors.model.protocol.internal import ProposeCommand, SequencedCommand, TaggedCommand
from actors.model.protocol.relations import relation_of
from actors.model.protocol.storage import Command
from actors.model.protocol.storage_internal import ResumeState
from actors.replica.storage import events as e
from actors.replica.storage.half import StorageHalf, StorageTurn
from actors.runtime.kernel import Actor
from actors.runtime.settings import Settings


class Silent(Actor[Any]):
    """A task that does nothing."""

    async def receive(self, message: Any) -> None:
        raise AssertionError(message)


class Half:
    """The only worker's storage half; what it proposes comes back at once."""

    def __init__(self) -> None:
        self.proposed: list[ProposeCommand] = []
        look_ups = SimpleNamespace(cancel=lambda: None)
        ctx: Any = SimpleNamespace(
            now_ms=lambda: 0,
            monotonic_ms=lambda: 0.0,
            effect=lambda *_, **__: look_ups,
            spawn=lambda make, name, policy: SimpleNamespace(reply=lambda message: True),
            watch=lambda *_: None,
            after=lambda *_: None,
            self=None,
        )
        nobody: Any = SimpleNamespace(reply=lambda message: True)
        connectors = StorageConnectors(lambda *_: None, lambda *_: Silent(), Path(), lambda _: None)  # type: ignore[arg-type, return-value]
        persist: Any = None
        self.half = StorageHalf(
            ctx, 0, [nobody], self._propose, [nobody], persist, Settings(), connectors
        )

    async def _propose(self, propose: ProposeCommand) -> None:
        self.proposed.append(propose)

    async def do(self, *commands: Command) -> None:
        for command in commands:
            await self.half.receive(TaggedCommand("a", command, "storage"))
            await self.order()

    async def order(self) -> None:
        while self.proposed:
            propose = self.proposed.pop(0)
            next_index = self.half.state.next_index
            await self.half.receive(
                SequencedCommand(next_index, propose.generation, propose.command)
            )

    async def found(self, ticket: int) -> None:
        await self.half.receive(StorageTurn(e.ResumeFound(ticket, ResumeState())))
        await self.order()

    def rows(self, name: str) -> list[dict[str, Any]]:
        names = relation_of(f"penstock.{name}").schema.names[1:]
        return [dict(zip(names, row, strict=True)) for row in self.half.rows(name)]


async def test_what_is_rendered_before_writes_are_allowed_is_told() -> None:
    half = Half()
    await half.do(Hello("a"), *run(source("u1", "a"), sink("k1")), oneshot("o1"))
    await half.do(InitializationComplete())
    await half.found(1)

    def told() -> dict[str, tuple[str, bool]]:
        return {row["id"]: (row["state"], row["scheduled"]) for row in half.rows("dataflows")}

    assert told() == dict.fromkeys(("u1", "k1", "o1"), ("suspended", False))
    await half.do(AllowWrites())
    assert told() == dict.fromkeys(("u1", "k1", "o1"), ("running", True))


async def test_frontiers_of_sources_have_the_names_of_objects_and_those_of_sinks_their_lag() -> (
    None
):
    half = Half()
    what = source("u1", "ab")
    first, second = what.exports
    what = msgspec.structs.replace(
        what, exports=(msgspec.structs.replace(first, name="sales"), second)
    )
    await half.do(Hello("a"), *run(what, sink("k1")), InitializationComplete(), AllowWrites())
    await half.found(1)
    numbers = {id_: each.number for id_, each in half.half.state.renderings.current.items()}
    uppers = (("public.a", 8), ("public.b", 0))
    await half.half.receive(IngestRunning("u1", numbers["u1"], 9, uppers, ()))
    await half.half.receive(SinkProgress("k1", numbers["k1"], 20, SinkStatistics(), 50))
    rows = half.rows("frontiers")
    assert [row["name"] for row in rows if row["id"] != "k1"] == ["u1", "sales", "public.b"]
    told = {
        row["id"]: tuple(row[name] for name in ("input", "write", "output", "lag_ms"))
        for row in rows
    }
    assert told == {
        "u1": (None, 9, 9, None),
        "u1a": (None, 8, 8, None),
        "u1b": (None, None, None, None),
        "k1": (50, 20, 20, 30),
    }
