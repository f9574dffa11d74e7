"""Worker 0's plan to render what its client wants: look up each source, then propose commands.

Theory of operation. A pursuit is one source or sink that is to run. A source is looked up first, to
find the state to resume from, and then proposed with it; each object has at most one look-up in
progress, under a fresh ticket. A suspended object is pursued again, unless it was dropped or its
next rendering is proposed already.

Worker 0's proposals are sequenced in the order in which it makes them, so a proposed rendering
counts as rendered. Invariants: `validate`.
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
    """One object that is to run."""

    what: IngestionDescription | SinkDescription
    ticket: int | None = None
    """Ticket of the look-up in progress."""
    attempt: int = 0
    """Number of look-ups that failed in a row."""
    error: tuple[str, str | None] | None = None
    """Error of the last failed look-up, with its hint."""
    offered: int | None = None
    """Version of the last proposal, until it has been applied."""


class DesiredState:
    """All pursuits; see the module's docstring."""

    def __init__(self) -> None:
        self._all: dict[ObjectId, DesiredObject] = {}
        self._oneshots: dict[str, RunOneshotIngestion] = {}
        self._tickets: dict[int, ObjectId] = {}
        self._last = 0

    def running(self) -> dict[ObjectId, IngestionDescription | SinkDescription]:
        """Return all objects that are to run, by id."""
        return {id: pursuit.what for id, pursuit in self._all.items()}

    def get(self, id: ObjectId) -> IngestionDescription | SinkDescription | None:
        """Return the object that is to run under an id."""
        pursuit = self._all.get(id)
        return None if pursuit is None else pursuit.what

    def looked_up(self) -> frozenset[ObjectId]:
        """Return the sources whose look-up is in progress."""
        return frozenset(self._tickets.values())

    def run(self, what: IngestionDescription | SinkDescription) -> list[Step]:
        """Run an object, or update the one that runs under its id."""
        pursuit = self._all.get(what.id)
        if pursuit is None:
            pursuit = self._all[what.id] = DesiredObject(what)
        pursuit.what = what
        return self._render(pursuit)

    def run_oneshot(self, oneshot: RunOneshotIngestion) -> list[Step]:
        """Run a one-shot ingestion."""
        self._oneshots[oneshot.uuid] = oneshot
        self._last += 1
        return [RunOneshotIngestionDataflow(oneshot, self._last)]

    def _render(self, pursuit: DesiredObject) -> list[Step]:
        steps = self._cancel(pursuit)
        self._last += 1
        pursuit.attempt, pursuit.error = 0, None
        if isinstance(pursuit.what, SinkDescription):
            pursuit.offered = self._last
            return [*steps, RunSinkDataflow(pursuit.what, self._last)]
        pursuit.ticket = self._last
        self._tickets[self._last] = pursuit.what.id
        return [*steps, LookUp(self._last, pursuit.what, 0)]

    def _cancel(self, pursuit: DesiredObject) -> list[Step]:
        ticket, pursuit.ticket = pursuit.ticket, None
        if ticket is None:
            return []
        del self._tickets[ticket]
        return [CancelLookUp(ticket)]

    def found(self, ticket: int, resume: ResumeState) -> list[Step]:
        """Propose the source with the state that its look-up found."""
        id = self._tickets.pop(ticket, None)
        # The ticket is stale: a drop or an update must not be overtaken by an earlier look-up.
        if id is None:
            return []
        pursuit = self._all[id]
        assert isinstance(pursuit.what, IngestionDescription)
        pursuit.ticket, pursuit.attempt, pursuit.error = None, 0, None
        pursuit.offered = ticket
        exports = {export.id for export in pursuit.what.exports}
        # An export may have been dropped during the look-up.
        uppers = tuple((id, upper) for id, upper in resume.uppers if id in exports)
        resume = msgspec.structs.replace(resume, uppers=uppers)
        return [CreateIngestionDataflow(pursuit.what, ticket, resume)]

    def failed(
        self, ticket: int, error: str, hint: str | None = None
    ) -> tuple[ObjectId | None, list[Step]]:
        """Retry a failed look-up. Return the id if the error is a new one, and the steps."""
        id = self._tickets.get(ticket)
        if id is None:
            return None, []
        pursuit = self._all[id]
        assert isinstance(pursuit.what, IngestionDescription)
        pursuit.attempt += 1
        news = pursuit.error is None or pursuit.error[0] != error
        pursuit.error = (error, hint)
        return id if news else None, [LookUp(ticket, pursuit.what, pursuit.attempt)]

    def failing(self) -> dict[ObjectId, tuple[str, str | None]]:
        """Return the errors and hints of sources whose last look-up failed, by id."""
        return {id: each.error for id, each in self._all.items() if each.error is not None}

    def allow(self, id: ObjectId, frontier: Frontier) -> None:
        """Advance the as_of at which a sink begins if it is rendered again."""
        pursuit = self._all.get(id)
        if pursuit is not None and isinstance(pursuit.what, SinkDescription):
            as_of = max(pursuit.what.as_of, frontier)
            pursuit.what = msgspec.structs.replace(pursuit.what, as_of=as_of)

    def drop(self, *ids: ObjectId) -> list[Step]:
        """Drop sources, sinks and one-shot ingestions; ignore those that do not run."""
        steps: list[Step] = []
        ended: list[ObjectId] = []
        forgotten: list[IngestionDescription] = []
        for id in ids:
            if id in self._oneshots:
                del self._oneshots[id]
                ended.append(id)
            pursuit = self._all.pop(id, None)
            if pursuit is None:
                continue
            steps += self._cancel(pursuit)
            ended.append(id)
            if isinstance(pursuit.what, IngestionDescription):
                forgotten.append(pursuit.what)
        if ended:
            steps.append(DropObjects(tuple(ended), tuple(forgotten)))
        return steps

    def drop_export(self, source: ObjectId, export: ObjectId) -> list[Step]:
        """Drop one export of a source."""
        pursuit = self._all.get(source)
        if pursuit is None or not isinstance(pursuit.what, IngestionDescription):
            return []
        kept = tuple(one for one in pursuit.what.exports if one.id != export)
        if len(kept) == len(pursuit.what.exports):
            return []
        pursuit.what = msgspec.structs.replace(pursuit.what, exports=kept)
        return [DropObjects((export,))]

    @property
    def oneshots(self) -> dict[str, RunOneshotIngestion]:
        """Return the one-shot ingestions that were not dropped, by uuid, including finished
        ones."""
        return dict(self._oneshots)

    def applied(self, command: InternalCommand) -> None:
        """Note that a proposal was applied in its order."""
        if isinstance(command, CreateIngestionDataflow | RunSinkDataflow):
            pursuit = self._all.get(command.description.id)
            if pursuit is not None and pursuit.offered == command.version:
                pursuit.offered = None

    def suspended(self, id: ObjectId) -> list[Step]:
        """Render an object again whose rendering was suspended."""
        pursuit = self._all.get(id)
        if pursuit is None or pursuit.ticket is not None or pursuit.offered is not None:
            # The next rendering is on its way already, or the object was dropped.
            return []
        return self._render(pursuit)

    def validate(self) -> None:
        """Assert the invariants."""
        tickets = {
            pursuit.ticket: id for id, pursuit in self._all.items() if pursuit.ticket is not None
        }
        assert tickets == self._tickets
        assert all(id == pursuit.what.id for id, pursuit in self._all.items())
