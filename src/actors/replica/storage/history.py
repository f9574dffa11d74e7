"""The storage half's command history: the shortest list of commands with the same result.

`reduce` writes the commands in this order: Hello, one merged UpdateConfiguration, RunIngestions,
RunSinks, RunOneshotIngestions, AllowCompactions, InitializationComplete, AllowWrites. Rules:

- The last definition of an id wins. An export missing from it is dropped.
- An empty AllowCompaction removes its object: a source together with its exports, or an export from
  its source's definition. Of the non-empty ones only the furthest per id is kept.
- A command about an id does not apply to a later definition of that id. Compactions of undefined
  ids are skipped and counted (`skipped`).
- A CancelOneshotIngestion deletes its request and is never kept. A repeated request for a uuid is
  ignored.

Invariants: reducing twice equals reducing once, and the reduced commands have the same result as
the full list. The history does not check the rules of the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.model.protocol.client_commands import CommandHistory, merge_configuration
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    IngestionDescription,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    UpdateStorageConfiguration,
)
from actors.runtime.progress import Frontier, ObjectId, is_empty


class StorageHistory(CommandHistory[Command]):
    """The commands of one client, reduced."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self.skipped = 0
        """Number of compactions of unknown objects that reductions have dropped."""
        super().__init__(commands)

    def _reduced(self, commands: list[Command]) -> list[Command]:
        wanted = StorageDefinitions(commands)
        self.skipped += wanted.skipped
        return wanted.commands()


class StorageDefinitions:
    """The desired state that results from a list of commands."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self.hello: Hello | None = None
        """The last Hello. Here and in `complete` and `writes`: None before the command."""
        self.configuration: UpdateStorageConfiguration | None = None
        """All configurations, merged."""
        self.ingestions: dict[ObjectId, IngestionDescription] = {}
        """Sources by id, each with the exports that remain."""
        self.source_of: dict[ObjectId, ObjectId] = {}
        """Source of each export."""
        self.sinks: dict[ObjectId, SinkDescription] = {}
        """Sinks by id."""
        self.oneshots: dict[str, RunOneshotIngestion] = {}
        """Requested one-shot ingestions by uuid."""
        self.allowed: dict[ObjectId, Frontier] = {}
        """Furthest non-empty compaction frontier of each id."""
        self.complete: InitializationComplete | None = None
        self.writes: AllowWrites | None = None
        self.skipped = 0
        """Number of compactions of undefined ids."""
        for command in commands:
            self.add(command)

    def add(self, command: Command) -> None:
        """Apply one more command."""
        match command:
            case Hello():
                self.hello = command
            case UpdateStorageConfiguration():
                self.configuration = merge_configuration(self.configuration, command)
            case RunIngestion():
                self._define(command.description)
            case RunSink(description=description):
                self._becomes(description.id, ("sink", description.id))
                self.sinks[description.id] = description
            case RunOneshotIngestion():
                self.oneshots.setdefault(command.uuid, command)
            case CancelOneshotIngestion():
                self.oneshots.pop(command.uuid, None)
            case AllowCompaction():
                self._allow(command.id, command.frontier)
            case InitializationComplete():
                self.complete = command
            case AllowWrites():
                self.writes = command

    def knows(self, id: ObjectId) -> bool:
        """Return whether the id is defined."""
        return id in self.ingestions or id in self.source_of or id in self.sinks

    def _define(self, description: IngestionDescription) -> None:
        former = self.ingestions.get(description.id)
        # An export missing from the new definition is dropped, along with its compaction frontier.
        for export in () if former is None else former.exports:
            if export.id not in description.ids:
                self.drop(export.id)
        self._becomes(description.id, ("source", description.id))
        for export in description.exports:
            self._becomes(export.id, ("export", description.id))
        self.ingestions[description.id] = description
        self.source_of |= {export.id: description.id for export in description.exports}

    def _becomes(self, id: ObjectId, role: tuple[str, ObjectId]) -> None:
        """Drop the object that had this id, if the id now names a different one."""
        former = None
        if id in self.ingestions:
            former = ("source", id)
        elif id in self.source_of:
            former = ("export", self.source_of[id])
        elif id in self.sinks:
            former = ("sink", id)
        if former not in (None, role):
            self.drop(id)

    def _allow(self, id: ObjectId, frontier: Frontier) -> None:
        if not self.knows(id):
            self.skipped += 1
        elif is_empty(frontier):
            self.drop(id)
        else:
            self.allowed[id] = max(self.allowed.get(id, 0), frontier)

    def drop(self, id: ObjectId) -> tuple[ObjectId, ...]:
        """Remove a source, an export or a sink, and return all ids removed with it."""
        source = self.source_of.pop(id, None)
        gone: tuple[ObjectId, ...] = (id,)
        if source is not None:
            description = self.ingestions[source]
            kept = tuple(export for export in description.exports if export.id != id)
            self.ingestions[source] = msgspec.structs.replace(description, exports=kept)
        elif id in self.ingestions:
            gone = self.ingestions.pop(id).ids
        else:
            self.sinks.pop(id)
        for each in gone:
            self.source_of.pop(each, None)
            self.allowed.pop(each, None)
        return gone

    def commands(self) -> list[Command]:
        """Return the shortest list of commands that has this result."""
        out: list[Command] = []
        if self.hello is not None:
            out.append(self.hello)
        if self.configuration is not None and self.configuration != UpdateStorageConfiguration():
            out.append(self.configuration)
        out += (RunIngestion(description) for description in self.ingestions.values())
        out += (RunSink(description) for description in self.sinks.values())
        out += self.oneshots.values()
        out += (AllowCompaction(id, frontier) for id, frontier in self.allowed.items())
        out += (said for said in (self.complete, self.writes) if said is not None)
        return out
