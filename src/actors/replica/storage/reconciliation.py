"""Reconciliation: compares running objects with those that a new client wants.

Theory of operation. A connecting client replays its history; at `InitializationComplete` worker 0
compares the objects that it has proposed with the history's result (`history.StorageDefinitions`:
the newest definition of each id). An equal definition is kept. A different one is an update if
that is allowed (`ingestion_conflicts`), else it is refused by name with the difference, and the
running one goes on. An object that is not mentioned is dropped: a source with its exports; an
export alone if its source is still wanted without it (an update). `StorageState` compares one-shot
ingestions.

The decision depends on commands, never on progress.
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
    """A definition that does not fit the object running under its id, and why."""

    id: ObjectId
    differences: tuple[str, ...]

    def text(self) -> str:
        """Return the refusal, for the client and the log."""
        return (
            f"{self.id} runs already and cannot become what is asked for: "
            f"{'; '.join(self.differences)}. Drop it, then create it anew"
        )


class StorageReconciliation(msgspec.Struct, frozen=True):
    """Ids to keep, definitions to run (new or updated), ids to drop, and refused definitions."""

    keep: tuple[ObjectId, ...]
    run: tuple[IngestionDescription | SinkDescription, ...]
    drop: tuple[ObjectId, ...]
    refused: tuple[DefinitionRefusal, ...]


def refusal(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> DefinitionRefusal | None:
    """Return the reasons against replacing the running `old` by `new`; None if there are none."""
    match old, new:
        case IngestionDescription(), IngestionDescription():
            differences = ingestion_conflicts(old, new)
        case SinkDescription(), SinkDescription():
            differences = sink_conflicts(old, new)
        case None, _:
            differences = ()
        case _:
            differences = ("a source is no sink",)
    return DefinitionRefusal(new.id, differences) if differences else None


def unchanged(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> bool:
    """Return whether the running object serves the definition as it is."""
    if isinstance(old, SinkDescription) and isinstance(new, SinkDescription):
        # A sink's as_of is not compared: it advances while the sink runs.
        old = msgspec.structs.replace(old, as_of=new.as_of)
    return old == new


def reconcile(
    running: Mapping[ObjectId, IngestionDescription | SinkDescription], wanted: StorageDefinitions
) -> StorageReconciliation:
    """Return the result of comparing the running objects with the wanted ones."""
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
