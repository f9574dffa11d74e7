"""Reconciliation: what a running instance keeps of what a new client asks for.

Theory of operation. A connecting client replays its history up to `InitializationComplete`;
the worker compares the dataflows it runs with those the history creates. One is kept when the
new description of the same export is compatible: equal imports and export (the plan among
them), the old `as_of` not later than the new, nothing that was already allowed to be compacted
beyond the new `as_of`. Subscribes are never kept: their readers are gone, and what was sent
cannot be sent again. Everything else is dropped, and what is wanted but not kept is created.

Rules: the decision depends on commands alone, never on progress, so that every worker decides
alike; `name` and `until` are not compared. It performs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from actors.progress import Frontier, ObjectId
from actors.protocol.compute import Command, CreateDataflow, DataflowDescription, SubscribeExport


class Running(msgspec.Struct, frozen=True):
    """A dataflow as commands have made it: `allowed` is its compaction so far."""

    description: DataflowDescription
    allowed: Frontier


class Reconciled(msgspec.Struct, frozen=True):
    """Ids to keep (with their new description), to drop and to create, and why not kept."""

    keep: dict[ObjectId, DataflowDescription]
    drop: tuple[ObjectId, ...]
    create: tuple[DataflowDescription, ...]
    reasons: dict[ObjectId, str]
    """For every id that was running and is wanted but not kept."""


def incompatible(running: Running, wanted: DataflowDescription) -> str | None:
    """Why the running dataflow cannot serve the wanted description; None when it can."""
    old = running.description
    if isinstance(old.export, SubscribeExport) or isinstance(wanted.export, SubscribeExport):
        return "a subscribe cannot be taken over by another connection"
    if old.imports != wanted.imports:
        return "its imports changed"
    if old.export != wanted.export:
        return "its export changed"
    if old.as_of > wanted.as_of:
        return f"it started at {old.as_of}, after the wanted as_of {wanted.as_of}"
    if running.allowed > wanted.as_of:
        return f"it was compacted to {running.allowed}, beyond the wanted as_of {wanted.as_of}"
    return None


def reconcile(running: Mapping[ObjectId, Running], commands: Iterable[Command]) -> Reconciled:
    """Compares what runs with a reduced history (see the module's text)."""
    wanted: Sequence[DataflowDescription] = [
        command.dataflow for command in commands if isinstance(command, CreateDataflow)
    ]
    keep: dict[ObjectId, DataflowDescription] = {}
    create: list[DataflowDescription] = []
    reasons: dict[ObjectId, str] = {}
    for description in wanted:
        old = running.get(description.id)
        why = incompatible(old, description) if old is not None else ""
        if why is None:
            keep[description.id] = description
            continue
        create.append(description)
        if old is not None:
            reasons[description.id] = why
    drop = tuple(id for id in running if id not in keep)
    return Reconciled(keep, drop, tuple(create), reasons)
