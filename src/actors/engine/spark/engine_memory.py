"""Parses sizes of JVM heaps, and finds the memory of this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from actors.runtime.errors import BadSettings

_SIZE: Final = re.compile(r"(\d+)([kmgt]?)b?")
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the memory limit of a container, for cgroups version 2 and 1."""


def heap_bytes(memory: str, name: str = "spark_driver_memory") -> int:
    """Return the size in bytes of a heap in a JVM's notation: ``512m``, ``1g``; without a unit,
    MiB. Raises `BadSettings`, with the `name` of the setting, for any other text.

    >>> heap_bytes("512m") == 512 << 20
    True
    """
    found = _SIZE.fullmatch(memory.strip().lower())
    if found is None:
        raise BadSettings(f"invalid {name} {memory!r}: expected a form like 512m or 1g")
    units = {"": 20, "k": 10, "m": 20, "g": 30, "t": 40}
    return int(found[1]) << units[found[2]]


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or of the container in which the process runs."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        # If there is no such file, or it says "max", there is no limit.
        with suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return min(found)
