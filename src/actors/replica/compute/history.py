"""The compute half's command history: the shortest list of commands that builds the same instance.

`reduce` writes the commands in this order: Hello, CreateInstance, one merged UpdateConfiguration,
CreateDataflows, Schedules, unanswered Peeks, remaining AllowCompactions, InitializationComplete,
AllowWrites. Rules:

- Only the last AllowCompaction of an id counts. It becomes the dataflow's `as_of` and is not kept
  itself. An empty one removes the dataflow and all commands about it.
- An `as_of` never goes back.
- A command about an id does not apply to a later CreateDataflow of that id. A repeated
  CreateDataflow or Peek is ignored.
- A Schedule is kept as long as its dataflow. A CancelPeek deletes its Peek and is never kept.
- Compactions of ids without a dataflow here come after the Peeks, so that they cannot overtake
  them.

Invariants: reducing twice equals reducing once, and the reduced commands build the same state as
the full list. Only the last Hello's nonce is kept. The history does not check the rules of the
protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from actors.model.protocol.client_commands import CommandHistory, merge_configuration
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Hello,
    InitializationComplete,
    Peek,
    ScheduleDataflow,
    SubscribeExport,
    UpdateConfiguration,
)
from actors.runtime.progress import Frontier, ObjectId, Time, is_empty

RECENT_COMMANDS: Final = 32
"""Number of most recent commands that are searched for a cancelled peek between reductions."""


class ComputeHistory(CommandHistory[Command]):
    """The commands of one instance, reduced."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self._peeks: set[str] = set()
        """Uuids of the peeks in the history."""
        super().__init__(commands)

    def push(self, command: Command) -> None:
        """Add a command. Repeated and cancelled peeks are left out."""
        if isinstance(command, ScheduleDataflow):
            command = ScheduleDataflow(command.id)  # without a trace: no caller waits for a replay
        if isinstance(command, Peek):
            if command.uuid in self._peeks:
                return
            self._peeks.add(command.uuid)
        if isinstance(command, CancelPeek):
            if command.uuid not in self._peeks:
                return
            self._peeks.remove(command.uuid)
            if self._remove_recent(command.uuid):
                return
        super().push(command)

    def _remove_recent(self, uuid: str) -> bool:
        """Remove a peek if it was pushed recently, as most cancelled peeks were; return whether it
        was."""
        commands = self._commands
        for place in range(len(commands) - 1, max(-1, len(commands) - 1 - RECENT_COMMANDS), -1):
            command = commands[place]
            if isinstance(command, Peek) and command.uuid == uuid:
                del commands[place]
                return True
        return False

    def _reduced(self, commands: list[Command]) -> list[Command]:
        return reduced(commands)


class _CommandsByKind:
    """The commands of one pass, grouped by kind."""

    def __init__(self) -> None:
        # Each field has the commands that are still needed; a later command may replace one.
        self.hello: Hello | None = None
        self.instance: CreateInstance | None = None
        self.configuration: UpdateConfiguration | None = None
        self.dataflows: dict[ObjectId, CreateDataflow] = {}
        self.scheduled: dict[ObjectId, ScheduleDataflow] = {}
        self.peeks: dict[str, Peek] = {}
        self.allowed: dict[ObjectId, Frontier] = {}
        self.complete: InitializationComplete | None = None
        self.writes: AllowWrites | None = None

    def add(self, command: Command) -> None:
        match command:
            case Hello():
                self.hello = command
            case CreateInstance():
                self.instance = command
            case UpdateConfiguration():
                self.configuration = merge_configuration(self.configuration, command)
            case CreateDataflow():
                if self.dataflows.setdefault(command.dataflow.id, command) is command:
                    self.allowed.pop(command.dataflow.id, None)
            case ScheduleDataflow():
                if command.id in self.dataflows:
                    self.scheduled[command.id] = command
            case AllowCompaction():
                self._allow(command)
            case Peek():
                self.peeks.setdefault(command.uuid, command)
            case CancelPeek():
                self.peeks.pop(command.uuid, None)
            case InitializationComplete():
                self.complete = command
            case AllowWrites():
                self.writes = command

    def _allow(self, command: AllowCompaction) -> None:
        """Advance the dataflow's `as_of` to the frontier. An empty frontier removes the
        dataflow."""
        created = self.dataflows.get(command.id)
        if created is None:
            self.allowed[command.id] = max(self.allowed.get(command.id, 0), command.frontier)
        elif is_empty(command.frontier):
            # Forget it now, because a later command may reuse the id.
            del self.dataflows[command.id]
            self.scheduled.pop(command.id, None)
        elif command.frontier > created.dataflow.as_of:
            self.dataflows[command.id] = CreateDataflow(
                advance_as_of(created.dataflow, command.frontier)
            )


def advance_as_of(dataflow: DataflowDescription, as_of: Time) -> DataflowDescription:
    """Return the dataflow with a later `as_of`."""
    export = dataflow.export
    if isinstance(export, SubscribeExport):
        # The reader has received everything up to the new as_of, the snapshot included.
        export = msgspec.structs.replace(export, snapshot=False)
    return msgspec.structs.replace(dataflow, as_of=as_of, export=export)


def reduced(commands: Iterable[Command]) -> list[Command]:
    """Return the shortest equivalent list of commands, in the order given in the module's
    docstring."""
    kept = _CommandsByKind()
    for command in commands:
        kept.add(command)
    out: list[Command] = []
    out.extend(c for c in (kept.hello, kept.instance) if c is not None)
    if kept.configuration is not None and kept.configuration != UpdateConfiguration():
        out.append(kept.configuration)
    out.extend(kept.dataflows.values())
    out.extend(kept.scheduled.values())
    out.extend(kept.peeks.values())
    out.extend(AllowCompaction(id, frontier) for id, frontier in kept.allowed.items())
    out.extend(c for c in (kept.complete, kept.writes) if c is not None)
    return out
