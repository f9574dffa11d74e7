"""Reconciliation: what a running instance keeps of what a new client asks for.

Theory of operation. A connecting client replays its history up to `InitializationComplete`;
the worker compares the dataflows it runs with those the history creates, by the id of the
export (a dataflow has one export, so the id is the exact set). One is kept when nothing speaks
against it; everything that does is a `Flag`, and all of them are told, not the first alone.
Subscribes and copies are never kept: their readers are gone, and what was sent cannot be sent
again. What runs and is not kept is dropped, and what is wanted and not kept is created.

Rules: the decision depends on commands alone, never on progress, so that every worker decides
alike; `name` and `until` are not compared. Imports are shards, whose holds are the controller's;
no dataflow imports another's index, so a kept one needs no other to be kept. It performs nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from actors.progress import Frontier, ObjectId
from actors.protocol.compute import (
    Command,
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    SubscribeExport,
)


class Flag(enum.Enum):
    """What speaks against keeping a running dataflow."""

    SUBSCRIBE = "subscribe"
    COPY = "copy"
    IMPORTS = "imports"
    EXPORT = "export"
    AS_OF = "as_of"
    COMPACTED = "compacted"


MEANING: Mapping[Flag, str] = {
    Flag.SUBSCRIBE: "a subscribe cannot be taken over by another connection",
    Flag.COPY: "a copy cannot be taken over by another connection",
    Flag.IMPORTS: "its imports changed",
    Flag.EXPORT: "its export changed (the plan, the key or the columns)",
    Flag.AS_OF: "it started after the wanted as_of",
    Flag.COMPACTED: "it was allowed to be compacted beyond the wanted as_of",
}


class Running(msgspec.Struct, frozen=True):
    """A dataflow as commands have made it: `allowed` is its compaction so far."""

    description: DataflowDescription
    allowed: Frontier


class Replaced(msgspec.Struct, frozen=True):
    """A dataflow that ran and is created afresh, and why."""

    running: Running
    wanted: DataflowDescription
    flags: tuple[Flag, ...]

    def text(self, plan_bytes_max: int) -> str:
        """For the log: the reasons and both plans, each cut to so many bytes."""
        why = "; ".join(MEANING[flag] for flag in self.flags)
        old, new = (
            msgspec.json.encode(description)[:plan_bytes_max].decode(errors="replace")
            for description in (self.running.description, self.wanted)
        )
        return (
            f"{self.wanted.id} is created afresh: {why}. It ran, compacted to "
            f"{self.running.allowed}: {old} Wanted: {new}"
        )


class Reconciliation(msgspec.Struct, frozen=True):
    """Ids to keep (with their new description), to drop and to create, and why not kept."""

    keep: dict[ObjectId, DataflowDescription]
    drop: tuple[ObjectId, ...]
    create: tuple[DataflowDescription, ...]
    replaced: tuple[Replaced, ...]
    """All that ran and are wanted but not kept."""


def flags(running: Running, wanted: DataflowDescription) -> tuple[Flag, ...]:
    """All that speaks against serving the wanted description by the running dataflow."""
    old = running.description
    exports = (old.export, wanted.export)
    found = (
        (Flag.SUBSCRIBE, any(isinstance(export, SubscribeExport) for export in exports)),
        (Flag.COPY, any(isinstance(export, CopyToExport) for export in exports)),
        (Flag.IMPORTS, old.imports != wanted.imports),
        (Flag.EXPORT, old.export != wanted.export),
        (Flag.AS_OF, old.as_of > wanted.as_of),
        (Flag.COMPACTED, running.allowed > wanted.as_of),
    )
    return tuple(flag for flag, against in found if against)


def reconcile(running: Mapping[ObjectId, Running], commands: Iterable[Command]) -> Reconciliation:
    """Compares what runs with a reduced history (see the module's text)."""
    wanted: Sequence[DataflowDescription] = [
        command.dataflow for command in commands if isinstance(command, CreateDataflow)
    ]
    keep: dict[ObjectId, DataflowDescription] = {}
    create: list[DataflowDescription] = []
    replaced: list[Replaced] = []
    for description in wanted:
        old = running.get(description.id)
        against = flags(old, description) if old is not None else ()
        if old is not None and not against:
            keep[description.id] = description
            continue
        create.append(description)
        if old is not None:
            replaced.append(Replaced(old, description, against))
    drop = tuple(id for id in running if id not in keep)
    return Reconciliation(keep, drop, tuple(create), tuple(replaced))
