"""Events of a worker's storage state machine, and the effects it returns.

A render number identifies one rendering of an object and is the same on all workers. A ticket
identifies one look-up on worker 0. Only an object's owner (`renderings.owner_of`) starts and stops
its tasks.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.model.protocol.internal import ProposeCommand, SequencedCommand, TaggedCommand
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    Command,
    HealthStatus,
    IngestionDescription,
    Response,
    RetryDelays,
    RunOneshotIngestion,
    SinkDescription,
    StagedBatch,
    StagingResult,
    UpdateStorageConfiguration,
)
from actors.model.protocol.storage_internal import ForwardedCommand, ResumeState
from actors.replica.storage.reconciliation import DefinitionRefusal
from actors.runtime.progress import Frontier, Nonce, ObjectId
from actors.runtime.settings import Settings

# -- events ----------------------------------------------------------------------------------------


# Events and effects never leave the worker's actor, so they need no tags and no fields for
# compatibility with other releases.
class StorageClientLost(msgspec.Struct, frozen=True, gc=False):
    """The client with this nonce disconnected."""

    nonce: Nonce


class ResumeFound(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a look-up found the state to resume from."""

    ticket: int
    resume: ResumeState


class ResumeFailed(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a look-up failed and will be retried."""

    ticket: int
    error: str
    hint: str | None = None


class FrontierReached(msgspec.Struct, frozen=True, gc=False):
    """Owner: an export, a sink, or the remap shard (by the source's id) is durable below
    `upper`."""

    number: int
    id: ObjectId
    upper: Frontier


class HealthObservation(msgspec.Struct, frozen=True, gc=False):
    """Health of one object, as its task sees it."""

    id: ObjectId
    status: HealthStatus
    error: str | None = None
    hint: str | None = None


class HealthObserved(msgspec.Struct, frozen=True, gc=False):
    """Owner: a task reported the health of its objects.

    A round is one attempt to make progress. The first observation of an object in a round replaces
    the previous one; later observations in the same round can only make it worse.
    """

    number: int
    round: int
    observations: tuple[HealthObservation, ...]
    has_progressed: bool = True
    """True if the task has made progress since it started, so that its next failure counts as the
    first."""


class StatisticsMeasured(msgspec.Struct, frozen=True, gc=False):
    """Owner: a task reported the statistics of one object. Counts are since the task started."""

    number: int
    statistics: ObjectStatistics


class TaskFailed(msgspec.Struct, frozen=True, gc=False):
    """Owner: the task of a source or sink ended with an error, or crashed."""

    number: int
    error: str
    hint: str | None = None
    is_dropped: bool = False
    """True if a shard of the source is gone. The command that drops the source will follow."""


class RestartDue(msgspec.Struct, frozen=True, gc=False):
    """Owner: the delay that `RestartLater` asked for has passed."""

    number: int


class OneshotDone(msgspec.Struct, frozen=True, gc=False):
    """Owner: a one-shot ingestion ended."""

    number: int
    result: StagingResult


class TaskStopped(msgspec.Struct, frozen=True, gc=False):
    """Owner: a task stopped, or a source's external resources were removed."""

    number: int


class StatisticsDue(msgspec.Struct, frozen=True, gc=False):
    """The statistics interval has passed."""


Event: TypeAlias = (
    TaggedCommand[Command]
    | SequencedCommand
    | StorageClientLost
    | ForwardedCommand
    | ResumeFound
    | ResumeFailed
    | FrontierReached
    | HealthObserved
    | StatisticsMeasured
    | TaskFailed
    | RestartDue
    | OneshotDone
    | TaskStopped
    | StatisticsDue
)

# -- effects ---------------------------------------------------------------------------------------


class OfferStorageCommand(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: propose a command to the sequencer. Proposals keep the order of these effects."""

    propose: ProposeCommand


class ForwardCommand(msgspec.Struct, frozen=True, gc=False):
    """Other workers: ask worker 0 to propose a command."""

    forwarded: ForwardedCommand


class SwitchStorageClient(msgspec.Struct, frozen=True, gc=False):
    """Send responses to the client with this nonce (None: to nobody), and discard waiting ones."""

    nonce: Nonce | None


class SendStorageResponse(msgspec.Struct, frozen=True, gc=False):
    """Send a response to the client."""

    response: Response


class LookUp(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: find the state from which an ingestion resumes.

    `attempt` is the number of failed look-ups so far; the look-up waits for the corresponding
    delay. The answer is `ResumeFound` or `ResumeFailed`.
    """

    ticket: int
    description: IngestionDescription
    attempt: int


class CancelLookUp(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: cancel a look-up."""

    ticket: int


class StartIngestion(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the ingest task.

    It may write if `StorageState.writes_allowed`; otherwise `AllowTaskWrites` will follow.
    """

    number: int
    description: IngestionDescription
    resume: ResumeState


class StartSink(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the sink task. Writes are allowed as for `StartIngestion`."""

    number: int
    description: SinkDescription


class StartOneshot(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the task of a one-shot ingestion, which ends with `OneshotDone`."""

    number: int
    oneshot: RunOneshotIngestion


class StopTask(msgspec.Struct, frozen=True, gc=False):
    """Owner: stop a task, which may already have ended. Answered by `TaskStopped`.

    With `forget` the object was dropped, so its external resources are removed as well.
    """

    number: int
    forget: bool


class CleanUpSource(msgspec.Struct, frozen=True, gc=False):
    """Owner: remove the external resources of a dropped source that has no task.

    Answered by `TaskStopped`. `number` is negative, so it never equals a render number.
    """

    number: int
    description: IngestionDescription


class RestartLater(msgspec.Struct, frozen=True, gc=False):
    """Owner: send `RestartDue` after the delay for `attempt` consecutive failures."""

    number: int
    attempt: int
    retry: RetryDelays

    def delay_ms(self, settings: Settings) -> int:
        """Return the delay in ms. The object's own retry settings override the service's."""
        retry = self.retry
        if retry.delay_ms is not None:
            settings = msgspec.structs.replace(settings, retry_delay_ms_min=retry.delay_ms)
        if retry.delay_ms_max is not None:
            settings = msgspec.structs.replace(settings, retry_delay_ms_max=retry.delay_ms_max)
        return settings.retry_delay_ms(self.attempt)


class AllowTaskWrites(msgspec.Struct, frozen=True, gc=False):
    """Allow all tasks of this worker to write."""


class ConfigureTasks(msgspec.Struct, frozen=True, gc=False):
    """Change the settings of all tasks. An unset field means the service's setting."""

    configuration: UpdateStorageConfiguration


class DiscardParts(msgspec.Struct, frozen=True, gc=False):
    """Owner: delete staged parts that will never be appended."""

    batches: tuple[StagedBatch, ...]


class LogStorageReconciliation(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: log and count the result of reconciling with a new client."""

    nonce: Nonce
    kept: int
    run: int
    dropped: int
    skipped: int
    refused: tuple[DefinitionRefusal, ...]
    replaced: int = 0
    """Number of those run that replace a running definition."""


class LogRefusedUpdate(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: log and count a refused update."""

    refusal: DefinitionRefusal


Effect: TypeAlias = (
    OfferStorageCommand
    | ForwardCommand
    | SwitchStorageClient
    | SendStorageResponse
    | LookUp
    | CancelLookUp
    | StartIngestion
    | StartSink
    | StartOneshot
    | StopTask
    | CleanUpSource
    | RestartLater
    | AllowTaskWrites
    | ConfigureTasks
    | DiscardParts
    | LogStorageReconciliation
    | LogRefusedUpdate
)
