"""Reconciliation: decides which running dataflows serve a new client.

Theory of operation. A connecting client replays its history up to `InitializationComplete`; the
worker compares its running dataflows with those that the history creates, by the id of the export
(a dataflow has one export). Each reason against keeping a dataflow is a `ReconcileObstacle`; all
are reported. One without a flag is kept. The other running ones are dropped, and the other wanted
ones created.

`name` and `until` are not compared. Imports are shards, whose holds are the controller's, and no
dataflow imports another's index; so a kept one needs no other to be kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from actors.model.protocol.compute import (
    Command,
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    SubscribeExport,
)
from actors.runtime.progress import Frontier, ObjectId


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
