"""Copies into files (COPY TO): each is a transient dataflow with one response.

A copy is checked, then its shard is held at its `as_of`, then its dataflow is created. It ends with
the dataflow's response, when its client cancels or disconnects, at its deadline, or when its object
is dropped; then the dataflow is dropped, and unless the copy is complete, the files it has written.
A replica that reconnects runs the copy again; if it was already complete, the replica reports that
(`sinks/copy_output.py`).

A session may run one copy at a time, the service `copies_max`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from actors.connectors.sinks.copy_output import check_copy
from actors.control.controller.catalog.boot import shard_import
from actors.control.controller.catalog.catalog import INDEX, CatalogObject
from actors.control.controller.holds import copy_holder
from actors.control.controller.open_requests import OpenRequests
from actors.control.controller.roles.revocation import TRUSTED, HeldRights
from actors.control.controller.state import ControllerState, reply_error
from actors.model.protocol.api import CopiedInto, CopyProgressed, CopyTo
from actors.model.protocol.compute import (
    AllowCompaction,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    DataflowDescription,
    ScheduleDataflow,
    StatusResponse,
)
from actors.runtime.errors import (
    ConnectionBroken,
    DeadlineExceeded,
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    ResourceBusy,
    from_wire,
)
from actors.runtime.kernel import ActorAddress, RunningEffect
from actors.runtime.progress import EMPTY, ObjectId, ShardId, Time


class CopyHoldAcquired(msgspec.Struct, frozen=True, gc=False):
    """The copy's durable hold was taken, with the shard's since; or taking it failed."""

    id: ObjectId
    since: Time = 0
    error: PenstockError | None = None


class CopyTimedOut(msgspec.Struct, frozen=True, gc=False):
    """The copy's deadline has passed."""

    id: ObjectId


class _Copy(msgspec.Struct, eq=False):
    session: ActorAddress[Any]
    request: CopyTo
    entry: CatalogObject
    dataflow: DataflowDescription
    timer: RunningEffect | None
    rights: HeldRights
    held: bool = False
    """True once the durable hold was taken."""
    created: bool = False
    """True once the replicas were told to run the dataflow."""
    state: str = "waiting"
    """Current activity of the copy, for display."""
    news: CopyProgressed | None = None
    """Progress that was not sent to the client yet."""
    report_in_flight: bool = False
    """True while a progress report is on its way to the client."""

    @property
    def id(self) -> ObjectId:
        return self.dataflow.id

    @property
    def number(self) -> int:
        return self.request.request

    @property
    def shard(self) -> ShardId:
        return self.dataflow.imports[0].shard


class RunningCopies(OpenRequests[_Copy]):
    """All running copies."""

    def __init__(self, state: ControllerState) -> None:
        super().__init__()
        self._state = state
        self._copies: dict[ObjectId, _Copy] = {}
        """Running copies by the id of their dataflow."""
        self._ended_early: dict[ObjectId, ShardId] = {}
        """Shards of copies that ended before their hold was taken, by dataflow: the hold is to be
        dropped."""

    # -- starting ----------------------------------------------------------------------------------

    def copy(
        self, session: ActorAddress[Any], request: CopyTo, rights: HeldRights = TRUSTED
    ) -> None:
        """Start a copy, which needs these rights. Raises `InvalidUsage` and its subclasses, and
        `ResourceBusy`."""
        state, limit = self._state, self._state.settings.copies_max
        entry = state.catalog.find_stored(request.name, "copy")
        what = f"copy of {entry.name}"
        if entry.kind == INDEX:
            on = state.catalog.by_id(entry.depends[0])
            raise InvalidUsage(f"cannot copy index {entry.name}: copy {on.name}")
        as_of = request.as_of
        time = max(state.latest_with_contents(entry), entry.as_of) if as_of is None else as_of
        state.check_time(what, time)
        if request.deadline_ms is not None and request.deadline_ms <= 0:
            raise InvalidUsage(f"deadline_ms = {request.deadline_ms}: must be greater than zero")
        imported = shard_import(entry)
        export = CopyToExport(
            entry.schema,
            request.destination,
            request.format,
            request.file_bytes_max,
            request.overwrite,
        )
        check_copy(export)
        if self.by_session()[session.path]:
            raise ResourceBusy(
                "this connection is already running a copy: wait for it, or open another connection"
            )
        if len(self._copies) >= limit:
            raise ResourceBusy(f"{limit} copies are running (copies_max): try again later")
        id_ = state.transient_id()
        dataflow = DataflowDescription(id_, entry.name, (imported,), export, time)
        wait_ms = request.deadline_ms
        timer = None if wait_ms is None else state.ctx.after(wait_ms, CopyTimedOut(id_))
        made = self._copies[id_] = _Copy(session, request, entry, dataflow, timer, rights)
        self._opened(made)
        # Take the hold before creating the dataflow, so that the history is kept while the copy
        # waits for its time and when a replica reconnects.
        state.hold(
            imported.shard,
            copy_holder(id_),
            time,
            done=lambda since: CopyHoldAcquired(id_, since),
            failed=lambda error: CopyHoldAcquired(id_, 0, error),
        )

    def hold_acquired(self, message: CopyHoldAcquired) -> None:
        """Create the dataflow now that the hold was taken, or refuse the copy."""
        made = self._copies.get(message.id)
        if made is None:
            shard = self._ended_early.pop(message.id, None)
            if shard is not None:
                self._state.drop_hold(shard, copy_holder(message.id))
            return
        made.held = True
        time = made.dataflow.as_of
        if message.error is not None:
            self._end(made, message.error)
        elif time < message.since:
            text = f"copy of {made.entry.name} at {time}: its history begins at {message.since}"
            self._end(made, ReadBelowSince(text))
        else:
            made.created = True
            self._state.command(CreateDataflow(made.dataflow))
            self._state.command(ScheduleDataflow(made.id))

    def turn(self, message: CopyHoldAcquired | CopyTimedOut) -> None:
        """Handle the result of taking a hold, or a deadline."""
        if isinstance(message, CopyHoldAcquired):
            self.hold_acquired(message)
        else:
            self.timed_out(message.id)

    # -- progress ------------------------------------------------------------------------------

    def noted(self, status: StatusResponse) -> None:
        """Handle the status of a dataflow, which may belong to a copy."""
        made = self._copies.get(status.id)
        if made is None or status.state not in ("waiting", "copying"):
            return
        made.state = status.state
        if made.request.progress:
            made.news = CopyProgressed(
                made.request.request,
                status.state,
                status.rows_out,
                status.parts_read,
                status.parts_total,
                status.bytes_read,
                status.bytes_total,
            )
            self._tell(made)

    def _tell(self, made: _Copy) -> None:
        # Send one report at a time, the next when the last was written, so that a slow client gets
        # only the newest.
        if made.news is not None and not made.report_in_flight:
            made.session.reply(made.news)
            made.news, made.report_in_flight = None, True

    def delivered(self, session: str, request: int) -> bool:
        """The client was sent a report: send the next. Return False if there is no such copy."""
        made = self._open.get((session, request))
        if made is None:
            return False
        made.report_in_flight = False
        self._tell(made)
        return True

    def responded(self, response: CopyToResponse) -> None:
        """Handle a replica's response. The response to a copy that has ended is ignored."""
        made = self._copies.get(response.id)
        if made is None:
            return
        match response.result:
            case CopyDone(rows, files, manifest):
                time, number = made.dataflow.as_of, made.request.request
                made.session.reply(CopiedInto(number, rows, files, manifest, time))
                self._end(made, None)
            case CopyFailed(code, text):
                self._end(made, from_wire(code, text, True))
            case CopyDropped():
                what = f"the copy of {made.entry.name} was dropped by its replica"
                self._end(made, ConnectionBroken(what))

    # -- reporting -----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``penstock.copies``."""
        for made in self._copies.values():
            yield (
                made.session.path,
                made.request.request,
                made.entry.name,
                made.dataflow.as_of,
                made.request.destination,
                made.request.format,
                made.state,
                made.request.deadline_ms,
                made.id,
            )

    # -- ending --------------------------------------------------------------------------------

    def timed_out(self, id_: ObjectId) -> None:
        """End a copy whose deadline has passed."""
        made = self._copies.get(id_)
        if made is None:
            return
        why = "it is being written"
        if made.state == "waiting":
            why = self._state.waiting_for(made.entry)
        what = f"copy of {made.entry.name} at {made.dataflow.as_of}"
        text = f"{what}: not finished within {made.request.deadline_ms} ms: {why}"
        self._end(made, DeadlineExceeded(text))

    def _end(self, made: _Copy, error: PenstockError | None) -> None:
        if error is not None:
            reply_error(made.session, made.request.request, error)
        if made.timer is not None:
            made.timer.cancel()
        del self._copies[made.id]
        self._closed(made)
        if made.created:
            # Drop the dataflow only if it was created: the history would keep a drop of an unknown
            # id.
            self._state.command(AllowCompaction(made.id, EMPTY))
        if made.held:
            self._state.drop_hold(made.shard, copy_holder(made.id))
        else:
            # The hold is still being taken: `hold_acquired` drops it.
            self._ended_early[made.id] = made.shard
