"""Cores for the event loop and for the engine, where `pin_cores` asks for their separation."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from actors.errors import BadSettings


class Cores(NamedTuple):
    """Which cores are whose, by the system's numbers."""

    all: frozenset[int]
    loop: frozenset[int]
    engine: frozenset[int]


@functools.cache
def cores() -> Cores:
    """The first of this process's cores is the loop's, all others are the engine's. As the
    process was when this was first asked: pinning itself changes what the system says.

    Raises `BadSettings` where there are not two cores, or the system does not pin.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BadSettings("pin_cores = true: this system does not let a process choose its cores")
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise BadSettings(f"pin_cores = true needs two cores, and there is only {mine}")
    return Cores(frozenset(mine), frozenset(mine[:1]), frozenset(mine[1:]))


def shown(numbers: frozenset[int]) -> str:
    """For the log: ``1, 2, 3``."""
    return ", ".join(map(str, sorted(numbers)))
