"""Copies into files: each is a transient dataflow that answers once.

Theory of operation. A copy is checked, then holds its shard at its `as_of`, so that neither a
wait nor a replica that comes back can lose the history; then its dataflow is created. Its answer
ends it, and so do its client (by canceling, or by going away), its deadline, and the end of its
object: then the dataflow is dropped, and what it has written goes. A replica that comes back
does the copy over; one that was done already says so (`dataflow/copy_places.py`).

Rules: a session has one copy at a time, the service `copies_max`. How far it is, is told to who
wants it, one at a time: the next when the last was written to the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from actors.controller.boot import source_import
from actors.controller.catalog import INDEX, CatalogObject
from actors.controller.desk import Desk, refuse
from actors.controller.holds import copy_holder
from actors.dataflow.copy_destinations import check_copy
from actors.errors import (
    Broken,
    Busy,
    Canceled,
    DeadlineExceeded,
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    UnknownObject,
    from_wire,
)
from actors.kernel import Address, Effect
from actors.progress import EMPTY, TIME_MAX, ObjectId, ShardId, Time
from actors.protocol.api import CopiedInto, CopyProgress, CopyTo
from actors.protocol.compute import (
    AllowCompaction,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    DataflowDescription,
    Schedule,
    Status,
)


class CopyHeld(msgspec.Struct, frozen=True, gc=False):
    """The copy's durable hold stands, with the shard's since; or it failed."""

    id: ObjectId
    since: Time = 0
    error: PenstockError | None = None


class CopyLate(msgspec.Struct, frozen=True, gc=False):
    """The copy's deadline has passed."""

    id: ObjectId


class _Copy(msgspec.Struct, eq=False):
    session: Address[Any]
    request: CopyTo
    entry: CatalogObject
    dataflow: DataflowDescription
    timer: Effect | None
    held: bool = False
    state: str = "waiting"
    news: CopyProgress | None = None
    """Not told yet."""
    telling: bool = False
    """One is on its way to the client."""

    @property
    def id(self) -> ObjectId:
        return self.dataflow.id

    @property
    def shard(self) -> ShardId:
        return self.dataflow.imports[0].shard


class Copies:
    """All running copies."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._copies: dict[ObjectId, _Copy] = {}
        self._by_session: dict[str, _Copy] = {}
        self._ended_early: dict[ObjectId, ShardId] = {}
        """Holds on their way for copies that have ended."""

    def __len__(self) -> int:
        return len(self._copies)

    # -- beginning -----------------------------------------------------------------------------

    def copy(self, session: Address[Any], request: CopyTo) -> None:
        """Begins a copy. Raises `InvalidUsage` and its children, and `Busy`."""
        desk, limit = self._desk, self._desk.settings.copies_max
        entry = desk.catalog.find(request.name)
        what = f"copy of {entry.name}"
        if entry.kind == INDEX:
            on = desk.catalog.by_id(entry.depends[0])
            raise InvalidUsage(f"{entry.name} is an index: copy {on.name}")
        as_of = request.as_of
        time = max(desk.latest_with_contents(entry), entry.as_of) if as_of is None else as_of
        if not 0 <= time <= TIME_MAX:
            raise InvalidUsage(f"{what} at {time}: a time is from 0 to {TIME_MAX}")
        desk.check_ahead(what, time)
        if request.deadline_ms is not None and request.deadline_ms <= 0:
            raise InvalidUsage(f"deadline_ms = {request.deadline_ms}: must be greater than zero")
        source = source_import(entry)
        export = CopyToExport(
            entry.schema,
            request.destination,
            request.format,
            request.file_bytes_max,
            request.overwrite,
        )
        check_copy(export)
        if session.path in self._by_session:
            raise Busy("a connection does one copy at a time: wait for it, or open another one")
        if len(self._copies) >= limit:
            raise Busy(f"{limit} copies are running (copies_max): try again later")
        id_ = desk.transient_id()
        dataflow = DataflowDescription(id_, entry.name, (source,), export, time)
        wait_ms = request.deadline_ms
        timer = None if wait_ms is None else desk.ctx.after(wait_ms, CopyLate(id_))
        made = _Copy(session, request, entry, dataflow, timer)
        self._copies[id_] = self._by_session[session.path] = made
        desk.hold(
            source.shard,
            copy_holder(id_),
            time,
            done=lambda since: CopyHeld(id_, since),
            failed=lambda error: CopyHeld(id_, 0, error),
        )

    def held(self, message: CopyHeld) -> None:
        """The hold stands: start, or refuse."""
        made = self._copies.get(message.id)
        if made is None:
            shard = self._ended_early.pop(message.id, None)
            if shard is not None:
                self._desk.drop_hold(shard, copy_holder(message.id))
            return
        made.held = True
        time = made.dataflow.as_of
        if message.error is not None:
            self._end(made, message.error)
        elif time < message.since:
            text = f"copy of {made.entry.name} at {time}: its history begins at {message.since}"
            self._end(made, ReadBelowSince(text))
        else:
            self._desk.command(CreateDataflow(made.dataflow))
            self._desk.command(Schedule(made.id))

    def turn(self, message: CopyHeld | CopyLate) -> None:
        """What became of something that was begun."""
        if isinstance(message, CopyHeld):
            self.held(message)
        else:
            self.late(message.id)

    # -- going on ------------------------------------------------------------------------------

    def noted(self, status: Status) -> None:
        """What a dataflow says of itself; it may be a copy's."""
        made = self._copies.get(status.id)
        if made is None or status.state not in ("waiting", "copying"):
            return
        made.state = status.state
        if made.request.progress:
            made.news = CopyProgress(
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
        if made.news is not None and not made.telling:
            made.session.reply(made.news)
            made.news, made.telling = None, True

    def delivered(self, session: str, request: int) -> bool:
        """The client has been told how far it is; False when there is no such copy."""
        made = self._by_session.get(session)
        if made is None or made.request.request != request:
            return False
        made.telling = False
        self._tell(made)
        return True

    def responded(self, response: CopyToResponse) -> None:
        """The replica's answer; that of a copy that has ended is dropped."""
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
                self._end(made, Broken(what))

    # -- for people ----------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """All of them, as ``penstock.copies`` tells them."""
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

    def late(self, id_: ObjectId) -> None:
        """A deadline has passed."""
        made = self._copies.get(id_)
        if made is None:
            return
        why = "it is being written"
        if made.state == "waiting":
            why = self._desk.waiting_for(made.entry)
        what = f"copy of {made.entry.name} at {made.dataflow.as_of}"
        text = f"{what}: not within {made.request.deadline_ms} ms: {why}"
        self._end(made, DeadlineExceeded(text))

    def cancel(self, session: str, request: int) -> bool:
        """Drops a copy on the client's wish; False when there is none of that number."""
        made = self._by_session.get(session)
        if made is None or made.request.request != request:
            return False
        self._end(made, Canceled("canceled on request"))
        return True

    def session_closed(self, session: str) -> None:
        """Drops the copy of a session that is gone."""
        made = self._by_session.get(session)
        if made is not None:
            self._end(made, None)

    def dropped(self, entry: CatalogObject) -> None:
        """Fails the copies of an object that is gone."""
        for made in list(self._copies.values()):
            if made.entry.id == entry.id:
                self._end(made, UnknownObject(f"{entry.kind} {entry.name} was dropped"))

    def _end(self, made: _Copy, error: PenstockError | None) -> None:
        if error is not None:
            refuse(made.session, made.request.request, error)
        if made.timer is not None:
            made.timer.cancel()
        del self._copies[made.id], self._by_session[made.session.path]
        if made.held:
            self._desk.command(AllowCompaction(made.id, EMPTY))
            self._desk.drop_hold(made.shard, copy_holder(made.id))
        else:
            self._ended_early[made.id] = made.shard
