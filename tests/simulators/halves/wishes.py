"""Oracles of the clients' desired state, which share no code with the halves' own.

`StorageWish` adds up one client's commands. `StorageTruth` gets the storage commands that worker 0
gets, and derives from them the objects that must run. `ComputeTruth` gets the compute commands in
the one order, and derives each dataflow's number from them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.model.protocol import compute, storage
from actors.runtime.progress import EMPTY, Frontier, ObjectId

Shape: TypeAlias = tuple[str, ...]
"""Owner of an upper: a shard, or an external system."""
Running: TypeAlias = storage.IngestionDescription | storage.SinkDescription


def shapes(what: Running) -> dict[ObjectId, Shape]:
    """Return, by id, the owners of the uppers of a source and its exports, or of a sink."""
    if isinstance(what, storage.SinkDescription):
        made = what.configuration
        return {what.id: ("sink", what.input.shard, made.kind, repr(made.encoded))}
    found: dict[ObjectId, Shape] = {what.id: ("remap", what.remap_shard)}
    return found | {each.id: ("export", each.shard) for each in what.exports}


def without(what: storage.IngestionDescription, export: ObjectId) -> storage.IngestionDescription:
    """Return the source without one of its exports."""
    kept = tuple(each for each in what.exports if each.id != export)
    return msgspec.structs.replace(what, exports=kept)


def fits(old: Running, new: Running) -> bool:
    """Return whether a running object may be updated to that description."""
    if isinstance(old, storage.SinkDescription):
        return (
            isinstance(new, storage.SinkDescription)
            and old.configuration == new.configuration
            and old.input == new.input
        )
    if not isinstance(new, storage.IngestionDescription):
        return False
    before = {each.id: each for each in old.exports}
    return (
        old.configuration == new.configuration
        and old.remap_shard == new.remap_shard
        and all(before.get(each.id, each) == each for each in new.exports)
    )


def timeless(what: Running) -> Running:
    """Return the description without a sink's `as_of`, which advances by itself and is compared
    apart."""
    if isinstance(what, storage.SinkDescription):
        return msgspec.structs.replace(what, as_of=0)
    return what


class StorageWish:
    """The sum of one client's commands, which keep the rules of commands."""

    def __init__(self) -> None:
        self.objects: dict[ObjectId, Running] = {}
        self.oneshots: dict[str, storage.RunOneshotIngestion] = {}
        self.allowed: dict[ObjectId, Frontier] = {}

    def add(self, command: storage.Command) -> None:
        """Add one command."""
        match command:
            case storage.RunIngestion(description) | storage.RunSink(description):
                self.objects[description.id] = description
            case storage.RunOneshotIngestion(uuid=uuid):
                self.oneshots.setdefault(uuid, command)
            case storage.CancelOneshotIngestion(uuid=uuid):
                self.oneshots.pop(uuid, None)
            case compute.AllowCompaction(id, frontier):
                if frontier >= EMPTY:
                    drop(self.objects, id)
                else:
                    self.allowed[id] = max(frontier, self.allowed.get(id, 0))

    def ids(self) -> list[ObjectId]:
        """Return the ids of all wanted objects, exports included."""
        return [id_ for what in self.objects.values() for id_ in shapes(what)]


def drop(objects: dict[ObjectId, Running], id_: ObjectId) -> None:
    """Remove a source with its exports, an export, or a sink."""
    if objects.pop(id_, None) is not None:
        return
    for source, what in objects.items():
        if isinstance(what, storage.IngestionDescription) and id_ in what.ids:
            objects[source] = without(what, id_)
            return


class StorageTruth:
    """The objects of the storage half that must run, by worker 0's commands."""

    def __init__(self) -> None:
        self.nonce = ""
        self.complete = False
        self.wish = StorageWish()
        self.running: dict[ObjectId, Running] = {}

    def hear(self, nonce: str, command: storage.Command) -> None:
        """Take a command that arrives at worker 0, of the present client or another one."""
        if isinstance(command, compute.Hello):
            self.nonce, self.complete, self.wish = nonce, False, StorageWish()
        elif nonce == self.nonce:
            known = set(self.wish.ids())
            self.wish.add(command)
            if isinstance(command, compute.InitializationComplete):
                self.complete = True
                self.running = {id_: self.running[id_] for id_ in self.running if id_ in self._all}
                for what in self._all.values():
                    self._run(what)
            elif self.complete:
                self._follow(command, known)

    @property
    def _all(self) -> dict[ObjectId, Running]:
        return self.wish.objects

    def _run(self, new: Running) -> None:
        old = self.running.get(new.id)
        if old is None or fits(old, new):
            self.running[new.id] = new

    def _follow(self, command: storage.Command, known: set[ObjectId]) -> None:
        match command:
            case storage.RunIngestion(description) | storage.RunSink(description):
                self._run(description)
            case compute.AllowCompaction(id, frontier) if frontier >= EMPTY and id in known:
                drop(self.running, id)

    def ids(self) -> set[ObjectId]:
        """Return the ids of all running objects, exports included."""
        return {id_ for what in self.running.values() for id_ in shapes(what)}


class ExpectedDataflow(msgspec.Struct):
    """One dataflow, by the commands of the one order."""

    number: int
    description: compute.DataflowDescription
    allowed: Frontier
    scheduled: bool = False


_ONCE: Final = (compute.SubscribeExport, compute.CopyToExport)


class ComputeTruth:
    """The dataflows of the compute half that must be rendered, by the one order."""

    def __init__(self) -> None:
        self.nonce = ""
        self.incoming: list[compute.Command] | None = None
        self.flows: dict[ObjectId, ExpectedDataflow] = {}
        self.numbers: dict[int, ObjectId] = {}
        """Number → id, of all dataflows that ever were."""
        self.dropped: set[int] = set()
        self.writes = False

    def order(self, command: compute.Command) -> None:
        """Take the next command of the compute half in the one order."""
        if isinstance(command, compute.Hello):
            self.nonce, self.incoming = command.nonce, []
        elif self.incoming is None:
            if self.nonce:
                self._apply(command)
        elif isinstance(command, compute.InitializationComplete):
            said, self.incoming = self.incoming, None
            self._reconcile(said)
        else:
            self.incoming.append(command)

    def _apply(self, command: compute.Command) -> None:
        match command:
            case compute.CreateDataflow(what) if what.id not in self.flows:
                number = len(self.numbers) + 1
                self.numbers[number] = what.id
                self.flows[what.id] = ExpectedDataflow(number, what, what.as_of)
            case compute.ScheduleDataflow(id) if id in self.flows:
                self.flows[id].scheduled = True
            case compute.AllowCompaction(id, frontier) if id in self.flows:
                flow = self.flows[id]
                flow.allowed = max(flow.allowed, frontier)
                if frontier >= EMPTY:
                    self.dropped.add(flow.number)
                    del self.flows[id]
            case compute.AllowWrites():
                self.writes = True

    def _reconcile(self, said: list[compute.Command]) -> None:
        wanted = ComputeTruth()
        wanted.nonce = self.nonce
        for command in said:
            wanted._apply(command)
        kept: dict[ObjectId, ExpectedDataflow] = {}
        for id_, flow in self.flows.items():
            new = wanted.flows.get(id_)
            if new is not None and _serves(flow, new):
                flow.allowed = new.allowed
                flow.scheduled |= new.scheduled
                kept[id_] = flow
            else:
                self.dropped.add(flow.number)
        self.flows = kept
        for id_, new in wanted.flows.items():
            if id_ not in kept:
                number = len(self.numbers) + 1
                self.numbers[number] = id_
                kept[id_] = ExpectedDataflow(number, new.description, new.allowed, new.scheduled)
        self.writes |= wanted.writes


def _serves(old: ExpectedDataflow, new: ExpectedDataflow) -> bool:
    """Return whether a running dataflow can go on as the wanted one."""
    return (
        not isinstance(new.description.export, _ONCE)
        and old.description.export == new.description.export
        and old.description.imports == new.description.imports
        and old.allowed <= new.allowed
    )
