"""Reconciliation: decides which running dataflows a new client can keep.

Theory of operation. A connecting client replays its history up to `InitializationComplete`. The
worker then compares its running dataflows with those that the history creates, by the id of the
export (a dataflow has one export). Each reason against keeping a dataflow is a `ReconcileObstacle`,
and all of them are reported. A dataflow without obstacles is kept. The other running dataflows are
dropped, and the other wanted ones are created.

`name` and `until` are not compared. Imports are shards, which the controller holds, and no dataflow
imports another's index, so each dataflow can be kept independently of the others.
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
    ReconcileObstacle.SUBSCRIBE: "another connection cannot take over a subscribe",
    ReconcileObstacle.COPY: "another connection cannot take over a copy",
    ReconcileObstacle.IMPORTS: "its imports changed",
    ReconcileObstacle.EXPORT: "its export changed (the plan, the key or the columns)",
    ReconcileObstacle.AS_OF: "it started after the wanted as_of",
    ReconcileObstacle.COMPACTED: "it may already be compacted beyond the wanted as_of",
}


class RunningDataflow(msgspec.Struct, frozen=True):
    """A running dataflow. `allowed` is the frontier up to which it may be compacted."""

    description: DataflowDescription
    allowed: Frontier


class ReplacedDataflow(msgspec.Struct, frozen=True):
    """A running dataflow that must be created again, and the reasons."""

    running: RunningDataflow
    wanted: DataflowDescription
    flags: tuple[ReconcileObstacle, ...]

    def text(self, plan_bytes_max: int) -> str:
        """Return the reasons and both plans for the log. Each plan is cut to `plan_bytes_max`
        bytes."""
        why = "; ".join(MEANING[flag] for flag in self.flags)
        old, new = (
            msgspec.json.encode(description)[:plan_bytes_max].decode(errors="replace")
            for description in (self.running.description, self.wanted)
        )
        return (
            f"{self.wanted.id} is created again: {why}. Running, compacted to "
            f"{self.running.allowed}: {old} Wanted: {new}"
        )


class ComputeReconciliation(msgspec.Struct, frozen=True):
    """Result of a reconciliation: what to keep, with new descriptions, and what to drop and
    create."""

    keep: dict[ObjectId, DataflowDescription]
    drop: tuple[ObjectId, ...]
    create: tuple[DataflowDescription, ...]
    replaced: tuple[ReplacedDataflow, ...]
    """All running dataflows that are wanted but could not be kept."""


def flags(running: RunningDataflow, wanted: DataflowDescription) -> tuple[ReconcileObstacle, ...]:
    """Return all reasons why the running dataflow cannot serve the wanted description."""
    old = running.description
    exports = (old.export, wanted.export)
    # Only commands decide, never progress, because every worker must reach the same result.
    found = (
        # The previous client has received part of the output, which cannot be sent again.
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
    """Compare the running dataflows with those that a reduced history creates."""
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
