"""Supervision policies: the consequence of an actor's crash."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.errors import PenstockError


class ActorCrashed(PenstockError):
    """An actor failed by its own fault; the text has the types of its last messages."""


class CrashPolicy(msgspec.Struct, frozen=True):
    """The consequence of a crash: ``escalate``, ``stop`` or ``restart``."""

    kind: str
    restarts_max: int = 0
    within_ms: int = 0
    delay_ms: int = 0


ESCALATE: Final = CrashPolicy("escalate")
STOP: Final = CrashPolicy("stop")


def restart(restarts_max: int = 5, within_ms: int = 60_000, delay_ms: int = 50) -> CrashPolicy:
    """Start afresh after `delay_ms` (doubling), at most `restarts_max` times per `within_ms`."""
    return CrashPolicy("restart", restarts_max, within_ms, delay_ms)
