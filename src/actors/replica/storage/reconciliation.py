"""Compares the objects that run with those that a new client wants.

Theory of operation. A connecting client replays its history. At `InitializationComplete` worker 0
compares the objects it has proposed with the result of that history (`history.StorageDefinitions`,
the newest definition of each id):

- An equal definition is kept.
- A different definition is an update if that is allowed (`altered`). Otherwise it is refused with
  the differences, and the running object continues.
- An object that the history does not mention is dropped: a source with its exports, or a single
  export if its source is still wanted without it (an update).

`StorageState` compares one-shot ingestions. Decisions depend only on commands, never on progress.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.model.protocol.storage import (
    IngestionDescription,
    SinkDescription,
    ingestion_conflicts,
    sink_conflicts,
)
from actors.replica.storage.history import StorageDefinitions
from actors.runtime.progress import ObjectId


class DefinitionRefusal(msgspec.Struct, frozen=True):
    """A definition that the running object with its id cannot be changed to, and the reasons."""

    id: ObjectId
    differences: tuple[str, ...]

    def text(self) -> str:
        """Return the refusal as text for the client and the log."""
        return (
            f"cannot alter {self.id}, which is already running: {'; '.join(self.differences)}. "
            "Drop it and create it again"
        )


class StorageReconciliation(msgspec.Struct, frozen=True):
    """Result of a reconciliation: what to keep, run (new or updated), drop and refuse."""

    keep: tuple[ObjectId, ...]
    run: tuple[IngestionDescription | SinkDescription, ...]
    drop: tuple[ObjectId, ...]
    refused: tuple[DefinitionRefusal, ...]


def refusal(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> DefinitionRefusal | None:
    """Return why the running `old` cannot be replaced by `new`, or None if it can."""
    match old, new:
        case IngestionDescription(), IngestionDescription():
            differences = ingestion_conflicts(old, new)
        case SinkDescription(), SinkDescription():
            differences = sink_conflicts(old, new)
        case None, _:
            differences = ()
        case _:
            differences = ("a source cannot become a sink, nor a sink a source",)
    return DefinitionRefusal(new.id, differences) if differences else None


def unchanged(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> bool:
    """Return whether the running object already matches the definition."""
    if isinstance(old, SinkDescription) and isinstance(new, SinkDescription):
        # A sink's as_of is not compared, because it advances while the sink runs.
        old = msgspec.structs.replace(old, as_of=new.as_of)
    return old == new


def reconcile(
    running: Mapping[ObjectId, IngestionDescription | SinkDescription], wanted: StorageDefinitions
) -> StorageReconciliation:
    """Compare the running objects with the wanted ones."""
    keep: list[ObjectId] = []
    run: list[IngestionDescription | SinkDescription] = []
    refused: list[DefinitionRefusal] = []
    definitions: list[IngestionDescription | SinkDescription] = [*wanted.ingestions.values()]
    definitions += wanted.sinks.values()
    for description in definitions:
        old = running.get(description.id)
        if unchanged(old, description):
            keep.append(description.id)
        elif (against := refusal(old, description)) is not None:
            refused.append(against)
        else:
            run.append(description)
    drop = tuple(id for id in running if id not in wanted.ingestions and id not in wanted.sinks)
    return StorageReconciliation(tuple(keep), tuple(run), drop, tuple(refused))
