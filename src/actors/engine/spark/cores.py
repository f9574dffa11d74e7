"""Cores for the service and for the engine, where `pin_cores` asks for their separation."""

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


# Cached: pinning changes what the system says of this process.
@functools.cache
def cores() -> CoreAssignment:
    """Return the cores: the first of this process's is the service's, all others are the engine's.

    Raises `BadSettings` where there are not two cores, or the system does not pin.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BadSettings("pin_cores = true: this system does not let a process choose its cores")
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise BadSettings(f"pin_cores = true needs two cores, and there is only {mine}")
    return CoreAssignment(frozenset(mine), frozenset(mine[:1]), frozenset(mine[1:]))


def pin_threads(numbers: frozenset[int]) -> None:
    """Pin every thread of this process to these cores. Threads made later inherit them."""
    tasks = Path("/proc/self/task")  # the system's call is for one thread, whatever its name says
    for thread in [int(each.name) for each in tasks.iterdir()] if tasks.is_dir() else [0]:
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, numbers)


def format_cores(numbers: frozenset[int]) -> str:
    """Return core numbers for the log: ``1, 2, 3``."""
    return ", ".join(map(str, sorted(numbers)))
