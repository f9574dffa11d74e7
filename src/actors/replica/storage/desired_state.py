"""Worker 0's plan for rendering what its client wants.

Theory of operation. Each source or sink that should run is a `DesiredObject`. For a source, worker
0 first looks up the state to resume from, and then proposes a rendering with that state. An object
has at most one look-up in progress, under a fresh ticket. When a rendering is suspended, its object
is rendered again, unless it was dropped or the next rendering has already been proposed.

Worker 0's proposals are sequenced in the order in which it makes them, so a proposed rendering
counts as rendered. `validate` checks the invariants.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.model.protocol.storage import (
    IngestionDescription,
    RunOneshotIngestion,
    SinkDescription,
)
from actors.model.protocol.storage_internal import (
    CreateIngestionDataflow,
    DropObjects,
    InternalCommand,
    ResumeState,
    RunOneshotIngestionDataflow,
    RunSinkDataflow,
)
from actors.replica.storage.events import CancelLookUp, LookUp
from actors.runtime.progress import Frontier, ObjectId

Step: TypeAlias = InternalCommand | LookUp | CancelLookUp


class DesiredObject(msgspec.Struct):
    """A source or sink that should run."""

    what: IngestionDescription | SinkDescription
    ticket: int | None = None
    """Ticket of the look-up in progress, if any."""
    attempt: int = 0
    """Number of consecutive failed look-ups."""
    error: tuple[str, str | None] | None = None
    """Error of the last failed look-up, with its hint."""
    proposed_version: int | None = None
    """Version of the last proposal, until the proposal has been applied."""


class DesiredState:
    """The objects that should run on the replica; see the module's docstring."""

    def __init__(self) -> None:
        self._all: dict[ObjectId, DesiredObject] = {}
        """Sources and sinks that should run, by id."""
        self._oneshots: dict[str, RunOneshotIngestion] = {}
        """One-shot ingestions that were requested and not dropped, by uuid. Finished ones stay."""
        self._tickets: dict[int, ObjectId] = {}
        """Source of each look-up in progress, by ticket."""
        self._last = 0
        """Last ticket or version that was used; both come from one sequence."""

    def running(self) -> dict[ObjectId, IngestionDescription | SinkDescription]:
        """Return all sources and sinks that should run, by id."""
        return {id: desired.what for id, desired in self._all.items()}

    def get(self, id: ObjectId) -> IngestionDescription | SinkDescription | None:
        """Return the source or sink that should run under an id."""
        desired = self._all.get(id)
        return None if desired is None else desired.what

    def looked_up(self) -> frozenset[ObjectId]:
        """Return the ids of sources with a look-up in progress."""
        return frozenset(self._tickets.values())

    def run(self, what: IngestionDescription | SinkDescription) -> list[Step]:
        """Run an object, or update the one running under its id."""
        desired = self._all.get(what.id)
        if desired is None:
            desired = self._all[what.id] = DesiredObject(what)
        desired.what = what
        return self._render(desired)

    def run_oneshot(self, oneshot: RunOneshotIngestion) -> list[Step]:
        """Run a one-shot ingestion."""
        self._oneshots[oneshot.uuid] = oneshot
        self._last += 1
        return [RunOneshotIngestionDataflow(oneshot, self._last)]

    def _render(self, desired: DesiredObject) -> list[Step]:
        steps = self._cancel(desired)
        self._last += 1
        desired.attempt, desired.error = 0, None
        if isinstance(desired.what, SinkDescription):
            desired.proposed_version = self._last
            return [*steps, RunSinkDataflow(desired.what, self._last)]
        desired.ticket = self._last
        self._tickets[self._last] = desired.what.id
        return [*steps, LookUp(self._last, desired.what, 0)]

    def _cancel(self, desired: DesiredObject) -> list[Step]:
        ticket, desired.ticket = desired.ticket, None
        if ticket is None:
            return []
        del self._tickets[ticket]
        return [CancelLookUp(ticket)]

    def found(self, ticket: int, resume: ResumeState) -> list[Step]:
        """Propose the source with the state that its look-up found. Ignore a stale ticket."""
        id = self._tickets.pop(ticket, None)
        # A missing ticket is stale: an earlier look-up must not overtake a drop or an update.
        if id is None:
            return []
        desired = self._all[id]
        assert isinstance(desired.what, IngestionDescription)
        desired.ticket, desired.attempt, desired.error = None, 0, None
        desired.proposed_version = ticket
        exports = {export.id for export in desired.what.exports}
        # An export may have been dropped during the look-up.
        uppers = tuple((id, upper) for id, upper in resume.uppers if id in exports)
        resume = msgspec.structs.replace(resume, uppers=uppers)
        return [CreateIngestionDataflow(desired.what, ticket, resume)]

    def failed(
        self, ticket: int, error: str, hint: str | None = None
    ) -> tuple[ObjectId | None, list[Step]]:
        """Retry a failed look-up.

        Return the source's id if its error has changed (else None), and the steps to take.
        """
        id = self._tickets.get(ticket)
        if id is None:
            return None, []
        desired = self._all[id]
        assert isinstance(desired.what, IngestionDescription)
        desired.attempt += 1
        news = desired.error is None or desired.error[0] != error
        desired.error = (error, hint)
        return id if news else None, [LookUp(ticket, desired.what, desired.attempt)]

    def failing(self) -> dict[ObjectId, tuple[str, str | None]]:
        """Return the error and hint of each source whose last look-up failed."""
        return {id: each.error for id, each in self._all.items() if each.error is not None}

    def allow(self, id: ObjectId, frontier: Frontier) -> None:
        """Advance the as_of from which a sink starts when it is rendered again."""
        desired = self._all.get(id)
        if desired is not None and isinstance(desired.what, SinkDescription):
            as_of = max(desired.what.as_of, frontier)
            desired.what = msgspec.structs.replace(desired.what, as_of=as_of)

    def drop(self, *ids: ObjectId) -> list[Step]:
        """Drop sources, sinks and one-shot ingestions. Ignore ids that do not run."""
        steps: list[Step] = []
        ended: list[ObjectId] = []
        forgotten: list[IngestionDescription] = []
        for id in ids:
            if id in self._oneshots:
                del self._oneshots[id]
                ended.append(id)
            desired = self._all.pop(id, None)
            if desired is None:
                continue
            steps += self._cancel(desired)
            ended.append(id)
            if isinstance(desired.what, IngestionDescription):
                forgotten.append(desired.what)
        if ended:
            steps.append(DropObjects(tuple(ended), tuple(forgotten)))
        return steps

    def drop_export(self, source: ObjectId, export: ObjectId) -> list[Step]:
        """Drop one export of a source."""
        desired = self._all.get(source)
        if desired is None or not isinstance(desired.what, IngestionDescription):
            return []
        kept = tuple(one for one in desired.what.exports if one.id != export)
        if len(kept) == len(desired.what.exports):
            return []
        desired.what = msgspec.structs.replace(desired.what, exports=kept)
        return [DropObjects((export,))]

    @property
    def oneshots(self) -> dict[str, RunOneshotIngestion]:
        """Return the one-shot ingestions that were not dropped, by uuid. Finished ones are
        included."""
        return dict(self._oneshots)

    def applied(self, command: InternalCommand) -> None:
        """Record that a proposal came back in the command order."""
        if isinstance(command, CreateIngestionDataflow | RunSinkDataflow):
            desired = self._all.get(command.description.id)
            if desired is not None and desired.proposed_version == command.version:
                desired.proposed_version = None

    def suspended(self, id: ObjectId) -> list[Step]:
        """Render an object again after its rendering was suspended."""
        desired = self._all.get(id)
        if desired is None or desired.ticket is not None or desired.proposed_version is not None:
            # The next rendering is already on its way, or the object was dropped.
            return []
        return self._render(desired)

    def validate(self) -> None:
        """Assert the invariants."""
        tickets = {
            desired.ticket: id for id, desired in self._all.items() if desired.ticket is not None
        }
        assert tickets == self._tickets
        assert all(id == desired.what.id for id, desired in self._all.items())
