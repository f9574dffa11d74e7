"""The clients of both halves: they draw commands by dice, within the rules, and check responses.

A client sends no command that the rules of commands refuse. Responses must keep the rules of
responses. `said` is its history, from which a successor may go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol import compute, storage
from actors.replica.cluster.partitioned import (
    ConnectionLimits,
    PartitionedState,
    StoragePartitioned,
)
from actors.replica.cluster.rules import CommandRules, ResponseRules
from actors.replica.cluster.storage_rules import StorageCommandRules, StorageResponseRules
from actors.replica.compute.history import ComputeHistory
from actors.replica.storage.history import StorageHistory
from actors.runtime.errors import PenstockError, RemoteProtocolError
from actors.runtime.progress import EMPTY, Frontier, ObjectId
from actors.runtime.settings import Settings
from tests.simulators.halves.checkers import require
from tests.simulators.halves.wishes import Shape, StorageWish, shapes

SETTINGS: Final = Settings()
SCHEMA: Final = TableSchema((TableColumn("k", "bigint"),))
PLAN: Final = DeltaPlan(("s",), (SCHEMA,), SCHEMA, "select k from s", "incremental", "")
SOURCES: Final = ("u1", "u2", "u3", "x1")
SINKS: Final = ("k1", "k2", "x1")
"""Ids of sinks; one id may be a source for one client and a sink for another."""
AS_OF: Final = 5
"""Time from which all shards are readable at the begin."""
FLOOD_MAX: Final = 14


class StorageClient:
    """One connection of the storage half, with the client at its end."""

    def __init__(self, nonce: str, count: int) -> None:
        self.nonce = nonce
        self.commands = StorageCommandRules(SETTINGS)
        self.responses = StorageResponseRules()
        self.parts = StoragePartitioned(count)
        self.said: list[Any] = []
        self.wish = StorageWish()
        self.shapes: dict[ObjectId, Shape] = {}
        """Id → the shape of its upper, for all objects that were ever wanted."""
        self.told: dict[ObjectId, Frontier] = {}
        self.staged: dict[str, storage.StagingResult] = {}
        self.statuses: dict[ObjectId, storage.StatusUpdate] = {}
        """Latest status of each object; of two workers' the later one counts."""

    @property
    def complete(self) -> bool:
        """Return whether InitializationComplete was sent."""
        return self.commands.complete

    def say(self, command: Any) -> list[tuple[int, Any]]:
        """Send a command, and return (worker, command) pairs; none if the rules refuse it."""
        try:
            self.commands.check(command)
        except PenstockError:
            return []
        self.said.append(command)
        self.responses.note_command(command)
        self.wish.add(command)
        if isinstance(command, storage.RunIngestion | storage.RunSink):
            self.shapes |= shapes(command.description)
        return list(self.parts.split(command))

    def hear(self, part: int, response: storage.Response) -> storage.Response | None:
        """Take a worker's response, and return the merged response to the client, if any. Raises
        `CheckerViolation`."""
        try:
            merged = self.parts.absorb(part, response)
            if merged is not None:
                self.responses.check(merged)
        except RemoteProtocolError as error:
            require(False, "rules", "{}", error)
        for id_ in self.responses.ended:
            self.commands.ended(id_)
            self.told.pop(id_, None)
        self.responses.ended.clear()
        if isinstance(merged, storage.FrontierUpper):
            self.told[merged.id] = merged.upper
        elif isinstance(merged, storage.StatusUpdate):
            known = self.statuses.get(merged.id)
            if known is None or known.time_ms <= merged.time_ms:
                self.statuses[merged.id] = merged
        elif isinstance(merged, storage.StagedBatches):
            self.staged[merged.uuid] = merged.result
        return merged

    def history(self) -> list[Any]:
        """Return the commands that a successor would send."""
        history = StorageHistory(self.said)
        history.reduce()
        return [each for each in history.commands() if not _opening(each)]

    def draw(self, dice: random.Random, clock: int) -> list[Any]:
        """Draw commands to send."""
        return [self._draw(dice)]

    def _draw(self, dice: random.Random) -> Any:
        which = dice.random()
        if which < 0.30:
            return storage.RunIngestion(_source(dice))
        if which < 0.45:
            return storage.RunSink(self._sink(dice))
        ids = self.wish.ids()
        if which < 0.58:
            return compute.AllowCompaction(dice.choice(ids or ["u1"]), EMPTY)
        if which < 0.78:
            id_ = dice.choice([*ids, "u9"])
            return compute.AllowCompaction(id_, self._allowed(dice, id_))
        if which < 0.86:
            uuid = dice.choice(("o1", "o2", "o3"))
            request = storage.ConnectorConfiguration("files", dice.choice((b"x", b"x", b"y")))
            return storage.RunOneshotIngestion(uuid, "t1", "s1", SCHEMA, request)
        if which < 0.92:
            return storage.CancelOneshotIngestion(dice.choice(("o1", "o2", "o3")))
        if which < 0.96:
            return storage.UpdateStorageConfiguration(dice.randint(1, 3))
        return compute.AllowWrites()

    def flood(self, dice: random.Random) -> list[Any]:
        """Return many commands that must be ordered."""
        return [storage.UpdateStorageConfiguration(7)] * dice.randint(4, FLOOD_MAX)

    def _sink(self, dice: random.Random) -> storage.SinkDescription:
        id_ = dice.choice(SINKS)
        kind = dice.choice(("delta", "delta", "delta", "parquet"))
        return storage.SinkDescription(
            id_,
            dice.choice((id_, id_, "other")),
            compute.ShardImport("s1", SCHEMA),
            storage.ConnectorConfiguration(kind, b"x"),
            self._allowed(dice, id_),
        )

    def _allowed(self, dice: random.Random, id_: ObjectId) -> Frontier:
        """Draw a time below which history is not needed: at most the object's reported upper."""
        told = self.told.get(id_, 0)
        return min(EMPTY - 1, dice.choice((AS_OF, told, max(AS_OF, told - 1)))) or AS_OF


def _source(dice: random.Random) -> storage.IngestionDescription:
    id_ = dice.choice(SOURCES)
    exports = [each for each in "abc" if dice.random() < 0.5]
    return storage.IngestionDescription(
        id_,
        dice.choice((id_, id_, id_, "other")),
        storage.ConnectorConfiguration("counter", dice.choice((b"x", b"x", b"x", b"x", b"y"))),
        dice.choice((f"r{id_}", f"r{id_}", f"r{id_}", f"r{id_}", "r9")),
        tuple(
            storage.IngestionExport(f"{id_}{each}", f"public.{each}", SCHEMA, f"s{id_}{each}")
            for each in exports
        ),
        storage.RetryDelays(dice.choice((None, None, 3))),
    )


class ComputeClient:
    """One connection of the compute half, with the client at its end and the cluster's rules."""

    def __init__(self, nonce: str, count: int) -> None:
        self.nonce = nonce
        self.commands = CommandRules(None, SETTINGS)
        self.cluster = CommandRules(compute.CreateInstance(count), SETTINGS)
        self.responses = ResponseRules()
        self.parts = PartitionedState(count, ConnectionLimits(SETTINGS.result_bytes_max))
        self.said: list[Any] = []
        self.exports: dict[ObjectId, compute.Export] = {}
        """Exports of all wanted dataflows."""
        self.told: dict[tuple[ObjectId, str], Frontier] = {}
        self.unanswered: dict[str, None] = {}
        self.copied: dict[ObjectId, compute.CopyResult] = {}
        self.emitted: dict[ObjectId, Frontier] = {}
        self._fresh = 0

    @property
    def complete(self) -> bool:
        """Return whether InitializationComplete was sent."""
        return self.commands.complete

    def say(self, command: Any) -> list[tuple[int, Any]]:
        """Send a command, and return (worker, command) pairs; none if the rules refuse it."""
        try:
            self.commands.check(command)
        except PenstockError:
            return []
        try:
            self.cluster.check(command)
        except PenstockError as error:
            require(False, "rules", "the cluster refuses what its client may say: {}", error)
        self.said.append(command)
        self.responses.note_command(command)
        match command:
            case compute.CreateDataflow(what):
                self.exports[what.id] = what.export
                self._forget(what.id)
            case compute.AllowCompaction(id, frontier) if frontier >= EMPTY:
                self.exports.pop(id, None)
            case compute.Peek(uuid):
                self.unanswered[uuid] = None
            case compute.CancelPeek(uuid) if not self.complete:
                self.unanswered.pop(uuid, None)
        return list(self.parts.split(command))

    def _forget(self, id_: ObjectId) -> None:
        for kind in ("write", "input", "output"):
            self.told.pop((id_, kind), None)

    def hear(self, part: int, response: compute.Response) -> compute.Response | None:
        """Take a worker's response, and return the merged response to the client, if any. Raises
        `CheckerViolation`."""
        try:
            merged = self.parts.absorb(part, response)
            for id_ in self.parts.ended:
                self.cluster.ended(id_)
            self.parts.ended.clear()
            if merged is not None:
                self.responses.check(merged)
        except RemoteProtocolError as error:
            require(False, "rules", "{}", error)
        self._take(merged)
        for id_ in self.responses.ended:
            self.commands.ended(id_)
        self.responses.ended.clear()
        return merged

    def _take(self, merged: compute.Response | None) -> None:
        match merged:
            case compute.Frontiers(id=id_):
                for kind in ("write", "input", "output"):
                    new = getattr(merged, kind)
                    if new is not None:
                        self.told[id_, kind] = new
            case compute.PeekResponse(uuid=uuid):
                self.commands.answered(uuid)
                self.cluster.answered(uuid)
                self.unanswered.pop(uuid, None)
            case compute.SubscribeResponse(id=id_, batch=batch):
                if isinstance(batch, compute.SubscribeBatch):
                    self.emitted[id_] = EMPTY if batch.error else batch.upper
            case compute.CopyToResponse(id=id_, result=result):
                self.copied[id_] = result

    def history(self) -> list[Any]:
        """Return the commands that a successor would send, without the former client's reads."""
        reads = compute.Peek | compute.CancelPeek
        history = ComputeHistory(each for each in self.said if not isinstance(each, reads))
        history.reduce()
        return [each for each in history.commands() if not _opening(each)]

    def draw(self, dice: random.Random, clock: int) -> list[Any]:
        """Draw commands to send."""
        if dice.random() < 0.35:
            what = self._dataflow(dice, clock)
            made = compute.CreateDataflow(what)
            return [made] if dice.random() < 0.3 else [made, compute.ScheduleDataflow(what.id)]
        indexes = [id_ for id_ in self.exports if id_[0] == "i"]
        if indexes and dice.random() < 0.12:  # a read, and a compaction beyond it
            id_, time = dice.choice(indexes), _about(dice, clock)
            return [self._peek(dice, id_, time), compute.AllowCompaction(id_, time + 2)]
        return [self._draw(dice, clock)]

    def _draw(self, dice: random.Random, clock: int) -> Any:
        which = dice.random()
        ids = list(self.exports)
        indexes = [id_ for id_ in ids if id_[0] == "i"]
        some = dice.choice((indexes if dice.random() < 0.5 else ids) or ["i1"])
        if which < 0.20:
            return compute.ScheduleDataflow(some)
        if which < 0.36:
            return compute.AllowCompaction(some, EMPTY)
        if which < 0.54:
            id_ = dice.choice((some, some, some, "i9"))
            return compute.AllowCompaction(id_, _about(dice, clock))
        if which < 0.80:
            return self._peek(dice, dice.choice(indexes or [some]), _about(dice, clock))
        if which < 0.90:
            uuid = dice.choice(list(self.unanswered) or ["p0"])
            return compute.CancelPeek(uuid)
        if which < 0.97:
            return compute.UpdateConfiguration(dice.choice((1000, 2000)))
        return compute.AllowWrites()

    def flood(self, dice: random.Random) -> list[Any]:
        """Return many commands that must be ordered, each by itself."""
        return [compute.AllowCompaction("i9", 7)] * dice.randint(4, FLOOD_MAX)

    def _dataflow(self, dice: random.Random, clock: int) -> compute.DataflowDescription:
        kind = dice.choice(("index", "index", "index", "view", "subscribe", "copy"))
        shard = dice.choice(("s1", "s1", "s1", "s2"))
        self._fresh += 1
        export: compute.Export
        match kind:
            case "index":
                id_, export = dice.choice(("i1", "i2", "i3")), compute.IndexExport(("k",), SCHEMA)
            case "view":
                id_, export = dice.choice(("v1", "v2")), compute.ViewExport(PLAN, "sv")
            case "subscribe":
                id_ = f"t{self.nonce}-{self._fresh}"
                export = compute.SubscribeExport(SCHEMA, snapshot=self._fresh % 2 == 0)
            case _:
                id_ = f"c{self.nonce}-{self._fresh}"
                export = compute.CopyToExport(SCHEMA, "/copies/x", "csv", 1 << 20)
        imports = (compute.ShardImport(shard, SCHEMA),)
        as_of = min(clock, _about(dice, clock))
        return compute.DataflowDescription(id_, id_, imports, export, as_of)

    def _peek(self, dice: random.Random, id_: ObjectId, time: int) -> compute.Peek:
        self._fresh += 1
        uuid = f"p{self.nonce}-{self._fresh}"
        target: compute.PeekTarget = compute.IndexTarget(id_)
        which = dice.random()
        if which < 0.15:
            target = compute.ShardTarget("t1", compute.ShardImport("s1", SCHEMA))
        elif which < 0.25:
            target = compute.LogTarget("penstock.dataflows")
        return compute.Peek(uuid, target, time)


def _about(dice: random.Random, clock: int) -> int:
    """Draw a time near the present one."""
    return max(AS_OF, clock + dice.randint(-6, 6))


def varied(history: Sequence[Any], dice: random.Random, clock: int) -> list[Any]:
    """Return a history as another client might want it: some objects left out, some altered."""
    found = []
    for command in history:
        which = dice.random()
        if which < 0.6:
            found.append(command)
        elif which < 0.8:
            found.append(_altered(command, dice, clock))
    return found


def _altered(command: Any, dice: random.Random, clock: int) -> Any:
    match command:
        case compute.CreateDataflow(what):
            if dice.random() < 0.7:
                as_of = dice.choice((what.as_of - dice.randint(1, 4), _about(dice, clock)))
                what = replace(what, as_of=max(AS_OF, as_of))
            else:
                what = replace(what, imports=(compute.ShardImport("s2", SCHEMA),))
            return compute.CreateDataflow(what)
        case storage.RunIngestion(what):
            if dice.random() < 0.5:
                return storage.RunIngestion(replace(what, remap_shard="r9"))
            return storage.RunIngestion(replace(what, exports=what.exports[1:]))
        case storage.RunSink(sink):
            # A sink of another kind begins anew: its former as_of was that of the other sink.
            other = storage.ConnectorConfiguration("parquet", b"x")
            return storage.RunSink(replace(sink, configuration=other, as_of=AS_OF))
    return command


def _opening(command: Any) -> bool:
    """Return whether each client sends the command for itself."""
    opening = compute.Hello | compute.CreateInstance | compute.InitializationComplete
    return isinstance(command, opening)


def batch_commands(commands: Sequence[Any], dice: random.Random) -> list[Any]:
    """Return commands of the compute half as its connection passes them on: some batched."""
    found: list[Any] = []
    waiting: list[Any] = []
    for command in commands:
        waiting.append(command)
        if dice.random() < 0.5:
            found.append(_lot(waiting))
            waiting = []
    return [*found, _lot(waiting)] if waiting else found


def _lot(commands: Sequence[Any]) -> Any:
    return commands[0] if len(commands) == 1 else compute.CommandBatch(tuple(commands))


Client = StorageClient | ComputeClient
Make: Final[dict[str, Callable[[str, int], Client]]] = {
    "storage": StorageClient,
    "compute": ComputeClient,
}
