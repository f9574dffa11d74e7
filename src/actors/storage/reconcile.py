"""Reconciliation: what runs, compared with what a new client wants.

Theory of operation. A connecting client replays its history; at `InitializationComplete` worker
0 compares what it has had rendered with what that history adds up to (`history.Wanted`: the
newest definition of each id). Equal definitions stay as they are; one that differs is an update
if it may be (`altered`), and refused by name with the difference if it may not: the running one
then goes on, and harms no other. What is not mentioned is dropped, a source with its exports, an
export alone when its source is still wanted without it (that is an update). One-shot ingestions
are `StorageState`'s: they are compared by their commands.

Rules: a sink's `as_of` is not compared, it only moves on; the decision is worker 0's alone and
depends on commands, never on progress; it performs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.progress import ObjectId
from actors.protocol.storage import (
    IngestionDescription,
    SinkDescription,
    altered,
    altered_sink,
)
from actors.storage.history import Wanted


class Refusal(msgspec.Struct, frozen=True):
    """A definition that does not fit what runs under its id, and why."""

    id: ObjectId
    differences: tuple[str, ...]

    def text(self) -> str:
        """For the client and the log."""
        return (
            f"{self.id} runs already and cannot become what is asked for: "
            f"{'; '.join(self.differences)}. Drop it, then create it anew"
        )


class Reconciliation(msgspec.Struct, frozen=True):
    """Ids that stay as they are, definitions to run (new, or an update of what runs), ids to
    drop, and what is refused."""

    keep: tuple[ObjectId, ...]
    run: tuple[IngestionDescription | SinkDescription, ...]
    drop: tuple[ObjectId, ...]
    refused: tuple[Refusal, ...]


def refusal(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> Refusal | None:
    """What speaks against `new` in place of the running `old` (None: nothing runs)."""
    match old, new:
        case IngestionDescription(), IngestionDescription():
            differences = altered(old, new)
        case SinkDescription(), SinkDescription():
            differences = altered_sink(old, new)
        case None, _:
            differences = ()
        case _:
            differences = ("a source is no sink",)
    return Refusal(new.id, differences) if differences else None


def unchanged(
    old: IngestionDescription | SinkDescription | None,
    new: IngestionDescription | SinkDescription,
) -> bool:
    """Whether what runs serves the definition as it is."""
    if isinstance(old, SinkDescription) and isinstance(new, SinkDescription):
        old = msgspec.structs.replace(old, as_of=new.as_of)
    return old == new


def reconcile(
    running: Mapping[ObjectId, IngestionDescription | SinkDescription], wanted: Wanted
) -> Reconciliation:
    """Compares what runs with what is wanted (see the module's text)."""
    keep: list[ObjectId] = []
    run: list[IngestionDescription | SinkDescription] = []
    refused: list[Refusal] = []
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
    return Reconciliation(tuple(keep), tuple(run), drop, tuple(refused))
