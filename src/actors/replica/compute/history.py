"""The command history: the shortest list of commands that builds the same instance.

`reduce` writes: Hello, CreateInstance, one merged UpdateConfiguration, CreateDataflows, Schedules,
live Peeks, left-over AllowCompactions, InitializationComplete, AllowWrites. Rules:

- only the last AllowCompaction of an id counts; it becomes the dataflow's `as_of` and
  vanishes; an empty one removes the dataflow with all commands about it;
- an `as_of` never goes back;
- commands about an id before its CreateDataflow are not about that dataflow; a repeated
  CreateDataflow or Peek is ignored;
- a Schedule survives with its dataflow; a CancelPeek deletes its Peek and never survives;
- compactions of ids without a dataflow here come after the Peeks, so that they cannot overtake
  them.

Invariants: reducing twice equals reducing once; the reduced commands build the same state as all of
them. Only the last Hello's nonce is kept, and no rule of the protocol is checked.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from actors.model.protocol.client_commands import CommandHistory, merge_configuration
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CopyToExport,
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

# -- Reconciliation: decides which running dataflows serve a new client ----------------------------
# Theory of operation. A connecting client replays its history up to `InitializationComplete`; the
# worker compares its running dataflows with those that the history creates, by the id of the export
# (a dataflow has one export). Each reason against keeping a dataflow is a `ReconcileObstacle`; all
# are reported. One without a flag is kept. The other running ones are dropped, and the other wanted
# ones created.
#
# `name` and `until` are not compared. Imports are shards, whose holds are the controller's, and no
# dataflow imports another's index; so a kept one needs no other to be kept.


class ReconcileObstacle(enum.Enum):
    """Reason against keeping a running dataflow."""

    SUBSCRIBE = "subscribe"
    COPY = "copy"
    IMPORTS = "imports"
    EXPORT = "export"
    AS_OF = "as_of"
    COMPACTED = "compacted"


MEANING: Mapping[ReconcileObstacle, str] = {
    ReconcileObstacle.SUBSCRIBE: "a subscribe cannot be taken over by another connection",
    ReconcileObstacle.COPY: "a copy cannot be taken over by another connection",
    ReconcileObstacle.IMPORTS: "its imports changed",
    ReconcileObstacle.EXPORT: "its export changed (the plan, the key or the columns)",
    ReconcileObstacle.AS_OF: "it started after the wanted as_of",
    ReconcileObstacle.COMPACTED: "it was allowed to be compacted beyond the wanted as_of",
}


class RunningDataflow(msgspec.Struct, frozen=True):
    """A running dataflow; `allowed` is its compaction so far."""

    description: DataflowDescription
    allowed: Frontier


class ReplacedDataflow(msgspec.Struct, frozen=True):
    """A running dataflow that is created again, and the reasons."""

    running: RunningDataflow
    wanted: DataflowDescription
    flags: tuple[ReconcileObstacle, ...]

    def text(self, plan_bytes_max: int) -> str:
        """Return the reasons and both plans for the log, each plan cut to `plan_bytes_max`
        bytes."""
        why = "; ".join(MEANING[flag] for flag in self.flags)
        old, new = (
            msgspec.json.encode(description)[:plan_bytes_max].decode(errors="replace")
            for description in (self.running.description, self.wanted)
        )
        return (
            f"{self.wanted.id} is created afresh: {why}. It ran, compacted to "
            f"{self.running.allowed}: {old} Wanted: {new}"
        )


class ComputeReconciliation(msgspec.Struct, frozen=True):
    """Ids to keep (with their new description) and to drop, and dataflows to create."""

    keep: dict[ObjectId, DataflowDescription]
    drop: tuple[ObjectId, ...]
    create: tuple[DataflowDescription, ...]
    replaced: tuple[ReplacedDataflow, ...]
    """All dataflows that run and are wanted but not kept."""


def flags(running: RunningDataflow, wanted: DataflowDescription) -> tuple[ReconcileObstacle, ...]:
    """Return all reasons against serving the wanted description by the running dataflow."""
    old = running.description
    exports = (old.export, wanted.export)
    # Commands alone decide, never progress: every worker must come to the same result.
    found = (
        # The former client has received part of the output, which cannot be sent again.
        (
            ReconcileObstacle.SUBSCRIBE,
            any(isinstance(export, SubscribeExport) for export in exports),
        ),
        (ReconcileObstacle.COPY, any(isinstance(export, CopyToExport) for export in exports)),
        (ReconcileObstacle.IMPORTS, old.imports != wanted.imports),
        (ReconcileObstacle.EXPORT, old.export != wanted.export),
        (ReconcileObstacle.AS_OF, old.as_of > wanted.as_of),
        (ReconcileObstacle.COMPACTED, running.allowed > wanted.as_of),
    )
    return tuple(flag for flag, against in found if against)


def reconcile(
    running: Mapping[ObjectId, RunningDataflow], commands: Iterable[Command]
) -> ComputeReconciliation:
    """Return the result of comparing the running dataflows with a reduced history."""
    wanted: Sequence[DataflowDescription] = [
        command.dataflow for command in commands if isinstance(command, CreateDataflow)
    ]
    keep: dict[ObjectId, DataflowDescription] = {}
    create: list[DataflowDescription] = []
    replaced: list[ReplacedDataflow] = []
    for description in wanted:
        old = running.get(description.id)
        against = flags(old, description) if old is not None else ()
        if old is not None and not against:
            keep[description.id] = description
            continue
        create.append(description)
        if old is not None:
            replaced.append(ReplacedDataflow(old, description, against))
    drop = tuple(id for id in running if id not in keep)
    return ComputeReconciliation(keep, drop, tuple(create), tuple(replaced))


LATELY: Final = 32
"""Number of last commands searched for a cancelled peek before the next reduction."""


class ComputeHistory(CommandHistory[Command]):
    """Commands of one instance, kept short."""

    def __init__(self, commands: Iterable[Command] = ()) -> None:
        self._peeks: set[str] = set()
        super().__init__(commands)

    def push(self, command: Command) -> None:
        """See `CommandHistory`."""
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
            if self._forgets(command.uuid):
                return
        super().push(command)

    def _forgets(self, uuid: str) -> bool:
        """Remove a peek if it was pushed lately, as most cancelled ones were."""
        commands = self._commands
        for place in range(len(commands) - 1, max(-1, len(commands) - 1 - LATELY), -1):
            command = commands[place]
            if isinstance(command, Peek) and command.uuid == uuid:
                del commands[place]
                return True
        return False

    def _reduced(self, commands: list[Command]) -> list[Command]:
        return reduced(commands)


class _Collected:
    """State of one pass over the commands, by kind."""

    def __init__(self) -> None:
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
        """Advance the dataflow's `as_of` to the frontier; the empty one ends the dataflow."""
        created = self.dataflows.get(command.id)
        if created is None:
            self.allowed[command.id] = max(self.allowed.get(command.id, 0), command.frontier)
        elif is_empty(command.frontier):
            # Forgotten at once, so that the id may be used again later in the history.
            del self.dataflows[command.id]
            self.scheduled.pop(command.id, None)
        elif command.frontier > created.dataflow.as_of:
            self.dataflows[command.id] = CreateDataflow(
                advance_as_of(created.dataflow, command.frontier)
            )


def advance_as_of(dataflow: DataflowDescription, as_of: Time) -> DataflowDescription:
    """Return the dataflow from a later time on."""
    export = dataflow.export
    if isinstance(export, SubscribeExport):
        # The reader has received everything up to the new as_of, the snapshot included.
        export = msgspec.structs.replace(export, snapshot=False)
    return msgspec.structs.replace(dataflow, as_of=as_of, export=export)


def reduced(commands: Iterable[Command]) -> list[Command]:
    """Return the shortest equivalent of a list of commands, in the order of the module's
    docstring."""
    kept = _Collected()
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
