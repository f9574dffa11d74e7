"""Copies from files into tables (COPY FROM): the cluster reads each file once, then one append adds
all rows.

A copy is checked and its uuid looked up: a copy that is already complete gets its old answer. Then
the cluster stages the rows. The staged parts are prepared outside the write path
(`staged.claim_parts`), then passed to the table writer, which appends them in one
compare-and-append. A cluster that reconnects is asked again, by the same names, for the copies
still being read (`commands`).

A copy ends once: with its rows, an error, the disconnection of its client, or the drop of its
table; then the cluster forgets it. At most `copies_max` run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from actors.connectors.sources import oneshot as files
from actors.connectors.sources.file_reading import OPTIONS, check_options
from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.messages import AppendCopy, CopyAppended, CopyTurn, TablesAdvanced
from actors.control.controller.open_requests import OpenRequests
from actors.control.controller.replicas.replica import ReplicaLink
from actors.control.controller.roles.revocation import TRUSTED, HeldRights
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.staged import StagedCopy, claim_parts, parts_of
from actors.durable.persist import BatchPart, CopyCommitted
from actors.model.plan.column_defaults import known_values
from actors.model.plan.updates import to_ipc
from actors.model.protocol.api import CopiedFrom, CopyFromFiles, CopyFromProgress
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    ConnectorConfiguration,
    FilesStaged,
    RunOneshotIngestion,
    StagedBatches,
)
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    ResourceBusy,
    UnknownObject,
    WouldBlock,
    from_wire,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import Frontier
from actors.runtime.settings import TOKEN_BYTES_MAX

KIND = "files"
"""Kind in the request's configuration."""


class CopyFound(CopyTurn, frozen=True, gc=False):
    """Result of looking up the uuid: the earlier copy, if there was one, or an error."""

    name: str
    done: CopyCommitted | None = None
    tables_upper: Frontier = 0
    error: PenstockError | None = None


class CopyPrepared(CopyTurn, frozen=True, gc=False):
    """Result of `claim_parts`: the copy, or the error after which its parts were discarded."""

    name: str
    copy: StagedCopy | None = None
    error: PenstockError | None = None


class _Copy(msgspec.Struct, eq=False):
    session: ActorAddress[Any]
    request: CopyFromFiles
    target: TableTarget
    command: RunOneshotIngestion
    rights: HeldRights
    state: str = "beginning"
    """Current activity of the copy, for display."""
    progress: CopyFromProgress | None = None
    """Latest progress that the cluster reported."""
    news: CopyFromProgress | None = None
    """Progress that was not sent to the client yet."""
    report_in_flight: bool = False
    """True while a progress report is on its way to the client."""
    left: bool = False
    """True once no client waits for the outcome any more."""

    @property
    def name(self) -> str:
        return self.command.uuid

    @property
    def number(self) -> int:
        return self.request.request

    @property
    def entry(self) -> TableTarget:
        return self.target


class CopiesFrom(OpenRequests[_Copy]):
    """All running copies from files. `target` returns the table to write for a catalog entry, or
    raises the reason why it cannot be written."""

    def __init__(
        self,
        state: ControllerState,
        target: Callable[[CatalogObject], TableTarget],
        link: ReplicaLink | None,
    ) -> None:
        """Start without copies. `link` leads to the cluster's storage half; None if there is
        none."""
        super().__init__()
        self._state = state
        self._target = target
        self._link = link
        self._copies: dict[str, _Copy] = {}
        """Running copies by the name that the cluster knows them under."""

    # -- starting ----------------------------------------------------------------------------------

    def copy(
        self, session: ActorAddress[Any], request: CopyFromFiles, rights: HeldRights = TRUSTED
    ) -> None:
        """Start a copy, which needs these rights. Raises `InvalidUsage` and its subclasses, and
        `ResourceBusy`."""
        state, limit = self._state, self._state.settings.copies_max
        target = self._target(state.catalog.find(request.table))
        if self._link is None:
            raise InvalidUsage("this service cannot read external files")
        check_options(request.format, request.options)
        if not request.path:
            raise InvalidUsage("the path of the files must not be empty")
        if not 0 < len(request.uuid.encode()) <= TOKEN_BYTES_MAX:
            raise InvalidUsage(f"invalid uuid for the copy: expected 1 to {TOKEN_BYTES_MAX} bytes")
        # Otherwise both could find that the uuid is new, and append it twice.
        if any(each.request.uuid == request.uuid for each in self._copies.values()):
            raise ResourceBusy(
                f"copy {request.uuid} is already running: repeat it once it has ended"
            )
        if len(self._copies) >= limit:
            raise ResourceBusy(
                f"{limit} copies from files are running (copies_max): try again later"
            )
        assert request.format in OPTIONS
        values = known_values(target.defaults, target.schema, state.ctx.now_ms() * 1000)
        wanted = files.CopyFromConfig(
            path=request.path,
            format=request.format,
            columns=request.columns,
            options=request.options,
            pattern=request.pattern,
            recursive=request.recursive,
            defaults=to_ipc(pa.table({n: pa.array([v]) for n, v in values.items()}))
            if values
            else b"",
            computed=tuple(sorted(target.defaults.keys() - values)),
        )
        # The cluster gets a new name, since a client may repeat its uuid.
        command = RunOneshotIngestion(
            f"{state.transient_id()}-{state.ctx.random.getrandbits(64):016x}",
            target.id,
            target.shard,
            target.schema,
            ConnectorConfiguration(KIND, msgspec.json.encode(wanted)),
        )
        made = self._copies[command.uuid] = _Copy(session, request, target, command, rights)
        self._opened(made)
        persist, name = state.persist, made.name

        async def look() -> CopyFound:
            done = (await persist.state(target.shard)).copied(request.uuid)
            return CopyFound(name, done, await persist.tables_upper())

        state.ctx.effect(
            look,
            done=lambda found: found,
            failed=lambda error: CopyFound(name, error=to_penstock_error(error)),
        )

    def turn(self, message: CopyTurn) -> None:
        """Handle the result of an earlier effect."""
        match message:
            case CopyFound():
                self._found(message)
            case CopyPrepared():
                self._prepared(message)
            case CopyAppended():
                self._appended(message)

    def _found(self, message: CopyFound) -> None:
        made = self._copies.get(message.name)
        if made is None:
            return
        if message.error is not None:
            self._finish(made, message.error)
        elif message.done is not None:
            # If that append's outcome was unknown, the controller has not been told of its upper.
            self._state.ctx.self.reply(TablesAdvanced(message.tables_upper))
            self._done(made, message.done.rows, message.done.time, repeated=True)
        else:
            made.state = "reading"
            self._push(made.command)

    def commands(self) -> list[RunOneshotIngestion]:
        """Return the requests for copies that a new connection must stage."""
        return [made.command for made in self._copies.values() if made.state == "reading"]

    def _push(self, command: Command) -> None:
        if self._link is not None:
            self._link.push(command)

    # -- progress ------------------------------------------------------------------------------

    def noted(self, statistics: ObjectStatistics) -> None:
        """Update a copy's progress from its statistics."""
        made = self._copies.get(statistics.id)
        if made is None or made.state != "reading":
            return
        self._progress(
            made,
            CopyFromProgress(
                made.number,
                made.state,
                statistics.messages,
                statistics.files_known or 0,
                statistics.bytes,
                statistics.bytes_known or 0,
                statistics.rows_staged,
            ),
        )

    def _progress(self, made: _Copy, progress: CopyFromProgress) -> None:
        made.progress = progress
        if made.request.progress:
            made.news = progress
            self._tell(made)

    def _tell(self, made: _Copy) -> None:
        if made.news is not None and not made.report_in_flight and not made.left:
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

    def staged(self, response: StagedBatches, *, present: bool) -> None:
        """Handle the cluster's answer. `present` is False if it came over a former connection."""
        result = response.result
        parts = parts_of(result) if isinstance(result, FilesStaged) else ()
        made = self._copies.get(response.uuid)
        if made is None:
            self._discard(parts)
            return
        if not present or made.state != "reading":
            # Two connections may report the same parts, so they must not be discarded here: parts
            # that are not claimed in time become orphans.
            return
        # The answer has arrived: remove the request from the histories.
        self._push(CancelOneshotIngestion(made.name))
        made.state = "appending"
        if not isinstance(result, FilesStaged):
            self._finish(made, from_wire(result.code, result.text, True))
            return
        rows, number = sum(batch.rows for batch in result.batches), made.number
        read = (result.files, result.files, result.bytes, result.bytes)
        self._progress(made, CopyFromProgress(number, made.state, *read, rows))
        state, target, name = self._state, made.target, made.name
        uuid, limit = made.request.uuid, state.settings.copy_keyed_rows_max
        state.ctx.effect(
            lambda: claim_parts(state.persist, state.ctx.clock, target, uuid, parts, limit),
            done=lambda copy: CopyPrepared(name, copy),
            failed=lambda error: CopyPrepared(name, None, to_penstock_error(error)),
        )

    def _prepared(self, message: CopyPrepared) -> None:
        """Send the prepared parts to the table writer, unless the table is being dropped."""
        made, copy = self._copies.get(message.name), message.copy
        if made is None:
            self._discard(() if copy is None else copy.parts)
            return
        if copy is None:
            self._finish(made, message.error or UnknownObject(f"table {made.target.name}"))
            return
        try:
            entry = self._state.catalog.get(made.target.id)
            if entry is None:
                raise UnknownObject(f"table {made.target.name} was dropped")
            # Raises while the table is being dropped.
            self._target(entry)
            self._state.writer.send_nowait(AppendCopy(made.name, copy))
        except (PenstockError, WouldBlock) as error:
            self._discard(copy.parts)
            late = ResourceBusy("too many writes are waiting: try again later")
            self._finish(made, late if isinstance(error, WouldBlock) else error)

    def _appended(self, message: CopyAppended) -> None:
        made = self._copies.get(message.name)
        if made is None:
            return
        if message.error is not None:
            self._finish(made, message.error)
        else:
            self._done(made, message.rows, message.time, repeated=message.repeated)

    def _discard(self, parts: tuple[BatchPart, ...]) -> None:
        if parts:
            persist = self._state.persist
            self._state.ctx.effect(lambda: persist.discard_parts(parts), done=lambda _: None)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``penstock.copies_from``."""
        for made in self._copies.values():
            request, far = made.request, made.progress
            files = (None, None) if far is None else (far.files_done, far.files)
            read = (None, None) if far is None else (far.bytes_done, far.bytes)
            own = made.session.path, request.request, made.target.name, request.path
            rows = 0 if far is None else far.rows
            yield (*own, request.format, made.state, *files, *read, rows, made.name)

    # -- ending --------------------------------------------------------------------------------

    def _end(self, made: _Copy, error: PenstockError | None) -> None:
        """Drop a copy, unless the writer has it."""
        if made.state == "appending":
            if isinstance(error, UnknownObject):
                return  # the writer has the copy: its outcome follows
            if error is not None:
                # The writer has the copy and may be appending it, so it can no longer be canceled.
                error.determinate = False
                reply_error(made.session, made.number, error)
            made.left = True
            self._closed(made)
            return
        if made.state == "reading":
            self._push(CancelOneshotIngestion(made.name))
        self._finish(made, error)

    def _done(self, made: _Copy, rows: int, time: int, *, repeated: bool) -> None:
        if not made.left:
            made.session.reply(CopiedFrom(made.number, rows, time, repeated))
        self._finish(made, None)

    def _finish(self, made: _Copy, error: PenstockError | None) -> None:
        if not made.left:
            self._closed(made)
            if error is not None:
                reply_error(made.session, made.number, error)
        del self._copies[made.name]
