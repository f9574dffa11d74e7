"""What happens to a worker's storage state machine (events) and what it wants done (effects).

A render number names one rendering of an object, the same on all workers; a ticket names one
look-up on worker 0. Of an object only its owner (`renderings.owner_of`) starts and stops tasks.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.progress import Frontier, Nonce, ObjectId
from actors.protocol.internal import Propose, Sequenced
from actors.protocol.storage import (
    HealthStatus,
    IngestionDescription,
    Response,
    Retry,
    RunOneshotIngestion,
    SinkDescription,
    StagedBatch,
    StagingResult,
    Statistics,
    StorageTagged,
    UpdateConfiguration,
)
from actors.protocol.storage_internal import Forwarded, ResumeState
from actors.settings import Settings
from actors.storage.reconcile import Refusal

# -- events ----------------------------------------------------------------------------------------


class ClientLost(msgspec.Struct, frozen=True, gc=False):
    """The client of that nonce is gone."""

    nonce: Nonce


class ResumeFound(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: the answer of a look-up."""

    ticket: int
    resume: ResumeState


class ResumeFailed(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: a look-up failed; it is tried again."""

    ticket: int
    error: str
    hint: str | None = None


class Reached(msgspec.Struct, frozen=True, gc=False):
    """Owner: contents of an export, the remap shard (by the source's id) or a sink are durable
    below `upper`."""

    number: int
    id: ObjectId
    upper: Frontier


class Observation(msgspec.Struct, frozen=True, gc=False):
    """The health of one object, as its task sees it."""

    id: ObjectId
    status: HealthStatus
    error: str | None = None
    hint: str | None = None


class Observed(msgspec.Struct, frozen=True, gc=False):
    """Owner: a task tells of its objects' health. Of one round the first observation of an object
    replaces what was, later ones only make it worse."""

    number: int
    round: int
    observations: tuple[Observation, ...]
    gets_on: bool = True
    """Whether it has done more than begin: then its next failure is the first of a row."""


class Measured(msgspec.Struct, frozen=True, gc=False):
    """Owner: one object's statistics; counts are since the task's start."""

    number: int
    statistics: Statistics


class Failed(msgspec.Struct, frozen=True, gc=False):
    """Owner: the task of a source or sink has ended by an error, its own fault or another's."""

    number: int
    error: str
    hint: str | None = None
    is_dropped: bool = False
    """A shard of the source is gone; the command that drops it is on its way."""


class RestartDue(msgspec.Struct, frozen=True, gc=False):
    """Owner: the delay that `RestartLater` asked for is over."""

    number: int


class OneshotDone(msgspec.Struct, frozen=True, gc=False):
    """Owner: a one-shot ingestion has ended."""

    number: int
    result: StagingResult


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """Owner: the task that was to stop has stopped; or what was to be forgotten is."""

    number: int


class StatisticsDue(msgspec.Struct, frozen=True, gc=False):
    """The interval of statistics is over."""


Event: TypeAlias = (
    StorageTagged
    | Sequenced
    | ClientLost
    | Forwarded
    | ResumeFound
    | ResumeFailed
    | Reached
    | Observed
    | Measured
    | Failed
    | RestartDue
    | OneshotDone
    | Stopped
    | StatisticsDue
)

# -- effects ---------------------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: offer a command to the sequencer, in the order of these effects."""

    propose: Propose


class Forward(msgspec.Struct, frozen=True, gc=False):
    """Other workers: ask worker 0 to have it ordered."""

    forwarded: Forwarded


class SwitchClient(msgspec.Struct, frozen=True, gc=False):
    """Responses now go to this nonce (None: nowhere); forget those that still wait."""

    nonce: Nonce | None


class Respond(msgspec.Struct, frozen=True, gc=False):
    """Answer the client."""

    response: Response


class LookUp(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: find where an ingestion goes on, after the delay for so many failed attempts;
    answer `ResumeFound` or `ResumeFailed`."""

    ticket: int
    description: IngestionDescription
    attempt: int


class CancelLookUp(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: that answer is not wanted any more."""

    ticket: int


class StartIngestion(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the task. It may write when `StorageState.writes_allowed` (`AllowTaskWrites`
    tells when that comes later)."""

    number: int
    description: IngestionDescription
    resume: ResumeState


class StartSink(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the task, as `StartIngestion`."""

    number: int
    description: SinkDescription


class StartOneshot(msgspec.Struct, frozen=True, gc=False):
    """Owner: spawn the task; it ends with `OneshotDone`."""

    number: int
    oneshot: RunOneshotIngestion


class Stop(msgspec.Struct, frozen=True, gc=False):
    """Owner: stop the task (it may have ended by itself), then answer `Stopped`. `forget`: the
    object is dropped for good, what the outside keeps for it is to go as well."""

    number: int
    forget: bool


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Owner: a source without a task is dropped for good: what the outside keeps for it is to
    go; then answer `Stopped`. `number`: below 0, as no rendering has it."""

    number: int
    description: IngestionDescription


class RestartLater(msgspec.Struct, frozen=True, gc=False):
    """Owner: give `RestartDue` after the delay for so many failed attempts in a row (1: the
    first)."""

    number: int
    attempt: int
    retry: Retry

    def delay_ms(self, settings: Settings) -> int:
        """Return the delay: as the object wants it, else as the settings say."""
        retry = self.retry
        if retry.delay_ms is not None:
            settings = msgspec.structs.replace(settings, retry_delay_ms_min=retry.delay_ms)
        if retry.delay_ms_max is not None:
            settings = msgspec.structs.replace(settings, retry_delay_ms_max=retry.delay_ms_max)
        return settings.retry_delay_ms(self.attempt)


class AllowTaskCompaction(msgspec.Struct, frozen=True, gc=False):
    """Owner: external readers of that object need nothing below `frontier`."""

    number: int
    id: ObjectId
    frontier: Frontier


class AllowTaskWrites(msgspec.Struct, frozen=True, gc=False):
    """All tasks here may write from now on."""


class Configure(msgspec.Struct, frozen=True, gc=False):
    """The configuration of all tasks is now this (unset: as the settings say)."""

    configuration: UpdateConfiguration


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Owner: parts that were staged and that nobody will append."""

    batches: tuple[StagedBatch, ...]


class Reconciled(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: what ran was compared with what a new client wants: log it and count it."""

    nonce: Nonce
    kept: int
    run: int
    dropped: int
    skipped: int
    refused: tuple[Refusal, ...]


class Unfit(msgspec.Struct, frozen=True, gc=False):
    """Worker 0: an update was refused: log it and count it."""

    refusal: Refusal


Effect: TypeAlias = (
    Offer
    | Forward
    | SwitchClient
    | Respond
    | LookUp
    | CancelLookUp
    | StartIngestion
    | StartSink
    | StartOneshot
    | Stop
    | Forget
    | RestartLater
    | AllowTaskCompaction
    | AllowTaskWrites
    | Configure
    | Discard
    | Reconciled
    | Unfit
)
