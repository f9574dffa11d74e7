"""Rules of the messages on a connection of the compute half. Pure.

Rules of commands (`CommandRules`, checked by both sides):

- First Hello, then CreateInstance (compatible with the running instance), then any commands. Each
  of these two and InitializationComplete is sent once. A nonce is never reused (the acceptor checks
  this).
- An id names one dataflow at a time. It is free again once the end of the dataflow has been
  reported (all frontiers empty, or the subscribe over).
- The parts of a dataflow's description must fit together (`check_description`).
- The uuid of a peek is free again once the peek has been answered.
- Pending work is bounded: dataflows, unanswered peeks and the bytes of their keys, and ids that are
  only named.
- Names are short, and a result fits into a frame together with the frame's other fields.

Commands about unknown objects are allowed: they are a race, not an error.

Rules of responses (`ResponseRules`, checked by the client): nothing is answered before
InitializationComplete. The rule for each kind of response is stated where it is checked. The
commands bound the state: an id is forgotten once it has been dropped and its end has arrived.
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
"""Stages of a connection: (stage, command) → next stage. A missing pair violates the protocol."""

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
"""Limit on the keys of a client's unanswered peeks, as a multiple of `frame_bytes_max`."""


class StageRules:
    """Checks that the commands of a connection arrive in the order of its stage table. For both
    halves.

    Once the whole command has been checked, subclasses set `_stage` to the value that `_next_stage`
    returned, so a refused command does not advance the stage.
    """

    def __init__(self, stages: StageTable, settings: Settings) -> None:
        self._stages = stages
        self._sent_once = [event for _, event in stages if event != OTHER]
        """Commands that have a fixed place and are sent once."""
        self._settings = settings
        self._stage = "opened"
        """Current stage of the connection."""

    def check(self, command: Any) -> None:
        """Raise `RemoteProtocolError` if the command breaks the order, and `InvalidUsage` if it
        cannot be served.

        Both end the connection. A refused command leaves the state unchanged.
        """
        raise NotImplementedError

    def ended(self, id: ObjectId) -> None:
        """Record that the end of an object was sent to the client, so that its id is free again."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Return whether InitializationComplete was sent."""
        return self._stage == self._stages["initializing", "InitializationComplete"]

    def _next_stage(self, name: str) -> str:
        """Return the stage after a command of this type. Raise `RemoteProtocolError` if it is not
        allowed."""
        stages = self._stages
        next_stage = stages.get((self._stage, name))
        # Commands without a fixed place may be sent in any stage that allows other commands.
        if next_stage is None and name not in self._sent_once:
            next_stage = stages.get((self._stage, OTHER))
        if next_stage is not None:
            return next_stage
        wanted = [event for stage, event in stages if stage == self._stage and event != OTHER]
        if wanted and name != wanted[0] and self._stage != "initializing":
            raise RemoteProtocolError(f"got {name} before {wanted[0]}")
        # The command has a fixed place that has passed, or it is a second Hello.
        raise RemoteProtocolError(f"{name} may be sent only once per connection")


class CommandRules(StageRules):
    """Checks the commands of one conversation.

    `running` is the cluster's instance; None on the client's side, which does not know it.
    """

    def __init__(self, running: CreateInstance | None, settings: Settings) -> None:
        super().__init__(STAGES, settings)
        self._running = running
        self._dataflows: dict[ObjectId, bool] = {}
        """Dataflows by id. True if the dataflow's end was already reported."""
        self._ending: set[ObjectId] = set()
        """Dropped ids whose end has not been reported yet."""
        self._streams: set[ObjectId] = set()
        """Running subscribes and copies, on the client's side."""
        self._ended_streams: OrderedDict[ObjectId, None] = OrderedDict()
        """Ids of the most recent ended subscribes and copies, on the client's side."""
        self._peeks: dict[str, int] = {}
        """Bytes of the keys of each unanswered peek, by uuid."""
        self._peek_bytes = 0
        """Sum of these bytes."""
        self._named: set[ObjectId] = set()
        """Ids that were compacted before InitializationComplete without being created."""

    def check(self, command: Command) -> None:
        """Check a command, and record it; see `StageRules.check`."""
        next_stage = self._next_stage(type(command).__name__)
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
                # A peek that is cancelled before it could start gets no answer, so its uuid is free
                # immediately.
                if not self.complete:
                    self.answered(uuid)
        # Set last, because a refused command must not count.
        self._stage = next_stage

    def answered(self, uuid: str) -> None:
        """Record that a peek was answered."""
        self._peek_bytes -= self._peeks.pop(uuid, 0)

    def ended(self, id: ObjectId) -> None:
        """Record that the end of a dataflow was sent: all frontiers empty, or its subscribe
        over."""
        if id in self._ending:
            self._ending.discard(id)
        elif id in self._dataflows:
            self._dataflows[id] = True

    def _create(self, dataflow: DataflowDescription) -> None:
        id = dataflow.id
        check_name(id, "the id of a dataflow", NAME_BYTES_MAX)
        require(id not in self._dataflows, f"dataflow {id} already exists")
        require(
            # Otherwise responses about the old dataflow could be taken for the new one's.
            id not in self._ending,
            f"dataflow {id} was dropped but its end has not been reported yet: an id can be reused "
            "only after that",
        )
        require(
            0 <= dataflow.as_of <= TIME_MAX,
            f"invalid as_of {dataflow.as_of} of {id}: expected 0 to {TIME_MAX}",
        )
        # A client cannot know when all workers are done with a subscribe, so its id is never
        # reused.
        require(
            id not in self._ended_streams,
            f"{id} was already used for a subscribe: use a new id each time",
        )
        limit = self._settings.dataflows_max
        if len(self._dataflows) + len(self._ending) >= limit:
            raise InvalidUsage(
                f"cannot create dataflow {id}: too many dataflows (limit dataflows_max: {limit})"
            )
        check_description(dataflow)
        self._dataflows[id] = False
        self._named.discard(id)
        if self._running is None and isinstance(dataflow.export, SubscribeExport | CopyToExport):
            self._streams.add(id)

    def _compact(self, command: AllowCompaction) -> None:
        if not self.complete and command.id not in self._dataflows:
            # The replica's history keeps an entry for the id whatever the frontier is, so the
            # number is bounded.
            check_name(command.id, "the id of an AllowCompaction", NAME_BYTES_MAX)
            self._named.add(command.id)
            limit = self._settings.dataflows_max
            require(
                len(self._named) <= limit, f"too many unknown ids (limit dataflows_max: {limit})"
            )
        elif is_empty(command.frontier):
            ended = self._dataflows.pop(command.id, None)
            if self.complete and command.id in self._streams:
                self._streams.discard(command.id)
                self._ended_streams[command.id] = None
                if len(self._ended_streams) > self._settings.dataflows_max:
                    self._ended_streams.popitem(last=False)
            # Nothing runs before InitializationComplete, so a dropped id is free immediately.
            elif ended is False and self.complete:
                self._ending.add(command.id)

    def _check_configuration(self, command: UpdateConfiguration) -> None:
        highest = self._settings.frame_bytes_max - FRAME_OVERHEAD_BYTES
        for name in ("result_bytes_max", "inline_bytes_max"):
            limit = getattr(command, name)
            if limit is not None and not 0 < limit <= highest:
                raise InvalidUsage(
                    f"invalid {name} {limit}: expected 1 to {highest}, because a result must fit "
                    f"in a frame (frame_bytes_max minus {FRAME_OVERHEAD_BYTES})"
                )
        tick = command.maintenance_ms
        if tick is not None and tick <= 0:
            raise InvalidUsage(f"invalid maintenance_ms {tick}: must be positive")

    def _peek(self, peek: Peek) -> None:
        uuid, settings = peek.uuid, self._settings
        check_name(uuid, "the uuid of a Peek", TOKEN_BYTES_MAX)
        # Hot path: format a message only if a rule is broken.
        if uuid in self._peeks:
            raise RemoteProtocolError(f"peek {uuid} is still pending: choose a new uuid")
        if not 0 <= peek.time <= TIME_MAX:
            raise RemoteProtocolError(
                f"invalid time {peek.time} of peek {uuid}: expected 0 to {TIME_MAX}"
            )
        # The workers refuse peeks beyond peeks_pending_max. Leave room for peeks with such pending
        # refusals.
        most = settings.peeks_pending_max * (2 if self.complete else 1)
        if len(self._peeks) >= most:
            raise RemoteProtocolError(f"too many unanswered peeks: {most} (peeks_pending_max)")
        size = len(peek.keys or b"") + sum(len(compared.value) for compared in peek.filter)
        bytes_max = KEY_FRAMES_MAX * settings.frame_bytes_max
        if self._peek_bytes + size > bytes_max:
            raise RemoteProtocolError(
                f"the keys of unanswered peeks take more than {bytes_max} bytes"
            )
        self._peeks[uuid] = size
        self._peek_bytes += size


class ResponseChecks:
    """Checks the responses of one conversation, as its client sees them. For both halves.

    Call `note_command` with every command before it is sent, and `check` with every response.
    """

    def __init__(self) -> None:
        self._complete = False
        """True once InitializationComplete has been sent."""
        self.ended: list[ObjectId] = []
        """Ids whose end has arrived. The reader clears it."""

    def note_command(self, command: Any) -> None:
        """Record a command that is about to be sent and follows the rules of commands."""
        raise NotImplementedError

    def check(self, response: Any) -> None:
        """Raise `RemoteProtocolError` if the response breaks a rule."""
        if isinstance(response, ConnectionRefused):
            return
        # Until then the replica still runs the previous client's objects.
        if not self._complete:
            name = type(response).__name__
            raise RemoteProtocolError(f"got {name} before InitializationComplete")
        self._check(response)

    def _check(self, response: Any) -> None:
        raise NotImplementedError


KINDS = ("write", "input", "output")


class _Dataflow(msgspec.Struct):
    """State of one dataflow, derived from its responses."""

    description: DataflowDescription
    frontiers: dict[str, Frontier]
    """Last frontier of each kind."""
    upper: Frontier | None = None
    """Upper of the last batch of a subscribe."""
    over: bool = False
    """True once the dataflow's end has arrived."""
    dropped: bool = False
    """True once its drop has been sent."""


class ResponseRules(ResponseChecks):
    """Checks the responses of one client of the compute half."""

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[ObjectId, _Dataflow] = {}
        """Dataflows that were created and not forgotten, by id."""
        self._peeks: dict[str, bool] = {}
        """Unanswered peeks by uuid. True if the peek was cancelled."""

    def note_command(self, command: Command) -> None:
        """Record a command that is about to be sent; see `ResponseChecks.note_command`."""
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
                if not self._complete:  # it never started
                    # Its uuid is free immediately, because no answer will come.
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
                require(is_copy and not made.over, f"{id} is not a copy, or was already answered")
                self._over(id, made)
            # A status may be about any object, at any time.
            case StatusResponse():
                pass

    def _known(self, id: ObjectId, what: str) -> _Dataflow:
        made = self._objects.get(id)
        if made is None:
            raise RemoteProtocolError(f"got {what} of {id}, which this connection does not know")
        return made

    def _frontiers(self, response: Frontiers) -> None:
        id = response.id
        # Must be an index or view of this connection that has not ended. Each kind only advances,
        # starts at the `as_of` or later, and ends with the empty frontier.
        made = self._known(id, "frontiers")
        require(
            not isinstance(made.description.export, SubscribeExport | CopyToExport),
            f"got frontiers of {id}, which is a subscribe or a copy and has none",
        )
        for kind in KINDS:
            new = getattr(response, kind)
            if new is None:
                continue
            old = made.frontiers.get(kind)
            require(
                old is None or old < new, f"{kind} of {id} did not advance: from {old} to {new}"
            )
            first = made.description.as_of
            require(new >= first, f"{kind} of {id} is {new}, below its as_of {first}")
            made.frontiers[kind] = new
        if all(is_empty(made.frontiers.get(kind, 0)) for kind in KINDS):
            self._over(id, made)

    def _peek(self, response: PeekResponse) -> None:
        uuid = response.uuid
        # A peek is answered once, and with Canceled only after a CancelPeek.
        canceled = self._peeks.pop(uuid, None)
        if canceled is None:
            raise RemoteProtocolError(f"peek {uuid} was answered twice, or was never sent")
        if isinstance(response.result, PeekCanceled) and not canceled:
            raise RemoteProtocolError(
                f"peek {uuid} was answered with OperationCanceled, but was not canceled"
            )

    def _subscribe(self, response: SubscribeResponse) -> None:
        id, said = response.id, response.batch
        # Batches are contiguous and cover a non-empty interval. Nothing follows the end, which is
        # the empty upper, an error, or a `SubscribeDropped`. The latter has the last upper and
        # comes only after a drop.
        made = self._known(id, "a batch")
        require(
            isinstance(made.description.export, SubscribeExport),
            f"got a batch of {id}, which is not a subscribe",
        )
        require(not made.over, f"got a response of subscribe {id} after its end")
        if isinstance(said, SubscribeDropped):
            require(made.dropped, f"subscribe {id} ended as dropped, but was not dropped")
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
        require(
            lower < upper, f"a batch of subscribe {id} has an empty interval: [{lower}, {upper})"
        )
        require(
            last is None or lower == last,
            f"subscribe {id} is at {last}, but its next batch is [{lower}, {upper})",
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
        assert isinstance(export, SubscribeExport), "only subscribes have batches"
        # A snapshot covers all times up to the `as_of`; without it the first change is after the
        # `as_of`.
        begin = 0 if export.snapshot else as_of + 1
        what = f"the first batch of subscribe {id}, [{batch.lower}, {batch.upper}),"
        require(batch.upper > as_of, f"{what} does not cover its as_of {as_of}")
        require(
            # An error that ends the merging early has the lower bound of its part, which may be 0.
            batch.lower == begin or (batch.error is not None and batch.lower == 0),
            f"{what} must start at {begin}",
        )

    def _over(self, id: ObjectId, made: _Dataflow) -> None:
        made.over = True
        self.ended.append(id)
        self._forget_if_done(id, made)

    def _forget_if_done(self, id: ObjectId, made: _Dataflow) -> None:
        if made.over and made.dropped:
            self._objects.pop(id, None)


def check_instance(running: CreateInstance, wanted: CreateInstance) -> None:
    """Raise `InvalidUsage` if the running instance cannot serve the wanted one.

    It can if it has the same configuration and does not expire earlier than requested.
    """
    sooner = _expiration_or_never(wanted.expiration_ms) <= _expiration_or_never(
        running.expiration_ms
    )
    alike = (wanted.workers, wanted.version, wanted.stash) == (
        running.workers,
        running.version,
        running.stash,
    )
    if not (alike and sooner):
        raise InvalidUsage(
            f"the client requested an instance with {_describe(wanted)}, but this one has "
            f"{_describe(running)}: give both the same configuration"
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
                    f"invalid key ({', '.join(export.key)}) of index {id}: expected distinct "
                    f"columns from {', '.join(export.schema.names)}"
                )
        case SubscribeExport():
            _fits(id, "imports", 1, len(schemas))
            _same_columns(id, "the import", schemas[0], export.schema)
        case CopyToExport():
            _fits(id, "imports", 1, len(schemas))
            _same_columns(id, "the import", schemas[0], export.schema)
            check_copy(export)


def check_name(text: str, what: str, bytes_max: int) -> None:
    """Raise `RemoteProtocolError` if a name is empty or too long."""
    if not text:
        raise RemoteProtocolError(f"{what} is empty")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > bytes_max:
        raise RemoteProtocolError(f"{what} is too long: {size} bytes (limit {bytes_max})")


def _fits(id: ObjectId, what: str, wanted: int, given: int) -> None:
    if wanted != given:
        raise InvalidUsage(f"dataflow {id} needs {wanted} {what}: got {given}")


def _same_columns(id: ObjectId, what: str, given: TableSchema, wanted: TableSchema) -> None:
    """Raise `InvalidUsage` unless names and types are equal. Nullability may differ."""
    if [(c.name, c.type) for c in given.columns] != [(c.name, c.type) for c in wanted.columns]:
        raise InvalidUsage(
            f"dataflow {id}: {what} has columns {given.ddl()}: expected {wanted.ddl()}"
        )


def _expiration_or_never(expiration_ms: int | None) -> float:
    return float("inf") if expiration_ms is None else expiration_ms


def _describe(instance: CreateInstance) -> str:
    expires = "never" if instance.expiration_ms is None else f"after {instance.expiration_ms} ms"
    stash = "a stash" if instance.stash else "no stash"
    return (
        f"{instance.workers} workers (version {instance.version}, {stash}, which expires {expires})"
    )


def require(holds: bool, rule: str) -> None:
    """Raise `RemoteProtocolError` with the rule if it does not hold."""
    if not holds:
        raise RemoteProtocolError(rule)
