"""Rules of the messages on a connection of the storage half, for both sides. Pure.

Rules of commands (`StorageCommandRules`, checked by both sides):

- First Hello, then any commands, with one InitializationComplete. Hello is sent once and its nonce
  never reused (the acceptor checks this).
- An id names one object until its drop has been reported: a source, an export of one source, or a
  sink.
- A running object may be altered only as `protocol.storage.ingestion_conflicts` (or
  `sink_conflicts`) allows.
- The uuid of a one-shot ingestion is free again once the ingestion was both answered and cancelled.
- A description fits together: its ids and its shards are distinct, and delays are positive.
- Names are short. Sources, exports, sinks and one-shot ingestions have one common limit
  (`dataflows_max`).

Rules of responses (`StorageResponseRules`, checked by the client): nothing is answered before
InitializationComplete. The rule for each kind of response is stated where it is checked.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.model.protocol.compute import (
    AllowCompaction,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    ConnectorConfiguration,
    DroppedId,
    FrontierUpper,
    IngestionDescription,
    Response,
    RetryDelays,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    SinkDescription,
    StagedBatches,
    StagingFailed,
    StatisticsUpdates,
    StatusUpdate,
    UpdateStorageConfiguration,
    ingestion_conflicts,
    sink_conflicts,
)
from actors.replica.cluster.rules import (
    OTHER,
    ResponseChecks,
    StageRules,
    StageTable,
    check_name,
    require,
)
from actors.replica.storage.history import StorageDefinitions
from actors.runtime.errors import InvalidUsage, OperationCanceled, RemoteProtocolError
from actors.runtime.progress import TIME_MAX, Frontier, ObjectId, is_empty
from actors.runtime.settings import NAME_BYTES_MAX, TOKEN_BYTES_MAX, Settings

STAGES: Final[StageTable] = {
    ("opened", "Hello"): "initializing",
    ("initializing", OTHER): "initializing",
    ("initializing", "InitializationComplete"): "storing",
    ("storing", OTHER): "storing",
}
"""Stages of a connection to the storage half."""


class StorageCommandRules(StageRules):
    """Checks the commands of one conversation."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(STAGES, settings)
        self._wanted = StorageDefinitions()
        """Definitions that result from the commands so far."""
        self._ending: set[ObjectId] = set()
        """Dropped ids whose drop has not been reported yet."""
        self._oneshots: dict[str, tuple[bool, bool]] = {}
        """(answered, cancelled) for each one-shot ingestion, by uuid."""

    def check(self, command: Command) -> None:
        """Check a command, and record it; see `StageRules.check`."""
        next_stage = self._next_stage(type(command).__name__)
        match command:
            case Hello():
                check_name(command.nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            case RunIngestion(description=description):
                self._check_source(description)
                self._end(_dropped_exports(self._wanted, description))
            case RunSink(description=description):
                self._check_sink(description)
            case RunOneshotIngestion():
                self._run_oneshot(command)
            case CancelOneshotIngestion(uuid=uuid):
                self._cancel(uuid)
            case AllowCompaction(id=id, frontier=frontier) if is_empty(frontier):
                source = self._wanted.ingestions.get(id)
                if self._wanted.knows(id):
                    self._end((id,) if source is None else source.ids)
            case UpdateStorageConfiguration():
                _check_configuration(command)
        # Do this last, because a refused command must not count.
        self._wanted.add(command)
        self._stage = next_stage

    def ended(self, id: ObjectId) -> None:
        """Record that the drop of an object, or the answer to a one-shot ingestion, was sent."""
        self._ending.discard(id)
        if id in self._oneshots:
            _, canceled = self._oneshots[id]
            self._update_oneshot(id, True, canceled)

    def _end(self, ids: tuple[ObjectId, ...]) -> None:
        # Nothing runs before InitializationComplete, so dropped ids are free immediately.
        if self.complete:
            self._ending |= set(ids)

    # -- descriptions ------------------------------------------------------------------------------

    def _check_source(self, new: IngestionDescription) -> None:
        for id in new.ids:
            check_name(id, f"an id of source {new.name}", NAME_BYTES_MAX)
            require(id not in self._ending, _drop_unreported(id))
        shards = (new.remap_shard, *(export.shard for export in new.exports))
        for what, names in (("ids", new.ids), ("shards", shards)):
            if len(set(names)) < len(names):
                raise InvalidUsage(f"source {new.id} has duplicate {what}: {names}")
        _check_parts(new.id, new.configuration, new.retry)
        wanted = self._wanted
        require(new.id not in wanted.source_of, f"{new.id} is already an export")
        for id in new.ids:
            require(id not in wanted.sinks, f"{id} is already a sink")
        for export in new.exports:
            at = wanted.source_of.get(export.id, new.id)
            require(at == new.id, f"{export.id} is already an export of source {at}")
            require(export.id not in wanted.ingestions, f"{export.id} is already a source")
        old = wanted.ingestions.get(new.id)
        self._check_room(new.id, len(new.ids) - (0 if old is None else len(old.ids)))
        if old is not None:
            _check_alteration(new.id, ingestion_conflicts(old, new))

    def _check_sink(self, new: SinkDescription) -> None:
        id, wanted = new.id, self._wanted
        check_name(id, "the id of a sink", NAME_BYTES_MAX)
        require(id not in self._ending, _drop_unreported(id))
        require(id not in wanted.ingestions, f"{id} is already a source")
        require(id not in wanted.source_of, f"{id} is already an export")
        require(
            0 <= new.as_of <= TIME_MAX,
            f"invalid as_of {new.as_of} of {id}: expected 0 to {TIME_MAX}",
        )
        _check_parts(id, new.configuration, new.retry)
        old = wanted.sinks.get(id)
        self._check_room(id, 1 if old is None else 0)
        if old is not None:
            _check_alteration(id, sink_conflicts(old, new))

    def _check_room(self, id: ObjectId, more: int) -> None:
        wanted, limit = self._wanted, self._settings.dataflows_max
        there = len(wanted.ingestions) + len(wanted.source_of) + len(wanted.sinks)
        there += len(self._ending) + len(self._oneshots)
        if more > 0 and there + more > limit:
            raise InvalidUsage(
                f"cannot run {id}: too many objects: {there + more} (limit dataflows_max: {limit})"
            )

    # -- one-shot ingestions -----------------------------------------------------------------------

    def _run_oneshot(self, command: RunOneshotIngestion) -> None:
        uuid = command.uuid
        check_name(uuid, "the uuid of a one-shot ingestion", TOKEN_BYTES_MAX)
        require(
            uuid not in self._oneshots,
            f"one-shot ingestion {uuid} is still in use: choose a new uuid",
        )
        _check_parts(uuid, command.request, RetryDelays())
        self._check_room(uuid, 1)
        self._oneshots[uuid] = (False, False)

    def _cancel(self, uuid: str) -> None:
        if uuid in self._oneshots:
            answered, _ = self._oneshots[uuid]
            # It never runs before InitializationComplete, so it gets no answer.
            self._update_oneshot(uuid, answered or not self.complete, True)

    def _update_oneshot(self, uuid: str, answered: bool, canceled: bool) -> None:
        # Both are needed: histories keep the ingestion until it is cancelled.
        if answered and canceled:
            del self._oneshots[uuid]
        else:
            self._oneshots[uuid] = (answered, canceled)


class _Object(msgspec.Struct):
    """State of one object, derived from its responses."""

    upper: Frontier = 0
    """Last reported upper."""
    to_drop: bool = False
    """True once its drop has been sent."""


class StorageResponseRules(ResponseChecks):
    """Checks the responses of one client of the storage half.

    `ended` also contains uuids of one-shot ingestions.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted = StorageDefinitions()
        """Definitions that result from the commands so far."""
        self._objects: dict[ObjectId, _Object] = {}
        """Objects that run for this client, by id."""
        self._oneshots: dict[str, bool] = {}
        """Unanswered one-shot ingestions by uuid. True if it was cancelled."""

    def note_command(self, command: Command) -> None:
        """Record a command that is about to be sent; see `ResponseChecks.note_command`."""
        if self._complete:
            self._note(command)
        self._wanted.add(command)
        if isinstance(command, InitializationComplete):
            self._complete = True
            # The replica starts running objects only now. Of the earlier commands, those count that
            # are still wanted.
            for said in self._wanted.commands():
                self._note(said)

    def _note(self, command: Command) -> None:
        match command:
            case RunIngestion(description=description):
                self._to_drop(_dropped_exports(self._wanted, description))
                self._begin(*description.ids)
            case RunSink(description=description):
                self._begin(description.id)
            case RunOneshotIngestion(uuid=uuid):
                self._oneshots[uuid] = False
            case CancelOneshotIngestion(uuid=uuid) if uuid in self._oneshots:
                self._oneshots[uuid] = True
            case AllowCompaction(id=id, frontier=frontier) if is_empty(frontier):
                source = self._wanted.ingestions.get(id)
                self._to_drop((id,) if source is None else source.ids)

    def _begin(self, *ids: ObjectId) -> None:
        for id in ids:
            self._objects.setdefault(id, _Object())

    def _to_drop(self, ids: tuple[ObjectId, ...]) -> None:
        for id in ids:
            if id in self._objects:
                self._objects[id].to_drop = True

    def _check(self, response: Response) -> None:
        match response:
            case FrontierUpper(id=id, upper=upper):
                # Must be an object that this connection runs. The upper only advances.
                made = self._object(id, "an upper")
                old = made.upper
                require(old < upper, f"the upper of {id} did not advance: from {old} to {upper}")
                made.upper = upper
            case DroppedId(id=id):
                # A drop is reported once, only after its command, and nothing follows it.
                made = self._object(id, "the drop")
                require(made.to_drop, f"got the drop of {id}, which was not dropped")
                del self._objects[id]
                self.ended.append(id)
            case StagedBatches(uuid=uuid):
                self._staged(uuid, response)
            # Status and statistics may be about any object, at any time.
            case StatusUpdate() | StatisticsUpdates():
                pass

    def _object(self, id: ObjectId, what: str) -> _Object:
        made = self._objects.get(id)
        if made is None:
            raise RemoteProtocolError(f"got {what} of {id}, which this connection does not run")
        return made

    def _staged(self, uuid: str, response: StagedBatches) -> None:
        # It is answered once, and with Canceled only after a cancel.
        canceled = self._oneshots.pop(uuid, None)
        require(
            canceled is not None, f"one-shot ingestion {uuid} was answered twice, or was never run"
        )
        result = response.result
        code = result.code if isinstance(result, StagingFailed) else ""
        require(
            bool(canceled) or code != OperationCanceled.__name__,
            f"one-shot ingestion {uuid} was answered with OperationCanceled, but was not canceled",
        )
        self.ended.append(uuid)


def _dropped_exports(wanted: StorageDefinitions, new: IngestionDescription) -> tuple[ObjectId, ...]:
    """Return the ids of the exports that an update of a source drops."""
    old = wanted.ingestions.get(new.id)
    return () if old is None else tuple(id for id in old.ids if id not in new.ids)


def _check_configuration(command: UpdateStorageConfiguration) -> None:
    for name in command.__struct_fields__:
        value = getattr(command, name)
        if value is not None and value <= 0:
            raise InvalidUsage(f"invalid {name} {value}: must be positive")


def _check_parts(id: ObjectId, configuration: ConnectorConfiguration, retry: RetryDelays) -> None:
    check_name(configuration.kind, f"the kind of {id}", NAME_BYTES_MAX)
    first, last = retry.delay_ms, retry.delay_ms_max
    for delay in (first, last):
        if delay is not None and delay <= 0:
            raise InvalidUsage(f"invalid retry delay {delay} ms of {id}: must be positive")
    if first is not None and last is not None and first > last:
        raise InvalidUsage(
            f"invalid retry delays of {id}: the first ({first} ms) exceeds the maximum ({last} ms)"
        )


def _check_alteration(id: ObjectId, differences: tuple[str, ...]) -> None:
    if differences:
        raise InvalidUsage(
            f"cannot alter {id}, which is already running: {'; '.join(differences)}. Drop it "
            "and create it again"
        )


def _drop_unreported(id: ObjectId) -> str:
    return (
        f"{id} was dropped but that has not been reported yet: an id can be reused only after that"
    )
