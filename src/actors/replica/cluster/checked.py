"""A client that checks both sides against the rules of the protocol.

A command that breaks a rule is not sent: its caller gets `LocalProtocolError`, and the connection
goes on. A response that breaks one ends the conversation: `receive` raises `RemoteProtocolError`
from then on, and the connection is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from actors.model.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    Command,
    ConnectionRefused,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    DataflowDescription,
    Frontiers,
    InitializationComplete,
    Peek,
    PeekCanceled,
    PeekResponse,
    Response,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeExport,
    SubscribeResponse,
)
from actors.model.protocol.internal import Half
from actors.replica.cluster.client import ClusterClient
from actors.replica.cluster.rules import CommandRules
from actors.replica.cluster.storage_rules import StorageCommandRules, StorageResponseRules
from actors.replica.compute.history import advance_as_of
from actors.runtime.errors import (
    InvalidUsage,
    LocalProtocolError,
    PenstockError,
    RemoteProtocolError,
)
from actors.runtime.progress import Frontier, ObjectId, is_empty
from actors.runtime.settings import Settings
from actors.runtime.telemetry import split_context

# -- Rules of a cluster's responses: the client's side of the protocol. Pure -----------------------
# `heard` notes every command that is about to be sent, `check` checks every response. Rules:
#
# - nothing is answered before InitializationComplete;
# - frontiers are of an index or view of this connection that has not ended; each kind advances,
#   begins at the `as_of` at the earliest, and ends with the empty one;
# - a peek is answered once; Canceled only after a CancelPeek;
# - batches of a subscribe are contiguous and not empty in time. Nothing follows the end: the empty
#   upper, an error, or `SubscribeDropped`, which has the last upper and comes only after a drop;
# - a copy is answered once;
# - statuses and `ConnectionRefused` may come at any time.
#
# State is bounded by the commands: an id is forgotten when it was dropped and its end has come.


KINDS = ("write", "input", "output")


class _Object(msgspec.Struct):
    """State of one dataflow, from its responses."""

    description: DataflowDescription
    frontiers: dict[str, Frontier]
    upper: Frontier | None = None
    """Upper of a subscribe's last batch."""
    over: bool = False
    dropped: bool = False


class ResponseRules:
    """State of one conversation, as its client sees it."""

    def __init__(self) -> None:
        self._complete = False
        self._objects: dict[ObjectId, _Object] = {}
        self._peeks: dict[str, bool] = {}
        """Peeks without an answer; True if it was cancelled."""
        self.ended: list[ObjectId] = []
        """Ids whose end has come; its reader clears it."""

    def heard(self, command: Command) -> None:
        """Note a command that is about to be sent; it keeps the rules of commands."""
        match command:
            case InitializationComplete():
                self._complete = True
            case CreateDataflow(dataflow=dataflow):
                self._objects[dataflow.id] = _Object(dataflow, {})
            case AllowCompaction(id=id, frontier=frontier):
                made = self._objects.get(id)
                if made is not None and is_empty(frontier):
                    made.dropped = True
                    self._forget_if_done(id, made)
                    if not self._complete:  # it never ran
                        self._objects.pop(id, None)
                elif made is not None and not self._complete and frontier > made.description.as_of:
                    # The replica's history advances the as_of in the same way.
                    made.description = advance_as_of(made.description, frontier)
            case Peek(uuid=uuid):
                self._peeks[uuid] = False
            case CancelPeek(uuid=uuid):
                if not self._complete:  # it was never begun
                    # Its uuid is free at once: no answer will come.
                    self._peeks.pop(uuid, None)
                elif uuid in self._peeks:
                    self._peeks[uuid] = True

    def check(self, response: Response) -> None:
        """Raise `RemoteProtocolError` with the rule that the response breaks, if it breaks one."""
        if isinstance(response, ConnectionRefused):
            return
        name = type(response).__name__
        # Until then the replica still runs the former client's dataflows.
        _require(self._complete, f"{name} came before InitializationComplete")
        match response:
            case Frontiers():
                self._frontiers(response)
            case PeekResponse():
                self._peek(response)
            case SubscribeResponse():
                self._subscribe(response)
            case CopyToResponse(id=id):
                made = self._known(id, "the answer of a copy")
                is_copy = isinstance(made.description.export, CopyToExport)
                _require(is_copy and not made.over, f"copy {id} is none, or was answered before")
                self._over(id, made)
            case StatusResponse():
                pass

    def _known(self, id: ObjectId, what: str) -> _Object:
        made = self._objects.get(id)
        if made is None:
            raise RemoteProtocolError(f"{what} came of {id}, which this connection does not know")
        return made

    def _frontiers(self, response: Frontiers) -> None:
        id = response.id
        made = self._known(id, "frontiers")
        _require(
            not isinstance(made.description.export, SubscribeExport | CopyToExport),
            f"frontiers came of {id}, which has none: it is a subscribe or a copy",
        )
        for kind in KINDS:
            new = getattr(response, kind)
            if new is None:
                continue
            old = made.frontiers.get(kind)
            _require(
                old is None or old < new, f"{kind} of {id} went from {old} to {new}: not forward"
            )
            first = made.description.as_of
            _require(new >= first, f"{kind} of {id} is {new}, before its as_of {first}")
            made.frontiers[kind] = new
        if all(is_empty(made.frontiers.get(kind, 0)) for kind in KINDS):
            self._over(id, made)

    def _peek(self, response: PeekResponse) -> None:
        uuid = response.uuid
        canceled = self._peeks.pop(uuid, None)
        if canceled is None:
            raise RemoteProtocolError(f"peek {uuid} was answered twice, or never asked")
        if isinstance(response.result, PeekCanceled) and not canceled:
            raise RemoteProtocolError(
                f"peek {uuid} was answered with OperationCanceled, and nobody had canceled it"
            )

    def _subscribe(self, response: SubscribeResponse) -> None:
        id, said = response.id, response.batch
        made = self._known(id, "a batch")
        _require(
            isinstance(made.description.export, SubscribeExport),
            f"a batch came of {id}, which is no subscribe",
        )
        _require(not made.over, f"something came of subscribe {id} after its end")
        if isinstance(said, SubscribeDropped):
            _require(made.dropped, f"subscribe {id} ended as dropped, and nobody had dropped it")
            last = made.upper
            _require(
                last is None or said.frontier == last,
                f"subscribe {id} was dropped at {said.frontier}, its last batch ended at {last}",
            )
            self._over(id, made)
            return
        self._batch(id, made, said)

    def _batch(self, id: ObjectId, made: _Object, batch: SubscribeBatch) -> None:
        lower, upper, last = batch.lower, batch.upper, made.upper
        _require(lower < upper, f"a batch of subscribe {id} is empty in time: [{lower}, {upper})")
        _require(
            last is None or lower == last,
            f"subscribe {id} was at {last}, then came [{lower}, {upper})",
        )
        if last is None:
            self._first_batch(id, made.description, batch)
        made.upper = upper
        if batch.error is not None or is_empty(upper):
            self._over(id, made)

    def _first_batch(
        self, id: ObjectId, description: DataflowDescription, batch: SubscribeBatch
    ) -> None:
        as_of, export = description.as_of, description.export
        assert isinstance(export, SubscribeExport), "it was looked at"
        # A snapshot covers all times up to the `as_of`; without one the first change is behind it.
        begin = 0 if export.snapshot else as_of + 1
        what = f"the first batch of subscribe {id}, [{batch.lower}, {batch.upper}),"
        _require(batch.upper > as_of, f"{what} ends before its as_of {as_of} is told")
        _require(
            # An error that ends the merging early has the lower of its part, which may be 0.
            batch.lower == begin or (batch.error is not None and batch.lower == 0),
            f"{what} must begin at {begin}",
        )

    def _over(self, id: ObjectId, made: _Object) -> None:
        made.over = True
        self.ended.append(id)
        self._forget_if_done(id, made)

    def _forget_if_done(self, id: ObjectId, made: _Object) -> None:
        if made.over and made.dropped:
            self._objects.pop(id, None)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise RemoteProtocolError(rule)


class CheckedClient:
    """Checks the rules of a half for a client of either kind; see `ClusterClient`."""

    def __init__(self, inner: ClusterClient, settings: Settings, half: Half = "compute") -> None:
        self._inner = inner
        self._commands: Any
        self._responses: Any
        if half == "storage":
            self._commands = StorageCommandRules(settings)
            self._responses = StorageResponseRules()
        else:
            self._commands = CommandRules(None, settings)
            self._responses = ResponseRules()
        self._failed: RemoteProtocolError | None = None
        self._judged: Any = None
        """Command that was checked and noted, but not sent for want of room: it is not noted
        twice."""

    async def send(self, command: Any) -> None:
        """See `ClusterClient`. Raises `LocalProtocolError` for a command that breaks a rule."""
        self._judge(command)
        self._judged = None
        await self._inner.send(command)

    def offer(self, commands: Sequence[Any]) -> int:
        """See `ClusterClient`."""
        sent = 0
        for command in commands:
            try:
                self._judge(command)
                if not self._inner.offer((command,)):
                    break
            except PenstockError:
                if sent:
                    break  # the next call raises, for its first command
                raise
            self._judged = None
            sent += 1
        return sent

    def _judge(self, command: Any) -> None:
        if self._failed is not None:
            raise self._failed
        # By identity: a retry of the same command, not an equal one.
        if command is self._judged:
            return
        bare, _ = split_context(command)
        try:
            self._commands.check(bare)
        except (RemoteProtocolError, InvalidUsage) as error:
            raise LocalProtocolError(str(error)) from None
        self._responses.heard(bare)
        self._judged = command

    async def receive(self) -> Any:
        """See `ClusterClient`. Raises `RemoteProtocolError` when the cluster breaks a rule."""
        if self._failed is None:
            response = await self._inner.receive()
            self._hear(response)
        if self._failed is not None:
            await self._inner.close()
            raise self._failed
        return response

    def at_hand(self, count_max: int) -> list[Any]:
        """See `ClusterClient`."""
        found: list[Any] = []
        if self._failed is not None:
            return found
        for response in self._inner.at_hand(count_max):
            self._hear(response)
            if self._failed is not None:
                break  # the conversation has ended: drop the rest
            found.append(response)
        return found

    def _hear(self, response: Any) -> None:
        try:
            self._responses.check(response)
        except RemoteProtocolError as error:
            self._failed = error
            return
        if isinstance(response, PeekResponse):
            self._commands.answered(response.uuid)
        for id in self._responses.ended:
            self._commands.ended(id)
        self._responses.ended.clear()

    async def close(self) -> None:
        """See `ClusterClient`."""
        await self._inner.close()
