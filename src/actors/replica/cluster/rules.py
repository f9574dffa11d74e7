"""Rules of the messages on a connection of the compute half. Pure.

Rules of commands (`CommandRules`, checked by both sides):

- Hello, then CreateInstance (compatible with the running instance), then any commands; each of
  these and InitializationComplete once; a nonce is never used twice (the acceptor checks);
- an id names one dataflow at a time, and is free again when the end of the former was reported (all
  its frontiers empty, or its subscribe over);
- a dataflow's description must fit together (`check_description`);
- the uuid of a peek is free again when the peek was answered;
- pending work is bounded: dataflows, peeks without an answer and the bytes of their keys, ids that
  are only named;
- names are short, and a result fits a frame with the frame's other fields.

Commands about unknown objects are let through: a race, not an error.

Rules of responses (`ResponseRules`, checked by the client): nothing is answered before
InitializationComplete, and the rule of each kind of response stands where it is checked. State is
bounded by the commands: an id is forgotten when it was dropped and its end has come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from actors.connectors.sinks.copy_output import check_copy
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    Command,
    ConnectionRefused,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexExport,
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
    UpdateConfiguration,
    ViewExport,
)
from actors.replica.compute.history import advance_as_of
from actors.runtime.errors import InvalidUsage, RemoteProtocolError
from actors.runtime.progress import TIME_MAX, Frontier, ObjectId, is_empty
from actors.runtime.settings import FRAME_OVERHEAD_BYTES, NAME_BYTES_MAX, TOKEN_BYTES_MAX, Settings

StageTable: TypeAlias = Mapping[tuple[str, str], str]
"""Stages of a connection: (stage, command) leads to the next stage. A pair that it lacks violates
the protocol."""

OTHER: Final = "any other command"

STAGES: Final[StageTable] = {
    ("opened", "Hello"): "greeted",
    ("greeted", "CreateInstance"): "initializing",
    ("initializing", OTHER): "initializing",
    ("initializing", "InitializationComplete"): "computing",
    ("computing", OTHER): "computing",
}
"""Stages of a connection to the compute half."""

KEY_FRAMES_MAX: Final = 4
"""Limit of the keys of a client's unanswered peeks, as a multiple of `frame_bytes_max`."""


class StageRules:
    """Checks that the commands of one connection come in the order of its table; for both halves.

    Subclasses set `_stage` to what `_following` returned when the whole command was checked: a
    refused command does not count.
    """

    def __init__(self, stages: StageTable, settings: Settings) -> None:
        self._stages = stages
        self._placed = [event for _, event in stages if event != OTHER]
        """Commands that are sent once, at their place."""
        self._settings = settings
        self._stage = "opened"

    def check(self, command: Any) -> None:
        """Raise `RemoteProtocolError` if the command breaks the order, and `InvalidUsage` if it
        cannot be served; both end the connection. A refused command does not count."""
        raise NotImplementedError

    def ended(self, id: ObjectId) -> None:
        """Note that the end of an object was sent to the client: its id is free again."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Return whether InitializationComplete was sent."""
        return self._stage == self._stages["initializing", "InitializationComplete"]

    def _following(self, name: str) -> str:
        """Return the stage after a command of that name. Raises `RemoteProtocolError`."""
        stages = self._stages
        following = stages.get((self._stage, name))
        # Any other command may come at a stage that has room for any.
        if following is None and name not in self._placed:
            following = stages.get((self._stage, OTHER))
        if following is not None:
            return following
        wanted = [event for stage, event in stages if stage == self._stage and event != OTHER]
        if wanted and name != wanted[0] and self._stage != "initializing":
            raise RemoteProtocolError(f"{name} came before {wanted[0]}")
        # It has a place of its own, which is behind this connection, or it is Hello again.
        raise RemoteProtocolError(f"a connection says {name} once")


class CommandRules(StageRules):
    """State of one conversation. `running`: the cluster's instance; None on the client's side,
    which does not know it."""

    def __init__(self, running: CreateInstance | None, settings: Settings) -> None:
        super().__init__(STAGES, settings)
        self._running = running
        self._dataflows: dict[ObjectId, bool] = {}
        """True if the dataflow's end was reported already, by id."""
        self._ending: set[ObjectId] = set()
        """Dropped ids whose end was not reported yet."""
        self._streams: set[ObjectId] = set()
        """Live subscribes and copies, on the client's side."""
        self._spent: OrderedDict[ObjectId, None] = OrderedDict()
        """Ids of the last former subscribes and copies, on the client's side."""
        self._peeks: dict[str, int] = {}
        """Bytes of the keys of each peek without an answer."""
        self._peek_bytes = 0
        self._named: set[ObjectId] = set()
        """Ids compacted before InitializationComplete without being created."""

    def check(self, command: Command) -> None:
        """See `StageRules`."""
        following = self._following(type(command).__name__)
        match command:
            case Hello():
                check_name(command.nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            case CreateInstance():
                if self._running is not None:
                    check_instance(self._running, command)
            case InitializationComplete():
                self._named.clear()
            case CreateDataflow():
                self._create(command.dataflow)
            case AllowCompaction():
                self._compact(command)
            case UpdateConfiguration():
                self._check_configuration(command)
            case Peek():
                self._peek(command)
            case CancelPeek(uuid=uuid):
                # A peek that is cancelled before it has begun has no answer: its uuid is free at
                # once.
                if not self.complete:
                    self.answered(uuid)
        # Set last: a refused command does not count.
        self._stage = following

    def answered(self, uuid: str) -> None:
        """Note that the answer of a peek was sent."""
        self._peek_bytes -= self._peeks.pop(uuid, 0)

    def ended(self, id: ObjectId) -> None:
        """Note that the end of a dataflow was sent: all frontiers empty, or its subscribe over."""
        if id in self._ending:
            self._ending.discard(id)
        elif id in self._dataflows:
            self._dataflows[id] = True

    def _create(self, dataflow: DataflowDescription) -> None:
        id = dataflow.id
        check_name(id, "the id of a dataflow", NAME_BYTES_MAX)
        require(id not in self._dataflows, f"dataflow {id} exists already")
        require(
            # Else responses about the former could be taken for the new one's.
            id not in self._ending,
            f"dataflow {id} was dropped and its end has not been told yet: an id may be used "
            "again only after that",
        )
        require(0 <= dataflow.as_of <= TIME_MAX, f"{id} starts at {dataflow.as_of}: no such time")
        # A client cannot know when all workers are done with a subscribe: no id is used again.
        require(id not in self._spent, f"{id} was a subscribe: it needs a fresh id each time")
        limit = self._settings.dataflows_max
        if len(self._dataflows) + len(self._ending) >= limit:
            raise InvalidUsage(f"dataflow {id} is one more than dataflows_max ({limit})")
        check_description(dataflow)
        self._dataflows[id] = False
        self._named.discard(id)
        if self._running is None and isinstance(dataflow.export, SubscribeExport | CopyToExport):
            self._streams.add(id)

    def _compact(self, command: AllowCompaction) -> None:
        if not self.complete and command.id not in self._dataflows:
            # The replica's history keeps an entry for the id, whatever the frontier: it is bounded.
            check_name(command.id, "the id of an AllowCompaction", NAME_BYTES_MAX)
            self._named.add(command.id)
            limit = self._settings.dataflows_max
            require(len(self._named) <= limit, f"more than {limit} unknown ids (dataflows_max)")
        elif is_empty(command.frontier):
            ended = self._dataflows.pop(command.id, None)
            if self.complete and command.id in self._streams:
                self._streams.discard(command.id)
                self._spent[command.id] = None
                if len(self._spent) > self._settings.dataflows_max:
                    self._spent.popitem(last=False)
            # Before InitializationComplete nothing runs: a dropped id is free at once.
            elif ended is False and self.complete:
                self._ending.add(command.id)

    def _check_configuration(self, command: UpdateConfiguration) -> None:
        highest = self._settings.frame_bytes_max - FRAME_OVERHEAD_BYTES
        for name in ("result_bytes_max", "inline_bytes_max"):
            limit = getattr(command, name)
            if limit is not None and not 0 < limit <= highest:
                raise InvalidUsage(
                    f"{name} = {limit}: must be above 0 and at most {highest}, because a result "
                    f"travels in a frame (frame_bytes_max, less {FRAME_OVERHEAD_BYTES})"
                )
        tick = command.maintenance_ms
        if tick is not None and tick <= 0:
            raise InvalidUsage(f"maintenance_ms = {tick}: must be above 0")

    def _peek(self, peek: Peek) -> None:
        uuid, settings = peek.uuid, self._settings
        check_name(uuid, "the uuid of a Peek", TOKEN_BYTES_MAX)
        # Hot path: no message is formatted unless a rule is broken.
        if uuid in self._peeks:
            raise RemoteProtocolError(f"peek {uuid} has no answer yet: choose a fresh uuid")
        if not 0 <= peek.time <= TIME_MAX:
            raise RemoteProtocolError(f"a Peek at {peek.time}: no such time")
        # Beyond peeks_pending_max the workers answer Busy: leave room for peeks with these answers.
        most = settings.peeks_pending_max * (2 if self.complete else 1)
        if len(self._peeks) >= most:
            raise RemoteProtocolError(f"{most} peeks have no answer yet (peeks_pending_max)")
        size = len(peek.keys or b"") + sum(len(compared.value) for compared in peek.filter)
        bytes_max = KEY_FRAMES_MAX * settings.frame_bytes_max
        if self._peek_bytes + size > bytes_max:
            raise RemoteProtocolError(
                f"the keys of all peeks without an answer take more than {bytes_max} bytes"
            )
        self._peeks[uuid] = size
        self._peek_bytes += size


class ResponseChecks:
    """Checks the responses of one conversation, as its client sees them; for both halves. `heard`
    notes every command that is about to be sent, `check` checks every response."""

    def __init__(self) -> None:
        self._complete = False
        self.ended: list[ObjectId] = []
        """Ids whose end has come; its reader clears it."""

    def heard(self, command: Any) -> None:
        """Note a command that is about to be sent; it keeps the rules of commands."""
        raise NotImplementedError

    def check(self, response: Any) -> None:
        """Raise `RemoteProtocolError` with the rule that the response breaks, if it breaks one."""
        if isinstance(response, ConnectionRefused):
            return
        # Until then the replica still runs the former client's objects.
        if not self._complete:
            name = type(response).__name__
            raise RemoteProtocolError(f"{name} came before InitializationComplete")
        self._check(response)

    def _check(self, response: Any) -> None:
        raise NotImplementedError


KINDS = ("write", "input", "output")


class _Dataflow(msgspec.Struct):
    """State of one dataflow, from its responses."""

    description: DataflowDescription
    frontiers: dict[str, Frontier]
    upper: Frontier | None = None
    """Upper of a subscribe's last batch."""
    over: bool = False
    dropped: bool = False


class ResponseRules(ResponseChecks):
    """State of one conversation, as its client sees it."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[ObjectId, _Dataflow] = {}
        self._peeks: dict[str, bool] = {}
        """Peeks without an answer; True if it was cancelled."""

    def heard(self, command: Command) -> None:
        """See `ResponseChecks`."""
        match command:
            case InitializationComplete():
                self._complete = True
            case CreateDataflow(dataflow=dataflow):
                self._objects[dataflow.id] = _Dataflow(dataflow, {})
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

    def _check(self, response: Response) -> None:
        match response:
            case Frontiers():
                self._frontiers(response)
            case PeekResponse():
                self._peek(response)
            case SubscribeResponse():
                self._subscribe(response)
            case CopyToResponse(id=id):
                made = self._known(id, "the answer of a copy")
                # A copy is answered once.
                is_copy = isinstance(made.description.export, CopyToExport)
                require(is_copy and not made.over, f"copy {id} is none, or was answered before")
                self._over(id, made)
            # A status may name anything, at any time.
            case StatusResponse():
                pass

    def _known(self, id: ObjectId, what: str) -> _Dataflow:
        made = self._objects.get(id)
        if made is None:
            raise RemoteProtocolError(f"{what} came of {id}, which this connection does not know")
        return made

    def _frontiers(self, response: Frontiers) -> None:
        id = response.id
        # Of an index or view of this connection that has not ended. Each kind advances, begins at
        # the `as_of` at the earliest, and ends with the empty one.
        made = self._known(id, "frontiers")
        require(
            not isinstance(made.description.export, SubscribeExport | CopyToExport),
            f"frontiers came of {id}, which has none: it is a subscribe or a copy",
        )
        for kind in KINDS:
            new = getattr(response, kind)
            if new is None:
                continue
            old = made.frontiers.get(kind)
            require(
                old is None or old < new, f"{kind} of {id} went from {old} to {new}: not forward"
            )
            first = made.description.as_of
            require(new >= first, f"{kind} of {id} is {new}, before its as_of {first}")
            made.frontiers[kind] = new
        if all(is_empty(made.frontiers.get(kind, 0)) for kind in KINDS):
            self._over(id, made)

    def _peek(self, response: PeekResponse) -> None:
        uuid = response.uuid
        # Answered once; with Canceled only after a CancelPeek.
        canceled = self._peeks.pop(uuid, None)
        if canceled is None:
            raise RemoteProtocolError(f"peek {uuid} was answered twice, or never asked")
        if isinstance(response.result, PeekCanceled) and not canceled:
            raise RemoteProtocolError(
                f"peek {uuid} was answered with OperationCanceled, and nobody had canceled it"
            )

    def _subscribe(self, response: SubscribeResponse) -> None:
        id, said = response.id, response.batch
        # Batches are contiguous and not empty in time. Nothing follows the end: the empty upper, an
        # error, or `SubscribeDropped`, which has the last upper and comes only after a drop.
        made = self._known(id, "a batch")
        require(
            isinstance(made.description.export, SubscribeExport),
            f"a batch came of {id}, which is no subscribe",
        )
        require(not made.over, f"something came of subscribe {id} after its end")
        if isinstance(said, SubscribeDropped):
            require(made.dropped, f"subscribe {id} ended as dropped, and nobody had dropped it")
            last = made.upper
            require(
                last is None or said.frontier == last,
                f"subscribe {id} was dropped at {said.frontier}, its last batch ended at {last}",
            )
            self._over(id, made)
            return
        self._batch(id, made, said)

    def _batch(self, id: ObjectId, made: _Dataflow, batch: SubscribeBatch) -> None:
        lower, upper, last = batch.lower, batch.upper, made.upper
        require(lower < upper, f"a batch of subscribe {id} is empty in time: [{lower}, {upper})")
        require(
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
        require(batch.upper > as_of, f"{what} ends before its as_of {as_of} is told")
        require(
            # An error that ends the merging early has the lower of its part, which may be 0.
            batch.lower == begin or (batch.error is not None and batch.lower == 0),
            f"{what} must begin at {begin}",
        )

    def _over(self, id: ObjectId, made: _Dataflow) -> None:
        made.over = True
        self.ended.append(id)
        self._forget_if_done(id, made)

    def _forget_if_done(self, id: ObjectId, made: _Dataflow) -> None:
        if made.over and made.dropped:
            self._objects.pop(id, None)


def check_instance(running: CreateInstance, wanted: CreateInstance) -> None:
    """Raise `InvalidUsage` with the difference unless the running instance can serve: it has the
    same configuration, and expires no earlier than requested."""
    sooner = _or_never(wanted.expiration_ms) <= _or_never(running.expiration_ms)
    alike = (wanted.workers, wanted.version, wanted.stash) == (
        running.workers,
        running.version,
        running.stash,
    )
    if not (alike and sooner):
        raise InvalidUsage(
            f"the client asks for an instance of {_describe(wanted)}, but this one has "
            f"{_describe(running)}: configure both alike"
        )


def check_description(dataflow: DataflowDescription) -> None:
    """Raise `InvalidUsage` if the parts of a description do not fit together."""
    export, id = dataflow.export, dataflow.id
    if dataflow.until is not None and dataflow.until <= dataflow.as_of:
        raise InvalidUsage(
            f"dataflow {id} ends at {dataflow.until}, not after its as_of {dataflow.as_of}"
        )
    schemas = tuple(imported.schema for imported in dataflow.imports)
    match export:
        case ViewExport():
            _fits(id, "imports", len(export.plan.inputs), len(schemas))
            _fits(id, "hidden shards", len(export.plan.hidden), len(export.hidden_shards))
            for number, wanted in enumerate(export.plan.input_schemas):
                _same_columns(id, f"import {number}", schemas[number], wanted)
        case IndexExport():
            _fits(id, "imports", 1, len(schemas))
            _same_columns(id, "the import", schemas[0], export.schema)
            missing = [name for name in export.key if name not in export.schema.names]
            if missing or not export.key or len(set(export.key)) < len(export.key):
                raise InvalidUsage(
                    f"index {id} has the key ({', '.join(export.key)}); needed: distinct "
                    f"columns out of {', '.join(export.schema.names)}"
                )
        case SubscribeExport():
            _fits(id, "imports", 1, len(schemas))
            _same_columns(id, "the import", schemas[0], export.schema)
        case CopyToExport():
            _fits(id, "imports", 1, len(schemas))
            _same_columns(id, "the import", schemas[0], export.schema)
            check_copy(export)


def check_name(text: str, what: str, bytes_max: int) -> None:
    """Raise `RemoteProtocolError` unless a name is not empty and short."""
    if not text:
        raise RemoteProtocolError(f"{what} is empty")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > bytes_max:
        raise RemoteProtocolError(f"{what} takes {size} bytes; at most {bytes_max} are allowed")


def _fits(id: ObjectId, what: str, wanted: int, given: int) -> None:
    if wanted != given:
        raise InvalidUsage(f"dataflow {id} needs {wanted} {what}, {given} were given")


def _same_columns(id: ObjectId, what: str, given: TableSchema, wanted: TableSchema) -> None:
    """Raise `InvalidUsage` unless names and types are equal; nullability may differ."""
    if [(c.name, c.type) for c in given.columns] != [(c.name, c.type) for c in wanted.columns]:
        raise InvalidUsage(
            f"dataflow {id}: {what} has the columns {given.ddl()}, needed are {wanted.ddl()}"
        )


def _or_never(expiration_ms: int | None) -> float:
    return float("inf") if expiration_ms is None else expiration_ms


def _describe(instance: CreateInstance) -> str:
    expires = "never" if instance.expiration_ms is None else f"after {instance.expiration_ms} ms"
    stash = "a stash" if instance.stash else "no stash"
    return (
        f"{instance.workers} workers (version {instance.version}, {stash}, which expires {expires})"
    )


def require(holds: bool, rule: str) -> None:
    """Raise `RemoteProtocolError` with the rule unless it holds."""
    if not holds:
        raise RemoteProtocolError(rule)
