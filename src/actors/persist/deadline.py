"""Blocking disk calls under a deadline.

A thread cannot be ended. So a call that is given up goes on, and may still take effect: such a
write is indeterminate. Its result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from actors.errors import StorageError
from actors.kernel import ActorClock
from actors.kernel.clock import CallOverdue

R = TypeVar("R")
DISK_TIMEOUT_MS: Final = 60_000
"""Default where no settings are given."""


def timeout_error(what: str, timeout_ms: int, *, determinate: bool) -> StorageError:
    """Return the error of a call that was given up."""
    late = "" if determinate else ", and may still do it"
    return StorageError(
        f"could not {what}: the disk did not answer within {timeout_ms} ms (disk_timeout_ms){late};"
        " look at the file system, then try again",
        determinate=determinate,
    )


async def run_with_timeout(
    clock: ActorClock, use: Callable[[], R], timeout_ms: int, what: str, *, determinate: bool
) -> R:
    """Call `use` in a thread. Raises what `use` raises, and `StorageError` at the deadline."""
    try:
        return await clock.run_blocking_within(timeout_ms, use)
    except CallOverdue:
        raise timeout_error(what, timeout_ms, determinate=determinate) from None
