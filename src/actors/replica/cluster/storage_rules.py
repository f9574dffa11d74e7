"""Rules of the messages on a connection of the storage half, of either side. Pure.

Rules of commands (`StorageCommandRules`, checked by both sides):

- Hello, then any commands, InitializationComplete; both once; no nonce twice (the acceptor checks);
- an id names one object: a source, an export of one source, or a sink, until its drop was reported;
- a running object may be altered only as `protocol.storage.ingestion_conflicts` allows
  (`sink_conflicts`);
- the uuid of a one-shot ingestion is free again when it was answered and cancelled;
- a description fits together: its ids and its shards are distinct, delays are above 0;
- names are short; sources, exports, sinks and one-shots are bounded together (`dataflows_max`).

Rules of responses (`StorageResponseRules`, checked by the client): nothing is answered before
InitializationComplete, and the rule of each kind of response stands where it is checked.
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
    """State of one conversation, from its commands."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(STAGES, settings)
        self._wanted = StorageDefinitions()
        self._ending: set[ObjectId] = set()
        """Dropped ids whose drop was not reported yet."""
        self._oneshots: dict[str, tuple[bool, bool]] = {}
        """(answered, cancelled) by uuid."""

    def check(self, command: Command) -> None:
        """See `StageRules`."""
        following = self._following(type(command).__name__)
        match command:
            case Hello():
                check_name(command.nonce, "the nonce of Hello", TOKEN_BYTES_MAX)
            case RunIngestion(description=description):
                self._check_source(description)
                self._end(_left_out(self._wanted, description))
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
        # Ordered last: a refused command does not count.
        self._wanted.add(command)
        self._stage = following

    def ended(self, id: ObjectId) -> None:
        """Note that the drop of an object, or the answer of a one-shot ingestion, was sent."""
        self._ending.discard(id)
        if id in self._oneshots:
            _, canceled = self._oneshots[id]
            self._settle(id, True, canceled)

    def _end(self, ids: tuple[ObjectId, ...]) -> None:
        # Before InitializationComplete nothing runs: dropped ids are free at once.
        if self.complete:
            self._ending |= set(ids)

    # -- descriptions ------------------------------------------------------------------------------

    def _check_source(self, new: IngestionDescription) -> None:
        for id in new.ids:
            check_name(id, f"an id of source {new.name}", NAME_BYTES_MAX)
            require(id not in self._ending, _not_told(id))
        shards = (new.remap_shard, *(export.shard for export in new.exports))
        for what, names in (("ids", new.ids), ("shards", shards)):
            if len(set(names)) < len(names):
                raise InvalidUsage(f"source {new.id}: its {what} are not distinct: {names}")
        _check_parts(new.id, new.configuration, new.retry)
        wanted = self._wanted
        require(new.id not in wanted.source_of, f"{new.id} is an export already")
        for id in new.ids:
            require(id not in wanted.sinks, f"{id} is a sink already")
        for export in new.exports:
            at = wanted.source_of.get(export.id, new.id)
            require(at == new.id, f"{export.id} is an export of source {at} already")
            require(export.id not in wanted.ingestions, f"{export.id} is a source already")
        old = wanted.ingestions.get(new.id)
        self._check_room(new.id, len(new.ids) - (0 if old is None else len(old.ids)))
        if old is not None:
            _check_alteration(new.id, ingestion_conflicts(old, new))

    def _check_sink(self, new: SinkDescription) -> None:
        id, wanted = new.id, self._wanted
        check_name(id, "the id of a sink", NAME_BYTES_MAX)
        require(id not in self._ending, _not_told(id))
        require(id not in wanted.ingestions, f"{id} is a source already")
        require(id not in wanted.source_of, f"{id} is an export already")
        require(0 <= new.as_of <= TIME_MAX, f"{id} starts at {new.as_of}: no such time")
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
            raise InvalidUsage(f"{id} makes {there + more} objects, above dataflows_max ({limit})")

    # -- one-shot ingestions -----------------------------------------------------------------------

    def _run_oneshot(self, command: RunOneshotIngestion) -> None:
        uuid = command.uuid
        check_name(uuid, "the uuid of a one-shot ingestion", TOKEN_BYTES_MAX)
        require(
            uuid not in self._oneshots,
            f"the one-shot ingestion {uuid} was not answered and canceled yet: choose a fresh uuid",
        )
        _check_parts(uuid, command.request, RetryDelays())
        self._check_room(uuid, 1)
        self._oneshots[uuid] = (False, False)

    def _cancel(self, uuid: str) -> None:
        if uuid in self._oneshots:
            answered, _ = self._oneshots[uuid]
            # Before InitializationComplete it never runs, and so has no answer.
            self._settle(uuid, answered or not self.complete, True)

    def _settle(self, uuid: str, answered: bool, canceled: bool) -> None:
        # Both are needed: histories keep the ingestion until its cancel.
        if answered and canceled:
            del self._oneshots[uuid]
        else:
            self._oneshots[uuid] = (answered, canceled)


class _Object(msgspec.Struct):
    """State of one object, from its responses."""

    upper: Frontier = 0
    to_drop: bool = False


class StorageResponseRules(ResponseChecks):
    """State of one conversation, as its client sees it; in `ended` are also uuids of one-shot
    ingestions."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = StorageDefinitions()
        self._objects: dict[ObjectId, _Object] = {}
        self._oneshots: dict[str, bool] = {}
        """One-shot ingestions without an answer; True if it was cancelled."""

    def heard(self, command: Command) -> None:
        """See `ResponseChecks`."""
        if self._complete:
            self._hear(command)
        self._wanted.add(command)
        if isinstance(command, InitializationComplete):
            self._complete = True
            # Only now the replica runs anything: of the commands before, those count that are still
            # wanted.
            for said in self._wanted.commands():
                self._hear(said)

    def _hear(self, command: Command) -> None:
        match command:
            case RunIngestion(description=description):
                self._to_drop(_left_out(self._wanted, description))
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
                # Of an object that this connection runs; it advances.
                made = self._object(id, "an upper")
                old = made.upper
                require(old < upper, f"the upper of {id} went from {old} to {upper}: not forward")
                made.upper = upper
            case DroppedId(id=id):
                # Reported once, and only after its command; nothing follows it.
                made = self._object(id, "the drop")
                require(made.to_drop, f"{id} was dropped, and nobody had asked for it")
                del self._objects[id]
                self.ended.append(id)
            case StagedBatches(uuid=uuid):
                self._staged(uuid, response)
            # Status and statistics may name anything, at any time.
            case StatusUpdate() | StatisticsUpdates():
                pass

    def _object(self, id: ObjectId, what: str) -> _Object:
        made = self._objects.get(id)
        if made is None:
            raise RemoteProtocolError(f"{what} came of {id}, which this connection does not run")
        return made

    def _staged(self, uuid: str, response: StagedBatches) -> None:
        # Answered once; with Canceled only after a cancel.
        canceled = self._oneshots.pop(uuid, None)
        require(
            canceled is not None, f"the one-shot ingestion {uuid} was answered twice, or never run"
        )
        result = response.result
        code = result.code if isinstance(result, StagingFailed) else ""
        require(
            bool(canceled) or code != OperationCanceled.__name__,
            f"one-shot ingestion {uuid} was answered with OperationCanceled: nobody canceled it",
        )
        self.ended.append(uuid)


def _left_out(wanted: StorageDefinitions, new: IngestionDescription) -> tuple[ObjectId, ...]:
    """Return the exports that an update of a source drops."""
    old = wanted.ingestions.get(new.id)
    return () if old is None else tuple(id for id in old.ids if id not in new.ids)


def _check_configuration(command: UpdateStorageConfiguration) -> None:
    for name in command.__struct_fields__:
        value = getattr(command, name)
        if value is not None and value <= 0:
            raise InvalidUsage(f"{name} = {value}: must be above 0")


def _check_parts(id: ObjectId, configuration: ConnectorConfiguration, retry: RetryDelays) -> None:
    check_name(configuration.kind, f"the kind of {id}", NAME_BYTES_MAX)
    first, last = retry.delay_ms, retry.delay_ms_max
    for delay in (first, last):
        if delay is not None and delay <= 0:
            raise InvalidUsage(f"{id} is retried after {delay} ms: must be above 0")
    if first is not None and last is not None and first > last:
        raise InvalidUsage(f"{id} is retried after {first} ms, and after {last} ms at most")


def _check_alteration(id: ObjectId, differences: tuple[str, ...]) -> None:
    if differences:
        raise InvalidUsage(
            f"{id} runs and cannot be altered so: {'; '.join(differences)}. Drop it, then create "
            "it anew"
        )


def _not_told(id: ObjectId) -> str:
    return (
        f"{id} was dropped and that has not been told yet: an id may be used again only after that"
    )
