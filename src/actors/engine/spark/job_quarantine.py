"""Quarantine for jobs that ended the engine: they are not run again for a while.

A job is identified by its content: the same rows and texts, whoever submits it. So half of a step
that was too large is a different job. After the quarantine the job is run once more, alone. Each
kill doubles the time in quarantine, and one successful run ends it.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from typing import Final

import msgspec

from actors.model.plan.jobs import Job, PreparePlan, RehearseSteps, RunStep
from actors.runtime.errors import JobTooLarge
from actors.runtime.settings import Settings

KILLERS_MAX: Final = 256


class _QuarantinedJob(msgspec.Struct):
    # The text of the error; it names the job and the last end of the engine.
    text: str
    # Number of times that the job was given up; it never decreases.
    kills: int
    # When the job may run again, on the monotonic clock.
    until_ms: float


class JobQuarantine:
    """The jobs that are known to end the engine, and their dataflows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # The jobs in quarantine by content, the longest unseen first; at most `KILLERS_MAX`.
        self._killers: OrderedDict[bytes, _QuarantinedJob] = OrderedDict()
        # Dataflows whose last failed job ended the engine; a successful job clears its dataflow.
        self._dataflows: set[str] = set()

    def __len__(self) -> int:
        return len(self._killers)

    def find_refusal(self, job: Job, now_ms: float) -> JobTooLarge | None:
        """Return the error for a job that must not be run yet; None if it may run."""
        killer = self._killers.get(_content_of(job)) if self._killers else None
        if killer is None or now_ms >= killer.until_ms:
            return None
        seconds = math.ceil((killer.until_ms - now_ms) / 1000)
        return JobTooLarge(f"{killer.text}; it will not be run again for {seconds} s")

    def is_suspect(self, job: Job) -> bool:
        """Return whether a job must run alone and is given up at its first kill: the job, or
        another one of its dataflow, has ended the engine before."""
        if not self._killers:
            return False
        return _dataflow_of(job) in self._dataflows or _content_of(job) in self._killers

    def add(self, job: Job, text: str, now_ms: float) -> JobTooLarge:
        """Record that a job ended the engine, and return the error for it."""
        content = _content_of(job)
        # Inserted again at the end, so that the limit drops the jobs whose last kill is oldest.
        before = self._killers.pop(content, None)
        kills = 1 if before is None else before.kills + 1
        until_ms = now_ms + self._settings.engine_killer_retry_ms(kills)
        self._killers[content] = _QuarantinedJob(text, kills, until_ms)
        while len(self._killers) > KILLERS_MAX:
            self._killers.popitem(last=False)
        if dataflow := _dataflow_of(job):
            # The next job of the dataflow has different content, but may also end the engine.
            self._dataflows.add(dataflow)
        return JobTooLarge(text)

    def release(self, job: Job) -> None:
        """Record that a job ran to completion."""
        if self._killers:
            self._killers.pop(_content_of(job), None)
            self._dataflows.discard(_dataflow_of(job))

    def forget(self, dataflow: str) -> None:
        """Forget a dataflow that was dropped."""
        self._dataflows.discard(dataflow)


def _dataflow_of(job: Job) -> str:
    return job.dataflow if isinstance(job, RunStep | PreparePlan | RehearseSteps) else ""


def _content_of(job: Job) -> bytes:
    """Return a digest of a job without its id."""
    bare = msgspec.structs.replace(job, job_id="")
    return hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=16).digest()
