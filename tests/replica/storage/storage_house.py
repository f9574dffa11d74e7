"""Descriptions and a worker's storage state to play with."""

from __future__ import annotations

from typing import Any

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    Hello,
    InitializationComplete,
    ShardImport,
)
from actors.model.protocol.internal import SequencedCommand, TaggedCommand
from actors.model.protocol.storage import (
    Command,
    ConnectorConfiguration,
    IngestionDescription,
    IngestionExport,
    RetryDelays,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
)
from actors.model.protocol.storage_internal import ForStorage, InternalCommand, ResumeState
from actors.replica.storage import events as e
from actors.replica.storage.state import StorageState
from actors.runtime.progress import EMPTY, ObjectId

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
OTHER = TableSchema((TableColumn("k", "string"),))


def source(
    id: ObjectId = "u1",
    exports: str = "",
    *,
    remap: str = "",
    name: str = "",
    retry: int | None = None,
) -> IngestionDescription:
    """A source whose exports are those letters: ``u1a`` fills the shard ``su1a``."""
    return IngestionDescription(
        id,
        name or id,
        ConnectorConfiguration("counter", b"x"),
        remap or f"r{id}",
        tuple(
            IngestionExport(f"{id}{each}", f"public.{each}", SCHEMA, f"s{id}{each}")
            for each in exports
        ),
        RetryDelays(retry),
    )


def sink(id: ObjectId = "k1", as_of: int = 5, *, kind: str = "delta") -> SinkDescription:
    return SinkDescription(
        id, id, ShardImport("s1", SCHEMA), ConnectorConfiguration(kind, b"x"), as_of
    )


def oneshot(uuid: str = "o1", collection: ObjectId = "t1") -> RunOneshotIngestion:
    return RunOneshotIngestion(
        uuid, collection, "s1", SCHEMA, ConnectorConfiguration("files", b"x")
    )


def run(*whats: IngestionDescription | SinkDescription) -> list[Command]:
    return [RunIngestion(w) if isinstance(w, IngestionDescription) else RunSink(w) for w in whats]


def drop(id: ObjectId) -> AllowCompaction:
    return AllowCompaction(id, EMPTY)


def of(kind: type[Any], effects: list[e.Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def responses(effects: list[e.Effect], kind: type[Any] = object) -> list[Any]:
    found = [effect.response for effect in of(e.SendStorageResponse, effects)]
    return [response for response in found if isinstance(response, kind)]


class Room:
    """One worker; its proposals come back at once, in their order, unless `held`."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.state = StorageState(index, count)
        self.held = False
        self.proposed: list[InternalCommand] = []
        self.nonce = ""

    def event(self, event: e.Event) -> list[e.Effect]:
        """An event, and what comes of the proposals that it leads to."""
        effects = self.state.handle(event, 77)
        self.state.validate()
        for offer in of(e.OfferStorageCommand, effects):
            assert isinstance(offer.propose.command, ForStorage)
            self.proposed.append(offer.propose.command.command)
        if not self.held:
            effects += self.order()
        return effects

    def order(self) -> list[e.Effect]:
        """Applies what was proposed."""
        effects: list[e.Effect] = []
        while self.proposed:
            effects += self.apply(self.proposed.pop(0))
        return effects

    def apply(self, command: InternalCommand) -> list[e.Effect]:
        """An internal command, wherever it comes from."""
        return self.event(SequencedCommand(self.state.next_index, 1, ForStorage(command)))

    def do(self, *commands: Command) -> list[e.Effect]:
        effects: list[e.Effect] = []
        for command in commands:
            effects += self.event(TaggedCommand(self.nonce, command, "storage"))
        return effects

    def hello(self, nonce: str) -> list[e.Effect]:
        self.nonce = nonce
        return self.do(Hello(nonce))

    def connect(self, nonce: str, *commands: Command) -> list[e.Effect]:
        return [*self.hello(nonce), *self.do(*commands, InitializationComplete())]

    def found(self, effects: list[e.Effect], resume: ResumeState | None = None) -> list[e.Effect]:
        """Answers the look-ups among the effects."""
        found: list[e.Effect] = []
        for asked in of(e.LookUp, effects):
            found += self.event(e.ResumeFound(asked.ticket, resume or ResumeState()))
        return found

    def running(self, *commands: Command) -> list[e.Effect]:
        """Commands of the client, and the start of all that they run."""
        effects = self.do(*commands)
        return effects + self.found(effects)

    @property
    def numbers(self) -> dict[ObjectId, int]:
        """By id, the number of what is rendered."""
        return {id: each.number for id, each in self.state.renderings.current.items()}
