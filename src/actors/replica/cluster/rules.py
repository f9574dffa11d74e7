"""Rules of a client's commands and their order, checked on both sides. Pure.

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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, TypeAlias

from actors.connectors.sinks.copy_output import check_copy
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    Command,
    CopyToExport,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Hello,
    IndexExport,
    InitializationComplete,
    Peek,
    SubscribeExport,
    UpdateConfiguration,
    ViewExport,
)
from actors.runtime.errors import InvalidUsage, RemoteProtocolError
from actors.runtime.progress import TIME_MAX, ObjectId, is_empty
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
        """Raise `RemoteProtocolError` if the command breaks the order, and `InvalidUsage` if this
        instance cannot serve it; both end the connection."""
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
