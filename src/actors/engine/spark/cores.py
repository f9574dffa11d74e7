"""Separate cores for the service and for the engine, if `pin_cores` is set."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from actors.runtime.errors import BadSettings


class CoreAssignment(NamedTuple):
    """The cores of the service and of the engine, by the system's numbers."""

    all: frozenset[int]
    service: frozenset[int]
    engine: frozenset[int]


# Cached, since pinning changes what the system reports for this process.
@functools.cache
def cores() -> CoreAssignment:
    """Return the cores: the first core of this process is for the service, all others are for the
    engine.

    Raises `BadSettings` if there are fewer than two cores, or the system does not support pinning.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BadSettings(
            "pin_cores = true is not supported: this system does not let a process choose its cores"
        )
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise BadSettings(f"pin_cores = true needs two cores, but only {mine} is available")
    return CoreAssignment(frozenset(mine), frozenset(mine[:1]), frozenset(mine[1:]))


def pin_threads(numbers: frozenset[int]) -> None:
    """Pin every thread of this process to these cores. Threads that start later inherit them."""
    # The system call is for a single thread, whatever its name says.
    tasks = Path("/proc/self/task")
    for thread in [int(each.name) for each in tasks.iterdir()] if tasks.is_dir() else [0]:
        with suppress(ProcessLookupError):  # The thread has just ended.
            os.sched_setaffinity(thread, numbers)


def format_cores(numbers: frozenset[int]) -> str:
    """Return core numbers as text for the log: ``1, 2, 3``."""
    return ", ".join(map(str, sorted(numbers)))
